"""Speeds out of a run folder: the run is a simulation of known speeds, written down as a trainer does."""

import dataclasses
import itertools
import json
import math

import pytest

from scalerl_jax import config_io
from scalerl_jax.config import Config
from scalerl_jax.config_check import leaves
from scalerl_jax.planning.twin.calibrate import calibrate
from scalerl_jax.planning.twin.choose import choose, sweep
from scalerl_jax.planning.twin.lengths import Quantiles
from scalerl_jax.planning.twin.observed import observe, recipe_of
from scalerl_jax.planning.twin.simulation import Scenario, Simulation
from scalerl_jax.planning.twin.speeds import Machine, ServerSpeed, TrainerSpeed
from tests.planning.twin.run_folder import write_simulated_run

pytestmark = pytest.mark.slow

TRAINER = TrainerSpeed(
    update_seconds=0.5,
    spread=(0.7, 0.9, 1.0, 1.1, 1.3),
    between_seconds=0.05,
    completion_seconds=0.002,
    behind_seconds=0.3,
    cores=1.5,
)
LENGTHS = Quantiles([(0, 8), (0.5, 30), (1, 60)])


def config() -> Config:
    made = Config(max_steps=120)
    made.rollout.prompts_per_step, made.rollout.group_size = 8, 4
    made.fleet.slots, made.fleet.queue = 32, 64
    made.evaluation.every, made.evaluation.prompts, made.evaluation.samples = 5, 100, 4
    return made


def truth(machine: Machine, *, servers: int = 2) -> Scenario:
    server = ServerSpeed(slots=32, queue=64, chunk=8, step_seconds=0.008, completion_seconds=0.01)
    recipe = recipe_of(leaves(config()))
    return Scenario(recipe=recipe, trainer=TRAINER, server=server, servers=servers, lengths=LENGTHS, machine=machine)


@pytest.mark.parametrize(
    "machine",
    [Machine(), Machine(cores=2.0), Machine(cores=2.0, used=0.2), Machine(trainer_cores=2, generator_cores=1)],
)
def test_the_speeds_that_a_run_was_made_with_are_found_in_it(tmp_path, machine):
    made = truth(machine)
    run = write_simulated_run(tmp_path, made, config=config(), steps=120)
    observed = observe(run)
    assert (observed.servers, observed.steps) == (2, 115)
    found = calibrate(observed, machine)
    assert all(abs(error) <= 0.08 for error in found.errors.values()), found.errors
    trainer, server = found.scenario.trainer, found.scenario.server
    rates = [speed.tokens_per_second(LENGTHS.mean) for speed in (server, made.server)]
    # Fewer cores for each, or more to do for a completion: on shared cores both look much alike.
    assert rates[0] == pytest.approx(rates[1], rel=0.25 if math.isfinite(machine.cores) else 0.15)
    if math.isfinite(machine.for_trainer):
        # Few cores for long or many for a short time: what the two come to is found.
        assert trainer.update_seconds * trainer.cores == pytest.approx(0.5 * 1.5, rel=0.15)
    else:
        assert trainer.update_seconds == pytest.approx(TRAINER.update_seconds, rel=0.05)
        assert trainer.update_seconds + trainer.behind_seconds == pytest.approx(0.8, rel=0.15)
    # What it is for: other fleets, from this one.
    counts = (1, 2, 3)
    wanted = sweep(made, servers=counts, off_policy=[8], steps=30, seed=7)
    outcomes = sweep(found.scenario, servers=counts, off_policy=[8], steps=30)
    for outcome, real in zip(outcomes, wanted, strict=True):
        assert outcome.steps_per_hour == pytest.approx(real.steps_per_hour, rel=0.1)
        assert outcome.mean_staleness == pytest.approx(real.mean_staleness, rel=0.2)


def test_a_slower_generator_shows_in_the_choice(tmp_path):
    """Generators of hardware of their own, far slower than the trainer: each one more brings its share, to a point."""
    made = dataclasses.replace(truth(Machine(), servers=1), trainer=TrainerSpeed(update_seconds=0.2))
    made = dataclasses.replace(made, server=dataclasses.replace(made.server, step_seconds=0.02))
    run = write_simulated_run(tmp_path, made, config=config(), steps=40)
    scenario = calibrate(observe(run), Machine()).scenario
    outcomes = sweep(scenario, servers=[1, 2, 4, 8], off_policy=[2, 8], steps=15)
    choice = choose(outcomes, trainer_devices=1, server_devices=1)
    assert choice.fastest.servers > choice.cheapest.servers
    rates = [outcome.steps_per_hour for outcome in outcomes if outcome.max_off_policy_steps == 8]
    assert rates[1] > 1.3 * rates[0]
    dear = choose(outcomes, trainer_devices=64, server_devices=1)
    assert dear.cheapest.servers > choice.cheapest.servers  # a dear trainer should not wait


def test_only_the_steps_asked_for_are_looked_at_and_restarts_are_left_out(tmp_path):
    run = write_simulated_run(tmp_path, truth(Machine()), config=config(), steps=40)
    path = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[20:]:
        row["incarnation"] = 2
        row["time"] += 3600  # of nobody's
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole, part = observe(run), observe(run, steps=range(10, 21))
    assert (whole.steps, part.steps) == (34, 11)
    assert whole.seconds < 100
    assert part.evaluation_seconds == pytest.approx(whole.evaluation_seconds, rel=0.3)


def test_too_little_of_a_run_is_said(tmp_path):
    run = write_simulated_run(tmp_path, truth(Machine()), config=config(), steps=12)
    with pytest.raises(ValueError, match=r"metrics\.jsonl: 7 steps after the first 5 .* 8 are needed"):
        observe(run)
    with pytest.raises(ValueError, match="is no run folder"):
        observe(str(tmp_path / "nothing"))


def test_without_lengths_it_says_what_would_help(tmp_path):
    run = write_simulated_run(tmp_path, truth(Machine()), config=config(), steps=20, quantiles=False)
    with pytest.raises(ValueError, match="--lengths_quantiles says how long they are"):
        observe(run)


def test_the_rows_are_those_of_the_simulation(tmp_path):
    made = truth(Machine(cores=2.0))
    run = write_simulated_run(tmp_path, made, config=config(), steps=30)
    simulation = Simulation(made, steps=30, seed=1)
    outcome = simulation.run(10)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert config_io.from_json((tmp_path / "config.json").read_text()) == config()
    times = [row["time"] for row in rows]
    assert all(a < b for a, b in itertools.pairwise(times))
    assert observe(run, steps=range(11, 31)).steps_per_hour == pytest.approx(outcome.steps_per_hour)
