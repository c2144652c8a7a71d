"""Very many rows are fitted as bins of them: the answer is that of the rows, the memory is that of the bins."""

import numpy as np
import pytest

from scalerl_jax.scaling import fit_sigmoid, points
from scalerl_jax.scaling.points import check_points
from tests.scaling.simulated import TABLE_1, curve

ROWS = 5000
NOISE = 0.02


def rows(seed=0, count=ROWS, noise=NOISE):
    compute = np.concatenate([[0.0], np.linspace(50, 16_000, count)])
    reward = curve(compute, *TABLE_1["ScaleRL"]) + noise * np.random.default_rng(seed).standard_normal(count + 1)
    reward[0] = 0.4
    return compute, reward


def both(monkeypatch, *given, **options):
    """The fit with bins, and of the rows themselves."""
    binned = fit_sigmoid(*given, **options)
    with monkeypatch.context() as delta:
        delta.setattr(points, "MOST_POINTS", 10**9)
        return binned, fit_sigmoid(*given, **options)


def assert_close(binned, plain):
    """Within a tenth of what the rows' own noise leaves open."""
    assert plain.bins is None and 500 < binned.bins <= 1024 and binned.points == plain.points == ROWS
    for name, interval in plain.intervals.items():
        width = interval[1] - interval[0]
        assert getattr(binned, name) == pytest.approx(getattr(plain, name), abs=0.1 * width), name
        assert binned.intervals[name] == pytest.approx(interval, abs=0.1 * width), name
    assert binned.ssr == pytest.approx(plain.ssr, rel=1e-3)
    assert binned.identified == plain.identified


@pytest.mark.slow
def test_bins_give_the_fit_of_their_rows(monkeypatch):
    compute, reward = rows()
    binned, plain = both(monkeypatch, compute, reward, burn_in=1.0)
    assert_close(binned, plain)
    assert binned.dispersion == pytest.approx(plain.dispersion, rel=1e-3)


def test_counts_are_summed(monkeypatch):
    compute, _ = rows()
    trials = np.random.default_rng(2).choice([8000, 16_000], size=len(compute))
    passes = np.random.default_rng(1).binomial(trials, curve(compute, *TABLE_1["ScaleRL"]))
    binned, plain = both(monkeypatch, compute, passes / trials, counts=(passes, trials), initial_reward=0.4)
    assert_close(binned, plain)
    points = check_points(compute, passes / trials, initial_reward=0.4, counts=(passes, trials))
    assert points.counts.passes.sum() == passes[1:].sum() and points.counts.trials.sum() == trials[1:].sum()
    np.testing.assert_allclose(points.reward, points.counts.score())


def test_runs_are_not_put_together():
    compute, reward = rows()
    label = np.arange(len(compute)) % 3
    points = check_points(compute, reward + 0.1 * label, initial_reward=0.4, run=label)
    assert len(points.compute) <= 1024 and np.bincount(points.run, points.binned).sum() == ROWS
    means = [np.average(points.reward[points.run == one], weights=points.binned[points.run == one]) for one in range(3)]
    assert np.diff(means) == pytest.approx([0.1, 0.1], abs=0.005)


def test_as_many_rows_as_no_memory_holds():
    """Of every row a fit used to need 0.4 MB: these would take 80 GB."""
    compute, reward = rows(count=200_000)
    fit = fit_sigmoid(compute, reward, initial_reward=0.4, bootstrap=20)
    assert fit.points == 200_000 and fit.bins <= 1024 and len(fit.used) == 200_001
    assert fit.asymptote == pytest.approx(0.61, abs=1e-3) and fit.identified
    low, high = fit.bootstrap_interval("asymptote")
    assert low < 0.6101 and high > 0.6099 and high - low < 2e-3
    x, y = points.thinned(compute[1:], reward[1:])
    assert len(x) <= 1024 and np.all(np.diff(x) > 0) and y == pytest.approx(curve(x, *TABLE_1["ScaleRL"]), abs=0.05)
