"""Richards' curve with a prior from complete runs: its posterior by brute force, and which half of the prior wins."""

import numpy as np
import pytest
from scipy import stats

from scalerl_jax.scaling import informed, laws
from scalerl_jax.scaling.curve_draws import Posterior
from scalerl_jax.scaling.points import check_points
from scalerl_jax.scaling.shape import Shape

WHOLE = np.linspace(0, 16_000, 33)
COMPUTE = WHOLE[WHOLE <= 8000]
TRIALS = 2000
START = 0.3
AHEAD = np.array([16_000.0])


def curve(shape, midpoint, compute=WHOLE):
    with np.errstate(divide="ignore"):
        rest = np.where(compute > 0, (midpoint / np.maximum(compute, 1e-9)) ** shape.exponent, np.inf)
    return START + (shape.asymptote - START) * (1 + (2**shape.skew - 1) * rest) ** (-1 / shape.skew)


def points_of(shape, midpoint, *, compute=COMPUTE, seed=0):
    passes = np.random.default_rng(seed).binomial(TRIALS, curve(shape, midpoint, compute))
    return check_points(
        compute, passes / TRIALS, initial_reward=START, burn_in=0.0, fit_until=None,
        counts=(passes, np.full(len(passes), TRIALS)), run=None,
    )  # fmt: skip


def kindred(count=40, seed=1):
    """Shapes of runs that all bend about alike."""
    rng = np.random.default_rng(seed)
    return [
        Shape(5.0 * np.exp(0.1 * a), 2.5 * np.exp(0.1 * b), 0.93 + 0.02 * c) for a, b, c in rng.normal(size=(count, 3))
    ]


def width(drawn):
    return float(np.ptp(np.quantile(drawn.at(AHEAD), [0.05, 0.95])))


def by_grid(points, shapes):
    """Quantiles of R(AHEAD): both halves of the prior summed over a grid of shapes, ln C_mid and A; phi integrated out.

    An expected A is normal with sqrt(phi) times the deviation: one more squared residual.
    """
    midpoint = np.linspace(np.log(points.compute.min()) - 3, np.log(points.compute.max()) + 4, 250)
    asymptotes = (np.arange(120) + 0.5) / 120
    weight, heard = 1 / points.variance, points.belief

    def half(exponent, skew, expected):
        """log density and R(AHEAD), each [ln C_mid, A]"""
        at = np.exp(midpoint)[:, None]

        def s(compute):
            return (1 + (2**skew - 1) * (at / compute) ** exponent) ** (-1 / skew)

        rise, ahead = s(points.compute), s(AHEAD)[:, 0]
        off = points.reward - START - (asymptotes[:, None, None] - START) * rise
        squares, degrees = (off**2 @ weight).T, heard + len(points.compute)
        log_prior = -np.log(len(asymptotes))
        if expected is not None:
            squares = squares + ((asymptotes - expected) / informed.DEVIATION) ** 2
            degrees += 1
            within = np.diff(stats.norm(expected, informed.DEVIATION).cdf([0, 1]))[0]
            log_prior -= np.log(informed.DEVIATION * np.sqrt(2 * np.pi) * within)
        # The density of N residuals with phi integrated out, but for what both halves share.
        from scipy.special import gammaln

        density = gammaln(degrees / 2) - degrees / 2 * np.log((heard + squares) / 2) + log_prior
        return density, START + (asymptotes - START) * ahead[:, None]

    parts = []
    exponents, skews = np.exp(np.linspace(np.log(2) - 3, np.log(2) + 3, 31)), np.exp(np.linspace(-2, 2, 17))
    cell = (6 / 30) * (4 / 16)
    for exponent in exponents:
        for skew in skews:
            density, value = half(exponent, skew, None)
            prior = stats.norm(np.log(2), 0.5).logpdf(np.log(exponent)) + stats.norm(0, 0.7).logpdf(np.log(skew))
            parts.append((density + prior + np.log(cell / 2), value))
    for shape in shapes:
        density, value = half(*shape)
        parts.append((density - np.log(2 * len(shapes)), value))
    logs, values = (np.concatenate([part[i].ravel() for part in parts]) for i in (0, 1))
    order = np.argsort(values)
    cumulative = np.cumsum(np.exp(logs - logs.max())[order])
    return np.interp([0.05, 0.25, 0.5, 0.75, 0.95], cumulative / cumulative[-1], values[order])


@pytest.mark.slow
@pytest.mark.parametrize("truth", [Shape(5.0, 2.5, 0.93), Shape(2.0, 1.0, 0.61)], ids=["as the others", "another"])
def test_draws_are_the_posterior_of_both_halves(truth):
    points = points_of(truth, 5000.0)
    shapes = kindred(6)
    drawn = laws.informed(points, count=8000, seed=0, shapes=shapes)
    found = np.quantile(drawn.at(AHEAD), [0.05, 0.25, 0.5, 0.75, 0.95])
    np.testing.assert_allclose(found, by_grid(points, shapes), atol=0.02)


def test_a_run_that_bends_as_others_did_is_foretold_as_sharply():
    truth = Shape(5.0, 2.5, 0.93)
    errors, widths = [], []
    for seed in range(4):
        points = points_of(truth, 8500.0, seed=seed)
        plain = laws.richards(points, count=1000, seed=0)
        drawn = laws.informed(points, count=1000, seed=0, shapes=kindred())
        errors.append(np.median(drawn.at(AHEAD)) - curve(truth, 8500.0)[-1])
        widths.append(width(drawn) / width(plain))
    assert np.abs(errors).max() < 0.03
    assert np.median(widths) < 0.5 and max(widths) < 0.8


def test_a_run_of_another_kind_is_foretold_as_without():
    points = points_of(Shape(2.0, 1.0, 0.61), 2400.0)
    plain, drawn = (laws.informed(points, count=4000, seed=0, shapes=shapes) for shapes in ((), kindred()))
    tails = [0.05, 0.5, 0.95]
    np.testing.assert_allclose(np.quantile(drawn.at(AHEAD), tails), np.quantile(plain.at(AHEAD), tails), atol=0.01)


def test_without_shapes_it_is_richards():
    points = points_of(Shape(2.0, 1.0, 0.61), 2400.0)
    found, plain = (law(points, count=300, seed=5).at(AHEAD) for law in (laws.informed, laws.richards))
    np.testing.assert_array_equal(found, plain)


def test_shapes_that_are_spread_as_the_weak_prior_say_nothing():
    """Its marginal likelihood is then that of the weak half: both are normalized alike."""
    rng = np.random.default_rng(0)
    count = 1500
    shapes = np.stack([
        np.exp(rng.normal(np.log(2), 0.5, count)), np.exp(np.clip(rng.normal(0, 0.7, count), -2, 2)),
        rng.uniform(size=count),
    ], axis=-1)  # fmt: skip
    for truth, midpoint in ((Shape(2.0, 1.0, 0.61), 2400.0), (Shape(5.0, 2.5, 0.93), 9000.0)):
        points = points_of(truth, midpoint)
        axes = [laws._EXPONENT, laws._midpoint(points), laws._SKEW]
        posterior = Posterior(points, axes, laws._richards)
        weak, spread = posterior.grid(), informed._cells(posterior, axes[1], shapes)
        assert spread.log_evidence == pytest.approx(weak.log_evidence, abs=0.5)


def test_the_shapes_of_a_run_are_its_own():
    truth = Shape(3.0, 1.0, 0.8)
    found = laws.shapes_of(points_of(truth, 4000.0, compute=np.linspace(0, 64_000, 60)), count=50)
    exponent, skew, asymptote = np.median(found, axis=0)
    assert asymptote == pytest.approx(0.8, abs=0.01)
    # B and nu go together; how the curve bends is told.
    again = curve(Shape(exponent, skew, asymptote), 4000.0)
    np.testing.assert_allclose(again[8:], curve(truth, 4000.0)[8:], atol=0.03)
