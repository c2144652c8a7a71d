"""The chunk compiled for fewer slots than there are: a step costs what the slots that it runs cost.

For all slots it is compiled before serving begins, once for every length of the cache; with a filter (top-k or top-p)
when that is first asked for (slots.py). For fewer it is compiled when going without has cost as much as compiling does
(so waiting and compiling never cost more than twice the better of the two), on a thread of its own, and decoding goes
on meanwhile with what there is. No server starts later for it, one that is always full compiles nothing more, and one
that is idle for most of the time leaves the cores to its neighbours.
"""

import collections
import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

SMALLEST_WIDTH = 8  # slots; below, a step costs as much
UNPRICED = 0.0, math.inf  # nothing is gained, and compiling takes for ever

Program = Callable[..., Any]


class Kind(NamedTuple):
    """Of chunks: what is compiled for it apart from the number of slots."""

    length: int  # of the cache
    filtered: bool  # some slot asks for a top-k or top-p


_log = logging.getLogger(__name__)


def buckets(smallest: int, longest: int, *, halfway: bool = False) -> list[int]:
    """Sizes to compile for: doubling from `smallest`, then `longest`; none that saves less than a quarter of it.

    halfway: also once and a half each.
    """
    sizes = []
    while smallest < longest:
        sizes += [smallest, smallest * 3 // 2] if halfway else [smallest]
        smallest *= 2
    return [*(size for size in sizes if size <= longest * 3 // 4), longest]


def widths(slots: int, *, copies_are_cheap: bool) -> list[int]:
    """Of the chunks that may be compiled: doubling up to all slots.

    A chunk copies its part of the caches. Where memory is dear (on an accelerator the caches may fill most of it) none
    is wider than a quarter of the slots: that takes no more than the temporaries of a chunk of all.
    """
    most = slots // (2 if copies_are_cheap else 4)
    return [*(width for width in buckets(SMALLEST_WIDTH, slots) if width <= most), slots]


def side_by_side(compilations: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each returns. A compiler is on one core for most of its time, and holds no lock of Python's meanwhile."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        return [done.result() for done in [threads.submit(compilation) for compilation in compilations]]


class Programs:
    """compile: (width, kind) -> the chunk for so many slots. Of one thread, but for `compile`."""

    def __init__(self, widths: list[int], compile: Callable[[int, Kind], Program]):
        """widths: rising; the last is all slots, which is never compiled here."""
        self._widths, self._compile = widths, compile
        self._programs: dict[tuple[int, Kind], Program | None] = {}  # None: XLA cannot compile it
        self._coming: dict[tuple[int, Kind], Future[Program]] = {}
        self._seconds: dict[Kind, tuple[float, float]] = {}  # of a chunk of all slots, of compiling it
        self._lost = collections.defaultdict[tuple[int, Kind], float](float)  # seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode-compiling")

    def price(self, kind: Kind, *, chunk: float, compiling: float) -> None:
        """What such a chunk of all slots takes, and what compiling it took, in seconds."""
        self._seconds[kind] = chunk, compiling

    def narrowest(self, slots: int, kind: Kind) -> tuple[int, Program | None]:
        """The narrowest width that there is for so many slots, and its program; None: that of all slots.

        Raises what compiling has raised, but for XLA's own errors: those cost speed only, and are said in the log.
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
        """Books a chunk of `width` slots where the best one would have done."""
        chunk, compiling = self._seconds.get(best[1], UNPRICED)
        self._lost[best] += chunk * (width - best[0]) / self._widths[-1]
        if self._lost[best] >= compiling:
            self._coming[best] = self._thread.submit(self._compile, *best)

    def close(self) -> None:
        """Waits for what is being compiled."""
        self._thread.shutdown(wait=True, cancel_futures=True)
