"""The runs of a study: its members with their seeds, each with a unique name.

    base = the config of --base with --config.a.b=v        members = STUDIES[study](base)

Runs with equal configs are one run, whichever studies they belong to, under the first name given to it. All members
come before any further seeds, so more seeds rename nothing.
"""

import copy
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence

from scalerl_jax.cli.entry import UserError
from scalerl_jax.config import Config
from scalerl_jax.config_check import ConfigError, check, leaves
from scalerl_jax.config_io import GivenConfig, as_flags, load_file, load_module, naming_user_code

FILE = "ablations.py"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # also a folder's name


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
            for member, config in given.items():
                seeded = copy.deepcopy(config)
                seeded.seed += further
                name = f"{member}-seed_{seeded.seed}" if further else member
                of[study][member] += (_run(runs, name, study, seeded),)
    return Study(path, file, base, runs, of)


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
