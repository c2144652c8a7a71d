"""Prefixes kept for the next turn of a session, as long as memory allows.

A prefix is a copy of a slot's keys and values, so no slot is occupied while an environment runs. The oldest prefix is
dropped first.
"""

import collections
import dataclasses
from typing import Any

import jax
import numpy as np

from rollout_server.engines.sequence import Sequence

Prefix = Any  # (keys, values, experts | None) on the device, of decode.prefill


@dataclasses.dataclass(frozen=True)
class Kept:
    tokens: np.ndarray  # [known] int32: the tokens of these keys and values
    prefix: Prefix
    experts: np.ndarray | None  # [known, layers, experts per token], if the turn recorded them
    step: int | None  # of the version that computed all of them; None: several did

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in jax.tree.leaves((self.prefix, self.experts)))


class Sessions:
    """The prefixes of one incarnation's weights; call `clear` for another. limit: bytes to keep."""

    def __init__(self, limit: int):
        self.limit = limit
        self._kept: collections.OrderedDict[tuple[str, int], Kept] = collections.OrderedDict()  # oldest first
        self._bytes = 0

    def store(self, sequence: Sequence, kept: Kept) -> None:
        """Keeps a prefix for the turn after `sequence`."""
        self._drop(_name(sequence))
        self._kept[_name(sequence)] = kept
        self._bytes += kept.bytes
        while self._kept and self._bytes > self.limit:
            self._drop(next(iter(self._kept)))

    def pop(self, sequence: Sequence) -> Kept | None:
        """Removes and returns the prefix from which the sequence can continue, or None."""
        request, kept = sequence.request, self._drop(_name(sequence))
        if kept is None or len(kept.tokens) >= len(request.prompt):
            return None
        same = np.array_equal(kept.tokens, request.prompt[: len(kept.tokens)])
        recorded = kept.experts is not None or not request.router_replay
        return kept if same and recorded and request.pinned_step in (None, kept.step) else None

    def clear(self) -> None:
        self._kept.clear()
        self._bytes = 0

    def _drop(self, name: tuple[str, int]) -> Kept | None:
        kept = self._kept.pop(name, None)
        self._bytes -= kept.bytes if kept is not None else 0
        return kept


def _name(sequence: Sequence) -> tuple[str, int]:
    return sequence.request.session, sequence.wanted.index
