"""Speeds from a run: those with which the simulation of that very run takes the time that the run took.

The ledger has seconds as they passed, beside everything else that wanted the cores. So the speeds of parts that have
the machine to themselves are not read off; they are found:

    update_seconds      <-  the trainer's busy seconds of a step with no evaluation before it
    behind_seconds      <-  those of a step right behind one, less the same
    step_seconds        <-  the generators' busy seconds of a step       some slots stand empty then
    completion_seconds  <-  the seconds of an evaluation                 few do then: fewer decode steps a completion

by least squares of the logarithms of simulated over measured. The cores that an update keeps busy, and the core-seconds
of a completion taken in, follow from what the trainer's process took of the cores in steps with an evaluation before
them and in others (column cpu_seconds).

Taken as they were measured: the spread of updates, what lies between two steps, the lengths. Prefills are within what a
completion costs, as is what each slot adds to a step; the transfer of weights is within the speeds found.
"""

import contextlib
import dataclasses
import math

import numpy as np
import scipy.optimize

from scalerl_jax.planning.twin.choose import simulated_steps
from scalerl_jax.planning.twin.lengths import Lengths
from scalerl_jax.planning.twin.observed import Observed
from scalerl_jax.planning.twin.simulation import Scenario, Simulation
from scalerl_jax.planning.twin.speeds import Machine, ServerSpeed, TrainerSpeed

FITTED = ("update", "update behind an evaluation", "decoding", "evaluation")
STEPS = 40  # simulated in a round, at least: evaluations differ by what they find under way
CLOSE = 0.03  # of what was measured
_FIRST_ROUNDS = 5  # each corrects every speed by what it is nearest to
_ROUNDS = 6  # of the solver; each simulates once and, where that was no step back, four times more for the slopes
_PROBE = 0.1  # of a speed, for a slope: a little more or less work may fall into another chunk
_LEAST, _MOST = 0.02, 50.0  # of what it begins with
_STEPS_PART = 0.6  # of what a completion costs, to begin with


@dataclasses.dataclass(frozen=True)
class Calibration:
    scenario: Scenario  # of the run itself
    errors: dict[str, float]  # what was fitted -> simulated over measured, less 1


class _Near(Exception):
    """All is close enough."""


def calibrate(observed: Observed, machine: Machine, *, lengths: Lengths | None = None, seed: int = 0) -> Calibration:
    """lengths: other ones than the run's (None: its own). Raises ValueError where the machine cannot be."""
    settings, recipe = observed.settings, observed.recipe
    slots = settings["fleet.slots"]
    scenario = Scenario(
        recipe=recipe,
        trainer=TrainerSpeed(
            update_seconds=observed.update_seconds,
            spread=observed.spread,
            between_seconds=observed.between_seconds,
        ),
        server=ServerSpeed(
            slots=slots,
            queue=settings["fleet.queue"],
            chunk=settings["fleet.decode_chunk"],
            step_seconds=1.0,
        ),
        servers=observed.servers,
        lengths=lengths or observed.lengths,
        evaluation_lengths=observed.evaluation_lengths,
        machine=machine,
    )
    first, steps = simulated_steps(scenario, recipe.max_off_policy_steps, STEPS)
    start = np.array([1.0, 1.0, _STEPS_PART, 1 - _STEPS_PART]) * _of_run(observed)
    best: Calibration | None = None

    def off(speeds: np.ndarray) -> np.ndarray:
        """[4] log of simulated over measured, 0 where nothing was measured."""
        nonlocal best
        tried = _with(scenario, speeds * start, observed, machine)
        errors = _errors(tried, observed, steps=steps, first=first, seed=seed)
        if best is None or _furthest(errors) < _furthest(best.errors):
            best = Calibration(tried, errors)
        if _furthest(errors) <= CLOSE:
            raise _Near
        return np.array([math.log1p(errors.get(name, 0.0)) for name in FITTED])

    with contextlib.suppress(_Near):
        speeds = np.ones(len(FITTED))
        for _ in range(_FIRST_ROUNDS):
            update, behind, decoding, evaluation = np.exp(-off(speeds))
            completion = math.sqrt(decoding * evaluation) if observed.evaluation_seconds else decoding
            speeds = np.clip(speeds * [update, behind, completion, completion], 2 * _LEAST, _MOST / 2)
        scipy.optimize.least_squares(
            off, speeds, bounds=(_LEAST, _MOST), diff_step=_PROBE, max_nfev=_ROUNDS, x_scale="jac"
        )
    assert best is not None
    return best


def _of_run(observed: Observed) -> np.ndarray:
    """[4] seconds that the fit begins with, but for what a completion is made up of."""
    recipe = observed.recipe
    completion = max(1e-9, observed.generator_seconds) / (recipe.prompts_per_step * recipe.group_size)
    behind = max(0.1 * observed.update_seconds, observed.update_behind_seconds - observed.update_seconds)
    return np.array([observed.update_seconds, behind, completion, completion])


def _with(scenario: Scenario, seconds: np.ndarray, observed: Observed, machine: Machine) -> Scenario:
    """seconds: [4] of an update, more behind an evaluation, of a completion's decode steps with all slots taken, of a
    completion beside them."""
    update, behind, sampling, completion = seconds.tolist()
    server, recipe = scenario.server, scenario.recipe
    trainer = dataclasses.replace(
        scenario.trainer,
        update_seconds=update,
        behind_seconds=behind if observed.update_behind_seconds else 0.0,
    )
    alone = not recipe.evaluation_every or not observed.evaluation_seconds
    return dataclasses.replace(
        scenario,
        trainer=_on_cores(trainer, observed, machine),
        server=dataclasses.replace(
            server,
            step_seconds=(sampling + completion * alone) * server.slots / observed.lengths.mean,
            completion_seconds=0.0 if alone else completion,
        ),
    )


def _errors(scenario: Scenario, observed: Observed, *, steps: int, first: int, seed: int) -> dict[str, float]:
    """Of FITTED: simulated over measured, less 1."""
    simulation = Simulation(scenario, steps=steps, seed=seed)
    found = simulation.run(first)
    plain, behind = simulation.update_seconds(first)
    decoding = found.generator_busy * found.servers * found.seconds / found.steps
    measured = (
        observed.update_seconds,
        observed.update_behind_seconds,
        observed.generator_seconds,
        observed.evaluation_seconds,
    )
    simulated = (plain, behind, decoding, found.evaluation_seconds)
    return {name: a / b - 1 for name, a, b in zip(FITTED, simulated, measured, strict=True) if a > 0 and b > 0}


def _furthest(errors: dict[str, float]) -> float:
    return max((abs(error) for error in errors.values()), default=0.0)


def _on_cores(trainer: TrainerSpeed, observed: Observed, machine: Machine) -> TrainerSpeed:
    """What the trainer's process took of the cores is the updates' and that of the completions taken in.

    With a step's n completions, an evaluation's m, an update of u seconds and b more behind an evaluation:

        taken in a step                  cores * u       + n * each
        taken in one behind, besides     cores * b       + m * each
    """
    recipe, most = observed.recipe, machine.for_trainer
    if not math.isfinite(most) or not observed.cores_seconds:
        return dataclasses.replace(trainer, cores=most if math.isfinite(most) else 1.0)
    step = recipe.prompts_per_step * recipe.group_size
    evaluation = recipe.evaluation_prompts * recipe.evaluation_samples
    part = step / evaluation if observed.cores_behind_seconds and evaluation else 0.0
    besides = observed.cores_behind_seconds - observed.cores_seconds
    seconds = max(0.1 * trainer.update_seconds, trainer.update_seconds - part * trainer.behind_seconds)
    cores = min(most, max(0.1, (observed.cores_seconds - part * besides) / seconds))
    each = max(0.0, besides - cores * trainer.behind_seconds) / evaluation if part else 0.0
    return dataclasses.replace(trainer, completion_seconds=each, cores=cores)
