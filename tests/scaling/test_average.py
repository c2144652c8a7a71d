"""The averaged forecast: its parts, its band, its weights, and what it says of the rest of a run."""

import dataclasses
import json

import numpy as np
import pytest
from scipy import stats
from scipy.special import logit

from scalerl_jax.scaling import average, calibration
from scalerl_jax.scaling.calibration import Calibration, Spread
from scalerl_jax.scaling.laws import LAWS
from scalerl_jax.scaling.outlook import outlook
from scalerl_jax.scaling.points import check_points
from tests.scaling.simulated import TABLE_1, curve, sampled_passes

COMPUTE = np.linspace(0, 8000, 17)
LATER = np.linspace(8500, 16_000, 9)
EVEN = Calibration({name: Spread(0.2, 1.0, 0.25) for name in LAWS}, rate=2.0)


def simulated(run="ScaleRL", seed=0, compute=COMPUTE):
    at = np.concatenate([compute, LATER])
    passes = sampled_passes(np.random.default_rng(seed), curve(at, *TABLE_1[run]), runs=1, prompts=300)[0]
    points = check_points(
        compute, passes[: len(compute)].mean(axis=1) / 16, initial_reward=None, burn_in=0.0, fit_until=None,
        counts=(passes[: len(compute)], 16), run=None,
    )  # fmt: skip
    return points, passes[len(compute) :].mean(axis=1) / 16


def only(name, scale=0.0, rate=0.0):
    return Calibration({law: Spread(scale, 1.0, float(law == name)) for law in LAWS}, rate)


def test_one_law_without_discrepancy_is_that_law():
    points, _ = simulated()
    forecast = average.average_forecast(points, only("sigmoid"))
    drawn = average.draw("sigmoid", points, count=average.DRAWS, seed=0)
    np.testing.assert_allclose(forecast.ways(LATER), drawn.at(LATER), atol=1e-9)
    assert forecast.weights == {name: pytest.approx(float(name == "sigmoid"), abs=1e-9) for name in LAWS}


def test_the_discrepancy_is_students_in_the_logit_and_grows():
    points, _ = simulated()
    plain, wide = (average.average_forecast(points, only("sigmoid", scale)).ways(LATER) for scale in (0.0, 0.5))
    t = (logit(wide) - logit(plain)) / (0.5 * np.log(LATER / 8000))
    np.testing.assert_allclose(t, np.broadcast_to(t[:, :1], t.shape), atol=1e-6)  # one for a way on
    assert stats.kstest(t[:, 0], stats.t(average.FREEDOM).cdf).pvalue > 0.01


def test_the_density_is_scipys():
    t = np.linspace(-6, 6, 25)
    np.testing.assert_allclose(average.student(t), stats.t(average.FREEDOM).logpdf(t), rtol=1e-12)


def test_ways_are_shared_out_by_weight():
    points, _ = simulated()
    forecast = average.average_forecast(points, EVEN)
    apart = dataclasses.replace(forecast, weights=dict(zip(LAWS, (0.5, 0.25, 0.25, 0.0))))
    ways = apart.ways(LATER)
    assert len(ways) == average.DRAWS
    whole = dataclasses.replace(forecast, weights=dict(zip(LAWS, (1.0, 0.0, 0.0, 0.0))))
    np.testing.assert_array_equal(ways[:1000], whole.ways(LATER)[:1000])


@pytest.mark.slow
def test_the_band_holds_the_evaluations_of_runs_on_the_law():
    held = {0.5: [], 0.9: []}
    for seed in range(60):
        points, measured = simulated(list(TABLE_1)[seed % 8], seed)
        forecast = average.average_forecast(points, only("sigmoid"))
        for level, found in held.items():
            low, high = forecast.band(LATER, level=level)
            found.append(np.mean((low <= measured) & (measured <= high)))
    assert np.mean(held[0.9]) == pytest.approx(0.9, abs=0.05)
    assert np.mean(held[0.5]) == pytest.approx(0.5, abs=0.1)


def test_an_evaluation_is_less_certain_than_the_policy():
    points, _ = simulated()
    forecast = average.average_forecast(points, EVEN)
    low, high = forecast.band(LATER, level=0.9)
    inner_low, inner_high = forecast.band(LATER, level=0.9, evaluation=False)
    assert np.mean(high - low - (inner_high - inner_low)) > 0 and np.all(high - low > 0.97 * (inner_high - inner_low))
    wider_low, wider_high = forecast.band(LATER, level=0.95)
    assert np.all(wider_low <= low) and np.all(high <= wider_high)
    middle = forecast.predict(LATER)
    assert np.all((low < middle) & (middle < high))
    sure = average.average_forecast(points, only("sigmoid"))
    low, high = sure.band(LATER, level=0.9)
    inner_low, inner_high = sure.band(LATER, level=0.9, evaluation=False)
    assert np.all(low < inner_low - 1e-3) and np.all(inner_high < high - 1e-3)
    at_half = forecast.evaluations([8000.0]) - forecast.ways([8000.0])
    expected = np.sqrt(np.median(points.variance))
    assert np.std(at_half) == pytest.approx(expected, rel=0.4)


def test_the_law_with_the_better_record_weighs_more():
    """A run that never bends towards 1 is no power law, and says so while it goes."""
    points, _ = simulated("8gen", compute=np.linspace(0, 12_000, 25))
    found = average.record(points, EVEN)
    assert found["sigmoid"] > found["power"]
    weights = EVEN.weights(found)
    assert weights["sigmoid"] > 1.5 * weights["power"]
    assert sum(weights.values()) == pytest.approx(1)
    priors = {name: Spread(0.2, 1.0, prior) for name, prior in zip(LAWS, (0.1, 0.2, 0.3, 0.4))}
    assert list(Calibration(priors, 5.0).weights(None).values()) == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_points_too_few_for_a_record():
    points, _ = simulated(compute=np.array([0.0, 1000, 2000, 4000]))
    assert average.record(points, EVEN) is None
    assert np.isfinite(average.average_forecast(points, EVEN).predict(LATER)).all()


def test_without_counts_the_scatter_of_neighbours_is_the_noise():
    points, _ = simulated()
    bare = dataclasses.replace(points, counts=None, initial_counts=None)
    forecast = average.average_forecast(bare, EVEN)
    assert np.sqrt(forecast.evaluation_variance) == pytest.approx(np.sqrt(np.median(points.variance)), rel=1.5)
    assert np.isfinite(forecast.band(LATER, level=0.9)).all()


# ---------------------------------------------------------------------- what the rest brings


def test_a_run_that_is_done_is_told_to_stop_and_one_that_climbs_to_go_on():
    done, _ = simulated(compute=np.linspace(0, 60_000, 40))
    narrow = Calibration({name: Spread(0.02, 1.0, float(name == "sigmoid") + 1e-9) for name in LAWS}, 0.0)
    found = outlook(average.average_forecast(done, narrow), 80_000.0)
    assert not found.goes_on and found.gain.high < 0.02
    assert found.sentence().endswith("less than the 0.02 that count: stop")
    assert found.pays_until == pytest.approx(60_000)

    early, _ = simulated(compute=np.linspace(0, 4000, 12))
    found = outlook(average.average_forecast(early, narrow), 16_000.0)
    assert found.goes_on and found.gain.low < found.gain.value < found.gain.high
    truth = curve(np.array([16_000.0]), *TABLE_1["ScaleRL"])[0]
    assert found.score.low < truth < found.score.high
    # From there on twice the compute gains less than 0.02: by the true curve within half an octave.
    at = np.geomspace(4000, 64_000, 400)
    gains = curve(2 * at, *TABLE_1["ScaleRL"]) - curve(at, *TABLE_1["ScaleRL"])
    assert np.log2(found.pays_until / at[np.argmax(gains < 0.02)]) == pytest.approx(0, abs=0.6)
    assert "go on; from" in found.sentence()


# ---------------------------------------------------------------------- the file


def test_a_calibration_is_read_as_it_is_written(tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(calibration.document(EVEN)))
    assert calibration.read(str(path)) == EVEN
    assert calibration.default().runs > 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a calibration"),
        ('{"laws": {}, "rate": 1, "runs": 3}', "is not a calibration"),
        (json.dumps(calibration.document(EVEN)).replace("0.25", "-1"), "is not a number from 0 on"),
        (json.dumps(calibration.document(EVEN)).replace("0.25", "NaN"), "is not a number from 0 on"),
    ],
)
def test_what_is_no_calibration(tmp_path, text, told):
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=told) as error:
        calibration.read(str(path))
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)
