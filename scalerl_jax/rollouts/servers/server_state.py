"""What the trainer knows of one server, and the requests sent to it. Only the methods here and those of ServerClient
change it.

    state        one of those below, and why
    version      the one it holds, and the one it should hold
    evaluation   the one that it works for, instead of training groups
    samples      for the probe, to be compared by the trainer's thread
    record       what its process delivered, and its offences    offences.py
    calls        one for each RolloutRequest, with its progress and its end

Lives on the fleet's event loop.

The states of one server, seen from the trainer.

connecting ──answers──> updating ──holds the version──> probing ──samples are in──> candidate ──admit()──> active
    ^                      |   ^─────────────── a newer version came ──────────────────┘                    |
    └──── no answer for silence_seconds, connection refused, another process on the port, ... ──────────────┘
rejected: for good; another process on the same address is met as a new one
superseded: it holds weights of a trainer that was started later; left alone as long as it does
leaving:  no longer listed; delivers what it was asked for, and is then released

Each completion of a call is yielded when it arrives; the others return to their buffer when the call ends, however it
ends.

    progress    a call has no time limit while its server makes progress: completions arrive, tokens are sampled
                (client.py checks that). One completion is bounded by

                    stall_seconds + (its budgets and the phrase) / slowest_tokens_per_second

                from when it has a slot, restarted by each other completion of its call; a later one counts as lost. A
                server is assumed to work on its oldest requested completions, as many as it has slots
    allowance   a server holds as much as it has earned (offences.py), whatever capacity it reports
    end         when all completions have arrived, whatever else the server would send
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

import grpc

from scalerl_jax.config import Config
from scalerl_jax.contract import codec, peer_text, security
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.environments import Row
from scalerl_jax.rollouts.group_buffer import GroupBuffer, Process, RolloutRequest
from scalerl_jax.rollouts.requests import Requests, validate
from scalerl_jax.rollouts.servers.discovery import Servers
from scalerl_jax.rollouts.servers.offences import Consequence, Record, Records, free_capacity
from scalerl_jax.rollouts.weights.publisher import Incarnation, Publisher

_log = logging.getLogger(__name__)

CONNECTING, UPDATING, PROBING, CANDIDATE = "connecting", "updating", "probing", "candidate"
ACTIVE, REJECTED, SUPERSEDED, LEAVING = "active", "rejected", "superseded", "leaving"
ANSWERING = (UPDATING, PROBING, CANDIDATE, ACTIVE)

# How gRPC's own message begins when it rejects an answer; the server sent something else.
REJECTED_ANSWER = ("received metadata size exceeds", "CLIENT: ")
STREAM_REMOVED = "Stream removed ("  # what newer gRPC puts before it

SCORES_FAILED = "fails to score"

Sample = tuple[Row, codec.Completion]


class Probed(NamedTuple):
    """A server's samples for the probe."""

    process: Process
    samples: tuple[Sample, ...]


@dataclasses.dataclass(frozen=True)
class ClientContext:
    """What all server clients of one fleet share, and their callbacks to the fleet."""

    config: Config
    requests: Requests
    publisher: Publisher
    incarnation: Incarnation
    servers: Servers
    changed: Callable[[], None]  # there may be something to do
    rejected: Callable[[str], None]  # the reason
    event: Callable[[str, dict[str, Any]], None]
    # A status; whether the time since the previous one was an evaluation's; whether usage before it is not known.
    observe: Callable[[pb.StatusReply, bool, bool], None]
    fail: Callable[[BaseException], None]  # an error of our own
    records: Records = dataclasses.field(default_factory=Records)


@dataclasses.dataclass(eq=False)
class _CallProgress:
    waits_since: float | None = None  # since when for its next completion; None: none of them has a slot yet
    task: asyncio.Task | None = None  # that reads the call; None: not begun


class RepeatsError(ValueError):
    """A server sends the same completions again and again."""


class ServerState:
    """See the module. `address` is what gRPC dials; it names the server in logs and messages."""

    def __init__(self, address: str, context: ClientContext):
        self.address, self._context, self._config = address, context, context.config.fleet
        self._channel = security.connect(address, context.servers.credentials)
        self._stub = Stub(self._channel)
        self.state, self.reason, self.state_since = CONNECTING, "not reached yet", time.monotonic()
        self.status = pb.StatusReply()
        self.heard_at = -1.0  # time.monotonic() of the last status
        self.record = Record()  # of the process that answered last
        self.step: int | None = None  # the version held; None: not one of ours
        self.evaluation: GroupBuffer | None = None  # the groups of the evaluation that it works for
        self._evaluates = False  # whether its time since the last status is booked as evaluation
        self.samples: tuple[Sample, ...] = ()
        self.samples_step: int | None = None  # the version that sampled them
        self.unlisted = False  # no longer listed
        self.patience = 0.0  # seconds that the trainer would still wait for it to be ready, see Trust
        self.version_changed = asyncio.Event()  # the one held, or the one that it should hold
        self.hurried = asyncio.Event()  # do not wait for the next heartbeat
        self._log_limit = peer_text.LogLimit()
        self._calls: dict[RolloutRequest, _CallProgress] = {}  # the oldest first
        self._closed = False  # nothing more is requested
        self._repeats = False  # it has sent a completion twice
        self.scores = 0  # sequences that it is scoring now
        self.finishes: collections.deque[float] = collections.deque(maxlen=4096)  # times of the last completions

    @property
    def free_at(self) -> float:
        """Time before which it gets no new requests."""
        return self.record.until

    @property
    def process(self) -> Process:
        """The process that answered last."""
        return Process(self.address, self.status.server_id)

    @property
    def target(self) -> int | None:
        """The version that it should hold."""
        return self._context.publisher.latest if self.evaluation is None else self.evaluation.pacing.minimum_step(0)

    def hurry(self) -> None:
        """Requests the next status now."""
        self.hurried.set()

    # ---- versions, and what it works on

    def set_version(self, step: int | None) -> None:
        """Records the version that it holds."""
        if step != self.step:
            self.step = step
            self.version_changed.set()
            self._context.changed()

    def retarget(self) -> None:
        """Called when the version that it should hold, or what it works on, may have changed."""
        self.version_changed.set()
        self.hurry()  # its work so far is booked before the next begins

    def assign(self, evaluation: GroupBuffer | None) -> None:
        """Lets it finish its groups, and then work for this evaluation alone.

        None: it catches up with the latest version, and gets training groups again.
        """
        self.evaluation = evaluation
        self.retarget()

    # ---- the probe

    def pop_samples(self) -> tuple[Sample, ...]:
        """Returns the samples, once."""
        samples, self.samples = self.samples, ()
        return samples

    def spend_patience(self, seconds: float) -> None:
        """Counts the time that the trainer has waited for it."""
        self.patience -= seconds

    def admit(self) -> None:
        """Its samples match the policy: it gets groups."""
        assert self.state == CANDIDATE
        self.samples = ()
        self.enter(ACTIVE, "")

    # ---- states

    def enter(self, state: str, reason: str) -> None:
        # Our text, and as much of the server's as is fit for a line.
        reason = peer_text.printable(reason, longest=960)
        self.state, self.reason, self.state_since = state, reason, time.monotonic()
        suffix = f" ({reason})" if reason else ""
        # A rejection is logged by the fleet, which knows whether it ends the run.
        # A server that never answered is logged by ServerPool.
        warn = state == SUPERSEDED or (state == CONNECTING and self.heard_at >= 0)
        level = logging.WARNING if warn else logging.INFO
        _log.log(level, "server %s: %s%s", self.address, state, suffix)
        self._context.event("server", {"server": self.address, "state": state, "reason": reason, "step": self.step})
        self._context.changed()

    def lose(self, reason: str) -> None:
        """Gives the server up: its missing completions are requested from others. It may come back."""
        self._end_calls()
        self.step, self.evaluation, self.samples, self.samples_step = None, None, (), None
        if reason:
            self.enter(CONNECTING, reason)

    def reject(self, reason: str) -> None:
        """Rejects this process for good."""
        self.record.banish()
        self.lose("")
        self.enter(REJECTED, reason)
        self._context.rejected(self.reason)

    def offend(self, kind: str, detail: str = "", *, times: int = 1) -> bool:
        """Records `times` offences and logs them now and then. True: this one rejects it for good.

        kind: our own short name of the offence. detail: of this time; may contain the server's own text.
        """
        now = time.monotonic()
        return self._act(kind, detail, self.record.offend(kind, now=now, times=times), now)

    def refuse(self, kind: str, detail: str = "", *, log: bool = False) -> None:
        """Records that it did not accept what it was sent: no requests for a moment. Repeated, it is an offence.

        log: this one is logged by itself.
        """
        now = time.monotonic()
        consequence = self.record.refuse(kind, now=now)
        if log and not consequence.log_times and (times := self._log_limit.happened(kind, now=now)):
            _log.warning("server %s: %s (%s)%s", self.address, kind, _detail(detail), f", {times} times" * (times > 1))
        self._act(kind, detail, consequence, now)

    def _act(self, kind: str, detail: str, consequence: Consequence, now: float) -> bool:
        message, wait = f"{kind}{f' ({_detail(detail)})' if detail else ''}", max(0.0, consequence.until - now)
        if consequence.banished:
            self.reject(f"server {self.address}: {message}, {self.record.counts[kind]} times")
            return True
        asyncio.get_running_loop().call_later(wait, self._context.changed)
        if consequence.log_times:
            _log.warning(
                "server %s: %s, %d times; not asked for %.0f s", self.address, message, consequence.log_times, wait
            )
        return False

    # ---- the calls

    @property
    def in_flight(self) -> int:
        """Completions requested from the server and not yet delivered."""
        return sum(len(rollout.left) for rollout in self._calls)

    @property
    def load(self) -> float:
        """Completions in flight per slot."""
        return self.in_flight / max(1, self.status.slots)

    def works_on(self, buffer: GroupBuffer) -> bool:
        return any(rollout.buffer is buffer for rollout in self._calls)

    @property
    def only_evaluates(self) -> bool:
        """Whether it works for an evaluation and has no other requests in flight."""
        return self.evaluation is not None and all(rollout.buffer is self.evaluation for rollout in self._calls)

    def capacity(self, *, group_size: int, typical_seconds: float, now: float) -> tuple[int, bool]:
        """Number of further completions to request, and whether a group may be requested in parts: `free_capacity`."""
        if self._closed:
            return 0, False
        return free_capacity(
            slots=self.status.slots,
            queue=self.status.queue_capacity,
            in_flight=self.in_flight,
            finishes=self.finishes,
            typical_seconds=typical_seconds,
            now=now,
            allowance=self.record.allowance(group_size),
            group_size=group_size,
        )

    def generate(self, rollout: RolloutRequest) -> AsyncGenerator[codec.Completion]:
        """Requests the completions; yields each as it arrives, until all have arrived or the server stops delivering.

        They count as in flight from now on. What the server does wrong is recorded as an offence.
        """
        self._calls[rollout] = _CallProgress()
        return self._completions(rollout)

    async def score(self, request: codec.ScoreRequest, *, seconds: float) -> codec.Scores | None:
        """Scores by the policy that it holds; None if they do not arrive. Rejects a server that breaks the contract."""
        self.scores += 1
        record = self.record
        try:
            reply = await self._stub.Score(codec.score_request_to_proto(request), timeout=seconds)
            if reply is None:
                raise ValueError("scores that cannot be decoded")
            scores = codec.scores_from_proto(reply, request, vocabulary=self._context.servers.vocabulary)
            record.forgive(SCORES_FAILED)
            return scores
        except (ValueError, grpc.aio.AioRpcError) as error:
            if record is self.record and not record.banished:  # that process is there, and was not rejected meanwhile
                self._failed_to_score(error)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            # The channel was closed: the server is gone.
        finally:
            self.scores -= 1
        return None

    def _failed_to_score(self, error: ValueError | grpc.aio.AioRpcError) -> None:
        if isinstance(error, ValueError):
            self.reject(f"server {self.address} breaks the contract: {error}")
        elif error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
            self.reject(f"server {self.address} cannot serve this run: {describe(error)}")
        else:
            self.hurry()  # if it is gone, the next status shows that
            self.refuse(SCORES_FAILED, describe(error), log=error.code() is not grpc.StatusCode.UNAVAILABLE)

    def _extend_deadlines(self, seconds: float, *, now: float) -> None:
        """Extends the deadlines by `seconds`: the trainer itself was stalled."""
        for call in self._calls.values():
            if call.waits_since is not None:
                call.waits_since = min(now, call.waits_since + seconds)

    def _expire_calls(self, now: float) -> None:
        """Ends the calls that wait too long for their next completion. To be called about once a heartbeat."""
        ahead, tokens = 0, self._context.requests.turn_tokens
        patience = tokens / self._config.slowest_tokens_per_second + self._config.stall_seconds  # for one completion
        for rollout, call in list(self._calls.items()):
            ahead += len(rollout.left)
            if ahead > self.status.slots and ahead > len(rollout.left):
                break  # it and those behind it may still be waiting for a slot
            if call.waits_since is None:
                call.waits_since = now
            if now - call.waits_since > patience and rollout in self._calls:
                detail = f"{len(rollout.left)} of {rollout.group.group_id}, none in {now - call.waits_since:.0f} s"
                self._give_up(rollout)
                self.offend("does not finish completions that it was asked for", detail)

    def _end_calls(self) -> None:
        """Ends every call; its missing completions return to their buffer."""
        for rollout in list(self._calls):
            self._give_up(rollout)
        self.finishes.clear()

    def _give_up(self, rollout: RolloutRequest) -> None:
        task = self._calls[rollout].task
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self._finish(rollout)  # now and not when the task ends, so that the fleet asks another server at once

    def _finish(self, rollout: RolloutRequest) -> None:
        if self._calls.pop(rollout, None) is not None:
            rollout.buffer.returned(rollout)
            self._context.changed()
            if self.only_evaluates and not self._evaluates:
                self.hurry()  # drained: from here on its time is the evaluation's

    async def _read(self, request: codec.GroupRequest, *, seconds: float | None) -> AsyncGenerator[codec.Completion]:
        """Yields the completions of one call as they arrive, each once; unfinished ones have finish_reason "aborted".
        Ends when all have arrived, whatever else the server would send.

        seconds: the call's deadline; None: it has none. Raises grpc.aio.AioRpcError as the call does, and ValueError
        if an answer breaks the contract.
        """
        call = self._stub.Generate(codec.request_to_proto(request), timeout=seconds)
        seen, repeated = set[int](), 0
        try:
            async for message in call:
                completion = self._received(message, request)
                if completion.index in seen:
                    repeated += 1
                    self._log_repetition(completion)
                    if repeated > len(request.completions):
                        raise RepeatsError(f"{_name(completion)} came again and again")
                    continue
                seen.add(completion.index)
                yield completion
                if len(seen) == len(request.completions):
                    return
        finally:
            call.cancel()
        missing = len(request.completions) - len(seen)
        raise ValueError(f"its answer to {request.group_id!r} ended without {missing} of the completions asked for")

    def _received(self, message: pb.Completion | None, request: codec.GroupRequest) -> codec.Completion:
        """Decodes and validates a completion. Raises ValueError if it breaks the contract."""
        if message is None:
            raise ValueError("a completion that cannot be decoded")
        newest, servers = self._context.publisher.latest, self._context.servers
        if not request.router_replay or servers.routed is None:
            message.ClearField("experts")  # not asked for, so not checked either
        completion = codec.completion_from_proto(message)
        assert newest is not None  # a server gets no requests before it holds a version
        validate(completion, request, newest=newest, vocabulary=servers.vocabulary, routed=servers.routed)
        return completion

    async def _completions(self, rollout: RolloutRequest) -> AsyncGenerator[codec.Completion]:
        if rollout not in self._calls:  # given up before it began
            return
        call = self._calls[rollout]
        call.task = asyncio.current_task()
        request, aborted = self._context.requests.of(rollout, incarnation=self._context.incarnation.value), 0
        try:
            # Without a deadline: see the module.
            async with contextlib.aclosing(self._read(request, seconds=None)) as completions:
                async for completion in completions:
                    if rollout not in self._calls:  # given up meanwhile
                        return
                    if completion.finish_reason == "aborted":
                        aborted += 1
                        continue
                    now = time.monotonic()
                    call.waits_since = call.waits_since and now
                    self.finishes.append(now)
                    self.record.deliver()
                    yield completion
            if aborted:
                self.offend("returns unfinished completions", rollout.group.group_id, times=aborted)
        except RepeatsError:
            if rollout in self._calls:
                self.offend("sends the same completions again and again", rollout.group.group_id)
        except ValueError as error:
            if rollout in self._calls:
                self.reject(f"server {self.address} breaks the contract: {error}")
        except grpc.aio.AioRpcError as error:
            if rollout in self._calls:
                rollout.failed = self._failed(rollout, error)
        finally:
            self._finish(rollout)

    def _log_repetition(self, completion: codec.Completion) -> None:
        if not self._repeats:
            name = peer_text.printable(_name(completion))
            _log.warning("server %s: %s came twice; what comes twice is dropped", self.address, name)
        self._repeats = True

    def _failed(self, rollout: RolloutRequest, error: grpc.aio.AioRpcError) -> bool:
        """Acts on the error that ended a call. False: not the server's failure, the same may be requested again."""
        code = error.code()
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            self.reject(f"server {self.address} cannot serve this run: {describe(error)}")
            return True
        if (error.details() or "").removeprefix(STREAM_REMOVED).startswith(REJECTED_ANSWER):
            self.offend("answers with more than a message may hold", describe(error))
            return True
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self.refuse("rejects requests although it reports free slots", describe(error))
            return False
        self.hurry()
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            # It holds another version than we thought; the next status shows which.
            self.refuse("does not sample with the version that it says it holds", describe(error))
            return False
        # If it is gone, the next status shows that.
        log = code is not grpc.StatusCode.UNAVAILABLE
        self.refuse("fails at what it is asked for", f"{rollout.group.group_id}: {describe(error)}", log=log)
        return True


def _detail(text: str) -> str:
    return peer_text.printable(text, longest=600)


def _name(completion: codec.Completion) -> str:
    return f"completion {completion.group_id!r}/{completion.index}"


def describe(error: grpc.aio.AioRpcError) -> str:
    """The code and the message that a call ended with."""
    return peer_text.printable(f"{error.code().name}: {error.details()}")
