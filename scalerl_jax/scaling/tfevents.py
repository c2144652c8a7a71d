"""Scalars out of TensorBoard event files, without tensorboard.

An event file is a row of records

    length uint64 | masked crc32c of the length, uint32 | data | masked crc32c of the data, uint32      little-endian

whose data is the protocol buffer tensorflow.Event; of it only these fields matter here:

    Event        2 step int64, 5 summary, 7 session_log          Summary.Value   1 tag, 2 simple_value float, 8 tensor
    Summary      1 value (repeated)                              TensorProto     1 dtype, 4 tensor_content, 5 float_val,
    SessionLog   1 status (START = 1)                                            6 double_val

A session that starts at step s replaces what was written before from there on. A record cut short at the end of a file
is one still being written. Left out: images, histograms, text, compressed files, the checksum of the data.
"""

import glob
import os
import struct
from collections.abc import Iterator

_START = 1
_FLOAT, _DOUBLE = 1, 2  # of tensorflow.DataType


class EventFileError(ValueError):
    """Not an event file, or a damaged one; the message names it."""


def _crc32c_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc32c_table()


def _masked_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def is_event_file(path: str) -> bool:
    return ".tfevents." in os.path.basename(path)


def event_files(folder: str) -> list[str]:
    """In the order they were begun in, which their names tell."""
    return sorted(path for path in glob.glob(os.path.join(glob.escape(folder), "*")) if is_event_file(path))


def read_scalars(paths: list[str]) -> dict[str, dict[int, float]]:
    """For each tag, its value at each step; the last one written counts."""
    scalars: dict[str, dict[int, float]] = {}
    for path in paths:
        for record in _records(path):
            step, restarts, values = _event(record)
            if restarts:
                for series in scalars.values():
                    for old in [s for s in series if s >= step]:
                        del series[old]
            for tag, value in values:
                scalars.setdefault(tag, {})[step] = value
    return {tag: series for tag, series in scalars.items() if series}


def _records(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while len(head := file.read(12)) == 12:
            length, crc = struct.unpack("<QI", head)
            if _masked_crc32c(head[:8]) != crc:
                raise EventFileError(f"{path}: is not a TensorBoard event file, or is damaged")
            data = file.read(length)
            if len(data) < length or len(file.read(4)) < 4:
                return
            yield data


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field: an int for varints, the bytes for the rest."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}[kind]
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at


def _event(data: bytes) -> tuple[int, bool, list[tuple[str, float]]]:
    step, restarts, values = 0, False, []
    for number, field in _fields(data):
        if number == 2:
            step = field
        elif number == 7:
            restarts = (1, _START) in list(_fields(field))
        elif number == 5:
            for of_summary, value in _fields(field):
                if of_summary == 1 and (scalar := _value(value)) is not None:
                    values.append(scalar)
    return step, restarts, values


def _value(data: bytes) -> tuple[str, float] | None:
    tag, number = "", None
    for of_value, field in _fields(data):
        if of_value == 1:
            tag = field.decode()
        elif of_value == 2:
            number = struct.unpack("<f", field)[0]
        elif of_value == 8:
            number = _tensor(field)
    return None if number is None else (tag, float(number))


def _tensor(data: bytes) -> float | None:
    """A scalar tensor of float32 or float64; None for anything else."""
    kind, content, numbers = 0, b"", b""
    for of_tensor, field in _fields(data):
        if of_tensor == 1:
            kind = field
        elif of_tensor == 4:
            content = field
        elif of_tensor in (5, 6):
            numbers = field
    code = {_FLOAT: "<f", _DOUBLE: "<d"}.get(kind)
    raw = content or numbers
    if code is None or len(raw) != struct.calcsize(code):
        return None
    return struct.unpack(code, raw)[0]
