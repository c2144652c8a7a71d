"""The forecast beside the trainer: right numbers, never in the way."""

import re
import threading

import jax
import numpy as np
import pytest

from scalerl_jax.report.score import AXES, score
from scalerl_jax.run import live_forecast
from scalerl_jax.run.live_forecast import LEAST_POINTS, LiveForecast, forecast_of_end
from scalerl_jax.scaling.units import short_number
from tests.scaling.simulated import TABLE_1, curve, sampled_passes
from tests.support.processes import SECONDS
from tests.support.waiting import eventually

UPDATES = 6400
HOURS = 2.5  # of one update


def run_rows(evaluations, every=100, prompts=300, **changes):
    steps = np.arange(evaluations) * every
    compute = steps * HOURS
    passes = sampled_passes(np.random.default_rng(0), curve(compute, *TABLE_1["ScaleRL"]), runs=1, prompts=prompts)[0]
    return [
        {
            "step": int(step), "device_hours": float(c),
            "pass_rate": float(p.sum() / (16 * prompts)), "samples": 16,
            "passes": p.tolist(), **changes,
        }
        for step, c, p in zip(steps, compute, passes)
    ]  # fmt: skip


def wait_for(forecast):
    return eventually(forecast.collect, seconds=SECONDS)["forecast"]


def test_the_end_that_is_planned():
    rows = run_rows(33)
    found, _ = forecast_of_end(rows, updates=UPDATES)
    assert found["step"] == 3200
    assert found["end_compute"] == pytest.approx(UPDATES * HOURS)
    assert found["end_device_hours"] == pytest.approx(UPDATES * HOURS)
    truth = float(curve(UPDATES * HOURS, *TABLE_1["ScaleRL"]))
    assert found["end_low"] <= truth <= found["end_high"]
    assert found["end_low"] <= found["end_score"] <= found["end_high"]
    assert found["asymptote_low"] <= 0.61 <= found["asymptote_high"]
    assert found["identified"] == 0
    # Evaluations of other prompts are compared by their totals.
    mixed = [*rows[:-1], {**rows[-1], "passes": rows[-1]["passes"][:200], "pass_rate": rows[-2]["pass_rate"]}]
    mixed[-1]["passes"] = [round(16 * rows[-2]["pass_rate"])] * 200
    mixed[-1]["pass_rate"] = mixed[-1]["passes"][0] / 16
    assert 0 < forecast_of_end(mixed, updates=UPDATES)[0]["end_score"] < 1


def test_a_stretch_in_which_the_machine_is_slow_bends_nothing():
    rows = run_rows(20)
    slow = [row | {"device_hours": row["device_hours"] + 900 * (row["step"] >= 800)} for row in rows]
    (even, _), (found, said) = (forecast_of_end(some, updates=UPDATES) for some in (rows, slow))
    rate = slow[-1]["device_hours"] / rows[-1]["device_hours"]
    assert found.pop("end_device_hours") == pytest.approx(found["end_compute"] * rate)
    even.pop("end_device_hours")
    assert found == even
    pays = short_number(float(f"{found['pays_until'] * rate:.2g}"))
    assert said[0].endswith(f"most likely; up to there about {pays} device-hours at this run's rate")


def test_what_is_said_of_the_end():
    early, said = forecast_of_end(run_rows(14), updates=UPDATES)
    score, low, high = (early[name] for name in ("end_score", "end_low", "end_high"))
    assert said[0].startswith(
        f"forecast at update 1300 (typical device-hours): {score:.3f} at the end "
        f"(90 %: {low:.3f} to {high:.3f}); the rest gains"
    )
    assert re.fullmatch(
        r"A is not identified yet: .* fit as well; evaluations up to about \d+ would identify it, if the curve is "
        r"as fitted \(these end at 3250\); up to there about [\d.]+k device-hours at this run's rate",
        said[1],
    )
    late, said = forecast_of_end(run_rows(61), updates=UPDATES)
    assert late["identified"] == 1
    assert said[1].startswith("A is identified: ") and said[1].endswith("between seeds")


@pytest.mark.slow
def test_evaluations_that_come_compile_nothing_more():
    # Compiled programs stay in the trainer's memory, and a run may have a thousand evaluations.
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event.endswith("jaxpr_to_mlir_module_duration") else None
    )

    def fits(evaluations):
        compiled.clear()
        rows = run_rows(evaluations)
        forecast_of_end(rows, updates=UPDATES)
        found = score(rows)
        assert all("asymptote" in found["curves"][axis][part] for axis in AXES for part in ("all", "half"))
        return len(compiled)

    jax.clear_caches()
    assert fits(8) > 0
    assert [fits(evaluations) for evaluations in (9, 17, 65)] == [0] * 3
    assert fits(66) > 0  # above 0 there are one fewer
    assert fits(129) == 0


def test_a_forecast_is_taken_once_and_comes_from_the_latest_evaluations(monkeypatch):
    said, go = [], threading.Event()

    def held(rows, *, updates):
        assert go.wait(SECONDS)
        return forecast_of_end(rows, updates=updates)

    monkeypatch.setattr(live_forecast, "forecast_of_end", held)
    with LiveForecast(updates=UPDATES, log=said.append) as forecast:
        forecast.evaluated(run_rows(LEAST_POINTS))  # one of them is at compute 0
        assert not forecast.collect()
        forecast.evaluated(run_rows(14))
        forecast.evaluated(run_rows(15))  # the first still runs: of these two, the latest is fitted next
        forecast.evaluated(run_rows(16))
        go.set()
        first, second = wait_for(forecast), wait_for(forecast)
        assert (first["step"], second["step"]) == (1300, 1500)
        assert not forecast.collect()
        forecast.evaluated(run_rows(UPDATES // 100 + 1))  # at its end a run needs no forecast
        assert not forecast.collect()
    made, told = (line.split(":")[0] for line in said)  # the next comes too soon after it
    assert made == "forecast at update 1300 (typical device-hours)" and told == "A is not identified yet"


def test_a_fit_that_cannot_be_made_is_said_once_and_training_goes_on():
    said = []
    rows = run_rows(10)[1:]  # R0 was never measured
    with LiveForecast(updates=UPDATES, log=said.append) as forecast:

        def is_over():
            assert not forecast.collect()
            return not forecast._asked

        for _ in range(2):
            forecast.evaluated(rows)
            eventually(is_over, "the fit has failed", seconds=SECONDS)
        assert len(said) == 1 and said[0].startswith("no forecast: ")
        forecast.evaluated(run_rows(10))
        assert wait_for(forecast)["step"] == 900


def test_rows_without_the_column_are_said_once():
    said = []
    rows = [{name: value for name, value in row.items() if name != "device_hours"} for row in run_rows(10)]
    with LiveForecast(updates=UPDATES, log=said.append) as forecast:
        forecast.evaluated(rows)
        eventually(lambda: not (forecast.collect() or forecast._asked), "the fit has failed", seconds=SECONDS)
    assert said == ["no forecast: evals.jsonl: the row of step 0 has no 'device_hours'"]


def test_each_environment_of_a_mixture_is_forecast_by_itself():
    rows = run_rows(10)
    parts = ("pass_rate", "samples", "passes")
    mixture = [{**row, "environments": {"math": {name: row[name] for name in parts}}} for row in rows]
    found, _ = live_forecast.forecasts(mixture, updates=UPDATES)
    assert found["forecasts"]["math"] == found["forecast"]
    # Of an environment without an evaluation at compute 0 nothing can be said, and the others are not held up.
    for row in mixture[1:]:
        row["environments"]["code"] = row["environments"]["math"]
    assert list(live_forecast.forecasts(mixture, updates=UPDATES)[0]["forecasts"]) == ["math"]


def test_the_trainer_never_waits(monkeypatch):
    release = threading.Event()
    foretold, said = forecast_of_end(run_rows(8), updates=UPDATES)

    def slow(rows, *, updates):
        assert release.wait(SECONDS)
        return {**foretold, "step": rows[-1]["step"]}, said

    monkeypatch.setattr(live_forecast, "forecast_of_end", slow)
    with LiveForecast(updates=UPDATES, log=print) as forecast:
        for count in range(10, 20):
            forecast.evaluated(run_rows(count, prompts=2))
            assert not forecast.collect()
        release.set()
        assert wait_for(forecast)["step"] == 900
        assert wait_for(forecast)["step"] == 1800
