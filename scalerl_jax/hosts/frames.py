"""What the hosts of a trainer tell each other: a kind, fields that JSON can hold, and named arrays.

A frame is the bytes of a safetensors file, with kind and fields in a tensor of their own: never pickle.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors.numpy import load, save

_HEAD = "frame"


@dataclasses.dataclass(frozen=True)
class Frame:
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
