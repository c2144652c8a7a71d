"""From the evaluations of a run to what more compute will buy. Needs numpy, scipy and jax; plots need matplotlib.

readers.py        runs out of tables: tables.py (files), tfevents.py, cells.py (numbers), repeats.py
units.py          of compute, and the scale of a score
law.py            the sigmoid, the power law beside it, the straightened form
points.py         checks the evaluations, sets R0 and the noise apart, and puts very many together
noise.py          how far a score can be from the true one
paper_grid.py     the paper's fit, cell by cell
least_squares.py  the fit over the whole plane of shapes
profile.py        intervals and bands by profile likelihood
resample.py       bootstrap
family.py         A's interval over all laws that the points allow
trend.py          whether a run rises at all
identify.py       whether the points tell A, and what compute would
fit.py            fit_sigmoid: all of these
misfit.py         whether a law describes the points
laws.py           what a score may do: five laws, and draws of them (curve_draws.py)
average.py        these averaged, with what each may be off by
calibration.py    how far each is to be trusted: read from calibration.json, fitted by calibrate.py, told by judged.py
backtest.py       the forecast made at half time beside the outcome
statement.py      the one form in which forecasts are said
forecast.py       what more compute will buy a run
compare.py        which of several runs ends higher, and which gets there faster
decide.py         the next experiment, by curves drawn from what the points allow
plot.py           pictures: of fits and forecasts; compare_plot.py, compare_json.py: a comparison's
commands/         scalerl-fit, scalerl-compare, scalerl-calibrate; reading.py: what each of them is given
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
    """Files are read without jax, which takes seconds to import."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
