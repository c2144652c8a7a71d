"""Scores from worker processes, each within a limit of time.

A worker is `python -m scalerl_jax.environments.score_worker`: a small process of its own without jax, spoken to in
JSON lines over its pipes, which makes the run's environments from the config. It is never a fork of the trainer, whose
threads a fork would break, and never a thread, as an expression like 9**9**9**9 computes in C and only a kill ends it.

The limit of a score is CPU time of its worker, so that it does not depend on what else the machine does:

    seconds                   the worker interrupts itself; the completion is wrong
    seconds + GRACE_SECONDS   the kernel kills a worker that could not; the completion is wrong
    stuck_seconds, by clock   of a worker that sleeps or is stopped: it is killed as one that died; what a score may
                              wait for others comes on top

The question of a worker that died is retried on a new one; if that dies too, the completion is wrong. So is it
where a reply does not have the question's id, since a second writer would shift all scores by one. Of an environment
that is deterministic every score that is no failure is remembered, and a completion that is being scored is not scored
a second time beside that: what is remembered goes by digests of the row, made once, and of the completion. A worker
whose memory has grown is replaced before its next question.

What waits for a worker has no bound here: it is what the groups in flight and an evaluation have, which are bounded. A
row may hold megabytes of tests: it is written out when a worker is free, not while it waits.

A worker that cannot be started, an environment that cannot be made there, a score that says so, and any other fault
here, is raised by the futures of the questions as ScorerError. What a score function says of itself when it fails is
logged, once for each kind of it.

What of a row goes to the processes that score, as JSON, and the digest of that.
"""

import collections
import contextlib
import errno
import hashlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from scalerl_jax import config_io
from scalerl_jax.config import Config
from scalerl_jax.environments import parts, rewards
from scalerl_jax.environments.base import Completion, Environment, Row, Score
from scalerl_jax.environments.base import ScorerError as ScorerError
from scalerl_jax.environments.complaints import Complaints

_NOT_JSON = (TypeError, ValueError, RecursionError)


def row_json(row: Row) -> str:
    """Fields of a Row, by their names. Raises ScorerError naming the row and the column that JSON has no form for."""
    fields: dict[str, Any] = {"text": row.text, "answer": row.answer, "task": row.task, "extra": dict(row.extra)}
    fields |= {"source": row.source, "messages": [dict(message) for message in row.messages]}
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


class RowDigests:
    """20 bytes that stand for what a score may look at in a row. From any thread; each row is written out once."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[Row, bytes] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def __getitem__(self, row: Row) -> bytes:
        """Raises ScorerError as row_json does."""
        with self._lock:
            digest = self._made.get(row)
        if digest is None:
            digest = hashlib.blake2b(row_json(row).encode(), digest_size=20).digest()
            with self._lock:
                self._made[row] = digest
        return digest


START_SECONDS = 300.0  # by clock: importing sympy on a busy machine
STUCK_SECONDS = 120.0  # by clock, and ten times the limit: an answer took that long without using up its CPU time
CACHE = 65_536  # scores remembered; completions of one group mostly end in one of a few answers
LONGEST = 100_000  # characters that are looked at, the last ones: answers come at the end
START_TRIES = 6
CLOSING_SECONDS = 0.5  # between two looks at whether the pool closes
ENDING_SECONDS = 10.0  # for a process to be gone; one that the kernel holds on to is left to it
FIRST_PAUSE = 0.25  # seconds before a start is tried again, doubled each time
# A worker scores one answer at a time, and threads of libraries that it loads take of its memory limit.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_SAME_ORDER = {"PYTHONHASHSEED": "0"}  # of sets, in every worker: what is made there is the same each time
_SHORT_OF = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # what the machine may have again soon

Key = bytes


class ScorerPool:
    """Scores of the environments of a run.

    Args:
        config: the run's, from which the workers make them.
        environments: by part, those that are asked here; at least one.
        complaints: says what score functions say of themselves.
        stuck_seconds: by clock, of one completion; None: as said above.
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
        self._rows = RowDigests()
        self._deterministic: set[str] = set()  # parts
        self._complaints = complaints or Complaints()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        # How many completions a worker was asked about, how many of them got no score, how many workers died.
        self.scored = self.given_up = self.restarts = 0
        first = json.dumps({"config": config_io.to_json(config), "parent": os.getpid()})
        self._workers = [_Worker(first, self._closing) for _ in range(processes)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="verifier")  # one for each worker

    def prepare(self, *, everywhere: bool = False, columns: Mapping[str, Collection[str]] | None = None) -> None:
        """Makes every environment in a worker, or in all. columns: that the rows of each part have, if that is known.

        Raises ScorerError where one cannot be made, or wants a column that no row has.
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
        """What `completion` is worth. The result raises ScorerError where it cannot be scored."""
        assert not self._closing.is_set() and row.environment in self._environments
        question = self._question(row, completion)
        if row.environment not in self._deterministic:
            return self._on_thread(self._answer, None, row, question)
        try:
            key = hashlib.blake2b(self._rows[row] + json.dumps(question).encode(), digest_size=20).digest()
        except ScorerError as error:
            unscored: Future[Score] = Future()
            unscored.set_exception(error)
            return unscored
        with self._lock:
            if key in self._scores:
                self._scores.move_to_end(key)
                known: Future[Score] = Future()
                known.set_result(self._scores[key])
                return known
            if key not in self._asked:
                self._asked[key] = self._on_thread(self._answer, key, row, question)
            return self._asked[key]

    def _question(self, row: Row, completion: Completion) -> dict[str, Any]:
        """What a score may look at, beside the row."""
        reads = self._environments[row.environment].reads_thinking
        return {
            "part": row.environment,
            "completion": completion[-LONGEST:],
            "thinking": completion.thinking[-LONGEST:] if reads else "",
            "tokens": completion.tokens if reads else 0,
        }

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
        """On a thread, of which there is one for each worker: one is free now. key: None: it is not remembered."""
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
                self._complaints.say(f"{part} {why}", f"{where}: {why}: that completion counts as wrong")
            if "complaint" in reply:
                self._complaints.say(*reply["complaint"])
            with self._lock:
                self.scored += 1
                self.given_up += not found
                # A judge that was away for a moment is asked again; what used up its CPU time would do so again.
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
        """The reply to `line` of the next worker that is free (_Worker.ask); None: no worker has one.

        Raises ScorerError. Whatever goes wrong is this question's; the next one is tried all the same.
        """
        worker = self._idle.get()
        try:
            for _ in range(2):
                try:
                    reply = worker.ask(line, seconds, part)
                except _WorkerDied:
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


def worker_environment() -> dict[str, str]:
    """Variables of a process that makes environments: it must find this package however the trainer found it."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    return {**os.environ, **_ONE_THREAD, **_SAME_ORDER, "PYTHONPATH": path}


class _WorkerDied(Exception):
    """The worker ended without an answer, or is stuck."""

    def __init__(self, *, ended: bool = True):
        super().__init__()
        self.ended = ended


class _Worker:
    """One worker process, started when first asked and again after it was ended."""

    def __init__(self, first: str, closing: threading.Event):
        self._first, self._closing = first, closing  # the first line to it
        self._running: _Running | None = None
        self._made: set[str] = set()  # parts, by the one that runs
        self._asked = 0  # questions; each has its number for an id
        self._lock = threading.Lock()  # no process is started once it closes

    def ask(self, line: str, seconds: float, part: str | None = None) -> dict[str, Any]:
        """Its reply, within `seconds` by clock. part: the environment that the line needs, which has time of its own
        to be made. Raises _WorkerDied, or ScorerError when none can start."""
        if self._running is None:
            self._made.clear()
            self._start()
        running = self._running
        if running is None:
            raise _WorkerDied
        try:
            if part is not None and part not in self._made:
                ready = self._reply(running, json.dumps({"prepare": {part: None}}), START_SECONDS)
                if "error" in ready:
                    return ready
                self._made.add(part)
            reply = self._reply(running, line, seconds)
        except _WorkerDied as death:
            self._running = None
            code = running.end(by_itself=death.ended)
            if code == -signal.SIGXCPU:  # it could not even interrupt itself
                return {"out_of_time": True}
            raise
        except BaseException:
            self.end()  # what it says next would be taken for the answer to the next question
            raise
        if "last" in reply:
            self.end()
        return reply

    def _reply(self, running: "_Running", line: str, seconds: float) -> dict[str, Any]:
        """To this question and no other. Raises _WorkerDied where something else was written: whose is what follows?"""
        self._asked += 1
        response = running.exchange(f'{{"id": {self._asked}, {line[1:]}', seconds)
        try:
            reply: dict[str, Any] = json.loads(response)
            own = reply.pop("id") == self._asked
        except (ValueError, AttributeError, LookupError, TypeError):
            own = False
        if not own:
            raise _WorkerDied(ended=False)
        return reply

    def interrupt(self) -> None:
        """From another thread, when it closes: the question being asked ends in _WorkerDied."""
        with self._lock:
            if self._running is not None:
                self._running.kill()

    def end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.end()

    def _start(self) -> None:
        """Starts the process; where the machine is short of something for a moment, it is tried again."""
        command = [sys.executable, "-m", "scalerl_jax.environments.score_worker"]
        why = ""
        for attempt in range(START_TRIES):
            if attempt and self._closing.wait(FIRST_PAUSE * 2 ** (attempt - 1)):
                raise _WorkerDied
            try:
                with self._lock:
                    if self._closing.is_set():
                        raise _WorkerDied
                    self._running = _Running(command, worker_environment(), self._closing)
            except OSError as error:
                why = str(error)
                if error.errno in _SHORT_OF:
                    continue
                break
            try:
                self._running.exchange(self._first, START_SECONDS)
                return
            except _WorkerDied as death:
                running, self._running = self._running, None
                last_line = running.last_stderr_line()
                code = running.end(by_itself=death.ended)
                if self._closing.is_set():
                    raise
                why = f"it ended with code {code}: {last_line}" if last_line else f"it ended with code {code}"
                if code is not None and code >= 0:  # not killed: it will do the same again
                    break
        raise ScorerError(f"the verifier's worker cannot be started ({why}): {' '.join(command)}")


class _Running:
    """A process spoken to in lines: one to it, one from it."""

    def __init__(self, command: list[str], environment: dict[str, str], closing: threading.Event):
        self._closing = closing
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by end); it writes to it only until it is ready
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environment,
                start_new_session=True,  # Ctrl-C is the trainer's, which may still want scores while it saves
            )
        except BaseException:
            self._errors.close()
            raise
        assert self.process.stdin is not None and self.process.stdout is not None
        self._questions, self._replies = self.process.stdin, self.process.stdout
        os.set_blocking(self._questions.fileno(), False)

    def exchange(self, line: str, seconds: float) -> bytes:
        """Writes a line and reads one, within `seconds` by clock.

        Raises _WorkerDied where none comes, and soon after the pool closes: what a worker started may hold the pipe.
        """
        end = time.monotonic() + seconds
        out, reply = memoryview(line.encode() + b"\n"), b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            selector.register(self._questions, selectors.EVENT_WRITE)
            while not reply.endswith(b"\n"):
                ready = selector.select(min(CLOSING_SECONDS, max(0.0, end - time.monotonic())))
                if not ready and (self._closing.is_set() or time.monotonic() >= end):
                    raise _WorkerDied(ended=False)
                for key, _ in ready:
                    if key.fileobj is self._replies:
                        data = os.read(self._replies.fileno(), 65_536)
                        if not data:
                            raise _WorkerDied
                        reply += data
                        continue
                    try:
                        out = out[os.write(self._questions.fileno(), out) :]
                    except BlockingIOError:
                        continue
                    except BrokenPipeError:
                        raise _WorkerDied from None
                    if not out:
                        selector.unregister(self._questions)
        return reply

    def last_stderr_line(self) -> str:
        """The last line of its stderr."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def kill(self) -> None:
        """With what it has started, which may hold its end of the pipe."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self, *, by_itself: bool = False) -> int | None:
        """Its exit code. It is killed, or was seen to end by itself: then it is given a moment to have ended.

        None: it has not ended.
        """
        for killed in (False, True) if by_itself else (True,):
            if killed:
                self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(ENDING_SECONDS)
        code = self.process.returncode
        for file in (self._replies, self._questions, self._errors):
            with contextlib.suppress(BrokenPipeError):
                file.close()
        return code
