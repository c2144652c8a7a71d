"""The decode chunk compiled for fewer than all slots, so that a step costs only as much as the slots that it runs.

The chunk for all slots is compiled before serving, once for every length of the cache; with a filter (top-k or top-p)
when first requested (slots.py). A narrower one is compiled when its absence has cost as much time as compiling does (so
waiting and compiling together never cost more than twice the better of the two), on another thread, while decoding
continues with the programs available. No server starts later because of it, one that is always full compiles nothing
more, and one that is mostly idle leaves the cores to its neighbours.
"""

import collections
import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

SMALLEST_WIDTH = 8  # slots; with fewer, a step costs as much
UNPRICED = 0.0, math.inf  # no gain, and infinite compile time

Program = Callable[..., Any]


class Kind(NamedTuple):
    """The kind of a chunk: what its program depends on besides the number of slots."""

    length: int  # of the cache
    filtered: bool  # some slot asks for a top-k or top-p
    prompts: int = 0  # positions of the shared prompts; 0: no slot reads one


_log = logging.getLogger(__name__)


def buckets(smallest: int, longest: int, *, halfway: bool = False) -> list[int]:
    """Sizes to compile for: doubling from `smallest`, then `longest`, which the others are at most three quarters of.

    halfway: also 1.5 times each size.
    """
    sizes = []
    while smallest < longest:
        sizes += [smallest, smallest * 3 // 2] if halfway else [smallest]
        smallest *= 2
    return [*(size for size in sizes if size <= longest * 3 // 4), longest]


def widths(slots: int, *, copies_are_cheap: bool) -> list[int]:
    """Widths of the chunks that may be compiled: doubling up to all slots.

    A chunk copies its part of the caches. Where memory is scarce (on an accelerator the caches may fill most of it) no
    width exceeds a quarter of the slots: that needs no more memory than the temporaries of a chunk of all slots.
    """
    most = slots // (2 if copies_are_cheap else 4)
    return [*(width for width in buckets(SMALLEST_WIDTH, slots) if width <= most), slots]


def side_by_side(compilations: Sequence[Callable[[], Any]]) -> list[Any]:
    """Compiles in threads and returns the results. A compiler mostly uses one core, and does not hold Python's GIL."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        return [done.result() for done in [threads.submit(compilation) for compilation in compilations]]


class Programs:
    """compile: (width, kind) -> the chunk for that many slots. Not thread-safe, except `compile`."""

    def __init__(self, widths: list[int], compile: Callable[[int, Kind], Program]):
        """widths: rising; the last is all slots, which is never compiled here."""
        self._widths, self._compile = widths, compile
        self._programs: dict[tuple[int, Kind], Program | None] = {}  # None: XLA cannot compile it
        self._coming: dict[tuple[int, Kind], Future[Program]] = {}
        self._seconds: dict[Kind, tuple[float, float]] = {}  # of running, and of compiling, a chunk of all slots
        self._lost = collections.defaultdict[tuple[int, Kind], float](float)  # seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode-compiling")

    def price(self, kind: Kind, *, chunk: float, compiling: float) -> None:
        """Records the seconds that such a chunk of all slots takes, and that compiling it took."""
        self._seconds[kind] = chunk, compiling

    @property
    def compiled(self) -> list[int]:
        """The widths of the programs compiled so far."""
        return sorted({width for (width, _), program in self._programs.items() if program is not None})

    def add(self, width: int, kind: Kind, program: Program) -> None:
        """Adds a program that the caller has compiled."""
        self._programs.setdefault((width, kind), program)

    def narrowest(self, slots: int, kind: Kind) -> tuple[int, Program | None]:
        """The narrowest compiled width for that many slots, and its program (None: that of all slots).

        Raises errors of compiling, except XLA's own: those cost speed only, and are logged.
        """
        fitting = [width for width in self._widths if width >= slots]
        best = fitting[0], kind
        if best in self._coming and self._coming[best].done():
            self._collect(best)
        for width in fitting[:-1]:
            program = self._programs.get((width, kind))
            if program is not None:
                break
        else:
            width, program = fitting[-1], None
        if width > best[0] and best not in self._programs and best not in self._coming:
            self._lose(best, width)
        return width, program

    def _collect(self, key: tuple[int, Kind]) -> None:
        try:
            self._programs[key] = self._coming.pop(key).result()
        except jax.errors.JaxRuntimeError as error:
            width, kind = key
            _log.warning("no chunk of %d slots and %d positions, wider ones run instead: %s", width, kind.length, error)
            self._programs[key] = None

    def _lose(self, best: tuple[int, Kind], width: int) -> None:
        """Counts the time lost by a chunk of `width` slots instead of the best one; compiles that when it pays."""
        chunk, compiling = self._seconds.get(best[1], UNPRICED)
        self._lost[best] += chunk * (width - best[0]) / self._widths[-1]
        if self._lost[best] >= compiling:
            self._coming[best] = self._thread.submit(self._compile, *best)

    def close(self) -> None:
        """Waits for the current compilation."""
        self._thread.shutdown(wait=True, cancel_futures=True)
