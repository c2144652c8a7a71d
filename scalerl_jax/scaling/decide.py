"""The next experiment: which run to extend, and by how much, to make the choice between runs safest.

The choice is the run with the highest quantity: its score at a given compute, or A. It is wrong if another run's is
higher by more than the margin. The outcome of an extension is unknown, so it is simulated:

    1. draw curves of every run from the posterior given its points                       (below)
    2. use one drawn curve as the truth; simulate the extension's evaluations, noise included
    3. weigh all drawn curves by how well they fit these evaluations (importance weights); choose; compute the
       probability that the choice is wrong under the weights
    4. average over many truths: the probability of a wrong choice after the extension

It never exceeds the current probability, up to the simulation's own noise. Runs are independent; all candidates share
draws and noise, so that they do not differ by chance. One step ahead only: the gain of further experiments is left out.

Sigmoids are drawn from the posterior with a weak prior, because decisions need averages over curves:

    p(A, B, C_mid, R0 | points)     as in curve_draws.py, the noise's dispersion integrated out
    prior: A uniform on [0, 1]; ln C_mid uniform from a twentieth of the least compute to 50 times the most;
           ln B normal around ln 2 with standard deviation 0.5 (B from 0.75 to 5.3; published fits lie in 1.1 to 5.2)

Printed intervals and bands come from the profile, which needs no prior; an average over likely curves is a poor point
forecast if the points do not bound A, so point forecasts use the fit.

Left out: that runs of other seeds differ; seeds given together only widen the noise.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax.scaling.curve_draws import DrawnCurves
from scalerl_jax.scaling.fit import SEED_MARGIN
from scalerl_jax.scaling.law import double_precision, draw_sigmoids
from scalerl_jax.scaling.points import Points

FRACTIONS = (0.25, 0.5, 0.75, 1.0)  # of the budget
DECIDED = 0.05  # a choice with a lower probability of being wrong needs no experiment
_CONTENDERS = 4  # runs whose extension is simulated: those most often best
_TRUTHS = 128
_STEPS = 32  # simulated evaluations, with noise scaled to the number that the extension will have
_GRID = 384  # values of the quantity
_GAIN_NOISE = 0.005  # smaller differences of probabilities are simulation noise


@dataclasses.dataclass(frozen=True)
class Contender:
    """A run to choose from."""

    name: str
    curves: DrawnCurves
    evaluation_variance: float  # of a new evaluation like those so far
    reached: float  # compute of its last evaluation
    spacing: float  # compute between two evaluations
    seeds: int = 1  # all are extended, so an extension costs this many times


def contender(name: str, points: Points, *, count: int, seed: int) -> Contender:
    """Draws `count` curves of a run. Raises ValueError if the noise cannot be estimated from the points."""
    curves = draw_sigmoids(points, count=count, seed=seed)
    # Within each run: seeds by the clock have their evaluations beside each other's.
    gaps = np.concatenate([np.diff(np.unique(points.compute[points.run == one])) for one in np.unique(points.run)])
    return Contender(
        name,
        curves,
        evaluation_variance=float(np.median(points.variance)) * float(np.median(curves.dispersion)),
        reached=points.most,
        spacing=float(np.median(gaps)) if gaps.size else points.most,
        seeds=len(np.unique(points.run)),
    )


@dataclasses.dataclass(frozen=True)
class Extension:
    """An extension: runs by name, and the compute added to each (all its seeds together)."""

    extra: dict[str, float]
    wrong: float  # probability of a wrong choice afterwards
    regret: float  # expected shortfall of the choice from the best

    @property
    def cost(self) -> float:
        return sum(self.extra.values())


@dataclasses.dataclass(frozen=True)
class Plan:
    at: float | None  # compute at which the score decides; None: A decides
    margin: float
    best: str  # the choice now
    wrong: float  # current probability that another is better by more than the margin
    regret: float
    chances: dict[str, float]  # run -> probability of being the best
    extensions: Sequence[Extension]  # by rising cost
    recommended: Extension | None  # None: the choice is safe enough, or no extension within the budget would help
    reason: str


def plan(
    runs: Sequence[Contender], budget: float, *, at: float | None = None, margin: float = SEED_MARGIN, seed: int = 0
) -> Plan:
    """Plans the next experiment. budget: extra compute to spend, above 0. All runs have equally many drawn curves.

    Raises ValueError where `at` is not a compute above 0 or there are fewer than two runs.
    """
    if len(runs) < 2:
        raise ValueError("a choice needs two runs or more")
    if budget <= 0 or (at is not None and at <= 0):
        raise ValueError(f"budget={budget:g}, at={at}: must be above 0")
    quantity = np.stack([run.curves.asymptote if at is None else run.curves.at([at])[:, 0] for run in runs])  # [K, S]
    truths = min(_TRUTHS, quantity.shape[1] // 4)
    grid = _value_grid(quantity)
    best_counts = np.bincount(np.argmax(quantity, axis=0), minlength=len(runs)) / quantity.shape[1]
    order = [int(k) for k in np.argsort(-best_counts, kind="stable")[:_CONTENDERS]]

    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((len(runs), truths, _STEPS))
    with double_precision():
        sorters = [_sorter(quantity[k, truths:], grid, margin) for k in range(len(runs))]
        uniform = np.full((1, quantity.shape[1] - truths), 1 / (quantity.shape[1] - truths))
        known = [_distribution(uniform, *sorter) for sorter in sorters]  # distribution of each run without extension
        now = jax.device_get(_outcome(*_stack(known, truths), grid))
        extended: dict[tuple[int, float], tuple[jax.Array, jax.Array]] = {}
        extensions = []
        for chosen, fraction in _candidates(order):
            share = fraction * budget / len(chosen)
            for k in chosen:
                if (k, share) not in extended:
                    weights = _weights(runs[k], share / runs[k].seeds, truths, noise[k])
                    extended[k, share] = _distribution(weights, *sorters[k])
            after = [extended[k, share] if k in chosen else known[k] for k in range(len(runs))]
            wrong, regret = jax.device_get(_outcome(*_stack(after, truths), grid))
            extensions.append(Extension({runs[k].name: share for k in chosen}, float(wrong), float(regret)))
    extensions.sort(key=lambda one: one.cost)
    favourite = runs[int(np.argmax(quantity.mean(axis=1)))].name
    recommended, reason = _recommend(float(now[0]), extensions, favourite)
    chances = {run.name: float(chance) for run, chance in zip(runs, best_counts)}
    return Plan(at, margin, favourite, float(now[0]), float(now[1]), chances, extensions, recommended, reason)


def _candidates(order: Sequence[int]):
    """Sets of runs and the share of the budget that a set gets, split evenly."""
    singles = [(k,) for k in order]
    pairs = list(itertools.combinations(order[:3], 2))
    return itertools.product([*singles, *pairs], FRACTIONS)


def _recommend(wrong: float, extensions: Sequence[Extension], favourite: str) -> tuple[Extension | None, str]:
    """The cheapest extension that is nearly as good as the best, and the reason."""
    if wrong <= DECIDED:
        return None, f"decide now for {favourite}: the chance that another is better by more is {wrong:.0%}"
    best = min(one.wrong for one in extensions)
    if wrong - best < _GAIN_NOISE:
        return None, f"nothing within this budget tells more: {favourite} is wrong with chance {wrong:.0%} either way"
    enough = max(best + 0.1 * (wrong - best), best + _GAIN_NOISE)
    chosen = min((one for one in extensions if one.wrong <= enough), key=lambda one: (one.cost, one.wrong))
    names = " and ".join(f"{name} by {extra:.4g}" for name, extra in chosen.extra.items())
    return chosen, f"extend {names}: the chance of a wrong choice falls from {wrong:.0%} to {chosen.wrong:.0%}"


def _value_grid(quantity: np.ndarray) -> np.ndarray:
    """[G] values that cover the range of the quantity."""
    low, high = float(quantity.min()), float(quantity.max())
    pad = max((high - low) / _GRID, 1e-6)
    return np.linspace(low - pad, high + pad, _GRID)


def _weights(run: Contender, extra: float, truths: int, noise: np.ndarray) -> jax.Array:
    """Weights [truths, S - truths] of the curves after the first `truths`, if each of those were the truth and `run`
    were extended."""
    compute = run.reached + extra * np.arange(1, _STEPS + 1) / _STEPS
    evaluations = extra / run.spacing * run.seeds
    variance = run.evaluation_variance * _STEPS / evaluations
    return _importance(run.curves.at(compute), noise[:truths], variance, truths)


@functools.partial(jax.jit, static_argnames="truths")
def _importance(scores, noise, variance, truths: int):
    """Normalised weights [truths, S - truths] from scores [S, P]."""
    seen = scores[:truths] + jnp.sqrt(variance) * noise
    others = scores[truths:]
    squares = jnp.sum(seen**2, axis=1)[:, None] - 2 * seen @ others.T + jnp.sum(others**2, axis=1)
    return jax.nn.softmax(-0.5 * squares / variance, axis=1)


class _Sorter(NamedTuple):
    """Turns weights of curves into a distribution of the quantity on the grid's values."""

    order: np.ndarray  # [S] curves by rising quantity
    below: np.ndarray  # [G] how many are at or below the value
    below_margin: np.ndarray  # [G] at or below the value + margin


def _sorter(quantity: np.ndarray, grid: np.ndarray, margin: float) -> _Sorter:
    order = np.argsort(quantity)
    ordered = quantity[order]
    return _Sorter(order, np.searchsorted(ordered, grid, "right"), np.searchsorted(ordered, grid + margin, "right"))


@jax.jit
def _distribution(weights, order, below, below_margin):
    """Probabilities of being at or below each value, and each value + margin: [truths, G] each."""
    cumulative = jnp.pad(jnp.cumsum(weights[:, order], axis=1), [(0, 0), (1, 0)])
    return cumulative[:, below], cumulative[:, below_margin]


def _stack(runs, truths: int):
    """Stacks the distributions of all runs: [K, truths, G] each."""
    return tuple(
        jnp.stack([jnp.broadcast_to(run[part], (truths, run[part].shape[1])) for run in runs]) for part in (0, 1)
    )


@jax.jit
def _outcome(cdf, cdf_margin, grid):
    """Probability that the safest choice is wrong, and its expected shortfall: means over truths, of [K, truths, G].

    Run k is wrong where the best of the others exceeds it by more than the margin:
    1 - sum over values v of P(k = v) prod over j of P(j <= v + margin).
    """
    mass = jnp.diff(cdf, axis=-1, prepend=0.0)  # [K, truths, G]
    runs = cdf.shape[0]
    others = jnp.stack([jnp.prod(jnp.delete(cdf_margin, k, axis=0), axis=0) for k in range(runs)])
    wrong = 1 - jnp.sum(mass * others, axis=-1)  # [K, truths]
    mean = jnp.sum(mass * grid, axis=-1)
    highest = jnp.sum(jnp.diff(jnp.prod(cdf, axis=0), axis=-1, prepend=0.0) * grid, axis=-1)  # [truths]
    return jnp.mean(jnp.min(wrong, axis=0)), jnp.mean(highest - jnp.max(mean, axis=0))


def plan_document(plan: Plan) -> dict[str, Any]:
    """A plan as scalerl-compare writes it in JSON."""

    def extension(one: Extension | None) -> dict[str, Any] | None:
        if one is None:
            return None
        return {"extra": one.extra, "compute": one.cost, "wrong": one.wrong, "shortfall": one.regret}

    return {
        "by": "asymptote" if plan.at is None else "score",
        "at": plan.at,
        "best_now": plan.best,
        "wrong_now": plan.wrong,
        "shortfall_now": plan.regret,
        "chance_to_be_best": plan.chances,
        "extensions": [extension(one) for one in plan.extensions],
        "recommended": extension(plan.recommended),
        "reason": plan.reason,
    }
