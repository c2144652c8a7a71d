"""The forecast at half time, and the pictures."""

import numpy as np
import pytest
from matplotlib.image import imread

from scalerl_jax.scaling import fit_sigmoid, plot
from scalerl_jax.scaling.fit import Run
from scalerl_jax.scaling.half_time import half_time_forecast
from scalerl_jax.scaling.units import short_number
from tests.scaling.simulated import TABLE_1, curve, sampled_passes

COMPUTE = np.linspace(0, 16_000, 21)


def test_forecast_of_a_run_on_the_law(tmp_path):
    passes = sampled_passes(np.random.default_rng(2), curve(COMPUTE, *TABLE_1["ScaleRL"]), runs=1)[0]
    reward = passes.mean(axis=1) / 16
    result = half_time_forecast(COMPUTE, reward, (passes, 16))
    np.testing.assert_array_equal(result.fit.used, (COMPUTE > 0) & (COMPUTE <= 8000))
    np.testing.assert_array_equal(result.last, COMPUTE > 12_000)
    assert result.measured_mean == pytest.approx(reward[COMPUTE > 12_000].mean())
    assert abs(result.error) < 0.015
    forecast = result.fit.predict(COMPUTE[result.last])
    assert np.all(result.band[0] <= forecast) and np.all(forecast <= result.band[1])
    assert 0.03 < result.gain_ahead < 0.2
    # What comes after the half has no say.
    changed = reward.copy()
    changed[COMPUTE > 8000] = 0.9
    assert half_time_forecast(COMPUTE, changed).forecast_mean == half_time_forecast(COMPUTE, reward).forecast_mean
    path = tmp_path / "curve.png"
    plot.plot_forecast(result, str(path), x_label="GPU-hours")
    assert imread(path).shape == (720, 1200, 4)
    assert [p.name for p in tmp_path.iterdir()] == ["curve.png"]
    assert f"{result.error:+.3f}" in result.sentence()


def test_too_few_evaluations_are_said():
    with pytest.raises(ValueError, match="2 points of different compute"):
        half_time_forecast([0, 1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4, 0.5])


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
    [(0, "0"), (0.5, "0.5"), (1500, "1.5k"), (2.5e6, "2.5M"), (1.48e12, "1.48T"), (3e21, "3e+21"), (1e-5, "1e-05")],
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
