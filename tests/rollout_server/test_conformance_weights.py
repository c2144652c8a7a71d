"""What every engine does when weights arrive, over real gRPC: all or nothing, and never the wrong version."""

import asyncio
import time
from collections.abc import Callable

import grpc
import numpy as np
import pytest

from rollout_server.engines.engine import Engine
from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.codec import Version
from tests.rollout_server.client import (
    INCARNATION,
    PROMPT,
    SECONDS,
    Push,
    Served,
    ended,
    group,
    long_group,
    random_weights,
    serving,
)
from tests.rollout_server.external import External
from tests.rollout_server.pause_decoding import CHUNK, pause_decoding, pause_loading
from tests.support.waiting import eventually_async

MakeEngine = Callable[..., Engine]

TEXT = np.array([7, 8, 9, 20, 21, 22, 23], np.int32)


def step(number: int) -> Version:
    return Version(INCARNATION, number)


async def held(served: Served) -> Version:
    return codec.version_from_proto((await served.status()).version)


async def test_a_version_is_applied_and_told(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served:
        began = time.monotonic()
        reply = await served.push(step(3), random_weights(served.engine, 1))
        elapsed = time.monotonic() - began
        assert codec.version_from_proto(reply.applied.version) == step(3) == await held(served)
        assert 0 < reply.applied.staging_seconds <= elapsed
        assert 0 <= reply.applied.pause_seconds <= elapsed
        status = await served.status()
        assert (status.versions_applied, status.chunks_refused) == (1, 0)
        assert status.pause_seconds == pytest.approx(reply.applied.pause_seconds)


async def test_the_weights_decide_the_scores(make_model_engine: MakeEngine) -> None:
    """A, then B, then A again: a server holds what it was given last, in full."""
    async with serving(make_model_engine()) as served:
        scores = []
        for number, seed in enumerate([1, 2, 1]):
            await served.push(step(number), random_weights(served.engine, seed))
            scores.append((await served.score(TEXT))[0])
        np.testing.assert_array_equal(scores[0], scores[2])
        assert np.abs(scores[0] - scores[1]).max() > 0.01


async def staged(served: Served, version: Version, seed: int) -> Push:
    """A push that lacks only its commit, so that a test can say when the weights arrive."""
    push = Push(served.stub, version, random_weights(served.engine, seed))
    await push.send_header()
    await push.send_chunks()
    return push


async def test_weights_are_swapped_in_mid_completion(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served, pause_decoding(served.engine, chunks=3) as decoding:
        await served.push(step(1), random_weights(served.engine, 1))
        push = await staged(served, step(2), 2)
        sampling = asyncio.create_task(served.generate(long_group(completions=12)))
        await served.until(lambda status: status.sampled_tokens == 4 * 3 * CHUNK)
        await push.send_commit()
        await decoding.arrival(step(2))
        decoding.go_on()
        assert (await push.outcome()).HasField("applied")
        assert await held(served) == step(2)
        completions = await sampling
        spans = [[version for version, _, _ in c.versions] for c in completions]
        # Those in slots changed weights in their middle, and those that waited began with the new ones.
        assert sorted(spans) == [[1, 2]] * 4 + [[2]] * 8
        for completion in completions:
            assert len(completion.token_ids) == 200
            assert completion.token_steps().tolist() == sorted(completion.token_steps().tolist())


async def test_a_pinned_completion_is_finished_by_its_own_version(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served, pause_decoding(served.engine, chunks=3) as decoding:
        await served.push(step(1), random_weights(served.engine, 1))
        push = await staged(served, step(2), 2)
        pinned = asyncio.create_task(served.generate(long_group("eval/1/0", completions=12, pinned_step=1)))
        await served.until(lambda status: status.busy_slots == 4)
        await push.send_commit()
        await decoding.arrival(step(2), pinned=True)
        decoding.go_on()
        completions = await pinned
        assert [c.versions for c in completions] == [((1, 0, 200),)] * 12
        assert (await push.outcome()).HasField("applied")
        assert await held(served) == step(2)


async def test_a_pin_that_is_given_up_lets_the_weights_in(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served, pause_decoding(served.engine, chunks=3) as decoding:
        await served.push(step(1), random_weights(served.engine, 1))
        wanted = codec.request_to_proto(long_group("eval/1/0", completions=12, pinned_step=1))
        push = await staged(served, step(2), 2)
        pinned = served.stub.Generate(wanted, timeout=SECONDS)
        await served.until(lambda status: status.busy_slots == 4)
        await push.send_commit()
        await decoding.arrival(step(2), pinned=True)
        assert await held(served) == step(1)
        pinned.cancel()
        await served.until(lambda status: status.busy_slots == status.queued == 0)
        decoding.go_on()
        assert (await push.outcome()).HasField("applied")


async def test_a_new_incarnation_ends_what_the_old_one_leased(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served, pause_decoding(served.engine, chunks=3) as decoding:
        await served.push(step(9), random_weights(served.engine, 1))
        # A trainer that starts anew, from an older checkpoint.
        new = Version(INCARNATION + 1, 4)
        push = await staged(served, new, 2)
        calls = [
            served.stub.Generate(codec.request_to_proto(wanted), timeout=SECONDS)
            for wanted in (long_group("train/0", completions=6), long_group("eval/0/0", completions=6, pinned_step=9))
        ]
        await served.until(lambda status: (status.busy_slots, status.queued) == (4, 8))
        await push.send_commit()
        await decoding.arrival(new)
        decoding.go_on()
        assert (await push.outcome()).HasField("applied")
        for call in calls:
            await ended(call)
            assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert await served.refusal(group()) is grpc.StatusCode.FAILED_PRECONDITION
        assert len(await served.generate(group(incarnation=new.incarnation, minimum_step=4))) == 4
        # The old trainer is not quite dead.
        reply = await served.push(step(10), random_weights(served.engine, 1))
        assert served.says("older", reply.refused)
        assert await held(served) == new


async def test_a_flipped_bit_is_refused_and_asked_for_again(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served:
        await served.push(step(1), weights := random_weights(served.engine, 1))
        wanted, _ = await served.score(TEXT)
        push = Push(served.stub, step(2), weights, flip_bit_of=frozenset({0, 3}))
        assert (await push.run()).HasField("applied")
        assert push.asked_again == [0, 3]
        assert (await served.status()).chunks_refused == 2
        np.testing.assert_array_equal((await served.score(TEXT))[0], wanted)


async def test_a_missing_chunk_is_asked_for_after_commit(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served:
        await served.push(step(1), weights := random_weights(served.engine, 1))
        wanted, _ = await served.score(TEXT)
        push = Push(served.stub, step(2), weights)
        last = len(push.chunks) - 1
        push = Push(served.stub, step(2), weights, forget=frozenset({1, last}), flip_bit_of=frozenset({2}))
        assert (await push.run()).HasField("applied")
        assert push.asked_again == [2, 1, last]
        np.testing.assert_array_equal((await served.score(TEXT))[0], wanted)


def _shape(header: pb.WeightHeader) -> None:
    header.tensors[0].shape[0] += 1


def _swap(header: pb.WeightHeader) -> None:
    header.tensors[0].shape[:] = header.tensors[0].shape[::-1]


REFUSED: dict[str, Callable[[pb.WeightHeader], None]] = {
    "has shape": _shape,
    "the model's is": _swap,
    "'float16'": lambda header: setattr(header.tensors[1], "dtype", "float16"),
    "'bfloat16'": lambda header: setattr(header.tensors[1], "dtype", "bfloat16"),
    "missing": lambda header: header.tensors.__delitem__(2),
    "missing: ": lambda header: setattr(header.tensors[2], "name", "extra"),
    "named twice": lambda header: header.tensors[2].CopyFrom(header.tensors[0]),
    "tensors, the model has": lambda header: header.tensors.append(header.tensors[0]),
    "payload_bytes": lambda header: setattr(header, "payload_bytes", header.payload_bytes + 4),
    "chunk_bytes is 0": lambda header: setattr(header, "chunk_bytes", 0),
    "chunk_bytes is 4294967295": lambda header: setattr(header, "chunk_bytes", 2**32 - 1),
    "no trainer": lambda header: header.target.CopyFrom(pb.Version(incarnation=0, step=9)),
    "older": lambda header: setattr(header.target, "step", 0),
}


@pytest.mark.parametrize("told", sorted(REFUSED))
async def test_a_header_that_does_not_fit_is_refused(make_engine: MakeEngine, told: str) -> None:
    async with serving(make_engine()) as served:
        await served.push(step(1), random_weights(served.engine, 1))
        before, _ = await served.score(TEXT)
        push = Push(served.stub, step(2), random_weights(served.engine, 2), change=REFUSED[told])
        # The header alone is enough: not a byte of payload is waited for.
        await push.send_header()
        assert served.says(told, (await push.outcome()).refused)
        assert await held(served) == step(1)
        np.testing.assert_array_equal((await served.score(TEXT))[0], before)
        assert (await served.push(step(2), random_weights(served.engine, 2))).HasField("applied")


async def test_a_refused_push_may_still_be_writing(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served:
        push = Push(served.stub, step(2), random_weights(served.engine, 2), change=_shape, chunk_bytes=64)
        assert served.says("has shape", (await push.run()).refused)


async def is_staged(served: Served, push: Push) -> None:
    """Returns when every chunk is there; of somebody else's generator that cannot be seen: it has the time to."""
    if isinstance(served.engine, External):
        await asyncio.sleep(0.05)
        return
    receiver = served.server.service._weights

    def whole() -> bool:
        stagings = receiver._receiving.stagings.values() if receiver._receiving is not None else ()
        return any(staging.chunks == len(push.chunks) and staging.complete for staging in stagings)

    await eventually_async(whole)


async def test_an_unfinished_push_changes_nothing(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served:
        await served.push(step(1), random_weights(served.engine, 1))
        before, _ = await served.score(TEXT)
        # Every chunk is staged, but there is no commit; then the client ends its side, or goes away.
        for number, end in enumerate(["half-close", "cancel", "header in the middle"]):
            push = Push(served.stub, step(2), random_weights(served.engine, 5 + number))
            await push.send_header()
            await push.send_chunks()
            await is_staged(served, push)
            np.testing.assert_array_equal((await served.score(TEXT))[0], before)
            if end == "cancel":
                push.call.cancel()
            elif end == "half-close":
                await push.call.done_writing()
                assert served.says("commit", (await push.outcome()).refused)
            else:
                await push.send_header()
                assert served.says("header", (await push.outcome()).refused)
            assert await held(served) == step(1)
            np.testing.assert_array_equal((await served.score(TEXT))[0], before)
        completion = (await served.generate(group(completions=1)))[0]
        logprobs, _ = await served.score(np.concatenate([PROMPT, completion.token_ids]))
        np.testing.assert_allclose(logprobs[len(PROMPT) :], completion.logprobs, atol=1e-4)


async def test_a_chunk_that_stays_wrong_ends_the_push(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served:
        push = Push(served.stub, step(2), random_weights(served.engine, 2))
        await push.send_header()
        for _ in range(8):
            await push.send_chunk(1, flip=True)
        replies = [await push.call.read() for _ in range(8)]
        assert [reply.WhichOneof("kind") for reply in replies] == ["resend"] * 7 + ["refused"]
        assert served.says("chunk 1", replies[-1].refused)


async def test_a_newer_push_takes_the_place_of_an_older_one(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served:
        older = Push(served.stub, step(2), random_weights(served.engine, 2))
        await older.send_header()
        await older.send_chunk(0, flip=True)
        assert (await older.call.read()).resend == 0  # so it is being received
        assert served.says("newer", (await served.push(step(1), random_weights(served.engine, 1))).refused)
        assert (await served.push(step(3), random_weights(served.engine, 3))).HasField("applied")
        await older.send_chunk(1)
        assert served.says("took its place", (await older.outcome()).refused)
        assert await held(served) == step(3)


async def test_a_push_waits_while_another_is_applied(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 2 is held up; 3 and 4 come meanwhile. The newest goes on, and the tensors of 2 are not overwritten."""
    async with serving(make_engine()) as served:
        go, service = pause_loading(served.engine, monkeypatch), served.server.service._weights
        second = asyncio.create_task(served.push(step(2), random_weights(served.engine, 2)))
        await eventually_async(lambda: service._applying is not None)
        third = asyncio.create_task(served.push(step(3), random_weights(served.engine, 3)))
        await eventually_async(lambda: service._newest_step == 3)
        fourth = asyncio.create_task(served.push(step(4), random_weights(served.engine, 4)))
        await eventually_async(lambda: service._newest_step == 4)
        assert await held(served) == Version(0, 0)
        go.set()
        assert (await second).HasField("applied")
        assert served.says("took its place", (await third).refused)
        assert (await fourth).HasField("applied")
        assert await held(served) == step(4)
        assert (await served.status()).versions_applied == 2


async def test_a_client_that_leaves_after_commit_leaves_a_whole_version(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(make_engine()) as served:
        go, service = pause_loading(served.engine, monkeypatch), served.server.service._weights
        push = await staged(served, step(2), 2)
        await push.send_commit()
        await eventually_async(lambda: service._applying is not None)
        push.call.cancel()
        go.set()
        await served.until(lambda status: status.version.step == 2)
        left, _ = await served.score(TEXT)
        await served.push(step(3), random_weights(served.engine, 2))
        np.testing.assert_array_equal((await served.score(TEXT))[0], left)
