"""What every engine does behind the contract, asked over real gRPC: Generate, Score and Status."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from rollout_server import guard
from rollout_server.engines.engine import Engine
from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.codec import ScoreRequest, Version
from tests.rollout_server.client import (
    INCARNATION,
    PROMPT,
    SECONDS,
    STOP,
    Served,
    ended,
    group,
    long_group,
    random_weights,
    serving,
)
from tests.rollout_server.external import External
from tests.rollout_server.pause_decoding import CHUNK, pause_decoding

MakeEngine = Callable[..., Engine]

PHRASE = codec.Interruption(text_token_ids=(40, 41, 42, 43), end_of_thinking_token_ids=(42, 43))


def free(status: pb.StatusReply) -> bool:
    return status.busy_slots == status.queued == 0


async def test_status_tells_what_the_server_is(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served:
        info, status = served.engine.info, await served.status()
        assert status.server_id == served.server.service.server_id != ""
        told = (status.engine, status.model_config, status.tokenizer_fingerprint, status.compute_dtype)
        assert told == (info.name, info.model_config, info.tokenizer_fingerprint, info.compute_dtype)
        assert (status.head_dtype, status.sync_dtype, status.devices) == ("float32", info.sync_dtype, info.devices)
        assert status.head_precision == info.head_precision == "default"
        assert (status.slots, status.queue_capacity, status.maximum_tokens) == (4, 8, 256)
        assert status.maximum_top_k in (0 if isinstance(served.engine, External) else 64, 64)
        assert codec.version_from_proto(status.version) == Version(0, 0)
        assert free(status) and status.sampled_tokens == status.versions_applied == 0


async def test_a_group_comes_back_whole_and_is_counted(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served:
        # More than there are slots, so that some wait.
        completions = await served.generate(group(completions=10, incarnation=0))
        assert [c.index for c in completions] == list(range(10))
        for completion in completions:
            assert (completion.incarnation, completion.group_id) == (0, "train/0")
            assert completion.versions == ((0, 0, len(completion.token_ids)),)
            assert completion.forced == ()
            assert len(completion.token_ids) <= 24
            stops = np.flatnonzero(completion.token_ids == STOP).tolist()
            if completion.finish_reason == "stop":
                assert stops == [len(completion.token_ids) - 1]
            else:
                assert (completion.finish_reason, stops, len(completion.token_ids)) == ("length", [], 24)
            assert completion.queued_seconds >= 0 and completion.sampling_seconds >= 0
        status = await served.until(free)
        assert status.sampled_tokens == sum(len(c.token_ids) for c in completions)
        assert status.forced_tokens == 0
        assert status.prefill_tokens > 0
        assert 0 < status.busy_seconds <= status.up_seconds


async def test_the_same_request_gives_the_same_tokens_in_any_company(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served:
        wanted = group(incarnation=0)
        alone = await served.generate(wanted)
        others = [asyncio.create_task(served.generate(group(f"other/{n}", completions=2, incarnation=0))) for n in "ab"]
        together = await served.generate(wanted)
        await asyncio.gather(*others)
        for first, second in zip(alone, together, strict=True):
            np.testing.assert_array_equal(first.token_ids, second.token_ids)
            np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-5)


async def test_other_seeds_give_other_tokens(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served:
        completions = await served.generate(long_group(tokens=16, incarnation=0))
        assert len({c.token_ids.tobytes() for c in completions}) == len(completions)


async def test_scores_are_the_log_probabilities_sampled_with(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served:
        version = Version(INCARNATION, 3)
        assert (await served.push(version, random_weights(served.engine, 1))).HasField("applied")
        for completion in await served.generate(group()):
            logprobs, scored_by = await served.score(np.concatenate([PROMPT, completion.token_ids]))
            assert scored_by == version
            assert logprobs[0] == 0
            np.testing.assert_allclose(logprobs[len(PROMPT) :], completion.logprobs, atol=1e-4)
        if (await served.status()).maximum_top_k:
            await check_scores(served, np.concatenate([PROMPT, completion.token_ids]), logprobs)


async def check_scores(served: Served, tokens: np.ndarray, logprobs: np.ndarray) -> None:
    """Parts, top ids and targets are those of whole distributions; logprobs: as clients get them that know no more."""
    length, vocabulary = len(tokens), served.engine.info.vocabulary
    everything = np.tile(np.arange(vocabulary, dtype=np.int32), (length, 1))
    whole = await served.scores(ScoreRequest(tokens, target_ids=everything))
    np.testing.assert_allclose(whole.logprobs, logprobs, atol=1e-5)
    assert not whole.target_logprobs[0].any()
    rows = whole.target_logprobs.astype(np.float64)
    mass = np.exp(rows[1:]).sum(axis=1)
    if served.engine.info.name == "replay":  # it has no model
        assert (mass < 1).all()
    else:
        np.testing.assert_allclose(mass, 1, atol=1e-4)
    requests = []
    for first in (0, 1, 2, length - 1):
        targets = np.stack([tokens[first:], np.full(length - first, -1), tokens[first:][::-1]], axis=1)
        requests += [
            ScoreRequest(tokens, first),
            ScoreRequest(tokens, first, 5),
            ScoreRequest(tokens, first, target_ids=targets),
            ScoreRequest(tokens, first, vocabulary, targets),
        ]
    requests.append(ScoreRequest(tokens[:1], 0, 2, np.array([[3, -1]])))
    alone = [await served.scores(request) for request in requests]
    for request, scores in zip(requests, alone):
        first, begin = request.first, int(request.first == 0)
        expected = rows[first : len(request.token_ids)]
        np.testing.assert_allclose(scores.logprobs, logprobs[first : len(request.token_ids)], atol=1e-5)
        top = -np.sort(-expected, axis=1)[begin:, : request.top_k]
        np.testing.assert_allclose(scores.top_logprobs[begin:], top, atol=1e-5)
        given = np.take_along_axis(expected[begin:], scores.top_ids[begin:], axis=1)
        np.testing.assert_allclose(scores.top_logprobs[begin:], given, atol=1e-5)
        if request.target_ids.size:
            told = np.take_along_axis(expected, np.maximum(request.target_ids, 0), axis=1)
            np.testing.assert_allclose(scores.target_logprobs, np.where(request.target_ids < 0, 0, told), atol=1e-5)
    # All at once, and one after another.
    call = served.stub.ScoreMany(map(codec.score_request_to_proto, requests), timeout=SECONDS)
    replies = [reply async for reply in call]
    call = served.stub.ScoreMany(timeout=SECONDS)
    for request in requests:
        await call.write(codec.score_request_to_proto(request))
        replies.append(await call.read())
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    for request, scores, reply in zip(requests * 2, alone * 2, replies, strict=True):
        many = codec.scores_from_proto(reply, request, vocabulary=vocabulary)
        for name, array in vars(scores).items():
            np.testing.assert_allclose(getattr(many, name), array, atol=1e-5)


async def test_thinking_is_interrupted_at_its_budget(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served:
        wanted = group(completions=8, thinking_budget=12, answer_budget=8, interruption=PHRASE, incarnation=0)
        completions = await served.generate(wanted)
        interrupted = 0
        for completion in completions:
            tokens, sampled = completion.token_ids.tolist(), completion.sampled()
            if completion.forced:
                interrupted += 1
                assert completion.forced == ((12, 16),)
                assert tokens[12:16] == [40, 41, 42, 43]
                assert not completion.logprobs[12:16].any()
                thinking = 16
            elif (42, 43) in (pairs := list(itertools.pairwise(tokens))):
                thinking = pairs.index((42, 43)) + 2
                assert thinking <= 12
            else:
                assert tokens[-1] == STOP and len(tokens) <= 12  # it never came to an answer
                continue
            assert sampled[thinking:].all()
            assert len(tokens) - thinking <= 8
            assert completion.finish_reason == ("stop" if tokens[-1] == STOP else "length")
        assert interrupted, "a test in which nothing was interrupted proves nothing"
        status = await served.until(free)
        assert status.forced_tokens == 4 * interrupted
        assert status.sampled_tokens == sum(int(c.sampled().sum()) for c in completions)


async def test_the_cache_ends_a_completion(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served:
        prompt = np.full(230, 5, np.int32)
        for completion in await served.generate(long_group(prompt=prompt, incarnation=0)):
            assert completion.finish_reason == "length"
            assert 248 <= len(prompt) + len(completion.token_ids) <= 256


@pytest.mark.parametrize(
    "wrong",
    [
        {"incarnation": INCARNATION - 1},
        {"incarnation": INCARNATION + 1},
        {"incarnation": 0},
        {"minimum_step": 6},
        {"pinned_step": 4},
        {"pinned_step": 6},
    ],
    ids=lambda wrong: "-".join(f"{name}={value}" for name, value in wrong.items()),
)
async def test_weights_that_are_not_those_demanded(make_engine: MakeEngine, wrong: dict[str, int]) -> None:
    async with serving(make_engine()) as served:
        await served.push(Version(INCARNATION, 5), random_weights(served.engine, 1))
        assert await served.refusal(group(**wrong)) is grpc.StatusCode.FAILED_PRECONDITION
        assert len(await served.generate(group(minimum_step=5, pinned_step=5))) == 4


def _broken(change: Callable[[pb.GenerateRequest], None], **options: object) -> pb.GenerateRequest:
    message = codec.request_to_proto(group(incarnation=0, **options))
    change(message)
    return message


async def test_requests_that_nobody_could_serve(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "DRAIN_SECONDS", SECONDS)
    broken = {
        "no prompt": _broken(lambda m: m.ClearField("prompt_token_ids")),
        "half a token": _broken(lambda m: setattr(m, "prompt_token_ids", b"123")),
        "no completions": _broken(lambda m: m.ClearField("completions")),
        "one twice": _broken(lambda m: m.completions.append(m.completions[0])),
        "temperature": _broken(lambda m: setattr(m.sampling, "temperature", 0)),
        "temperature nan": _broken(lambda m: setattr(m.sampling, "temperature", float("nan"))),
        "top_p": _broken(lambda m: setattr(m.sampling, "top_p", 1.5)),
        "answer": _broken(lambda m: setattr(m.sampling, "answer_budget", 0)),
        "phrase": _broken(lambda m: setattr(m.interruption, "end_of_thinking_token_ids", codec.encode_ids([3]))),
        "budget": _broken(lambda m: setattr(m.completions[0], "thinking_budget", 3)),
        "longer than the cache": _broken(lambda m: None, prompt=np.full(256, 5, np.int32)),
        "more than all places": _broken(lambda m: None, completions=13),
    }
    async with serving(make_engine()) as served:
        for name, message in broken.items():
            call = served.stub.Generate(message, timeout=SECONDS)
            assert await ended(call) == []
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            assert await call.details() != "", name
        for tokens in (np.zeros(0, np.int32), np.full(257, 5, np.int32)):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await served.score(tokens)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        if (await served.status()).maximum_top_k:
            await check_refused_scores(served)
        assert len(await served.generate(group(incarnation=0))) == 4
        assert free(await served.until(free))


ROW = codec.encode_ids([3, 4, 5])
REFUSED_SCORES: dict[str, tuple[dict[str, Any], str]] = {
    "an odd byte": ({"token_ids": ROW + b"1"}, ""),
    "first is no place": ({"first": 3}, "first is 3, of 3 tokens"),
    "first is huge": ({"first": 2**32 - 1}, "first is 4294967295, of 3 tokens"),
    "first, and no tokens": ({"token_ids": b"", "first": 1}, "first is 1, of 0 tokens"),
    "targets, and no tokens": ({"token_ids": b"", "target_ids": ROW}, "0 tokens"),
    "more top ids than there are": ({"top_k": 65}, "65 top ids a token, at most 64 are possible"),
    "top ids without number": ({"top_k": 2**32 - 1}, "top ids"),
    "targets of an odd length": ({"target_ids": ROW + b"1"}, "13 bytes of target ids"),
    "targets for two of three": ({"target_ids": ROW[:8]}, "8 bytes of target ids"),
    "targets for three of two": ({"first": 1, "target_ids": ROW}, "12 bytes of target ids"),
    "too many targets": ({"target_ids": ROW * 65}, "65 target ids a token, at most 64 are possible"),
    "a target outside": ({"target_ids": codec.encode_ids([3, 64, -1])}, "target ids"),
    "a target below -1": ({"target_ids": codec.encode_ids([3, -2, -1])}, "target ids"),
    "a message too long": ({"target_ids": bytes(2**20)}, "a message of"),
}


async def check_refused_scores(served: Served) -> None:
    good = codec.score_request_to_proto(ScoreRequest(np.array([3, 4, 5]), 1, 2))
    for name, (fields, why) in REFUSED_SCORES.items():
        bad = pb.ScoreRequest(**{"token_ids": ROW, **fields})
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await served.stub.Score(bad, timeout=SECONDS)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
        assert why in (error.value.details() or ""), name
        # Those before it are answered, and those behind it are not: their client hears why.
        call = served.stub.ScoreMany([good, bad, *[good] * 50], timeout=SECONDS)
        assert len(await ended(call)) == 1, name
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT, name
        assert why in await call.details(), name
    assert (await served.stub.Score(good, timeout=SECONDS)).logprobs


async def test_a_full_server_says_so_and_takes_nothing(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served, pause_decoding(served.engine, chunks=1) as decoding:
        first = asyncio.create_task(served.generate(long_group("train/0", completions=11, incarnation=0)))
        full = await served.until(lambda status: status.busy_slots == 4)
        assert full.queued == 7
        # A group of five is not taken in part.
        refused = await served.refusal(group("train/1", completions=5, incarnation=0))
        assert refused is grpc.StatusCode.RESOURCE_EXHAUSTED
        after = await served.status()
        assert (after.busy_slots, after.queued) == (4, 7)
        decoding.go_on()
        assert len(await first) == 11
        assert len(await served.generate(group("train/1", completions=5, incarnation=0))) == 5


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_hanging_up_frees_slots_and_places(make_engine: MakeEngine, how: str) -> None:
    async with serving(make_engine()) as served, pause_decoding(served.engine, chunks=2) as decoding:
        wanted = codec.request_to_proto(long_group(completions=12, incarnation=0))
        call = served.stub.Generate(wanted, timeout=0.2 if how == "deadline" else SECONDS)
        if how == "cancel":
            await served.until(lambda status: status.sampled_tokens == 4 * 2 * CHUNK)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call.read()
        else:
            await ended(call)
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        status = await served.until(free)
        decoding.go_on()
        completions = await served.generate(group("train/1", completions=12, incarnation=0))
        assert len(completions) == 12
        # Of what was given up, no more than the chunk that was about to begin.
        more = (await served.status()).sampled_tokens - status.sampled_tokens
        assert 0 <= more - sum(len(c.token_ids) for c in completions) <= 4 * CHUNK


async def test_asking_again_ends_the_older_call(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served, pause_decoding(served.engine, chunks=1) as decoding:
        older = served.stub.Generate(codec.request_to_proto(long_group(completions=12, incarnation=0)), timeout=SECONDS)
        await served.until(lambda status: status.busy_slots == 4)
        # The server is full, yet this is no more than it holds already: the places of the older call are taken over.
        wanted = long_group(indices=range(2, 8), tokens=20, incarnation=0)
        newer = asyncio.create_task(served.generate(wanted))
        assert await ended(older) == []
        assert await older.code() is grpc.StatusCode.ABORTED
        decoding.go_on()
        assert [c.index for c in await newer] == [2, 3, 4, 5, 6, 7]
        assert free(await served.until(free))


async def test_the_same_index_of_another_group_is_another_completion(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served:
        names = ("train/0", "train/1", "eval/0/1")
        groups = await asyncio.gather(*(served.generate(group(name, incarnation=0)) for name in names))
        assert [{c.group_id for c in completions} for completions in groups] == [{name} for name in names]


async def test_a_stopping_server_says_unavailable(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served, pause_decoding(served.engine, chunks=1):
        call = served.stub.Generate(codec.request_to_proto(long_group(incarnation=0)), timeout=SECONDS)
        await served.until(lambda status: status.busy_slots == 4)
        await served.server.service.stop()
        await ended(call)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert await served.refusal(group(incarnation=0)) is grpc.StatusCode.UNAVAILABLE
