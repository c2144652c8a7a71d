"""Where a run is heading, computed beside it: after each evaluation the curve so far, and its score at the planned end.

The fit runs on one thread of its own, in float64 on the CPU, and the trainer never waits for it: an evaluation that
comes while a fit is still running is fitted next, and if several come, the latest. What is done is taken into the next
row of metrics. A fit that cannot be made is said once, and training goes on.

The planned end is the last update, at the compute that updates have cost so far (the median between evaluations).
"""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from scalerl_jax.run.jsonl import environments_of, evaluation_counts
from scalerl_jax.scaling import SigmoidFit, fit_sigmoid

LEAST_POINTS = 5  # evaluations above compute 0
_LEVEL = 0.95

Row = Mapping[str, Any]


class LiveForecast:
    """A context manager; `say` gets a line where no forecast can be made. All methods are for the trainer's thread."""

    def __init__(self, *, updates: int, say: Callable[[str], None]):
        self._updates, self._say = updates, say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forecast")
        self._asked: list[Future[dict[str, Any]]] = []
        self._said: set[str] = set()

    def evaluated(self, rows: Sequence[Row]) -> None:
        """All rows of evals.jsonl so far; nothing is done before there are enough, or at the run's end."""
        if sum(row["device_hours"] > 0 for row in rows) < LEAST_POINTS or rows[-1]["step"] >= self._updates:
            return
        if len(self._asked) > 1 and self._asked[-1].cancel():  # it has not begun
            self._asked.pop()
        try:
            self._asked.append(self._thread.submit(forecasts, rows, updates=self._updates))
        except RuntimeError as error:  # the machine has no room for one more thread
            self._say_once(error)

    def take(self) -> dict[str, Any]:
        """A row's `forecast`, and `forecasts` of a mixture's environments, if any was finished since the last call."""
        if not self._asked or not self._asked[0].done():
            return {}
        done = self._asked.pop(0)
        error = done.exception()
        if error is None:
            return done.result()
        self._say_once(error)
        return {}

    def __enter__(self) -> "LiveForecast":
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for a fit that is running: seconds at most."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _say_once(self, error: BaseException) -> None:
        why = " ".join(str(error).split()) or type(error).__name__
        kind = re.sub(r"[\d.]+", "", why)  # with other figures it is the same thing to say
        if kind not in self._said:
            self._said.add(kind)
            self._say(f"no forecast: {why}")


def forecasts(rows: Sequence[Row], *, updates: int) -> dict[str, Any]:
    """As LiveForecast.take gives them; what no curve can be fitted of yet is left out. Raises ValueError if all is."""
    found: dict[str, Any] = {}
    for name, part in environments_of(rows).items():
        with contextlib.suppress(ValueError):
            found.setdefault("forecasts", {})[name] = forecast_of_end(part, updates=updates)
    try:
        found["forecast"] = forecast_of_end(rows, updates=updates)
    except ValueError:
        if not found:
            raise
    return found


def forecast_of_end(rows: Sequence[Row], *, updates: int) -> dict[str, float]:
    """The fit of a run's evaluations and its score after `updates`, as numbers for a row of metrics.

    Compute is in device-hours; _low and _high are 95 % intervals of the curve. Raises ValueError where no curve can be
    fitted.
    """
    compute = np.array([row["device_hours"] for row in rows])
    steps = np.array([row["step"] for row in rows])
    fit = fit_sigmoid(compute, [row["pass_rate"] for row in rows], counts=evaluation_counts(rows))
    if not fit.rises:
        raise ValueError(fit.verdict)
    each = float(np.median(np.diff(compute) / np.diff(steps)))
    end = float(compute[-1] + each * (updates - steps[-1]))
    low, high = fit.band(np.array([end]), level=_LEVEL)
    lowest, highest = fit.intervals["asymptote"]
    return {
        "step": int(steps[-1]),
        "asymptote": fit.asymptote,
        "asymptote_low": lowest,
        "asymptote_high": highest,
        "exponent": fit.exponent,
        "midpoint": fit.midpoint,
        "identified": int(fit.identified),
        "next_low": _next_low(fit, compute),
        "end_compute": end,
        "end_score": float(fit.predict(end)),
        "end_low": float(low[0]),
        "end_high": float(high[0]),
    }


def _next_low(fit: SigmoidFit, compute: np.ndarray) -> float:
    """The lower end of the curve's interval where the next evaluation is to be expected."""
    return float(fit.band(compute[-1:] + np.median(np.diff(compute)), level=_LEVEL)[0][0])
