"""What an answer is worth, where it may be mathematics: the verdict on what follows the thinking, in worker processes.

A worker is `python -m scalerl_jax.environments.verify_worker`: a small process of its own without jax, spoken to in
JSON lines over its pipes. It is never a fork of the trainer, whose threads a fork would break, and never a thread, as
an expression like 9**9**9**9 computes in C and only a kill ends it.

The limit of an answer is CPU time of its worker, so that a verdict does not depend on what else the machine does:

    seconds                   the worker interrupts itself; the answer is wrong
    seconds + GRACE_SECONDS   the kernel kills a worker that could not; the answer is wrong
    stuck_seconds, by clock   of a worker that sleeps or is stopped: it is killed as one that died

The question of a worker that died is asked of a new one once more; if that dies too, the answer is wrong. Every verdict
is remembered, and an answer that is being judged is not judged a second time beside that.

A worker that cannot be started, and any other fault here, is raised by the futures of the questions as VerifierError.
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
from concurrent.futures import Future

START_SECONDS = 300.0  # by clock: importing sympy on a busy machine
STUCK_SECONDS = 120.0  # by clock, and ten times the limit: an answer took that long without using up its CPU time
CACHE = 65_536  # verdicts remembered; completions of one group mostly end in one of a few answers
LONGEST = 100_000  # characters that are looked at, the last ones: answers come at the end
START_TRIES = 6
FIRST_PAUSE = 0.25  # seconds before a start is tried again, doubled each time
_SHORT_OF = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # what the machine may have again soon

Key = bytes


class VerifierError(ValueError):
    """No answer can be judged; the message is one line."""


def after_thinking(text: str, end: str) -> str | None:
    """What follows the last `end` of a completion's text ("": all of it); None where nothing does."""
    if not end:
        return text.strip() or None
    _, found, answer = text.rpartition(end)
    return (answer.strip() or None) if found else None


class Verifier:
    """Judges answers in `processes` workers.

    Args:
        processes: workers, at least 1.
        seconds: CPU time of one answer.
        end_of_thinking: the answer is what follows the last one, and there is no answer without; "": all of the text.
        capacity: answers that may wait; `submit` blocks while there are as many.
        stuck_seconds: by clock, of one answer; None: as said above.
    """

    def __init__(
        self,
        *,
        processes: int,
        seconds: float,
        end_of_thinking: str = "</think>",
        capacity: int = 65_536,
        stuck_seconds: float | None = None,
    ):
        assert processes > 0 and seconds > 0
        self._end = end_of_thinking
        self._questions: queue.Queue[_Question | None] = queue.Queue(maxsize=capacity)
        self._verdicts: collections.OrderedDict[Key, bool] = collections.OrderedDict()
        self._asked: dict[Key, Future[bool]] = {}  # not judged yet
        self._lock = threading.Lock()
        self._closing = threading.Event()
        # How many answers a worker was asked about, how many of them got no verdict, how many workers died.
        self.judged = self.given_up = self.restarts = 0
        stuck_seconds = STUCK_SECONDS + 10 * seconds if stuck_seconds is None else stuck_seconds
        self._workers = [_Worker(seconds, stuck_seconds, self._closing) for _ in range(processes)]
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"verifier-{i}", daemon=True)
            for i, worker in enumerate(self._workers)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            self.close()
            raise VerifierError(f"the verifier cannot start: {error}") from error

    def submit(self, text: str, answer: str) -> "Future[bool]":
        """Whether the completion `text` gives `answer`. The result raises VerifierError where it cannot be judged."""
        assert not self._closing.is_set()
        future: Future[bool] = Future()
        said = after_thinking(text, self._end)
        if said is None:
            future.set_result(False)
            return future
        said = said[-LONGEST:]
        key = _key(said, answer)
        with self._lock:
            if key in self._asked:
                return self._asked[key]
            known = self._verdicts.get(key)
            if known is None:
                self._asked[key] = future
            else:
                self._verdicts.move_to_end(key)
        if known is None:
            self._questions.put(_Question(key, said, answer, future))
        else:
            future.set_result(known)
        return future

    def judge(self, text: str, answer: str) -> bool:
        return self.submit(text, answer).result()

    def close(self) -> None:
        """Ends the workers; answers not judged yet are cancelled."""
        self._closing.set()
        with contextlib.suppress(queue.Empty):
            while (question := self._questions.get_nowait()) is not None:
                question.future.cancel()
        for worker in self._workers:
            worker.interrupt()
        for _ in self._threads:
            self._questions.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=10)

    def __enter__(self) -> "Verifier":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, worker: "_Worker") -> None:
        """Whatever goes wrong with a question is its future's; the next one is tried all the same."""
        while (question := self._questions.get()) is not None:
            future = question.future
            if not future.set_running_or_notify_cancel():
                continue
            try:
                verdict = self._verdict(worker, question)
            except BaseException as error:  # noqa: BLE001 (carried over to whoever waits for the verdict)
                with self._lock:
                    self._asked.pop(question.key, None)
                future.set_exception(_as_verifier_error(error))
            else:
                future.set_result(verdict)
        worker.end()

    def _verdict(self, worker: "_Worker", question: "_Question") -> bool:
        verdict = None
        for _ in range(2):
            try:
                verdict = worker.ask(question.text, question.answer)
                break
            except _WorkerDied:
                if self._closing.is_set():
                    raise VerifierError("the verifier was closed") from None
                with self._lock:
                    self.restarts += 1
        with self._lock:
            self.judged += 1
            self.given_up += verdict is None
            self._verdicts[question.key] = bool(verdict)
            self._asked.pop(question.key, None)
            if len(self._verdicts) > CACHE:
                self._verdicts.popitem(last=False)
        return bool(verdict)


class _Question:
    def __init__(self, key: Key, text: str, answer: str, future: "Future[bool]"):
        self.key, self.text, self.answer, self.future = key, text, answer, future


def _key(text: str, answer: str) -> Key:
    """The same for the same question; short, whatever the texts are."""
    return hashlib.blake2b(json.dumps([text, answer]).encode(), digest_size=20).digest()


def _as_verifier_error(error: BaseException) -> VerifierError:
    if isinstance(error, VerifierError):
        return error
    made = VerifierError(f"the verifier failed: {' '.join(f'{type(error).__name__}: {error}'.split())}")
    made.__cause__ = error
    return made


class _WorkerDied(Exception):
    """The worker ended without an answer, or is stuck."""

    def __init__(self, *, ended: bool = True):
        super().__init__()
        self.ended = ended


class _Worker:
    """One worker process, started when first asked and again after it was ended."""

    def __init__(self, seconds: float, stuck_seconds: float, closing: threading.Event):
        self._seconds, self._stuck_seconds, self._closing = seconds, stuck_seconds, closing
        self._running: _Running | None = None
        self._lock = threading.Lock()  # no process is started once it closes

    def ask(self, text: str, answer: str) -> bool | None:
        """The verdict, or None when its CPU time ran out. Raises _WorkerDied, or VerifierError when none can start."""
        if self._running is None:
            self._start()
        running = self._running
        if running is None:
            raise _WorkerDied
        try:
            reply = running.exchange(json.dumps({"text": text, "answer": answer}), self._stuck_seconds)
        except _WorkerDied as death:
            self._running = None
            code = running.end(by_itself=death.ended)
            if code == -signal.SIGXCPU:  # it could not even interrupt itself
                return None
            raise
        except BaseException:
            self.end()  # what it says next would be taken for the answer to the next question
            raise
        return json.loads(reply)["right"]

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
        command = [sys.executable, "-m", "scalerl_jax.environments.verify_worker", f"--seconds={self._seconds}"]
        # The worker must find this package however the trainer found it.
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
        why = ""
        for attempt in range(START_TRIES):
            if attempt and self._closing.wait(FIRST_PAUSE * 2 ** (attempt - 1)):
                raise _WorkerDied
            try:
                with self._lock:
                    if self._closing.is_set():
                        raise _WorkerDied
                    self._running = _Running(command, {**os.environ, "PYTHONPATH": path})
            except OSError as error:
                why = str(error)
                if error.errno in _SHORT_OF:
                    continue
                break
            try:
                self._running.exchange("", START_SECONDS)
                return
            except _WorkerDied as death:
                running, self._running = self._running, None
                said = running.said()
                code = running.end(by_itself=death.ended)
                if self._closing.is_set():
                    raise
                why = f"it ended with code {code}: {said}" if said else f"it ended with code {code}"
                if code >= 0:  # not killed: it will do the same again
                    break
        raise VerifierError(f"the verifier's worker cannot be started ({why}): {' '.join(command)}")


class _Running:
    """A process spoken to in lines: one to it, one from it."""

    def __init__(self, command: list[str], environment: dict[str, str]):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by end); it writes to it only until it is ready
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environment,
                start_new_session=True,  # Ctrl-C is the trainer's, which may still want verdicts while it saves
            )
        except BaseException:
            self._errors.close()
            raise
        assert self.process.stdin is not None and self.process.stdout is not None
        self._questions, self._replies = self.process.stdin, self.process.stdout
        os.set_blocking(self._questions.fileno(), False)

    def exchange(self, line: str, seconds: float) -> bytes:
        """Writes a line ("": none) and reads one, within `seconds` by clock. Raises _WorkerDied where none comes."""
        end = time.monotonic() + seconds
        out, reply = memoryview(line.encode() + b"\n" if line else b""), b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            if out:
                selector.register(self._questions, selectors.EVENT_WRITE)
            while not reply.endswith(b"\n"):
                ready = selector.select(max(0.0, end - time.monotonic()))
                if not ready:
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

    def said(self) -> str:
        """The last line of its stderr."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def kill(self) -> None:
        self.process.kill()

    def end(self, *, by_itself: bool = False) -> int:
        """Its exit code. It is killed, or was seen to end by itself: then it is given a moment to have ended."""
        if by_itself:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10.0)
        self.process.kill()
        code = self.process.wait()
        for file in (self._replies, self._questions, self._errors):
            with contextlib.suppress(BrokenPipeError):
                file.close()
        return code
