"""JSON files, and numbers and arrays as values of JSON."""

import json
import math
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """As JSON can hold it: arrays as lists, NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if hasattr(value, "tolist"):  # numpy and jax, scalars and arrays
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_object(path: str) -> dict[str, Any]:
    """The object that a file holds. Raises ValueError, one line, where it holds none, and OSError."""
    try:
        with open(path, "rb") as file:
            value = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is not an object")
    return value
