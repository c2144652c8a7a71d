"""The trainer's fleet: groups in flight on all servers, batches by number, versions going out, evaluations.

    asyncio loop on a thread of its own                         the trainer's thread, blocking calls
      ServerPool                servers come and go                  start, batch, advance, publish, close
      ServerClient per server  heartbeat, pushes, calls             candidates, admit, reject
      GroupBuffer                   groups, leases, store                evaluate, result
      Publisher              versions                             status, waiting
      Evaluations            one after another
      pump                   who is asked for what next

All state belongs to the loop's thread; a call from outside runs there and is waited for. The callables given to Fleet:
`draw` runs on the loop's thread, with consecutive numbers, each once; `score` on a thread of its own, so that it may
block for a moment; `on_event` and `observe` on the loop's thread. None of them may call the fleet.

What a dead, hanging or slow server costs is decided in ServerClient; here its completions are simply asked for again. A
fault of ours (an exception of score, of a tensors callable, of draw other than ValueError) is raised by the next call.
"""

import asyncio
import collections
import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias, TypeVar

from scalerl_jax.config import Config
from scalerl_jax.contract import codec, security
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.weight_delta import WeightDelta
from scalerl_jax.environments import Row, Score
from scalerl_jax.rollouts import status
from scalerl_jax.rollouts.dispatch import dispatch
from scalerl_jax.rollouts.errors import FleetError, ProbeError
from scalerl_jax.rollouts.evaluation import Evaluation, Evaluations
from scalerl_jax.rollouts.group_buffer import FinishedGroup, GroupBuffer, OpenGroup, RolloutRequest, finished
from scalerl_jax.rollouts.incarnation import Incarnation
from scalerl_jax.rollouts.loop_thread import LoopThread
from scalerl_jax.rollouts.pacing import Pacing
from scalerl_jax.rollouts.requests import Requests, Tokenizer, spread_probes
from scalerl_jax.rollouts.scoring import Scoring
from scalerl_jax.rollouts.servers import states
from scalerl_jax.rollouts.servers.client import ServerClient
from scalerl_jax.rollouts.servers.context import ClientContext
from scalerl_jax.rollouts.servers.credentials import Plaintext
from scalerl_jax.rollouts.servers.events import ServerEvents
from scalerl_jax.rollouts.servers.pool import ServerPool
from scalerl_jax.rollouts.trust import Trust
from scalerl_jax.rollouts.weights.publisher import Publisher, Source

_log = logging.getLogger(__name__)
T = TypeVar("T")
GroupsFuture: TypeAlias = "concurrent.futures.Future[list[FinishedGroup]]"

POLL_SECONDS = 0.2  # how often a blocking call looks up and calls its caller's `wait`
TICK_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A server that holds the trainer's version and has sampled with it; it gets no group before it is admitted."""

    server: str
    status: pb.StatusReply
    samples: tuple[tuple[Row, codec.Completion], ...]


class Fleet:
    """See the module.

    Args:
        addresses: host:port of each server at the start.
        look: those listed now, called every fleet.discovery_seconds on a thread of its own; None: they never change.
        credentials: what every server is shown.
        vocabulary: of the policy; token ids are below it. 0: not known.
        pacing: what may be asked when; its `batches` ends the run.
        incarnation: of this trainer process: time.time_ns() at its start, unless that is below another one it knows of.
        raised: told, on the loop's thread, of a larger incarnation that it has to have; see incarnation.py.
        draw: the row of training group n. ValueError: there is none; raised by the batch that needs it.
        score: what a completion is worth, as a concurrent future.
        tokenizer: of the run; gives the stop ids and the interruption phrase's.
        probe_prompts: what candidates sample for the probe.
        check: raises ProbeError on the status of a server that is not one for this run.
        observe: each status of each server that may be true; whether the time since the one before was an evaluation's;
            whether its counters are to be believed from here on only.
        approve_evaluations: an evaluation ends when the trainer has said so, see `trust`.
        on_event: ("server", {server, state, reason, step}), ("push", {server, step, payload_bytes, ...}) and
            ("version", {step, changed, delta_bytes, ...}).
    """

    def __init__(
        self,
        config: Config,
        *,
        addresses: Sequence[str],
        pacing: Pacing,
        incarnation: int,
        raised: Callable[[int], None] = lambda value: None,
        draw: Callable[[int], Row],
        score: Callable[[Row, codec.Completion], "concurrent.futures.Future[Score]"],
        tokenizer: Tokenizer,
        probe_prompts: Sequence[Row],
        look: Callable[[], Sequence[str]] | None = None,
        credentials: security.Credentials = security.PLAIN,
        vocabulary: int = 0,
        check: Callable[[str, pb.StatusReply], None] = lambda server, status: None,
        on_event: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None,
        observe: Callable[[pb.StatusReply, bool, bool], None] = lambda status, evaluating, anew: None,
        approve_evaluations: bool = False,
    ):
        if not addresses:
            raise FleetError("no rollout server is given")
        twice = [a for a, count in collections.Counter(addresses).items() if count > 1]
        if twice:
            raise FleetError(f"rollout server {twice[0]} is given twice")
        self._config, self._addresses, self._pacing = config, tuple(addresses), pacing
        self._incarnation, self._draw = Incarnation(incarnation, raised), draw
        self._plaintext = Plaintext(credentials)
        self._requests = Requests(config, tokenizer, incarnation=incarnation)
        events = ServerEvents(
            check=check,
            arrived=self._arrived,
            returned=self._returned,
            changed=self._changed,
            rejected=self._rejected,
            observe=observe,
            event=self._event,
            fail=self._fail,
        )
        self._on_event = on_event
        self._thread = LoopThread("fleet")
        self._scoring = Scoring(score, post=self._thread.post, fail=self._fail, finished=self._group_finished)
        self._something = threading.Event()  # the caller should look
        self._pool = ServerPool(make=self._connect, look=look, fail=self._fail, changed=self._changed)
        self._publisher = Publisher(
            incarnation=self._incarnation,
            chunk_bytes=config.fleet.chunk_bytes,
            delta_bytes=config.fleet.delta_cache_bytes,
            relay=config.fleet.relay,
            fail=self._fail,
            event=lambda fields: self._event("version", fields),
        )
        self._context = ClientContext(
            config=config.fleet,
            requests=self._requests,
            publisher=self._publisher,
            events=events,
            incarnation=self._incarnation,
            probe_prompts=spread_probes(probe_prompts, config.parity.completions),
            credentials=credentials,
            vocabulary=vocabulary,
        )
        self._book: GroupBuffer  # from start() on
        self._newest: tuple[int, Source] | None = None
        self._evaluations, self._approve_evaluations = Evaluations(), approve_evaluations
        self.trust = Trust(
            call=self._thread.call,
            members=self._pool,
            evaluations=self._evaluations,
            book=lambda: self._book,
            changed=self._changed,
            event=self._event,
        )
        self._pump_due = False
        self._typical_seconds = 0.0  # running mean, from when a completion was asked for to its arrival
        self._waits: status.Waits | None = None
        self._ever_admitted = False
        self._patient_until = 0.0  # from start() on
        self._held_at: float | None = None  # when a batch that is ready was held back for a candidate, last

    # ---- the trainer's side: start and end

    def start(self, first_group: int) -> None:
        """Connects; returns when a first server has answered.

        Raises FleetError naming the addresses where none has within fleet.connect_seconds, or where trust is missing
        between us and each of them; ProbeError where one that answered is not a server for this run.
        """
        assert first_group % self._pacing.groups == 0
        trained = first_group // self._pacing.groups
        self._book = GroupBuffer(
            pacing=self._pacing,
            open_group=lambda n: self._requests.train(n, self._draw(n)),
            group_size=self._config.rollout.group_size,
            first=first_group,
            trained=trained,
        )
        self._patient_until = time.monotonic() + self._config.fleet.connect_seconds
        self._thread.start(self._begin)
        try:
            self._wait_for_the_first()
        except BaseException:
            self.close()
            raise

    def _wait_for_the_first(self) -> None:
        """And for a word of the others, so that our incarnation is above theirs when the first version goes out."""
        seconds, began = self._config.fleet.connect_seconds, time.monotonic()
        while True:
            elapsed = time.monotonic() - began
            if self._thread.call(lambda: self._pool.in_state(*states.ANSWERING)):
                if elapsed > self._config.fleet.status_seconds or self._thread.call(lambda: self._pool.all_tried):
                    return
            elif error := self._thread.call(self._pool.why_nobody, seconds, elapsed > seconds):
                raise FleetError(error)
            self._pause(0.05)

    def close(self) -> None:
        """Ends every call and the thread. Evaluations that are not done are cancelled."""
        self._thread.close()
        self._scoring.close()
        self._publisher.close()
        self._evaluations.cancel()

    # ---- the trainer's side: batches and versions

    def batch(self, number: int, wait: Callable[[], None] = lambda: None) -> list[FinishedGroup]:
        """The groups of batch `number`, in order of number; blocks until all are finished.

        `wait` is called on this thread at least once, and about every POLL_SECONDS while waiting: there candidates
        are admitted. Raises the ValueError of `draw` where a group of the batch has no prompt.
        """
        self._thread.call(self._begin_wait, number)
        while True:
            self._something.clear()
            wait()
            groups = self._thread.call(self._take, number)
            if groups is not None:
                return [finished(group) for group in groups]
            self._pause(POLL_SECONDS)

    def advance(self, version: int) -> None:
        """Batch version - 1 has been trained: later groups may be asked for."""

        def advance() -> None:
            self._book.trained_to(version)
            self._changed()

        self._thread.call(advance)

    def publish(self, version: int, tensors: Source, changes: Callable[[], WeightDelta] | None = None) -> None:
        """Begins to bring `version` to every server; returns at once. A newer version overtakes an older one.

        A version that the pacing does not publish is only kept, in case it is to be evaluated.
        tensors: Hugging Face names, complete, in sync dtype, in host memory that nobody writes to any more; or a
        function that returns that, called on a thread of its own when the first server is ready for it.
        changes: brings what this version changed to the host, called at once on a thread of its own; None: this version
        and those after it go out whole.
        """

        def publish() -> None:
            self._newest = (version, tensors)
            if changes is not None:
                self._publisher.record(version, changes)
            if self._pacing.publishes(version):
                self._publish_newest()

        self._thread.call(publish)

    # ---- the trainer's side: candidates

    def candidates(self) -> list[Candidate]:
        """The servers to be probed now: each has sampled with the version that the trainer has reached."""

        def candidates() -> list[Candidate]:
            return [
                Candidate(c.address, c.status, c.samples)
                for c in self._pool.in_state(states.CANDIDATE)
                if c.samples_step == c.step == self._book.trained
            ]

        return self._thread.call(candidates)

    def admit(self, server: str) -> None:
        """Lets a candidate have groups. Nothing happens if it was lost meanwhile."""

        def admit() -> None:
            connection = self._pool.named(server)
            if connection is not None and connection.state == states.CANDIDATE:
                self._ever_admitted = True
                connection.admit()

        self._thread.call(admit)

    def reject(self, server: str, why: str) -> None:
        """Turns a candidate away; a new process on the same address may come again."""

        def reject() -> None:
            connection = self._pool.named(server)
            if connection is not None:
                connection.reject(why)

        self._thread.call(reject)

    # ---- the trainer's side: evaluation

    def evaluate(
        self, version: int, rows: Sequence[Row], samples: int
    ) -> "concurrent.futures.Future[list[FinishedGroup]]":
        """Evaluates the version published last, on evaluation.servers of the servers (0: all); evaluations run in turn.

        The future gives the groups in the order of rows, or EvaluationLost.
        """

        def evaluate() -> Evaluation:
            assert self._newest is not None and version == self._newest[0], "evaluate what was published last"
            self._publish_newest()
            evaluation = Evaluation(
                version=version,
                rows=rows,
                samples=samples,
                servers=self._config.evaluation.servers,
                requests=self._requests,
                approved=not self._approve_evaluations,
            )
            self._publisher.retain(version)
            self._evaluations.add(evaluation)
            self._changed()
            return evaluation

        return self._thread.call(evaluate).future

    def result(self, future: "concurrent.futures.Future[T]", wait: Callable[[], None] = lambda: None) -> T:
        """The future's result; calls `wait` as `batch` does meanwhile."""
        while not future.done():
            self._something.clear()
            wait()
            self._thread.call(lambda: None)  # raises what went wrong
            if not future.done():
                self._pause(POLL_SECONDS)
        return future.result()

    # ---- the trainer's side: what is going on

    def waiting(self) -> str:
        """One line: for whom the trainer waits, for how long, and how deep the queues are. Empty: it does not wait."""
        return self._thread.call(
            lambda: status.waiting(self._waits, self._book, self._pool.clients, self._scoring.waiting)
        )

    def status(self) -> dict[str, Any]:
        """Servers, queues and whom the trainer waits for, as plain values."""
        return self._thread.call(
            lambda: status.status(
                *(self._waits, self._book, self._pool.clients, self._scoring.waiting),
                evaluation=self._evaluations.current,
            )
        )

    def _pause(self, seconds: float) -> None:
        self._something.wait(seconds)

    # ---- the loop's side

    def _begin(self) -> list[Coroutine[Any, Any, None]]:
        self._pool.update(self._addresses)
        return [self._pool.discover(self._config.fleet.discovery_seconds), self._tick()]

    def _connect(self, address: str) -> ServerClient:
        self._plaintext.dial(address)
        return ServerClient(address, self._context)

    def _fail(self, error: BaseException) -> None:
        self._thread.fail(error)
        self._something.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._look_at_the_start()
            self._changed()

    def _publish_newest(self) -> None:
        assert self._newest is not None
        version, tensors = self._newest
        if version != self._publisher.latest:
            self._publisher.publish(version, tensors)
            self._requests.incarnation = self._incarnation.value
            for connection in self._pool.clients:
                connection.retarget()

    def _publish_for_candidates(self) -> None:
        """Nobody has groups, and some are to be asked for again in mid-phase. A candidate is compared by the version
        that the trainer has, and by now it has a later one than the phase's: so that one goes out."""
        trained, latest = self._book.trained, self._publisher.latest
        ahead = latest is not None and latest < trained and self._newest is not None and self._newest[0] == trained
        if self._waits is not None and ahead and self._book.free_of_pins():
            self._publish_newest()

    def _event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind != "probed":
            self._on_event(kind, fields)
        if kind in ("server", "probed"):
            self._something.set()  # there may be a candidate

    def _begin_wait(self, number: int) -> None:
        assert number == self._book.trained < self._pacing.batches, f"batch {number} is not the next one"
        self._waits, self._held_at = status.Waits(number, time.monotonic()), None

    def _take(self, number: int) -> list[OpenGroup] | None:
        if self._book.ready(number) and self._wait_for_candidate():
            return None
        groups = self._book.take(number)
        if groups is not None:
            self._waits = None
            self._changed()
        return groups

    def _wait_for_candidate(self) -> bool:
        """Whether one is about to be ready. A trainer that is the slower side never waits for a batch: a candidate
        would always be one version behind it, and never be met."""
        if self._publisher.latest != self._book.trained:
            return False
        soon = (states.UPDATING, states.PROBING, states.CANDIDATE)
        expected = [c for c in self._pool.in_state(*soon) if c.patience > 0 and not c.leaving]
        now = time.monotonic()
        for c in expected:
            c.spend_patience(now - (self._held_at or now))
        self._held_at = now if expected else None
        return bool(expected)

    def _rejected(self, reason: str) -> None:
        """A run ends where none is left. Before the first was admitted it is the user's mistake, most likely."""
        self._something.set()
        if any(c.state != states.REJECTED for c in self._pool.clients):
            _log.warning("turned away: %s", reason)
        elif not self._ever_admitted:
            self._fail(ProbeError(reason))
        elif self._pool.fixed:
            self._fail(FleetError(f"every rollout server was turned away; the last one: {reason}"))
        else:
            _log.warning("turned away: %s; no other one is left", reason)

    def _look_at_the_start(self) -> None:
        """Nobody was admitted, somebody was turned away, and the others do not answer: nothing will come of it."""
        if self._ever_admitted or self._pool.in_state(*states.ANSWERING) or time.monotonic() < self._patient_until:
            return
        for connection in self._pool.in_state(states.REJECTED):
            others = ", ".join(c.address for c in self._pool.clients if c.state != states.REJECTED)
            self._fail(ProbeError(f"{connection.reason}; and nobody answers at {others}"))

    def _arrived(self, book: GroupBuffer, lease: RolloutRequest, completion: codec.Completion, seconds: float) -> None:
        if not book.arrived(lease, completion):
            return
        self._typical_seconds += 0.05 * (seconds - self._typical_seconds) if self._typical_seconds else seconds
        self._scoring.submit(book, lease.group, completion)
        self._changed()

    def _group_finished(self) -> None:
        self._something.set()
        self._changed()

    def _returned(self, book: GroupBuffer, lease: RolloutRequest, failed: bool) -> None:
        book.returned(lease, failed=failed)
        self._changed()

    def _changed(self) -> None:
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._thread.guarded(self._pump))

    def _pump(self) -> None:
        """Everything that may be done now is done: evaluations are advanced, servers with room are asked for more."""
        self._pump_due = False
        self._pool.release_departed()
        self._advance_evaluations()
        active = self._pool.in_state(states.ACTIVE)
        if not active:
            self._publish_for_candidates()
        dispatch(active, self._book_of, typical_seconds=self._typical_seconds, now=time.monotonic())

    def _book_of(self, connection: ServerClient) -> GroupBuffer | None:
        evaluation = connection.evaluation
        if connection.step is None or connection.making_room:
            return None
        if evaluation is None:
            return self._book
        drained = not connection.calls.works_on(self._book)
        return evaluation.book if drained and connection.step == evaluation.version else None

    def _advance_evaluations(self) -> None:
        latest = self._publisher.latest
        if latest is None:
            return
        patience = self._config.fleet.silence_seconds
        for evaluation in self._evaluations.advance(self._pool.clients, latest=latest, patience=patience):
            self._publisher.release(evaluation.version)
            self._something.set()
