"""The chunk compiled for fewer slots than there are: a step costs what the slots that it runs cost.

For all slots it is compiled before serving begins, once for every length of the cache. For fewer it is compiled when
that would have served for a while, on a thread of its own, and decoding goes on meanwhile with what there is. So no
server starts later for it, and one that is always full compiles nothing more.
"""

import collections
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

SMALLEST_WIDTH = 8  # slots; below, a step costs as much
MISSES = 16  # chunks that a width would have served before it is compiled, for each length that then comes up

Program = Callable[..., Any]

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


class Programs:
    """compile: (width, length) -> the chunk for so many slots and such a cache. Of one thread, but for `compile`."""

    def __init__(self, widths: list[int], compile: Callable[[int, int], Program]):
        """widths: rising; the last is all slots, which is never compiled here."""
        self._widths, self._compile = widths, compile
        self._programs: dict[tuple[int, int], Program | None] = {}  # None: XLA cannot compile it
        self._coming: dict[tuple[int, int], Future[Program]] = {}
        self._missed = collections.Counter[int]()  # by width
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode-compiling")

    def narrowest(self, slots: int, length: int) -> tuple[int, Program | None]:
        """The narrowest width that there is for so many slots, and its program; None: that of all slots."""
        fitting = [width for width in self._widths if width >= slots]
        if len(fitting) > 1:
            self._want((fitting[0], length))
        for width in fitting[:-1]:
            program = self._programs.get((width, length))
            if program is not None:
                return width, program
        return fitting[-1], None

    def _want(self, key: tuple[int, int]) -> None:
        """Counts a chunk for which that program was the best one, and takes it where it has been made.

        Raises what compiling has raised, but for XLA's own errors: those cost speed only, and are said in the log.
        """
        if key in self._programs:
            return
        coming = self._coming.get(key)
        if coming is None:
            self._missed[key[0]] += 1
            if self._missed[key[0]] >= MISSES:
                self._coming[key] = self._thread.submit(self._compile, *key)
        elif coming.done():
            del self._coming[key]
            try:
                self._programs[key] = coming.result()
            except jax.errors.JaxRuntimeError as error:
                _log.warning("no chunk of %d slots and %d positions, wider ones run instead: %s", *key, error)
                self._programs[key] = None

    def close(self) -> None:
        """Waits for what is being compiled."""
        self._thread.shutdown(wait=True, cancel_futures=True)
