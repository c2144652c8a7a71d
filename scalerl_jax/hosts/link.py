"""The line, a connection between the first host of a trainer and each of the others: commands and their results.

    other -> first   hello {index, ...}     beat*   reply {to, ...}*   stopping {why}   failed {line, code}
    first -> other   welcome {...}          beat*   commands*          end {line, code}

One gRPC stream for each of the others, of frames. Each end sends a beat every BEAT_SECONDS; one that hears
nothing for SILENCE_SECONDS, or whose stream breaks before `end` or `failed`, has lost the other. A host that is lost
ends all: the main thread may hang in a computation with it for ever, so the process exits from the line's own thread,
with the reason, after the functions registered with signals.before_exit(). Time in which this process itself was
stopped does not count. If it is the first host that is gone, JAX may notice at the same moment, and abort the others
with its own message.

The hosts trust their network, as jax.distributed does: there is no TLS here.
"""

import concurrent.futures
import dataclasses
import itertools
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import grpc
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from scalerl_jax.contract.limits import KEEPALIVE_SECONDS, PROXY
from scalerl_jax.contract.peer_text import printable
from scalerl_jax.system import signals

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 20.0
DIAL_SECONDS = 5.0  # one attempt to reach the first host
JOIN_SECONDS = 600.0  # until all are there: pods of one trainer may start minutes apart
HELLO_SECONDS = 10.0  # from the start of a stream until its hello; an unknown client's holds a thread meanwhile
FAREWELL_SECONDS = 3.0  # for what is still to be sent when the process is left
LOST = 75  # exit code: the same command resumes from the checkpoint (EX_TEMPFAIL)

RESUMES = "the run ends; the same command on all hosts goes on from the checkpoint"

_METHOD = ("scalerl.Hosts", "Join")
_OPTIONS = (
    PROXY,
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 500),
    ("grpc.initial_reconnect_backoff_ms", 250),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
_HEAD = "frame"


@dataclasses.dataclass(frozen=True)
class Frame:
    """A message between the hosts: a kind, fields that JSON can hold, and named arrays.

    Its bytes are those of a safetensors file, with kind and fields in a separate tensor: never pickle.
    """

    kind: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def to_bytes(self) -> bytes:
        head = json.dumps([self.kind, dict(self.fields)]).encode()
        return save(
            {_HEAD: np.frombuffer(head, np.uint8), **{k: np.ascontiguousarray(v) for k, v in self.arrays.items()}}
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Frame":
        arrays = load(data)
        kind, fields = json.loads(arrays.pop(_HEAD).tobytes())
        return cls(kind, fields, arrays)


_BEAT = Frame("beat")


class JoinError(ValueError):
    """The hosts cannot join: they were started wrongly. One line."""


def leave(line: str, code: int) -> None:
    """Ends the process from any thread: what is open is closed first, in bounded time."""
    sys.stderr.flush()
    os.write(2, f"{line}\n".encode())
    closing = threading.Thread(target=signals.close_before_exit, daemon=True)
    closing.start()
    closing.join(signals.PATIENCE_SECONDS)
    os._exit(code)


class _Line:
    """One end of one stream, with a queue of outgoing frames.

    The queue holds a batch at most: all hosts make a step together, and the first host sends no more before.
    """

    def __init__(self, name: str):
        self.name = name
        self.out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.heard_at = time.monotonic()
        self.over = False  # it ended normally, or its loss has been reported

    def send(self, frame: Frame) -> None:
        self.out.put(frame.to_bytes())

    def outgoing(self) -> Iterator[bytes]:
        """The frames to send, until close(); a beat if there is nothing else."""
        while True:
            try:
                data = self.out.get(timeout=BEAT_SECONDS)
            except queue.Empty:
                data = _BEAT.to_bytes()
            if data is None:
                return
            yield data

    def close(self) -> None:
        self.out.put(None)


class _Watch:
    """Calls `check(now)` twice a beat, on a thread. Time in which this process was stopped is no silence of a line."""

    def __init__(self, check: Callable[[float], None], lines: Callable[[], Iterable[_Line]]):
        self._check, self._lines = check, lines
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hosts-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(BEAT_SECONDS / 2):
            now = time.monotonic()
            if (late := now - last - BEAT_SECONDS) > BEAT_SECONDS:
                for line in self._lines():
                    line.heard_at += late
            last = now
            self._check(now)

    def stop(self) -> None:
        self._stop.set()


class FirstHost:
    """The first host's end of all lines. Its methods may be called on any thread."""

    def __init__(
        self, address: str, count: int, *, greeting: Mapping[str, Any], welcome: Callable[[], Mapping[str, Any]]
    ):
        """Listens at the port of `address`. greeting: values that the others must send, by name; a host with another
        value is refused, with the reason. welcome: returns the fields that they get when all have joined.

        Raises JoinError if the port is taken.
        """
        self._count, self._greeting, self._welcome = count, dict(greeting), welcome
        self._lines: dict[int, _Line] = {}
        self._replies: dict[tuple[int, int], concurrent.futures.Future[Frame]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._refused: str | None = None
        self._ending = False
        self._server = grpc.server(
            concurrent.futures.ThreadPoolExecutor(count + 8, thread_name_prefix="hosts"), options=_OPTIONS
        )
        service, method = _METHOD
        handlers = {method: grpc.stream_stream_rpc_method_handler(self._join)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        port = address.rpartition(":")[2]
        try:
            self._server.add_insecure_port(f"0.0.0.0:{port}")
        except RuntimeError:
            raise JoinError(f"port {port} of this host, at which the others are to find it, is taken") from None
        self._server.start()
        self._watch = _Watch(self._check, lambda: list(self._lines.values()))

    @property
    def others(self) -> range:
        return range(1, self._count)

    def wait_for_all(self, report: Callable[[str], None], *, seconds: float = JOIN_SECONDS) -> Mapping[str, Any]:
        """Waits for the hello of each of the others; returns the fields that they get. Raises JoinError."""
        until, reported_at = time.monotonic() + seconds, time.monotonic()
        with self._changed:
            while len(self._lines) < self._count - 1:
                if self._refused is not None:
                    raise JoinError(self._refused)
                missing = [str(index) for index in self.others if index not in self._lines]
                if time.monotonic() > until:
                    raise JoinError(f"host {', '.join(missing)} of {self._count} did not come within {seconds:.0f} s")
                if time.monotonic() - reported_at > 30:
                    reported_at = time.monotonic()
                    report(f"waiting for host {', '.join(missing)} of {self._count}")
                self._changed.wait(0.5)
            welcome = self._welcome()
            for line in self._lines.values():
                line.send(Frame("welcome", welcome))
            return welcome

    def send(self, frame: Frame, *, to: int | None = None) -> None:
        """Sends a frame to one of the others, or to all; in order."""
        for index in self.others if to is None else (to,):
            self._lines[index].send(frame)

    def ask(self, frame: Frame, *, to: int) -> "concurrent.futures.Future[Frame]":
        """Sends a frame; the future gets the reply, and may be cancelled."""
        future: concurrent.futures.Future[Frame] = concurrent.futures.Future()
        with self._lock:
            number = next(self._numbers)
            self._replies[to, number] = future
        self.send(dataclasses.replace(frame, fields={**frame.fields, "number": number}), to=to)
        return future

    def end(self, line: str, code: int) -> None:
        """Sends the others the end and its reason; waits a little until they have received it."""
        with self._lock:
            if self._ending:
                return
            self._ending = True
        lines = list(self._lines.values())
        for one in lines:
            one.send(Frame("end", {"line": line, "code": code}))
            one.close()
        until = time.monotonic() + FAREWELL_SECONDS
        while any(not one.over for one in lines) and time.monotonic() < until:
            time.sleep(0.02)
        self._watch.stop()
        self._server.stop(0)

    # ------------------------------------------------------------------------------------------- on its own threads

    def _join(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        too_late = threading.Timer(HELLO_SECONDS, context.cancel)
        too_late.daemon = True
        too_late.start()
        try:
            hello = Frame.from_bytes(next(requests))
            index, name, greeting = int(hello.fields["index"]), str(hello.fields["name"]), {**hello.fields["greeting"]}
        except (StopIteration, grpc.RpcError, SafetensorError, KeyError, TypeError, ValueError):
            return  # no host of any trainer
        finally:
            too_late.cancel()
        line, why = _Line(f"host {index} ({printable(name)})"), ""
        with self._changed:
            for what, ours in self._greeting.items():
                if (theirs := greeting.get(what)) != ours and not why:
                    why = f"{line.name} has {what} {printable(str(theirs))}, the first host {ours}"
            if not why and (index in self._lines or index not in self.others):
                why = f"{line.name}: there is a host {index} already, or there are only {self._count}"
            if why and greeting.get("key") == self._greeting["key"]:
                self._refused = why
            if not why:
                self._lines[index] = line
            self._changed.notify_all()
        if why:
            yield Frame("end", {"line": why, "code": 2}).to_bytes()
            return
        threading.Thread(target=self._listen, args=(index, line, requests), name=f"host-{index}", daemon=True).start()
        yield from line.outgoing()

    def _listen(self, index: int, line: _Line, requests: Iterator[bytes]) -> None:
        try:
            for data in requests:
                line.heard_at = time.monotonic()
                self._heard(index, line, Frame.from_bytes(data))
            why = "ended"
        except grpc.RpcError:
            why = "is gone"
        except Exception as error:  # noqa: BLE001  the other threads go on; this one is all that hears the host
            why = f"says what cannot be understood ({type(error).__name__}: {printable(str(error))})"
        if not line.over and not self._ending:
            self._lost(line, why)
        line.over = True

    def _heard(self, index: int, line: _Line, frame: Frame) -> None:
        if frame.kind == "reply":
            with self._lock:
                future = self._replies.pop((index, int(frame.fields["number"])), None)
            if future is not None and future.set_running_or_notify_cancel():  # not cancelled by its caller
                future.set_result(frame)
        elif frame.kind == "stopping":
            if not signals.requested() and not self._ending:
                os.write(2, f"{line.name}: {printable(str(frame.fields['why']))}\n".encode())
                signals.request()
        elif frame.kind == "failed" and not self._ending:
            line.over = True
            self._end_all(f"{line.name}: {frame.fields['line']}", int(frame.fields["code"]))

    def _check(self, now: float) -> None:
        for line in list(self._lines.values()):
            if now - line.heard_at > SILENCE_SECONDS and not line.over and not self._ending:
                self._lost(line, f"has not been heard of for {now - line.heard_at:.0f} s")

    def _lost(self, line: _Line, why: str) -> None:
        line.over = True
        self._end_all(f"{line.name} {why}: {RESUMES}", LOST)

    def _end_all(self, why: str, code: int) -> None:
        with self._lock:
            already = self._ending
        if not already:
            self.end(why, code)
            leave(f"error: {why}", code)


class OtherHost:
    """Another host's end of its line."""

    def __init__(self, address: str, index: int, *, greeting: Mapping[str, Any], seconds: float = JOIN_SECONDS):
        """Dials the first host until it answers. Raises JoinError."""
        self._line = _Line("the first host")
        self._line.over = True  # not begun: no host is lost
        self._commands: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._handlers: dict[str, Callable[[Frame], None]] = {}
        hello = {"index": index, "name": socket.gethostname(), "greeting": dict(greeting)}
        until = time.monotonic() + seconds
        while True:
            self._channel = grpc.insecure_channel(address, options=_OPTIONS)
            try:
                grpc.channel_ready_future(self._channel).result(timeout=DIAL_SECONDS)
                break
            except grpc.FutureTimeoutError:
                self._channel.close()
                signals.raise_if_interrupted()
                if time.monotonic() > until:
                    raise JoinError(f"the first host, {address}, did not answer within {seconds:.0f} s") from None
        self._line.send(Frame("hello", hello))
        self._call = self._channel.stream_stream("/" + "/".join(_METHOD))(self._line.outgoing())
        self._line.heard_at, self._line.over = time.monotonic(), False
        threading.Thread(target=self._listen, name="first-host", daemon=True).start()
        self._stopping_sent = False
        self._watch = _Watch(self._check, lambda: [self._line])

    def welcome(self) -> Mapping[str, Any]:
        """Waits until all hosts have joined. Raises JoinError if this one is refused."""
        frame = self.next()
        if frame.kind == "end":
            raise JoinError(str(frame.fields["line"]))
        assert frame.kind == "welcome"
        return frame.fields

    def next(self) -> Frame:
        """The next command, or `end`. Losing the first host ends the process."""
        return self._commands.get()

    def on(self, kind: str, handle: Callable[[Frame], None]) -> None:
        """Commands of this kind do not wait for those before them: they are handled on the line's thread."""
        self._handlers[kind] = handle

    def reply(self, to: Frame, fields: Mapping[str, Any]) -> None:
        self._line.send(Frame("reply", {**fields, "number": to.fields["number"]}))

    def fail(self, line: str, code: int) -> None:
        """Ends all hosts: this one cannot continue. Waits a little until that has been received."""
        if not self._line.over:
            self._line.over = True
            self._line.send(Frame("failed", {"line": line, "code": code}))
        self.close()

    def leave(self, line: str) -> None:
        """Likewise from a thread other than the main one, which may be blocked: ends the process."""
        self.fail(line, 1)
        leave(f"error: {line}", 1)

    def close(self) -> None:
        self._closed.set()
        self._line.over = True
        self._line.close()
        until = time.monotonic() + FAREWELL_SECONDS
        while self._call.is_active() and time.monotonic() < until:
            time.sleep(0.02)
        self._watch.stop()
        self._channel.close()

    # ------------------------------------------------------------------------------------------- on its own threads

    def _listen(self) -> None:
        try:
            for data in self._call:
                self._line.heard_at = time.monotonic()
                frame = Frame.from_bytes(data)
                if frame.kind == "end":
                    self._line.over = True
                    self._commands.put(frame)
                    self._end(frame)
                    return
                if frame.kind in self._handlers:
                    self._handlers[frame.kind](frame)
                elif frame.kind != "beat":
                    self._commands.put(frame)
            why = "ended without a word"
        except grpc.RpcError:
            why = "is gone"
        except Exception as error:  # noqa: BLE001  this thread is all that hears the first host
            self.leave(
                f"what the first host says cannot be done here ({type(error).__name__}: {printable(str(error))})"
            )
        if not self._line.over:
            self._lost(why)

    def _end(self, frame: Frame) -> None:
        """The main thread gets the frame too, and exits; but it may hang in a computation with a host that is gone."""
        if frame.fields["code"] and not self._closed.wait(2 * FAREWELL_SECONDS):
            leave(f"error: the first host ended: {frame.fields['line']}", int(frame.fields["code"]))

    def _check(self, now: float) -> None:
        line = self._line
        if signals.requested() and not self._stopping_sent and not line.over:
            self._stopping_sent = True
            line.send(Frame("stopping", {"why": "is told to stop; all hosts save and leave"}))
        if now - line.heard_at > SILENCE_SECONDS and not line.over:
            self._lost(f"has not been heard of for {now - line.heard_at:.0f} s")

    def _lost(self, why: str) -> None:
        self._line.over = True
        leave(
            f"error: the first host {why}: {RESUMES}",
            LOST,
        )
