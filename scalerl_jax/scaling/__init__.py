"""Scaling laws: from a run's evaluations to forecasts. Needs numpy, scipy and jax; plots need matplotlib.

readers.py        reads runs from tables: tables.py (files), tfevents.py, cells.py (numbers), repeats.py
units.py          units of compute, and the scale of a score
law.py            the sigmoid, the power law for comparison, the straightened form; five laws, and draws of them
points.py         checks the evaluations, separates R0 and the noise, and bins very many of them
paper_grid.py     the paper's fit, cell by cell
least_squares.py  the fit over the whole plane of shapes
profile.py        intervals and bands by profile likelihood
resample.py       bootstrap
family.py         A's interval over all laws that fit the points, and whether any of them does
trend.py          whether a run rises at all
identify.py       whether the points identify A, and what compute would
fit.py            fit_sigmoid, which combines all of these
curve_draws.py    draws of curves from the posterior
average.py        their average, with a discrepancy for each
calibrate.py      fits its calibration, which calibration.json holds; judged.py: how often forecasts hold
backtest.py       the forecast made at half time against the outcome, the outlook, and how forecasts are worded
forecast.py       the gain that more compute will bring a run
compare.py        which of several runs ends higher, and which gets there faster
decide.py         the next experiment, by curves drawn from the posterior
plot.py           plots of fits and forecasts; compare_plot.py: of a comparison
commands/         scalerl-fit, scalerl-compare, scalerl-calibrate; reading.py: their input
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalerl_jax.scaling.fit import SigmoidFit as SigmoidFit
    from scalerl_jax.scaling.fit import fit_sigmoid as fit_sigmoid
    from scalerl_jax.scaling.law import compute_to_reach as compute_to_reach
    from scalerl_jax.scaling.law import power_law as power_law
    from scalerl_jax.scaling.law import sigmoid_law as sigmoid_law
    from scalerl_jax.scaling.law import straighten as straighten

_HOMES = {
    "SigmoidFit": "fit",
    "compute_to_reach": "law",
    "fit_sigmoid": "fit",
    "power_law": "law",
    "sigmoid_law": "law",
    "straighten": "law",
}


def __getattr__(name: str) -> Any:
    """Imports lazily, so that reading files does not import jax, which takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
