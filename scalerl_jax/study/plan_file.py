"""WORKDIR/plan.json: the definition of the study at its first start, and the runs that ended before max_steps.

    studies   the names of --study
    config    the base's leaves, with the overrides
    runs      run -> the leaves in which it differs from the base
    models    run -> the model it starts from; a path inside WORKDIR is relative to it
    ended     run -> step: it ended by itself before max_steps, with no prompt left

Later starts may add seeds and members; any other difference is refused, with the name of the field.

This module also finds which runs of a study are done, by scalerl-train's rule, and how far the others are.

A run is done if its newest checkpoint and its last evaluation are those of max_steps, or if a trainer ended it
earlier, as it does when no prompt is left (PlanFile.ended).
"""

import dataclasses
import fcntl
import json
import os
from typing import Any

from scalerl_jax.cli.entry import UserError
from scalerl_jax.config import Config
from scalerl_jax.config_check import ConfigError, leaves
from scalerl_jax.run import continuing
from scalerl_jax.run.jsonl import last_row
from scalerl_jax.study.members import Starts, Study
from scalerl_jax.system.files import newest_step, read_object, write_whole

FILE = "plan.json"


class PlanFile:
    """The plan of this start, checked against the existing file; `save` writes it."""

    def __init__(self, workdir: str, study: Study, starts: Starts):
        """Raises UserError where the folder holds another study."""
        self._workdir = os.path.abspath(workdir)
        self._path = os.path.join(self._workdir, FILE)
        base = leaves(study.base)
        self._now: dict[str, Any] = json.loads(json.dumps({
            "studies": list(study.members),
            "config": base,
            "runs": {
                name: {field: value for field, value in leaves(config).items() if base.get(field) != value}
                for name, config in study.runs.items()
            },
            "models": {name: self._inside(model) for name, model in starts.models.items()},
            "ended": {},
        }))  # fmt: skip
        before = self._read()
        if before is not None:
            prefix = f"--workdir={workdir}: holds another study: "
            if before["studies"] != self._now["studies"]:
                raise UserError(f"{prefix}--study={','.join(before['studies'])} there")
            # A field added after the plan was written had its default.
            default = {field: value for field, value in leaves(Config()).items() if field in base}
            _refuse(prefix, {**json.loads(json.dumps(default)), **before["config"]}, self._now["config"])
            for name, changes in self._now["runs"].items():
                if name in before["runs"]:
                    _refuse(f"{prefix}{name}: ", before["runs"][name], changes)
                    if before["models"][name] != self._now["models"][name]:
                        raise UserError(f"{prefix}{name} starts from {before['models'][name]} there")
            for part in ("runs", "models", "ended"):
                self._now[part] = {**before[part], **self._now[part]}

    @property
    def ended(self) -> dict[str, int]:
        """Run -> the step of its last checkpoint, for runs that ended by themselves."""
        return self._now["ended"]

    def save(self) -> None:
        write_whole(self._path, json.dumps(self._now, indent=1) + "\n")

    def _inside(self, path: str) -> str:
        """A path relative to the workdir if inside it, since the whole folder may be moved."""
        whole = os.path.abspath(path)
        return os.path.relpath(whole, self._workdir) if whole.startswith(self._workdir + os.sep) else path

    def _read(self) -> dict[str, Any] | None:
        try:
            found = read_object(self._path)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UserError(f"{error}: what the study is cannot be told") from error
        if not isinstance(found.get("studies"), list) or any(
            not isinstance(found.get(part), dict) for part in ("config", "runs", "models", "ended")
        ):
            raise UserError(f"{self._path}: is not the plan of a study")
        return found


def _refuse(prefix: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    for field in {**before, **now}:
        if before.get(field) != now.get(field):
            there, here = (repr(values[field]) if field in values else "the base's" for values in (before, now))
            raise UserError(f"{prefix}config.{field} is {there} there and {here} now")


_MODEL = "model.path"


@dataclasses.dataclass(frozen=True)
class Standing:
    """What a study makes of one run folder."""

    finished: bool
    moved: bool = False  # the study's folder was moved after the run started, so its model's path has changed


def standing(folder: str, config: Config, *, ended: int | None = None) -> Standing:
    """config: the run's, with model.path. ended: the step at which a trainer ended it, if one did.

    Raises UserError where the folder holds a run of another config.
    """
    path = os.path.join(folder, "config.json")
    saved = newest_step(folder)
    evaluated = last_row(os.path.join(folder, "evals.jsonl"))
    if not os.path.isfile(path) or (saved is None and evaluated is None):
        return Standing(finished=False)
    try:
        changes = continuing.changes(read_object(path), config)
    except (ValueError, ConfigError) as error:
        raise UserError(f"{folder}: holds a run of another config: {error}") from error
    bound = continuing.refused([one for one in changes if one.name != _MODEL], allowed=(), warm_start=False)
    if bound:
        raise UserError(f"{folder}: holds a run of another config: {bound[0]}")
    moved = next((_tail(str(one.before)) == _tail(str(one.now)) for one in changes if one.name == _MODEL), False)
    last = evaluated["step"] if evaluated is not None else -1
    finished = saved == last == config.max_steps or (saved is not None and saved == ended)
    return Standing(finished, moved)


def _tail(path: str) -> list[str]:
    """The last two parts of a path, WARM-START/model in a study's folder."""
    return os.path.normpath(path).split(os.sep)[-2:]


def is_held(folder: str) -> bool:
    """Whether a trainer is running in the folder: one of an earlier start of the study that is still saving."""
    try:
        descriptor = os.open(os.path.join(folder, "lock"), os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
