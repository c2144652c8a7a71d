"""Plays episodes of the run's environments: passes each turn of the policy to its environment.

    an episode       a fork of one process that has made the environments (episode_worker.py); it ends with its
                     trajectory, for whatever reason that ends
    done             returns the score: the sum of the turns' rewards; `correct` is that of the last step
    not done         returns the reply, as token ids appended to the next turn's prompt, or with
                     environment.history=template that whole prompt, if it does not continue the last turn; if no
                     further turn fits within rollout.max_turns or max_episode_tokens, or environment.episode_seconds
                     have passed, the trajectory is cut, like a completion that is too long
    cut              a turn cut by its token budget ends the trajectory; the environment is not called
    failed           an exception of the environment, a crash or a step that takes too long is not the policy's fault:
                     the trajectory is excluded, and counted in the metrics
    all failed       a whole batch of consecutive failures before any episode ended otherwise, or ten batches of them
                     later, end the run: nothing can be learned

environment.episode_seconds are by `EpisodePool.clock`, which the fleet stops while it may ask no server for turns to
train on. An evaluation's episodes have the plain clock.

Metrics of each score: turns, branches, tokens_per_turn (sampled), environment_seconds, and ended/REASON, which is 1
for the reason and 0 for others: done, failed, turn_cut, max_turns, max_tokens, deadline.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.environments import parts
from scalerl_jax.environments.base import Environment, Row, Score, ScorerError, reaches
from scalerl_jax.environments.episode import Client, Reply, Step, Trajectory
from scalerl_jax.environments.prompts import Replies
from scalerl_jax.environments.scorer_pool import Complaints, row_json
from scalerl_jax.environments.tokenizer import split_as_run
from scalerl_jax.environments.worker_process import (
    START_SECONDS,
    START_TRIES,
    WorkerDied,
    WorkerProcess,
    exchange,
    first_line,
)

STEPS_AT_ONCE = 64  # concurrent steps; further ones wait
GRACE_SECONDS = 30.0  # by clock, beyond a step's limit: by then the kernel should have ended its process
MOST_LINE_BYTES = 2**24  # of an agent process's reply
POLL_SECONDS = 0.2  # between two looks at whether an agent's time is up
ENDED = ("done", "failed", "turn_cut", "max_turns", "max_tokens", "deadline")
# Consecutive batches of failed episodes that end a run after any episode has ended otherwise: a service may be down for
# a while, and if the process that plays them dies, all episodes in flight fail.
FAILED_BATCHES = 10


class EpisodeClock:
    """Seconds by clock without those in which it stood still. May be used from any thread."""

    def __init__(self) -> None:
        self._stood: tuple[float, float | None] = 0.0, None  # seconds in all; since when it stands still, if it does

    def __call__(self) -> float:
        before, since = self._stood
        return (time.monotonic() if since is None else since) - before

    def stand(self, still: bool) -> None:
        """Makes it stand still, or go on. To be called from one thread."""
        before, since = self._stood
        if still and since is None:
            self._stood = before, time.monotonic()
        elif not still and since is not None:
            self._stood = before + time.monotonic() - since, None


class EpisodePool:
    """Args:
    environments: the environments with episodes, by part; at least one.
    replies: encodes environments' replies as token ids.
    decode: returns the text of a turn's tokens without the stop token.
    turn_tokens: length of the longest turn, forced tokens included.

    clock: of the episodes that are trained on.

    Raises ScorerError if the environments cannot be made.
    """

    def __init__(
        self,
        config: Config,
        environments: Mapping[str, Environment],
        *,
        replies: Replies,
        decode: Callable[[Sequence[int]], str],
        turn_tokens: int,
        complaints: Complaints,
    ):
        self._config, self._configs, self._environments = config, parts.configs(config), environments
        self._replies, self._decode, self._turn_tokens, self._complaints = replies, decode, turn_tokens, complaints
        self.clock = EpisodeClock()
        self._lock = threading.Lock()
        self._closing = False
        self._failed_on_end, self._first_failure = 0, ""  # consecutive failed episodes; why the first failed
        self._any_ended = False  # whether any episode ended otherwise than by failing
        self._connections: weakref.WeakKeyDictionary[Trajectory, _Connection] = weakref.WeakKeyDictionary()
        self._worker: WorkerProcess | None = None
        # The kernel ends the worker with the thread that started it, so that thread must live as long as the pool.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="episodes")
        self._threads = ThreadPoolExecutor(STEPS_AT_ONCE, thread_name_prefix="episode-step")
        # Each episode uses a file descriptor here, and the shell's soft limit is low.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        try:
            self._starter.submit(self._start).result()
        except BaseException:
            self.close()
            raise

    def plays(self, row: Row) -> bool:
        """Whether the row's environment has episodes, not an agent."""
        return row.environment in self._environments and not row.agent

    @property
    def agents(self) -> set[str]:
        """The parts whose environment is an agent."""
        return {part for part, environment in self._environments.items() if environment.run is not None}

    async def run(self, row: Row, client: Client, *, evaluation: bool = False) -> Score:
        """Plays a row with an agent. Raises EpisodeFailed; its `late` is True if the time was up.

        evaluation: the plain clock counts, not `clock`.
        """
        seconds = self._settings(row).episode_seconds
        clock: Callable[[], float] = time.monotonic if evaluation else self.clock
        connection = await asyncio.to_thread(self._open)
        reader, writer = await asyncio.open_connection(sock=connection.socket, limit=MOST_LINE_BYTES)

        async def answer(line: str) -> dict[str, Any]:
            writer.write(line.encode() + b"\n")
            began, reading = clock(), asyncio.ensure_future(reader.readline())
            try:
                while not reading.done() and clock() - began < seconds:
                    await asyncio.wait([reading], timeout=POLL_SECONDS)
                if not reading.done() and connection.pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(connection.pid, signal.SIGALRM)  # interrupts the agent
                async with asyncio.timeout(GRACE_SECONDS):
                    found = await reading
            except (OSError, ValueError) as error:  # TimeoutError is an OSError
                raise EpisodeFailed(f"its process does not answer: {error}") from error
            finally:
                reading.cancel()
            if not found.endswith(b"\n"):
                raise EpisodeFailed("its process ended")
            answered = json.loads(found)
            if "error" in answered:
                raise EpisodeFailed(answered["error"])
            return answered

        began = clock()
        try:
            connection.pid = (await answer(self._beginning(row)))["pid"]
            began = clock()
            return Score(**(await answer(json.dumps({"client": dataclasses.asdict(client)})))["score"])
        except EpisodeFailed as failure:
            failure.late = clock() - began >= seconds
            raise
        finally:
            if connection.pid is not None:  # kills also the programs that it started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(connection.pid, signal.SIGKILL)
            writer.close()

    def failed(self, row: Row, why: str) -> None:
        """Logs a failed episode of the row's environment, once per kind. Raises ScorerError if all episodes fail."""
        field = parts.field(row.environment, "name")
        if not self._closing:
            line = f"{field}: an episode failed: {why}; it is excluded"
            self._complaints.log(f"{row.environment} episode {why[:40]}", line)
            self._raise_if_all_fail(f"{field}={self._settings(row).name}", why)

    def ended(self, how: str) -> None:
        """An episode ended for a reason of ENDED; resets the count of failures unless it failed or a turn was cut."""
        if how not in ("failed", "turn_cut"):
            with self._lock:
                self._failed_on_end, self._first_failure, self._any_ended = 0, "", True

    def step(self, row: Row, trajectory: Trajectory, *, evaluation: bool = False) -> "Future[Score | Reply]":
        """The result of the last turn: the trajectory's score, or the reply. evaluation: as for `run`."""
        return self._threads.submit(self._step, row, trajectory, time.monotonic if evaluation else self.clock)

    def close(self) -> None:
        """Ends every episode."""
        with self._lock:
            self._closing = True
            connections = list(self._connections.values())
        for connection in connections:
            connection.end()
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._worker is not None:
            self._worker.process.kill()
            self._worker.process.wait()
        self._starter.shutdown()
        if self._worker is not None:
            self._worker.end()

    # ---- on a thread of the pool

    def _step(self, row: Row, trajectory: Trajectory, clock: Callable[[], float]) -> Score | Reply:
        if trajectory.completion.finish_reason != "stop":
            return self._cut(trajectory, "turn_cut", "a turn is cut by its budget")
        ids = trajectory.turn_ids.tolist()
        with self._lock:
            connection = self._connections.get(trajectory)
        began = time.monotonic()
        try:
            if connection is None:
                connection = self._begin(row, trajectory, clock())
            question = self._question(row, ids, connection)
            answered = connection.exchange(json.dumps(question), self._settings(row).turn_seconds)
            step = Step(**answered["step"])
        except EpisodeFailed as failure:
            return self._failed(row, trajectory, str(failure))
        connection.add(step, time.monotonic() - began)
        if step.done:
            score = self._score(row, trajectory, connection, step)
            if "complaint" not in answered:
                return score
            kind, line = answered["complaint"]
            line = parts.as_written(row.environment, line)
            self._complaints.log(f"{row.environment} {kind}", line)
            return dataclasses.replace(score, why=line, failed=True)
        rollout = self._config.rollout
        if trajectory.turns >= rollout.max_turns:
            return self._cut(trajectory, "max_turns", f"not done after {trajectory.turns} turns")
        most = self._settings(row).episode_seconds
        if clock() - connection.began > most:
            return self._cut(trajectory, "deadline", f"not done after {most:g} s (episode_seconds)")
        path = trajectory.next_prompt(row.token_ids)
        try:
            if row.rendered and self._settings(row).history == "template":
                said = {"role": "assistant", "content": question["turn"], "reasoning_content": question["thinking"]}
                connection.messages += [said, *step.messages]
                text, reply = self._replies.render_again(row, connection.messages, path=path.tolist())
            else:
                text, reply = self._replies.encode(row, step.messages, behind=ids[-1])
        except ValueError as error:
            return self._failed(row, trajectory, str(error))
        connection.reply = text
        tokens = len(reply.token_ids) + (0 if reply.new_branch else len(path)) - len(row.token_ids)
        if tokens + self._turn_tokens > rollout.max_episode_tokens:
            return self._cut(trajectory, "max_tokens", f"no room for another turn behind {tokens} tokens")
        return reply

    def _question(self, row: Row, ids: list[int], connection: "_Connection") -> dict[str, Any]:
        rollout = self._config.rollout
        text, prompt = self._decode(ids), connection.reply or row.text
        thinking, answer = split_as_run(
            text, rollout.end_of_thinking, prompt=prompt, budget=rollout.thinking_budget_max
        )
        calls = {"calls": row.calls, "tools": row.tools}
        return {"turn": answer or "", "thinking": thinking, "tokens": len(ids), **calls}

    def _settings(self, row: Row) -> EnvironmentConfig:
        return self._configs[row.environment].environment

    def _begin(self, row: Row, trajectory: Trajectory, now: float) -> "_Connection":
        connection = self._open()
        connection.began = now
        with self._lock:
            if self._closing:
                connection.end()
                raise EpisodeFailed("the run ends")
            self._connections[trajectory] = connection
        weakref.finalize(trajectory, connection.end)  # also if the trajectory is dropped without a score
        connection.pid = connection.exchange(self._beginning(row), self._settings(row).turn_seconds)["pid"]
        return connection

    def _beginning(self, row: Row) -> str:
        asked = row_json(row)
        # A chat template may write today's date into the text: the messages say what is asked.
        drawn = row_json(dataclasses.replace(row, text="")) if row.rendered else asked
        seed = int.from_bytes(hashlib.blake2b(drawn.encode(), digest_size=7).digest(), "little")
        head = json.dumps({"part": row.environment, "seed": seed})
        return f'{head[:-1]}, "row": {asked}}}'

    def _open(self) -> "_Connection":
        """A connection to a new process for an episode."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise EpisodeFailed(f"it cannot begin: {error}") from error
        connection = _Connection(ours)
        with theirs:
            try:
                sent = self._starter.submit(self._send, theirs)
            except RuntimeError as error:  # the pool is closing
                raise EpisodeFailed("the run ends") from error
            sent.result()
        return connection

    def _score(self, row: Row, trajectory: Trajectory, connection: "_Connection", last: Step) -> Score:
        reward = sum(connection.rewards)
        correct = last.correct
        if correct is None:
            correct = reaches(reward, self._settings(row).correct_at)
        return Score(reward, correct, self._end(trajectory, "done"), turns=tuple(connection.rewards))

    def _cut(self, trajectory: Trajectory, ended: str, why: str) -> Score:
        trajectory.cut()
        return Score(-1.0, False, self._end(trajectory, ended), why=why)

    def _failed(self, row: Row, trajectory: Trajectory, why: str) -> Score:
        self.failed(row, why)
        return failed_score(self._end(trajectory, "failed"), why)

    def _raise_if_all_fail(self, field: str, why: str) -> None:
        rollout, evaluation = self._config.rollout, self._config.evaluation
        with self._lock:
            self._failed_on_end += 1
            self._first_failure = self._first_failure or why
            count, first = self._failed_on_end, self._first_failure
            # An evaluation alone may have fewer episodes than a batch.
            batch = min(rollout.prompts_per_step * rollout.group_size, evaluation.prompts * evaluation.samples)
            most = batch * (FAILED_BATCHES if self._any_ended else 1)
        if count >= most:
            raise ScorerError(f"{field}: the last {count} episodes all failed, the first of them: {first}")

    def _end(self, trajectory: Trajectory, ended: str) -> dict[str, float]:
        with self._lock:
            connection = self._connections.get(trajectory)
        self.ended(ended)
        if connection is None:
            return _metrics(trajectory, ended, 0.0)
        connection.end()
        return {**connection.metrics, **_metrics(trajectory, ended, connection.seconds)}

    # ---- on the starter's thread

    def _send(self, theirs: socket.socket) -> None:
        """Sends an episode's socket to the worker; a worker that died is replaced."""
        for attempt in range(2):
            if attempt or self._worker is None or self._worker.process.poll() is not None:
                if self._worker is not None:
                    self._worker.end()
                self._start()
            assert self._worker is not None
            with contextlib.suppress(OSError):
                socket.send_fds(self._worker.socket, [b"+"], [theirs.fileno()])
                return

    def _start(self) -> None:
        """Starts the worker; restarts it if it is killed before it is ready. Raises ScorerError."""
        first = first_line(self._config, parts=[*self._environments])
        why = ""
        for _ in range(START_TRIES):
            if self._closing:
                raise ScorerError("the run ends")
            try:
                self._worker = WorkerProcess([sys.executable, "-m", "scalerl_jax.environments.episode_worker"])
            except OSError as error:
                raise ScorerError(f"the process that plays episodes cannot be started: {error}") from error
            try:
                reply = json.loads(self._worker.exchange(first, START_SECONDS))
            except WorkerDied as death:
                last_line = self._worker.last_stderr_line()
                code = self._worker.end(by_itself=death.ended)
                why = last_line or f"exit code {code}"
                if not death.ended or code is None or code >= 0:
                    break  # a retry would fail in the same way
                continue
            if "error" in reply:
                raise ScorerError(reply["error"])
            return
        raise ScorerError(f"the process that plays episodes ended: {why}")


class EpisodeFailed(Exception):
    """The environment cannot continue an episode."""

    late = False


def failed_score(metrics: Mapping[str, float], why: str) -> Score:
    """The score of an episode that is not trained on, since its environment failed, not the policy."""
    return Score(-1.0, False, metrics, why=why, failed=True, excluded=True)


class _Connection:
    """An episode's socket, and the results of its turns so far."""

    def __init__(self, connection: socket.socket):
        self.socket, self.began = connection, 0.0  # when its episode began, on the clock of that
        self.rewards, self.seconds = list[float](), 0.0  # reward of each turn; seconds of all turns
        self.metrics: dict[str, float] = {}
        self.reply = ""  # text of the last reply
        self.messages: list[Mapping[str, str]] = []  # behind the row's, if the chat template renders them each time
        self.pid: int | None = None  # of its process; None: not started yet

    def add(self, step: Step, seconds: float) -> None:
        self.rewards.append(step.reward)
        self.seconds += seconds
        self.metrics |= step.metrics

    def exchange(self, line: str, seconds: float) -> dict[str, Any]:
        """Writes a line and reads one. Raises EpisodeFailed if none arrives, or it contains an error."""
        try:
            found = json.loads(exchange(self.socket, line, seconds + GRACE_SECONDS))
        except EOFError:
            why = f"its process ended: it crashed, a step took {seconds:g} s (turn_seconds), or its CPU time was up"
            raise EpisodeFailed(why) from None
        except (OSError, ValueError) as error:
            # The process is alive, since its end of the socket is open: user code must have cancelled its alarm.
            if isinstance(error, TimeoutError) and self.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            raise EpisodeFailed(f"its process does not answer: {error}") from error
        if "error" in found:
            raise EpisodeFailed(found["error"])
        return found

    def end(self) -> None:
        """Closes the socket; the process then calls the episode's close() and ends."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _metrics(trajectory: Trajectory, ended: str, seconds: float) -> dict[str, float]:
    return {
        "turns": float(trajectory.turns),
        "branches": float(len(trajectory.branch_parts)),
        "tokens_per_turn": len(trajectory.completion.sampled_ids()) / trajectory.turns,
        "environment_seconds": seconds,
        **{f"ended/{how}": float(how == ended) for how in ENDED},
    }
