"""A fleet and a publisher of small versions for it, for tests of servers that pass versions on to each other."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest

from rollout_server.engines.replay.engine import ReplayEngine
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.codec import Version
from scalerl_jax.contract.weight_delta import Change, WeightDelta, digest, encode
from scalerl_jax.rollouts.group_buffer import Process
from scalerl_jax.rollouts.incarnation import Incarnation
from scalerl_jax.rollouts.weights.publisher import Publisher
from scalerl_jax.rollouts.weights.push import PushReport
from tests.rollout_server.client import INCARNATION, SECONDS, Served, serving

MakeReplay = Callable[..., ReplayEngine]
SERVERS = 8


class Run:
    """Versions that differ a little from one to the next, and a publisher of them."""

    def __init__(self, engine: ReplayEngine):
        rng = np.random.default_rng(0)
        self.shapes = dict(engine.info.tensors)
        self.held = {name: rng.integers(0, 2**15, shape).astype(np.uint16) for name, shape in self.shapes.items()}
        self.rng, self.step = rng, -1
        self.publisher = Publisher(incarnation=Incarnation(INCARNATION), chunk_bytes=500, delta_bytes=2**24)

    @property
    def dense_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.held.values())

    def publish(self) -> int:
        """Makes the next version; the bytes of its delta."""
        self.step += 1
        parts = {}
        for name, tensor in self.held.items():
            positions = np.flatnonzero(self.rng.random(tensor.size) < 0.02)
            tensor.reshape(-1)[positions] ^= 1
            parts[name] = encode(Change(positions, tensor.reshape(-1)[positions]))
        base = self.step - 1 if self.step else None
        digests = {name: digest(tensor) for name, tensor in self.held.items()}
        delta = WeightDelta(base, self.step, parts if self.step else {}, digests, self.shapes)
        whole = {name: tensor.copy().view(ml_dtypes.bfloat16) for name, tensor in self.held.items()}
        self.publisher.deltas.record(self.step, lambda: delta)
        self.publisher.publish(self.step, whole)
        return delta.nbytes

    async def push(self, served: Served, base: int | None, address: str = "", server_id: str = "") -> PushReport:
        address = address or f"127.0.0.1:{served.server.port}"
        process = Process(address, server_id or served.server.service.server_id)
        return await self.publisher.push(served.stub, self.step, process, base=base, timeout=SECONDS)

    def compare(self, served: Served) -> None:
        assert served.engine.status().version == Version(INCARNATION, self.step)
        for name, tensor in self.held.items():
            assert served.engine.weights[name].tobytes() == tensor.tobytes()


@contextlib.asynccontextmanager
async def fleet(make_replay: MakeReplay, count: int = SERVERS, *trust: Any) -> AsyncIterator[tuple[list[Served], Run]]:
    async with contextlib.AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(serving(make_replay(sync_dtype="bfloat16"), *trust)) for _ in range(count)
        ]
        run = Run(servers[0].engine)
        stack.callback(run.publisher.close)
        yield servers, run


async def all_of(run: Run, servers: list[Served], base: int | None) -> list[PushReport]:
    reports = await asyncio.gather(*(run.push(served, base) for served in servers))
    for served in servers:
        run.compare(served)
    return reports


async def header_to(served: Served, run: Run, *hops: pb.Relay) -> list[pb.WeightReply]:
    """What a server answers to the newest version, sent whole, that it is to pass on to these; until all is known."""
    payload = await run.publisher._payload(None, run.step, lambda: pytest.fail("it is there already"))
    header = pb.WeightHeader.FromString(payload.header.SerializeToString())
    header.relays.extend(hops)
    call = served.stub.PushWeights(timeout=SECONDS)
    await call.write(pb.WeightMessage(header=header))
    replies: list[pb.WeightReply] = []
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it may end the call before
        for index in range(payload.chunks):
            await call.write(payload.chunk(index))
        await call.write(pb.WeightMessage(commit=True))
    waiting = len(hops) + 1
    while waiting and (reply := await call.read()) is not grpc.aio.EOF:
        replies.append(reply)
        waiting -= reply.WhichOneof("kind") == "applied"
        waiting -= reply.WhichOneof("kind") == "relayed" and not reply.relayed.HasField("staged")
        if reply.WhichOneof("kind") in ("refused", "full_sync"):
            break
    call.cancel()
    return replies


def fate(replies: list[pb.WeightReply], address: str) -> pb.WeightReply.Relayed:
    (relayed,) = [r.relayed for r in replies if r.relayed.address == address and not r.relayed.HasField("staged")]
    return relayed


async def published(run: Run, servers: list[Served]) -> None:
    run.publish()
    await all_of(run, servers, None)
    run.publish()
    await run.publisher._payload(None, run.step, run.publisher._sources[run.step])
