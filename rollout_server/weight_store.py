"""The host copy of the weights, and how a version gets into it before the engine sees any of it.

    dense   the chunks are the copy's bytes: from the first of them on it holds no version, until all are there
    delta   the chunks lie apart;  decoded in full -> written into the copy -> digests of the whole copy -> the engine
            a wrong digest: what was written is undone, and the copy counts as lost

`held` is the version that the copy holds, to the bit as the trainer has it; only a delta that starts from it is taken.
Tensors are views into the copy, never copies of it. Nothing here knows gRPC or an event loop; one version at a time.
"""

import collections
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from rollout_server.engines.engine import Changes, EngineInfo
from rollout_server.staging import Staging
from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.limits import MAXIMUM_CHUNK_BYTES
from scalerl_jax.contract.weight_delta import MAXIMUM_DELTA_SHARE, MAXIMUM_ELEMENTS, Change, Sparse, decode, digest

# Bookkeeping is per chunk, so their number is bounded too: 1 TiB in chunks of 1 MiB.
MAXIMUM_CHUNKS = 2**20


class FullSyncNeeded(ValueError):
    """No delta will do: a dense version is needed."""


def numpy_dtype(name: str) -> np.dtype:
    """The dtype in which an engine is handed tensors of a sync dtype.

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
    """Checks headers against what the engine's model holds, and owns the host copy."""

    def __init__(self, info: EngineInfo, weight_buffer: Callable[[int], np.ndarray]):
        self._shapes = {name: tuple(shape) for name, shape in info.tensors.items()}
        self._sync_dtype = info.sync_dtype
        self._dtype = numpy_dtype(info.sync_dtype)
        self._payload_bytes = sum(self._bytes(shape) for shape in self._shapes.values())  # of a dense version
        self._weight_buffer = weight_buffer
        self._buffer: np.ndarray | None = None  # [payload] uint8, from the first version on
        self._offsets: dict[str, int] = {}  # of each tensor in the buffer, in bytes
        self.held: codec.Version | None = None
        self._refused = 0
        self._staging: Staging | None = None  # the last one

    @property
    def chunks_refused(self) -> int:
        """Wrong checksum, since the start of the process."""
        return self._refused + (self._staging.chunks_refused if self._staging else 0)

    def _bytes(self, shape: Iterable[int]) -> int:
        return math.prod(shape) * self._dtype.itemsize

    # ---------------------------------------------------------------------------------------------- the header

    def check(self, header: pb.WeightHeader, held: codec.Version) -> None:
        """Raises ValueError unless a payload that follows this header can become the weights.

        `held` is the version that the engine decodes with. Whether a delta starts from the right one is for check_base.
        """
        target = codec.version_from_proto(header.target)
        if target.incarnation == 0:
            raise ValueError("incarnation 0 is no trainer")
        if target < held:
            raise ValueError(f"{_name(target)} is older than the version held, {_name(held)}")
        self._check_tensors(header)
        if header.HasField("base"):
            self._check_delta(header)
        elif header.payload_bytes != self._payload_bytes:
            raise ValueError(f"payload_bytes is {header.payload_bytes}, the tensors take {self._payload_bytes}")
        if not 0 < header.chunk_bytes <= MAXIMUM_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes is {header.chunk_bytes}, not within 1 and {MAXIMUM_CHUNK_BYTES}")
        chunks = -(-header.payload_bytes // header.chunk_bytes)
        if chunks > MAXIMUM_CHUNKS:
            raise ValueError(f"chunk_bytes {header.chunk_bytes} makes {chunks} chunks, more than {MAXIMUM_CHUNKS}")

    def _check_tensors(self, header: pb.WeightHeader) -> None:
        if len(header.tensors) > len(self._shapes):  # before anything is made of them
            raise ValueError(f"the header names {len(header.tensors)} tensors, the model has {len(self._shapes)}")
        given = collections.Counter(tensor.name for tensor in header.tensors)
        if twice := sorted(name for name, count in given.items() if count > 1):
            raise ValueError(f"tensors named twice: {_some(twice)}")
        if missing := self._shapes.keys() - given.keys():
            raise ValueError(f"tensors of the model that are missing: {_some(sorted(missing))}")
        if unknown := given.keys() - self._shapes.keys():
            raise ValueError(f"tensors that the model does not have: {_some(sorted(unknown))}")
        for tensor in header.tensors:
            if tensor.dtype != self._sync_dtype:
                raise ValueError(f"tensor {tensor.name} is {tensor.dtype!r}, the sync dtype is {self._sync_dtype!r}")
            if tuple(tensor.shape) != self._shapes[tensor.name]:
                wanted = list(self._shapes[tensor.name])
                raise ValueError(f"tensor {tensor.name} has shape {list(tensor.shape)}, the model's is {wanted}")
            if tensor.HasField("digest") and self._sync_dtype != "bfloat16":
                raise ValueError(f"tensor {tensor.name} has a digest, which only bfloat16 has")

    def _check_delta(self, header: pb.WeightHeader) -> None:
        if self._sync_dtype != "bfloat16":
            raise ValueError(f"a delta, but the sync dtype is {self._sync_dtype!r}")
        base, target = codec.version_from_proto(header.base), codec.version_from_proto(header.target)
        if base.incarnation != target.incarnation:
            raise ValueError(f"a delta from {_name(base)} to {_name(target)}")
        if base >= target:
            raise ValueError(f"a delta from step {base.step} to step {target.step}")
        for tensor in header.tensors:
            size = math.prod(self._shapes[tensor.name])
            if not tensor.HasField("digest"):
                raise ValueError(f"tensor {tensor.name} of a delta has no digest")
            if tensor.dense and (tensor.changed or tensor.gap_bytes):
                raise ValueError(f"tensor {tensor.name} is dense, and has {tensor.changed} changed elements")
            if size > MAXIMUM_ELEMENTS and not tensor.dense:
                raise ValueError(f"tensor {tensor.name} has more than {MAXIMUM_ELEMENTS} elements")
            if tensor.changed > size:
                raise ValueError(f"tensor {tensor.name}: {tensor.changed} of {size} elements changed")
        bytes_of_parts = sum(self._part_bytes(tensor) for tensor in header.tensors)
        if header.payload_bytes != bytes_of_parts:
            raise ValueError(f"payload_bytes is {header.payload_bytes}, the tensors' parts take {bytes_of_parts}")
        if header.payload_bytes > MAXIMUM_DELTA_SHARE * self._payload_bytes:
            raise ValueError(
                f"a delta of {header.payload_bytes} bytes, the dense version has {self._payload_bytes} "
                f"(at most {MAXIMUM_DELTA_SHARE:g} of them)"
            )

    def _part_bytes(self, tensor: pb.TensorInfo) -> int:
        return self._bytes(self._shapes[tensor.name]) if tensor.dense else tensor.gap_bytes + 2 * tensor.changed

    def check_base(self, header: pb.WeightHeader) -> None:
        """Raises FullSyncNeeded where the host copy does not hold what a delta starts from."""
        if header.HasField("base"):
            base = codec.version_from_proto(header.base)
            if self.held != base:
                holds = _name(self.held) if self.held else "no version"
                raise FullSyncNeeded(f"the delta starts from {_name(base)}, the host copy holds {holds}")

    def holds(self, header: pb.WeightHeader) -> bool:
        """Whether a delta brings what is there already."""
        return header.HasField("base") and self.held == codec.version_from_proto(header.target)

    # ---------------------------------------------------------------------------------------------- the payload

    def stage(self, header: pb.WeightHeader) -> Staging:
        """Starts a version whose header has passed the checks. A dense one is staged in the host copy itself."""
        if self._buffer is None:
            self._buffer = self._weight_buffer(self._payload_bytes)
        if header.HasField("base"):
            buffer = np.empty(header.payload_bytes, np.uint8)
        else:
            self.held, buffer, offset = None, self._buffer, 0
            for tensor in header.tensors:
                self._offsets[tensor.name] = offset
                offset += self._bytes(self._shapes[tensor.name])
        self._refused = self.chunks_refused
        self._staging = Staging(header, buffer)
        return self._staging

    def finish(self, staging: Staging) -> tuple[Mapping[str, np.ndarray], Changes]:
        """Makes the host copy the version staged: (read-only views of all its tensors, what is new in them).

        The copy holds no version from here on, until the caller, when the engine has taken it, sets `held`. Takes a
        while, and may run on any thread. Raises FullSyncNeeded where the version turns out wrong; a delta's tensors are
        then what they were.
        """
        changes: Changes = dict.fromkeys(self._shapes)
        undo: dict[str, np.ndarray | Change] = {}
        if staging.is_delta:
            changes = self._decode(staging)
            self.held = None
            undo = self._write(staging, changes)
        for tensor in staging.header.tensors:
            if tensor.HasField("digest") and digest(self._view(tensor.name)) != tensor.digest:
                for name, before in undo.items():
                    self._set(name, before)
                raise FullSyncNeeded(f"tensor {tensor.name}: its digest is not that of {_name(staging.target)}")
        views = {tensor.name: self._view(tensor.name) for tensor in staging.header.tensors}
        for view in views.values():
            view.flags.writeable = False
        return views, changes

    def _parts(self, staging: Staging) -> Iterable[tuple[str, Sparse | np.ndarray]]:
        payload, offset = staging.payload, 0
        for tensor in staging.header.tensors:
            size = self._part_bytes(tensor)
            part = payload[offset : offset + size]
            offset += size
            if tensor.dense:
                # Copied: it may begin at an odd byte.
                yield tensor.name, np.frombuffer(part.tobytes(), self._dtype).reshape(self._shapes[tensor.name])
            else:
                values = np.frombuffer(part[tensor.gap_bytes :].tobytes(), self._dtype)
                yield tensor.name, Sparse(tensor.changed, part[: tensor.gap_bytes], values)

    def _decode(self, staging: Staging) -> Changes:
        """What differs; unchanged tensors are not named. Raises FullSyncNeeded; nothing has been written."""
        changes: dict[str, Change | None] = {}
        for name, part in self._parts(staging):
            if not isinstance(part, Sparse):
                changes[name] = None
            elif part.changed or len(part.gaps):
                try:
                    changes[name] = decode(part, math.prod(self._shapes[name]))
                except ValueError as error:
                    raise FullSyncNeeded(f"tensor {name}: {error}") from error
        return changes

    def _write(self, staging: Staging, changes: Changes) -> dict[str, np.ndarray | Change]:
        """Writes the changes into the host copy; returns what stood there."""
        undo: dict[str, np.ndarray | Change] = {}
        for name, change in changes.items():
            view = self._view(name).reshape(-1)
            undo[name] = Change(change.positions, view[change.positions]) if change else view.copy()
            if change:
                self._set(name, change)
        for name, part in self._parts(staging):
            if isinstance(part, np.ndarray):
                self._set(name, part)
        return undo

    def _set(self, name: str, part: np.ndarray | Change) -> None:
        view = self._view(name).reshape(-1)
        if isinstance(part, Change):
            view[part.positions] = part.values
        else:
            view[:] = part.reshape(-1)

    def _view(self, name: str) -> np.ndarray:
        assert self._buffer is not None
        return np.ndarray(self._shapes[name], self._dtype, self._buffer.data, self._offsets[name])


def _name(version: codec.Version) -> str:
    return f"step {version.step} of incarnation {version.incarnation}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
