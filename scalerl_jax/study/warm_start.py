"""The models that the runs of a study start from: the base's model.path where it is there, else ones made here.

    WORKDIR/warm-start                  of the base, for all runs that do not change it
    WORKDIR/warm-start-error_rate_0.4   of runs whose sft.* or environment.* makes other traces than the base's, named
                                        by what differs

What else a run changes (its trainer's steps, seed, loss) makes no other model. A run that changes sft.* asks for
another model by that, and gets one though the base's is there; one that changes the environment alone starts from it.
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
_OF_PROMPTS_ALONE = ("environment.train_prompts", "environment.unanswerable")  # they change no trace


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """One that scalerl-sft makes."""

    name: str  # of its folder
    config: Config

    def model(self, workdir: str) -> str:
        return os.path.join(os.path.abspath(workdir), self.name, "model")

    def is_made(self, workdir: str) -> bool:
        return os.path.isfile(os.path.join(self.model(workdir), "config.json"))


@dataclasses.dataclass(frozen=True)
class Starts:
    """What each run starts from, by its name."""

    models: dict[str, str]  # folders
    made: dict[str, WarmStart]  # of the runs whose model is made here
    notes: tuple[str, ...]


def starts(study: Study, workdir: str) -> Starts:
    """Raises UserError where there is no model to start from, and the config makes none."""
    given = study.base.model.path
    # A model that was begun here stays the one, whatever appears elsewhere.
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
