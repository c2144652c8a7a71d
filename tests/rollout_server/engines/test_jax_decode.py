"""The embedded generator's device functions through its slots: what is sampled, and with which probability."""

import functools
import logging
import threading
from concurrent.futures import Executor, Future

import jax
import numpy as np
import pytest

from rollout_server.engines.jax import compiled_programs, decode
from rollout_server.engines.jax.compiled_programs import Kind, Programs, buckets
from rollout_server.engines.jax.slots import SlotPool
from rollout_server.engines.jax.weights import abstract_weights, decode_precision, decode_weights, model_params
from rollout_server.engines.sequence import Counters, Sequence
from scalerl_jax.model import Precision, forward, token_logprobs
from tests.rollout_server.jax_reference import ask, reference_logprobs, replay, tiny
from tests.support.families import CASES, QUICK, decoder
from tests.support.models import random_tensors
from tests.support.params import from_hf
from tests.support.waiting import SECONDS, eventually

LENGTH = 48
PROMPT = np.array([5, 11, 2, 40, 7, 7, 19])
PRECISION = Precision()
# On a TPU keys lie otherwise, and what a chunk makes stands apart from the caches until its end (caches.py).
PLATFORMS = pytest.mark.parametrize("platform", ["cpu", "tpu"])
SLOW = [("cpu", case) for case in CASES if case not in QUICK] + [("tpu", case) for case in QUICK[1:]]


def run(pool, weights, requests, *, ahead=0, steps=None, counters=None):
    """All completions of some requests by (group, index); steps[c] is the version of chunk c.

    `weights` is a list by version. Requests enter in order as slots become free; one prefill per request.
    """
    waiting = sequences(*requests, counters=counters)
    prefixes, out, chunk = {}, {}, 0
    while waiting or pool.busy or pool.in_flight:
        version = (steps or [0])[min(chunk, len(steps or [0]) - 1)]
        while waiting and pool.slots - pool.busy:
            group = waiting[0].request.group_id
            entering = [
                sequence for sequence in waiting[: pool.slots - pool.busy] if sequence.request.group_id == group
            ]
            if group not in prefixes:
                prefixes[group] = pool.prefill(weights[version], entering[0].request.prompt)
            pool.enter(prefixes[group], entering, step=0)
            del waiting[: len(entering)]
        if pool.busy:
            pool.dispatch(weights[version], version)
            chunk += 1
        if pool.in_flight > (ahead if pool.busy else 0):
            out |= {name_of(sequence): sequence.completion() for sequence in pool.collect()}
    return out


def sequences(*requests, counters=None):
    counters = counters or Counters()
    return [Sequence(r, c, counters=counters, maximum_tokens=LENGTH) for r in requests for c in r.completions]


def name_of(sequence):
    return sequence.request.group_id, sequence.wanted.index


def make(config, *, slots=4, steps=8, named=None, maximum=LENGTH, platform="cpu"):
    """platform: that the programs are written for; it is a CPU that runs them."""
    pool = SlotPool(config, decode_precision(PRECISION, platform), slots=slots, maximum=maximum, steps=steps)
    return pool, decode_weights(named or random_tensors(config, 0), config, PRECISION)


@functools.partial(jax.jit, static_argnums=(2, 3))
def forced_logprobs(params, row, config, precision):
    hidden = forward(params, config, row, np.arange(LENGTH)[None], np.ones((1, LENGTH), np.int32), precision=precision)
    return token_logprobs(params, config, hidden, jax.numpy.roll(row, -1, axis=1), precision=precision)[0]


def trainer_logprobs(config, named, prompt, token_ids, precision):
    """What the trainer's forward pass makes of a completion: [tokens] float32."""

    row = np.zeros((1, LENGTH), np.int32)
    whole = np.concatenate([prompt, token_ids])
    row[0, : len(whole)] = whole
    return np.asarray(forced_logprobs(from_hf(named, config), row, config, precision))[len(prompt) - 1 : len(whole) - 1]


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_logprobs_equal_the_trainers(kind, tied):
    config = tiny(kind=kind, tied=tied)
    named = random_tensors(config, 0)
    pool, weights = make(config, named=named)
    request = ask(PROMPT, seeds=range(6), answer_budget=30)
    finished = run(pool, [weights], [request])
    assert len(finished) == 6
    assert pool.prefills == 1
    for one in list(finished.values())[:2]:
        trainer = trainer_logprobs(config, named, PROMPT, one.token_ids, PRECISION)
        np.testing.assert_allclose(one.logprobs, trainer, atol=1e-4)
        reference = reference_logprobs(config, PROMPT, one.token_ids, lambda t: named)
        np.testing.assert_allclose(one.logprobs, reference, atol=1e-4)


@pytest.mark.parametrize(
    ("platform", "case"),
    [
        *(("cpu", case) for case in QUICK),
        ("tpu", QUICK[0]),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW),
    ],
)
def test_every_family_decodes_what_its_forward_pass_computes(platform, case):
    config = decoder(case)
    prompt = np.random.default_rng(1).integers(0, config.vocab_size, 11)
    named = random_tensors(config, 0)
    pool, weights = make(config, named=named, platform=platform)
    for one in run(pool, [weights], [ask(prompt, seeds=range(3), answer_budget=30)]).values():
        assert len(one.token_ids) == 30
        trainer = trainer_logprobs(config, named, prompt, one.token_ids, PRECISION)
        np.testing.assert_allclose(one.logprobs, trainer, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_a_swap_in_mid_sequence_keeps_the_old_keys_and_values(kind):
    config = tiny(kind=kind)
    named = [random_tensors(config, seed) for seed in (0, 1)]
    pool, _ = make(config)
    weights = [decode_weights(one, config, PRECISION) for one in named]
    finished = run(pool, weights, [ask(PROMPT, seeds=range(3), answer_budget=30)], steps=[0, 0, 1])
    for one in finished.values():
        assert one.versions == ((0, 0, 16), (1, 16, 30))
        stale = reference_logprobs(config, PROMPT, one.token_ids, lambda t: named[t >= 16])
        np.testing.assert_allclose(one.logprobs, stale, atol=1e-4)
        old, new = (reference_logprobs(config, PROMPT, one.token_ids, lambda t, w=w: w) for w in named)
        np.testing.assert_allclose(one.logprobs[:16], old[:16], atol=1e-4)
        assert np.abs(one.logprobs[16:] - old[16:]).max() > 0.1
        # Not what prefilling everything again with the new weights would give, either.
        assert np.abs(one.logprobs[16:] - new[16:]).max() > 0.01


@PLATFORMS
def test_tokens_depend_on_seed_and_weights_only(platform):
    config = tiny()
    request = ask(PROMPT, seeds=(3, 2**64 - 5, 3 + 2**32), answer_budget=25)
    mates = [ask(PROMPT[:n], name=f"mate/{n}", seeds=range(n), answer_budget=5 * n) for n in (1, 3, 5)]

    def tokens(slots, steps, requests, ahead=0):
        pool, weights = make(config, slots=slots, steps=steps, platform=platform)
        finished = run(pool, [weights], requests, ahead=ahead)
        assert len(finished) == sum(len(r.completions) for r in requests)
        return [finished["train/0", i].token_ids.tolist() for i in range(3)]

    alone = tokens(4, 8, [request])
    assert len({tuple(one) for one in alone}) == 3  # both halves of a seed count
    assert tokens(4, 8, [*mates, request]) == alone
    assert tokens(4, 8, [*mates, request], ahead=1) == alone
    assert tokens(4, 8, [request, *mates], ahead=2) == alone
    assert tokens(3, 5, [*mates, request]) == alone


@pytest.mark.parametrize("platform", ["cpu", pytest.param("tpu", marks=pytest.mark.slow)])
def test_the_cache_grows_and_shrinks_with_the_longest_slot(platform):
    config = tiny()
    named = random_tensors(config, 0)
    weights = decode_weights(named, config, PRECISION)
    pool = SlotPool(config, decode_precision(PRECISION, platform), slots=2, maximum=128, steps=4)
    long = ask(PROMPT, name="long", seeds=(1,), answer_budget=90)
    short = ask(PROMPT, name="short", seeds=range(12), answer_budget=20)
    prompt = np.arange(100) % config.vocab_size
    late = ask(prompt, name="late", seeds=(1, 2), answer_budget=20)  # its prefix alone is longer than the short cache
    lengths = []
    run_chunk = pool._run_chunk
    pool._run_chunk = lambda *chunk: (lengths.append(pool._length), run_chunk(*chunk))[1]
    finished = run(pool, [weights], [long, short, late])
    changes = [length for i, length in enumerate(lengths) if i == 0 or length != lengths[i - 1]]
    assert changes == [64, 96, 128, 64, 128]
    for (group, _), one in finished.items():
        reference = reference_logprobs(config, prompt if group == "late" else PROMPT, one.token_ids, lambda t: named)
        np.testing.assert_allclose(one.logprobs, reference, atol=1e-4)


@pytest.fixture
def at_once(monkeypatch):
    """Narrow chunks are compiled where they are first missed; gives the widths of the chunks that were run."""

    class AtOnce(Executor):
        def submit(self, run, *arguments):
            future = Future()
            future.set_result(run(*arguments))
            return future

    widths = []
    run_chunk = SlotPool._run_chunk

    def noted(pool, weights, width, kind, program):
        assert (program is None) == (width == pool.slots)
        widths.append(width)
        return run_chunk(pool, weights, width, kind, program)

    monkeypatch.setattr(compiled_programs, "UNPRICED", (1.0, 0.0))
    monkeypatch.setattr(compiled_programs, "ThreadPoolExecutor", lambda *_, **__: AtOnce())
    monkeypatch.setattr(SlotPool, "_run_chunk", noted)
    return widths


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_chunks_of_few_slots_sample_the_same(at_once, ahead):
    """Completions end one by one, some are withdrawn, others enter late: whoever is moved goes on as if it were not."""
    config, rng = tiny(), np.random.default_rng(ahead)
    weights = decode_weights(random_tensors(config, 0), config, PRECISION)
    lengths = {name: np.minimum(rng.geometric(1 / 12, count), 38) for name, count in (("a", 14), ("b", 9), ("c", 20))}
    requests = [
        ask(PROMPT[: 3 + i], name=f"{name}/{j}", seeds=(100 * i + j,), answer_budget=int(length))
        for i, (name, drawn) in enumerate(lengths.items())
        for j, length in enumerate(drawn)
    ]
    alone = {}
    for request in requests:
        pool, _ = make(config, slots=4)
        alone |= run(pool, [weights], [request])

    at_once.clear()
    pool, _ = make(config, slots=32, steps=4)
    waiting = sequences(*requests)
    out, withdrawn, running = {}, set(), {}
    while waiting or pool.busy or pool.in_flight:
        entering = (
            waiting[: min(pool.slots - pool.busy, int(rng.integers(0, 9)))]
            if rng.random() < 0.3 or not pool.busy
            else []
        )
        for sequence in entering:
            pool.enter(pool.prefill(weights, sequence.request.prompt), [sequence], step=0)
            running[name_of(sequence)] = sequence
        del waiting[: len(entering)]
        if running and rng.random() < 0.1:
            name = sorted(running)[int(rng.integers(len(running)))]
            pool.leave(running.pop(name))
            withdrawn.add(name)
        if pool.busy:
            pool.dispatch(weights, 7)
        if pool.in_flight > (ahead if pool.busy else 0):
            for sequence in pool.collect():
                out[name_of(sequence)] = running.pop(name_of(sequence)).completion()
    assert withdrawn and not withdrawn & out.keys() and len(withdrawn) + len(out) == len(requests)
    for name, one in out.items():
        np.testing.assert_array_equal(one.token_ids, alone[name].token_ids)
        np.testing.assert_allclose(one.logprobs, alone[name].logprobs, atol=1e-5)
        assert one.versions == ((7, 0, len(one.token_ids)),)
    assert {8, 16} <= set(at_once)
    assert pool.slots - pool.busy == 32 and sorted(pool._free) == list(range(32))


def test_the_cache_grows_for_a_slot_that_was_moved(at_once):
    """To the place of one that ended long before."""
    config = tiny()
    named = random_tensors(config, 0)
    weights = decode_weights(named, config, PRECISION)
    pool, _ = make(config, slots=16, maximum=128)
    lengths = [4, *[40] * 9, 110]
    requests = [ask(PROMPT, name=f"{i}", seeds=(i,), answer_budget=length) for i, length in enumerate(lengths)]
    finished = run(pool, [weights], requests)
    assert at_once[0] == 16 and at_once[-1] == 8
    last = finished["10", 0]
    assert len(last.token_ids) == 110
    reference = reference_logprobs(config, PROMPT, last.token_ids, lambda t: named)
    np.testing.assert_allclose(last.logprobs, reference, atol=1e-4)


def test_a_filter_is_compiled_when_it_is_first_asked_for(caplog):
    """And it drops nothing of who has none."""
    caplog.set_level(logging.INFO)
    config = tiny()
    pool, weights = make(config)
    pool.compile(abstract_weights(config, PRECISION))
    pool.warm_up(weights)
    plain = ask(PROMPT, seeds=range(2), answer_budget=8)
    alone = run(pool, [weights], [plain])
    assert not caplog.messages
    greedy = ask(PROMPT, name="greedy", seeds=[9], answer_budget=8, top_k=1)
    both = run(pool, [weights], [greedy, plain])
    (said,) = caplog.messages
    assert said.startswith("compiled in ") and said.endswith(" s for top-k and top-p, 64 positions")
    np.testing.assert_allclose(both.pop(("greedy", 0)).logprobs, 0, atol=1e-6)
    assert both.keys() == alone.keys()
    for name, one in both.items():
        np.testing.assert_array_equal(one.token_ids, alone[name].token_ids)
    pool.close()


def test_a_narrow_chunk_is_compiled_once_going_without_has_cost_as_much(caplog):
    compiled, go = [], threading.Event()
    errors = {96: jax.errors.JaxRuntimeError("too large"), 128: TypeError("ours")}

    def compile_(width, kind):
        assert not kind.filtered
        compiled.append((width, kind.length))
        assert go.wait(SECONDS)
        if kind.length in errors:
            raise errors[kind.length]
        return f"{width}, {kind.length}"

    chunks = Programs([8, 16, 32], compile_)

    def misses(slots, length, count):
        for _ in range(count):
            assert chunks.narrowest(slots, Kind(length, False))[0] > 16
            assert chunks.narrowest(32, Kind(length, False)) == (32, None)

    def arrives(slots, length, width):
        return eventually(lambda: (found := chunks.narrowest(slots, Kind(length, False)))[0] == width and found)

    for length in (64, 96, 128):
        chunks.price(Kind(length, False), chunk=1.0, compiling=4.0)
    misses(9, 64, 7)  # half a second each
    assert not chunks._coming
    misses(9, 64, 5)  # and decoding goes on
    assert list(chunks._coming) == [(16, Kind(64, False))]
    go.set()
    assert arrives(9, 64, 16) == (16, "16, 64") and compiled == [(16, 64)]

    # Against 16 slots, 8 save a quarter of a chunk.
    assert [chunks.narrowest(8, Kind(64, False)) for _ in range(15)] == [(16, "16, 64")] * 15
    assert not chunks._coming
    chunks.narrowest(8, Kind(64, False))
    assert arrives(8, 64, 8) == (8, "8, 64") and compiled == [(16, 64), (8, 64)]

    misses(16, 128, 8)  # each length for itself
    with pytest.raises(TypeError, match="ours"):
        arrives(16, 128, 16)
    misses(16, 96, 8)
    while not caplog.messages:
        assert chunks.narrowest(16, Kind(96, False)) == (32, None)
    assert [chunks.narrowest(16, Kind(96, False)) for _ in range(100)] == [(32, None)] * 100
    assert compiled == [(16, 64), (8, 64), (16, 128), (16, 96)]
    assert caplog.messages == ["no chunk of 16 slots and 96 positions, wider ones run instead: too large"]
    chunks.close()


def test_the_widths_that_are_compiled():
    assert compiled_programs.widths(64, copies_are_cheap=True) == [8, 16, 32, 64]
    assert compiled_programs.widths(64, copies_are_cheap=False) == [8, 16, 64]
    assert compiled_programs.widths(24, copies_are_cheap=True) == [8, 24]
    assert compiled_programs.widths(24, copies_are_cheap=False) == [24]
    assert compiled_programs.widths(4, copies_are_cheap=True) == [4]


def test_the_first_tokens_frequencies_match_the_softmax():
    config = tiny(vocabulary=8)
    named = random_tensors(config, 0)
    named["model.embed_tokens.weight"] *= 0.5  # no token is too rare to count
    pool, weights = make(config, slots=16, named=named)
    prompt = np.array([1, 5, 2])
    requests = [ask(prompt, name=f"{g}", seeds=range(1000 * g, 1000 * g + 500), answer_budget=1) for g in range(4)]
    finished = run(pool, [weights], requests)
    counts = np.bincount([int(one.token_ids[0]) for one in finished.values()], minlength=8)
    p = np.exp([reference_logprobs(config, prompt, [token], lambda t: named)[0] for token in range(8)])
    expected = p * counts.sum()
    assert counts.sum() == 2000 and expected.min() > 1
    # 99.9 % of chi-square with 7 degrees of freedom.
    assert ((counts - expected) ** 2 / expected).sum() < 24.32


def test_interruption_state_machine_against_a_replay():
    """Four token ids, so that stop tokens and multi-token ends of thinking come up by chance all the time."""
    config = tiny(vocabulary=6)
    named = random_tensors(config, 0)
    named["model.embed_tokens.weight"] *= 0.2  # near uniform
    pool, weights = make(config, slots=16, named=named)
    rng = np.random.default_rng(0)
    requests = []
    for g in range(30):
        end = tuple(rng.integers(0, 4, rng.integers(0, 4)).tolist())
        phrase = (*rng.integers(0, 6, rng.integers(1, 5)).tolist(), *end) if g % 5 else ()
        requests.append(
            ask(
                rng.integers(0, 6, rng.integers(1, 20)), name=str(g), seeds=range(g * 10, g * 10 + 6),
                budgets=rng.integers(0, 14, 6).tolist(), phrase=phrase, end=end if phrase else (),
                stop_token_ids=((), (), (5,), (5, 4))[g % 4], answer_budget=int(rng.integers(1, 25)),
            )
        )  # fmt: skip
    counters = Counters()
    finished = run(pool, [weights], requests, ahead=1, counters=counters)
    reasons, forced_at_budget, ended_by_itself = set(), 0, 0
    for request in requests:
        for completion in request.completions:
            one = finished[request.group_id, completion.index]
            forced, reason = replay(request, completion.thinking_budget, one.token_ids, LENGTH)
            got = np.zeros(len(forced), bool)
            for start, end in one.forced:
                got[start:end] = True
            np.testing.assert_array_equal(got, forced)
            assert one.finish_reason == reason
            assert (one.logprobs[forced] == 0).all() and (one.logprobs[~forced] < 0).all()
            reasons.add(reason)
            forced_at_budget += forced.any()
            ended_by_itself += bool(request.interruption.text_token_ids) and not forced.any() and reason == "length"
    assert reasons == {"stop", "length"} and forced_at_budget > 20 and ended_by_itself > 10
    assert counters.forced_tokens == sum(sum(b - a for a, b in one.forced) for one in finished.values())
    assert counters.sampled_tokens + counters.forced_tokens == sum(len(one.token_ids) for one in finished.values())


def test_logprobs_after_forced_tokens_count_them_as_context():
    config = tiny()
    named = random_tensors(config, 0)
    pool, weights = make(config, named=named)
    request = ask(PROMPT, seeds=(1,), budgets=[5], phrase=(9, 8, 47), end=(47,), answer_budget=6)
    one = run(pool, [weights], [request])["train/0", 0]
    assert one.forced == ((5, 8),) and one.token_ids[5:8].tolist() == [9, 8, 47]
    assert len(one.token_ids) == 14 and one.finish_reason == "length"
    reference = reference_logprobs(config, PROMPT, one.token_ids, lambda t: named)
    reference[5:8] = 0
    np.testing.assert_allclose(one.logprobs, reference, atol=1e-4)


def test_a_slot_that_is_left_and_taken_again_hears_nothing_of_its_old_owner():
    config = tiny()
    pool, weights = make(config, slots=1)
    request = ask(PROMPT, seeds=(1, 2), answer_budget=20)
    first, second = sequences(request)
    alone = run(*[make(config, slots=1)[0]], [weights], [request])["train/0", 1]
    prefix = pool.prefill(weights, request.prompt)
    pool.enter(prefix, [first], step=0)
    pool.dispatch(weights, 0)
    pool.leave(first)
    pool.enter(prefix, [second], step=0)
    pool.dispatch(weights, 0)
    assert pool.collect() == []
    finished = []
    while not finished:
        pool.dispatch(weights, 0)
        finished += pool.collect()
    assert finished == [second] and not first.length
    np.testing.assert_array_equal(second.completion().token_ids, alone.token_ids)


def test_weights_are_rounded_to_the_wire_and_own_their_memory():
    config = tiny(tied=False)
    named = random_tensors(config, 0)
    precision = Precision(compute="float32", sync="bfloat16")
    weights = decode_weights(named, config, precision)
    for value in named.values():
        value[...] = np.nan  # the buffer is used again for the next version
    again = model_params(weights, config)
    expected = from_hf(random_tensors(config, 0), config)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(jax.numpy.bfloat16).astype(np.float32)), again, expected
    )


@pytest.mark.parametrize("head", ["default", "highest"])
def test_bfloat16_stays_near_the_trainers(head):
    config = tiny()
    named, precision = random_tensors(config, 0), Precision(compute="bfloat16", sync="bfloat16", head=head)
    weights = decode_weights(named, config, precision)
    pool = SlotPool(config, decode_precision(precision, "cpu"), slots=4, maximum=LENGTH, steps=8)
    one = run(pool, [weights], [ask(PROMPT, seeds=(1,), answer_budget=30)])["train/0", 0]
    difference = np.abs(one.logprobs - trainer_logprobs(config, named, PROMPT, one.token_ids, precision))
    assert difference.mean() < 2e-2 and difference.max() < 0.2


def test_logits_are_rounded_as_the_trainers():
    config = tiny()
    named, precision = random_tensors(config, 0), Precision(head="bfloat16")
    weights = decode_weights(named, config, precision)
    pool = SlotPool(config, decode_precision(precision, "cpu"), slots=4, maximum=LENGTH, steps=8)
    one = run(pool, [weights], [ask(PROMPT, seeds=(1,), answer_budget=30)])["train/0", 0]
    difference = np.abs(one.logprobs - trainer_logprobs(config, named, PROMPT, one.token_ids, precision))
    assert np.median(difference) < 1e-5  # a logit in between may be rounded up on one side and down on the other


def test_buckets():
    assert buckets(16, 128) == [16, 32, 64, 128]
    assert buckets(16, 139) == [16, 32, 64, 139]
    assert buckets(16, 192) == [16, 32, 64, 128, 192]
    assert buckets(16, 16) == [16]
    assert buckets(16, 10) == [10]
    assert buckets(64, 160, halfway=True) == [64, 96, 160]
    assert buckets(64, 512, halfway=True) == [64, 96, 128, 192, 256, 384, 512]


@pytest.mark.parametrize("width", [4, 1])
def test_a_chunk_works_on_the_cache_in_place(width):
    config = tiny()
    weights = decode_weights(random_tensors(config, 0), config, PRECISION)
    precision = decode_precision(PRECISION, "cpu")
    state = jax.eval_shape(lambda: decode.empty_state(config, precision, slots=4, length=2048))
    cache = sum(array.size * array.dtype.itemsize for array in (*state.keys, *state.values))
    lowered = decode.decode_chunk.lower(
        weights, state, config=config, precision=precision, steps=8, maximum=2048, width=4
    )
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= cache
    assert memory.temp_size_in_bytes < cache // 2
