"""Lies in Status: numbers that cannot be, an identity or a version that is not, no answer, too much of an answer."""

import asyncio
import uuid
from collections.abc import Callable

import grpc

from scalerl_jax.contract import rollout_pb2 as pb
from tests.hostile.lies import Context, Generate, Lie

FOREVER = 3_600.0  # seconds; every call of a trainer has a deadline below it
FORGED = "W1122 00:00:00.000000 1 train.py:1] forged: all is well"


class Says(Lie):
    """Status with something else in it."""

    def __init__(self, change: Callable[[pb.StatusReply], None], *, after: int = 4):
        super().__init__()
        self._change, self.after = change, after

    async def status(self, reply: pb.StatusReply, context: Context) -> pb.StatusReply | bytes:
        if self.lies:
            self._change(reply)
        return reply


def number(name: str, value: float, *, after: int = 4) -> Callable[[], Lie]:
    """The field `name` of every status is `value`."""
    return lambda: Says(lambda reply: setattr(reply, name, value), after=after)


def newer_trainer() -> Lie:
    def change(reply: pb.StatusReply) -> None:
        reply.version.incarnation = 2**64 - 1

    return Says(change)


def step_of_the_future() -> Lie:
    def change(reply: pb.StatusReply) -> None:
        reply.version.step += 1_000_000

    return Says(change)


def another_each_time() -> Lie:
    def change(reply: pb.StatusReply) -> None:
        reply.server_id = uuid.uuid4().hex

    return Says(change)


def counters_fall() -> Lie:
    def change(reply: pb.StatusReply) -> None:
        for name in ("sampled_tokens", "forced_tokens", "prefill_tokens", "busy_seconds"):
            reply.ClearField(name)

    return Says(change)


class FastClock(Lie):
    """Its seconds are a third of a second long."""

    def __init__(self) -> None:
        super().__init__()
        self._since: tuple[float, float] | None = None

    async def status(self, reply: pb.StatusReply, context: Context) -> pb.StatusReply | bytes:
        if self.lies:
            self._since = self._since or (reply.up_seconds, reply.busy_seconds)
            up, busy = self._since
            reply.busy_seconds = busy + 3 * (reply.up_seconds - up)
            reply.up_seconds = up + 3 * (reply.up_seconds - up)
        return reply


class Hoards(Lie):
    """Slots without end, and no answer to what is asked for."""

    async def status(self, reply: pb.StatusReply, context: Context) -> pb.StatusReply | bytes:
        if self.lies:
            reply.slots, reply.queue_capacity = 4_096, 4_096
        return reply

    async def generate(self, request: pb.GenerateRequest, context: Context, genuine: Generate) -> None:
        await asyncio.sleep(FOREVER)


def no_room() -> Lie:
    def change(reply: pb.StatusReply) -> None:
        reply.slots = reply.queue_capacity = 0

    return Says(change)


class Silent(Lie):
    """No answer to Status, while all else goes on."""

    async def status(self, reply: pb.StatusReply, context: Context) -> pb.StatusReply | bytes:
        if self.lies:
            await asyncio.sleep(FOREVER)
        return reply


class Fails(Lie):
    """An error with a megabyte of words."""

    async def status(self, reply: pb.StatusReply, context: Context) -> pb.StatusReply | bytes:
        if self.lies:
            await context.abort(grpc.StatusCode.UNKNOWN, ("why not\n" + FORGED + "\n") * 100)
        return reply


class Garbage(Lie):
    """Bytes that are no status."""

    async def status(self, reply: pb.StatusReply, context: Context) -> pb.StatusReply | bytes:
        return b"\xff" * 100 if self.lies else reply


def huge() -> Lie:
    """30 MiB of what the model is like."""

    def change(reply: pb.StatusReply) -> None:
        reply.model_config = "{" * (30 * 2**20)

    return Says(change, after=0)


def forging() -> Lie:
    """Words that would be lines of their own in a log."""

    def change(reply: pb.StatusReply) -> None:
        reply.tokenizer_fingerprint = f"x\n{FORGED}\n\x1b[2J{FORGED}\r\n"

    return Says(change, after=0)
