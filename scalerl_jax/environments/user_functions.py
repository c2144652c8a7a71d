"""Calls a user's score function within a time limit and converts its result to a Score.

    bool             reward 1 or -1; also the value of `correct`
    number           the reward; correct if at least config.environment.correct_at
    Score            returned unchanged
    dict             fields of a Score: {"reward", "correct", "metrics", "answer", "why"}; only reward is required

Anything else, a number that is not finite, or an exception makes the completion wrong: ScoreFailed names the function
and its line. A coroutine is awaited, on one event loop per process.
"""

import asyncio
import contextlib
import dataclasses
import inspect
import math
import numbers
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from scalerl_jax.environments import user_code
from scalerl_jax.environments.base import Score, ScoreFailed, ScorerError, reaches

CLOSING_SECONDS = 1.0  # by clock, for what an interrupted coroutine still does
AGAIN_SECONDS = 0.1  # between two interruptions, in case a bare `except:` swallows one
SIGNAL = signal.SIGUSR2  # SIGALRM is the function's own: most published rewards with a limit of time use it
_FIELDS = tuple(field.name for field in dataclasses.fields(Score) if field.name not in ("failed", "excluded", "turns"))


class TookTooLong(BaseException):
    """Not an Exception: the function may catch those."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises TookTooLong after `seconds` of wall-clock time. No limit outside the main thread: it gets no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    armed, over, this_thread = True, threading.Event(), threading.get_ident()

    def interrupt(*_: object) -> None:
        if armed:
            raise TookTooLong

    def watch() -> None:
        pause = seconds
        while not over.wait(pause):
            signal.pthread_kill(this_thread, SIGNAL)
            pause = AGAIN_SECONDS

    before, alarm = signal.signal(SIGNAL, interrupt), signal.getsignal(signal.SIGALRM)
    watching = threading.Thread(target=watch, name="time limit", daemon=True)
    watching.start()
    try:
        yield
    finally:
        armed = False
        over.set()
        watching.join()
        signal.setitimer(signal.ITIMER_REAL, 0)  # a timer left running by the function would end this process
        signal.signal(SIGNAL, before)
        signal.signal(signal.SIGALRM, alarm)


class UserFunction:
    """A user's score function.

    Args:
        setting: the config setting that names it, "config.environment.reward=my_rewards.py:reward".
        name: its name in metrics.
        seconds: wall-clock limit of a call (config.environment.reward_seconds).
    """

    def __init__(self, function: Callable, *, setting: str, name: str, seconds: float, correct_at: float):
        self._function, self._setting, self._name = function, setting, name
        self._seconds, self._correct_at = seconds, correct_at
        self._file = user_code.file_of(function)
        self._runner: asyncio.Runner | None = None

    def score(self, *arguments: Any, **keywords: Any) -> Score:
        """Calls the function. Raises ScoreFailed, and passes on a ScorerError that the function raises."""
        try:
            with within(self._seconds):
                value = self._function(*arguments, **keywords)
                if inspect.isawaitable(value):
                    value = self._awaited(value)
        except TookTooLong:
            self._drop_loop()
            raise self.failed(f"took longer than config.environment.reward_seconds={self._seconds:g}", "time") from None
        except ScorerError:
            raise
        except (Exception, SystemExit) as error:
            raise self.failed(
                f"failed: {user_code.error_line(error, file=self._file)}", type(error).__name__
            ) from error
        except BaseException:  # its CPU time ran out
            self._drop_loop()
            raise
        try:
            return to_score(value, correct_at=self._correct_at)
        except (TypeError, ValueError) as error:
            raise self.failed(f"returned what is no score: {error}", "value") from error

    def failed(self, what: str, kind: str) -> ScoreFailed:
        return ScoreFailed(
            f"{self._setting}: {what}; the completion counts as wrong",
            kind=f"{self._setting} {kind}",
            metrics={f"rewards/{self._name}/errors": 1.0},
        )

    def _awaited(self, value: Any) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(awaited(value))

    def _drop_loop(self) -> None:
        """Drops the event loop, whose state after an interruption is unknown: the next coroutine gets a new one."""
        runner, self._runner = self._runner, None
        if runner is not None:
            with contextlib.suppress(TookTooLong), within(CLOSING_SECONDS):
                runner.close()


async def awaited(value: Awaitable[Any]) -> Any:
    """An awaitable as the coroutine that an event loop needs."""
    return await value


def to_score(value: Any, *, correct_at: float) -> Score:
    """Converts a function's result. Raises TypeError or ValueError, one line, if it is not a score."""
    if isinstance(value, Score):
        return _checked(value)
    if isinstance(value, Mapping):
        unknown = [str(key) for key in value if key not in _FIELDS]
        if unknown or "reward" not in value:
            raise ValueError(
                f"a dict with {', '.join(map(str, value)) or 'nothing'}; its keys are {', '.join(_FIELDS)}"
            )
        plain = to_score(value["reward"], correct_at=correct_at)
        rest = {key: given for key, given in value.items() if key != "reward"}
        correct = rest.pop("correct", plain.correct)
        if type(correct).__name__ not in ("bool", "bool_"):
            raise TypeError(f"'correct' is {correct!r}, not true or false")
        return _checked(dataclasses.replace(plain, correct=bool(correct), **rest))
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # an array of one number
        value = value.item()
    if isinstance(value, bool):
        return Score(1.0 if value else -1.0, value)
    if not isinstance(value, numbers.Real):
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise TypeError(f"{shown} ({type(value).__name__}), not a number, a bool, a Score or a dict of its fields")
    try:
        reward = float(value)
    except OverflowError:
        raise ValueError("a number too large for a reward") from None
    if not math.isfinite(reward):
        raise ValueError(f"{reward}, not a finite number")
    return Score(reward, reaches(reward, correct_at))


def _checked(score: Score) -> Score:
    """Checks the types of the fields and converts a numeric answer to text. Raises TypeError."""
    answer, metrics = score.answer, score.metrics
    if isinstance(answer, numbers.Real):
        score = dataclasses.replace(score, answer=str(answer))
    elif not isinstance(answer, str | None):
        raise TypeError(f"'answer' is {type(answer).__name__}, not a text")
    if not isinstance(score.why, str):
        raise TypeError(f"'why' is {type(score.why).__name__}, not a text")
    if not isinstance(metrics, Mapping):
        raise TypeError(f"'metrics' is {type(metrics).__name__}, not a dict")
    for name, value in metrics.items():
        try:
            is_number = math.isfinite(float(value))
        except (TypeError, ValueError):
            is_number = False
        if not is_number:
            raise TypeError(f"metric {str(name)[:40]!r} is {str(value)[:40]!r}, not a finite number")
    return score
