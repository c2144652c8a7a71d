"""TensorBoard event files, written with tensorboard's own protos and record format; no torch, no tensorflow.

A run that resumes from step s writes a new file whose session starts at s + 1: TensorBoard then drops the values of
older files from there on, so no curve overlaps itself.
"""

import glob
import io
import os
import socket
import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from scalerl_jax.system import files


class EventFile:
    """One event file of one trainer process. When `add` returns, its row is in the file, whole or not at all."""

    def __init__(self, folder: str, *, first_step: int):
        with files.naming(folder):
            os.makedirs(folder, exist_ok=True)
        # Readers sort the files by name; names begin with the second in which the file was made.
        older = [name.split(".")[3] for name in glob.glob("events.out.tfevents.*", root_dir=folder)]
        second = max([int(time.time()), *(int(made) + 1 for made in older if made.isdigit())])
        name = f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}"
        self._path = os.path.join(folder, name)
        with files.naming(self._path):
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        self._write(Event(file_version="brain.Event:2"))
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        files.append(self._descriptor, record.getvalue(), self._path)
