"""Bootstrap: the fit repeated on resampled data.

The kind of resampling depends on the request and the data:

fixed prompts  (default) the score of these prompts, resampled: each evaluation varies by its own sampling noise,
               from its counts (points.py). The interval is for these prompts.
population     one set of prompts, drawn with replacement and used for all evaluations of the resample, the one at
               compute 0 included (a set per evaluation would count the difference between prompts as noise of each
               point). The interval is for the population of prompts. Needs the passes by prompt.
residuals      where there are no counts: the residuals of the fit, drawn with replacement around the curve, scaled up
               for the parameters fitted.
runs           with more than one run, whole runs are drawn too, and the spread is scaled up by sqrt(k / (k - 1)) for
               k runs, since so few draws of so few runs vary too little.
"""

import jax
import numpy as np

from scalerl_jax.scaling import least_squares
from scalerl_jax.scaling.law import double_precision
from scalerl_jax.scaling.least_squares import Data
from scalerl_jax.scaling.points import Points

_DRAWN = ("reward", "weight", "initial")  # fields of Data with a leading axis of resamples
_NUMBERS_AT_ONCE = 4_000_000  # resamples x points
_INITIAL_DRAWS = 64  # most rows at compute 0 that are drawn one by one; more are approximated

_refit = jax.jit(
    jax.vmap(least_squares.search_from_best, in_axes=(None, Data(None, 0, 0, 0, None), None, None)),
)


def bootstrap(
    points: Points, data: Data, cells, estimate, *, count: int, seed: int, population: bool = False
) -> np.ndarray:
    """Refits `count` resamples: [count, 4] A, B, C_mid, R0, in float64.

    data, cells: of the point estimate; estimate: A, B, C_mid, R0. Raises ValueError if population is requested for
    points without passes by prompt.
    """
    rng = np.random.default_rng(seed)
    reward, initial = draw_scores(points, estimate, rng, count, population)
    weight = np.broadcast_to(points.trials_weight, reward.shape)
    runs = np.unique(points.run)
    if len(runs) > 1:
        drawn = rng.multinomial(len(runs), np.full(len(runs), 1 / len(runs)), size=count)  # [count, runs]
        weight = weight * drawn[:, np.searchsorted(runs, points.run)]
    pad = [(0, 0), (0, len(data.log_compute) - len(points.compute))]
    resampled = data._replace(reward=np.pad(reward, pad), weight=np.pad(weight, pad), initial=initial)
    with double_precision():
        start = np.log(np.asarray(estimate[1:3]))
        # Batches whose curves at all points stay far below a gigabyte.
        at_once = max(1, min(count, _NUMBERS_AT_ONCE // resampled.reward.shape[1]))
        parts = []
        for begin in range(0, count, at_once):
            chosen = np.arange(begin, begin + at_once) % count  # the last batch is padded, so that one size is compiled
            part = resampled._replace(**{name: getattr(resampled, name)[chosen] for name in _DRAWN})
            parts.append(jax.device_get(_refit(cells, part, least_squares.free(), start)))
        found = jax.tree.map(lambda *fields: np.concatenate(fields)[:count], *parts)
    with np.errstate(over="ignore"):
        samples = np.column_stack([found.asymptote, np.exp(found.shape), found.initial_reward])
    if len(runs) > 1:
        inflate = np.sqrt(len(runs) / (len(runs) - 1))
        logs = np.array([False, True, True, False])  # B and C_mid vary by factors
        centre = np.where(logs, np.log(estimate), estimate)
        spread = np.where(logs, np.log(samples), samples) - centre
        moved = centre + inflate * spread
        samples = np.where(logs, np.exp(moved), np.clip(moved, 0.0, 1.0))
    return samples


def draw_scores(points: Points, estimate, rng, count: int, population: bool) -> tuple[np.ndarray, np.ndarray]:
    """Scores of the points, [count, N], and of R0, [count]."""
    measured = points.initial_mode != "exact" and points.initial_rows > 0
    initial = np.full(count, points.initial)
    if population:
        if points.counts is None or points.counts.passes.shape[1] == 1:
            raise ValueError("resamples of the prompts need the passes of every prompt in every evaluation")
        prompts = points.counts.passes.shape[1]
        share = rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=count) * 1.0  # [count, prompts]
        reward = _weighted_score(points.counts, share)
        if measured:
            initial = _weighted_score(points.initial_counts, share).mean(axis=1)
        return reward, initial
    if points.counts is not None:
        # By the central limit theorem: a score is a mean over thousands of completions.
        reward = points.reward + np.sqrt(points.variance) * rng.standard_normal((count, len(points.reward)))
        if measured:
            initial = initial + np.sqrt(points.initial_variance) * rng.standard_normal(count)
        return np.clip(reward, 0.0, 1.0), np.clip(initial, 0.0, 1.0)
    asymptote, exponent, midpoint, start = estimate
    curve = start + (asymptote - start) / (1 + (midpoint / points.compute) ** exponent)
    spread = np.sqrt(points.variance)  # for a mean of n rows: 1 / sqrt(n) of a row's
    residual = (points.reward - curve) / spread
    freedom = points.degrees if points.binned is None else points.degrees - points.rows.sum() + len(residual)
    residual = (residual - residual.mean()) * np.sqrt(len(residual) / max(freedom, 1.0))
    reward = curve + spread * rng.choice(residual, size=(count, len(residual)))
    if measured:
        drawn = min(points.initial_rows, _INITIAL_DRAWS)
        moved = rng.choice(residual, size=(count, drawn)).mean(axis=1)
        initial = initial + moved * np.sqrt(drawn / points.initial_rows)
    return reward, np.clip(initial, 0.0, 1.0)


def _weighted_score(counts, share: np.ndarray) -> np.ndarray:
    """[count, N] scores with prompts weighted by share [count, prompts]."""
    asked = (counts.trials > 0).astype(np.float64)
    rate = np.where(counts.trials > 0, counts.passes / np.maximum(counts.trials, 1), 0.0)
    return (share @ rate.T) / np.maximum(share @ asked.T, 1e-9)
