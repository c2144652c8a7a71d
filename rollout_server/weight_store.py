"""Where a version of the weights is put together, chunk by chunk, before the engine gets to see it.

    WeightStore   one per server: what a version must hold, and one host buffer of exactly that size
    Staging       one version on its way in: chunks in any order, each checked, until none is missing

Nothing here knows gRPC or an event loop. The buffer is used again for every version, so a version is staged only after
the engine is done with the one before it (service.py sees to that), and tensors are views into it, never copies.
"""

import math
import time
import zlib
from collections.abc import Callable, Iterable

import numpy as np

from rollout_server.contract import codec
from rollout_server.contract import rollout_pb2 as pb
from rollout_server.contract.limits import MAXIMUM_CHUNK_BYTES
from rollout_server.engines.engine import EngineInfo

ITEM_BYTES = {"bfloat16": 2, "float32": 4}

# Bookkeeping is per chunk, so their number is bounded too: 1 TiB in chunks of 1 MiB.
MAXIMUM_CHUNKS = 2**20

# A chunk that is wrong this often is not bad luck: the link or the sender is broken.
MAXIMUM_ATTEMPTS = 8


def numpy_dtype(name: str) -> np.dtype:
    """The dtype in which an engine is handed tensors of a wire dtype.

    bfloat16 is ml_dtypes' (which comes with jax); where that is not installed it is the raw bits, uint16.
    """
    if name == "float32":
        return np.dtype("<f4")
    assert name == "bfloat16", name
    try:
        import ml_dtypes  # lazily: not every engine has it
    except ImportError:
        return np.dtype("<u2")
    return np.dtype(ml_dtypes.bfloat16)


class WeightStore:
    """Checks headers against what the engine's model holds, and owns the host buffer."""

    def __init__(self, info: EngineInfo, weight_buffer: Callable[[int], np.ndarray]):
        self._shapes = {name: tuple(shape) for name, shape in info.tensors.items()}
        self._wire_dtype = info.wire_dtype
        self._payload_bytes = sum(self._bytes(shape) for shape in self._shapes.values())
        self._weight_buffer = weight_buffer
        self._buffer: np.ndarray | None = None  # [payload] uint8, from the first version on
        self.chunks_refused = 0  # wrong checksum, since the start of the process

    def _bytes(self, shape: Iterable[int]) -> int:
        return math.prod(shape) * ITEM_BYTES[self._wire_dtype]

    def check(self, header: pb.WeightHeader, held: codec.Version) -> None:
        """Raises ValueError unless a payload that follows this header can become the weights."""
        target = codec.version_from_proto(header.target)
        if target.incarnation == 0:
            raise ValueError("incarnation 0 is no trainer")
        if target < held:
            raise ValueError(f"{_name(target)} is older than the version held, {_name(held)}")
        self._check_tensors(header)
        if header.payload_bytes != self._payload_bytes:
            raise ValueError(f"payload_bytes is {header.payload_bytes}, the tensors take {self._payload_bytes}")
        if not 0 < header.chunk_bytes <= MAXIMUM_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes is {header.chunk_bytes}, not within 1 and {MAXIMUM_CHUNK_BYTES}")
        chunks = -(-header.payload_bytes // header.chunk_bytes)
        if chunks > MAXIMUM_CHUNKS:
            raise ValueError(f"chunk_bytes {header.chunk_bytes} makes {chunks} chunks, more than {MAXIMUM_CHUNKS}")

    def _check_tensors(self, header: pb.WeightHeader) -> None:
        names = [tensor.name for tensor in header.tensors]
        given = set(names)
        if len(given) != len(names):
            twice = sorted(name for name in given if names.count(name) > 1)
            raise ValueError(f"tensors named twice: {_some(twice)}")
        if missing := self._shapes.keys() - given:
            raise ValueError(f"tensors of the model that are missing: {_some(sorted(missing))}")
        if unknown := given - self._shapes.keys():
            raise ValueError(f"tensors that the model does not have: {_some(sorted(unknown))}")
        for tensor in header.tensors:
            if tensor.dtype != self._wire_dtype:
                raise ValueError(f"tensor {tensor.name} is {tensor.dtype!r}, the wire dtype is {self._wire_dtype!r}")
            if tuple(tensor.shape) != self._shapes[tensor.name]:
                wanted = list(self._shapes[tensor.name])
                raise ValueError(f"tensor {tensor.name} has shape {list(tensor.shape)}, the model's is {wanted}")

    def stage(self, header: pb.WeightHeader) -> "Staging":
        """Starts a version whose header has passed `check`. Whatever was staged before is overwritten."""
        if self._buffer is None:
            self._buffer = self._weight_buffer(self._payload_bytes)
        layout, offset = {}, 0
        for tensor in header.tensors:
            layout[tensor.name] = (offset, self._shapes[tensor.name])
            offset += self._bytes(self._shapes[tensor.name])
        return Staging(
            store=self,
            target=codec.version_from_proto(header.target),
            buffer=self._buffer,
            chunk_bytes=header.chunk_bytes,
            layout=layout,
            dtype=numpy_dtype(self._wire_dtype),
        )


class Staging:
    """One version on its way in."""

    def __init__(
        self,
        *,
        store: WeightStore,
        target: codec.Version,
        buffer: np.ndarray,  # [payload] uint8
        chunk_bytes: int,
        layout: dict[str, tuple[int, tuple[int, ...]]],  # name -> offset in bytes, shape
        dtype: np.dtype,
    ):
        self.target = target
        self._store = store
        self._buffer = buffer.data  # slices of a memoryview take bytes without a detour
        self._chunk_bytes = chunk_bytes
        self._layout = layout
        self._dtype = dtype
        self._began = time.monotonic()
        self._good = np.zeros(-(-len(buffer) // chunk_bytes), bool)  # [chunks]
        self._waiting = len(self._good)  # chunks that are not good yet
        self._attempts: dict[int, int] = {}  # chunk -> how often it was wrong
        self._asked: set[int] = set()  # asked for again and not seen since
        self.seconds = 0.0  # header to last good chunk

    @property
    def complete(self) -> bool:
        return self._waiting == 0

    @property
    def waiting(self) -> int:
        """Chunks that are not there yet."""
        return self._waiting

    def put(self, chunk: pb.WeightChunk) -> bool:
        """Takes one chunk. False: its checksum is wrong, it must be sent again.

        Raises ValueError where sending it again would not help.
        """
        index, data = chunk.index, chunk.data
        if index >= len(self._good):
            raise ValueError(f"chunk {index} of {len(self._good)}")
        self._asked.discard(index)
        if zlib.crc32(data) != chunk.crc32:
            self._store.chunks_refused += 1
            if self._good[index]:
                return True  # a good copy is here already
            self._attempts[index] = self._attempts.get(index, 0) + 1
            if self._attempts[index] >= MAXIMUM_ATTEMPTS:
                raise ValueError(f"the checksum of chunk {index} was wrong {MAXIMUM_ATTEMPTS} times")
            self._asked.add(index)
            return False
        start = index * self._chunk_bytes
        size = min(self._chunk_bytes, len(self._buffer) - start)
        if len(data) != size:
            raise ValueError(f"chunk {index} has {len(data)} bytes, not {size}")
        if not self._good[index]:
            self._buffer[start : start + size] = data
            self._good[index] = True
            self._waiting -= 1
            if self.complete:
                self.seconds = time.monotonic() - self._began
        return True

    def ask(self) -> list[int]:
        """The chunks that never came and were not asked for yet; from now on they are."""
        missing = [int(index) for index in np.flatnonzero(~self._good) if int(index) not in self._asked]
        self._asked.update(missing)
        return missing

    def tensors(self) -> dict[str, np.ndarray]:
        """Read-only views into the buffer, by name. They hold until the next version is staged."""
        assert self.complete
        views = {}
        for name, (offset, shape) in self._layout.items():
            views[name] = np.ndarray(shape, self._dtype, self._buffer, offset)
            views[name].flags.writeable = False
        return views


def _name(version: codec.Version) -> str:
    return f"step {version.step} of incarnation {version.incarnation}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
