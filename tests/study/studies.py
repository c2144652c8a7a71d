"""Studies for the tests: small ones in a file of their own, run folders that a trainer could have left, the command."""

import os
import pathlib
import subprocess
from collections.abc import Sequence

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.run.folder import RunFolder
from tests.report.run_folders import SAMPLES, compute, rate
from tests.support.evaluations import counted
from tests.support.paths import ROOT
from tests.support.processes import run_python, single_threaded

STUDIES = """
import copy

def two(base):
    slow = copy.deepcopy(base)
    slow.optimizer.learning_rate /= 4
    return {"plain": copy.deepcopy(base), "slow": slow}

def seeds(base):
    made = {}
    for n in range(3):
        config = copy.deepcopy(base)
        config.seed += n
        made[f"seed_{config.seed}"] = config
    return made

def other(base):
    slow = copy.deepcopy(base)
    slow.optimizer.learning_rate /= 8
    return {"slow": slow}

def broken(base):
    config = copy.deepcopy(base)
    config.environment.validation = "no-such-file.jsonl"
    return {"plain": copy.deepcopy(base), "broken": config}

STUDIES = {"two": two, "seeds": seeds, "other": other, "broken": broken}
"""
TINY = str(ROOT / "tests" / "train" / "tiny.py")
QUICKSTART = str(ROOT / "configs" / "quickstart.py")


def write_studies(folder: pathlib.Path) -> str:
    path = folder / "studies.py"
    path.write_text(STUDIES)
    return str(path)


def command(*flags: str) -> list[str]:
    return ["-m", "scalerl_jax.study.command", *flags]


def environment() -> dict[str, str]:
    return {**single_threaded(), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


def study(*flags: str, folder: pathlib.Path = ROOT, seconds: float = 600) -> subprocess.CompletedProcess[str]:
    return run_python(*command(*flags), folder=folder, environment=environment(), seconds=seconds)


def write_run(
    folder: str, config: Config, *, final: float = 0.9, steps: Sequence[int] | None = None, saved: int | None = None
) -> None:
    """A run folder with evaluations along a curve that ends at `final`, and a checkpoint of step `saved`."""
    steps = range(0, config.max_steps + 1, 5) if steps is None else steps
    rng = np.random.default_rng(config.seed)
    with RunFolder(folder, config) as run:
        run.resume(0)
        for step in steps:
            spent = compute(step)
            passes = rng.binomial(SAMPLES, rate(spent["device_hours"], final), 100).tolist()
            run.evaluation(step=step, found=counted(passes, SAMPLES), seconds=1.0, compute=spent)
            run.metrics(step, {"pass_rate": 0.5})
    if saved is not None:
        os.makedirs(os.path.join(folder, "checkpoints", str(saved)))
