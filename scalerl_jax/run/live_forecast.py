"""The live forecast of a run: after each evaluation, the curve so far and the expected score at the planned end.

The fit runs on its own thread, in float64 on the CPU, and the trainer never waits for it: an evaluation that comes
during a fit is fitted next; if several come, the latest. A finished fit goes into the next row of metrics. A fit that
fails is reported once, and training continues.

Compute is typical device-hours (scaling/units.py), which do not depend on how busy the machine is; the cost of points
on that axis is reported in actual device-hours, by the average of the run so far. The planned end is the last update.
Its forecast is logged when it is first known, when the advice to continue or to stop changes, and every tenth of the
run.
"""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from scalerl_jax.run.jsonl import column, environments_of, evaluation_counts, hours_rate
from scalerl_jax.scaling import fit_sigmoid
from scalerl_jax.scaling.average import average_forecast, default_calibration
from scalerl_jax.scaling.backtest import LEVEL, of_asymptote, outlook
from scalerl_jax.scaling.readers import RUN_FOLDER_X
from scalerl_jax.scaling.units import axis_name

LEAST_POINTS = 5  # evaluations above compute 0
_REPORT_EVERY = 0.1  # of the run

Row = Mapping[str, Any]


class LiveForecast:
    """A context manager; `log` writes a line of the log. All methods are for the trainer's thread."""

    def __init__(self, *, updates: int, log: Callable[[str], None]):
        self._updates, self._log = updates, log
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forecast")
        self._asked: list[Future[tuple[dict[str, Any], list[str]]]] = []
        self._logged: set[str] = set()
        self._last: tuple[int, bool] | None = None  # step and advice of the outlook that was logged last

    def evaluated(self, rows: Sequence[Row]) -> None:
        """Takes all rows of evals.jsonl so far; does nothing before there are enough, or at the run's end."""
        if sum(row["step"] > 0 for row in rows) < LEAST_POINTS or rows[-1]["step"] >= self._updates:
            return
        if len(self._asked) > 1 and self._asked[-1].cancel():  # it has not begun
            self._asked.pop()
        try:
            self._asked.append(self._thread.submit(forecasts, rows, updates=self._updates))
        except RuntimeError as error:  # no further thread can be started
            self._log_once(error)

    def collect(self) -> dict[str, Any]:
        """A row's `forecast`, and `forecasts` of a mixture's environments, if a fit has finished since the last
        call."""
        if not self._asked or not self._asked[0].done():
            return {}
        done = self._asked.pop(0)
        error = done.exception()
        if error is None:
            found, lines = done.result()
            if lines:
                self._log_if_due(found["forecast"], lines)
            return found
        self._log_once(error)
        return {}

    def __enter__(self) -> "LiveForecast":
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for a running fit: seconds at most."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _log_if_due(self, found: Mapping[str, float], lines: Sequence[str]) -> None:
        step, goes_on = int(found["step"]), bool(found["go_on"])
        if self._last is not None:
            soon = step - self._last[0] < _REPORT_EVERY * self._updates
            if soon and self._last[1] == goes_on:
                return
        self._last = (step, goes_on)
        for line in lines:
            self._log(line)

    def _log_once(self, error: BaseException) -> None:
        why = " ".join(str(error).split()) or type(error).__name__
        kind = re.sub(r"[\d.]+", "", why)  # the same message with other numbers is the same failure
        if kind not in self._logged:
            self._logged.add(kind)
            self._log(f"no forecast: {why}")


def forecasts(rows: Sequence[Row], *, updates: int) -> tuple[dict[str, Any], list[str]]:
    """What LiveForecast.collect returns, and the lines on the whole run; parts without a curve yet are left out. Raises
    ValueError if none has one."""
    found: dict[str, Any] = {}
    lines: list[str] = []
    for name, part in environments_of(rows).items():
        with contextlib.suppress(ValueError):
            found.setdefault("forecasts", {})[name] = forecast_of_end(part, updates=updates)[0]
    try:
        found["forecast"], lines = forecast_of_end(rows, updates=updates)
    except ValueError:
        if not found:
            raise
    return found, lines


def forecast_of_end(rows: Sequence[Row], *, updates: int) -> tuple[dict[str, float], list[str]]:
    """The fit of a run's evaluations and the forecast of its end after `updates`: as numbers for a row of metrics, and
    in words.

    Compute is in typical device-hours. _low and _high are the fit's 95 % interval for A, and 90 % intervals of the
    averaged forecast for the rest. Raises ValueError if no curve can be fitted.
    """
    compute, rate = column(rows, RUN_FOLDER_X), hours_rate(rows)
    steps = np.array([row["step"] for row in rows])
    fit = fit_sigmoid(compute, [row["pass_rate"] for row in rows], counts=evaluation_counts(rows))
    if not fit.rises:
        raise ValueError(fit.verdict)
    each = float(np.median(np.diff(compute) / np.diff(steps)))
    end = float(compute[-1] + each * (updates - steps[-1]))
    ahead = average_forecast(fit.state.points, default_calibration())
    found = outlook(ahead, end)
    spacing = float(np.median(np.diff(compute)))
    low, _ = ahead.band(compute[-1:] + spacing, level=LEVEL)  # of the next evaluation
    lowest, highest = fit.intervals["asymptote"]
    more, place = {}, ""
    if rate is not None:
        more["end_device_hours"] = rate * end
    if np.isfinite(found.pays_until):
        step = float(steps[-1] + (found.pays_until - compute[-1]) / each)
        more |= {"pays_until": found.pays_until, "pays_until_step": step}
        place = f"about update {step:.0f}"
    row = {
        "step": int(steps[-1]),
        "asymptote": fit.asymptote,
        "asymptote_low": lowest,
        "asymptote_high": highest,
        "exponent": fit.exponent,
        "midpoint": fit.midpoint,
        "identified": int(fit.identified),
        "next_low": float(low[0]),
        "end_compute": end,
        "end_score": found.score.value,
        "end_low": found.score.low,
        "end_high": found.score.high,
        "gain": found.gain.value,
        "gain_low": found.gain.low,
        "gain_high": found.gain.high,
        "go_on": int(found.goes_on),
        **more,
        **{f"weight_{name}": weight for name, weight in ahead.law_weights.items()},
    }
    sentence = found.sentence(f"at update {row['step']}", axis_name(RUN_FOLDER_X), place=place, rate=rate)
    return row, [sentence, of_asymptote(fit, rate)]
