"""One server, seen from the trainer: heartbeat, what it holds, what it was asked.

    connecting ──answers──> updating ──holds the version──> probing ──samples are in──> newcomer ──admit()──> active
        ^                      |   ^─────────────── a newer version came ──────────────────┘                    |
        └──── no answer for silence_seconds, connection refused, another process on the port, ... ──────────────┘
    rejected: turned away for good; another process on the same address is met anew
    taken:    it holds weights of a newer trainer; left alone until it does not
leaving:  no longer listed; delivers what it was asked for, and is forgotten then

A server that is given up ends up in `connecting` with all its calls cancelled, and comes back the way a new one comes.
Everything here runs on the fleet's event loop.
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc

from rollout_server.contract import codec, security
from rollout_server.contract import rollout_pb2 as pb
from rollout_server.contract.rpc import Stub
from scalerl_jax.config import FleetConfig
from scalerl_jax.rollouts.book import Book, Lease
from scalerl_jax.rollouts.probe import ProbeError
from scalerl_jax.rollouts.publisher import AnchorNeeded, Publisher, PushRefused
from scalerl_jax.rollouts.requests import Requests
from scalerl_jax.rollouts.sampling import check_whole, sample
from scalerl_jax.rollouts.validate import validate

_log = logging.getLogger(__name__)

CONNECTING, UPDATING, PROBING, NEWCOMER = "connecting", "updating", "probing", "newcomer"
ACTIVE, REJECTED, TAKEN, LEAVING = "active", "rejected", "taken", "leaving"
ANSWERING = (UPDATING, PROBING, NEWCOMER, ACTIVE)

BACKOFF_SECONDS = (0.1, 2.0)  # first and longest wait after a refusal; doubled in between
SPEED_SECONDS = 30.0
SURE_AFTER = 8  # calls in a row: then it was no restart that looked like mistrust
PATIENCE_SECONDS = 5.0  # a finished batch waits so long in all for a newcomer that is about to be ready


@dataclasses.dataclass(frozen=True)
class Hub:
    """What a connection asks of the fleet and tells it."""

    target: Callable[["Connection"], int | None]  # the version the server should hold
    check: Callable[[str, pb.StatusReply], None]  # raises ProbeError
    probe_prompts: tuple[tuple[Any, int], ...]  # (prompt, completions)
    arrived: Callable[[Book, Lease, codec.Completion], None]
    returned: Callable[[Book, Lease, bool], None]
    changed: Callable[[], None]  # look whether there is something to do
    rejected: Callable[["Connection"], None]
    event: Callable[[str, dict[str, Any]], None]
    observe: Callable[[pb.StatusReply, bool], None]  # a status; whether the time since the one before was evaluation's
    fail: Callable[[BaseException], None]  # a fault of ours


class Connection:
    """See the module. `address` is what gRPC dials; it names the server in everything people read."""

    def __init__(
        self,
        address: str,
        *,
        config: FleetConfig,
        requests: Requests,
        publisher: Publisher,
        hub: Hub,
        incarnation: int,
        credentials: security.Credentials = security.PLAIN,
        vocabulary: int = 0,
    ):
        self.address, self._config, self._requests = address, config, requests
        self._publisher, self._hub, self._incarnation = publisher, hub, incarnation
        self._credentials, self._vocabulary = credentials, vocabulary
        self._channel = security.connect(address, credentials)
        self._stub = Stub(self._channel)
        self._hurry = asyncio.Event()  # do not wait for the next heartbeat
        self._wake = asyncio.Event()  # target or version changed
        self._calls: dict[Lease, asyncio.Task] = {}
        self._watch: asyncio.Task | None = None  # pushes and probes while the server answers
        self._refusals = 0
        self._applied_at = -1.0
        self._needs_anchor = False  # its host copy is not what it says it decodes with
        self._sampled = (0, -1.0)  # (tokens, when it had sampled that many)
        self._repeats = False  # it has sent a completion twice
        self.state, self.reason = CONNECTING, "not reached yet"
        self.status = pb.StatusReply()
        self.step: int | None = None  # the version held, None: not one of ours
        self.heard_at = -1.0
        self.state_since = time.monotonic()
        self.books: dict[Lease, Book] = {}
        self.evaluation: Any = None  # evaluation.Evaluation it works for
        self.samples: tuple[tuple[Any, codec.Completion], ...] = ()  # of a newcomer
        self.samples_step: int | None = None
        self.free_at = 0.0  # not asked before this time
        self.leaving = False  # no longer listed
        self.mistrusted = 0  # calls in a row that ended because one end does not trust the other
        self.patience = 0.0  # seconds that the trainer would still wait for it to be ready, see Fleet
        self.finishes: collections.deque[float] = collections.deque(maxlen=4096)  # times of the last completions
        self._evaluates = False  # what its time since the last status is booked as

    # ---- what the fleet reads

    @property
    def in_flight(self) -> int:
        """Completions asked of it and not yet delivered."""
        return sum(len(lease.left) for lease in self._calls)

    @property
    def load(self) -> float:
        """Completions in flight per slot."""
        return self.in_flight / max(1, self.status.slots)

    def completions_per_second(self, now: float) -> float:
        """Its measured speed: over the last SPEED_SECONDS, or since it was given up last."""
        since = max(now - SPEED_SECONDS, self.state_since if self.state == ACTIVE else now)
        return sum(at > since for at in self.finishes) / max(1.0, now - since)

    def works_on(self, book: Book) -> bool:
        return any(self.books[lease] is book for lease in self._calls)

    def room(self, *, group_size: int, typical_seconds: float, now: float) -> tuple[int, bool]:
        """How many completions more to ask of it, and whether a group may be asked for in parts.

        All its slots, and beyond them enough waiting work that no slot stands empty for want of a request: one group,
        and as much more as it finishes in the time that a completion typically takes, at most a quarter of its slots.
        So a slow server does not sit on work that others could begin sooner.
        """
        slots, queue = self.status.slots, self.status.queue_capacity
        more = slots // 4
        if typical_seconds > 0 and self.finishes:
            more = min(more, sum(at > now - typical_seconds for at in self.finishes))
        ahead = min(queue, group_size + more)
        return slots + ahead - self.in_flight, queue < group_size

    # ---- heartbeat

    async def run(self) -> None:
        """Until cancelled: asks for the status about once a heartbeat and acts on what it says."""
        try:
            while True:
                self._hurry.clear()
                began = time.monotonic()
                try:
                    status = await self._stub.Status(pb.StatusRequest(), timeout=self._config.status_seconds)
                except grpc.aio.AioRpcError as error:
                    self._unheard(error)
                else:
                    self._heard(status, began)
                pause = self._config.heartbeat_seconds
                if self.state == CONNECTING:
                    pause = min(pause, 0.25)
                await _wait(self._hurry, pause)
        finally:
            self._end_calls()
            await self._channel.close()

    def _heard(self, status: pb.StatusReply, began: float) -> None:
        now = time.monotonic()
        another_process = status.server_id != self.status.server_id
        if another_process and self.state in (*ANSWERING, LEAVING):
            self.lose("it was started anew")
        self._hub.observe(status, self._evaluates and not another_process)
        self._evaluates = self.evaluation is not None and self._only_evaluates()
        self.status, self.heard_at, self.mistrusted = status, now, 0
        if self.state == REJECTED and not another_process:
            return
        version = codec.version_from_proto(status.version)
        if version.incarnation > self._incarnation:
            if self.state != TAKEN:
                self.lose("")
                self._enter(TAKEN, "it holds weights of a trainer that was started later than this one")
            return
        # A status asked for before the last push ended may be older than what the push said.
        if began > self._applied_at:
            self._holds(version.step if version.incarnation == self._incarnation else None)
        tokens = status.sampled_tokens + status.prefill_tokens
        if tokens != self._sampled[0] or not self.in_flight:
            self._sampled = (tokens, now)
        elif now - self._sampled[1] >= self._config.stall_seconds:
            self.lose(f"it answers, but has sampled nothing for {now - self._sampled[1]:.0f} s")
            return
        if self.state == ACTIVE and self.step is None:
            self.lose("it no longer holds this run's weights")
        try:
            self._hub.check(self.address, status)  # each time: it costs nothing
        except ProbeError as error:
            self.reject(str(error))
            return
        if self.state in (CONNECTING, REJECTED, TAKEN):
            self.patience = PATIENCE_SECONDS
            self._enter(UPDATING, "")
            self._watch = asyncio.create_task(self._keep_up())
            self._watch.add_done_callback(self._ended)

    def _unheard(self, error: grpc.aio.AioRpcError) -> None:
        why = security.refusal(error, self._credentials)
        self.mistrusted = self.mistrusted + 1 if why else 0
        told = error.code() is grpc.StatusCode.UNAUTHENTICATED  # in so many words, not guessed
        if why and self.state == CONNECTING:
            # A process that ends closes the connections half made to it, too.
            sure = told or self.heard_at < 0 or self.mistrusted >= SURE_AFTER
            if sure and why != self.reason:
                self._enter(CONNECTING, why)
            return
        if why and told:
            self.lose(why)
            return
        if self.state == CONNECTING or self.state == REJECTED:
            return
        silent = time.monotonic() - self.heard_at
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            self.lose("the connection is broken")
        elif silent >= self._config.silence_seconds:
            self.lose(f"no answer for {silent:.0f} s")

    def _holds(self, step: int | None) -> None:
        if step != self.step:
            self.step = step
            self._wake.set()
            self._hub.changed()

    def _only_evaluates(self) -> bool:
        return all(book is self.evaluation.book for book in self.books.values())

    # ---- states

    def _enter(self, state: str, reason: str) -> None:
        self.state, self.reason, self.state_since = state, reason, time.monotonic()
        said = f" ({reason})" if reason else ""
        # Of a rejection the fleet knows whether it ends the run, which says it by itself.
        # Of one that was never heard, too: see Members.
        warn = state == TAKEN or (state == CONNECTING and self.heard_at >= 0)
        level = logging.WARNING if warn else logging.INFO
        _log.log(level, "server %s: %s%s", self.address, state, said)
        self._hub.event("server", {"server": self.address, "state": state, "reason": reason, "step": self.step})
        self._hub.changed()

    def lose(self, reason: str) -> None:
        """Gives the server up: what it has not delivered is asked of others. It may come back."""
        self._end_calls()
        self.step, self.evaluation, self.samples, self.samples_step = None, None, (), None
        self._refusals, self.free_at = 0, 0.0
        self.finishes.clear()
        if reason:
            self._enter(CONNECTING, reason)

    def reject(self, reason: str) -> None:
        """Turns this process away for good."""
        self.lose("")
        self._enter(REJECTED, reason)
        self._hub.rejected(self)

    def leave(self) -> None:
        """It is no longer listed."""
        if self.leaving:
            return
        self.leaving = True
        if not self.in_flight:
            self.lose("")
        self._enter(LEAVING, "it is no longer listed")

    def admit(self) -> None:
        assert self.state == NEWCOMER
        self.samples = ()
        self._enter(ACTIVE, "")

    def _end_calls(self) -> None:
        if self._watch is not None and self._watch is not asyncio.current_task():
            self._watch.cancel()
        self._watch = None
        for task in list(self._calls.values()):
            if task is not asyncio.current_task():
                task.cancel()
        # Handed back now and not when the tasks end: the fleet looks for somebody else at once.
        for lease in list(self._calls):
            self._finish(lease, failed=True)

    # ---- weights

    def retarget(self) -> None:
        """The version the server should hold may have changed, or what it works on."""
        self._wake.set()
        self._hurry.set()  # what it did up to here is booked before the next thing begins

    def _ended(self, task: asyncio.Task) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._hub.fail(error)

    async def _keep_up(self) -> None:
        """While the server answers: brings it to the version it should hold; lets a newcomer sample with it."""
        refusals = 0
        while self._watch is asyncio.current_task() and not self.leaving:  # until it is given up or rejected
            self._wake.clear()
            target = self._hub.target(self)
            if target is not None and self.step != target:
                if self.state in (PROBING, NEWCOMER):
                    self.samples, self.samples_step = (), None
                    self._enter(UPDATING, "")
                good = await self._push(target)
            elif target is not None and self.state in (UPDATING, PROBING):
                good = await self._sample(target)
            else:
                await self._wake.wait()
                good = True
            refusals = 0 if good else refusals + 1
            if not good:
                await asyncio.sleep(_backoff(refusals))

    async def _push(self, step: int) -> bool:
        base = None if self._needs_anchor else self.step
        self._needs_anchor = False
        try:
            report = await self._publisher.push(
                self._stub, step, base=base, timeout=self._config.push_seconds, address=self.address
            )
        except PushRefused as error:
            if base is not None and isinstance(error, AnchorNeeded):
                _log.info("server %s: version %d goes out whole (%s)", self.address, step, error)
                self._needs_anchor = True
                return True  # at once
            _log.warning("server %s: refused version %d (%s)", self.address, step, error)
            self._hurry.set()
            return False
        except TimeoutError:
            _log.warning("server %s: version %d did not arrive in time", self.address, step)
            self._hurry.set()
            return False
        except grpc.aio.AioRpcError as error:
            _log.warning("server %s: version %d did not arrive (%s)", self.address, step, _said(error))
            self._hurry.set()
            return False
        self._applied_at = time.monotonic()
        self._hub.event("push", {"server": self.address, **dataclasses.asdict(report)})
        self._holds(report.step)
        return True

    async def _sample(self, step: int) -> bool:
        """Lets the newcomer sample a little with version `step`, for the trainer to compare."""
        if self.state != PROBING:
            self._enter(PROBING, "")
        requests = [
            (prompt, self._requests.probe(self.address, prompt, samples=samples, version=step))
            for prompt, samples in self._hub.probe_prompts
        ]
        room, seconds = self.status.slots + self.status.queue_capacity, self._config.connect_seconds
        try:
            got = await sample(self._stub, requests, room=room, seconds=seconds, validate=self._validate)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                self.reject(f"server {self.address} cannot serve this run: {error.details()}")
            else:
                _log.warning("server %s: did not sample for the probe (%s)", self.address, _said(error))
            return False
        except ValueError as error:
            self.reject(f"server {self.address} breaks the contract: {error}")
            return False
        if any(completion.finish_reason == "aborted" for _, completion in got):
            _log.warning("server %s: did not sample for the probe (it is shutting down)", self.address)
            return False
        self.samples, self.samples_step = tuple(got), step
        self._enter(NEWCOMER, "")
        return True

    def _validate(self, completion: codec.Completion, request: codec.GroupRequest) -> None:
        newest = self._publisher.latest
        assert newest is not None  # nothing is asked of a server before it holds a version
        validate(completion, request, newest=newest, vocabulary=self._vocabulary)

    # ---- groups

    def ask(self, book: Book, lease: Lease) -> None:
        """Asks for the lease's completions; each is handed to the hub as it comes, the rest when the call ends."""
        self.books[lease] = book
        self._calls[lease] = task = asyncio.create_task(self._serve(lease))
        task.add_done_callback(self._ended)

    def _finish(self, lease: Lease, *, failed: bool) -> None:
        if self._calls.pop(lease, None) is not None:
            self._hub.returned(self.books.pop(lease), lease, failed)
            if self.evaluation is not None and not self._evaluates and self._only_evaluates():
                self._hurry.set()  # drained: from here on its time is the evaluation's

    async def _serve(self, lease: Lease) -> None:
        request = self._requests.of_lease(lease)
        began = time.monotonic()
        call = self._stub.Generate(codec.request_to_proto(request), timeout=self._config.completion_seconds)
        failed, told = True, set[int]()
        try:
            async for message in call:
                completion = codec.completion_from_proto(message)
                self._validate(completion, request)
                if lease not in self._calls:  # given up meanwhile
                    return
                self._refusals = 0
                if completion.index in told:
                    self._say_it_repeats(completion)
                    continue
                told.add(completion.index)
                if completion.finish_reason != "aborted":
                    self.finishes.append(time.monotonic())
                    self._hub.arrived(self.books[lease], lease, completion)
            check_whole(request, told)
        except ValueError as error:
            if lease in self._calls:
                self.reject(f"server {self.address} breaks the contract: {error}")
        except grpc.aio.AioRpcError as error:
            if lease in self._calls:
                failed = self._failed(lease, error, began)
        finally:
            call.cancel()
            self._finish(lease, failed=failed)

    def _say_it_repeats(self, completion: codec.Completion) -> None:
        if not self._repeats:
            name = f"completion {completion.group_id!r}/{completion.index}"
            _log.warning("server %s: %s came twice; what comes twice is dropped", self.address, name)
        self._repeats = True

    def _failed(self, lease: Lease, error: grpc.aio.AioRpcError, began: float) -> bool:
        """Acts on the error that ended a call. False: not the server's failure, it may be asked for the same again."""
        code = error.code()
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            self.reject(f"server {self.address} cannot serve this run: {error.details()}")
            return True
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            _log.warning(
                "server %s: %d completions of %s not finished after %.0f s, asked for again elsewhere",
                *(self.address, len(lease.left), lease.group.group_id, self._config.completion_seconds),
            )
            if not self.finishes or self.finishes[-1] < began:
                self.lose(f"finished nothing for {time.monotonic() - began:.0f} s")
            return True
        self._refusals += 1
        self.free_at = time.monotonic() + _backoff(self._refusals)
        asyncio.get_running_loop().call_later(_backoff(self._refusals), self._hub.changed)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return False
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            # It holds another version than we thought; the status will tell.
            self._hurry.set()
            return False
        self._hurry.set()
        if code is not grpc.StatusCode.UNAVAILABLE:
            _log.warning("server %s: %s failed (%s)", self.address, lease.group.group_id, _said(error))
        return True


def _backoff(refusals: int) -> float:
    first, longest = BACKOFF_SECONDS
    return min(longest, first * 2 ** max(0, refusals - 1))


def _said(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"


async def _wait(event: asyncio.Event, seconds: float) -> None:
    # Not wait_for: it loses a cancellation that comes together with the event.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
