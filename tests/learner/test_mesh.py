"""The same batch gives the same gradient on every mesh, however it is cut and packed; and the state is really cut.

A subprocess with 8 virtual CPU devices computes everything (mesh_program.py), and another one what the slow tests
compare.
"""

import json
import os

import numpy as np
import pytest

from scalerl_jax.model.tensor_layout import hf_tensors
from scalerl_jax.objective.losses import DIVERGENCES
from tests.learner import mesh_program
from tests.learner.mesh_program import DECODER, LENGTHS, MESHES, MICRO_BATCHES, ORDERS
from tests.support.processes import run_command

FLOAT32_TOLERANCE = 1e-5  # norm of the difference over norm, of the whole gradient and of each leaf
# The same in bf16. However rows are cut, packed and summed, a row is computed the same way, and all sums over rows are
# of float32 cotangents: nothing is lost. Cut along heads and columns, the output of each block is itself a sum of
# parts that were rounded to bf16; what that costs is of the size of bf16's own distance from float32, 3e-2 here.
BFLOAT16_TOLERANCE = {"one": 1e-5, "fsdp8": 1e-5, "fsdp4-tensor2": 4e-2}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(arrays by name, facts by name)"""
    return run(str(tmp_path_factory.mktemp("mesh") / "out"))


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Likewise, of the losses that have more than log-probs."""
    return run(str(tmp_path_factory.mktemp("mesh") / "out"), "others")


def run(out: str, *others: str, program: str = "mesh_program"):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = run_command(f"tests.learner.{program}", out, *others, environment=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    with open(f"{out}.json") as file:
        return dict(np.load(f"{out}.npz")), json.load(file)


def tree(results, name: str) -> dict[str, np.ndarray]:
    """The leaves saved under `name`, by path."""
    found = {key.removeprefix(name): value for key, value in results[0].items() if key.startswith(f"{name}[")}
    assert found, name
    return found


def off(got: np.ndarray, wanted: np.ndarray) -> float:
    """Norm of the difference over the norm of `wanted`."""
    wanted = np.asarray(wanted, np.float64)
    return float(np.linalg.norm((np.asarray(got, np.float64) - wanted).ravel()) / np.linalg.norm(wanted.ravel()))


def compare(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float) -> None:
    """Each leaf by itself, and all of them together."""
    assert got.keys() == wanted.keys()
    for path in wanted:
        assert got[path].shape == wanted[path].shape and got[path].dtype == wanted[path].dtype
        if path.startswith("['compensation']"):  # what rounding has left of scales of about 1, which is of any size
            assert max(np.abs(side[path]).max() for side in (got, wanted)) <= 2**-23
        else:
            assert off(got[path], wanted[path]) < tolerance, path
    compared = [path for path in wanted if not path.startswith("['compensation']")]
    flat = (np.concatenate([side[path].ravel() for path in compared]) for side in (got, wanted))
    assert off(*flat) < tolerance


# ---- The gradient --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", range(ORDERS))
@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize("mesh", MESHES)
def test_the_gradient_is_the_same(results, mesh, micro_batches, order):
    """As on one device with each segment alone in a micro-batch of its own."""
    alone = [tree(results, f"alone/{i}") for i in range(len(LENGTHS))]
    wanted = {path: np.sum([part[path] for part in alone], axis=0) for path in alone[0]}
    compare(tree(results, f"gradient/{mesh}/{micro_batches}/{order}"), wanted, FLOAT32_TOLERANCE)


def test_the_packing_orders_are_different():
    """Else nothing was shown: other neighbours in the rows, and other micro-batches."""
    segments = mesh_program.make_segments(LENGTHS, vocabulary=DECODER.vocab_size)
    for micro_batches in MICRO_BATCHES:
        first, second = (mesh_program.arranged(segments, micro_batches, order) for order in range(ORDERS))
        assert len(first) == len(second) == micro_batches
        for one, other in zip(first, second, strict=True):
            assert (one.tokens != other.tokens).any(axis=1).sum() >= 2
    assert max(batch.segment_ids.max() for batch in first) > 1


@pytest.mark.parametrize("mesh", MESHES)
def test_the_statistics_are_the_same(results, mesh):
    wanted = results[1]["gradient/one/1/0"]
    assert wanted["tokens"] > 100 and wanted["clipped"] > 10
    for micro_batches in MICRO_BATCHES:
        for order in range(ORDERS):
            got = results[1][f"gradient/{mesh}/{micro_batches}/{order}"]
            assert got.keys() == wanted.keys()
            for name, value in wanted.items():
                assert got[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("mesh", ["fsdp4-tensor2", "fsdp2-context2-tensor2"])
@pytest.mark.parametrize("what", mesh_program.TOGETHER)
def test_what_tokens_of_a_completion_share_is_the_same(results, what, mesh):
    got, wanted = tree(results, f"{what}/{mesh}"), tree(results, f"{what}/one")
    assert (wanted["[1]"] != 0).sum() > 50
    for path in wanted:
        np.testing.assert_allclose(got[path], wanted[path], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_reference_policy_and_the_entropy_are_the_same(others):
    mesh = "fsdp2-context2-tensor2"
    compare(tree(others, f"reference/{mesh}"), tree(others, "reference/one"), FLOAT32_TOLERANCE)
    got, wanted = (others[1][f"reference/{name}"] for name in (mesh, "one"))
    assert wanted["reference_kl"] > 1
    for name, value in wanted.items():
        assert got[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp2-tensor4", "fsdp2-context2-tensor2"])
@pytest.mark.parametrize("form", DIVERGENCES)
def test_the_divergence_from_a_teacher_is_the_same(others, form, mesh):
    compare(tree(others, f"{form}/{mesh}"), tree(others, f"{form}/one"), FLOAT32_TOLERANCE)
    got, wanted = (others[1][f"{form}/{name}"] for name in (mesh, "one"))
    assert wanted["compared"] > 100 and wanted["teacher_divergence"] > 1
    for name, value in wanted.items():
        assert got[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("mesh", BFLOAT16_TOLERANCE)
def test_the_gradient_in_bfloat16(results, mesh, micro_batches):
    wanted = tree(results, "bfloat16/one/1")
    compare(tree(results, f"bfloat16/{mesh}/{micro_batches}"), wanted, BFLOAT16_TOLERANCE[mesh])


@pytest.mark.parametrize("mesh", BFLOAT16_TOLERANCE)
def test_cotangents_of_weights_are_float32_in_bfloat16(results, mesh):
    """Also after they were summed over micro-batches and devices: values that bf16 cannot hold are everywhere."""
    for micro_batches in (1, 4):
        for path, leaf in tree(results, f"bfloat16/{mesh}/{micro_batches}").items():
            assert leaf.dtype == np.float32
            used = leaf[leaf != 0]
            representable = (used.view(np.uint32) & 0xFFFF) == 0
            assert representable.mean() < (0.9 if "embed" in path else 0.1), path


def test_bfloat16_is_another_computation(results):
    """Else its tolerance says nothing."""
    got, wanted = tree(results, "bfloat16/one/1"), tree(results, "gradient/one/1/0")
    assert max(off(got[path], wanted[path]) for path in wanted) > 1e-3


# ---- The update ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("mesh", MESHES)
def test_updates_give_the_same_state(results, mesh, updates):
    """Parameters, both moments and the counters; the gradient's norm is cut in each update."""
    wanted = tree(results, f"state{updates}/one")
    compare(tree(results, f"state{updates}/{mesh}"), wanted, FLOAT32_TOLERANCE)
    assert wanted["['step']"] == updates
    norm = results[1]["update/one"]["gradient_norm"]
    assert norm > 0.05
    assert results[1][f"update/{mesh}"]["gradient_norm"] == pytest.approx(norm, rel=1e-5)


def test_the_updates_moved_every_parameter(results):
    first, second = tree(results, "state1/one"), tree(results, "state2/one")
    for path in first:
        if path.startswith("['params']"):
            assert off(second[path], first[path]) > 10 * FLOAT32_TOLERANCE, path


def test_a_checkpoint_goes_on_on_its_own_mesh_to_the_bit(results):
    for path, value in tree(results, "restored/fsdp4-tensor2").items():
        np.testing.assert_array_equal(value, tree(results, "state2/fsdp4-tensor2")[path])


def test_a_checkpoint_goes_on_on_another_mesh(results):
    compare(tree(results, "restored/fsdp8"), tree(results, "state2/one"), FLOAT32_TOLERANCE)


def test_what_leaves_the_mesh_is_whole(results):
    mesh = "replica2-fsdp2-tensor2"
    params, wire = tree(results, f"state2/{mesh}"), tree(results, "wire")
    assert {path[2:-2]: value.shape for path, value in wire.items()} == hf_tensors(DECODER)
    np.testing.assert_array_equal(wire["['model.embed_tokens.weight']"], params["['params']['embed']"])
    query = params["['params']['layers']['query']"]
    np.testing.assert_array_equal(wire["['model.layers.1.self_attn.q_proj.weight']"], query[1].T)
    for path, scored in tree(results, "score/one").items():
        np.testing.assert_allclose(tree(results, f"score/{mesh}")[path], scored, atol=2e-5)


# ---- Where it lies -------------------------------------------------------------------------------------------------

# leaf -> its shape on one device of each mesh; the whole shapes are in SHAPES
N, D, V, M = DECODER.layers, DECODER.hidden_size, DECODER.vocab_size, DECODER.intermediate_size
Q, K = DECODER.heads * DECODER.head_dim, DECODER.kv_heads * DECODER.head_dim
SHARDS = {
    "one": {"embed": [V, D], "query": [N, D, Q], "key": [N, D, K], "down": [N, M, D], "mlp_norm": [N, D]},
    "fsdp8": {
        "embed": [V, D // 8], "query": [N, D // 8, Q], "key": [N, D // 8, K], "down": [N, M, D // 8],
        "mlp_norm": [N, D],
    },
    "fsdp4-tensor2": {
        "embed": [V // 2, D // 4], "query": [N, D // 4, Q // 2], "key": [N, D // 4, K // 2],
        "down": [N, M // 2, D // 4], "mlp_norm": [N, D],
    },
    "fsdp2-tensor4": {
        "embed": [V // 4, D // 2], "query": [N, D // 2, Q // 4], "key": [N, D // 2, K // 4],
        "down": [N, M // 4, D // 2], "mlp_norm": [N, D],
    },
    "replica2-fsdp2-tensor2": {
        "embed": [V // 2, D // 2], "query": [N, D // 2, Q // 2], "key": [N, D // 2, K // 2],
        "down": [N, M // 2, D // 2], "mlp_norm": [N, D],
    },
}  # fmt: skip
SHARDS["fsdp4-expert2"] = SHARDS["fsdp8"]  # without experts it is one more fsdp
SHARDS["fsdp2-context2-tensor2"] = SHARDS["fsdp4-tensor2"]  # weights are cut along context as along fsdp
CUTS = {
    "fsdp2-context2-tensor2": 8,
    "one": 1,
    "fsdp8": 8,
    "fsdp4-tensor2": 8,
    "fsdp2-tensor4": 8,
    "replica2-fsdp2-tensor2": 4,
    "fsdp4-expert2": 8,
}


def on_a_device(results, name: str) -> dict[str, tuple[list[int], str]]:
    """Path -> (shape of each device's part, dtype)."""
    found = {key.removeprefix(name): tuple(value) for key, value in results[1].items() if key.startswith(f"{name}[")}
    assert found, name
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_gradients_and_moments_are_cut(results, mesh):
    """Every copy of every weight, and so the memory of a device; only the norms' scales are whole everywhere."""
    state = on_a_device(results, f"shards/{mesh}/state")
    copies = {
        "parameters": {path: v for path, v in state.items() if path.startswith("['params']")},
        "first moments": {path: v for path, v in state.items() if ".mu[" in path},
        "second moments": {path: v for path, v in state.items() if ".nu[" in path},
        "gradients": on_a_device(results, f"shards/{mesh}/gradient"),
    }
    whole = tree(results, "gradient/one/1/0")
    for what, leaves in copies.items():
        assert len(leaves) == len(whole), what
        elements = 0
        for path, (shape, dtype) in leaves.items():
            assert dtype == "float32"
            leaf = path.split("'")[-2]
            if leaf in SHARDS[mesh]:
                assert shape == SHARDS[mesh][leaf], (what, path)
            elements += 0 if "norm" in leaf else np.prod(shape)
        total = sum(value.size for path, value in whole.items() if "norm" not in path)
        assert elements * CUTS[mesh] == total, what


def test_fresh_parameters_are_made_where_they_lie(results):
    """And they are what one device makes of the same key."""
    state = on_a_device(results, "shards/fsdp4-tensor2/state")
    expected = {path.removeprefix("['params']"): part for path, part in state.items() if path.startswith("['params']")}
    assert on_a_device(results, "shards/fresh") == expected
    for path, value in tree(results, "fresh").items():
        wanted = np.ones_like(value) if "norm" in path else tree(results, "start")[path]
        np.testing.assert_allclose(value, wanted, rtol=1e-6, err_msg=path)
