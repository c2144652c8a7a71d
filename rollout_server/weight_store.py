"""The host copy of the weights, and how a version is written to it before the engine gets it.

    dense   the chunks are the copy's bytes: it holds no version from the first chunk until all have arrived
    delta   chunks in a separate buffer;  decoded in full -> written into the copy -> digests of the whole copy checked
            -> the engine. If a digest is wrong, the changes are undone and the copy holds no version
    parts   each in a separate buffer;  together they are one of the two above

`held` is the version that the copy holds, bit-identical to the trainer's; only a delta that starts from it is accepted.
Tensors are views into the copy, never copies of it. No gRPC and no event loop here; one version at a time.
"""

import collections
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from rollout_server.engines.engine import Changes, EngineInfo
from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.chunks import Chunk, crc32
from scalerl_jax.contract.limits import MAXIMUM_ALL_BLOCKS, MAXIMUM_BLOCKS, MAXIMUM_CHUNK_BYTES, MAXIMUM_PARTS
from scalerl_jax.contract.weight_delta import MAXIMUM_DELTA_SHARE, MAXIMUM_ELEMENTS, Change, Sparse, decode, digest
from scalerl_jax.contract.weight_parts import Block, Blocks, Box, check_box, check_cover

# Each chunk needs some bookkeeping, so their number is bounded too: 1 TiB in chunks of 1 MiB.
MAXIMUM_CHUNKS = 2**20

# A chunk that is wrong this often shows that the link or the sender is broken.
MAXIMUM_ATTEMPTS = 8


class BaseNotHeld(ValueError):
    """A delta cannot be applied: a dense version is needed."""


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype in which an engine gets tensors of a sync dtype.

    bfloat16 is that of ml_dtypes (which comes with jax); without ml_dtypes it is the raw bits, uint16.
    """
    if name == "float32":
        return np.dtype("<f4")
    assert name == "bfloat16", name
    try:
        import ml_dtypes  # lazily: not every engine has it
    except ImportError:
        return np.dtype("<u2")
    return np.dtype(ml_dtypes.bfloat16)


class Staging:
    """One version, or part of one, that is being received: chunks in any order, each checked, until none is missing.

    It knows nothing of the bytes' meaning.
    """

    def __init__(self, header: pb.WeightHeader, buffer: np.ndarray, *, refused: Callable[[], None] = lambda: None):
        """Fills `buffer` [payload_bytes] uint8. refused: called for each chunk whose checksum is wrong."""
        self.header = header
        self.target = codec.version_from_proto(header.target)
        self._refused = refused
        self.seconds = 0.0  # header to last good chunk
        self._chunk_bytes = header.chunk_bytes
        self._buffer = buffer.data  # slices of a memoryview accept bytes without a copy
        self._began = time.monotonic()
        self._good = np.zeros(-(-len(buffer) // header.chunk_bytes), bool)  # [chunks]
        self.chunks = self.waiting = len(self._good)  # number of chunks; number not yet good
        # Arrays, so that each chunk costs only a few bytes.
        self._attempts = np.zeros(len(self._good), np.uint8)  # how often it was wrong
        self._asked = np.zeros(len(self._good), bool)  # requested again and not received since

    @property
    def is_delta(self) -> bool:
        return self.header.HasField("base")

    @property
    def complete(self) -> bool:
        return self.waiting == 0

    @property
    def payload(self) -> np.ndarray:
        """[payload_bytes] uint8; only once complete."""
        assert self.complete
        return np.frombuffer(self._buffer, np.uint8)

    def put(self, chunk: Chunk) -> bool:
        """Stores one chunk. Returns False if its checksum is wrong and it must be sent again.

        Raises ValueError where sending it again would not help.
        """
        index, data = chunk.index, chunk.data
        if index >= self.chunks:
            raise ValueError(f"chunk {index} of {self.chunks}")
        self._asked[index] = False
        if crc32(data) != chunk.crc32:
            self._refused()
            if self._good[index]:
                return True  # a good copy is here already
            self._attempts[index] += 1
            if self._attempts[index] >= MAXIMUM_ATTEMPTS:
                raise ValueError(f"the checksum of chunk {index} was wrong {MAXIMUM_ATTEMPTS} times")
            self._asked[index] = True
            return False
        start = index * self._chunk_bytes
        size = min(self._chunk_bytes, len(self._buffer) - start)
        if len(data) != size:
            raise ValueError(f"chunk {index} has {len(data)} bytes, not {size}")
        if not self._good[index]:
            self._buffer[start : start + size] = data
            self._good[index] = True
            self.waiting -= 1
            if self.complete:
                self.seconds = time.monotonic() - self._began
        return True

    def ask(self) -> list[int]:
        """Returns the missing chunks that were not requested again yet, and marks them as requested."""
        missing = np.flatnonzero(~self._good & ~self._asked)
        self._asked[missing] = True
        return missing.tolist()


class WeightStore:
    """Checks headers against the tensors of the engine's model, and owns the host copy."""

    def __init__(self, info: EngineInfo, weight_buffer: Callable[[int], np.ndarray]):
        self._shapes = {name: tuple(shape) for name, shape in info.tensors.items()}
        self._sync_dtype = info.sync_dtype
        self._dtype = numpy_dtype(info.sync_dtype)
        self._payload_bytes = sum(self._bytes(shape) for shape in self._shapes.values())  # of a dense version
        self._weight_buffer = weight_buffer
        self._buffer: np.ndarray | None = None  # [payload] uint8, from the first version on
        self._offsets: dict[str, int] = {}  # of each tensor in the buffer, in bytes
        self.held: codec.Version | None = None
        self.chunks_refused = 0  # with a wrong checksum, since the start of the process

    def check_parts(self, headers: Sequence[pb.WeightHeader]) -> None:
        """Raises ValueError where these parts of one version take more memory than the weights do, or a tensor has more
        than MAXIMUM_ALL_BLOCKS blocks."""
        blocks: collections.Counter[str] = collections.Counter()
        for header in headers:
            blocks.update({tensor.name: len(tensor.blocks) for tensor in header.tensors})
        name, most = max(blocks.items(), key=lambda item: item[1], default=("", 0))
        if most > MAXIMUM_ALL_BLOCKS:
            raise ValueError(f"tensor {name}: {most} blocks of all parts, more than {MAXIMUM_ALL_BLOCKS}")
        if (size := sum(header.payload_bytes for header in headers)) > self._payload_bytes:
            raise ValueError(f"parts of {size} bytes together, the tensors take {self._payload_bytes}")

    def _bytes(self, shape: Iterable[int]) -> int:
        return math.prod(shape) * self._dtype.itemsize

    # ---------------------------------------------------------------------------------------------- the header

    def check(self, header: pb.WeightHeader, held: codec.Version) -> None:
        """Raises ValueError unless a payload with this header can become the weights.

        `held` is the version that the engine decodes with. check_base checks whether a delta starts from the right one.
        """
        target = codec.version_from_proto(header.target)
        if target.incarnation == 0:
            raise ValueError("incarnation 0 is no trainer")
        if target < held:
            raise ValueError(f"{_name(target)} is older than the version held, {_name(held)}")
        if header.parts > MAXIMUM_PARTS or header.part >= max(1, header.parts):
            raise ValueError(f"part {header.part} of {header.parts}: at most {MAXIMUM_PARTS}, from 0")
        self._check_tensors(header)
        if header.parts > 1:
            self._check_blocks(header)
        if header.HasField("base"):
            self._check_delta(header)
        else:
            self._check_payload(header, "blocks" if header.parts > 1 else "tensors")
        if not 0 < header.chunk_bytes <= MAXIMUM_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes is {header.chunk_bytes}, not within 1 and {MAXIMUM_CHUNK_BYTES}")
        chunks = -(-header.payload_bytes // header.chunk_bytes)
        if chunks > MAXIMUM_CHUNKS:
            raise ValueError(f"chunk_bytes {header.chunk_bytes} makes {chunks} chunks, more than {MAXIMUM_CHUNKS}")

    def _check_tensors(self, header: pb.WeightHeader) -> None:
        if len(header.tensors) > len(self._shapes):  # before any work in proportion to them
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

            if tensor.blocks and header.parts <= 1:
                raise ValueError(f"tensor {tensor.name} has blocks, and the version is whole")

    def _check_blocks(self, header: pb.WeightHeader) -> None:
        for tensor in header.tensors:
            if len(tensor.blocks) > MAXIMUM_BLOCKS:
                raise ValueError(f"tensor {tensor.name}: {len(tensor.blocks)} blocks, more than {MAXIMUM_BLOCKS}")
            shape = self._shapes[tensor.name]
            try:
                size = sum(check_box(box, shape) for box in self._boxes(tensor, header))
            except ValueError as error:
                raise ValueError(f"tensor {tensor.name}: {error}") from None
            if size > math.prod(shape):
                raise ValueError(f"tensor {tensor.name}: blocks of {size} elements, it has {math.prod(shape)}")
            if tensor.blocks and header.HasField("base") and not tensor.dense:
                raise ValueError(f"tensor {tensor.name} has blocks, and is sparse")

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
        self._check_payload(header, "tensors' parts")
        if header.payload_bytes > MAXIMUM_DELTA_SHARE * self._payload_bytes:
            raise ValueError(
                f"a delta of {header.payload_bytes} bytes, the dense version has {self._payload_bytes} "
                f"(at most {MAXIMUM_DELTA_SHARE:g} of them)"
            )

    def _check_payload(self, header: pb.WeightHeader, contents: str) -> None:
        size = sum(self._part_bytes(tensor, header) for tensor in header.tensors)
        if header.payload_bytes != size:
            raise ValueError(f"payload_bytes is {header.payload_bytes}, the {contents} take {size}")

    def _part_bytes(self, tensor: pb.TensorInfo, header: pb.WeightHeader) -> int:
        """Bytes of one tensor in a payload."""
        if not tensor.dense and header.HasField("base"):
            return tensor.gap_bytes + 2 * tensor.changed
        return sum(self._bytes(size) for _, size in self._boxes(tensor, header))

    def _boxes(self, tensor: pb.TensorInfo, header: pb.WeightHeader) -> list[Box]:
        """The boxes in which a dense tensor is sent: its blocks, or all of it where the version is in one part."""
        if header.parts > 1:
            return [(block.start, block.size) for block in tensor.blocks]
        shape = self._shapes[tensor.name]
        return [((0,) * len(shape), shape)]

    def check_base(self, header: pb.WeightHeader) -> None:
        """Raises BaseNotHeld where the host copy does not hold the version that a delta starts from."""
        if header.HasField("base"):
            base = codec.version_from_proto(header.base)
            if self.held != base:
                holds = _name(self.held) if self.held else "no version"
                raise BaseNotHeld(f"the delta starts from {_name(base)}, the host copy holds {holds}")

    def holds(self, header: pb.WeightHeader) -> bool:
        """Whether this is a delta to the version that the copy already holds."""
        return header.HasField("base") and self.held == codec.version_from_proto(header.target)

    # ---------------------------------------------------------------------------------------------- the payload

    def stage(self, header: pb.WeightHeader) -> Staging:
        """Starts a version, or one more part of it, whose header has passed the checks.

        A dense version in one part is staged in the host copy itself.
        """
        if self._buffer is None:
            self._buffer = self._weight_buffer(self._payload_bytes)
        if header.HasField("base") or header.parts > 1:
            buffer = np.empty(header.payload_bytes, np.uint8)
        else:
            self.held, buffer = None, self._buffer
            self._place(header)
        return Staging(header, buffer, refused=self._count_refused)

    def _count_refused(self) -> None:
        self.chunks_refused += 1

    def _place(self, header: pb.WeightHeader) -> None:
        """Sets the offset of each tensor of a dense version in the host copy."""
        offset = 0
        for tensor in header.tensors:
            self._offsets[tensor.name] = offset
            offset += self._bytes(self._shapes[tensor.name])

    def finish(self, staging: Staging, *others: Staging) -> tuple[Mapping[str, np.ndarray], Changes]:
        """Writes the staged version into the host copy: (read-only views of all its tensors, their changes).

        others: the other parts of the version. The copy then holds no version until the caller sets `held`, after the
        engine has loaded it. Slow; may run on any thread. Raises BaseNotHeld where the version turns out wrong; a
        delta's changes are then undone. Raises ValueError where the parts of a dense version do not cover it.
        """
        changes: Changes = dict.fromkeys(self._shapes)
        undo: dict[str, Change | Blocks] = {}
        parts = (staging, *others)
        if staging.is_delta:
            changes = self._decode(parts)
            self.held = None
            undo = self._write(parts, changes)
        elif others or staging.header.parts > 1:
            self._check_cover(parts)
            self.held = None
            self._place(staging.header)
            for part in parts:
                for name, blocks in self._parts(part):
                    assert not isinstance(blocks, Sparse)
                    self._set(name, blocks)
        for name, wanted in _digests(parts).items():
            if digest(self._view(name)) != wanted:
                for changed, before in undo.items():
                    self._set(changed, before)
                raise BaseNotHeld(f"tensor {name}: its digest is not that of {_name(staging.target)}")
        views = {tensor.name: self._view(tensor.name) for tensor in staging.header.tensors}
        for view in views.values():
            view.flags.writeable = False
        return views, changes

    def _check_cover(self, parts: Sequence[Staging]) -> None:
        boxes: dict[str, list[Box]] = collections.defaultdict(list)
        for part in parts:
            for tensor in part.header.tensors:
                boxes[tensor.name] += self._boxes(tensor, part.header)
        for name, shape in self._shapes.items():
            try:
                check_cover(boxes[name], shape)
            except ValueError as error:
                raise ValueError(f"the parts' blocks of tensor {name}: {error}") from None

    def _parts(self, staging: Staging) -> Iterable[tuple[str, Sparse | Blocks]]:
        """The contents of a payload, tensor by tensor."""
        payload, offset = staging.payload, 0
        for tensor in staging.header.tensors:
            size = self._part_bytes(tensor, staging.header)
            part = payload[offset : offset + size]
            offset += size
            if staging.is_delta and not tensor.dense:
                values = np.frombuffer(part[tensor.gap_bytes :].tobytes(), self._dtype)
                yield tensor.name, Sparse(tensor.changed, part[: tensor.gap_bytes], values)
            else:
                yield tensor.name, tuple(self._cut(self._boxes(tensor, staging.header), part))

    def _cut(self, boxes: Sequence[Box], part: np.ndarray) -> Iterable[Block]:
        """Splits a tensor's bytes into consecutive blocks."""
        offset = 0
        for start, size in boxes:
            count = self._bytes(size)
            # Copied, since it may start at an odd byte.
            values = np.frombuffer(part[offset : offset + count].tobytes(), self._dtype)
            yield Block(tuple(start), values.reshape(tuple(size)))
            offset += count

    def _decode(self, parts: Sequence[Staging]) -> Changes:
        """Decodes the changes; unchanged tensors are not named. Writes nothing. Raises BaseNotHeld."""
        found: dict[str, list[Change] | None] = {}  # None: not only element by element
        for staging in parts:
            for name, part in self._parts(staging):
                if not isinstance(part, Sparse):
                    if part:
                        found[name] = None
                elif part.changed or len(part.gaps):
                    try:
                        change = decode(part, math.prod(self._shapes[name]))
                    except ValueError as error:
                        raise BaseNotHeld(f"tensor {name}: {error}") from error
                    if (so_far := found.setdefault(name, [])) is not None:
                        so_far.append(change)
        return {name: None if some is None else _together(name, some) for name, some in found.items()}

    def _write(self, parts: Sequence[Staging], changes: Changes) -> dict[str, Change | Blocks]:
        """Writes the changes into the host copy; returns the values that they replaced."""
        undo: dict[str, Change | Blocks] = {}
        for name, change in changes.items():
            view = self._view(name)
            if change:
                undo[name] = Change(change.positions, view.reshape(-1)[change.positions])
                self._set(name, change)
            else:
                undo[name] = (Block((0,) * view.ndim, view.copy()),)
        for staging in parts:
            for name, part in self._parts(staging):
                if not isinstance(part, Sparse):
                    self._set(name, part)
                elif part.changed and changes[name] is None:  # sparse in this part, but not in another
                    self._set(name, decode(part, math.prod(self._shapes[name])))
        return undo

    def _set(self, name: str, part: Change | Blocks) -> None:
        view = self._view(name)
        if isinstance(part, Change):
            view.reshape(-1)[part.positions] = part.values
        else:
            for block in part:
                view[block.index] = block.values

    def _view(self, name: str) -> np.ndarray:
        assert self._buffer is not None
        return np.ndarray(self._shapes[name], self._dtype, self._buffer.data, self._offsets[name])


def _digests(parts: Sequence[Staging]) -> dict[str, int]:
    """Digests of whole tensors, each the sum over all parts; tensors without a digest in some part are left out."""
    totals: dict[str, int] = {}
    digest_counts: collections.Counter[str] = collections.Counter()
    for part in parts:
        for tensor in part.header.tensors:
            if tensor.HasField("digest"):
                digest_counts[tensor.name] += 1
                totals[tensor.name] = totals.get(tensor.name, 0) + tensor.digest & 0xFFFFFFFF
    return {name: total for name, total in totals.items() if digest_counts[name] == len(parts)}


def _together(name: str, changes: Sequence[Change]) -> Change:
    """Merges the changes of several parts. Raises BaseNotHeld where two have the same position."""
    if len(changes) == 1:
        return changes[0]
    positions = np.concatenate([change.positions for change in changes])
    order = np.argsort(positions, kind="stable")
    positions, values = positions[order], np.concatenate([change.values for change in changes])[order]
    if (np.diff(positions) == 0).any():
        raise BaseNotHeld(f"tensor {name}: two parts change the same element")
    return Change(positions, values)


def _name(version: codec.Version) -> str:
    return f"step {version.step} of incarnation {version.incarnation}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
