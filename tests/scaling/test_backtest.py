"""The forecast at half time, and the pictures."""

import numpy as np
import pytest
from matplotlib.image import imread

from scalerl_jax.scaling import fit_sigmoid, plot
from scalerl_jax.scaling.backtest import HALF, Backtest, forecast_at_half, hours
from scalerl_jax.scaling.fit import Run
from scalerl_jax.scaling.forecast import Estimate
from scalerl_jax.scaling.units import short_number
from tests.scaling.simulated import TABLE_1, curve, sampled_passes

COMPUTE = np.linspace(0, 16_000, 21)


def test_forecast_of_a_run_on_the_law(tmp_path):
    passes = sampled_passes(np.random.default_rng(2), curve(COMPUTE, *TABLE_1["ScaleRL"]), runs=1)[0]
    reward = passes.mean(axis=1) / 16
    result = forecast_at_half(COMPUTE, reward, (passes, 16))
    np.testing.assert_array_equal(result.fit.used, (COMPUTE > 0) & (COMPUTE <= 8000))
    assert result.measured == pytest.approx(reward[COMPUTE > 12_000].mean())
    assert abs(result.error) < 0.015
    assert result.score.low <= result.fit.predict(COMPUTE[COMPUTE > 12_000]).mean() <= result.score.high
    low, high = result.ahead.band(COMPUTE[COMPUTE > 8000], level=0.9)
    inside = (low <= reward[COMPUTE > 8000]) & (reward[COMPUTE > 8000] <= high)
    assert (result.within, result.later) == (inside.sum(), 10)
    assert 0.03 < result.gain_ahead < 0.2
    # What comes after the half has no say.
    changed = reward.copy()
    changed[COMPUTE > 8000] = 0.9
    assert forecast_at_half(COMPUTE, changed).score == forecast_at_half(COMPUTE, reward).score
    path = tmp_path / "curve.png"
    plot.plot_forecast(result, str(path), axis="GPU-hours", y_label="pass rate")
    assert imread(path).shape == (780, 1200, 4)
    assert [p.name for p in tmp_path.iterdir()] == ["curve.png"]
    # In any unit it is the same.
    again = forecast_at_half(1e18 * COMPUTE, reward, (passes, 16))
    assert again.score.value == pytest.approx(result.score.value, abs=2e-3)


def test_one_form_of_one_statement():
    score = Estimate(0.9312, 0.88, 0.9604)
    found = Backtest(COMPUTE, COMPUTE, None, None, score, measured=0.9268, within=14, later=15, bins=False, seen=HALF)
    statement = "forecast at half of the compute (typical device-hours): 0.931 at the end (90 %: 0.880 to 0.960)"
    assert found.statement("typical device-hours") == statement
    assert found.outcome == "measured 0.927; 14 of 15 later evaluations within"
    assert hours(2e13, 0.25e-13) == "; up to there about 0.5 device-hours at this run's rate"
    assert hours(np.inf, 1.0) == hours(1.0, None) == ""


def test_too_few_evaluations_are_said():
    with pytest.raises(ValueError, match="2 points of different compute"):
        forecast_at_half([0, 1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.slow
def test_many_runs_in_one_picture(tmp_path):
    rng = np.random.default_rng(0)
    curves = []
    for name, row in TABLE_1.items():
        reward = curve(COMPUTE, *row) + 0.003 * rng.standard_normal(len(COMPUTE))
        fit = fit_sigmoid(COMPUTE, reward, fit_until="half", burn_in=1000)
        curves.append(Run(name, COMPUTE, reward, fit))
    for chosen in (curves, curves[:2], curves[:1]):
        figure = plot.plot_fits(chosen, x_label="GPU-hours", y_label="pass rate")
        for ending in ("png", "svg"):
            plot.write_figure(figure, str(tmp_path / f"fit.{ending}"))
        drawn = imread(tmp_path / "fit.png")[..., :3]
        assert (drawn.min(axis=2) < 0.9).mean() > 0.01  # something is drawn
    text = (tmp_path / "fit.svg").read_text()
    assert text.count("<svg") == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.5, "0.5"), (1500, "1.5k"), (2.5e6, "2.5M"), (1.48e12, "1.48T"), (3e21, "3Z"), (1e-5, "1e-05")],
)
def test_short_numbers(value, text):
    assert short_number(value) == text


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_compute_in_any_unit_can_be_drawn(tmp_path, count):
    compute = np.geomspace(1e-300, 32e-300, 8)
    reward = 0.1 + 0.5 / (1 + compute[3] / compute)
    one = Run("a", compute, reward, fit_sigmoid(compute, reward, initial_reward=0.1))
    plot.write_figure(
        plot.plot_fits([one] * count, x_label="compute", y_label="pass rate"), str(tmp_path / "curve.png")
    )
    assert (tmp_path / "curve.png").stat().st_size > 1000
