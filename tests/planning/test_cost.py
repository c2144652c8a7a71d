"""Generators beside a trainer, the price of a run, and the steps to a target of a fit."""

import json

import pytest

from scalerl_jax.planning import cost

STEP = {"sampled": 1e6, "trainer_seconds": 50.0, "tokens_per_second": 3000.0}
FIT = {"asymptote": 0.61, "exponent": 1.92, "midpoint": 2542.0, "initial_reward": 0.3, "run": "scalerl"}


def test_the_number_needed_is_the_least_with_which_the_trainer_never_waits():
    needed = cost.needed(**STEP)
    assert cost.beside(needed, **STEP).trainer_idle == 0
    assert cost.beside(needed - 1, **STEP).trainer_idle > 0
    few = cost.beside(2, **STEP)
    assert few.step_seconds == pytest.approx(1e6 / 6000)
    assert few.trainer_idle == pytest.approx(1 - 50 / few.step_seconds) and few.generators_idle == 0


def test_a_run_costs_its_hours_on_both_sides():
    prices = {"chip_price": 2.0, "generator_price": 10.0}
    devices = {"chips": 64, "generators": 5, "generator_devices": 2}
    found = cost.of_run(100, step_seconds=36.0, **devices, **prices)
    assert found.hours == pytest.approx(1.0)
    assert (found.trainer_hours, found.generator_hours, found.money) == pytest.approx((64, 10, 64 * 2 + 5 * 10))
    assert cost.of_run(100, step_seconds=36.0, **devices, chip_price=0, generator_price=0).money is None


def written(folder, x="gpu_hours", **changed):
    path = folder / "fit.json"
    path.write_text(json.dumps({"x": x, "fits": [{**FIT, **changed}]}))
    return str(path)


def test_the_compute_to_a_target_is_where_the_curve_has_it(tmp_path):
    found = cost.read_target(written(tmp_path), 0.5)
    a, b, middle, start = (FIT[key] for key in ("asymptote", "exponent", "midpoint", "initial_reward"))
    assert start + (a - start) / (1 + (middle / found.compute) ** b) == pytest.approx(0.5)
    assert cost.read_target(written(tmp_path), (a + start) / 2).compute == pytest.approx(middle)


@pytest.mark.parametrize(
    ("x", "kind", "factor"),
    [("gpu_hours", "device-hours", 1), ("device_hours, in s", "device-hours", 1 / 3600),
     ("model_flops, in EFLOP", "FLOPs", 1e18), ("step", "steps", 1)],
)  # fmt: skip
def test_the_unit_is_that_of_the_fit(tmp_path, x, kind, factor):
    found = cost.read_target(written(tmp_path, x), (FIT["asymptote"] + FIT["initial_reward"]) / 2)
    assert (found.kind, found.compute) == (kind, pytest.approx(FIT["midpoint"] * factor))
    a_step = {"device_hours_a_step": 2.0, "flops_a_step": 4e17}
    per = {"device-hours": 2.0, "FLOPs": 4e17, "steps": 1.0}[kind]
    assert cost.steps_to(found, **a_step) == pytest.approx(found.compute / per)


@pytest.mark.parametrize(
    ("changed", "rate", "said"),
    [
        ({}, 0.7, "--target=0.7: the curve of --fit={} goes from 0.300 to 0.610, and not through it"),
        ({}, 0.2, "--target=0.2: the curve of --fit={} goes from 0.300 to 0.610, and not through it"),
        ({"x": "tokens"}, 0.5, "--fit={}: its x is 'tokens', which is neither device-hours, FLOPs nor steps"),
        ({"exponent": 0.001}, 0.4, "--target=0.4: is out of reach of --fit={}, whose exponent is 0.001"),
        ({"exponent": -1.0}, 0.4, "--fit={}: exponent -1 and midpoint 2542 are of no curve that rises"),
        (
            {"midpoint": None},
            0.5,
            "--fit={}: midpoint is None: the scores of that run do not rise, or it is no fit.json",
        ),
    ],
)
def test_a_fit_that_says_nothing_of_it(tmp_path, changed, rate, said):
    path = written(tmp_path, **changed)
    with pytest.raises(ValueError) as error:
        cost.read_target(path, rate)
    assert str(error.value) == said.format(path)


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"x": "gpu_hours", "fits": []}', '{"x": "h", "fits": [1]}'])
def test_another_file_is_named(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"other\.json"):
        cost.read_target(str(tmp_path / "other.json"), 0.5)
