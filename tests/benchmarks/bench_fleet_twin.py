"""The fleet twin against the quickstart itself: 1, 2 and 3 local servers, on all cores and pinned.

    python -m tests.benchmarks.bench_fleet_twin --folder=DIR [--steps=75] [--servers=1,2,3] [--modes=unpinned,pinned]
        [--fit_to=1] [--most_load=2]

Makes the runs that are not in DIR yet (twin_runs.py; one after another, each from the same warm start). Of each mode
the twin is fitted to the run of --fit_to servers alone, and predicts all of them: the other runs are read only to be
held against what was predicted. What is taken of them is what other programs took of the cores meanwhile, which is the
machine's and not the run's; cycles (from one evaluation to the next) in which that was more than --most_load are left
out, in the fit as well. Printed for each run: steps per hour measured and predicted, their ratio (wanted: within 10 %),
shares of time of both roles and the staleness histogram, measured above predicted.
"""

import bisect
import dataclasses
import itertools
import os
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from launch.commands import restart_with_tuned_malloc
from scalerl_jax.planning.twin.calibrate import calibrate
from scalerl_jax.planning.twin.choose import sweep
from scalerl_jax.planning.twin.observed import FEWEST, Observed, first_steps, observe
from scalerl_jax.planning.twin.outcome import Outcome
from scalerl_jax.planning.twin.speeds import Machine
from scalerl_jax.run.jsonl import read_rows, row_of
from tests.benchmarks import twin_runs

FLAGS = flags.FLAGS
_FOLDER = flags.DEFINE_string("folder", None, "of the runs", required=True)
_STEPS = flags.DEFINE_integer("steps", 75, "of a run", lower_bound=20)
_SERVERS = flags.DEFINE_list("servers", ["1", "2", "3"], "local servers of the runs")
_MODES = flags.DEFINE_list("modes", ["unpinned", "pinned"], "of the runs")
_FIT_TO = flags.DEFINE_integer("fit_to", 1, "servers of the run that the twin is fitted to")
_MOST_LOAD = flags.DEFINE_float("most_load", 2.0, "cores taken by others in a cycle that is looked at")
CORES = 2


@dataclasses.dataclass(frozen=True)
class Measured:
    run: Observed
    load: float  # cores that other programs took in the steps looked at


def look(folder: str) -> Measured:
    """Of the calm cycles of a run. Raises ValueError where there are too few."""
    workdir = os.path.join(folder, "run")
    with open(os.path.join(folder, twin_runs.LOAD), "rb") as file:
        samples = [row_of(line) for line in file]
    times = [sample["time"] for sample in samples]
    rows = {row["step"]: row for row in read_rows(os.path.join(workdir, "metrics.jsonl"))}
    settings = observe_settings(workdir)
    every, chosen, taken, seconds = settings["evaluation.every"], list[int](), 0.0, 0.0
    starts = range(-(-first_steps(settings) // every) * every, max(rows) - every + 1, every)
    for start in starts:
        ends = [samples[min(bisect.bisect(times, rows[s]["time"]), len(times) - 1)] for s in (start, start + every)]
        passed = rows[start + every]["time"] - rows[start]["time"]
        others = [sample["all"] - sample["ours"] for sample in ends]
        load = (others[1] - others[0]) / passed
        if load <= _MOST_LOAD.value:
            chosen += range(start + 1, start + every + 1)
            taken, seconds = taken + others[1] - others[0], seconds + passed
    if len(chosen) < FEWEST:
        raise ValueError(f"{folder}: {len(chosen)} steps with others on {_MOST_LOAD.value:g} cores at most, too few")
    return Measured(observe(workdir, steps=chosen), max(0.0, taken / seconds))


def observe_settings(workdir: str) -> dict[str, Any]:
    return observe(workdir).settings


def machine(mode: str, load: float) -> Machine:
    """Pinned or not, the system moves other programs to whichever core is free."""
    used = min(0.95, load / CORES)
    if mode == "pinned":
        return Machine(trainer_cores=1.0, generator_cores=1.0, used=used)
    return Machine(cores=float(CORES), used=used)


def line(name: str, rate: float, shares: Sequence[float], ages: dict[int, float]) -> str:
    mean = sum(age * share for age, share in ages.items())
    told = " ".join(f"{age}:{100 * share:.0f}%" for age, share in ages.items() if share >= 0.005)
    return (
        f"{name:22s} {rate:8.0f}  " + " ".join(f"{100 * share:6.0f} %" for share in shares) + f"  {mean:5.2f}  {told}"
    )


def shares_of(found: Outcome) -> list[float]:
    return [getattr(found, f"{side}_{part}") for side, part in itertools.product(
        ("trainer", "generator"), ("busy", "idle", "evaluation"))]  # fmt: skip


def main(_: list[str]) -> None:
    folder = os.path.abspath(_FOLDER.value)
    model = twin_runs.warm_start(folder)
    counts = [int(count) for count in _SERVERS.value]
    ratios: dict[str, float] = {}
    for mode in _MODES.value:
        found: dict[int, Measured] = {}
        for count in counts:
            path = os.path.join(folder, f"{mode}-{count}")
            twin_runs.run(path, model=model, servers=count, steps=_STEPS.value, pinned=mode == "pinned")
            found[count] = look(path)
        fitted = calibrate(found[_FIT_TO.value].run, machine(mode, found[_FIT_TO.value].load))
        errors = ", ".join(f"{name} {100 * error:+.1f} %" for name, error in fitted.errors.items())
        print(f"\n{mode}, {os.path.basename(folder)}: fitted to the run of {_FIT_TO.value} ({errors})")
        print(
            "                      steps/hour  trainer busy idle evaluating  generators busy idle evaluating  staleness"
        )
        for count in counts:
            real = found[count]
            scenario = dataclasses.replace(fitted.scenario, machine=machine(mode, real.load))
            (predicted,) = sweep(scenario, servers=[count], off_policy=[real.run.recipe.max_off_policy_steps], steps=60)
            ratios[f"{mode} {count}"] = ratio = predicted.steps_per_hour / real.run.steps_per_hour
            print(f"{count} servers, {real.run.steps} steps, others on {real.load:.2f} cores: ratio {ratio:.2f}"
                  + (" (fitted to this one)" if count == _FIT_TO.value else ""))  # fmt: skip
            print(line("  measured", real.run.steps_per_hour, list(real.run.shares.values()), real.run.staleness))
            print(line("  predicted", predicted.steps_per_hour, shares_of(predicted), predicted.staleness), flush=True)
    others = {name: ratio for name, ratio in ratios.items() if not name.endswith(f" {_FIT_TO.value}")}
    print("\npredicted over measured, steps per hour, of the runs that were not fitted to: "
          + ", ".join(f"{name}: {ratio:.2f}" for name, ratio in others.items()))  # fmt: skip


if __name__ == "__main__":
    restart_with_tuned_malloc()  # as the commands do
    app.run(main)
