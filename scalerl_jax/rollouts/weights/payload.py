"""One version of the weights as it goes on the wire: a header, and a payload that is cut into chunks.

    dense   the tensors' bytes one after another, in the header's order
    delta   what changed in each of them, in the header's order: gaps, then replacement values

A part of a version (a trainer of several hosts sends one from each) has blocks instead of whole tensors.

The payload is never concatenated: chunks are cut from the arrays it consists of. See contract/rollout.proto.

The last versions' deltas are kept, bounded in bytes, for servers that are a few versions behind. A server at version a
that should be at v gets the deltas a+1 ... v merged into one: for each position the newest value. That is one transfer
and one swap, whatever it missed; beyond the bound it gets a dense version.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from scalerl_jax.contract import chunks, codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.weight_delta import MAXIMUM_DELTA_SHARE, Sparse, WeightDelta, merge
from scalerl_jax.contract.weight_parts import Blocks, Part
from scalerl_jax.rollouts.loop_thread import watched

# Of each element in a dense version: deltas are of bfloat16 tensors.
ITEM_BYTES = 2

Tensors = Mapping[str, np.ndarray]  # Hugging Face names, complete, in sync dtype
TensorBlocks = Mapping[str, Blocks]  # likewise, only the blocks that this host sends


class Payload:
    """Ready to be cut into chunks by any number of pushes at once."""

    def __init__(self, header: pb.WeightHeader, pieces: Sequence[np.ndarray], *, chunk_bytes: int):
        """Fills in the header's sizes."""
        assert sys.byteorder == "little", "weights travel little-endian"
        self._pieces = [np.ascontiguousarray(piece).reshape(-1).view(np.uint8) for piece in pieces]
        self._starts = np.concatenate([[0], np.cumsum([len(piece) for piece in self._pieces], dtype=int)]).tolist()
        self.bytes, self._chunk_bytes = self._starts[-1], chunk_bytes
        self.chunks = -(-self.bytes // chunk_bytes)
        self.header = header
        header.payload_bytes, header.chunk_bytes = self.bytes, chunk_bytes

    @property
    def is_delta(self) -> bool:
        return self.header.HasField("base")

    def chunk(self, index: int) -> chunks.Chunk:
        """Views of the arrays, and their checksum."""
        start = index * self._chunk_bytes
        end = min(start + self._chunk_bytes, self.bytes)
        assert 0 <= start < end
        parts = []
        at = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < end:
            piece_end = min(end, self._starts[at + 1])
            offset = self._starts[at]
            parts.append(self._pieces[at][start - offset : piece_end - offset].data)
            start, at = piece_end, at + 1
        return chunks.cut(index, parts)


def dense(version: codec.Version, tensors: Tensors, digests: Mapping[str, int], *, chunk_bytes: int) -> Payload:
    """The payload of whole tensors. digests: of the tensors that have one."""
    assert tensors, "a version without tensors"
    header = pb.WeightHeader(
        target=codec.version_to_proto(version),
        tensors=[
            pb.TensorInfo(name=name, dtype=tensor.dtype.name, shape=tensor.shape, digest=digests.get(name))
            for name, tensor in tensors.items()
        ],
    )
    return Payload(header, list(tensors.values()), chunk_bytes=chunk_bytes)


def dense_part(
    version: codec.Version,
    tensors: TensorBlocks,
    digests: Mapping[str, int],
    *,
    dtype: str,
    shapes: Mapping[str, tuple[int, ...]],
    part: Part,
    chunk_bytes: int,
) -> Payload:
    """This host's part of a dense version. digests: of the blocks it sends of each tensor, where there is one."""
    header = pb.WeightHeader(target=codec.version_to_proto(version), part=part.index, parts=part.count)
    pieces = []
    for name, blocks in tensors.items():
        info = header.tensors.add(name=name, dtype=dtype, shape=shapes[name], digest=digests.get(name))
        pieces += _add_blocks(info, blocks)
    return Payload(header, pieces, chunk_bytes=chunk_bytes)


def _add_blocks(info: pb.TensorInfo, blocks: Blocks) -> list[np.ndarray]:
    for block in blocks:
        info.blocks.add(start=block.start, size=block.values.shape)
    return [block.values for block in blocks]


def sparse(incarnation: int, delta: WeightDelta, *, chunk_bytes: int, part: Part | None = None) -> Payload:
    """The payload of a delta, or of this host's part of one."""
    assert delta.base is not None
    header = pb.WeightHeader(
        target=pb.Version(incarnation=incarnation, step=delta.step),
        base=pb.Version(incarnation=incarnation, step=delta.base),
    )
    if part is not None:
        header.part, header.parts = part.index, part.count
    pieces = []
    for name, found in delta.tensors.items():
        info = header.tensors.add(name=name, dtype="bfloat16", shape=delta.shapes[name], digest=delta.digests[name])
        if isinstance(found, Sparse):
            info.changed, info.gap_bytes = found.changed, found.gaps.nbytes
            pieces += [found.gaps, found.values]
        else:
            info.dense = True
            pieces += [found] if isinstance(found, np.ndarray) else _add_blocks(info, found)
    return Payload(header, [piece for piece in pieces if piece.size], chunk_bytes=chunk_bytes)


class DeltaCache:
    """Lives on one event loop; close() ends its thread."""

    def __init__(self, *, limit: int, event: Callable[[dict[str, Any]], None], fail: Callable[[BaseException], None]):
        """limit: bytes of all deltas kept. event: called on the loop with what each version changed.

        fail: called on the loop when finding a delta fails, which may be long before the delta is needed.
        """
        self._limit, self._event, self._fail = limit, event, fail
        self._deltas: dict[int, asyncio.Task[WeightDelta]] = {}  # by the version that they lead to
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="publisher-deltas")

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def record(self, step: int, find: Callable[[], WeightDelta]) -> None:
        """`find` copies what version `step` changed to the host; it is called at once, on the cache's thread.

        To be called for every version in turn, also for those that are never published.
        """
        assert step not in self._deltas
        self._deltas[step] = watched(self._find(step, find), self._fail)

    async def _find(self, step: int, find: Callable[[], WeightDelta]) -> WeightDelta:
        def timed() -> tuple[WeightDelta, float]:
            began = time.monotonic()
            delta = find()
            return delta, time.monotonic() - began

        delta, seconds = await asyncio.get_running_loop().run_in_executor(self._worker, timed)
        assert delta.step == step
        self._drop_oldest(delta.nbytes)
        if delta.base is not None:
            self._event(
                {
                    "step": step,
                    "changed": delta.changed,
                    "elements": delta.elements,
                    "whole_tensors": delta.whole,
                    "delta_bytes": delta.nbytes,
                    "dense_bytes": delta.elements * ITEM_BYTES,
                    "encode_seconds": seconds,
                }
            )
        return delta

    def _drop_oldest(self, more: int) -> None:
        done = {s: task.result() for s, task in self._deltas.items() if task.done() and not task.exception()}
        used = more + sum(delta.nbytes for delta in done.values())
        for step in sorted(done):
            if used <= self._limit:
                break
            used -= done[step].nbytes
            del self._deltas[step]

    async def digests(self, step: int) -> dict[str, int]:
        """Digests of a version's tensors; {} if it was not recorded or has been dropped. Raises what `find` raised."""
        task = self._deltas.get(step)
        return {} if task is None else dict((await asyncio.shield(task)).digests)

    async def between(self, base: int, step: int) -> WeightDelta | None:
        """One delta from version `base` to `step`; None if there is none that is worth sending.

        Raises what `find` raised for one of them.
        """
        steps = range(base + 1, step + 1)
        if not steps or any(s not in self._deltas for s in steps):
            return None
        deltas = [await asyncio.shield(self._deltas[s]) for s in steps if s in self._deltas]
        if len(deltas) < len(steps):
            return None  # dropped meanwhile
        if deltas[0].base != base or any(a.step != b.base for a, b in itertools.pairwise(deltas)):
            return None  # the first version of all has no base
        dense = deltas[0].elements * ITEM_BYTES
        if max(delta.nbytes for delta in deltas) > MAXIMUM_DELTA_SHARE * dense:
            return None
        if len(deltas) > 1 and any(isinstance(t, tuple) for delta in deltas for t in delta.tensors.values()):
            return None  # blocks of an older version, which a newer one has changed in places
        merged = await asyncio.get_running_loop().run_in_executor(self._worker, merge, deltas)
        return merged if merged.nbytes <= MAXIMUM_DELTA_SHARE * dense else None
