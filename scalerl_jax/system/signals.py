"""Ctrl-C and SIGTERM: the first asks a command to leave, the second makes it leave at once.

The effect of the first signal depends on the mode, which begins as RAISE and may be changed at any time by be():

    RAISE   the main thread raises Interrupted where it is: short commands, which clean up as they unwind
    EXIT    the process ends from another thread, after the functions of before_exit(): start-up, when there is nothing
            to save, and the main thread may be inside a compilation for minutes
    HOLD    it is only noted, and raise_if_interrupted() raises Interrupted where the command's state is whole: training

The second signal ends the process in every mode. Local servers and verifier workers end with their parent. The exit
code is 128 + signal. Signals within REPEAT_SECONDS of the first count as the same: a terminal and a process manager may
both pass it on.
"""

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)
RAISE, EXIT, HOLD = "raise", "exit", "hold"
REPEAT_SECONDS = 0.5
PATIENCE_SECONDS = 10.0  # work in progress may take that long before it is given up; a pod is killed after 30
STUCK_SECONDS = 3.0  # RAISE: time for the main thread to reach its handler
CLOSING_SECONDS = 20.0  # RAISE: time for it to close what is open

_SHORTEST = 0.001  # seconds; a timeout of 0 means non-blocking

AT_ONCE = "interrupted: left at once; the same command goes on from what was saved last"


class Interrupted(KeyboardInterrupt):
    """Raised by the first signal; `line` is what the command prints as it leaves."""

    def __init__(self, number: int, line: str):
        super().__init__(line)
        self.number, self.line = number, line


class _SignalState:
    """The state of this process: written by the handler (main thread) and by the watching thread."""

    number = 0  # of the first signal; 0: none yet
    at = 0.0  # when it came, monotonic seconds
    mode = RAISE
    raised = False
    line = "interrupted"
    before_exit: tuple[Callable[[], None], ...] = ()
    announced = threading.Event()  # the watching thread has handled the first signal


_process = _SignalState()


def expect(line: str) -> None:
    """Sets the line that the command prints if a signal makes it leave."""
    _process.line = line


def requested() -> bool:
    """Whether a signal has arrived."""
    return _process.number != 0


def number() -> int:
    """The number of the first signal; 0: none has arrived."""
    return _process.number


def overdue() -> bool:
    """Whether a signal arrived so long ago that work in progress is to be given up."""
    return requested() and time.monotonic() - _process.at > PATIENCE_SECONDS


def raise_if_interrupted() -> None:
    """Raises Interrupted if a signal has arrived: for places where the state is whole."""
    if requested():
        if _process.mode == HOLD:
            _process.announced.wait(REPEAT_SECONDS)  # its line comes first, however soon all is saved
        _process.raised = True
        raise Interrupted(_process.number, _process.line)


def be(mode: str) -> None:
    """Sets the effect of a signal from now on; raises Interrupted if one has arrived already."""
    raise_if_interrupted()
    _process.mode = mode


def request() -> None:
    """Sends this process SIGTERM: another host was asked to stop, or maintenance was announced."""
    os.kill(os.getpid(), signal.SIGTERM)


def request_with_parent() -> None:
    """From now on the end of standard input, whose other end the parent holds, acts as SIGTERM: this process leaves
    too, however the parent ends."""

    def follow() -> None:
        with contextlib.suppress(OSError):  # standard input is closed
            while os.read(0, 64):
                pass
        request()

    threading.Thread(target=follow, name="parent", daemon=True).start()


def before_exit(close: Callable[[], None]) -> None:
    """In the mode EXIT, `close` is called before the end, on a separate thread, after the functions registered
    before."""
    _process.before_exit = (*_process.before_exit, close)


def close_before_exit() -> None:
    """For code that ends the process in another way: calls every function of before_exit, whatever they raise."""
    with contextlib.ExitStack() as stack:
        for close in reversed(_process.before_exit):
            stack.callback(close)


def wait_if_exiting() -> None:
    """Blocks if the watching thread is ending the process, which may look like an error elsewhere; else returns."""
    if requested() and _process.mode == EXIT:
        threading.Event().wait()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Handles SIGINT and SIGTERM where no other handler is set; does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [n for n in SIGNALS if signal.getsignal(n) in (signal.SIG_DFL, signal.default_int_handler)]
    _process.__dict__.clear()  # back to the class's values
    _process.announced = threading.Event()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = {number: signal.signal(number, _on_signal) for number in ours}
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()  # the watcher's end of file
        watcher.join()
        reader.close()


def _on_signal(number: int, frame: types.FrameType | None) -> None:
    """The handler; runs in the main thread, between two of its instructions."""
    _note(number)
    if _process.mode == RAISE and not _process.raised and not _swallows(frame):
        raise_if_interrupted()


def _swallows(frame: types.FrameType | None) -> bool:
    """Whether an exception raised here would be printed and dropped, because the garbage collector called this code."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None and frame.f_code not in callbacks:
        frame = frame.f_back
    return frame is not None


def _note(number: int) -> bool:
    """Notes a signal; returns whether it is the first one."""
    if requested():
        return False
    _process.at = time.monotonic()
    _process.number = number
    return True


def _watch(reader: socket.socket) -> None:
    """Reads one byte for each signal, as the system's own handler wrote it; returns when the writer is closed."""
    announced = _process.announced
    while True:
        reader.settimeout(_seconds_left() if announced.is_set() else None)
        try:
            data = reader.recv(64)
        except TimeoutError:
            if (left := _seconds_left()) is None or left > _SHORTEST:
                continue  # it has reached its handler meanwhile
            _leave(_process.line)
        if not data:
            return
        for number in [n for n in data if n in SIGNALS]:
            _note(number)
            if announced.is_set() and time.monotonic() - _process.at > REPEAT_SECONDS:
                _leave(AT_ONCE)
            if not announced.is_set() and _process.mode == EXIT:
                threading.Thread(target=_close_and_leave, name="signals-closing", daemon=True).start()
            if not announced.is_set() and _process.mode == HOLD:
                _write("interrupted: what is done is saved; a second signal leaves at once")
            announced.set()


def _seconds_left() -> float | None:
    """Seconds until this thread ends the process by itself; None: training has no limit."""
    if _process.mode != RAISE:
        return None
    bound = CLOSING_SECONDS if _process.raised else STUCK_SECONDS
    return max(_SHORTEST, _process.at + bound - time.monotonic())


def _close_and_leave() -> None:
    """Runs beside the watching thread, which continues to listen for the second signal."""
    try:
        close_before_exit()
    finally:
        _leave(_process.line)


def _leave(line: str) -> None:
    if sys.stderr.isatty():
        _write("\x1b[?25h")  # a progress bar has hidden the cursor
    _write(line)
    os._exit(128 + _process.number)


def _write(line: str) -> None:
    """Bypasses Python's own stream, whose lock the main thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
