"""What scalerl-fit says of the points held out, or of twice the compute: by all laws, with a calibration."""

from typing import Any

import numpy as np

from scalerl_jax.scaling.average import average_forecast
from scalerl_jax.scaling.binning import MOST_POINTS, make_bins
from scalerl_jax.scaling.calibration import Calibration
from scalerl_jax.scaling.fit import Run
from scalerl_jax.scaling.units import short_number

LEVEL = 0.9


def foretold(one: Run, calibration: Calibration) -> dict[str, Any]:
    """Of the run's last point held out, or of twice the compute, in the fit's units. Raises ValueError where the points
    tell nothing of their noise."""
    forecast = average_forecast(one.points, calibration)
    order = np.argsort(one.compute[one.held], kind="stable")
    later, measured = one.compute[one.held][order], one.reward[one.held][order]
    rows, end = np.ones(len(later)), later[-1] if later.size else 2 * one.reached
    if len(later) > MOST_POINTS:
        bins = make_bins(later, np.zeros(len(later), int))
        later, measured, rows = bins.sums(later) / bins.rows, bins.sums(measured) / bins.rows, bins.rows
    places, of = np.append(later, end), np.append(rows, 1)
    low, high = forecast.band(places, level=LEVEL, rows=of)
    found = {
        "compute": float(end),
        "score": float(forecast.predict(end)[0]),
        "interval_90": (float(low[-1]), float(high[-1])),
        "weights": forecast.law_weights,
    }
    if later.size:
        within = (low[:-1] <= measured) & (measured <= high[:-1])
        found |= {"held_out_within_90": int(within.sum()), "held_out_points": len(later)}
    return found


def sentence(one: Run, found: dict[str, Any]) -> str:
    low, high = found["interval_90"]
    said = f"by all laws an evaluation at {short_number(found['compute'])} gives {found['score']:.3f}"
    said = f"{one.name}: {said} ({LEVEL:.0%}: {low:.3f} to {high:.3f})"
    if "held_out_within_90" not in found:
        return f"{said}, twice the compute."
    points, rows = found["held_out_points"], int(one.held.sum())
    held_out = f"{rows} held out" if points == rows else f"{points} bins of those held out"
    return f"{said}; {found['held_out_within_90']} of the {held_out} lie in such bands."
