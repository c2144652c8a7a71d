"""What an answer is worth: math-verify's verdict on what follows the thinking, in worker processes.

A worker is `python -m scalerl_jax.tasks.verify_worker`: a small process of its own without jax, spoken to in JSON lines
over its pipes. It is never a fork of the trainer, whose threads a fork would break, and never a thread, since an
expression like 9**9**9**9 computes in C and only a kill ends it.

A question that runs over the time limit is judged wrong and its worker is replaced; a question whose worker died is
asked of a new worker once more, and judged wrong if that dies too.
"""

import collections
import contextlib
import json
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

START_SECONDS = 120.0  # importing sympy on a busy machine
GRACE_SECONDS = 1.0  # the worker interrupts itself at the limit; over the limit by this much, it is killed
CACHE = 65_536  # verdicts remembered; completions of one group mostly end in one of a few answers


def after_thinking(text: str, end: str) -> str | None:
    """What follows the last `end` of a completion's text ("": all of it); None where nothing does."""
    if not end:
        return text.strip() or None
    _, found, answer = text.rpartition(end)
    return (answer.strip() or None) if found else None


class Verifier:
    """Judges answers in `processes` workers.

    Args:
        processes: workers.
        seconds: time limit of one answer.
        end_of_thinking: the answer is what follows the last one, and there is no answer without; "": all of the text.
        capacity: answers that may wait; `submit` blocks while there are as many.
    """

    def __init__(self, *, processes: int, seconds: float, end_of_thinking: str = "</think>", capacity: int = 65_536):
        if processes < 1:
            raise ValueError(f"config.task.verifier_processes={processes}: must be above 0")
        if not seconds > 0:
            raise ValueError(f"config.task.verifier_seconds={seconds}: must be above 0")
        self._seconds, self._end = seconds, end_of_thinking
        self._questions: queue.Queue = queue.Queue(maxsize=capacity)
        self._cache: collections.OrderedDict[tuple[str, str], bool] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._closed = False
        self.judged = self.given_up = self.restarts = (
            0  # for the metrics: answers asked of a worker, without a verdict; workers that died
        )
        self._workers = [_Worker(seconds) for _ in range(processes)]
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"verifier-{i}", daemon=True)
            for i, worker in enumerate(self._workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, text: str, answer: str) -> "Future[bool]":
        """Whether the completion `text` gives `answer`. The result raises RuntimeError where no worker can start."""
        assert not self._closed
        future: Future[bool] = Future()
        question = after_thinking(text, self._end)
        if question is None:
            future.set_result(False)
            return future
        key = (question, answer)
        with self._lock:
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
        if known is not None:
            future.set_result(known)
        else:
            self._questions.put((key, future))
        return future

    def judge(self, text: str, answer: str) -> bool:
        return self.submit(text, answer).result()

    def close(self) -> None:
        """Ends the workers; answers not judged yet are cancelled."""
        self._closed = True
        while True:
            try:
                _, future = self._questions.get_nowait()
            except queue.Empty:
                break
            future.cancel()
        for worker in self._workers:
            worker.interrupt()
        for _ in self._threads:
            self._questions.put(None)
        for thread in self._threads:
            thread.join(timeout=10)

    def __enter__(self) -> "Verifier":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, worker: "_Worker") -> None:
        while (item := self._questions.get()) is not None:
            key, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._verdict(worker, key))
            except RuntimeError as error:
                future.set_exception(error)
        worker.end()

    def _verdict(self, worker: "_Worker", key: tuple[str, str]) -> bool:
        with self._lock:
            if key in self._cache:  # judged since it was submitted
                return self._cache[key]
        verdict = None
        for _ in range(2):
            try:
                verdict = worker.ask(*key)
                break
            except _WorkerDied:
                if self._closed:
                    raise RuntimeError("the verifier was closed") from None
                self.restarts += 1
        with self._lock:
            self.judged += 1
            if verdict is None:
                self.given_up += 1
            else:  # a verdict for want of time is not remembered: the machine may have been busy
                self._cache[key] = verdict
                if len(self._cache) > CACHE:
                    self._cache.popitem(last=False)
        return bool(verdict)


class _WorkerDied(Exception):
    """The worker ended without an answer."""


class _Worker:
    """One worker process, started when first asked and again after it was ended."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._running: _Running | None = None

    def ask(self, text: str, answer: str) -> bool | None:
        """The verdict, or None when time ran out. Raises _WorkerDied, or RuntimeError when no worker can be started."""
        if self._running is None:
            self._start()
        running = self._running
        if running is None:
            raise _WorkerDied
        try:
            running.write_line(json.dumps({"text": text, "answer": answer}))
            reply = running.read_line(self._seconds + GRACE_SECONDS)
        except _WorkerDied:
            self.end()
            raise
        if reply is None:  # stuck where it cannot even interrupt itself
            self.end()
            return None
        return json.loads(reply)["right"]

    def interrupt(self) -> None:
        """From another thread: the question being asked ends in _WorkerDied."""
        if (running := self._running) is not None:
            running.process.kill()

    def end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.end()

    def _start(self) -> None:
        command = [sys.executable, "-m", "scalerl_jax.tasks.verify_worker", f"--seconds={self._seconds}"]
        # The worker must find this package however the trainer found it.
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
        self._running = _Running(command, {**os.environ, "PYTHONPATH": path})
        try:
            ready = self._running.read_line(START_SECONDS)
        except _WorkerDied:
            ready = None
        if ready is None:
            self.end()
            raise RuntimeError(f"the verifier's worker does not start: {' '.join(command)}")


class _Running:
    """A process spoken to in lines."""

    def __init__(self, command: list[str], environment: dict[str, str]):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._questions, self._replies = self.process.stdin, self.process.stdout
        self._buffer = b""

    def write_line(self, line: str) -> None:
        """Raises _WorkerDied where nobody reads."""
        try:
            self._questions.write(line.encode() + b"\n")
            self._questions.flush()
        except BrokenPipeError:
            raise _WorkerDied from None

    def read_line(self, seconds: float) -> bytes | None:
        """One line, or None after `seconds`. Raises _WorkerDied at the end of the output."""
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, end - time.monotonic())):
                    return None
                data = os.read(self._replies.fileno(), 65_536)
                if not data:
                    raise _WorkerDied
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._replies.close()
        with contextlib.suppress(BrokenPipeError):  # what was not flushed has no reader any more
            self._questions.close()
