"""What scalerl-fit, scalerl-compare and scalerl-calibrate are given: files, and the flags that say how to read them.

Nothing here needs jax, so that a mistake in them is told before it is imported (early_checks.py).
"""

import os
from collections.abc import Sequence

from scalerl_jax.cli import fit_flags as given
from scalerl_jax.cli.entry import UserError, check_out, user_mistakes
from scalerl_jax.scaling import readers, tables, units

_read: list[list[readers.RunPoints]] = []  # by preload(), at most once


def preload(paths: Sequence[str], name: str, *, parts_too: bool) -> None:
    """Checks the arguments, and keeps the runs read for the next call of read_evaluations. Raises UserError."""
    check_arguments(paths, name)
    found = read_evaluations(paths, parts_too=parts_too)
    _read[:] = [found]


def check_arguments(paths: Sequence[str], name: str) -> str:
    """The folder to write NAME.json, NAME.png and NAME.svg into. Raises UserError where it or the files are missing."""
    if not paths:
        raise UserError(f"no files given, for example: scalerl-{name} evals.csv --x=gpu_hours --y=pass_rate --out=fits")
    if given.OUT.value is None:
        raise UserError(f"--out: no folder given for {name}.json, {name}.png and {name}.svg")
    if os.path.exists(given.OUT.value) and not os.path.isdir(given.OUT.value):
        raise UserError(f"--out={given.OUT.value}: is a file")
    check_out("--out", given.OUT.value)
    return given.OUT.value


def axis_labels(x: str) -> tuple[str, str]:
    """Labels of compute, read from column x, and of the score."""
    x_name = units.axis_name(x)
    unit = units.conversion(given.X_UNIT.value)[1]
    return f"{x_name}, in {unit}" if unit else x_name, given.Y.value or readers.RUN_FOLDER_Y


def read_evaluations(paths: Sequence[str], *, parts_too: bool) -> list[readers.RunPoints]:
    """The runs in the files, read as the flags ask; runs that `preload` has read are not read again. Raises
    UserError."""
    if _read:
        return _read.pop()
    with user_mistakes(tables.InputError):
        return readers.read_runs(
            paths,
            x=given.X.value,
            y=given.Y.value,
            run_column=given.RUN_COLUMN.value,
            seed_column=given.SEED_COLUMN.value,
            seeds_by_folder=given.SEEDS.value == "folder",
            passes_column=given.PASSES.value,
            trials_column=given.TRIALS.value,
            task_column=given.TASK_COLUMN.value,
            duplicates=given.DUPLICATES.value,
            parts_too=parts_too,
        )
