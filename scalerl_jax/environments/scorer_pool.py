"""Computes scores in worker processes, each within a time limit.

A worker is `python -m scalerl_jax.environments.score_worker`: a small process without jax that makes the run's
environments from the config and exchanges JSON lines over a socket (worker_process.py). It is never a fork of the
trainer, whose threads a fork would break, and never a thread: an expression like 9**9**9**9 is computed in C, and only
a kill ends it.

The limit of a score is CPU time of its worker, so that it does not depend on the load of the machine:

    seconds                   the worker interrupts itself; the completion is wrong
    seconds + GRACE_SECONDS   the kernel kills a worker that could not; the completion is wrong
    stuck_seconds, by clock   for a worker that sleeps or is stopped: it is killed and treated as a worker that died;
                              the environment's waits_seconds are added to the limit

The question of a worker that died is retried on a new one; if that dies too, the completion is wrong. A reply without
the question's id is treated in the same way, since a second writer would shift all scores by one. For a deterministic
environment every score that is not a failure is cached, and a completion that is already being scored is not scored
concurrently a second time; the cache key is a digest of the row, computed once per row, and of the question. A worker
whose memory has grown is replaced before its next question.

The queue for workers has no bound here: it holds completions of the groups in flight and of an evaluation, which are
bounded. A row may hold megabytes of tests: it is serialized when a worker is free, not while it waits.

If a worker cannot be started, an environment cannot be made there, a score raises ScorerError, or anything else fails
in this module, the futures of the questions raise ScorerError. Failures of score functions are logged, once per kind.

This module also defines the JSON form of a row for the scoring processes.
"""

import collections
import errno
import hashlib
import json
import logging
import queue
import signal
import sys
import threading
import weakref
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.environments import parts, rewards
from scalerl_jax.environments.base import Completion, Environment, Row, Score
from scalerl_jax.environments.base import ScorerError as ScorerError
from scalerl_jax.environments.worker_process import START_SECONDS, START_TRIES, WorkerDied, WorkerProcess, first_line

_NOT_JSON = (TypeError, ValueError, RecursionError)


def row_json(row: Row) -> str:
    """The fields of a Row as a JSON object. Raises ScorerError naming the row and the column that JSON cannot hold."""
    fields: dict[str, Any] = {"text": row.text, "answer": row.answer, "task": row.task, "extra": dict(row.extra)}
    fields |= {"source": row.source, "messages": [dict(message) for message in row.messages]}
    fields |= {"key": row.key} if row.key else {}  # only if there is one: seeds are made from this text
    try:
        return json.dumps(fields)
    except _NOT_JSON as error:
        name = row.name or repr(row.text[:80])
        for column, value in row.extra.items():
            try:
                json.dumps({column: value})
            except _NOT_JSON as why:
                raise ScorerError(f"{name}: column {column!r}: JSON has no form for it: {why}") from why
        raise ScorerError(f"{name}: JSON has no form for it: {error}") from error


STUCK_SECONDS = 120.0  # by clock, plus ten times the CPU limit: a longer score is stuck without using CPU time
CACHE = 65_536  # cached scores; completions of one group mostly end in one of a few answers
LONGEST = 100_000  # characters that are scored, the last ones: answers come at the end
KINDS = 20  # of failures that are logged
FIRST_PAUSE = 0.25  # seconds before a start is retried, doubled each time
_SHORT_OF = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # temporary shortages of the machine

Key = bytes
_log = logging.getLogger(__name__)


class Complaints:
    """The failures of score functions logged in one run: once per kind, for at most KINDS kinds. Thread-safe."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()
        self._lock = threading.Lock()

    def log(self, kind: str, line: str) -> None:
        """Logs `line`, unless a failure of the same kind was logged before."""
        with self._lock:
            if kind in self._kinds or len(self._kinds) >= KINDS:
                return
            self._kinds.add(kind)
            last = len(self._kinds) == KINDS
        _log.warning("%s (logged once%s)", line, "; further kinds of failures are not logged" if last else "")


class ScorerPool:
    """Scores completions of the run's environments in worker processes.

    Args:
        config: the run's config, from which the workers make the environments.
        environments: the environments scored here, by part; at least one.
        complaints: logs failures of score functions.
        stuck_seconds: wall-clock limit of one completion; None: STUCK_SECONDS plus ten times the CPU limit.
    """

    def __init__(
        self,
        config: Config,
        environments: Mapping[str, Environment],
        *,
        complaints: Complaints | None = None,
        stuck_seconds: float | None = None,
    ):
        assert environments
        configs = parts.configs(config)
        processes = max(configs[part].environment.verifier_processes for part in environments)
        self._environments, self._stuck_seconds = environments, dict[str, float]()
        self._functions = {part: rewards.functions(configs[part].environment, part) for part in environments}
        self._seconds = {part: configs[part].environment.verifier_seconds for part in environments}
        for part, environment in environments.items():
            least = STUCK_SECONDS + 10 * self._seconds[part] if stuck_seconds is None else stuck_seconds
            self._stuck_seconds[part] = least + environment.waits_seconds
        self._scores: collections.OrderedDict[Key, Score] = collections.OrderedDict()
        self._asked: dict[Key, Future[Score]] = {}  # not scored yet
        self._digests: weakref.WeakKeyDictionary[Row, bytes] = weakref.WeakKeyDictionary()
        self._deterministic: set[str] = set()  # parts
        self._complaints = complaints or Complaints()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        # Completions sent to workers, those of them without a score, and workers that died.
        self.scored = self.given_up = self.restarts = 0
        self._workers = [_Worker(first_line(config), self._closing) for _ in range(processes)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="verifier")  # one for each worker

    def prepare(self, *, everywhere: bool = False, columns: Mapping[str, Collection[str]] | None = None) -> None:
        """Makes every environment in one worker, or in all (everywhere). columns: of the rows of each part, if known.

        Raises ScorerError if one cannot be made, or requires a column that no row has.
        """
        known = {part: sorted(columns[part]) if columns and part in columns else None for part in self._environments}
        seconds = START_SECONDS + max(self._stuck_seconds.values())
        asked = [
            self._on_thread(self._ask, json.dumps({"prepare": known}), seconds)
            for _ in range(len(self._workers) if everywhere else 1)
        ]
        for done in asked:
            reply = done.result()
            if reply is None:
                raise ScorerError("the verifier's worker ended, or was stuck, when it made the environments")
            self._deterministic.update(reply["deterministic"])

    def submit(self, row: Row, completion: Completion) -> "Future[Score]":
        """Scores `completion`. The future raises ScorerError if it cannot be scored."""
        assert not self._closing.is_set() and row.environment in self._environments
        question = self._question(row, completion)
        if row.environment not in self._deterministic:
            return self._on_thread(self._answer, None, row, question)
        try:
            key = hashlib.blake2b(self._digest(row) + json.dumps(question).encode(), digest_size=20).digest()
        except ScorerError as error:
            unscored: Future[Score] = Future()
            unscored.set_exception(error)
            return unscored
        with self._lock:
            if key in self._scores:
                self._scores.move_to_end(key)
                return done_future(self._scores[key])
            if key not in self._asked:
                self._asked[key] = self._on_thread(self._answer, key, row, question)
            return self._asked[key]

    def _question(self, row: Row, completion: Completion) -> dict[str, Any]:
        """The inputs of a score, except the row."""
        reads = self._environments[row.environment].reads_thinking
        return {
            "part": row.environment,
            "completion": completion[-LONGEST:],
            "thinking": completion.thinking[-LONGEST:] if reads else "",
            "tokens": completion.tokens if reads else 0,
        }

    def _digest(self, row: Row) -> bytes:
        """20 bytes of the row fields that a score may read; each row is serialized once. Raises as row_json."""
        with self._lock:
            digest = self._digests.get(row)
        if digest is None:
            digest = hashlib.blake2b(row_json(row).encode(), digest_size=20).digest()
            with self._lock:
                self._digests[row] = digest
        return digest

    def _on_thread(self, function: Any, *arguments: Any) -> "Future[Any]":
        try:
            return self._threads.submit(function, *arguments)
        except RuntimeError as error:
            raise ScorerError(f"the verifier cannot start: {error}") from error

    def close(self) -> None:
        """Ends the workers; what is not scored yet is cancelled."""
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.interrupt()
        self._threads.shutdown()
        for worker in self._workers:
            worker.end()

    def _answer(self, key: Key | None, row: Row, question: Mapping[str, Any]) -> Score:
        """Runs on one of as many threads as workers, so a worker is free. key=None: the score is not cached."""
        part = row.environment
        try:
            line = f'{json.dumps(question)[:-1]}, "row": {row_json(row)}}}'
            reply = self._ask(line, self._stuck_seconds[part], part)
            if reply is None:
                why, reply = "the process that scored it ended, was stuck or was not alone in answering, twice", {}
            elif "out_of_time" in reply:
                why = f"no score within {self._seconds[part]:g} s of CPU time (verifier_seconds)"
            if found := reply.get("score"):
                score = Score(**found)
            else:
                errors = {f"rewards/{name}/errors": 1.0 for name in self._functions[part].values()}
                score = Score(-1.0, False, errors, why=why, failed=True)
                where = " or ".join(self._functions[part]) or parts.field(part, "name")
                self._complaints.log(f"{part} {why}", f"{where}: {why}: that completion counts as wrong")
            if "complaint" in reply:
                self._complaints.log(*reply["complaint"])
            with self._lock:
                self.scored += 1
                self.given_up += not found
                # Failures are not cached, as they may be temporary; except exceeding the CPU time, which would recur.
                if key is not None and "complaint" not in reply and (found or "out_of_time" in reply):
                    self._scores[key] = score
                if len(self._scores) > CACHE:
                    self._scores.popitem(last=False)
            return score
        finally:
            with self._lock:
                if key is not None:
                    self._asked.pop(key, None)

    def _ask(self, line: str, seconds: float, part: str | None = None) -> dict[str, Any] | None:
        """The reply of the next free worker to `line` (_Worker.ask); None if two workers died.

        Raises ScorerError. An error concerns only this question; the next one is tried regardless.
        """
        worker = self._idle.get()
        try:
            for _ in range(2):
                try:
                    reply = worker.ask(line, seconds, part)
                except WorkerDied:
                    if self._closing.is_set():
                        raise ScorerError("the verifier was closed") from None
                    with self._lock:
                        self.restarts += 1
                    continue
                if "error" in reply:
                    raise ScorerError(reply["error"])
                return reply
            return None
        except ScorerError:
            raise
        except BaseException as error:
            raise ScorerError(f"the verifier failed: {' '.join(f'{type(error).__name__}: {error}'.split())}") from error
        finally:
            self._idle.put(worker)


def done_future(score: Score) -> "Future[Score]":
    future: Future[Score] = Future()
    future.set_result(score)
    return future


class _Worker:
    """One worker process, started with the first question and restarted after it ended."""

    def __init__(self, first: str, closing: threading.Event):
        self._first, self._closing = first, closing  # the first line to it
        self._running: WorkerProcess | None = None
        self._made: set[str] = set()  # parts that the running process has made
        self._asked = 0  # number of questions; each one's number is its id
        self._lock = threading.Lock()  # ensures that no process is started after the pool closes

    def ask(self, line: str, seconds: float, part: str | None = None) -> dict[str, Any]:
        """The worker's reply to `line`, within `seconds` by clock. part: the environment that the line needs; making it
        has a separate time limit. Raises WorkerDied, or ScorerError if no worker can start."""
        running = self._running or self._start()
        try:
            if part is not None and part not in self._made:
                ready = self._reply(running, json.dumps({"prepare": {part: None}}), START_SECONDS)
                if "error" in ready:
                    return ready
                self._made.add(part)
            reply = self._reply(running, line, seconds)
        except WorkerDied as death:
            self._running = None
            code = running.end(by_itself=death.ended)
            if code == -signal.SIGXCPU:  # it could not even interrupt itself
                return {"out_of_time": True}
            raise
        except BaseException:
            self.end()  # its late reply would be taken for the reply to the next question
            raise
        if "last" in reply:
            self.end()
        return reply

    def _reply(self, running: WorkerProcess, line: str, seconds: float) -> dict[str, Any]:
        """The reply with this question's id. Raises WorkerDied for any other output, after which ids may not match."""
        self._asked += 1
        response = running.exchange(f'{{"id": {self._asked}, {line[1:]}', seconds)
        try:
            reply: dict[str, Any] = json.loads(response)
            own = reply.pop("id") == self._asked
        except (ValueError, AttributeError, LookupError, TypeError):
            own = False
        if not own:
            raise WorkerDied(ended=False)
        return reply

    def interrupt(self) -> None:
        """Called from another thread when the pool closes: the current question raises WorkerDied."""
        with self._lock:
            if self._running is not None:
                self._running.kill()

    def end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.end()

    def _start(self) -> WorkerProcess:
        """Starts the process; retries during a temporary shortage of resources, or if the process was killed."""
        command = [sys.executable, "-m", "scalerl_jax.environments.score_worker"]
        self._made.clear()
        why = ""
        for attempt in range(START_TRIES):
            if attempt and self._closing.wait(FIRST_PAUSE * 2 ** (attempt - 1)):
                raise WorkerDied
            try:
                with self._lock:
                    if self._closing.is_set():
                        raise WorkerDied
                    self._running = running = WorkerProcess(command)
            except OSError as error:
                why = str(error)
                if error.errno in _SHORT_OF:
                    continue
                break
            try:
                running.exchange(self._first, START_SECONDS)
                return running
            except WorkerDied as death:
                self._running = None
                last_line = running.last_stderr_line()
                code = running.end(by_itself=death.ended)
                if self._closing.is_set():
                    raise
                why = f"it ended with code {code}: {last_line}" if last_line else f"it ended with code {code}"
                if code is not None and code >= 0:  # not killed: a retry would fail in the same way
                    break
        raise ScorerError(f"the verifier's worker cannot be started ({why}): {' '.join(command)}")
