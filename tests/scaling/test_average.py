"""The averaged forecast: its parts, its band, its weights, and what it says of the rest of a run."""

import dataclasses

import numpy as np
import pytest
from scipy import stats
from scipy.special import logit

from scalerl_jax.scaling import average
from scalerl_jax.scaling.average import SCALES, Calibration
from scalerl_jax.scaling.backtest import outlook
from scalerl_jax.scaling.law import LAWS
from scalerl_jax.scaling.points import check_points
from scalerl_jax.scaling.units import short_number
from tests.scaling.simulated import TABLE_1, curve, sampled_passes

COMPUTE = np.linspace(0, 8000, 17)
LATER = np.linspace(8500, 16_000, 9)
NONE = (0.0,) * len(SCALES)


def only(name, scale=SCALES[0], **changes):
    """One law at one scale, whatever the record."""
    prior = {law: tuple(float(law == name and one == scale) for one in SCALES) for law in LAWS}
    return Calibration(prior, **{"growth": 1.0, "rate": 0.0, **changes})


EVEN = Calibration(dict.fromkeys(LAWS, (0.0, 0.0, 0.2, 0.0, 0.0)), growth=1.0, rate=2.0)


def simulated(run="ScaleRL", seed=0, compute=COMPUTE):
    at = np.concatenate([compute, LATER])
    passes = sampled_passes(np.random.default_rng(seed), curve(at, *TABLE_1[run]), runs=1, prompts=300)[0]
    points = check_points(compute, passes[: len(compute)].mean(axis=1) / 16, counts=(passes[: len(compute)], 16))
    return points, passes[len(compute) :].mean(axis=1) / 16


@pytest.mark.parametrize("growth", [1.0, 0.5])
def test_the_discrepancy_is_normal_in_the_logit_and_grows(growth):
    points, _ = simulated()
    drawn = logit(average.draw("sigmoid", points, count=average.DRAWS).at(LATER))
    forecast = average.average_forecast(points, only("sigmoid", 0.6, growth=growth))
    assert forecast.law_weights["sigmoid"] == pytest.approx(1, abs=1e-9)
    z = (logit(forecast.ways(LATER)) - drawn) / (0.6 * np.log(LATER / points.most) ** growth)
    np.testing.assert_allclose(z, np.broadcast_to(z[:, :1], z.shape), atol=1e-6)  # one for a way on
    assert stats.kstest(z[:, 0], stats.norm.cdf).pvalue > 0.01


def test_the_density_is_that_of_the_mixture():
    rng = np.random.default_rng(0)
    off, noise, deviation = rng.normal(size=(50, 3)), np.array([0.1, 0.2, 0.3]), np.array([0.0, 0.4, 1.0])
    expected = np.log(np.mean(stats.norm(0, np.sqrt(noise**2 + deviation**2)).pdf(off), axis=0))
    np.testing.assert_allclose(average.log_density(off, noise, deviation), expected, rtol=1e-9)


def test_ways_are_shared_out_by_weight():
    points, _ = simulated()
    forecast = average.average_forecast(points, EVEN)
    of = dict.fromkeys(LAWS, NONE)
    rows = {"sigmoid": (0.25, 0, 0, 0, 0.25), "richards": (0, 0.25, 0, 0, 0), "power": (0, 0, 0.25, 0, 0)}
    apart = dataclasses.replace(forecast, weights=of | rows)
    ways = apart.ways(LATER)
    assert len(ways) == average.DRAWS
    whole = dataclasses.replace(forecast, weights=of | {"sigmoid": (1.0, 0, 0, 0, 0)})
    np.testing.assert_array_equal(ways[:500], whole.ways(LATER)[:500])
    spread = np.std(logit(ways[:, -1]).reshape(4, 500), axis=1)  # sigmoid at 0.01 and 2, richards, power
    assert spread[1] > 1.2 > 0.3 > spread[0]


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
    inner_low, inner_high = np.quantile(forecast.ways(LATER), [0.05, 0.95], axis=0)
    assert np.mean(high - low - (inner_high - inner_low)) > 0 and np.all(high - low > 0.97 * (inner_high - inner_low))
    wider_low, wider_high = forecast.band(LATER, level=0.95)
    assert np.all(wider_low <= low) and np.all(high <= wider_high)
    middle = forecast.predict(LATER)
    assert np.all((low < middle) & (middle < high))
    sure = average.average_forecast(points, only("sigmoid"))
    low, high = sure.band(LATER, level=0.9)
    inner_low, inner_high = np.quantile(sure.ways(LATER), [0.05, 0.95], axis=0)
    assert np.all(low < inner_low - 1e-3) and np.all(inner_high < high - 1e-3)
    at_half = forecast.evaluations([8000.0]) - forecast.ways([8000.0])
    expected = np.sqrt(np.median(points.variance))
    assert np.std(at_half) == pytest.approx(expected, rel=0.4)


def test_the_law_with_the_better_record_weighs_more():
    """A run that never bends towards 1 is no power law, and one on its curve is little off: both show while it goes."""
    points, _ = simulated("8gen", compute=np.linspace(0, 12_000, 25))
    even = Calibration(dict.fromkeys(LAWS, (1 / len(LAWS) / len(SCALES),) * len(SCALES)), growth=1.0, rate=2.0)
    found = average.record(points, even)
    assert max(found["sigmoid"]) > max(found["power"])
    weights = even.weights(found)
    assert sum(weights["sigmoid"]) > 1.5 * sum(weights["power"])
    assert sum(weights["sigmoid"][:3]) > 2 * sum(weights["sigmoid"][3:])
    assert sum(map(sum, weights.values())) == pytest.approx(1)
    assert even.weights(None) == {name: pytest.approx(row) for name, row in even.prior.items()}


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
    narrow = only("sigmoid")
    found = outlook(average.average_forecast(done, narrow), 80_000.0)
    assert not found.goes_on and found.gain.high < 0.02
    said = found.sentence("at 40k", "GPU-hours")
    assert said.startswith("forecast at 40k (GPU-hours): 0.") and said.endswith("less than the 0.02 that count: stop")
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
    pays = short_number(found.pays_until)
    assert f"go on; from {pays} on twice the compute" in found.sentence("at 4k", "GPU-hours")


# ---------------------------------------------------------------------- the file


def test_a_calibration_is_read_as_it_is_written(tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text(EVEN.text())
    assert average.read_calibration(str(path)) == EVEN
    assert average.default_calibration().runs > 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a calibration"),
        ('{"scales": [1], "prior": {}, "growth": 1, "rate": 1, "runs": 3}', "scales are"),
        (EVEN.text().replace("0.2, 0.0, ", "0.2, "), "a weight for each of the scales"),
        (EVEN.text().replace("0.2", "-1"), "is not a number from 0 on"),
        (EVEN.text().replace("0.2", "NaN"), "is not a number from 0 on"),
    ],
)
def test_what_is_no_calibration(tmp_path, text, told):
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=told) as error:
        average.read_calibration(str(path))
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_many_places_are_what_each_is_alone():
    points, _ = simulated()
    forecast = average.average_forecast(points, only("sigmoid", SCALES[2]), count=50)
    places = np.linspace(8100, 16_000, 2 * average._AT_ONCE + 3)
    np.testing.assert_array_equal(forecast.predict(places), np.median(forecast.ways(places), axis=0))
    true = np.quantile(forecast.ways(places), [0.1, 0.9], axis=0)
    low, high = forecast.band(places, level=0.8, rows=np.arange(1, len(places) + 1))
    # The mean of so many evaluations is as certain as the policy.
    np.testing.assert_allclose((low, high), true, atol=0.25)
    np.testing.assert_allclose((low[-100:], high[-100:]), true[:, -100:], atol=0.005)


@pytest.mark.slow
def test_an_evaluation_is_as_noisy_whether_it_is_told_alone_or_in_bins():
    rng, compute = np.random.default_rng(0), np.linspace(0, 8000, 2101)
    passes = rng.binomial(64, curve(compute, *TABLE_1["ScaleRL"]))
    found = [
        average.average_forecast(
            check_points(compute[::every], passes[::every] / 64, counts=(passes[::every, None], 64)),
            EVEN, count=50,
        ).evaluation_variance
        for every in (1, 3)
    ]  # fmt: skip
    assert found[0] == pytest.approx(found[1], rel=0.1) and found[1] == pytest.approx(1 / (4 * 64), rel=0.1)
