"""The models that the runs of a study start from: the base's model.path if it exists, else models made here.

    WORKDIR/warm-start                  for all runs with the base's traces
    WORKDIR/warm-start-error_rate_0.4   for runs whose sft.* or environment.* makes other traces than the base's, named
                                        by the differing fields

Other changes of a run (steps, seed, loss) need no other model. A run that changes sft.* gets its own model even if
the base's model.path exists; one that changes only the environment then starts from model.path.
"""

import copy
import dataclasses
import os
import re

from scalerl_jax.cli.entry import UserError
from scalerl_jax.config import Config
from scalerl_jax.config_check import leaves
from scalerl_jax.study.members import Study

_FOLDER = "warm-start"
_GROUPS = ("sft.", "environment.", "mixture.")
_OF_PROMPTS_ALONE = ("environment.train_prompts", "environment.unanswerable")  # these change no trace


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """A model that scalerl-sft makes."""

    name: str  # name of its folder
    config: Config

    def model(self, workdir: str) -> str:
        return os.path.join(os.path.abspath(workdir), self.name, "model")

    def is_made(self, workdir: str) -> bool:
        return os.path.isfile(os.path.join(self.model(workdir), "config.json"))


@dataclasses.dataclass(frozen=True)
class Starts:
    """The model that each run starts from, by the run's name."""

    models: dict[str, str]  # folders
    made: dict[str, WarmStart]  # for runs whose model is made here
    notes: tuple[str, ...]


def starts(study: Study, workdir: str) -> Starts:
    """Finds each run's model. Raises UserError where there is no model and the config cannot make one."""
    given = study.base.model.path
    # Once a model was started here it is used, even if model.path appears later.
    there = os.path.isdir(given) and not os.path.isdir(os.path.join(workdir, _FOLDER)) if given else False
    models, made = dict[str, str](), dict[str, WarmStart]()
    for name, config in study.runs.items():
        differ = _differences(study.base, config)
        own = any(field.startswith("sft.") for field in differ)
        if config.model.path != given:
            models[name] = config.model.path
        elif there and not own:
            models[name] = given
        else:
            one = _warm_start(study.base, config, differ)
            _check_can_be_made(one, given)
            models[name], made[name] = one.model(workdir), one
    return Starts(models, made, tuple(_notes(study, given, there, made)))


def _differences(base: Config, config: Config) -> dict[str, object]:
    before, after = leaves(base), leaves(config)
    asked = [field for field in after if field.startswith(_GROUPS) and field not in _OF_PROMPTS_ALONE]
    return {field: after[field] for field in asked if before.get(field) != after[field]}


def _warm_start(base: Config, config: Config, differ: dict[str, object]) -> WarmStart:
    merged = copy.deepcopy(base)
    merged.sft, merged.environment = copy.deepcopy(config.sft), copy.deepcopy(config.environment)
    merged.mixture = copy.deepcopy(config.mixture)
    parts = [f"{field.partition('.')[2]}_{value}" for field, value in differ.items()]
    return WarmStart(re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join([_FOLDER, *parts])), merged)


def _check_can_be_made(one: WarmStart, given: str) -> None:
    if one.config.sft.traces:
        return
    from scalerl_jax.traces import built_in  # it imports jax, which nothing else needs before the results

    try:
        built_in.makers(one.config)
    except ValueError as error:
        raise UserError(f"config.model.path={given}: no such folder, and no warm start can be made: {error}") from error


def _notes(study: Study, given: str, there: bool, made: dict[str, WarmStart]) -> list[str]:
    notes = []
    if there:
        alike = [name for name in study.runs if name not in made]
        notes.append(f"{len(alike)} of {len(study.runs)} runs start from {given}, which is there")
    for folder in dict.fromkeys(one.name for one in made.values()):
        names = [name for name, one in made.items() if one.name == folder]
        shown = ", ".join(names) if len(names) < len(study.runs) else "all"
        notes.append(f"{folder} is the start of {shown}")
    return notes
