"""Messages that are none, numbers without measure, clients that do not read, faults of ours: codes, logs and bounds."""

import asyncio
import collections
import contextlib
import logging
import math
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollout_server import guard, service, weight_push
from rollout_server.engines.engine import Engine
from rollout_server.weight_store import Staging
from scalerl_jax.contract import codec, limits
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.chunks import Chunk, cut
from tests.rollout_server.client import PROMPT, SECONDS, Push, Served, group, long_group, random_weights, serving
from tests.rollout_server.pause_decoding import pause_decoding
from tests.support.replay.engine import ReplayEngine
from tests.support.waiting import eventually_async

MakeEngine = Callable[..., Engine]
MakeReplay = Callable[..., ReplayEngine]
INVALID = grpc.StatusCode.INVALID_ARGUMENT

METHODS = {
    "/scalerl.v1.Rollout/Status": "unary_unary",
    "/scalerl.v1.Rollout/Generate": "unary_stream",
    "/scalerl.v1.Rollout/PushWeights": "stream_stream",
    "/scalerl.v1.Rollout/Score": "unary_unary",
    "/scalerl.v1.Rollout/ScoreMany": "stream_stream",
    "/grpc.health.v1.Health/Check": "unary_unary",
    "/grpc.health.v1.Health/Watch": "unary_stream",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "stream_stream",
}


async def answer(served: Served, method: str, data: bytes) -> tuple[grpc.StatusCode, str]:
    """How a call with this one message ends."""
    call: Any = getattr(served.channel, METHODS[method])(method)
    if METHODS[method] == "stream_stream":
        call = call(iter([data]), timeout=SECONDS)
    else:
        call = call(data, timeout=SECONDS)
    return await call.code(), await call.details()


@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_no_message_are_the_clients_mistake(
    make_replay: MakeReplay, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    async with serving(make_replay()) as served:
        for data in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0b" * 40, b"\x08" + b"\xff" * 30):
            assert (await answer(served, method, data))[0] is INVALID
        deep = b""
        for _ in range(120):  # deeper than protobuf goes
            deep = b"\x12" + bytes([len(deep) & 0x7F | 0x80, len(deep) >> 7]) + deep
        code, details = await answer(served, method, b"\xff" * 1000 + deep)
        assert code is INVALID and len(details) <= 1024
        assert (await served.status()).slots
    assert "Traceback" not in caplog.text


@pytest.fixture
def one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the lines of one kind: on a loaded machine a test may take longer than a minute."""
    monkeypatch.setattr(guard, "WINDOW_SECONDS", 1e6)


async def test_a_flood_of_them_is_a_few_lines(
    make_replay: MakeReplay, caplog: pytest.LogCaptureFixture, one_window: None
) -> None:
    rng = random.Random(0)
    async with serving(make_replay()) as served:
        for number in range(300):
            method = list(METHODS)[number % len(METHODS)]
            await answer(served, method, b"\xff" + rng.randbytes(rng.randrange(300)))
    assert len(caplog.text) < 20_000


@pytest.mark.parametrize("method", METHODS)
async def test_a_message_longer_than_any_that_could_be_served_is_not_parsed(
    make_replay: MakeReplay, method: str
) -> None:
    """Two bytes make an object: 4 million completions took the event loop 13 s."""
    async with serving(make_replay()) as served:
        code, details = await answer(served, method, b"\x22\x00" * 4_000_000)
        assert code is INVALID
        assert "8000000 bytes" in details and "are possible" in details


async def test_the_longest_request_there_is_fits(make_replay: MakeReplay) -> None:
    engine = make_replay(maximum_tokens=100_000, slots=64, queue=128)
    wanted = group(
        "x" * limits.MAXIMUM_NAME_CHARACTERS,
        completions=192,
        incarnation=0,
        prompt=np.zeros(99_990, np.int32),
        thinking_budget=4,
        interruption=codec.Interruption((5,) * 128, (5,) * 16),
        stop_token_ids=tuple(range(16)),
    )
    message = codec.request_to_proto(wanted).SerializeToString()
    assert len(message) <= service.bounds(engine.info)["/scalerl.v1.Rollout/Generate"].bytes
    async with serving(engine) as served:
        assert len(await served.generate(wanted)) == 192
        header = Push(served.stub, codec.Version(1, 1), random_weights(engine, 1)).header
        assert header.ByteSize() < service.longest_header(engine.info)
        for tensor in header.tensors:  # a host's part, cut as finely as can be
            box = pb.Block(start=tensor.shape, size=tensor.shape)
            tensor.blocks.extend([box] * limits.MAXIMUM_BLOCKS)
        assert header.ByteSize() < service.longest_header(engine.info)
        k = limits.MAXIMUM_SCORE_IDS // 100_000 - 1  # as engine_info has it
        sequence = codec.ScoreRequest(np.zeros(100_000, np.int32), 0, k, np.zeros((100_000, k), np.int32))
        message = codec.score_request_to_proto(sequence).SerializeToString()
        assert len(message) <= min(service.bounds(engine.info)["/scalerl.v1.Rollout/Score"].bytes, 2**24)
        assert len((await served.scores(sequence)).top_ids) == 100_000


NUMBERS: dict[str, dict[str, Any]] = {
    "temperature 1e-40": {"temperature": 1e-40},
    "temperature -1": {"temperature": -1.0},
    "temperature nan": {"temperature": math.nan},
    "temperature inf": {"temperature": math.inf},
    "temperature 1000": {"temperature": 1000.0},
    "top_p 1e-40": {"top_p": 1e-40},
    "top_p nan": {"top_p": math.nan},
    "top_p 2": {"top_p": 2.0},
    "a stop token that is none": {"stop_token_ids": (10**6,)},
    "too many stop tokens": {"stop_token_ids": tuple(range(17))},
    "a prompt of no tokens of the model": {"prompt": np.array([-1, 3], np.int32)},
    "a prompt as long as the cache": {"prompt": np.zeros(256, np.int32)},
    "a phrase too long": {"interruption": codec.Interruption((5,) * 129, (5,)), "thinking_budget": 4},
    "more completions than fit": {"completions": 13},
    "a name too long": {"name": "x" * 513},
}


@pytest.mark.parametrize("what", NUMBERS)
async def test_requests_that_no_engine_takes(make_engine: MakeEngine, what: str) -> None:
    async with serving(make_engine()) as served:
        call = served.stub.Generate(codec.request_to_proto(group(incarnation=0, **NUMBERS[what])), timeout=SECONDS)
        assert await call.code() is INVALID
        assert len(await call.details()) <= 1024
        for tokens in ([-1], [64], [], [0] * 257):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await served.score(np.array(tokens, np.int32))
            assert error.value.code() is INVALID


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.01}, {"temperature": 100.0}, {"top_p": 1e-6}, {"top_k": 2**32 - 1}], ids=str
)
async def test_at_the_ends_of_what_is_possible_log_probabilities_are_finite(
    make_engine: MakeEngine, sampling: dict[str, float]
) -> None:
    async with serving(make_engine()) as served:
        await served.push(codec.Version(7, 1), random_weights(served.engine, 1))
        for completion in await served.generate(group(incarnation=7, **sampling)):  # codec: finite, and not above 0
            assert len(completion.token_ids)


async def test_budgets_without_end_cost_no_more_than_the_cache(make_engine: MakeEngine) -> None:
    async with serving(make_engine()) as served:
        most = 2**32 - 1
        phrase = codec.Interruption((5, 6), (6,))
        wanted = group(incarnation=0, answer_budget=most, thinking_budget=most, interruption=phrase, stop_token_ids=())
        for completion in await served.generate(wanted):
            assert (len(completion.token_ids), completion.finish_reason) == (256 - len(PROMPT), "length")


async def test_a_fault_of_ours_is_loud_a_few_times(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, one_window: None
) -> None:
    engine = make_replay()

    async def broken(token_ids: np.ndarray) -> None:
        raise RuntimeError("the device is gone " * 10_000)

    monkeypatch.setattr(engine, "score", broken)
    async with serving(engine) as served:
        for _ in range(100):
            code, details = await answer(served, "/scalerl.v1.Rollout/Score", b"\x0a\x04\0\0\0\0")
            assert code is grpc.StatusCode.UNKNOWN and len(details) < 1024
    tracebacks = sum(record.exc_info is not None for record in caplog.records)
    assert 0 < tracebacks < 30


async def test_an_answer_whose_client_is_gone_is_no_fault_and_anything_else_is(
    make_replay: MakeReplay, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(make_replay()):
        log = logging.getLogger("grpc._cython.cygrpc")  # where gRPC writes it
        log.error("ExecuteBatchError raised in core by servicer method [%s]", "/scalerl.v1.Rollout/PushWeights")
        log.error("Unexpected [%s] raised by servicer method [%s]", "KeyError", "/scalerl.v1.Rollout/Status")
    assert [record.args[0] for record in caplog.records if record.name == log.name] == ["KeyError"]


async def test_details_are_short_whatever_they_quote(make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that is too long would arrive as RESOURCE_EXHAUSTED, which means: ask again."""
    engine = make_replay()

    async def refuses(token_ids: np.ndarray) -> None:
        raise ValueError("é\n" * 100_000)

    monkeypatch.setattr(engine, "score", refuses)
    async with serving(engine) as served:
        code, details = await answer(served, "/scalerl.v1.Rollout/Score", b"\x0a\x04\0\0\0\0")
        assert code is INVALID and details.isprintable()


async def test_calls_that_wait_leave_room_for_others(make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAXIMUM_PUSHES", 16)
    monkeypatch.setattr(weight_push, "DRAIN_SECONDS", 600.0)  # the first waits until the last is there
    async with serving(make_replay()) as served:
        waiting = [served.stub.PushWeights(timeout=SECONDS) for _ in range(service.MAXIMUM_PUSHES)]
        for call in waiting:
            await call.write(pb.WeightMessage(commit=True))
            assert (await call.read()).refused  # it is being served, and waits for its client's end
        over = served.stub.PushWeights(timeout=SECONDS)
        assert await over.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        watches = health_pb2_grpc.HealthStub(served.channel)
        seen = []
        for number in range(guard.OTHERS.calls + 3):
            watch = watches.Watch(health_pb2.HealthCheckRequest(service=f"{number}"), timeout=SECONDS)
            reply = await watch.read() if number < guard.OTHERS.calls else await watch.code()
            seen.append(watch)
        assert reply is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(served.server._checker._server_watchers) < 5  # nothing is kept of names that nobody serves
        assert (await served.status()).slots
        assert len(await served.generate(group(incarnation=0))) == 4
        for call in (*waiting, *seen):
            call.cancel()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """Of each method, as the guard of this test's server counts them."""
    counted: collections.Counter[str] = collections.Counter()
    made = guard.Guard.__init__

    def init(self: guard.Guard, *bounds: Any) -> None:
        made(self, *bounds)
        self._calls = counted

    monkeypatch.setattr(guard.Guard, "__init__", init)
    return counted


async def test_a_stream_that_nobody_reads_ends(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch, calls: collections.Counter[str]
) -> None:
    heard, left_alone = asyncio.Event(), asyncio.Event()

    def large(completion: codec.Completion) -> pb.Completion:
        if heard.is_set() and not left_alone.is_set():
            monkeypatch.setattr(guard, "UNREAD_SECONDS", 0.5)  # of this one and those after it
            left_alone.set()
        return pb.Completion(token_ids=bytes(8 * 2**20), group_id="x")

    monkeypatch.setattr(codec, "completion_to_proto", large)
    async with serving(make_replay(token_seconds=0)) as served:
        call = served.stub.Generate(codec.request_to_proto(long_group(completions=12, incarnation=0)), timeout=SECONDS)
        await call.read()
        heard.set()
        with contextlib.suppress(grpc.aio.AioRpcError):
            while not left_alone.is_set():  # it goes on, and then nobody reads
                await call.read()
        await eventually_async(lambda: not served.server.service._calls)
        assert (await served.status()).busy_slots == 0
        # Its connection is there still: what it holds are no places.
        await eventually_async(lambda: not calls.total())
        monkeypatch.setattr(guard, "UNREAD_SECONDS", SECONDS)
        further = served.stub.Generate(codec.request_to_proto(group(incarnation=0, completions=1)), timeout=SECONDS)
        assert (await further.read()).group_id == "x"
        further.cancel()
        call.cancel()


async def test_a_call_whose_message_never_comes_is_counted_and_ends(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch, calls: collections.Counter[str]
) -> None:
    status = "/scalerl.v1.Rollout/Status"
    async with serving(make_replay()) as served:
        silent = served.channel.stream_unary(status)(timeout=SECONDS)  # the same call on the wire
        await eventually_async(lambda: calls[status] == 1)
        assert (await served.status()).slots
        silent.cancel()
        await eventually_async(lambda: not calls.total())
        monkeypatch.setattr(guard, "MESSAGE_SECONDS", 0.2)
        silent = served.channel.stream_unary(status)(timeout=SECONDS)
        assert await silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await silent.details() == "no message came for 0.2 s"
        monkeypatch.setattr(guard, "MESSAGE_SECONDS", SECONDS)
        empty = served.channel.stream_unary(status)(iter(()), timeout=SECONDS)
        assert await empty.code() is INVALID and not calls.total()


async def test_requests_pinned_to_an_old_version_do_not_keep_a_late_one_out(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(make_replay()) as served, pause_decoding(served.engine, chunks=1) as decoding:
        await served.push(codec.Version(7, 1), random_weights(served.engine, 1))
        pinned = asyncio.create_task(served.generate(long_group(incarnation=7, pinned_step=1)))
        await served.until(lambda status: status.busy_slots == 4)
        push = asyncio.create_task(served.push(codec.Version(7, 2), random_weights(served.engine, 2)))
        await decoding.arrival(codec.Version(7, 2))
        more = long_group("eval/1", incarnation=7, pinned_step=1, completions=1)
        monkeypatch.setattr("rollout_server.weight_push.APPLY_SECONDS", 0.0)
        assert await served.refusal(more) is grpc.StatusCode.FAILED_PRECONDITION
        monkeypatch.setattr("rollout_server.weight_push.APPLY_SECONDS", 600.0)
        decoding.go_on()
        assert len(await pinned) == 4
        assert (await push).HasField("applied")


@pytest.mark.parametrize("silent", ["before the header", "after the header", "before the commit"])
async def test_a_push_whose_client_falls_silent_holds_up_nobody(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    monkeypatch.setattr("rollout_server.weight_push.STALL_SECONDS", 1.0)
    async with serving(make_replay()) as served:
        stalled = Push(served.stub, codec.Version(2**40, 9), random_weights(served.engine, 1))
        if silent != "before the header":
            await stalled.send_header()
        if silent == "before the commit":
            await stalled.send_chunks()
        assert "nothing came for 1 s" in (await stalled.call.read()).refused
        monkeypatch.setattr("rollout_server.weight_push.STALL_SECONDS", 600.0)
        # Of an older trainer: it would have been refused for as long as the other was being received.
        assert (await served.push(codec.Version(7, 1), random_weights(served.engine, 2))).HasField("applied")
        stalled.call.cancel()


async def test_a_version_that_comes_in_drops_has_an_end(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_server.weight_push.RECEIVE_SECONDS", -1.0)
    async with serving(make_replay()) as served:
        push = Push(served.stub, codec.Version(7, 1), random_weights(served.engine, 1))
        await push.send_header()
        await push.send_chunk(0)
        assert "it came too slowly" in (await push.outcome()).refused


def test_what_is_kept_of_a_version_in_very_many_chunks_is_small() -> None:
    count = 2**14
    buffer = np.zeros(count, np.uint8)
    tracemalloc.start()
    staging = Staging(pb.WeightHeader(chunk_bytes=1, payload_bytes=count), buffer)
    right = cut(0, (b"\0",)).crc32
    for index in range(count - 1):
        staging.put(Chunk(index, (b"\0",), right ^ (index % 2)))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 20 * count  # it was over 200 a chunk
    assert len(staging.ask()) == 1
