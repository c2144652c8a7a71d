"""Lies in how a request for completions ends: never, at once, with an error, or again and again."""

import asyncio
import time
from collections.abc import Callable

import grpc

from scalerl_jax.contract import rollout_pb2 as pb
from tests.hostile.lies import Around, Context, Generate, Lie
from tests.hostile.status_lies import FOREVER, FORGED

DRIP_SECONDS = 3.0


class Refuses(Lie):
    """Every request, with this code."""

    def __init__(self, code: grpc.StatusCode, details: str):
        super().__init__()
        self._end = code, details

    async def generate(self, request: pb.GenerateRequest, context: Context, genuine: Generate) -> None:
        await context.abort(*self._end)


def refuses(code: grpc.StatusCode, details: str = "no") -> Callable[[], Lie]:
    return lambda: Refuses(code, details)


def wordy() -> Lie:
    """As many words as fit into the end of a call, over several lines."""
    return Refuses(grpc.StatusCode.UNKNOWN, ("because\n" + FORGED + "\n") * 80)


class Aborts(Lie):
    """Marks every completion as aborted, at once."""

    async def generate(self, request: pb.GenerateRequest, context: Context, genuine: Generate) -> None:
        for wanted in request.completions:
            await context.write(
                pb.Completion(
                    incarnation=request.incarnation,
                    group_id=request.group_id,
                    index=wanted.index,
                    token_ids=b"\7\0\0\0",
                    logprobs=b"\0\0\0\0",
                    versions=[pb.VersionSpan(step=request.minimum_step, start=0, end=1)],
                    finish_reason=pb.FINISH_REASON_ABORTED,
                )
            )


class _Keeping(Around):
    def __init__(self, context: Context):
        super().__init__(context)
        self.kept: list[pb.Completion] = []

    async def write(self, message: pb.Completion) -> None:
        self.kept.append(message)
        await self.context.write(message)


class Repeats(Lie):
    """Once all is sent it is sent again, for ever."""

    async def generate(self, request: pb.GenerateRequest, context: Context, genuine: Generate) -> None:
        keeping = _Keeping(context)
        await genuine(request, keeping)
        while True:
            for message in keeping.kept:
                await context.write(message)
            await asyncio.sleep(0)


class RepeatsTheFirst(Lie):
    """The first completion again and again; the others never."""

    async def generate(self, request: pb.GenerateRequest, context: Context, genuine: Generate) -> None:
        class Repeating(Around):
            async def write(self, message: pb.Completion) -> None:
                while True:
                    await self.context.write(message)
                    await asyncio.sleep(0.001)

        await genuine(request, Repeating(context))


class NeverEnds(Lie):
    """All is sent, and the call stays open."""

    async def generate(self, request: pb.GenerateRequest, context: Context, genuine: Generate) -> None:
        await genuine(request, context)
        await asyncio.sleep(FOREVER)


class Swallows(Lie):
    """Takes every request and sends nothing. Its slots look busy; `drips`: its counters say a token now and then."""

    def __init__(self, *, drips: bool):
        super().__init__()
        self._drips, self._since = drips, time.monotonic()

    async def status(self, reply: pb.StatusReply, context: Context) -> pb.StatusReply | bytes:
        if self.lies and self._drips:
            # So few that nobody could tell, and often enough to look alive.
            reply.sampled_tokens += int((time.monotonic() - self._since) / DRIP_SECONDS)
        return reply

    async def generate(self, request: pb.GenerateRequest, context: Context, genuine: Generate) -> None:
        await asyncio.sleep(FOREVER)


def swallows() -> Lie:
    return Swallows(drips=False)


def drips() -> Lie:
    return Swallows(drips=True)


class EndsAtOnce(Lie):
    """Every call ends well, without a completion."""

    async def generate(self, request: pb.GenerateRequest, context: Context, genuine: Generate) -> None:
        return


class LeavesOneOut(Lie):
    """Every call ends well, one completion short."""

    async def generate(self, request: pb.GenerateRequest, context: Context, genuine: Generate) -> None:
        class Short(Around):
            sent = 0

            async def write(self, message: pb.Completion) -> None:
                self.sent += 1
                if self.sent < len(request.completions):
                    await self.context.write(message)

        await genuine(request, Short(context))


class Garbage(Lie):
    """Bytes that are no completion."""

    async def generate(self, request: pb.GenerateRequest, context: Context, genuine: Generate) -> None:
        await context.write(b"\xff" * 50)


class OfOthers(Lie):
    """Answers with what was asked of it before: another group's completions, in themselves good ones."""

    def __init__(self) -> None:
        super().__init__()
        self._before: list[pb.Completion] = []

    async def generate(self, request: pb.GenerateRequest, context: Context, genuine: Generate) -> None:
        keeping = _Keeping(context)
        if not self._before:
            await genuine(request, keeping)
            self._before = keeping.kept
        for message in self._before:
            await context.write(message)
