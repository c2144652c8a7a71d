"""An adapter in the trainer: what is trained, what is sent, what is saved, and PEFT's files.

About 9 CPU seconds, and 4 of slow tests.
"""

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from safetensors.numpy import load_file, save_file

from scalerl_jax.learner.checkpoint import Checkpoints
from scalerl_jax.learner.digests import fingerprint
from scalerl_jax.learner.memory_estimate import needs_of
from scalerl_jax.learner.packing import plain
from scalerl_jax.learner.trainer import Layout, Trainer
from scalerl_jax.model import Precision, forward, token_logprobs
from scalerl_jax.model.hf import to_hf
from scalerl_jax.model.lora import Lora, LowRank, read_adapter, write_adapter
from tests.learner.segments import make_segments
from tests.support.models import toy_decoder
from tests.support.params import params_of
from tests.support.trainers import trainer_of, update

DECODER = toy_decoder(family="qwen3")
MOE = toy_decoder(family="qwen3_moe")
LLAMA4 = toy_decoder(family="llama4_text")
LAYOUT = Layout(seq_len=48, rows=2, logprob_chunk=16)
SEGMENTS = make_segments((30, 17, 9, 9, 21), vocabulary=DECODER.vocab_size)
BFLOAT16 = Precision(sync="bfloat16")


def lora(rank: int = 3, targets: str = "all-linear,lm_head,embed_tokens", folder: str = "", decoder: Any = DECODER):
    return Lora.of(decoder, rank=rank, alpha=6.0, targets=targets, folder=folder, seed=0)


def begin(dtype: Any, seed: int = 0) -> Any:
    return jax.tree.map(lambda p: p.astype(dtype), params_of(DECODER, seed=seed))


def adapted(layout: Layout = LAYOUT, **arguments: Any) -> Trainer:
    return trainer_of(DECODER, layout, precision=BFLOAT16, lora=lora(**arguments), epsilon=1e-2)


def restored(trainer: Trainer, folder: pathlib.Path, seed: int = 0) -> Checkpoints:
    checkpoints = Checkpoints(str(folder), keep=1)
    trainer.restore(checkpoints, lambda dtype: begin(dtype, seed))
    return checkpoints


def test_the_first_policy_is_the_frozen_one_and_a_step_trains_the_adapter_alone(tmp_path: pathlib.Path) -> None:
    trainer = adapted(Layout(seq_len=48, rows=2, logprob_chunk=16, delta_share=0.5))
    restored(trainer, tmp_path).close()
    base = {name: np.asarray(value) for name, value in to_hf(begin("float32"), DECODER, "bfloat16").items()}
    first = trainer.version(0).tensors()
    assert all(np.array_equal(first[name], base[name]) for name in base)
    update(trainer, SEGMENTS)
    version = trainer.version(1)
    assert version.changes is not None
    second = version.tensors()
    moved = {name for name in base if not np.array_equal(second[name], base[name])}
    assert moved == {name for name in base if "norm" not in name}
    assert version.changes().tensors.keys() == base.keys()
    assert {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(trainer.state["params"])} == {"a", "b"}

    # Generators sample with exactly the weights that the trainer computes with.
    whole = trainer_of(DECODER, LAYOUT, precision=BFLOAT16)
    whole.start(jax.tree.map(lambda p: p, params_of(DECODER)))
    assert all(np.array_equal(trainer.sync_weights()[name], second[name]) for name in base)
    whole.state["params"] = _tree(second)
    for got, wanted in zip(*(one.score([plain(s.tokens) for s in SEGMENTS]) for one in (trainer, whole)), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-6)


def _tree(tensors: Any) -> Any:
    from tests.support.params import from_hf

    return from_hf({name: value.astype(np.float32) for name, value in tensors.items()}, DECODER)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama4_text"])
def test_no_gradient_has_the_shape_of_a_weight(family: str) -> None:
    """Whatever has one is a product over the rank: the merged weight."""
    decoder, rank = toy_decoder(family=family), 3
    own = lora(rank=rank, decoder=decoder)
    tokens = np.zeros((1, 5), np.int32)  # no weight has a dimension of 5, nor of its pairs with experts

    def loss(adapter: Any) -> jax.Array:
        params = own.join(adapter, frozen)
        hidden = forward(params, decoder, tokens, tokens, tokens + 1)
        return jnp.sum(token_logprobs(params, decoder, hidden, tokens))

    frozen, adapter = params_of(decoder), own.new()
    whole = jax.tree.leaves(own.join(adapter, frozen), is_leaf=lambda node: isinstance(node, LowRank))
    weights = {weight.shape[-2:] for weight in whole if isinstance(weight, LowRank)}
    over = [
        one.invars[0].aval.shape[one.params["dimension_numbers"][0][0][0]]
        for one in equations(jax.make_jaxpr(jax.grad(loss))(adapter).jaxpr)
        if one.primitive is jax.lax.dot_general_p and one.outvars[0].aval.shape[-2:] in weights
    ]
    assert over and set(over) == {rank}


def equations(jaxpr: Any) -> Iterator[Any]:
    for one in jaxpr.eqns:
        yield one
        for inner in jaxprs_in_params(one.params):
            yield from equations(inner)


def test_memory_is_that_of_the_adapter_and_one_rounded_policy() -> None:
    trainer, whole = adapted(rank=1, targets="q_proj"), trainer_of(DECODER, LAYOUT, precision=BFLOAT16)
    own, all_of_it = needs_of(trainer), needs_of(whole)
    parameters = sum(struct.size for struct in jax.tree.leaves(trainer.abstract_policy))
    trained = sum(struct.size for struct in jax.tree.leaves(trainer.abstract_state["params"]))
    assert own.gradient == 4 * trained and trained < parameters / 50
    assert own.state == 2 * parameters + 12 * trained + 4 * 2 + 0 * all_of_it.state
    assert own.sent == all_of_it.sent == 2 * parameters


@pytest.mark.slow
def test_a_run_goes_on_with_the_frozen_policy_and_refuses_another(tmp_path: pathlib.Path) -> None:
    one, other = adapted(), adapted()
    checkpoints = restored(one, tmp_path)
    update(one, SEGMENTS)
    one.save(checkpoints, 1, manifest={"a": 1}, arrays={"n": np.zeros(1)})
    checkpoints.close()
    restored(other, tmp_path).close()
    for trainer in (one, other):
        update(trainer, SEGMENTS)
    for got, wanted in zip(*map(jax.tree.leaves, (other.state, one.state)), strict=True):
        assert np.array_equal(got, wanted)
    with pytest.raises(ValueError, match=r"^the checkpoint's adapter is of another policy than config.model.path$"):
        restored(adapted(), tmp_path, seed=1)


@pytest.mark.slow
def test_the_reference_of_a_new_adapter_is_the_frozen_policy(tmp_path: pathlib.Path) -> None:
    trainer = trainer_of(DECODER, LAYOUT, precision=BFLOAT16, lora=lora(), reference_kl=0.3)
    restored(trainer, tmp_path).close()
    assert trainer._reference is trainer.frozen and needs_of(trainer).reference == 0
    sums = trainer.forward_backward(SEGMENTS).sums
    assert float(sums["reference_kl"]) == 0.0
    update(trainer, SEGMENTS)
    assert float(trainer.forward_backward(SEGMENTS).sums["reference_kl"]) > 0


def test_an_adapter_is_written_as_peft_has_it_and_read_again(tmp_path: pathlib.Path) -> None:
    for decoder, targets in (
        (DECODER, "all-linear,lm_head,embed_tokens"),
        (MOE, "all-linear,mlp.gate"),
        (LLAMA4, "all-linear,router"),
        (LLAMA4, "experts.gate_up_proj"),
    ):
        own = lora(decoder=decoder, targets=targets)
        rng = np.random.default_rng(0)
        adapter = jax.tree.map(lambda p, rng=rng: rng.normal(size=p.shape).astype(np.float32), own.adapter(None))
        out = str(tmp_path / f"{decoder.family}-{len(own.leaves)}")
        write_adapter(out, adapter, own, model="base", base="abc")
        found = read_adapter(out, own, base="abc")
        assert all(np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (found, adapter)), strict=True))
        with pytest.raises(ValueError, match=f"^config.lora.adapter={out} is of another policy than config.model.path"):
            read_adapter(out, own, base="another")
        with pytest.raises(ValueError, match="exists already"):
            write_adapter(out, adapter, own, model="base", base="abc")


def test_experts_in_one_parameter_are_read_if_gate_and_up_are_apart_in_it(tmp_path: pathlib.Path) -> None:
    own, out = lora(decoder=LLAMA4, targets="all-linear"), tmp_path / "adapter"
    adapter = jax.tree.map(lambda p: np.ones(p.shape, np.float32), own.adapter(None))
    write_adapter(str(out), adapter, own, model="base", base="abc")
    path = str(out / "adapter_model.safetensors")
    tensors = load_file(path)
    name = min(name for name in tensors if name.endswith("experts.base_layer.lora_A.weight"))
    assert np.count_nonzero(tensors[name]) == tensors[name].size / 2  # there it has gate's and up's B
    tensors[name][:] = 1
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"experts.base_layer.lora_A.weight in \S+ adapts .* gate and up together$"):
        read_adapter(str(out), own)
    write_adapter(str(out), adapter, own, model="base", base="abc", replace=True)
    others = "self_attn.q_proj,k_proj,v_proj,o_proj,shared_expert.gate_proj,up_proj,shared_expert.down_proj"
    with pytest.raises(ValueError, match=r"^config.lora.targets: \S+base_layer.lora_A\S+ in \S+ adapts more than them"):
        read_adapter(str(out), lora(decoder=LLAMA4, targets=f"{others},experts.down_proj"))


def test_a_folder_that_names_no_policy_is_believed_with_a_line(tmp_path: pathlib.Path, caplog: Any) -> None:
    own, out = lora(targets="q_proj"), tmp_path / "adapter"
    write_adapter(str(out), jax.device_get(own.new()), own, model="models/base", base="abc")
    path = str(out / "adapter_model.safetensors")
    save_file(load_file(path), path)  # as PEFT writes it
    read_adapter(str(out), own, base="another")
    assert caplog.messages == [
        f"config.lora.adapter={out}: does not prove for which policy it was made; it names models/base"
    ]


def change(**values: Any) -> Callable[[pathlib.Path], None]:
    def made(folder: pathlib.Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return made


def cut(folder: pathlib.Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


MISTAKES: dict[str, tuple[Callable[[pathlib.Path], None], dict[str, Any], str]] = {
    "rank": (change(), {"rank": 2}, r"adapter_config.json: r is 3, config.lora.rank=2$"),
    "alpha": (change(lora_alpha=8), {}, r"adapter_config.json: lora_alpha is 8, config.lora.alpha=6$"),
    "kind": (change(use_dora=True), {}, r"adapter_config.json: use_dora is True, not False$"),
    "base": (change(init_lora_weights="pissa_niter_4"), {}, r"init_lora_weights is 'pissa_niter_4', so it belongs to"),
    "tokens": (change(alora_invocation_tokens=[1]), {}, r"alora_invocation_tokens is \[1\], not None$"),
    "fewer": (change(), {"targets": "q_proj"}, r"config.lora.targets: .*safetensors has base_model\S+ too$"),
    "more": (change(), {"targets": "q_proj,up_proj,v_proj"}, r"config.lora.targets: .* has no base_model.*up_proj"),
    "cut": (cut, {}, r"^config.lora.adapter=\S+: .*"),
    "gone": (lambda folder: (folder / "adapter_config.json").unlink(), {}, r"adapter=\S+: No such file or directory$"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_wrong_with_a_folder_is_one_line(mistake: str, tmp_path: pathlib.Path) -> None:
    broken, asked, line = MISTAKES[mistake]
    own, out = lora(targets="q_proj,v_proj"), tmp_path / "adapter"
    write_adapter(str(out), jax.device_get(own.new()), own, model="base", base="")
    broken(out)
    with pytest.raises(ValueError, match=line) as raised:
        read_adapter(str(out), lora(**({"targets": "q_proj,v_proj"} | asked)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"targets": "q_proj,nothing"}, r"^config.lora.targets: 'nothing' is no matrix of this model; choose from \["),
        ({"targets": ""}, "^config.lora.targets: '' is no matrix"),
        ({"targets": "norm"}, "'norm' is no matrix"),
        ({"rank": 33, "targets": "k_proj"}, r"^config.lora.rank=33: self_attn.k_proj has a dimension of \d+$"),
        (
            {"targets": "embed_tokens", "decoder": toy_decoder(tied_embeddings=True)},
            "the model's head is its embedding",
        ),
    ],
)
def test_what_cannot_have_an_adapter_is_refused(asked: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        lora(**asked)


def test_targets_are_modules_or_their_ends() -> None:
    assert lora(targets="q_proj, mlp.down_proj").leaves == ("query", "down")
    assert lora(targets="all-linear", decoder=MOE).leaves[-1] == "expert_down"
    assert "router" not in lora(targets="all-linear", decoder=MOE).leaves
    assert lora(targets="gate", decoder=MOE).leaves == ("router",)


def test_a_fingerprint_is_of_values_and_names() -> None:
    tree = {"a": np.arange(6, dtype=ml_dtypes.bfloat16), "b": {"c": np.ones(2, np.float32)}}
    found = {
        fingerprint(tree),
        fingerprint({**tree, "a": tree["a"][::-1]}),
        fingerprint({"d": tree["a"], "b": tree["b"]}),
    }
    assert len(found) == 3 and fingerprint(jax.tree.map(jax.numpy.asarray, tree)) in found
