"""Thousands of calls that no honest client makes: a server answers them in the contract's words and goes on as before.

Each failure names the call by seed and number; Generator(seed, ...).call(number) makes it again.
"""

import asyncio
import collections
import contextlib
import pathlib
import resource
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.rpc import SERVICE
from scalerl_jax.model.decoder_config import read_config
from scalerl_jax.model.tensor_layout import hf_tensors
from scalerl_jax.system import memory
from tests.hostile.rpc_generator import CANCEL, FIRST, READ, UNREAD, Call, Generator, group
from tests.hostile.rpc_sender import CUT_SHORT, LAST, SECONDS, Outcome, Sender, send_all
from tests.support.servers import CalledServer

pytestmark = pytest.mark.slow

VERSION = codec.Version(1000, 5)
CALLS = 6_000  # to each engine
BLOCKS = 6  # between two of them the server is looked at
FLAGS = ("--slots=8", "--queue=16", "--decode_chunk=8", "--maximum_tokens=256", "--sync_dtype=bfloat16")
ENGINES = {"replay": ("--engine=replay",), "jax": ("--engine=jax", "--compute_dtype=float32")}

# What a call may end with. UNKNOWN and INTERNAL are bugs; DEADLINE_EXCEEDED is a server that does not answer.
Code = grpc.StatusCode
CODES = {Code.OK, Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.RESOURCE_EXHAUSTED, Code.ABORTED}
CODES |= {Code.UNIMPLEMENTED, Code.NOT_FOUND}  # a method, or a service that health is asked of
DETAILS_BYTES = 1_024
# Which slot of the JAX engine a completion gets decides in which order a sum is rounded. Its tokens, the score and what
# the replay engine says stay the same to the bit.
ROUNDING = 2e-6
QUIET_SECONDS = 300.0  # until nothing is left of calls whose clients are gone
LOG_BYTES = 2**20
GROWTH_BYTES = 32 * 2**20  # of the process, from the first half of the calls to the second
MOST_BYTES = 1_500 * 2**20  # beyond what it had before, at any time: some calls are as large as the limit allows
ADDRESS_SPACE_BYTES = 16 * 2**30  # whatever goes wrong here does not take the machine with it


class Canary:
    """A good request and a good score, which must give the same as long as the weights are the same."""

    def __init__(self, sender: Sender):
        self._sender = sender

    async def _quiet(self) -> pb.StatusReply:
        async with asyncio.timeout(QUIET_SECONDS):
            while True:
                status = pb.StatusReply.FromString(await self._sender.unary("Status", b""))
                if not status.busy_slots and not status.queued:
                    return status
                await asyncio.sleep(0.05)

    async def sing(self) -> dict[str, Any]:
        status = await self._quiet()
        ids = codec.encode_ids(range(3, 40))
        score = await self._sender.unary("Score", pb.ScoreRequest(token_ids=ids).SerializeToString())
        request = codec.request_to_proto(group(VERSION, "canary")).SerializeToString()
        call = self._sender._channel.unary_stream(f"/{SERVICE}/Generate")(request, timeout=SECONDS)
        completions = [pb.Completion.FromString(data) async for data in call]
        return {
            "server": status.server_id,
            "version": (status.version.incarnation, status.version.step),
            "score": score,
            "completions": sorted(
                (c.index, c.token_ids, c.logprobs, c.finish_reason, str(c.versions), str(c.forced)) for c in completions
            ),
        }


def difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """How two songs differ; empty: not at all."""
    names = [name for name in before if before[name] != after[name]]
    if names != ["completions"]:
        return ", ".join(f"{name} was {before[name]!r:.200}, is {after[name]!r:.200}" for name in names)
    said = []
    for (index, *was), (_, *now) in zip(before["completions"], after["completions"], strict=True):
        for what, one, other in zip(("tokens", "log-probs", "reason", "versions", "forced"), was, now, strict=True):
            if one != other and what == "log-probs" and len(one) == len(other):
                far = np.abs(codec.decode_floats(one) - codec.decode_floats(other)).max()
                if far > ROUNDING:
                    said.append(f"log-probs of {index} moved by up to {far:.2e}")
            elif one != other:
                said.append(f"{what} of {index} were {one!r}, are {other!r}")
    return "; ".join(said)


async def push(sender: Sender, generator: Generator) -> None:
    """The genuine version; it must be taken."""
    messages = tuple(generator.streams.genuine())
    outcome = await sender.send(Call(-1, f"/{SERVICE}/PushWeights", messages, READ, "the genuine version"))
    kinds = [pb.WeightReply.FromString(reply).WhichOneof("kind") for reply in outcome.replies]
    assert kinds == ["applied"], (kinds, outcome)


def wrong(call: Call, outcome: Outcome) -> str:
    """What is wrong with how a call ended; empty: nothing."""
    # A push ends by its client's going away once it has heard the last word.
    allowed = CODES | ({Code.CANCELLED} if call.then in (CANCEL, FIRST, UNREAD) or "Push" in call.path else set())
    if outcome.code not in allowed:
        return f"{outcome.code}: {outcome.details[:500]!r}"
    if len(outcome.details.encode()) > DETAILS_BYTES:
        return f"{len(outcome.details.encode())} bytes of details"
    cut_short = outcome.details == CUT_SHORT
    if call.path.endswith("PushWeights") and outcome.code is Code.CANCELLED and call.then == READ and not cut_short:
        kind = pb.WeightReply.FromString(outcome.replies[-1]).WhichOneof("kind") if outcome.replies else None
        if kind not in LAST:
            return f"the push ended after {kind}"
    return ""


async def storm(address: str, generator: Generator, numbers: range) -> tuple[collections.Counter[str], list[str]]:
    """(how many calls ended with each code, what was wrong)."""
    codes: collections.Counter[str] = collections.Counter()
    complaints = []
    async with contextlib.aclosing(send_all(address, map(generator.call, numbers))) as outcomes:
        async for call, outcome in outcomes:
            codes[outcome.code.name] += 1
            if complaint := wrong(call, outcome):
                complaints.append(f"seed {generator.seed}, {call}\n    {complaint}")
    return codes, complaints


def knock(port: int) -> None:
    """Connections that do not speak gRPC at all."""
    greetings = (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 99,
        b"",
    )
    for n in range(60):
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
            connection.sendall(greetings[n % len(greetings)])


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[Sender]:
    sender = Sender(address)
    try:
        yield sender
    finally:
        await sender.close()


async def judge(server: CalledServer, generator: Generator) -> None:
    address = f"127.0.0.1:{server.port}"
    process = psutil.Process(server.process.pid)
    codes: collections.Counter[str] = collections.Counter()
    resident = []
    async with connected(address) as sender:
        await push(sender, generator)
        canary = Canary(sender)
        before = await canary.sing()
        assert await canary.sing() == before
        began = process.memory_info().rss
        size = CALLS // BLOCKS
        for block in range(BLOCKS):
            counted, complaints = await storm(address, generator, range(block * size, (block + 1) * size))
            knock(server.port)
            codes += counted
            assert not complaints, f"{len(complaints)} of {size} calls ended wrong\n" + "\n".join(complaints[:5])
            after = await canary.sing()
            differs = difference(before, after)
            assert not differs, f"seed {generator.seed}, calls up to {(block + 1) * size}: the canary's {differs}"
            await push(sender, generator)  # deltas are looked at only where the host copy holds a version
            resident.append(process.memory_info().rss)
    print(f"\n{dict(codes)}\nresident before {began >> 20}, after each block {[rss >> 20 for rss in resident]} MiB")
    # What a message of 60 MiB leaves in the allocator goes again; what is lost stays.
    growth = min(resident[BLOCKS // 2 :]) - min(resident[: BLOCKS // 2])
    assert growth < GROWTH_BYTES, [rss >> 20 for rss in resident]
    peak = memory.peak_resident(process.pid)
    assert 0 < peak < began + MOST_BYTES, f"{peak >> 20} MiB at its worst, {began >> 20} before"
    # It was a storm worth the name: most calls are refused, and some of each sort are heard.
    assert codes.total() == CALLS and codes["INVALID_ARGUMENT"] > CALLS // 5
    assert all(codes[name] for name in ("OK", "FAILED_PRECONDITION", "CANCELLED", "UNIMPLEMENTED")), codes
    log = server.log.read_bytes()
    print(f"log: {len(log)} bytes")
    assert len(log) < LOG_BYTES and b"Traceback" not in log, log[-3_000:].decode(errors="replace")


@pytest.mark.parametrize("engine", ENGINES)
def test_storm(engine: str, model: str, tmp_path: pathlib.Path) -> None:
    tensors = hf_tensors(read_config(model))
    generator = Generator(9, tensors=tensors, version=VERSION)
    server = CalledServer(tmp_path, *ENGINES[engine], f"--model={model}", *FLAGS)
    try:
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
        asyncio.run(judge(server, generator))
    finally:
        server.close()


def test_generator_repeats(model: str) -> None:
    """The same seed and number give the same call, and the numbers reach every kind of call to every method."""
    tensors = hf_tensors(read_config(model))
    one, other = (Generator(3, tensors=tensors, version=VERSION) for _ in range(2))
    calls = [one.call(number) for number in range(600)]
    assert [other.call(number) for number in reversed(range(600))] == calls[::-1]
    paths = {call.path for call in calls}
    assert {f"/{SERVICE}/{method}" for method in ("Status", "Generate", "PushWeights", "Score", "ScoreMany")} <= paths
    assert {call.then for call in calls} == {READ, FIRST, CANCEL, UNREAD}
    streams = {call.what.split()[1] for call in calls if call.what.startswith("weights")}
    assert streams == set(one.streams.kinds)
    assert np.mean([len(set(call.messages)) for call in calls]) > 1
