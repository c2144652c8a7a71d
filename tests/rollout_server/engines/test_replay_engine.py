"""What only the replay engine promises: the very bits it was given, a set speed, and faults where they were ordered."""

import asyncio
import contextlib
import time
from collections.abc import Callable

import grpc
import numpy as np
import pytest

from rollout_server import service
from rollout_server.service import MAXIMUM_SCORES
from scalerl_jax.contract import codec
from scalerl_jax.contract.codec import Version
from tests.rollout_server.client import INCARNATION, SECONDS, ended, group, long_group, random_weights, serving
from tests.support.replay.engine import Faults, ReplayEngine
from tests.support.waiting import eventually_async

MakeReplay = Callable[..., ReplayEngine]


@pytest.mark.parametrize("sync_dtype", ["float32", "bfloat16"])
async def test_it_keeps_the_bits_it_was_given(make_replay: MakeReplay, sync_dtype: str) -> None:
    async with serving(make_replay(sync_dtype=sync_dtype)) as served:
        given = []
        for step in (1, 2):  # the second is staged where the first was
            given.append(random_weights(served.engine, step))
            next(iter(given[-1].values())).reshape(-1)[:2] = [-0.0, np.nan]
            push = await served.push(Version(INCARNATION, step), given[-1], chunk_bytes=777)
            assert push.HasField("applied")
            held = dict(served.engine.weights)
            assert list(held) == list(given[-1])
            assert all(held[name].tobytes() == tensor.tobytes() for name, tensor in given[-1].items())
            assert all(held[name].dtype == tensor.dtype for name, tensor in given[-1].items())
            if step == 1:
                first = held
        assert all(first[name].tobytes() == tensor.tobytes() for name, tensor in given[0].items())


async def test_it_plays_at_the_speed_that_was_set(make_replay: MakeReplay) -> None:
    async with serving(make_replay(token_seconds=0.01)) as served:
        began = time.monotonic()
        completions = await served.generate(long_group(completions=8, tokens=20, incarnation=0))
        # 8 completions in 4 slots, 20 steps each.
        assert time.monotonic() - began > 0.39
        assert all(c.sampling_seconds > 0.19 for c in completions)
        # The last four waited for the first four.
        queued = sorted(c.queued_seconds for c in completions)
        assert queued[4] - queued[3] > 0.19


async def test_new_weights_stop_decoding_for_as_long_as_was_set(make_replay: MakeReplay) -> None:
    async with serving(make_replay(load_seconds=0.2)) as served:
        began = time.monotonic()
        reply = await served.push(Version(INCARNATION, 1), random_weights(served.engine, 1))
        assert 0.2 <= reply.applied.pause_seconds <= time.monotonic() - began
        assert (await served.status()).pause_seconds == pytest.approx(reply.applied.pause_seconds)


async def test_it_hangs_where_it_was_told_to(make_replay: MakeReplay) -> None:
    async with serving(make_replay(faults=Faults(hang_after=3))) as served:
        call = served.stub.Generate(codec.request_to_proto(group(completions=8, incarnation=0)), timeout=SECONDS)
        assert [(await call.read()).group_id for _ in range(3)] == ["train/0"] * 3
        # It still answers, as a process does whose device hangs.
        before = await served.status()
        later = served.stub.Generate(codec.request_to_proto(group("train/1", incarnation=0)), timeout=0.5)
        assert await ended(later) == []
        assert await later.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await served.status()).sampled_tokens == before.sampled_tokens
        assert not call.done()
        call.cancel()


async def test_it_crashes_where_it_was_told_to(make_replay: MakeReplay) -> None:
    crashed = asyncio.Event()
    async with serving(make_replay(faults=Faults(crash_after=5, crash=crashed.set))) as served:
        await served.generate(group(completions=4, incarnation=0))
        assert not crashed.is_set()
        await served.generate(group("train/1", completions=4, incarnation=0))
        assert crashed.is_set()


async def test_only_so_many_sequences_wait_to_be_scored(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(make_replay()) as served:
        go, score, held = asyncio.Event(), served.engine.score, list[codec.ScoreRequest]()

        async def held_up(request: codec.ScoreRequest) -> tuple[codec.Scores, Version]:
            held.append(request)
            await go.wait()
            return await score(request)

        monkeypatch.setattr(served.engine, "score", held_up)
        tokens = np.arange(2, 8, dtype=np.int32)
        waiting = [asyncio.create_task(served.score(tokens)) for _ in range(MAXIMUM_SCORES)]
        await eventually_async(lambda: len(held) == MAXIMUM_SCORES)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await served.score(tokens)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        go.set()
        assert {len(logprobs) for logprobs, _ in await asyncio.gather(*waiting)} == {6}
        assert len((await served.score(tokens))[0]) == 6


SCORED = codec.score_request_to_proto(codec.ScoreRequest(np.arange(2, 8, dtype=np.int32), top_k=3))


async def test_only_so_many_streams_are_scored(make_replay: MakeReplay) -> None:
    async with serving(make_replay()) as served:
        calls = [served.stub.ScoreMany(timeout=SECONDS) for _ in range(MAXIMUM_SCORES)]
        for call in calls:
            await call.write(SCORED)
            assert len((await call.read()).top_ids) == 6 * 3 * 4
        refused = served.stub.ScoreMany([SCORED], timeout=SECONDS)
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len((await served.score(np.arange(2, 8, dtype=np.int32)))[0]) == 6  # it has places of its own
        calls[0].cancel()  # its place is free, once the server hears of it
        replies = []
        async with asyncio.timeout(SECONDS):
            while not replies:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    replies = [reply async for reply in served.stub.ScoreMany([SCORED], timeout=SECONDS)]
        for call in calls[1:]:
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK


async def test_a_stream_that_sends_nothing_ends(make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(make_replay()) as served:
        monkeypatch.setattr(service, "SCORE_STALL_SECONDS", 0.05)
        call = served.stub.ScoreMany(timeout=SECONDS)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await call.details() == "no request has come for 0.05 s"
        monkeypatch.setattr(service, "SCORE_STALL_SECONDS", SECONDS)
        call = served.stub.ScoreMany(timeout=0.05)  # the client's own
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
