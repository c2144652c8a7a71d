"""The laws of a forecast: what they say, and what is drawn from points, against integrals over a grid."""

import numpy as np
import pytest
from scipy.special import expit, logit

from scalerl_jax.scaling import law
from scalerl_jax.scaling.points import check_points
from tests.scaling.simulated import TABLE_1, curve, sampled_passes

COMPUTE = np.linspace(0, 8000, 13)


def points_of(reward, *, compute=COMPUTE, trials=None, initial_reward=None):
    counts = None if trials is None else (np.round(reward * trials), np.full(len(reward), trials))
    if trials is not None:
        reward = counts[0] / trials
    return check_points(compute, reward, initial_reward=initial_reward, counts=counts)


def noisy(seed=0, trials=2000):
    rng = np.random.default_rng(seed)
    return rng.binomial(trials, curve(COMPUTE, *TABLE_1["ScaleRL"])) / trials


def rises():
    """Each law's s at shapes, written as its formula is."""
    x = np.exp(np.linspace(5, 11, 40))
    exponent, middle, skew = 1.7, 2500.0, 0.4
    return x, {
        "_sigmoid": ([np.log(exponent), np.log(middle)], 1 / (1 + (middle / x) ** exponent)),
        "_richards": (
            [np.log(exponent), np.log(middle), np.log(skew)],
            (1 + (2**skew - 1) * (middle / x) ** exponent) ** (-1 / skew),
        ),
        "_power": ([np.log(exponent), np.log(middle)], 1 - (1 + x / middle) ** -exponent),
    }


@pytest.mark.parametrize("name", ["_sigmoid", "_richards", "_power"])
def test_each_curve_is_its_formula(name):
    x, formulas = rises()
    shape, expected = formulas[name]
    np.testing.assert_allclose(getattr(law, name)(np.array([shape]), np.log(x))[0], expected, rtol=1e-10)


def test_the_richards_curve_holds_the_sigmoid_and_keeps_its_middle():
    log_compute = np.linspace(0, 12, 50)
    plain = law._sigmoid(np.array([[0.4, 7.0]]), log_compute)
    np.testing.assert_allclose(law._richards(np.array([[0.4, 7.0, 0.0]]), log_compute), plain, rtol=1e-12)
    for skew in (-2.0, -0.5, 1.5):
        assert law._richards(np.array([[0.4, 7.0, skew]]), np.array([7.0]))[0, 0] == pytest.approx(0.5)


def by_grid(points, rise, axes, ahead, asymptotes):
    """Quantiles of R(ahead) by brute force: R0 exact, phi integrated out, A on a grid of its own."""
    shapes = np.stack([a.ravel() for a in np.meshgrid(*[np.linspace(*axis[:3]) for axis in axes], indexing="ij")], -1)
    prior = sum(-0.5 * ((shapes[:, i] - axis[3]) / axis[4]) ** 2 for i, axis in enumerate(axes))
    s, s_ahead = (rise(shapes, np.log(np.atleast_1d(at))) for at in (points.compute, ahead))
    initial, weight = points.initial, 1 / points.variance
    values, log_weights = [], []
    for asymptote in asymptotes:
        off = points.reward - initial - (asymptote - initial) * s
        squares = points.belief + off**2 @ weight
        log_weights.append(prior - 0.5 * (points.belief + len(points.compute)) * np.log(squares))
        values.append(initial + (asymptote - initial) * s_ahead[:, 0])
    log_weights, values = np.concatenate(log_weights), np.concatenate(values)
    order = np.argsort(values)
    cumulative = np.cumsum(np.exp(log_weights - log_weights.max())[order])
    return np.interp([0.05, 0.5, 0.95], cumulative / cumulative[-1], values[order])


@pytest.mark.slow
@pytest.mark.parametrize(("until", "ahead"), [(13, 16_000.0), (7, 16_000.0), (5, 8000.0)])
@pytest.mark.parametrize("trials", [2000, None])
def test_draws_are_the_posterior(until, ahead, trials):
    points = points_of(noisy()[:until], compute=COMPUTE[:until], trials=trials, initial_reward=0.4)
    least, most = np.log(points.compute.min()) - 3, np.log(points.compute.max()) + 4
    middle = (least, most, 140, 0.0, np.inf)
    exponent = (np.log(2) - 3, np.log(2) + 3, 140, np.log(2), 0.5)
    expected = by_grid(points, law._sigmoid, [exponent, middle], ahead, (np.arange(120) + 0.5) / 120)
    drawn = law.draw_sigmoids(points, count=8000, seed=0).at(np.array([ahead]))[:, 0]
    np.testing.assert_allclose(np.quantile(drawn, [0.05, 0.5, 0.95]), expected, atol=0.012)


@pytest.mark.slow
def test_draws_of_the_logistic_are_its_posterior():
    compute = np.linspace(0, 30, 13)
    begun = expit(-3.0)
    scores = 0.3 + 0.6 * (expit(3.0 * (compute / 12 - 1)) - begun) / (1 - begun)
    points = points_of(scores, compute=compute, trials=1500, initial_reward=scores[0])
    steepness = (np.log(2) - 3, np.log(2) + 3, 240, np.log(2), 0.7)
    place = (np.log(2.5) - 3, np.log(30) + 4, 240, 0.0, np.inf)
    expected = by_grid(points, law._logistic, [steepness, place], 60.0, (np.arange(120) + 0.5) / 120)
    drawn = law.draw_logistics(points, count=8000, seed=0)
    np.testing.assert_allclose(np.quantile(drawn.at(np.array([60.0])), [0.05, 0.5, 0.95]), expected, atol=0.01)
    assert np.median(np.exp(drawn.shape), axis=0) == pytest.approx([3.0, 12], rel=0.15)


def test_draws_of_the_power_law_are_its_posterior():
    compute = np.linspace(0, 30, 13)
    scores = 1 - 0.7 * (1 + compute / 5) ** -0.6
    points = points_of(scores, compute=compute, trials=1500, initial_reward=scores[0])
    steepness = (np.log(0.5) - 4, np.log(0.5) + 3, 300, np.log(0.5), 1.0)
    place = (np.log(2.5) - 3, np.log(30) + 4, 300, 0.0, np.inf)
    expected = by_grid(points, law._power, [steepness, place], 100.0, [1.0])
    drawn = law.draw_powers(points, count=8000, seed=0)
    np.testing.assert_allclose(np.quantile(drawn.at(np.array([100.0])), [0.05, 0.5, 0.95]), expected, atol=0.01)
    assert np.all(drawn.asymptote == 1) and abs(np.median(drawn.at(np.array([100.0]))) - (1 - 0.7 * 21**-0.6)) < 0.02


def test_a_measured_start_is_no_longer_exact():
    trials = 200
    known = law.draw_sigmoids(points_of(noisy(trials=trials), trials=trials, initial_reward=0.4), count=4000, seed=0)
    measured = law.draw_sigmoids(points_of(noisy(trials=trials), trials=trials), count=4000, seed=0)
    assert np.ptp(known.initial_reward) < 1e-3
    assert np.std(measured.initial_reward) == pytest.approx(np.sqrt(0.24 / trials), rel=0.5)


@pytest.mark.parametrize("name", law.LAWS)
def test_draws_are_scores_and_come_again(name):
    points = points_of(noisy(), trials=2000)
    compute = np.geomspace(8000, 64_000, 9)
    first, again = (law.LAWS[name](points, count=500, seed=3).at(compute) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert first.shape == (500, 9) and np.all((first >= 0) & (first <= 1))
    other = law.LAWS[name](points, count=500, seed=4).at(compute)
    assert not np.array_equal(first, other)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", law.LAWS)
@pytest.mark.parametrize(
    "reward",
    [
        np.full(13, 0.3), np.zeros(13), np.ones(13), np.linspace(0.9, 0.1, 13), np.linspace(0.1, 1.0, 13),
        np.where(np.arange(13) < 6, 0.2, 0.9),
    ],
    ids=["flat", "nothing", "all", "falling", "straight", "a jump"],
)  # fmt: skip
def test_points_of_any_kind_leave_something_drawn(name, reward):
    for trials in (2000, None):
        made = law.LAWS[name](points_of(reward, trials=trials), count=200, seed=0).at(np.array([8000.0, 1e5]))
        assert np.isfinite(made).all() and np.all((made >= 0) & (made <= 1))


def test_too_few_points_to_tell_the_noise():
    points = points_of(np.array([0.1, 0.2, 0.3, 0.35]), compute=np.array([0.0, 1.0, 2.0, 3.0]))
    for name in ("sigmoid", "richards", "logistic", "power"):
        assert law.LAWS[name](points, count=10, seed=0).at(np.array([4.0])).shape == (10, 1)


def test_walks_are_the_kalman_filters_of_a_gaussian_process():
    """Level and drift at the last point, and the weights of sigma, against the joint normal of all evaluations."""
    points = points_of(noisy(trials=400), trials=400)
    score = np.clip(points.reward, 2e-3, 1 - 2e-3)
    x = np.log(points.compute) - np.log(points.compute[0])
    noise = points.variance / (score * (1 - score)) ** 2
    seen = logit(score)
    log_likelihood, means = [], []
    for sigma in law._SIGMAS:
        # From the first evaluation on: level_0 ~ N(seen_0, noise_0), drift ~ N(0, 1), a Brownian motion.
        covariance = noise[0] + np.outer(x, x) * law._DRIFT**2 + sigma**2 * np.minimum.outer(x, x)
        later = covariance[1:, 1:] + np.diag(noise[1:])
        off = seen[1:] - seen[0]
        solved = np.linalg.solve(later, off)
        log_likelihood.append(-0.5 * off @ solved - 0.5 * np.linalg.slogdet(later)[1])
        means.append(seen[0] + covariance[-1, 1:] @ solved)
    log_likelihood = np.array(log_likelihood) - 0.5 * ((np.log(law._SIGMAS) - law._PRIOR[0]) / law._PRIOR[1]) ** 2
    share = np.exp(log_likelihood - log_likelihood.max())
    share /= share.sum()
    drawn = law.draw_walks(points, count=40_000, seed=0)
    found = np.array([np.mean(drawn.sigma == sigma) for sigma in law._SIGMAS])
    np.testing.assert_allclose(found, share, atol=0.01)
    assert np.mean(drawn.level) == pytest.approx(share @ means, abs=0.01)
    assert np.mean(expit(drawn.level)) == pytest.approx(drawn.at(points.compute[-1:]).mean())


def test_walks_widen_as_they_should():
    drawn = law.LAWS["random_walk"](points_of(noisy(), trials=2000), count=40_000, seed=0)
    ahead = np.log([2.0, 4.0, 8.0])
    made = logit(drawn.at(8000 * np.exp(ahead)))
    expected = [np.var(drawn.level + drawn.drift * x) + np.mean(drawn.sigma**2) * x for x in ahead]
    np.testing.assert_allclose(np.var(made, axis=0), expected, rtol=0.05)


@pytest.mark.parametrize("told", ["prompts", "totals"])
def test_prompts_counted_apart_narrow_the_noise(told):
    passes = sampled_passes(np.random.default_rng(1), curve(COMPUTE, *TABLE_1["ScaleRL"]), runs=1, prompts=200)[0]
    counts = (passes, 16) if told == "prompts" else (passes.sum(axis=1), np.full(len(passes), 200 * 16))
    points = check_points(COMPUTE, passes.mean(axis=1) / 16, counts=counts)
    heard = np.median(law.draw_sigmoids(points, count=500, seed=0).dispersion)
    assert heard == pytest.approx(1.0, abs=0.6) if told == "prompts" else heard < 0.9
