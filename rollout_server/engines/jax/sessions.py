"""Prefixes that are kept for the next turn of a session: what a turn's end leaves, until memory is short of it.

A prefix is a copy of a slot's keys and values, so it takes no slot while an environment thinks. Whichever is longest
unused goes first.
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
    tokens: np.ndarray  # [known] int32: whose keys and values they are
    prefix: Prefix
    experts: np.ndarray | None  # [known, layers, experts per token], where the turn was asked for with them
    step: int | None  # of the version that made all of them; None: several have

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in jax.tree.leaves((self.prefix, self.experts)))


class Sessions:
    """Of one incarnation's weights; another's begin with `clear`. limit: bytes of what is kept."""

    def __init__(self, limit: int):
        self.limit = limit
        self._kept: collections.OrderedDict[tuple[str, int], Kept] = collections.OrderedDict()  # oldest first
        self._bytes = 0

    def store(self, sequence: Sequence, kept: Kept) -> None:
        """For the turn behind `sequence`."""
        self._drop(_name(sequence))
        self._kept[_name(sequence)] = kept
        self._bytes += kept.bytes
        while self._kept and self._bytes > self.limit:
            self._drop(next(iter(self._kept)))

    def pop(self, sequence: Sequence) -> Kept | None:
        """What the sequence may go on from; it is kept no more. None: there is nothing."""
        request, kept = sequence.request, self._drop(_name(sequence))
        if kept is None or len(kept.tokens) >= len(request.prompt):
            return None
        same = np.array_equal(kept.tokens, request.prompt[: len(kept.tokens)])
        told = kept.experts is not None or not request.router_replay
        return kept if same and told and request.pinned_step in (None, kept.step) else None

    def clear(self) -> None:
        self._kept.clear()
        self._bytes = 0

    def _drop(self, name: tuple[str, int]) -> Kept | None:
        kept = self._kept.pop(name, None)
        self._bytes -= kept.bytes if kept is not None else 0
        return kept


def _name(sequence: Sequence) -> tuple[str, int]:
    return sequence.request.session, sequence.wanted.index
