"""Cores that jobs share: against a thousandth of a second at a time, and where it can be said by hand."""

import math

import numpy as np
import pytest

from scalerl_jax.planning.twin.clock import Clock, Cores


def ends(cores: float, jobs: list[tuple[float, float, float]], *, used: float = 0.0) -> list[float]:
    """When each of the jobs (begins at, work, cores) ends."""
    clock, found = Clock(), [math.nan] * len(jobs)
    pool = Cores(clock, cores, used=used)

    def begin(i: int) -> None:
        def done() -> None:
            found[i] = clock.now

        pool.start(jobs[i][1], jobs[i][2], done)

    for i, (at, _, _) in enumerate(jobs):
        clock.at(at, lambda i=i: begin(i))
    while clock.step():
        pass
    return found


def shares(demands: list[float], count: float) -> list[float]:
    """Max-min fair, by filling a little at a time: everybody who wants more gets the same."""
    got = [0.0] * len(demands)
    for _ in range(20_000):
        wanting = [i for i, demand in enumerate(demands) if got[i] < demand - 1e-12]
        left = count - sum(got)
        if not wanting or left <= 1e-12:
            break
        for i in wanting:
            got[i] += min(demands[i] - got[i], left / len(wanting))
    return got


@pytest.mark.parametrize("seed", range(5))
def test_it_is_what_small_steps_of_a_fair_scheduler_give(seed):
    random = np.random.default_rng(seed)
    jobs = [(random.uniform(0, 2), random.uniform(0.1, 2), random.uniform(0.2, 2)) for _ in range(6)]
    left, found, step = [work for _, work, _ in jobs], [0.0] * len(jobs), 1e-3
    for tick in range(40_000):
        now = tick * step
        active = [i for i, (at, _, _) in enumerate(jobs) if at <= now and left[i] > 0]
        for i, share in zip(active, shares([jobs[i][2] for i in active], 2.0)):
            left[i] -= step * share / jobs[i][2]
            found[i] = now + step
    assert ends(2.0, jobs) == pytest.approx(found, abs=0.02)


def test_alone_together_and_beside_others():
    assert ends(math.inf, [(0, 3, 1), (0, 2, 4)]) == [3, 2]  # hardware of one's own
    assert ends(2, [(0, 3, 1), (1, 2, 1)]) == [3, 3]  # both fit
    assert ends(1, [(0, 3, 1), (0, 1, 1)]) == [4, 2]  # half each, then alone
    assert ends(2, [(0, 1, 2), (0, 1, 0.5)]) == pytest.approx([1.25, 1.0])  # who wants half a core gets it
    assert ends(2, [(0, 1, 2)], used=0.5) == [2]  # half of the cores are not there
    assert ends(2, [(0, 1, 1)], used=0.5) == [1]


def test_a_job_that_is_shortened_ends_sooner_and_the_others_gain():
    clock = Clock()
    pool, found = Cores(clock, 1.0), {}
    long = pool.start(10, 1.0, lambda: found.setdefault("long", clock.now))
    pool.start(3, 1.0, lambda: found.setdefault("other", clock.now))
    clock.at(2, lambda: pool.shorten(long, 2.0))  # one of them is done by then
    while clock.step():
        pass
    assert found == {"long": 4.0, "other": 5.0}


def test_there_must_be_cores():
    for count, used in ((0, 0.0), (-1, 0.0), (2, 1.0)):
        with pytest.raises(ValueError, match="there must be some left"):
            Cores(Clock(), count, used=used)
