"""WORKDIR/plan.json: what the study is, as its first start had it, and which of its runs have ended before max_steps.

    studies   the names of --study
    config    the base's leaves, with the overrides
    runs      by name, the leaves in which each differs from the base
    models    by run, what it starts from; a path inside WORKDIR is told from there
    ended     run -> step: it ended by itself before max_steps, with no prompt left

More seeds and other members may be asked for at any time; whatever else differs is refused by name.
"""

import json
import os
from typing import Any

from scalerl_jax.cli.entry import UserError
from scalerl_jax.config_check import leaves
from scalerl_jax.study.members import Study
from scalerl_jax.study.warm_start import Starts
from scalerl_jax.system.files import write_whole
from scalerl_jax.system.json_values import read_object

FILE = "plan.json"


class PlanFile:
    """The plan of this start held against the one that is there; written by `save`."""

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
            said = f"--workdir={workdir}: holds another study: "
            if before["studies"] != self._now["studies"]:
                raise UserError(f"{said}--study={','.join(before['studies'])} there")
            _refuse(said, before["config"], self._now["config"])
            for name, changes in self._now["runs"].items():
                if name in before["runs"]:
                    _refuse(f"{said}{name}: ", before["runs"][name], changes)
                    if before["models"][name] != self._now["models"][name]:
                        raise UserError(f"{said}{name} starts from {before['models'][name]} there")
            for part in ("runs", "models", "ended"):
                self._now[part] = {**before[part], **self._now[part]}

    @property
    def ended(self) -> dict[str, int]:
        """Runs that ended by themselves, and the step of their last checkpoint then."""
        return self._now["ended"]

    def save(self) -> None:
        write_whole(self._path, json.dumps(self._now, indent=1) + "\n")

    def _inside(self, path: str) -> str:
        """A folder of the study's may have moved with it."""
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


def _refuse(said: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    for field in {**before, **now}:
        if before.get(field) != now.get(field):
            there, here = (repr(values[field]) if field in values else "the base's" for values in (before, now))
            raise UserError(f"{said}config.{field} is {there} there and {here} now")
