"""An asyncio loop on a separate thread, and blocking calls into it from any other thread."""

import asyncio
import concurrent.futures
import functools
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

_log = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")

_running: set["asyncio.Task"] = set()  # a loop itself does not keep its tasks alive

CALL_SECONDS = 60.0  # the loop answers a call within this, or something is badly wrong


def on_loop(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Runs the method on `self._thread`, a LoopThread, from any thread, and waits for it; see LoopThread.call."""

    @functools.wraps(method)
    def called(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.call(method, self, *args, **kwargs)

    return called


def log_fault(error: BaseException) -> None:
    """The default `fail`: logs the error."""
    _log.error("a fault of ours", exc_info=error)


def watched(coroutine: Coroutine[Any, Any, T], fail: Callable[[BaseException], None]) -> "asyncio.Task[T]":
    """A task of the running loop; `fail` is called with what it raises, unless it is cancelled."""

    def ended(task: "asyncio.Task[T]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            fail(error)

    task = asyncio.create_task(coroutine)
    _running.add(task)
    task.add_done_callback(ended)
    task.add_done_callback(_running.discard)
    return task


class LoopThread:
    """Runs `main`'s coroutines until close(). A failure reported once is raised by every later call."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._closing = threading.Lock()  # nothing is posted to a closed loop
        self._failure: BaseException | None = None
        self._name, self._thread = name, threading.Thread(target=self._run, name=name, daemon=True)
        self._begin: Callable[[], list[Coroutine[Any, Any, None]]] = list

    def start(self, begin: Callable[[], list[Coroutine[Any, Any, None]]]) -> None:
        """Calls `begin` on the thread, and runs the coroutines it returns until they are cancelled by close()."""
        self._begin = begin
        self._thread.start()

    def close(self) -> None:
        """Cancels everything on the loop and ends the thread. Calling it twice does nothing."""
        with self._closing:
            if self._loop.is_closed():
                return
            if not self._thread.is_alive():
                self._loop.close()
                return
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CALL_SECONDS)

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs `function` on the loop's thread. Raises what it raises, or the failure reported earlier."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                if self._failure is not None:
                    raise self._failure
                future.set_result(function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  carried over to the caller's thread
                future.set_exception(error)

        if not self.post(run):
            raise self._failure or RuntimeError(f"the {self._name} is closed")
        for _ in range(int(CALL_SECONDS)):  # not by the clock: the process may be stopped for longer, and resume
            if concurrent.futures.wait([future], timeout=1.0).done:
                return future.result()
            if not self._thread.is_alive() and not future.done():
                raise self._failure or RuntimeError(f"the {self._name} is closed")
        raise RuntimeError(f"the {self._name} does not answer for {CALL_SECONDS:.0f} s")

    def post(self, function: Callable[..., None], *args: Any) -> bool:
        """Lets the loop's thread run `function` soon. False: it is closed."""
        with self._closing:
            if self._loop.is_closed() or self._stop.is_set():
                return False
            self._loop.call_soon_threadsafe(self.guarded(function), *args)
            return True

    def guarded(self, function: Callable[..., None]) -> Callable[..., None]:
        """`function`, reporting what it raises: the loop by itself would only log it and continue."""

        def run(*args: Any) -> None:
            try:
                function(*args)
            except Exception as error:  # noqa: BLE001  raised by the next call
                self.fail(error)

        return run

    def fail(self, error: BaseException) -> None:
        """Reports a failure; the first one counts."""
        self._failure = self._failure or error

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as error:  # noqa: BLE001  raised by the next call: nothing watches this thread
            self.fail(error)
        finally:
            with self._closing:
                self._loop.close()

    async def _main(self) -> None:
        for coroutine in self._begin():
            watched(coroutine, self.fail)
        await self._stop.wait()
        # Repeatedly: a task may start others while it is cancelled, and a library may lose a cancellation.
        while rest := [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]:
            for task in rest:
                task.cancel()
            await asyncio.wait(rest, timeout=1.0)
