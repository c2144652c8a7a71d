"""The runs of a study: its members with their seeds, each with a unique name; and the models that they start from.

    base = the config of --base with --config.a.b=v        members = STUDIES[study](base)

Runs with equal configs are one run, whichever studies they belong to, under the first name given to it. All members
come before any further seeds, so more seeds rename nothing.

The runs start from the base's model.path if it exists, else from models made here:

    WORKDIR/warm-start                  for all runs with the base's traces
    WORKDIR/warm-start-error_rate_0.4   for runs whose sft.* or environment.* makes other traces than the base's, named
                                        by the differing fields

Other changes of a run (steps, seed, loss) need no other model. A run that changes sft.* gets its own model even if
the base's model.path exists; one that changes only the environment then starts from model.path.
"""

import copy
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence

from scalerl_jax.cli.entry import UserError
from scalerl_jax.config import Config
from scalerl_jax.config_check import ConfigError, check, leaves
from scalerl_jax.config_io import GivenConfig, as_flags, load_file, load_module, naming_user_code

FILE = "ablations.py"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # also a folder's name
_FOLDER = "warm-start"
_LONGEST_NAME = 100  # characters
_GROUPS = ("sft.", "environment.", "mixture.")
_OF_PROMPTS_ALONE = ("environment.train_prompts", "environment.unanswerable")  # these change no trace


@dataclasses.dataclass(frozen=True)
class Study:
    """The runs to make. A member's runs are its seeds, in order."""

    base_path: str
    file: Config  # the config of --base, relative to which a run's flags are given
    base: Config  # with the overrides
    runs: dict[str, Config]  # by the name of the run's folder; model.path is the base's
    members: dict[str, dict[str, tuple[str, ...]]]  # study -> member -> its runs

    def chosen(self, names: Sequence[str]) -> list[str]:
        """The runs of the members (or runs) of these names; without names all. Raises UserError."""
        if not names:
            return list(self.runs)
        found = dict[str, None]()
        for name in names:
            of_members = [runs for members in self.members.values() for runs in (members.get(name, ()),) if runs]
            if name not in self.runs:
                self.check_member("members", name)
            found.update(dict.fromkeys(run for runs in of_members or [(name,)] for run in runs))
        return [name for name in self.runs if name in found]

    def check_member(self, flag: str, name: str) -> None:
        """Raises UserError where no study has a member of the name that the flag gives."""
        there = dict.fromkeys(member for members in self.members.values() for member in members)
        if name not in there:
            raise UserError(f"--{flag}={name}: no such member; there are {', '.join(there)}")

    def flags(self, config: Config) -> list[str]:
        """The --config.a.b=v flags that turn the base's file into this config."""
        return as_flags(config, self.file)


def read(given: GivenConfig, *, base: str, studies: str, names: Sequence[str], seeds: int) -> Study:
    """Reads a study from the flags as the user gave them. Raises UserError or ConfigError, one line, where a config is
    wrong."""
    if bool(base) == bool(given.path):
        raise UserError("--base: no config file given, for example --base=configs/quickstart.py" if not base else
                        f"--base={base}: --config={given.path} is given too, and there is one base")  # fmt: skip
    path = base or given.path
    file = load_file(path)
    config = GivenConfig("", given.overrides).config(copy.deepcopy(file))
    return make(path, file, config, made(config, studies or _studies_file(path), names), seeds=seeds)


def _studies_file(base: str) -> str:
    """The nearest ablations.py, from the base's folder upwards."""
    folder = os.path.dirname(os.path.abspath(base))
    while True:
        path = os.path.join(folder, FILE)
        if os.path.isfile(path):
            return path
        if folder == os.path.dirname(folder):
            return os.path.join("configs", FILE)
        folder = os.path.dirname(folder)


def made(base: Config, path: str, names: Sequence[str]) -> dict[str, dict[str, Config]]:
    """study -> member -> config, from the file's STUDIES. Raises UserError or ConfigError."""
    given = f"--studies={path}"
    with naming_user_code(given):
        there = getattr(load_module(path, given), "STUDIES", None)
    if not isinstance(there, Mapping) or not all(map(callable, there.values())):
        raise UserError(f"{given}: has no STUDIES, a dict of functions from a base to its members")
    if not names:
        raise UserError(f"--study: none is given; there are {', '.join(there)}")
    found = {}
    for name in dict.fromkeys(names):
        if name not in there:
            raise UserError(f"--study={name}: no such study; there are {', '.join(there)}")
        with naming_user_code(f"{given}: {name}"):
            found[name] = dict(there[name](copy.deepcopy(base)))
        wrong = [one for one in found[name] if not (isinstance(one, str) and _NAME.fullmatch(one))]
        if wrong or not found[name]:
            raise UserError(f"{given}: {name}: " + (f"{wrong[0]!r} names no folder" if wrong else "has no members"))
        for member, config in found[name].items():
            try:
                check(config)
            except ConfigError as error:
                raise ConfigError(f"--study={name}: {member}: {error}") from None
    return found


def make(path: str, file: Config, base: Config, members: Mapping[str, Mapping[str, Config]], *, seeds: int) -> Study:
    runs: dict[str, Config] = {}
    of: dict[str, dict[str, tuple[str, ...]]] = {study: dict.fromkeys(given, ()) for study, given in members.items()}
    for further in range(seeds):
        for study, given in members.items():
            # The members of some studies are seeds themselves: more of each would be runs of the others.
            for member, config in () if further and only_seeds(given.values()) else given.items():
                seeded = copy.deepcopy(config)
                seeded.seed += further
                name = f"{member}-seed_{seeded.seed}" if further else member
                of[study][member] += (_run(runs, name, study, seeded),)
    return Study(path, file, base, runs, of)


def only_seeds(configs: Iterable[Config]) -> bool:
    """Whether there are several, which differ only in their seeds."""
    found = [leaves(config) | {"seed": 0} for config in configs]
    return len(found) > 1 and all(one == found[0] for one in found)


def _run(runs: dict[str, Config], name: str, study: str, config: Config) -> str:
    """The name of the run with this config, which is added to `runs` if missing."""
    values = leaves(config)
    for known, other in runs.items():
        if leaves(other) == values:
            return known
    if name in runs:  # another study has a different member of this name
        name = f"{study}-{name}"
    while name in runs:
        name += "_"
    runs[name] = config
    return name


# ---------------------------------------------------------------------- the models


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
    asked = [f for f in {**before, **after} if f.startswith(_GROUPS) and f not in _OF_PROMPTS_ALONE]
    # A part of a mixture may be in one of them alone.
    return {field: after.get(field, "none") for field in asked if before.get(field, "none") != after.get(field, "none")}


def _warm_start(base: Config, config: Config, differ: dict[str, object]) -> WarmStart:
    merged = copy.deepcopy(base)
    merged.sft, merged.environment = copy.deepcopy(config.sft), copy.deepcopy(config.environment)
    merged.mixture = copy.deepcopy(config.mixture)
    whole = "-".join([_FOLDER, *(f"{field.partition('.')[2]}_{value}" for field, value in differ.items())])
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", whole)
    if name != whole or len(name) > _LONGEST_NAME:  # others may have the same
        name = f"{name[:_LONGEST_NAME]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
    return WarmStart(name, merged)


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
