"""The trainer's fleet: groups in flight on all servers, batches by number, publishing of versions, evaluations.

    asyncio loop on a separate thread                           the trainer's thread, blocking calls
      ServerPool               servers come and go                 start, batch, advance, publish, close
      ServerClient per server  heartbeat, pushes, calls            trust: due, admit, reject,
      GroupBuffer              groups in flight, ready, pending           dismiss, probe, evaluation
      Publisher                versions                            evaluate, result
      Teachers                 score completions, too              status, waiting
      EvaluationQueue          one after another
      pump                     which server is asked for what next

All state belongs to the loop's thread; a call from outside runs there and is waited for. Of the callables given to the
fleet, `score` is called on a separate thread, so that it may block for a moment; the others are called on the loop's
thread, the one that draws a group's row with consecutive numbers, each once. None of them may call the fleet.

ServerClient decides what happens to a dead, hanging or slow server; here its completions are just requested again. An
error of our own (an exception of score, of a tensors callable, of a draw but ValueError) is raised by the next call.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.codec import Completion, TeacherScores
from scalerl_jax.contract.weight_delta import WeightDelta
from scalerl_jax.environments import Row, Score
from scalerl_jax.environments.episode import AgentRun, Agents, Reply, Trajectory
from scalerl_jax.environments.episode_pool import EpisodePool
from scalerl_jax.rollouts import status
from scalerl_jax.rollouts.evaluation import Evaluation, EvaluationQueue
from scalerl_jax.rollouts.group_buffer import (
    FinishedGroup,
    GroupBuffer,
    GroupInFlight,
    Process,
    RolloutRequest,
    TurnRequest,
    finished,
)
from scalerl_jax.rollouts.loop_thread import LoopThread, on_loop, watched
from scalerl_jax.rollouts.requests import Requests
from scalerl_jax.rollouts.servers import server_state
from scalerl_jax.rollouts.servers.client import ServerClient
from scalerl_jax.rollouts.servers.discovery import Servers
from scalerl_jax.rollouts.servers.pool import ServerPool, dispatch
from scalerl_jax.rollouts.servers.server_state import ClientContext
from scalerl_jax.rollouts.servers.validate_status import FleetError
from scalerl_jax.rollouts.teachers import Teachers, teacher_of
from scalerl_jax.rollouts.trust import Trust
from scalerl_jax.rollouts.weights.host_parts import Parts
from scalerl_jax.rollouts.weights.publisher import Incarnation, Publisher, Source

_log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_SECONDS = 0.2  # how often a blocking call polls and calls its caller's `wait`
TICK_SECONDS = 0.5


class Fleet:
    """See the module.

    Args:
        buffer: the groups to train on, see Requests.training_groups; its pacing decides what may be requested when.
        incarnation: of this trainer process.
        score: scores a completion; returns a concurrent future.
        episodes: of the environments that have them, in place of `score`; None if none has.
        agents: likewise.
        teachers: also score the training groups' completions; None if there are none.
        on_event: ("server", {server, state, reason, step}), ("push", {server, step, payload_bytes, ...}),
            ("version", {step, changed, delta_bytes, ...}) and ("parity", {server, found, completions, sent_away}).
        observe: called with each plausible status of each server; whether the time since the previous one was an
            evaluation's; whether its counters count from here on only.
        serving: called with whether a server is admitted, at each change and at least every TICK_SECONDS.
        parts: for a trainer of several hosts; None if there is one.
    """

    def __init__(
        self,
        config: Config,
        *,
        servers: Servers,
        requests: Requests,
        buffer: GroupBuffer,
        incarnation: Incarnation,
        score: Callable[[Row, Completion], "concurrent.futures.Future[Score]"],
        episodes: EpisodePool | None = None,
        agents: Agents | None = None,
        teachers: Teachers | None = None,
        on_event: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None,
        observe: Callable[[pb.StatusReply, bool, bool], None] = lambda status, evaluating, from_here: None,
        serving: Callable[[bool], None] = lambda serving: None,
        parts: Parts | None = None,
    ):
        if not servers.addresses:
            raise FleetError("no rollout server is given")
        self._config, self._addresses, self._requests, self._buffer = config, servers.addresses, requests, buffer
        self._on_event, self._serving, self._score, self._episodes = on_event, serving, score, episodes
        self._thread = LoopThread("fleet")
        self._scoring_thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="fleet-scoring")
        self._agents, self._teachers = agents, teachers
        self._running = dict[AgentRun, tuple[GroupBuffer, GroupInFlight, concurrent.futures.Future]]()
        self._unscored = 0  # completions without their score
        self._something = threading.Event()  # the caller should poll
        self._evaluations = EvaluationQueue()
        self._publisher = Publisher(
            incarnation=incarnation,
            chunk_bytes=config.fleet.chunk_bytes,
            delta_bytes=config.fleet.delta_cache_bytes,
            fail=self._fail,
            event=lambda fields: self._event("version", fields),
            parts=parts,
        )
        context = ClientContext(
            config=config,
            requests=requests,
            publisher=self._publisher,
            incarnation=incarnation,
            servers=servers,
            changed=self._changed,
            rejected=lambda reason: self.trust.rejected(reason),
            event=self._event,
            observe=observe,
            fail=self._fail,
        )
        self._pool = ServerPool(context)
        self.trust = Trust(self._thread, self._pool, buffer, self._evaluations, context)
        self._newest: tuple[int, Source] | None = None
        self._pump_due = False
        self._typical_seconds = 0.0  # running mean, from when a completion was asked for to its arrival
        self._waits: status.BatchWait | None = None

    # ---- the trainer's side: start and end

    def start(self) -> None:
        """Connects; returns when a first server has answered.

        Raises FleetError naming the addresses if none has within fleet.connect_seconds, or if authentication fails with
        each of them; ProbeError if one that answered cannot serve this run.
        """
        self._thread.start(self._begin)
        try:
            self.trust.wait_for_the_first()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends every call and the thread. Evaluations that are not done are cancelled."""
        self._thread.close()
        self._scoring_thread.shutdown(wait=False, cancel_futures=True)
        self._publisher.close()
        self._evaluations.cancel()

    # ---- the trainer's side: batches and versions

    def batch(self, number: int, wait: Callable[[], None] = lambda: None) -> list[FinishedGroup]:
        """The groups of batch `number`, in order of number; blocks until all are finished.

        `wait` is called on this thread at least once, and about every POLL_SECONDS while waiting: there candidates
        are admitted. Raises ValueError if there is no row to draw for a group of the batch.
        """
        self._begin_wait(number)
        return [finished(group) for group in self._until(lambda: self._pop_if_ready(number), wait)]

    @on_loop
    def advance(self, version: int) -> None:
        """Batch version - 1 has been trained: later groups may be requested."""
        self._buffer.trained_to(version)
        self._changed()

    @on_loop
    def publish(self, version: int, tensors: Source, changes: Callable[[], WeightDelta] | None = None) -> None:
        """Starts sending `version` to every server; returns at once. A newer version overtakes an older one.

        A version that the pacing does not publish is only kept, in case it is to be evaluated.
        tensors: Hugging Face names, complete, in sync dtype, in host memory that is no longer written to; or a
        function that returns that, called on its own thread when the first server is ready for it.
        changes: copies what this version changed to the host, called at once on its own thread. Without it this version
        and later ones are sent whole.
        """
        self._newest = (version, tensors)
        if changes is not None:
            self._publisher.deltas.record(version, changes)
        if self._buffer.pacing.publishes(version):
            self._publish_newest()
        else:
            self._publisher.drop_elsewhere(version)

    # ---- the trainer's side: evaluation

    @on_loop
    def evaluate(
        self, version: int, rows: Sequence[Row], samples: int
    ) -> "concurrent.futures.Future[list[FinishedGroup]]":
        """Evaluates the version published last, on evaluation.servers of the servers (0: all); evaluations run in turn.

        The future gives the groups in the order of rows once `trust` has approved them, or EvaluationLost.
        """
        assert self._newest is not None and version == self._newest[0], "evaluate what was published last"
        self._publish_newest()
        evaluation = Evaluation(
            version=version,
            rows=rows,
            samples=samples,
            servers=self._config.evaluation.servers,
            requests=self._requests,
        )
        self._publisher.retain(version)
        self._evaluations.add(evaluation)
        self._changed()
        return evaluation.future

    @on_loop
    def evaluated(self, *, but: Collection[int] = ()) -> list[FinishedGroup]:
        """The finished groups of the current evaluation, except those whose numbers are in `but`."""
        current = self._evaluations.current
        ready = {} if current is None else current.buffer.ready
        return [finished(group) for number, group in sorted(ready.items()) if number not in but]

    def result(self, future: "concurrent.futures.Future[T]", wait: Callable[[], None] = lambda: None) -> T:
        """The future's result; calls `wait` as `batch` does meanwhile."""
        if not future.done():
            self._until(lambda: self._thread.call(future.done) or None, wait)  # raises what went wrong
        return future.result()

    def _until(self, poll: Callable[[], T | None], wait: Callable[[], None]) -> T:
        """Returns what `poll` finds; it is called when something has happened, and every POLL_SECONDS."""
        while True:
            self._something.clear()
            wait()
            if (found := poll()) is not None:
                return found
            self._something.wait(POLL_SECONDS)

    # ---- the trainer's side: status

    def waiting(self) -> str:
        """One line: what the trainer waits for, how long, and how deep the queues are. Empty if it does not wait."""
        return self.status()["waiting"]

    @on_loop
    def status(self) -> dict[str, Any]:
        """Servers, queues and what the trainer waits for, as plain values."""
        return status.status(
            self._waits,
            self._buffer,
            self._pool.clients,
            unscored=self._unscored,
            evaluation=self._evaluations.current,
        )

    # ---- the loop's side

    def _begin(self) -> list[Coroutine[Any, Any, None]]:
        self._pool.update(self._addresses)
        also = []
        if self._teachers is not None:
            students = functools.partial(self._pool.in_state, server_state.ACTIVE)
            also = self._teachers.begin(self._thread, fail=self._fail, students=students)
        return [self._pool.discover(), self._tick(), *also]

    def _fail(self, error: BaseException) -> None:
        self._thread.fail(error)
        self._something.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.trust.expire()
            self._changed()

    def _publish_newest(self) -> None:
        assert self._newest is not None
        version, tensors = self._newest
        if version != self._publisher.latest:
            self._publisher.publish(version, tensors)
            for client in self._pool.clients:
                client.retarget()

    def _publish_for_candidates(self) -> None:
        """Called when no server has groups. If completions must be requested again in mid-phase, publishes the newest
        version: a candidate is compared with the trainer's version, which by now is later than the phase's."""
        trained, latest = self._buffer.trained, self._publisher.latest
        ahead = latest is not None and latest < trained and self._newest is not None and self._newest[0] == trained
        if self._waits is not None and ahead and self._buffer.free_of_pins():
            self._publish_newest()

    def _event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind != "probed":
            self._on_event(kind, fields)
        if kind in ("server", "probed"):
            self._something.set()  # there may be a candidate

    @on_loop
    def _begin_wait(self, number: int) -> None:
        assert number == self._buffer.trained < self._buffer.pacing.batches, f"batch {number} is not the next one"
        self._waits = status.BatchWait(number, time.monotonic())
        self.trust.begin_wait()

    @on_loop
    def _pop_if_ready(self, number: int) -> list[GroupInFlight] | None:
        current = self._publisher.latest == self._buffer.trained
        if current and self._buffer.is_ready(number) and self.trust.holds_batch():
            return None
        try:
            groups = self._buffer.pop_batch(number)
        except ValueError:  # the batch never becomes ready
            self._waits = None
            raise
        if groups is not None:
            self._waits = None
            self._changed()
        return groups

    async def _sample(self, request: RolloutRequest, completions: AsyncGenerator[Completion]) -> None:
        """Adds what a server delivers for a request to its group, and scores it while the rest is sampled."""
        asked_at = time.monotonic()
        async with contextlib.aclosing(completions):
            async for completion in completions:
                if (trajectory := request.buffer.arrived(request, completion)) is not None:
                    seconds, typical = time.monotonic() - asked_at, self._typical_seconds
                    self._typical_seconds = typical + 0.05 * (seconds - typical) if typical else seconds
                    watched(self._score_one(request, trajectory), self._fail)
                self._changed()

    async def _score_one(self, request: RolloutRequest, trajectory: Trajectory) -> None:
        """Scores a completion (the last score makes its group ready), or has its environment reply to its turn."""
        self._unscored += 1
        row, group, scored = request.group.row, request.group, asyncio.Event()
        teacher: asyncio.Task[tuple[TeacherScores, ...]] | None = None
        score: concurrent.futures.Future[Any]  # of Score, or of the reply
        if self._episodes is not None and self._episodes.plays(row):
            score = self._episodes.step(row, trajectory, evaluation=request.buffer is not self._buffer)
        else:
            teacher = self._ask_teacher(request.buffer, row, trajectory.completion)  # in parallel with the score
            loop = asyncio.get_running_loop()
            score = await loop.run_in_executor(self._scoring_thread, self._score, row, trajectory.completion)
        score.add_done_callback(lambda done: self._thread.post(scored.set))
        await scored.wait()
        found = score.result()
        if isinstance(found, Reply):
            request.buffer.replied(group, trajectory, found)
        else:
            await self._finish(request.buffer, group, trajectory, found, teacher)
        self._unscored -= 1
        self._changed()

    def _ask_teacher(
        self, buffer: GroupBuffer, row: Row, completion: Completion
    ) -> "asyncio.Task[tuple[TeacherScores, ...]] | None":
        if self._teachers is None or buffer is not self._buffer:  # nothing is learned from an evaluation
            return None
        return watched(self._teachers.score(row, completion), self._fail)

    async def _finish(
        self, buffer: GroupBuffer, group: GroupInFlight, trajectory: Trajectory | AgentRun, score: Score,
        teacher: "asyncio.Task[tuple[TeacherScores, ...]] | None" = None,
    ) -> None:  # fmt: skip
        """Records a completion's score, with its teacher's. teacher: its call, if it was started already."""
        teacher = teacher or self._ask_teacher(buffer, group.row, trajectory.completion)
        scores: tuple[TeacherScores, ...] = ()
        if teacher is not None:
            group.with_teacher[trajectory.index] = teacher_of(self._config, group.row)
            scores = await teacher
            group.with_teacher.pop(trajectory.index, None)
        if buffer.scored(group, trajectory, score, now=time.monotonic(), teacher=scores):
            self._something.set()

    # ---- agents

    def _run_agents(self) -> None:
        """Starts the agents that are wanted and cancels all others."""
        evaluation = self._evaluations.current
        buffers = [self._buffer, *([evaluation.buffer] if evaluation is not None else [])]
        for run, (buffer, group, outcome) in list(self._running.items()):
            if buffer not in buffers or not buffer.runs(group, run):
                outcome.cancel()
        for buffer in buffers:
            for group, run in buffer.start_agents():
                assert self._agents is not None
                ask = functools.partial(self._ask, buffer, group, run)
                name = f"{group.group_id}/{run.index}"
                outcome = self._agents.run(group.row, name, ask, attempt=run.attempt)
                self._running[run] = buffer, group, outcome
                watched(self._finish_agent(run), self._fail)

    async def _finish_agent(self, run: AgentRun) -> None:
        buffer, group, outcome = self._running[run]
        self._unscored += 1
        try:
            score = run.finish(await asyncio.wrap_future(outcome), group_id=group.group_id)
            await self._finish(buffer, group, run, score)
        finally:
            self._unscored -= 1
            del self._running[run]
        self._changed()

    def _ask(
        self, buffer: GroupBuffer, group: GroupInFlight, run: AgentRun,
        prompt: np.ndarray, turn: str, after: Process | None, most_tokens: int | None,
    ) -> "concurrent.futures.Future[tuple[Completion, Process]]":  # fmt: skip
        """Requests a turn of an agent; from any thread. The future is cancelled if it is no longer wanted."""
        answer: concurrent.futures.Future[tuple[Completion, Process]] = concurrent.futures.Future()

        def enter() -> None:
            wanted = self._requests.turn(group.requests[run.index], turn)
            call = TurnRequest(run, group.group_id, after, most_tokens, answer)
            buffer.add_call(group, call, Row("", token_ids=prompt), f"{run.index}/{turn}", wanted)
            self._changed()

        if not self._thread.post(enter):
            answer.cancel()
        return answer

    def _changed(self) -> None:
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._thread.guarded(self._pump))

    def _pump(self) -> None:
        """Does all that can be done now: advances evaluations, sends requests to servers with capacity, runs agents."""
        self._pump_due = False
        self._pool.release_departed()
        self._advance_evaluations()
        active = self._pool.in_state(server_state.ACTIVE)
        self._serving(bool(active or self._pool.in_state(server_state.LEAVING)))  # one that leaves finishes what it has
        if not active:
            self._publish_for_candidates()
        if self._episodes is not None:
            self._episodes.clock.stand(all(c.evaluation is not None for c in active))
        asked = dispatch(active, self._buffer_of, typical_seconds=self._typical_seconds, now=time.monotonic())
        for client, request in asked:
            watched(self._sample(request, client.generate(request)), self._fail)
        if self._agents is not None:
            self._run_agents()

    def _buffer_of(self, client: ServerClient) -> GroupBuffer | None:
        if client.step is None or client.paused:
            return None
        if client.evaluation is None:
            return self._buffer
        drained = not client.works_on(self._buffer)
        return client.evaluation if drained and client.step == client.target else None

    def _advance_evaluations(self) -> None:
        latest = self._publisher.latest
        if latest is None:
            return
        patience = self._config.fleet.silence_seconds
        for evaluation in self._evaluations.advance(self._pool.clients, latest=latest, patience=patience):
            self._publisher.release(evaluation.version)
            self._something.set()
