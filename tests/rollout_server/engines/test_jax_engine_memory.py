"""What a server says that it will take is what its arrays take, and what it advises fits."""

import dataclasses
import re

import jax
import pytest

from rollout_server.engines.engine import EngineOptions
from rollout_server.engines.engine_info import EngineMemory
from rollout_server.engines.jax import decode, engine
from rollout_server.engines.jax.slots import SlotPool
from rollout_server.engines.jax.weights import abstract_weights, decode_precision, decode_weights
from scalerl_jax.model import DecoderConfig, Precision
from scalerl_jax.system.memory import GIB
from tests.support.models import random_tensors, toy_decoder

MEMORY = EngineMemory(
    slots=64, maximum_tokens=4096, token=2**17, weights=GIB, host_copy=GIB, working=GIB // 2, copies=0.5
)


def options(*, slots: int, maximum_tokens: int) -> EngineOptions:
    return EngineOptions(
        "", slots=slots, queue=0, maximum_tokens=maximum_tokens, compute_dtype="bfloat16", sync_dtype="bfloat16"
    )


def size(tree: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("head", ["default", "highest"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_booked_is_what_the_arrays_take(family: str, head: str, dtype: str) -> None:
    config, precision = toy_decoder(family=family), Precision(compute=dtype, sync="bfloat16", head=head)
    like, computing = abstract_weights(config, precision), decode_precision(precision, "cpu")
    held = decode_weights(random_tensors(config, 0), config, precision)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), held) == jax.tree.map(lambda x: (x.shape, x.dtype), like)
    estimate = engine.of_model(options(slots=3, maximum_tokens=96), config, computing, like)
    assert estimate.weights == size(held)
    state = decode.empty_state(config, computing, slots=3, length=96)
    assert estimate.cache == size((state.keys, state.values))


def test_programs_compiled_beforehand_are_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config, precision = toy_decoder(), Precision()
    pool = SlotPool(config, decode_precision(precision, "cpu"), slots=2, maximum=64, steps=2)
    assert pool.compile(abstract_weights(config, precision)) > 0
    weights = decode_weights(random_tensors(config, 0), config, precision)
    monkeypatch.setattr(decode, "decode_chunk", None)  # compiling again would need it
    monkeypatch.setattr(decode, "prefill", None)
    pool.warm_up(weights)
    pool.close()


@pytest.mark.parametrize("device", [None, 20 * GIB])
def test_what_is_advised_fits(device: int | None) -> None:
    there = {"device": device, "host": 30 * GIB, "process": GIB // 2}
    with pytest.raises(ValueError, match=r"^memory: .* GiB .*--slots=\d+ or --maximum_tokens=\d+ would fit$") as error:
        MEMORY.check(**there)
    assert "\n" not in str(error.value)
    slots, length = map(int, re.findall(r"--\w+=(\d+)", str(error.value)))
    for wanted in ({"slots": slots}, {"maximum_tokens": length}):
        assert dataclasses.replace(MEMORY, **wanted).check(**there).startswith("memory: ")
    for wanted in ({"slots": slots * 5 // 4}, {"maximum_tokens": length * 5 // 4}):
        with pytest.raises(ValueError, match="would fit"):
            dataclasses.replace(MEMORY, **wanted).check(**there)


def test_a_model_that_does_not_fit_at_all() -> None:
    with pytest.raises(ValueError, match="not even one slot"):
        MEMORY.check(device=2 * GIB, host=30 * GIB, process=0)
    fits = dataclasses.replace(MEMORY, slots=1)
    with pytest.raises(ValueError, match="the host has too little"):
        fits.check(device=80 * GIB, host=GIB, process=GIB // 2)
    # The early check, when the working memory is not known, refuses no more than the one that knows it.
    assert dataclasses.replace(fits, working=0).check(device=4 * GIB, host=8 * GIB, process=0)


def test_a_cache_of_a_real_size() -> None:
    """Qwen3-0.6B: 28 layers of 8 key/value heads of 128."""
    config = DecoderConfig(
        vocab_size=151_936, hidden_size=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate_size=3072,
        family="qwen3", tied_embeddings=True,
    )  # fmt: skip
    precision = Precision(compute="bfloat16", sync="bfloat16")
    like = abstract_weights(config, precision)
    for platform, token in (("gpu", 114_688), ("cpu", 229_376)):  # in bfloat16, and in float32
        computing = decode_precision(precision, platform)
        estimate = engine.of_model(options(slots=8, maximum_tokens=1024), config, computing, like)
        assert estimate.token == token and estimate.cache == token * 8 * 1024
    assert estimate.weights == pytest.approx(estimate.host_copy, rel=1e-3)  # norms are float32
    assert estimate.host_copy == 2 * 596_049_920
