"""Cells as values of JSON: what a file or a table may hold beside texts and numbers."""

import base64
import datetime
import decimal
import math
from collections.abc import Mapping
from typing import Any


def json_value(value: Any) -> Any:
    """Dates as ISO texts, NaN and infinities as None, decimals as numbers, bytes as text (base64 where they are none).

    What is of no such kind is its own text.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(inner) for inner in value]
    if isinstance(value, decimal.Decimal):
        whole = value.is_finite() and value == value.to_integral_value()
        return int(value) if whole else json_value(float(value))
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes | bytearray | memoryview):
        held = bytes(value)
        try:
            return held.decode("utf-8")
        except UnicodeDecodeError:
            return base64.b64encode(held).decode("ascii")
    if hasattr(value, "tolist"):  # numpy, scalars and arrays
        return json_value(value.tolist())
    return str(value)


def json_row(columns: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): json_value(value) for key, value in columns.items()}
