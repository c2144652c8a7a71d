"""From the evaluations of a run to what more compute will buy. Needs numpy, scipy and jax; plots need matplotlib.

law.py            the sigmoid, the power law beside it, the straightened form
points.py         checks the evaluations and sets R0 and the noise apart
noise.py          how far a score can be from the true one
paper_grid.py     the paper's fit, cell by cell
padding.py        sizes that numbers of points are rounded up to
least_squares.py  the fit over the whole plane of shapes
profile.py        intervals and bands by profile likelihood
resample.py       bootstrap
identify.py       whether the points tell A, and what compute would
fit.py            fit_sigmoid: all of these
half_time.py      the forecast made at half time beside the outcome
plot.py           pictures of both
"""

from scalerl_jax.scaling.fit import SigmoidFit, fit_sigmoid
from scalerl_jax.scaling.law import compute_to_reach, power_law, sigmoid_law, straighten

__all__ = ["SigmoidFit", "compute_to_reach", "fit_sigmoid", "power_law", "sigmoid_law", "straighten"]
