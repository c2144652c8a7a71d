"""TensorBoard event files, written with tensorboard's own protos and record format; no torch, no tensorflow.

A run that goes on from step s writes a new file whose session starts at s + 1: TensorBoard then drops what older files
hold from there on, so no curve overlaps itself.
"""

import glob
import os
import socket
import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class EventFile:
    """One event file of one trainer process. Each row reaches the file system before `add` returns."""

    def __init__(self, folder: str, *, first_step: int):
        os.makedirs(folder, exist_ok=True)
        # Readers take the files in the order of their names, which begin with the second they were made in.
        older = [name.split(".")[3] for name in glob.glob("events.out.tfevents.*", root_dir=folder)]
        second = max([int(time.time()), *(int(made) + 1 for made in older if made.isdigit())])
        name = f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter(open(os.path.join(folder, name), "xb"))  # noqa: SIM115 (closed by close)
        self._write(Event(file_version="brain.Event:2"))
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._writer.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())
        self._writer.flush()
