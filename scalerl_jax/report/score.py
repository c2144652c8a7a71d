"""The score of a run: its evaluations, the sigmoid fit, and the forecast of the end from the first half of the
compute."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from scalerl_jax.report.log_rows import Row, five_digits, rounded
from scalerl_jax.run.jsonl import column, environments_of, evaluation_counts, hours_rate
from scalerl_jax.scaling import SigmoidFit, fit_sigmoid
from scalerl_jax.scaling.average import AverageForecast, average_forecast, default_calibration
from scalerl_jax.scaling.backtest import LEVEL, Backtest, forecast_at_half, hours, of_asymptote, statement
from scalerl_jax.scaling.forecast import Estimate
from scalerl_jax.scaling.points import read_counts
from scalerl_jax.scaling.readers import RUN_FOLDER_X
from scalerl_jax.scaling.units import axis_name, short_number

AXES = (RUN_FOLDER_X, "device_hours")  # the fit's two choices of x, as the rows name them
MIN_BACKTEST_EVALUATIONS = 8  # with fewer, half of them are too few for a forecast
FEWEST_POINTS = 4  # above compute 0; a curve of three parameters fits any three points
_CURVE_POINTS = 128  # what SigmoidFit.band computes at once
_AHEAD = 2.0  # the curve is drawn up to this multiple of the compute spent
_MOST_TASKS = 12  # curves of parts of a mixture; more cannot be told apart


def backtest(evals: Sequence[Row], axis: str = RUN_FOLDER_X) -> tuple[Backtest | None, str]:
    """The forecast made at half of the compute, or why there is none ("": the run is too short)."""
    if len(evals) < MIN_BACKTEST_EVALUATIONS:
        return None, ""
    try:
        forecast = forecast_at_half(column(evals, axis), [row["pass_rate"] for row in evals], evaluation_counts(evals))
    except ValueError as error:  # the run itself is fine, whatever its curve looks like
        return None, str(error)
    return forecast, ""


def asymptote(evals: Sequence[Row]) -> str:
    """A sentence on A by all evaluations, and on the compute that would determine it. Raises ValueError without a
    fit."""
    compute, reward = column(evals, RUN_FOLDER_X), [row["pass_rate"] for row in evals]
    return of_asymptote(fit_sigmoid(compute, reward, counts=evaluation_counts(evals)), hours_rate(evals))


def score(evals: Sequence[Row]) -> dict[str, Any]:
    """The page's data of the evaluations (N of them, in order) and of each environment of a mixture; every curve on
    both axes."""
    counts = read_counts(evaluation_counts(evals), len(evals)) if evals else None
    columns: dict[str, Any] = {
        name: [row.get(name) for row in evals] for name in ("step", "time", "prompts", "samples", "seconds")
    }
    known = AXES if evals and all("device_hours" in row for row in evals) else ()
    columns["pass_rate"] = rounded(row.get("pass_rate") for row in evals)
    columns |= {axis: rounded(column(evals, axis)) if known else [None] * len(evals) for axis in AXES}
    columns["deviation"] = [] if counts is None else rounded(np.sqrt(counts.variance()))  # with the prompts held fixed
    return {
        "evaluations": columns,
        "environments": {name: score(rows) for name, rows in environments_of(evals).items()},
        "tasks": tasks(evals),
        "curves": {axis: curves(evals, axis) for axis in known},
    }


def tasks(evals: Sequence[Row]) -> list[dict[str, Any]]:
    """The curves of a mixture's parts, the largest first."""
    prompts: dict[str, int] = {}
    for row in evals:
        for name, part in (row.get("tasks") or {}).items():
            prompts[name] = part["prompts"]
    kept = sorted(prompts, key=lambda name: -prompts[name])[:_MOST_TASKS]
    return [
        {
            "name": name,
            "prompts": prompts[name],
            "pass_rate": rounded(((row.get("tasks") or {}).get(name) or {}).get("pass_rate") for row in evals),
            "left_out": len(prompts) - len(kept),
        }
        for name in kept
    ]


def curves(evals: Sequence[Row], axis: str) -> dict[str, Any]:
    """The fits on all evaluations and on the first half of the compute, or why there are none."""
    compute = column(evals, axis)
    reward = np.array([row["pass_rate"] for row in evals], np.float64)
    rate = hours_rate(evals) if axis == RUN_FOLDER_X else None
    out: dict[str, Any] = {}
    above = len(np.unique(compute[compute > 0]))
    if above < FEWEST_POINTS:
        return {"all": {"why": f"{above} evaluations above compute 0, of at least {FEWEST_POINTS} that a curve needs"}}
    try:
        fit = fit_sigmoid(compute, reward, counts=evaluation_counts(evals))
        if fit.rises:
            out["all"] = curve(fit, compute, f"all {fit.points} evaluations above 0")
            out["all"]["sentence"] = sentence(out["all"], fit, axis, rate)
        else:
            out["all"] = {"why": fit.verdict}
    except ValueError as error:
        out["all"] = {"why": str(error)}
    forecast, why = backtest(evals, axis)
    if forecast is not None:
        out["half"] = curve(forecast.fit, compute, "the first half of the compute", forecast.ahead)
        out["half"] |= outcome(forecast, axis)
    elif why:
        out["half"] = {"why": why}
    return out


def curve(fit: SigmoidFit, compute: np.ndarray, what: str, ahead: AverageForecast | None = None) -> dict[str, Any]:
    """A fit as numbers to draw and to report; beyond the fitted points the average of all laws continues it, with its
    band for evaluations. compute: [N] of all evaluations, in the fit's unit. ahead: that average, if it is known
    already."""
    ahead = ahead or average_forecast(fit.state.points, default_calibration())
    most, least = float(compute.max()), float(compute[compute > 0].min())
    x = np.geomspace(least / 2, _AHEAD * most, _CURVE_POINTS)
    x[np.argmin(np.abs(x - most))] = most  # so that the curve and the forecast meet at the last evaluation
    low, high = (np.array(end) for end in fit.band(x, level=LEVEL))
    y = np.array(fit.predict(x))
    later = x > ahead.reached
    low[later], high[later] = ahead.band(x[later], level=LEVEL)
    y[later] = ahead.predict(x[later])
    at_double = float(y[-1])
    # A linear axis begins at 0, where no band is computed.
    x, low, high = (np.concatenate([[start], ends]) for start, ends in ((0.0, x), (low[0], low), (high[0], high)))
    return {
        "what": what,
        "points": fit.points,
        "until": five_digits(float(compute[fit.used].max())),
        **{name: five_digits(value) for name, value in fit.parameters.items()},
        "residual": five_digits(fit.ssr),
        "intervals": {name: rounded(ends) for name, ends in fit.intervals.items()},  # 95 %; None: open
        "identified": fit.identified,
        "fits": not fit.misfit,
        "level": LEVEL,
        "x": rounded(x),
        "y": rounded(np.concatenate([fit.predict([0.0]), y])),
        "low": rounded(low),
        "high": rounded(high),
        "double": rounded([_AHEAD * most, at_double, low[-1], high[-1]]),  # compute, score, its band
    }


def sentence(found: dict[str, Any], fit: SigmoidFit, axis: str, rate: float | None) -> str:
    """The conclusion from all evaluations. found: as `curve` returns it; rate: device-hours per unit of compute, if
    known."""
    end, *score = found["double"]
    seen = f"at {short_number(found['until'])}"
    text = statement(seen, axis_name(axis), Estimate(*score), "at twice the compute")
    return f"{text}{hours(end, rate)}; {of_asymptote(fit, rate)}"


def outcome(forecast: Backtest, axis: str) -> dict[str, Any]:
    """The forecast made at half of the compute, and the measured score."""
    return {
        "forecast": rounded(dataclasses.astuple(forecast.score)),
        "measured": five_digits(forecast.measured),
        "error": five_digits(forecast.error),
        "outcome": forecast.outcome,
        "sentence": f"{forecast.statement(axis_name(axis))}; {forecast.outcome}",
    }
