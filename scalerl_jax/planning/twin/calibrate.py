"""Speeds from a run: those with which the simulation of that very run takes the time that the run took.

The ledger has seconds as they passed, beside everything else that wanted the cores. So the speeds of parts that have
the machine to themselves are not read off; they are found:

    update_seconds      <-  the trainer's busy seconds of a step with no evaluation before it
    behind_seconds      <-  those of a step right behind one, less the same
    step_seconds        <-  the generators' busy seconds of a step       few slots are taken then, w on average
    slot_seconds        <-  the seconds of an evaluation                 nearly all are taken then
    evaluation_seconds  <-  what is left of those, where the slots do not explain it

each corrected by measured over simulated until all agree. The cores that an update keeps busy, and the core-seconds of
a completion taken in, follow from what the trainer's process took of the cores in steps with an evaluation before them
and in others (column cpu_seconds).

Taken as they were measured: the spread of updates, what lies between two steps, the lengths. Prefills and the transfer
of weights are within the speeds found.
"""

import dataclasses
import math

from scalerl_jax.planning.twin.choose import simulated_steps
from scalerl_jax.planning.twin.lengths import Lengths
from scalerl_jax.planning.twin.observed import Observed
from scalerl_jax.planning.twin.simulation import Scenario, Simulation
from scalerl_jax.planning.twin.speeds import Machine, ServerSpeed, TrainerSpeed

ROUNDS = 12
STEPS = 40  # simulated in a round, at least: evaluations differ by what they find under way
CLOSE = 0.02  # of what was measured
_FASTEST, _SLOWEST = 0.3, 3.0  # of one correction
_DAMPED = 0.8  # so that it settles: a little more or less work may fall into another chunk
_SMALLEST_WIDTH = 8  # slots: of the embedded generator's narrowest program


@dataclasses.dataclass(frozen=True)
class Calibration:
    scenario: Scenario  # of the run itself
    errors: dict[str, float]  # what was fitted -> simulated over measured, less 1


def widths(slots: int) -> tuple[int, ...]:
    """Of the embedded generator's programs: doubling up to all slots."""
    doubling = [_SMALLEST_WIDTH << i for i in range(slots.bit_length()) if _SMALLEST_WIDTH << i <= slots // 2]
    return (*doubling, slots)


def calibrate(observed: Observed, machine: Machine, *, lengths: Lengths | None = None, seed: int = 0) -> Calibration:
    """lengths: other ones than the run's (None: its own). Raises ValueError where the machine cannot be."""
    settings, recipe = observed.settings, observed.recipe
    slots = settings["fleet.slots"]
    tokens = recipe.prompts_per_step * recipe.group_size * observed.lengths.mean
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
            step_seconds=max(1e-9, observed.generator_seconds * slots / 4 / tokens),
            widths=widths(slots) if settings["fleet.engine"] == "jax" else (),
        ),
        servers=observed.servers,
        lengths=lengths or observed.lengths,
        evaluation_lengths=observed.evaluation_lengths,
        machine=machine,
    )
    first, steps = simulated_steps(scenario, recipe.max_off_policy_steps, STEPS)
    best: Calibration | None = None
    for _ in range(ROUNDS):
        scenario = dataclasses.replace(scenario, trainer=_on_cores(scenario.trainer, observed, machine))
        simulation = Simulation(scenario, steps=steps, seed=seed)
        found = simulation.run(first)
        plain, behind = simulation.update_seconds(first)
        decoding = found.generator_busy * found.servers * found.seconds / found.steps
        pairs = {
            "update": (plain, observed.update_seconds),
            "update behind an evaluation": (behind, observed.update_behind_seconds),
            "decoding": (decoding, observed.generator_seconds),
            "evaluation": (found.evaluation_seconds, observed.evaluation_seconds),
        }
        errors = {name: a / b - 1 for name, (a, b) in pairs.items() if a > 0 and b > 0}
        if best is None or _furthest(errors) < _furthest(best.errors):
            best = Calibration(scenario, errors)
        if _furthest(errors) <= CLOSE:
            break
        scenario = _corrected(scenario, errors, observed, taken=simulation.training_slots())
    assert best is not None
    return best


def _furthest(errors: dict[str, float]) -> float:
    return max((abs(error) for error in errors.values()), default=0.0)


def _on_cores(trainer: TrainerSpeed, observed: Observed, machine: Machine) -> TrainerSpeed:
    """What the trainer's process took of the cores is the updates' and that of the completions taken in."""
    recipe, most = observed.recipe, machine.for_trainer
    if not math.isfinite(most):
        return trainer
    asked, each = recipe.evaluation_prompts * recipe.evaluation_samples, 0.0
    if observed.cores_behind_seconds and asked:
        more = trainer.behind_seconds * trainer.cores
        each = max(0.0, observed.cores_behind_seconds - observed.cores_seconds - more) / asked
    update = observed.cores_seconds - each * recipe.prompts_per_step * recipe.group_size
    cores = update / trainer.update_seconds if observed.cores_seconds else most
    return dataclasses.replace(trainer, completion_seconds=each, cores=min(most, max(0.1, cores)))


def _corrected(scenario: Scenario, errors: dict[str, float], observed: Observed, *, taken: float) -> Scenario:
    """taken: slots, mean over the chunks in training."""

    def by(name: str) -> float:
        return min(_SLOWEST, max(_FASTEST, 1 / (1 + errors.get(name, 0.0)))) ** _DAMPED

    def missing(name: str, measured: float) -> float:
        return -errors.get(name, 0.0) * measured * _DAMPED

    server, trainer = scenario.server, scenario.trainer
    few = next((width for width in server.widths if width >= taken), taken)
    sparse = (server.step_seconds + few * server.slot_seconds) * by("decoding")
    full = (server.step_seconds + server.slots * server.slot_seconds) * by("evaluation")
    most = 0.95 * sparse / max(1.0, few)  # a step costs something even with nothing in it
    each = (full - sparse) / (server.slots - few) if "evaluation" in errors and server.slots > few else 0.0
    beside = trainer.evaluation_seconds
    if not 0 < each < most or beside:
        beside = max(0.0, beside + missing("evaluation", observed.evaluation_seconds))
    each = min(max(0.0, each), most)
    alone = trainer.update_seconds * by("update")
    behind = (trainer.update_seconds + trainer.behind_seconds) * by("update behind an evaluation") - alone
    return dataclasses.replace(
        scenario,
        server=dataclasses.replace(server, step_seconds=sparse - few * each, slot_seconds=each),
        trainer=dataclasses.replace(
            trainer,
            update_seconds=alone,
            behind_seconds=max(0.0, behind) if observed.update_behind_seconds else 0.0,
            evaluation_seconds=beside,
        ),
    )
