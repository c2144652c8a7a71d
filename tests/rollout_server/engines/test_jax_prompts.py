"""Prompts that completions of a group share in the embedded generator: they sample what they would from copies."""

import functools

import jax
import numpy as np
import pytest

from rollout_server.engines.jax import caches, decode, prompts
from rollout_server.engines.jax.compiled_programs import Kind
from rollout_server.engines.jax.slots import SlotPool
from rollout_server.engines.jax.weights import abstract_weights, decode_precision, decode_weights
from scalerl_jax.model import Precision
from tests.rollout_server.engines.test_jax_decode import name_of, run, sequences
from tests.rollout_server.jax_reference import ask, reference_logprobs, tiny
from tests.support.families import CASES, QUICK, decoder
from tests.support.models import random_tensors, toy_decoder
from tests.support.waiting import eventually

PRECISION = Precision()
SLOTS, MAXIMUM = 8, 64
LOCAL = [case for case in CASES if case.startswith("llama4_text")]  # some layers see the end of a prompt only
SLOW = [
    *(("cpu", case) for case in sorted({*QUICK[1:], *LOCAL})),
    *((platform, case) for platform in ("gpu", "tpu") for case in (QUICK[0], LOCAL[0])),
]


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch):
    monkeypatch.setattr(prompts, "SHORTEST", 4)


def make(config, *, platform="cpu", share=(), rows=64, slots=SLOTS, maximum=MAXIMUM):
    """A pool that shares prompts once they have these lengths, and its weights."""
    pool = SlotPool(config, decode_precision(PRECISION, platform), slots=slots, maximum=maximum, steps=4)
    pool._weights_like = abstract_weights(config, PRECISION)
    if share:
        pool.prompts.allow(max(slots, 16), rows)
        assert all(compiled(pool, length) for length in share)
    return pool, decode_weights(random_tensors(config, 0), config, PRECISION)


def compiled(pool, length):
    pool._compile_sharing(length)
    pool._sharing[length].result()
    return pool._share(length)


def group(config, length, count, *, name=None, budget=12):
    rng = np.random.default_rng(length)
    seeds = range(100 * length, 100 * length + count)
    return ask(rng.integers(0, config.vocab_size, length), seeds=seeds, name=name or f"{length}", answer_budget=budget)


def same(got, wanted):
    assert got.keys() == wanted.keys()
    for name, one in got.items():
        np.testing.assert_array_equal(one.token_ids, wanted[name].token_ids)
        np.testing.assert_allclose(one.logprobs, wanted[name].logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("platform", "case"),
    [
        ("cpu", QUICK[0]),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW),
    ],
)
def test_every_family_samples_what_it_would_from_copies(platform, case):
    """Groups larger than a row, smaller ones, one too small to share, and more than there are slots and rows for."""
    config = decoder(case)
    groups = [group(config, *sizes) for sizes in ((11, 5), (7, 12), (3, 4), (18, 4), (9, 2), (12, 9))]
    shared, weights = make(config, platform=platform, share=(32,))
    seated = []
    enter = shared.prompts.enter
    shared.prompts.enter = lambda *arguments: seated.append(given := enter(*arguments)) or given
    plain, _ = make(config, platform=platform)
    same(run(shared, [weights], groups), run(plain, [weights], groups))
    assert {one.request.group_id for given in seated for one in given} == {"11", "7", "18", "12"}
    assert not shared.prompts and not shared.prompts.readers


@pytest.mark.parametrize("size", [64, pytest.param(32, marks=pytest.mark.slow)])
def test_heads_that_share_a_tpus_lanes_sample_what_they_would_alone(size):
    """From shared prompts and from copies, and in a prefix that is made longer."""
    config = toy_decoder(head_dim=size, heads=8, kv_heads=4)
    groups = [group(config, *sizes) for sizes in ((11, 5), (3, 4))]
    joined, weights = make(config, platform="tpu", share=(32,))
    assert joined._state.keys[0].shape[1::2] == (4 * size // 128, 128)
    alone, _ = make(config)
    assert alone._state.values[0].shape[1::2] == (4, size)
    same(run(joined, [weights], groups), run(alone, [weights], groups))

    both = {"config": config, "precision": decode_precision(PRECISION, "tpu")}
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 24)
    whole = decode.prefill(weights, tokens, **both)[:2]
    begun = caches.fit_prefix(*decode.prefill(weights, tokens[:16], **both)[:2], length=24, keys_last=False)
    longer = decode.extend(weights, *begun, tokens[16:], np.int32(16), **both)[:2]
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), longer, whole)


@pytest.mark.parametrize("ahead", [0, 1])
def test_completions_that_come_move_and_are_withdrawn(ahead, monkeypatch):
    """Rows and seats are taken again while a withdrawn sequence's slot goes on, and prompts of other lengths come."""
    config, rng = tiny(), np.random.default_rng(ahead)
    monkeypatch.setattr(SlotPool, "_price", lambda *_: None)  # no narrow chunk but those below
    groups = [group(config, 5 + i % 3 * 16, 9, name=str(i), budget=4 + 5 * (i % 4)) for i in range(12)]
    plain, weights = make(config)
    alone = run(plain, [weights], groups)

    pool, _ = make(config, share=(32, 64), rows=4, slots=24)
    narrow = {
        kind: pool._compile_chunk(8, kind)
        for kind in [Kind(length, False, known) for length in pool._lengths for known in (0, 32, 64)]
    }
    pool._programs.narrowest = lambda slots, kind: (8, narrow[kind]) if slots <= 8 else (24, None)
    waiting, out, running, withdrawn, lengths = sequences(*groups), {}, {}, set(), set()
    while waiting or pool.busy or pool.in_flight:
        count = min(pool.slots - pool.busy, int(rng.integers(0, 12)))
        if waiting and count and (rng.random() < 0.4 or not pool.busy):
            request = waiting[0].request
            entering = [one for one in waiting[:count] if one.request is request]
            pool.enter(pool.prefill(weights, request.prompt), entering, step=0)
            running |= {name_of(sequence): sequence for sequence in entering}
            del waiting[: len(entering)]
        if running and rng.random() < 0.3:
            name = sorted(running)[int(rng.integers(len(running)))]
            pool.leave(running.pop(name))
            withdrawn.add(name)
        if pool.busy:
            pool.dispatch(weights, 0)
            lengths.add(pool._kind().prompts)
        if pool.in_flight > (ahead if pool.busy else 0):
            out |= {name_of(one): running.pop(name_of(one)).completion() for one in pool.collect()}
    assert len(withdrawn) > 10 and lengths == {32, 64}
    same(out, {name: one for name, one in alone.items() if name not in withdrawn})
    assert not pool.prompts and not pool.prompts.readers


def test_a_prompt_of_older_weights_stays_with_its_readers():
    """Completions of the same request that start after a swap read the new weights' prompt."""
    config = tiny()
    named = [random_tensors(config, seed) for seed in (0, 1)]
    old, new = (decode_weights(one, config, PRECISION) for one in named)
    pool, _ = make(config, share=(32,))
    request = group(config, 12, 4, budget=20)
    waiting, out = sequences(request), {}
    pool.enter(pool.prefill(old, request.prompt), waiting[:2], step=0)
    pool.dispatch(old, 0)
    pool.collect()
    pool.enter(pool.prefill(new, request.prompt), waiting[2:], step=1)
    assert len(pool.prompts._rows) == 2
    while pool.busy:
        pool.dispatch(new, 1)
        out |= {name_of(one): one.completion() for one in pool.collect()}
    for (_, index), one in out.items():
        swapped = 4 if index < 2 else 0
        wanted = reference_logprobs(config, request.prompt, one.token_ids, lambda t, at=swapped: named[t >= at])
        np.testing.assert_allclose(one.logprobs, wanted, atol=1e-4)


@pytest.mark.slow
def test_it_is_compiled_once_copies_have_cost_as_much():
    config = tiny()
    pool, weights = make(config, maximum=128)
    pool.compile(abstract_weights(config, PRECISION))
    pool.warm_up(weights)
    pool.prompts.allow(SLOTS, 64)
    pool._seconds = {64: 1.0, 96: 1.0, 128: 2.0}
    assert pool._lengths == list(pool._seconds)
    pool._compiling = dict.fromkeys(pool._compiling, 5 / 3)
    request = group(config, 100, 4, budget=6)  # in two chunks, of 128 positions for 64
    plain, _ = (run(pool, [weights], [request]) for _ in range(2))
    assert not pool._sharing and pool._lost == {128: 4.0}
    while not pool._sharing:
        same(run(pool, [weights], [request]), plain)
    (future,) = pool._sharing.values()
    assert eventually(future.done) and set(future.result()) == {(SLOTS, Kind(one, False, 128)) for one in pool._lengths}
    assert 5 <= pool._lost[128] <= 6
    for _ in range(3):
        same(run(pool, [weights], [request]), plain)
    assert pool.prompts.arrays is not None and pool._length == 64
    # A filter needs programs of its own, which are compiled when first requested.
    filtered = ask(request.prompt, seeds=range(4), name="filtered", answer_budget=6, top_k=1)
    run(pool, [weights], [filtered])
    assert Kind(pool._lengths[0], True, 128) in pool._whole
    pool.close()


def test_what_cannot_be_compiled_is_copied(caplog, monkeypatch):
    config = tiny()
    wanted = run(make(config)[0], [make(config)[1]], [group(config, 12, 4)])
    pool, weights = make(config)
    pool.prompts.allow(16, 64)

    def too_large(*_):
        raise jax.errors.JaxRuntimeError("too large")

    with monkeypatch.context() as patch:
        patch.setattr(pool, "_compile_chunk", too_large)
        assert not compiled(pool, 32)
    same(run(pool, [weights], [group(config, 12, 4)]), wanted)
    assert caplog.messages == ["prompts of up to 32 positions are copied for each completion: too large"]
    assert pool.prompts.arrays is None


def test_rows_are_as_many_as_memory_has_place_for():
    rows = functools.partial(prompts.PromptRows, tiny())
    for platform, slots, most, count in [
        ("cpu", 64, 99, 32), ("gpu", 64, 99, 8), ("cpu", 64, 5, 4), ("cpu", 64, -3, 0), ("tpu", 4, 9, 0),
    ]:  # fmt: skip
        one = rows(decode_precision(PRECISION, platform))
        one.allow(slots, most)
        assert one.count == count and one.takes(group(tiny(), 12, 4)) == (count > 0)
        assert not one.takes(group(tiny(), 12, 3)) and not one.takes(group(tiny(), 4, 9))
