"""The embedded generator as the service sees it: queue, versions, swaps, pinning, withdrawal, score."""

import asyncio
import gc
import json
import threading
import time
import weakref

import jax
import numpy as np
import pytest

from rollout_server.engines.engine import EngineOptions, QueueFull, WrongVersion
from rollout_server.engines.jax.engine import BLOCK, SMALLEST, JaxEngine, SequenceScorer, _top
from rollout_server.engines.jax.weights import abstract_weights, decode_precision, decode_weights
from scalerl_jax.contract.codec import ScoreRequest, Version
from scalerl_jax.contract.fingerprint import tokenizer_fingerprint
from scalerl_jax.model.decoder import Precision
from tests.rollout_server.conftest import opened_jax
from tests.rollout_server.jax_reference import Reference, ask, reference_logprobs, tiny
from tests.rollout_server.pause_decoding import CHUNK, pause_decoding
from tests.support.models import random_tensors, write_folder
from tests.support.waiting import SECONDS, eventually_async

LENGTH, SLOTS, QUEUE = 128, 4, 8
CONFIG = tiny()
PROMPT = np.array([5, 11, 2, 40, 7])
LONG = LENGTH - len(PROMPT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_folder(tmp_path_factory.mktemp("model") / "tiny", CONFIG, random_tensors(CONFIG, 0)))


def opened(folder, **options):
    return opened_jax(folder, slots=SLOTS, queue=QUEUE, maximum_tokens=LENGTH, decode_chunk=CHUNK, **options)


async def collect(engine, request):
    return {completion.index: completion async for completion in engine.generate(request)}


def load(engine, version, named):
    """A version that may differ anywhere."""
    return engine.load(version, named, dict.fromkeys(named))


def steady(engine):
    """No request is left anywhere."""
    status = engine.status()
    return status.busy_slots == 0 and status.queued == 0


@pytest.mark.parametrize("lookahead", [0, 1])
async def test_groups_are_answered_and_counted(folder, lookahead):
    async with opened(folder, lookahead=lookahead) as engine:
        thinking = {"budgets": [4, 0, 6], "phrase": (1, 2), "end": (2,), "answer_budget": 9}
        requests = [ask(PROMPT[:n], name=f"train/{n}", seeds=range(3), **thinking) for n in (1, 2, 4, 5)]
        got = await asyncio.gather(*(collect(engine, request) for request in requests))
        for request, completions in zip(requests, got):
            assert sorted(completions) == [0, 1, 2]
            for completion in completions.values():
                assert (completion.incarnation, completion.group_id) == (0, request.group_id)
                reference = reference_logprobs(
                    CONFIG, request.prompt, completion.token_ids, lambda t: random_tensors(CONFIG, 0)
                )
                reference[~completion.sampled()] = 0
                np.testing.assert_allclose(completion.logprobs, reference, atol=1e-4)
                assert completion.versions == ((0, 0, len(completion.token_ids)),)
                assert completion.queued_seconds >= 0 and completion.sampling_seconds > 0
        status = engine.status()
        everything = [one for completions in got for one in completions.values()]
        sampled = sum(int(one.sampled().sum()) for one in everything)
        assert status.sampled_tokens == sampled
        assert status.forced_tokens == sum(len(one.token_ids) for one in everything) - sampled > 0
        assert status.prefill_tokens == 0 + 1 + 3 + 4 and engine._pool.prefills == 4
        assert status.busy_seconds > 0 and status.pause_seconds == 0
        assert steady(engine)


async def test_info_and_folder_errors(folder, tmp_path):
    async with opened(folder) as engine:
        info = engine.info
        assert info.tokenizer_fingerprint == tokenizer_fingerprint(folder)
        assert json.loads(info.model_config) == json.loads(CONFIG.canonical_json())
        assert info.tensors.keys() == random_tensors(CONFIG, 0).keys()
        assert (info.slots, info.queue_capacity, info.maximum_tokens) == (SLOTS, QUEUE, LENGTH)
        assert (info.head_dtype, info.sync_dtype, info.name) == ("float32", "float32", "jax")
    named = random_tensors(CONFIG, 0)
    del named["model.norm.weight"]
    broken = str(write_folder(tmp_path / "broken", CONFIG, named))
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        JaxEngine(EngineOptions(broken, 1, 0, 16, compute_dtype="float32", sync_dtype="float32", decode_chunk=1))


async def test_a_request_that_does_not_fit_takes_nothing(folder):
    async with opened(folder) as engine, pause_decoding(engine, chunks=1) as decoding:
        first = asyncio.create_task(collect(engine, ask(PROMPT, seeds=range(SLOTS), answer_budget=LONG)))
        await eventually_async(lambda: engine.status().busy_slots == SLOTS)
        second = asyncio.create_task(collect(engine, ask(PROMPT, name="b", seeds=range(QUEUE - 1), answer_budget=2)))
        await eventually_async(lambda: engine.status().queued == QUEUE - 1)
        with pytest.raises(QueueFull):
            await collect(engine, ask(PROMPT, name="c", seeds=(1, 2)))
        assert engine.status().queued == QUEUE - 1
        third = asyncio.create_task(collect(engine, ask(PROMPT, name="d", seeds=(1,), answer_budget=2)))
        await eventually_async(lambda: engine.status().queued == QUEUE)
        decoding.go_on()
        assert [len(one) for one in await asyncio.gather(first, second, third)] == [SLOTS, QUEUE - 1, 1]


async def test_what_can_never_be_served_is_refused(folder):
    wrong = {
        "a prompt that fills the cache": ask(np.ones(LENGTH)),
        "more completions than slots and queue": ask(PROMPT, seeds=range(SLOTS + QUEUE + 1)),
        "a token outside the vocabulary": ask([1, CONFIG.vocab_size]),
        "a negative token": ask([1, -1]),
        "a stop token outside the vocabulary": ask(PROMPT, stop_token_ids=(CONFIG.vocab_size,)),
        "too many stop tokens": ask(PROMPT, stop_token_ids=tuple(range(17))),
        "a phrase that is too long": ask(PROMPT, phrase=(1,) * 129),
        "no prompt": ask([]),
        "temperature 0": ask(PROMPT, temperature=0.0),
    }

    async with opened(folder) as engine:
        for what, request in wrong.items():
            with pytest.raises(ValueError):
                pytest.fail(f"{what}: {await collect(engine, request)}")
        for request in (
            ask(PROMPT, incarnation=3),
            ask(PROMPT, minimum_step=1),
            ask(PROMPT, pinned_step=1),
        ):
            with pytest.raises(WrongVersion):
                await collect(engine, request)
        # The longest prompt there may be leaves room for one token.
        (only,) = (await collect(engine, ask(np.ones(LENGTH - 1)))).values()
        assert len(only.token_ids) == 1 and only.finish_reason == "length"


async def test_weights_swapped_in_flight(folder):
    """The spans say which weights sampled each token; the values are those of old keys under new weights."""
    named = [random_tensors(CONFIG, seed) for seed in range(3)]

    async with opened(folder) as engine, pause_decoding(engine, chunks=7) as decoding:
        task = asyncio.create_task(collect(engine, ask(PROMPT, seeds=range(3), answer_budget=LONG)))
        pauses = []
        for step in (1, 2):
            await eventually_async(lambda: decoding.stands)
            loading = asyncio.create_task(load(engine, Version(0, step), named[step]))
            await decoding.arrival(Version(0, step))
            assert engine.status().version == Version(0, step - 1)
            decoding.more(8)
            pauses.append(await loading)
            assert engine.status().version == Version(0, step)
        assert min(pauses) >= 0 and engine.status().pause_seconds == pytest.approx(sum(pauses))
        decoding.go_on()
        for completion in (await task).values():
            steps = completion.token_steps()
            # The chunk that was about to begin is the old version's, the next one the new version's.
            first, second = 8 * CHUNK, 16 * CHUNK
            assert completion.versions == ((0, 0, first), (1, first, second), (2, second, LONG))
            reference = reference_logprobs(CONFIG, PROMPT, completion.token_ids, lambda t, s=steps: named[s[t]])
            np.testing.assert_allclose(completion.logprobs, reference, atol=1e-4)


async def test_one_prefill_per_group_and_version(folder):
    """Completions of a group that start after a swap never see keys and values of the weights before it."""
    named = [random_tensors(CONFIG, seed) for seed in range(2)]

    async with opened(folder) as engine, pause_decoding(engine, chunks=3) as decoding:
        task = asyncio.create_task(collect(engine, ask(PROMPT, seeds=range(SLOTS + 5), answer_budget=40)))
        await eventually_async(lambda: engine.status().sampled_tokens >= 10)
        loading = asyncio.create_task(load(engine, Version(0, 1), named[1]))
        await decoding.arrival(Version(0, 1))
        decoding.go_on()
        await loading
        got = await task
        late = [one for one in got.values() if one.versions[0][0] == 1]
        assert len(late) == 5
        for one in late:
            assert one.versions == ((1, 0, 40),)
            reference = reference_logprobs(CONFIG, PROMPT, one.token_ids, lambda t: named[1])
            np.testing.assert_allclose(one.logprobs, reference, atol=1e-4)
        assert engine._pool.prefills == 2
        await collect(engine, ask(PROMPT, seeds=range(SLOTS + 5), answer_budget=5))
        assert engine._pool.prefills == 3


async def test_a_pinned_request_is_finished_before_the_weights_change(folder):
    async with opened(folder) as engine, pause_decoding(engine, chunks=1) as decoding:
        named = random_tensors(CONFIG, 1)
        pinned = ask(PROMPT, name="eval", seeds=range(SLOTS + 2), pinned_step=0, answer_budget=50)
        task = asyncio.create_task(collect(engine, pinned))
        await eventually_async(lambda: engine.status().sampled_tokens > 0)
        loading = asyncio.create_task(load(engine, Version(0, 1), named))
        await decoding.arrival(Version(0, 1))
        decoding.go_on()
        got = await task
        assert all(one.versions == ((0, 0, 50),) for one in got.values())
        await loading
        assert engine.status().version == Version(0, 1)
        with pytest.raises(WrongVersion):
            await collect(engine, pinned)


async def test_a_load_that_is_given_up_while_it_waits_changes_nothing(folder):
    async with opened(folder) as engine, pause_decoding(engine, chunks=5) as decoding:
        named = random_tensors(CONFIG, 1)
        # The first of them ends in the fifth chunk.
        pinned = engine.generate(ask(PROMPT, seeds=range(SLOTS + 1), pinned_step=0, answer_budget=5 * CHUNK))
        await anext(pinned)
        loading = asyncio.create_task(load(engine, Version(0, 2), named))
        await decoding.arrival(Version(0, 2))
        loading.cancel()
        await asyncio.wait([loading])
        assert loading.cancelled()
        await pinned.aclose()
        assert steady(engine)
        decoding.go_on()
        assert engine.status().version == Version(0, 0)
        await load(engine, Version(0, 3), named)
        assert engine.status().version == Version(0, 3)


async def test_another_incarnation_ends_the_requests_of_the_one_before(folder):
    async with opened(folder) as engine, pause_decoding(engine, chunks=1) as decoding:
        pinned = ask(PROMPT, seeds=range(SLOTS + 3), pinned_step=0, answer_budget=LONG)
        task = asyncio.create_task(collect(engine, pinned))
        await eventually_async(lambda: engine.status().queued == 3)
        loading = asyncio.create_task(load(engine, Version(77, 5), random_tensors(CONFIG, 1)))
        await decoding.arrival(Version(77, 5))
        decoding.go_on()
        await loading
        with pytest.raises(WrongVersion, match="77"):
            await task
        assert steady(engine)
        got = await collect(engine, ask(PROMPT, incarnation=77, minimum_step=5, seeds=range(6), answer_budget=9))
        assert all(one.versions == ((5, 0, 9),) for one in got.values())


async def test_refused_weights_leave_everything_as_it_was(folder):
    async with opened(folder) as engine:
        before = await collect(engine, ask(PROMPT))
        short = random_tensors(CONFIG, 1)
        del short["model.norm.weight"]
        with pytest.raises(ValueError, match=r"model\.norm\.weight"):
            await load(engine, Version(0, 1), short)
        bent = random_tensors(CONFIG, 1)
        bent["model.norm.weight"] = bent["model.norm.weight"][:-1]
        with pytest.raises(ValueError, match=r"model\.norm\.weight"):
            await load(engine, Version(0, 1), bent)
        assert engine.status().version == Version(0, 0)
        after = await collect(engine, ask(PROMPT))
        np.testing.assert_array_equal(before[0].logprobs, after[0].logprobs)


async def test_closing_the_iterator_frees_its_slots_at_once(folder):
    async with opened(folder) as engine:
        endless = ask(PROMPT, seeds=range(SLOTS + QUEUE), answer_budget=LONG)
        for _ in range(3):
            async with pause_decoding(engine, chunks=1):
                task = asyncio.create_task(collect(engine, endless))
                await eventually_async(lambda: engine.status().busy_slots == SLOTS)
                task.cancel()
                await asyncio.wait({task})
                assert steady(engine)
        # Half of it was read.
        stream = engine.generate(ask(PROMPT, seeds=range(3), budgets=[4, 4, 4], phrase=(1,), answer_budget=2))
        await anext(stream)
        await stream.aclose()
        assert steady(engine)
        alone = await collect(engine, ask(PROMPT, name="x", answer_budget=30))
        reference = reference_logprobs(CONFIG, PROMPT, alone[0].token_ids, lambda t: random_tensors(CONFIG, 0))
        np.testing.assert_allclose(alone[0].logprobs, reference, atol=1e-4)


async def test_closing_the_engine_ends_what_is_running(folder):
    async with opened(folder) as engine, pause_decoding(engine, chunks=1) as decoding:
        task = asyncio.create_task(collect(engine, ask(PROMPT, seeds=range(9), answer_budget=LONG)))
        await eventually_async(lambda: engine.status().sampled_tokens > 0)
        closing = asyncio.create_task(engine.close())
        await eventually_async(lambda: engine._queue.closed)
        decoding.go_on()
        await closing
        assert await task == {}
        with pytest.raises(RuntimeError, match="closed"):
            await collect(engine, ask(PROMPT))


async def test_score_is_the_trainers_forward_pass(folder):
    async with opened(folder) as engine:
        token_ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 50).astype(np.int32)
        for seed, version in ((0, Version(0, 0)), (1, Version(9, 4))):
            if seed:
                await load(engine, version, random_tensors(CONFIG, seed))
            scores, given = await engine.score(ScoreRequest(token_ids))
            logprobs = scores.logprobs
            assert given == version
            assert logprobs.shape == (50,) and logprobs.dtype == np.float32 and logprobs[0] == 0
            reference = reference_logprobs(
                CONFIG, token_ids[:1], token_ids[1:], lambda t, s=seed: random_tensors(CONFIG, s)
            )
            np.testing.assert_allclose(logprobs[1:], reference, atol=1e-4)
        reference, named = Reference(CONFIG), random_tensors(CONFIG, 1)
        rows = np.stack([reference.feed(named, token) for token in token_ids[:-1].tolist()])[29:]
        targets = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (20, 3))
        scores, _ = await engine.score(ScoreRequest(token_ids, 30, 5, targets))
        np.testing.assert_array_equal(scores.logprobs, logprobs[30:])
        np.testing.assert_array_equal(scores.top_ids, np.argsort(-rows, axis=1)[:, :5])
        np.testing.assert_allclose(scores.top_logprobs, -np.sort(-rows, axis=1)[:, :5], atol=1e-4)
        told = np.take_along_axis(rows, targets, axis=1)
        np.testing.assert_allclose(scores.target_logprobs, told, atol=1e-4)
        assert (await engine.score(ScoreRequest(token_ids[:1])))[0].logprobs.tolist() == [0.0]
        for wrong in (np.zeros(LENGTH + 1, np.int32), np.array([CONFIG.vocab_size]), np.zeros(0, np.int32)):
            with pytest.raises(ValueError):
                await engine.score(ScoreRequest(wrong))


async def test_a_score_that_is_given_up_holds_nothing(folder):
    async with opened(folder) as engine:
        release = threading.Event()
        engine._scoring.submit(release.wait, SECONDS)  # the one thread that scores is busy
        token_ids = np.zeros(20, np.int32)
        held = weakref.ref(token_ids)
        task = asyncio.create_task(engine.score(ScoreRequest(token_ids)))
        del token_ids
        await asyncio.sleep(0)  # it is in the executor's queue
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        del task
        gc.collect()
        there = held() is not None
        release.set()
        assert not there


@pytest.mark.slow
def test_scores_at_the_edges_of_what_is_compiled():
    """Of a vocabulary that is sorted in blocks: lengths around a bucket's, first places around a chunk's."""
    config = tiny(vocabulary=2_000, tied=False)
    longest, named = 2 * SMALLEST + 70, random_tensors(config, 0)
    scorer = SequenceScorer(config, decode_precision(Precision(), "cpu"), longest=longest)
    scorer.compile(abstract_weights(config, Precision()))
    weights, rng = decode_weights(named, config, Precision()), np.random.default_rng(0)
    token_ids, reference = rng.integers(0, config.vocab_size, longest).astype(np.int32), Reference(config)
    rows = np.stack([np.zeros(config.vocab_size), *(reference.feed(named, token) for token in token_ids[:-1].tolist())])
    for length in (2, SMALLEST - 1, SMALLEST, SMALLEST + 1, 2 * SMALLEST, 2 * SMALLEST + 1, longest):
        for first in {0, 1, 127, 128, 129, SMALLEST, length - 1}:
            if first >= length:
                continue
            top_k, k = int(rng.integers(0, 14)), int(rng.integers(0, 14))
            targets = rng.integers(-1, config.vocab_size, (length - first, k)).astype(np.int32)
            scores = scorer.score(weights, ScoreRequest(token_ids[:length], first, top_k, targets))
            expected, begin = rows[first:length], int(first == 0)
            own = np.take_along_axis(expected, token_ids[first:length, None], axis=1)[:, 0]
            np.testing.assert_allclose(scores.logprobs, own, atol=2e-4)
            told = np.where(targets < 0, 0, np.take_along_axis(expected, np.maximum(targets, 0), axis=1))
            np.testing.assert_allclose(scores.target_logprobs, told, atol=2e-4)
            top = -np.sort(-expected, axis=1)[begin:, :top_k]
            np.testing.assert_allclose(scores.top_logprobs[begin:], top, atol=2e-4)
            at_ids = np.take_along_axis(expected[begin:], scores.top_ids[begin:], axis=1)
            np.testing.assert_allclose(at_ids, top, atol=2e-4)
            assert all(len(set(row)) == top_k for row in scores.top_ids[begin:].tolist())
            if begin:
                assert (scores.top_ids[0] == -1).all() and not scores.top_logprobs[0].any()


def test_the_largest_are_found_in_blocks():
    logit = np.random.default_rng(0).normal(size=(5, 9 * BLOCK + 1)).astype(np.float32)
    logit[1, -1] = logit[2, 0] = 9  # at the ends
    logit[3] = 0  # all the same
    logit[4, 3 * BLOCK : 4 * BLOCK] += 20  # all in one block
    found, ids = map(np.asarray, jax.jit(_top, static_argnums=1)(logit, 8))
    np.testing.assert_array_equal(found, -np.sort(-logit, axis=1)[:, :8])
    np.testing.assert_array_equal(np.take_along_axis(logit, ids, axis=1), found)
    assert all(len(set(row)) == 8 for row in ids.tolist())


@pytest.mark.slow
async def test_nothing_compiles_while_serving_and_nothing_spins_while_idle(folder):
    compiled = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.clear_caches()  # nothing may be left over from other tests

    async with opened(folder) as engine:
        assert compiled
        compiled.clear()
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, CONFIG.vocab_size, length) for length in (1, 2, 16, 17, 33, 65, LENGTH - 1)]
        for prompt in prompts:
            plain = ask(prompt, seeds=range(5), budgets=[0, 1, 2, 3, 50], phrase=(3, 4), end=(4,), answer_budget=30)
            await collect(engine, plain)
            await engine.score(ScoreRequest(prompt.astype(np.int32)))
        assert compiled == []
        for wanted in (True, False):  # a filter, when it is first asked for
            for prompt in prompts:
                await collect(engine, ask(prompt, temperature=0.7, top_k=5, top_p=0.9, stop_token_ids=(1, 2)))
            assert bool(compiled) == wanted
            compiled.clear()
        for top_k in (9, 16):  # top ids, when so many are first asked for, and for any number of tokens
            for prompt in prompts[1:]:
                await engine.score(ScoreRequest(prompt.astype(np.int32), top_k=top_k))
            assert len(compiled) == (top_k == 9)
            compiled.clear()
        await load(engine, Version(3, 1), random_tensors(CONFIG, 1))
        await collect(engine, ask(PROMPT, incarnation=3, answer_budget=LONG))
        async with pause_decoding(engine, chunks=1):
            task = asyncio.create_task(collect(engine, ask(PROMPT, incarnation=3, answer_budget=LONG)))
            await eventually_async(lambda: engine.status().busy_slots == 1)
            task.cancel()
            await asyncio.wait({task})
        assert compiled == []
        clocks = [time.pthread_getcpuclockid(one.ident) for one in (threading.main_thread(), engine._thread)]
        before = sum(map(time.clock_gettime, clocks))
        await asyncio.sleep(1)
        # Of the processor, not by the clock, and of these two threads alone: another one may still be at work.
        assert sum(map(time.clock_gettime, clocks)) - before < 0.1
