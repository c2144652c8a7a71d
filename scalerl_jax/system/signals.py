"""Ctrl-C and SIGTERM: the first asks a command to leave, the second makes it leave at once.

What the first signal does is up to the mode, which begins as RAISE and may be changed at any time by be():

    RAISE   the main thread raises Interrupted where it stands: short commands, which tidy up as they unwind
    EXIT    the process ends from another thread, after what is registered with before_exit(): start-up, when
            nothing is there to be saved, and the main thread may be inside a compilation for minutes
    HOLD    it is only noted, and raise_if_interrupted() raises Interrupted, where the command's state is whole:
            training

The second signal ends the process in every mode. Local servers and verifier workers end with their parent. The exit
code is 128 + signal. Signals within REPEAT_SECONDS of the first are one with it: a terminal and a process manager may
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
PATIENCE_SECONDS = 10.0  # what is under way may take that long before it is given up; a pod is killed after 30
STUCK_SECONDS = 3.0  # RAISE: that the main thread may take to come to its handler
CLOSING_SECONDS = 20.0  # RAISE: and to close what is open

_SHORTEST = 0.001  # seconds; a timeout of 0 is something else

AT_ONCE = "interrupted: left at once; the same command goes on from what was saved last"


class Interrupted(KeyboardInterrupt):
    """Raised by the first signal; `line` is what the command says as it leaves."""

    def __init__(self, number: int, line: str):
        super().__init__(line)
        self.number, self.line = number, line


class _Process:
    """Of this process: written by the handler (main thread) and by the watching thread."""

    number = 0  # of the first signal; 0: none yet
    at = 0.0  # when it came, monotonic seconds
    mode = RAISE
    raised = False
    line = "interrupted"
    before_exit: tuple[Callable[[], None], ...] = ()
    announced = threading.Event()  # the watching thread has said what the first signal does


_process = _Process()


def expect(line: str) -> None:
    """What the command says from now on, where a signal makes it leave."""
    _process.line = line


def requested() -> bool:
    """Whether a signal has come."""
    return _process.number != 0


def number() -> int:
    """Of the first signal; 0: none has come."""
    return _process.number


def overdue() -> bool:
    """Whether one came so long ago that what is still under way is to be given up."""
    return requested() and time.monotonic() - _process.at > PATIENCE_SECONDS


def raise_if_interrupted() -> None:
    """Raises Interrupted where a signal has come: for places where everything is whole."""
    if requested():
        if _process.mode == HOLD:
            _process.announced.wait(REPEAT_SECONDS)  # its line comes first, however soon all is saved
        _process.raised = True
        raise Interrupted(_process.number, _process.line)


def be(mode: str) -> None:
    """What a signal does from now on; raises Interrupted where one has come already."""
    raise_if_interrupted()
    _process.mode = mode


def request() -> None:
    """As if SIGTERM had come from outside: another host was told to stop, or maintenance was announced."""
    os.kill(os.getpid(), signal.SIGTERM)


def request_with_parent() -> None:
    """From now on the end of standard input, whose other end the parent holds, is as good as SIGTERM: this process
    leaves too, however the parent ends."""

    def follow() -> None:
        with contextlib.suppress(OSError):  # none is open
            while os.read(0, 64):
                pass
        request()

    threading.Thread(target=follow, name="parent", daemon=True).start()


def before_exit(close: Callable[[], None]) -> None:
    """In the mode EXIT, `close` is called first, on a thread of its own; after those that were given before it."""
    _process.before_exit = (*_process.before_exit, close)


def close_before_exit() -> None:
    """For who ends the process in another way: calls what was given to before_exit, all of it whatever it raises."""
    with contextlib.ExitStack() as stack:
        for close in reversed(_process.before_exit):
            stack.callback(close)


def wait_if_exiting() -> None:
    """Returns unless the watching thread is ending the process, which may look like an error from elsewhere."""
    if requested() and _process.mode == EXIT:
        threading.Event().wait()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Handles SIGINT and SIGTERM where no other handler does yet; outside of the main thread it does nothing."""
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
    """In the main thread, between two of its instructions."""
    _note(number)
    if _process.mode == RAISE and not _process.raised and not _swallows(frame):
        raise_if_interrupted()


def _swallows(frame: types.FrameType | None) -> bool:
    """Whether what is raised here would be printed and dropped: by the garbage collector, which called us back."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None and frame.f_code not in callbacks:
        frame = frame.f_back
    return frame is not None


def _note(number: int) -> bool:
    """Whether it is the first one."""
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
                continue  # it has come to its handler meanwhile
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
    """Until this thread ends the process by itself; None: training takes what it takes."""
    if _process.mode != RAISE:
        return None
    bound = CLOSING_SECONDS if _process.raised else STUCK_SECONDS
    return max(_SHORTEST, _process.at + bound - time.monotonic())


def _close_and_leave() -> None:
    """Beside the watching thread, which goes on listening for the second signal."""
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
    """Past Python's own stream, whose lock the main thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
