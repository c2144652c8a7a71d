"""The time of a simulation, and cores that its processes share. Pure: no wall clock, no randomness.

    clock    what happens when; of two things at one moment the one asked for first
    cores    a pool of C cores. A job is work in seconds-when-alone and the cores it keeps busy then (its demand d).
             Jobs that demand no more than C together run as if alone; else the cores are divided fairly:

                 share_j = min(d_j, level),  sum of shares = C        (max-min: nobody gets more while another has less)
                 rate_j  = share_j / d_j

             so a process that wants half a core gets it, and those that want more are slowed down alike. It is what a
             fair scheduler does with processes that are groups to it, over times longer than its time slices.

A pool without a number of cores is hardware of one's own: every job runs as if alone.
"""

import heapq
import itertools
import math
from collections.abc import Callable

_DONE = 1e-9  # seconds of work that are none, beside a second
_ROUNDING = 1e-12  # of the time there is: less cannot be told apart


class Clock:
    """Seconds of simulated time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, delay: float, action: Callable[[], None]) -> None:
        """Has `action` called `delay` seconds from now."""
        assert delay >= 0, delay
        heapq.heappush(self._events, (self.now + delay, next(self._order), action))

    def step(self) -> bool:
        """Does what comes next. False: nothing ever will."""
        if not self._events:
            return False
        self.now, _, action = heapq.heappop(self._events)
        action()
        return True


class Job:
    """Work under way in a pool; `left` is in seconds-when-alone, and right when the pool has settled."""

    __slots__ = ("cores", "done", "left", "rate", "work")

    def __init__(self, work: float, cores: float, done: Callable[[], None]):
        self.work, self.left, self.cores, self.done, self.rate = work, work, cores, done, 1.0


class Cores:
    """See the module. count: of the cores. used: the share of each that other programs take."""

    def __init__(self, clock: Clock, count: float = math.inf, *, used: float = 0.0):
        if not count > 0 or not 0 <= used < 1:
            raise ValueError(f"{count:g} cores of which others use {used:.0%}: there must be some left")
        self._clock, self._most, self._count = clock, count, count * (1 - used)
        self._jobs: dict[Job, None] = {}  # in the order they began
        self._settled_at = 0.0
        self._shared = 0  # how often the rates were set; an end that was foreseen before is none

    def start(self, work: float, cores: float, done: Callable[[], None]) -> Job:
        """Begins a job; `done` is called when it ends. cores: that it keeps busy, above 0."""
        assert work >= 0 and cores > 0
        self._settle()
        job = Job(work, min(cores, self._most), done)
        self._jobs[job] = None
        self._share()
        return job

    def worked(self, job: Job) -> float:
        """Of the job, up to now, in seconds-when-alone."""
        self._settle()
        return job.work - job.left

    def shorten(self, job: Job, work: float) -> None:
        """It is to end after `work` in all, of which no more may be done already."""
        self._settle()
        done = job.work - job.left
        job.work, job.left = work, max(0.0, work - done)
        self._share()

    def _settle(self) -> None:
        passed, self._settled_at = self._clock.now - self._settled_at, self._clock.now
        for job in self._jobs:
            job.left -= passed * job.rate

    def _share(self) -> None:
        """Sets the rates, and foresees who ends next."""
        self._shared += 1
        if not self._jobs:
            return
        if sum(job.cores for job in self._jobs) > self._count:
            level = self._level()
            for job in self._jobs:
                job.rate = min(job.cores, level) / job.cores
        else:
            for job in self._jobs:
                job.rate = 1.0
        soonest = min(max(0.0, job.left) / job.rate for job in self._jobs)
        asked = self._shared
        self._clock.at(soonest, lambda: self._ended(asked))

    def _level(self) -> float:
        """The most that one gets: those that want less leave the rest to the others."""
        demands = sorted(job.cores for job in self._jobs)
        left = self._count
        for i, demand in enumerate(demands):
            equal = left / (len(demands) - i)
            if demand >= equal:
                return equal
            left -= demand
        return demands[-1]

    def _ended(self, asked: int) -> None:
        if asked != self._shared:
            return
        self._settle()
        none = _ROUNDING * self._clock.now
        over = [job for job in self._jobs if job.left <= _DONE * max(1.0, job.work) + none]
        for job in over:
            del self._jobs[job]
        self._share()
        for job in over:
            job.done()
