"""Reads scalars from TensorBoard event files, without tensorboard.

An event file is a sequence of records

    length uint64 | masked crc32c of the length, uint32 | data | masked crc32c of the data, uint32      little-endian

whose data is the protocol buffer tensorflow.Event; only its fields in _MESSAGES matter here. A session that starts
at step s replaces everything written earlier for steps from s on. An incomplete record at the end of a file is still
being written. Left out: images, histograms, text, compressed files, the checksum of the data.
"""

import functools
import glob
import os
import struct
from collections.abc import Iterator
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

_START = 1  # of SessionLog.Status
_SERIES = {1: "float_val", 2: "double_val"}  # tensorflow.DataType -> the field with a tensor's numbers
_CODES = {1: "<f", 2: "<d"}  # their format in tensor_content
_MESSAGES = {  # field -> number, type; * if repeated
    "TensorProto": {
        "dtype": "1 int64",
        "tensor_content": "4 bytes",
        "float_val": "5 float*",
        "double_val": "6 double*",
    },
    "Value": {"tag": "1 string", "simple_value": "2 float", "tensor": "8 TensorProto"},
    "Summary": {"value": "1 Value*"},
    "SessionLog": {"status": "1 int64"},
    "Event": {"step": "2 int64", "summary": "5 Summary", "session_log": "7 SessionLog"},
}


class InputError(ValueError):
    """A mistake in a file or in the request: one line, naming the file and the row or the column."""


@functools.lru_cache(4096)  # most records have one of a few lengths
def _masked_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _event_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="events.proto", package="events", syntax="proto2")
    for name, fields in _MESSAGES.items():
        entry = file.message_type.add(name=name)
        for field, spec in fields.items():
            number, kind = spec.rstrip("*").split()
            one = entry.field.add(name=field, number=int(number), label=3 if spec.endswith("*") else 1)
            if kind in _MESSAGES:
                one.type_name = kind
            else:
                one.type = descriptor_pb2.FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("events.Event"))


_Event = _event_class()


def is_event_file(path: str) -> bool:
    return ".tfevents." in os.path.basename(path)


def event_files(folder: str) -> list[str]:
    """The event files of a folder, in the order of their start, which their names contain."""
    return sorted(path for path in glob.glob(os.path.join(glob.escape(folder), "*")) if is_event_file(path))


def read_scalars(paths: list[str]) -> dict[str, dict[int, float]]:
    """tag -> step -> value; the last one written is valid."""
    scalars: dict[str, dict[int, float]] = {}
    for path in paths:
        for record in _records(path):
            try:
                event = _Event.FromString(record)
            except message.DecodeError:
                raise InputError(f"{path}: is not a TensorBoard event file, or is damaged") from None
            if event.session_log.status == _START:
                for series in scalars.values():
                    for old in [step for step in series if step >= event.step]:
                        del series[old]
            for value in event.summary.value:
                number = value.simple_value if value.HasField("simple_value") else _scalar(value.tensor)
                if number is not None:
                    scalars.setdefault(value.tag, {})[event.step] = number
    return {tag: series for tag, series in scalars.items() if series}


def _records(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while len(head := file.read(12)) == 12:
            length, crc = struct.unpack("<QI", head)
            if _masked_crc32c(head[:8]) != crc:
                raise InputError(f"{path}: is not a TensorBoard event file, or is damaged")
            data = file.read(length)
            if len(data) < length or len(file.read(4)) < 4:
                return
            yield data


def _scalar(tensor: Any) -> float | None:
    """The value of a tensor of one float32 or float64; None for anything else."""
    if tensor.dtype not in _CODES:
        return None
    code, numbers = _CODES[tensor.dtype], getattr(tensor, _SERIES[tensor.dtype])
    if tensor.tensor_content:
        whole = len(tensor.tensor_content) == struct.calcsize(code)
        return struct.unpack(code, tensor.tensor_content)[0] if whole else None
    return numbers[0] if len(numbers) == 1 else None
