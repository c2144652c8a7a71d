"""What scalerl-fit says of the points held out, or of twice the compute: by all laws, with a calibration."""

from typing import Any

import numpy as np

from scalerl_jax.scaling.average import average_forecast
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
    compute = later if later.size else np.array([2 * one.reached])
    low, high = forecast.band(compute, level=LEVEL)
    found = {
        "compute": float(compute[-1]),
        "score": float(forecast.predict(compute)[-1]),
        "interval_90": (float(low[-1]), float(high[-1])),
        "weights": forecast.law_weights,
    }
    if later.size:
        found["held_out_within_90"] = int(np.sum((low <= measured) & (measured <= high)))
    return found


def sentence(one: Run, found: dict[str, Any]) -> str:
    low, high = found["interval_90"]
    said = f"by all laws an evaluation at {short_number(found['compute'])} gives {found['score']:.3f}"
    said = f"{one.name}: {said} ({LEVEL:.0%}: {low:.3f} to {high:.3f})"
    if "held_out_within_90" not in found:
        return f"{said}, twice the compute."
    return f"{said}; {found['held_out_within_90']} of the {int(one.held.sum())} held out lie in such bands."
