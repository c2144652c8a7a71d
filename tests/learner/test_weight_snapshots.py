"""What changed, found on the device per layer and shard, against a plain NumPy comparison of the whole tensors."""

import jax
import ml_dtypes
import numpy as np
import pytest

from scalerl_jax.contract.weight_delta import digest
from scalerl_jax.learner.weight_snapshots import WeightSnapshots
from scalerl_jax.model import init_params
from scalerl_jax.model.sharding import make_mesh
from scalerl_jax.model.tensor_layout import hf_tensors
from tests.learner.wire_program import DECODER, MESHES, VERSIONS, versions
from tests.support.params import from_hf
from tests.support.processes import run_command

QUICK = ("one", "fsdp4-tensor2")
REST = tuple(name for name in MESHES if name not in QUICK)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, np.ndarray]:
    return run(tmp_path_factory, *QUICK)


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> dict[str, np.ndarray]:
    return run(tmp_path_factory, *REST)


def run(tmp_path_factory, *meshes: str) -> dict[str, np.ndarray]:
    out = tmp_path_factory.mktemp("wire") / "results"
    run_command("tests.learner.wire_program", out, *meshes).check_returncode()
    with np.load(f"{out}.npz") as file:
        return {name: file[name] for name in file.files}


def plain() -> list[dict[str, np.ndarray]]:
    """The bits of every version, by Hugging Face name, without a device: rounded as ml_dtypes does it."""
    out = []
    for tree in versions():
        tensors = {}
        for name, shape in hf_tensors(DECODER).items():
            leaf = _leaf(tree, name)
            tensors[name] = leaf.astype(ml_dtypes.bfloat16).view(np.uint16)
            assert tensors[name].shape == shape
        out.append(tensors)
    return out


def _leaf(tree, name: str) -> np.ndarray:
    """By marking: the tensor's numbers are put in under its name, and found in the tree that from_hf makes."""
    count, marked, start = 0, {}, 0
    for other, shape in hf_tensors(DECODER).items():
        size = int(np.prod(shape))
        marked[other] = np.arange(count, count + size, dtype=np.float64).reshape(shape)
        start = count if other == name else start
        count += size
    numbers = np.zeros(count, np.float32)
    placed = from_hf(marked, DECODER, np.float64)
    for key in placed:
        pairs = placed[key].items() if key == "layers" else [(key, placed[key])]
        for leaf, places in pairs:
            numbers[places.astype(int)] = (tree["layers"] if key == "layers" else tree)[leaf]
    shape = hf_tensors(DECODER)[name]
    return numbers[start : start + int(np.prod(shape))].reshape(shape)


@pytest.mark.parametrize("mesh", QUICK)
def test_what_changed_is_what_numpy_finds(results, mesh: str) -> None:
    check(results, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", REST)
def test_what_changed_on_other_meshes(others, mesh: str) -> None:
    check(others, mesh)


def check(results: dict[str, np.ndarray], mesh: str) -> None:
    sparse = dense = changed = 0
    before = None
    for step, tensors in enumerate(plain(), start=7):
        key = f"{mesh}/{step}"
        assert results[f"{key}/base"] == (-1 if before is None else step - 1)
        for name, bits in tensors.items():
            np.testing.assert_array_equal(results[f"{key}/whole/{name}"], bits)
            assert results[f"{key}/digest/{name}"] == digest(bits)
            if before is None:
                assert f"{key}/positions/{name}" not in results and f"{key}/dense/{name}" not in results
                continue
            if f"{key}/dense/{name}" in results:
                dense += 1
                np.testing.assert_array_equal(results[f"{key}/dense/{name}"], bits)
                continue
            sparse += 1
            positions = np.flatnonzero(bits != before[name])
            changed += len(positions)
            np.testing.assert_array_equal(results[f"{key}/positions/{name}"], positions)
            np.testing.assert_array_equal(results[f"{key}/values/{name}"], bits.reshape(-1)[positions])
        before = tensors
    # Only what was drawn again altogether is dense, and of that not what is below the smallest cap.
    names = len(hf_tensors(DECODER))
    assert names // 4 < dense <= names
    assert sparse == (len(VERSIONS) - 1) * names - dense and changed > 1000


def test_each_element_comes_to_the_host_once(monkeypatch) -> None:
    """A stack of layers that was brought whole for each of its tensors would be as many times as much."""
    mesh = make_mesh(fsdp=1, devices=jax.devices()[:1])
    version = WeightSnapshots(DECODER, mesh, share=1 / 16).snapshot(init_params(DECODER, jax.random.key(0), mesh), 0)
    brought, asarray = [], np.asarray

    def look(array, *arguments, **settings):
        if isinstance(array, jax.Array):
            brought.append(array.size)
        return asarray(array, *arguments, **settings)

    monkeypatch.setattr(np, "asarray", look)
    elements = sum(tensor.size for tensor in version.tensors().values())
    assert sum(brought) == elements
