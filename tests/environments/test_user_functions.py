"""What a function of the user's may give, and what becomes of the rest."""

import asyncio
import fractions
import math
import signal
import threading
import time

import numpy as np
import pytest

from scalerl_jax.environments import Score
from scalerl_jax.environments.base import ScoreFailed
from scalerl_jax.environments.user_functions import UserFunction, to_score


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (True, Score(1.0, True)),
        (np.bool_(False), Score(-1.0, False)),
        (1, Score(1.0, True)),
        (0, Score(0.0, False)),
        (0.7 + 0.2 + 0.1, Score(0.7 + 0.2 + 0.1, True)),  # 0.9999999999999999
        (np.float32(0.5), Score(0.5, False)),
        (np.array(2.0), Score(2.0, True)),
        (fractions.Fraction(1, 2), Score(0.5, False)),
        (Score(3.0, False, {"a": 1.0}), Score(3.0, False, {"a": 1.0})),
        ({"reward": 0.25}, Score(0.25, False)),
        ({"reward": 0.25, "correct": True, "why": "so"}, Score(0.25, True, why="so")),
        ({"reward": True, "metrics": {"a": 1.0}, "answer": "7"}, Score(1.0, True, {"a": 1.0}, "7")),
    ],
)
def test_what_is_a_score(value, score):
    assert to_score(value, correct_at=1.0) == score


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, r"None \(NoneType\)"),
        ("1", r"'1' \(str\)"),
        (math.nan, "nan, not a finite"),
        (-math.inf, "-inf, not a finite"),
        (10**400, "too large"),
        (1j, "complex"),
        ([1.0], "list"),
        (np.ones(2), "ndarray"),
        ({}, "a dict with nothing"),
        ({"score": 1.0}, "a dict with score; its keys are reward,"),
        ({"reward": 1.0, "correct": 1}, "'correct' is 1"),
        ({"reward": "1"}, r"'1' \(str\)"),
    ],
)
def test_what_is_no_score(value, expected):
    with pytest.raises((TypeError, ValueError, OverflowError), match=expected):
        to_score(value, correct_at=1.0)


def of(function, *, seconds=60.0):
    return UserFunction(function, setting="FLAG=f.py:f", name="f", seconds=seconds, correct_at=1.0)


def test_a_bad_value_names_the_function():
    with pytest.raises(ScoreFailed, match=r"^FLAG=f\.py:f: returned what is no score: nan.*counts as wrong$") as caught:
        of(lambda: math.nan).score()
    assert caught.value.metrics == {"rewards/f/errors": 1.0}
    with pytest.raises(ScoreFailed, match="returned what is no score"):
        of(lambda: 10**400).score()


def test_an_exception_names_the_line():
    def divides():
        return 1 / 0

    with pytest.raises(ScoreFailed, match=r"ZeroDivisionError: division by zero \(test_user_functions\.py line \d+\)"):
        of(divides).score()


def test_coroutines_share_one_loop_and_may_fail():
    loops = []

    async def answers(value):
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return value

    function = of(answers)
    assert function.score(1.0) == Score(1.0, True) and function.score(False) == Score(-1.0, False)
    with pytest.raises(ScoreFailed, match="'x'"):
        function.score("x")
    assert function.score(value=1.0).correct
    assert len(set(map(id, loops))) == 1


def sleeps():
    time.sleep(600)


async def awaits():
    await asyncio.sleep(600)


def with_an_alarm():
    """As published rewards with a limit of time have it."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(1000)
    signal.alarm(0)
    time.sleep(600)


@pytest.mark.parametrize("function", [sleeps, awaits, with_an_alarm])
def test_what_takes_too_long_is_ended_and_the_next_call_goes_well(function):
    asked = of(function, seconds=0.2)
    for _ in range(2):
        with pytest.raises(ScoreFailed, match=r"took longer than config\.environment\.reward_seconds=0\.2"):
            asked.score()
    assert of(lambda: True).score().correct


def test_an_alarm_of_its_own_is_its_own():
    def limited():
        def late(*_):
            raise TimeoutError

        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(600)
        except TimeoutError:
            signal.alarm(1000)  # left behind
            return 0.25

    before = signal.getsignal(signal.SIGALRM)
    assert of(limited).score() == Score(0.25, False)
    assert signal.alarm(0) == 0 and signal.getsignal(signal.SIGALRM) is before


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"reward": 1, "metrics": {"length": "long"}}, "metric 'length' is 'long', not a finite number"),
        ({"reward": 1, "metrics": {"length": math.inf}}, "metric 'length' is 'inf', not a finite number"),
        ({"reward": 1, "metrics": [1]}, "'metrics' is list, not a dict"),
        ({"reward": 1, "answer": ["a"]}, "'answer' is list, not a text"),
        ({"reward": 1, "why": 3}, "'why' is int, not a text"),
        (Score(1.0, True, {"length": None}), "metric 'length' is 'None', not a finite number"),
    ],
)
def test_a_field_that_cannot_be_names_the_function(value, expected):
    with pytest.raises(ScoreFailed, match=rf"^FLAG=f\.py:f: returned what is no score: {expected}"):
        of(lambda: value).score()


def test_a_number_may_be_the_answer():
    assert of(lambda: {"reward": 1, "answer": 5}).score().answer == "5"


def test_off_the_main_thread_there_is_no_limit():
    found = []
    thread = threading.Thread(target=lambda: found.append(of(lambda: time.sleep(0.3) or 1.0, seconds=0.1).score()))
    thread.start()
    thread.join()
    assert found == [Score(1.0, True)]
