"""A client of the contract for tests: it keeps to the letter of rollout.proto, or breaks it where a test asks."""

import asyncio
import contextlib
import dataclasses
import math
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import numpy as np

from rollout_server.engines.engine import Engine
from rollout_server.service import RolloutServer
from rollout_server.weight_store import numpy_dtype
from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.contract.security import OPEN, PLAIN, Access, Credentials, connect
from tests.rollout_server.external import External

SECONDS = 150.0  # deadline of every call

INCARNATION = 1000
PROMPT = np.array([7, 8, 9], np.int32)
STOP = 1
NO_INTERRUPTION = codec.Interruption()


@dataclasses.dataclass(frozen=True)
class Served:
    engine: Any
    server: RolloutServer
    channel: grpc.aio.Channel
    stub: Stub

    async def status(self) -> pb.StatusReply:
        return await self.stub.Status(pb.StatusRequest(), timeout=SECONDS)

    async def generate(self, group: codec.GroupRequest, *, seconds: float = SECONDS) -> list[codec.Completion]:
        """Sorted by index. Whatever breaks the contract raises ValueError."""
        call = self.stub.Generate(codec.request_to_proto(group), timeout=seconds)
        return sorted([codec.completion_from_proto(message) async for message in call], key=lambda c: c.index)

    async def refusal(self, group: codec.GroupRequest) -> grpc.StatusCode:
        """The status of a call that must fail without a completion."""
        call = self.stub.Generate(codec.request_to_proto(group), timeout=SECONDS)
        assert await ended(call) == []
        return await call.code()

    async def score(self, token_ids: np.ndarray) -> tuple[np.ndarray, codec.Version]:
        """As a client that knows of token_ids and log-probabilities only."""
        request = pb.ScoreRequest(token_ids=codec.encode_ids(token_ids))
        reply = await self.stub.Score(request, timeout=SECONDS)
        return codec.decode_floats(reply.logprobs), codec.version_from_proto(reply.version)

    async def scores(self, request: codec.ScoreRequest) -> codec.Scores:
        """Whatever breaks the contract raises ValueError."""
        reply = await self.stub.Score(codec.score_request_to_proto(request), timeout=SECONDS)
        return codec.scores_from_proto(reply, request, vocabulary=self.engine.info.vocabulary)

    async def until(self, holds: Callable[[pb.StatusReply], bool], *, seconds: float = SECONDS) -> pb.StatusReply:
        """The first status for which `holds`."""
        async with asyncio.timeout(seconds):
            while not holds(status := await self.status()):
                await asyncio.sleep(0.01)
        return status

    def says(self, word: str, reason: str) -> bool:
        """Whether a refusal names what is wrong; of somebody else's generator: whether it says anything."""
        return word in reason or (isinstance(self.engine, External) and reason != "")

    async def push(self, version: codec.Version, tensors: Mapping[str, np.ndarray], **options: Any) -> pb.WeightReply:
        return await Push(self.stub, version, tensors, **options).run()


@contextlib.asynccontextmanager
async def serving(engine: Engine, access: Access = OPEN, credentials: Credentials = PLAIN) -> AsyncIterator[Served]:
    if isinstance(engine, External):
        async with engine.serving() as (told, channel, stub):
            yield Served(engine, told, channel, stub)
        return
    server = RolloutServer(engine, access=access)
    await server.start()
    channel = connect(f"127.0.0.1:{server.port}", credentials)
    try:
        yield Served(engine, server, channel, Stub(channel))
    finally:
        await channel.close()
        await server.stop()


async def ended(call: Any) -> list[pb.Completion]:
    """What a Generate call still gives before it ends in an error."""
    messages: list[pb.Completion] = []
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for message in call:
            messages.append(message)  # noqa: PERF401 (those before the error count)
    assert await call.code() is not grpc.StatusCode.OK
    return messages


def group(
    name: str = "train/0",
    *,
    completions: int = 4,
    prompt: np.ndarray = PROMPT,
    incarnation: int = INCARNATION,
    indices: range | None = None,
    thinking_budget: int = 0,
    minimum_step: int = 0,
    pinned_step: int | None = None,
    interruption: codec.Interruption = NO_INTERRUPTION,
    **sampling: Any,
) -> codec.GroupRequest:
    return codec.GroupRequest(
        incarnation=incarnation,
        group_id=name,
        prompt=prompt,
        completions=tuple(
            codec.CompletionRequest(index, seed=1000 + index, thinking_budget=thinking_budget)
            for index in indices or range(completions)
        ),
        sampling=codec.Sampling(**{"answer_budget": 24, "stop_token_ids": (STOP,), **sampling}),
        interruption=interruption,
        minimum_step=minimum_step,
        pinned_step=pinned_step,
    )


def long_group(name: str = "train/0", *, tokens: int = 200, **options: Any) -> codec.GroupRequest:
    """Completions that nothing ends before so many tokens."""
    return group(name, answer_budget=tokens, stop_token_ids=(), **options)


def random_weights(engine: Engine, seed: int) -> dict[str, np.ndarray]:
    rng, dtype = np.random.default_rng(seed), numpy_dtype(engine.info.sync_dtype)
    return {name: rng.normal(0, 0.3, shape).astype(dtype) for name, shape in engine.info.tensors.items()}


class Push:
    """One version, sent as the contract says, and where asked: chunks broken on their way or forgotten."""

    def __init__(
        self,
        stub: Stub,
        version: codec.Version,
        tensors: Mapping[str, np.ndarray],
        *,
        chunk_bytes: int = 1000,
        flip_bit_of: frozenset[int] = frozenset(),  # on the first sending of these chunks
        forget: frozenset[int] = frozenset(),  # these are sent only when asked for
        change: Callable[[pb.WeightHeader], None] = lambda header: None,
    ):
        payload = b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in tensors.values())
        self.header = pb.WeightHeader(
            target=codec.version_to_proto(version),
            tensors=[
                pb.TensorInfo(name=name, dtype=str(tensor.dtype), shape=tensor.shape)
                for name, tensor in tensors.items()
            ],
            payload_bytes=len(payload),
            chunk_bytes=chunk_bytes,
        )
        change(self.header)
        self.chunks = [payload[start : start + chunk_bytes] for start in range(0, len(payload), chunk_bytes)]
        assert len(self.chunks) == math.ceil(len(payload) / chunk_bytes)
        self._flip, self._forget = flip_bit_of, forget
        self.asked_again: list[int] = []
        self.call = stub.PushWeights(timeout=SECONDS)

    async def send_header(self) -> None:
        await self.call.write(pb.WeightMessage(header=self.header))

    async def send_chunk(self, index: int, *, flip: bool = False) -> None:
        data = self.chunks[index]
        sent = bytes([data[0] ^ 4]) + data[1:] if flip else data
        chunk = pb.WeightChunk(index=index, data=sent, crc32=zlib.crc32(data))
        await self.call.write(pb.WeightMessage(chunk=chunk))

    async def send_chunks(self) -> None:
        for index in range(len(self.chunks)):
            if index not in self._forget:
                await self.send_chunk(index, flip=index in self._flip)

    async def send_commit(self) -> None:
        await self.call.write(pb.WeightMessage(commit=True))

    async def outcome(self) -> pb.WeightReply:
        """Sends again what is asked for, and returns the last reply: applied or refused."""
        while (reply := await self.call.read()).WhichOneof("kind") == "resend":
            self.asked_again.append(reply.resend)
            await self.send_chunk(reply.resend)
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF
        assert await self.call.code() is grpc.StatusCode.OK
        return reply

    async def run(self) -> pb.WeightReply:
        await self.send_header()
        await self.send_chunks()
        await self.send_commit()
        return await self.outcome()
