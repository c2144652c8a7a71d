"""The servers that a gateway samples on: which are available, which is least busy, and where each call goes.

    lost          a server that drops a call, or does not answer for SILENT_SECONDS: its calls go to another server,
                  under the same name and with the same seed
    full          a server whose queue is full: the next one is asked; all full: Busy
    session       its call goes to the server of its last call, as long as that has a free slot: it holds the KV cache
    incarnation   each request names the incarnation of its server's weights, so that a trainer's servers work as well

The gateway does not choose the weights: they are whatever a server holds.
"""

import asyncio
import collections
import dataclasses
import logging
from collections.abc import AsyncIterable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import grpc

from scalerl_jax.contract import peer_text, security
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.codec import (
    Completion,
    GroupRequest,
    ScoreRequest,
    Scores,
    Version,
    completion_from_proto,
    request_to_proto,
    score_request_to_proto,
    scores_from_proto,
    version_from_proto,
)
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.rollouts.requests import validate
from scalerl_jax.rollouts.servers.discovery import relist

_log = logging.getLogger(__name__)
T = TypeVar("T")

HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 10.0  # without an answer to a status
NO_SERVER_SECONDS = 10.0  # that a call waits for a server to be available
MOST_TRIES = 8  # of one completion: a prompt that crashes servers must not crash them all repeatedly
MOST_REMEMBERED = 100_000  # sessions
_ANY_STEP = 2**63 - 1


class Busy(Exception):
    """Every server's queue is full."""


class NoServer(Exception):
    """No server is available, or each has failed at this."""


class Late(Exception):
    """It was not sampled in time."""


class Refused(ValueError):
    """The request can never be served."""


class Full(Exception):
    """The queue of one server is full."""


class Lost(Exception):
    """One server was lost: its request must go to another one."""


class Sampler(Protocol):
    """Generators, or a run's fleet."""

    @property
    def there(self) -> Sequence[Any]:
        """The available servers."""

    @property
    def maximum_tokens(self) -> int:
        """Most tokens of prompt and completion; 0: not known yet."""

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt."""

    def capacity(self, prompt: int) -> int:
        """How many tokens may follow a prompt of that many; 0: the prompt is too long."""

    async def ready(self, seconds: float) -> None:
        """Returns when a server is available. Raises NoServer."""

    async def generate(self, request: GroupRequest, *, seconds: float) -> tuple[Completion, str]:
        """See Generators."""


class GeneratorServer:
    def __init__(self, address: str, credentials: security.Credentials):
        self.address, self.channel = address, security.connect(address, credentials)
        self.stub = Stub(self.channel)
        self.status: pb.StatusReply | None = None  # None: it is not available
        self.refused = ""  # why it is not a server for this model
        self.calls = set[Any]()  # calls of gRPC that are running

    @property
    def load(self) -> float:
        assert self.status is not None
        others = self.status.busy_slots + self.status.queued  # at its last status, ours among them
        return max(len(self.calls), others) / max(1, self.status.slots)

    def lose(self, why: str) -> None:
        """Cancels its calls, which then go to another server."""
        if self.status is not None:
            _log.warning("server %s is lost: %s", self.address, peer_text.printable(why))
        self.status = None
        for call in self.calls:
            call.cancel()


class Generators:
    """Servers of one model.

    fingerprint: of its tokenizer, which every server must have. vocabulary: token ids are below it; 0: not known.
    resolve: the addresses listed now, called every `seconds` on a separate thread; None: they never change. A server
    that is no longer listed gets no more requests, delivers what it was asked for, and is released.

    Created and used on one event loop, while `run` runs there.
    """

    def __init__(
        self, addresses: Sequence[str], *, credentials: security.Credentials, fingerprint: str, vocabulary: int,
        resolve: Callable[[], Sequence[str]] | None = None, seconds: float = 5.0,
    ):  # fmt: skip
        self.servers = [GeneratorServer(address, credentials) for address in addresses]
        self._fingerprint, self._vocabulary, self._credentials = fingerprint, vocabulary, credentials
        self._resolve, self._seconds = resolve, seconds
        self._changed = asyncio.Event()
        self._last = collections.OrderedDict[str, GeneratorServer]()  # by session, of its last call; newest at the end

    async def run(self) -> None:
        """Until cancelled: requests each server's status about once a heartbeat, and lists servers again."""
        async with asyncio.TaskGroup() as group:

            def update(addresses: Sequence[str]) -> None:
                for gone in [server for server in self.servers if server.address not in addresses]:
                    _log.warning("server %s has left: it is no longer listed", gone.address)
                    self.servers.remove(gone)
                for address in addresses:
                    if address not in [server.address for server in self.servers]:
                        self.servers.append(GeneratorServer(address, self._credentials))
                        group.create_task(self._watch(self.servers[-1]))

            for server in self.servers:
                group.create_task(self._watch(server))
            await relist(self._resolve, update, seconds=self._seconds, warning="%s; the servers stay as they are")

    async def ready(self, seconds: float) -> None:
        """Waits for a server. Raises NoServer, one line, if none is available in time."""
        if self.there:
            return
        try:
            async with asyncio.timeout(seconds):
                while not self.there:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            reasons = [f"{server.address}: {server.refused or 'no answer'}" for server in self.servers]
            raise NoServer(f"no server is there within {seconds:.0f} s ({'; '.join(reasons)})") from None

    @property
    def there(self) -> list[pb.StatusReply]:
        """The status of each available server."""
        return [server.status for server in self.servers if server.status is not None]

    def capacity(self, prompt: int) -> int:
        """How many tokens may follow a prompt of that many."""
        return self.maximum_tokens - prompt

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt."""
        return self.maximum_tokens - 1

    @property
    def maximum_tokens(self) -> int:
        """Most tokens of prompt and completion that every available server holds; 0: there is none."""
        return min((status.maximum_tokens for status in self.there), default=0)

    async def generate(self, request: GroupRequest, *, seconds: float) -> tuple[Completion, str]:
        """The only completion of the request, and the server's name; the request's incarnation becomes the server's.

        Raises Busy, NoServer, Late or Refused.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self._somewhere(request)
        except TimeoutError:
            raise Late(f"not sampled within {seconds:.0f} s") from None

    async def _somewhere(self, request: GroupRequest) -> tuple[Completion, str]:
        full, why, lost = set[str](), "no server is there", 0
        while lost < MOST_TRIES:
            try:
                await self.ready(NO_SERVER_SECONDS)
            except NoServer:
                break
            free = [server for server in self.servers if server.status is not None and server.address not in full]
            if not free:
                raise Busy("the queue of every server is full")
            server = min(free, key=lambda server: server.load)
            last = self._last.get(request.session)
            server = last if last in free and last.load < 1 else server
            asked_of = server.status
            assert asked_of is not None
            asked = dataclasses.replace(request, incarnation=asked_of.version.incarnation)
            try:
                completion = await self.ask(server, asked)
            except Full:
                full.add(server.address)
            except Lost as error:
                why, lost = str(error), lost + 1
            else:
                self._remember(request.session, server)
                return completion, f"{server.address} {asked_of.server_id}"
        raise NoServer(why)

    async def ask(self, server: GeneratorServer, request: GroupRequest) -> Completion:
        """One completion by this server. Raises Full, Lost or Refused."""
        call = server.stub.Generate(request_to_proto(request))
        return await self._answered(server, call, self._read(call, request))

    async def score(
        self, server: GeneratorServer, request: ScoreRequest, version: Version, *, seconds: float
    ) -> Scores:
        """Scores by this server with this version of the weights. Raises as ask."""
        call = server.stub.Score(score_request_to_proto(request), timeout=seconds)

        async def read() -> Scores:
            reply = await call
            if reply is None:
                raise ValueError("it cannot be decoded")
            if version_from_proto(reply.version) != version:
                raise Lost(f"server {server.address} scored by other weights")
            return scores_from_proto(reply, request, vocabulary=self._vocabulary)

        return await self._answered(server, call, read())

    async def _answered(self, server: GeneratorServer, call: Any, reading: Coroutine[Any, Any, T]) -> T:
        """Awaits `reading`, which reads the call's answer. Raises as ask."""
        server.calls.add(call)
        try:
            return await reading
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise Lost(f"server {server.address} was lost") from None  # by `lose`, which cancelled only the call
        except ValueError as error:
            why = f"server {server.address} breaks the contract: {peer_text.printable(error)}"
            server.lose(why)
            raise Lost(why) from None
        except grpc.aio.AioRpcError as error:
            raise await self._fault(server, error) from None
        finally:
            call.cancel()
            server.calls.discard(call)

    async def _fault(self, server: GeneratorServer, error: grpc.aio.AioRpcError) -> Exception:
        """The exception for a failed call."""
        why = f"server {server.address}: {error.code().name}: {peer_text.printable(error.details())}"
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            return Refused(peer_text.printable(error.details()))
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Full(why)
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:  # it holds other weights by now
            await self._poll(server)
        else:
            server.lose(why)
        return Lost(why)

    def _remember(self, session: str, server: GeneratorServer) -> None:
        if session:
            self._last.pop(session, None)
            self._last[session] = server
            if len(self._last) > MOST_REMEMBERED:
                self._last.popitem(last=False)

    async def _read(self, call: AsyncIterable[Any], request: GroupRequest) -> Completion:
        """Raises ValueError if the answer breaks the contract."""
        async for message in call:
            if message is None:
                raise ValueError("it cannot be decoded")
            completion = completion_from_proto(message)
            validate(completion, request, newest=_ANY_STEP, vocabulary=self._vocabulary)
            if completion.finish_reason == "aborted":
                raise ValueError("it hands back what it has not finished")
            return completion
        raise ValueError("it answers without a completion")

    async def _watch(self, server: GeneratorServer) -> None:
        """Until it is no longer listed and has delivered everything."""
        try:
            while server in self.servers or server.calls:
                await self._poll(server)
                await asyncio.sleep(HEARTBEAT_SECONDS)
        finally:
            await server.channel.close()

    async def _poll(self, server: GeneratorServer) -> None:
        try:
            status = await server.stub.Status(pb.StatusRequest(), timeout=SILENT_SECONDS)
        except grpc.aio.AioRpcError as error:
            server.refused = peer_text.printable(f"{error.code().name}: {error.details()}")
            server.lose(server.refused)
            return
        server.refused = ""
        if status is None:
            server.refused = "its status cannot be decoded"
        elif status.tokenizer_fingerprint != self._fingerprint:
            server.refused = "it has another tokenizer than the model's folder"
        if server.refused:
            server.lose(server.refused)
        else:
            server.status = status
            self._changed.set()
