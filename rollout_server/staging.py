"""Collects the chunks of one version: in any order, each checked, until none is missing.

This module knows nothing of the bytes' meaning, gRPC or an event loop.
"""

import time
from collections.abc import Callable

import numpy as np

from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.chunks import Chunk, crc32

# A chunk that is wrong this often shows that the link or the sender is broken.
MAXIMUM_ATTEMPTS = 8


class Staging:
    """One version, or part of one, that is being received."""

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
