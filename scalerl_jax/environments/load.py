"""The available environments, and the rows of a run: training and held out, as token ids.

    rows -> filter -> deduplicate prompts -> hold out, the rest is for training -> decontaminate -> render -> number

Each prompt occurs once across all environments of a mixture: else the curriculum would treat it as several prompts. No
held-out prompt is trained on: if validation rows are given, training rows with their prompts are left out; if not, the
training rows with the lowest hashes are held out (data/problems.py).
"""

import contextlib
import dataclasses
import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from scalerl_jax.config import Config
from scalerl_jax.environments import arithmetic, code, math, own, parts, programs, reasoning_gym, rewards, user_code
from scalerl_jax.environments.base import Environment, Row, Rows, Stratum
from scalerl_jax.environments.data import sources
from scalerl_jax.environments.data.layouts import LAYOUTS
from scalerl_jax.environments.data.problems import Known, Problems
from scalerl_jax.environments.tokenizer import Tokenizer

ENVIRONMENTS: dict[str, Callable[[Config], Environment]] = {
    "arithmetic": arithmetic.make,
    "math": math.make,
    "code": code.make,
    "programs": programs.make,
    "reasoning_gym:NAME": reasoning_gym.make,
    "FILE.py:CLASS": own.make,
}


NEEDING_ROWS = ("math", "code")  # environments that read config.environment.train and validation


def make_environment(config: Config) -> Environment:
    """The environment of config.environment. Raises ValueError for an unknown name, or data that it does not read."""
    name = config.environment.name
    kind = "FILE.py:CLASS" if user_code.named(name) else name
    if name.startswith(reasoning_gym.NAME):
        kind = "reasoning_gym:NAME"
    if kind not in ENVIRONMENTS:
        raise ValueError(f"config.environment.name={name!r}: is not one of {', '.join(ENVIRONMENTS)}")
    for field in ("train", "validation"):
        given = getattr(config.environment, field)
        if given and kind not in (*NEEDING_ROWS, "FILE.py:CLASS"):
            raise ValueError(
                f"config.environment.{field}={given}: is not read, since config.environment.name={name} makes its own "
                f"problems; {' or '.join(NEEDING_ROWS)} has those of files and data sets"
            )
    return rewards.with_rewards(ENVIRONMENTS[kind](config), config)


def make_environments(config: Config) -> dict[str, Environment]:
    """The run's environments, by Row.environment."""
    made = {}
    for name, part in parts.configs(config).items():
        with _named(name):
            made[name] = make_environment(part)
    return made


def load_rows(config: Config, tokenizer: Tokenizer) -> Rows:
    """The run's problems; config.evaluation.prompts are held out of each environment, or all if there are fewer.

    Raises ValueError naming the config field, or the file and row, at fault.
    """
    configs, environments = parts.configs(config), make_environments(config)
    problems, known = _read(configs, environments, tokenizer, train=True)
    # Rows of one environment are contiguous, and in it the rows of each weighted source.
    train: list[Row] = []
    held: list[Row] = []
    strata: list[Stratum] = []
    notes: list[str] = []
    for name in environments:
        with _named(name):
            held += _numbered(problems[name].held_out(known), name, first=len(held))
    for name, environment in environments.items():
        with _named(name):
            kept = problems[name].train(known)
            for source, share in _shares(environment.weights).items():
                rows = [row for row in kept if row.source == source] if environment.weights else kept
                if not rows:
                    which = f"training prompt of {source}" if source else "training prompt"
                    why = "".join(f"; {line}" for line in (*environment.notes(), *problems[name].notes()[:-1]))
                    raise ValueError(f"config.environment.train: no {which} is left{why}")
                strata.append(
                    Stratum(
                        ":".join(word for word in (name, source) if word),
                        configs[name].environment.weight * share,
                        range(len(train), len(train) + len(rows)),
                    )
                )
                train += _numbered(rows, name, first=len(train))
        notes += _notes(name, environment, problems[name])
    return Rows(train, held, strata, notes)


def load_held_out(config: Config, tokenizer: Tokenizer, *, apart: bool = False) -> tuple[list[Row], list[str]]:
    """(load_rows' held_out, messages on them). Training rows are read only if held-out rows are taken from them.

    apart: each environment of a mixture keeps prompts that another one has too.
    """
    environments = make_environments(config)
    held: list[Row] = []
    notes: list[str] = []
    problems, known = _read(parts.configs(config), environments, tokenizer, train=False, apart=apart)
    for name in environments:
        with _named(name):
            asked = problems[name].held_out(Known() if apart else known)
            held += _numbered(asked, name, first=len(held))
        notes += _notes(name, environments[name], problems[name])
    if not held:
        raise ValueError("config.evaluation.prompts: there is no held-out prompt, and so nothing to evaluate on")
    return held, notes


def _read(
    configs: Mapping[str, Config],
    environments: Mapping[str, Environment],
    tokenizer: Tokenizer,
    *,
    train: bool,
    apart: bool = False,
) -> tuple[dict[str, Problems], Known]:
    """Reads the rows of each environment, validation rows first: training rows with their prompts are dropped."""
    problems, known = dict[str, Problems](), Known()
    for name, environment in environments.items():
        with _named(name):
            problems[name] = Problems(configs[name], tokenizer)
            problems[name].read_held_out(environment, Known() if apart else known)
    if train or any(one.takes_out for one in problems.values()):
        for name, environment in environments.items():
            with _named(name):
                problems[name].read_train(environment, known)
    return problems, known


def place_of(text: str) -> tuple[str, str]:
    """(config.environment.name, config.environment.validation) of an environment given on the command line.

    `text` is an environment's name; math:SOURCE or code:SOURCE; or a source, for its layout's environment or else math.
    Raises ValueError if it is not one of these.
    """
    kind, _, where = text.partition(":")
    if text in ENVIRONMENTS or kind == "reasoning_gym" or user_code.named(text):
        if text in NEEDING_ROWS:
            raise ValueError(f"{text}: of which rows? {text}:FILE, {text}:ORG/NAME, ...")
        return text, ""
    if kind in NEEDING_ROWS:
        return kind, where
    if not text.strip():
        raise ValueError("an environment has no name")
    (source,) = sources.parse(text, "--environment")
    if source.weight is not None:
        raise ValueError(f"{text!r}: has a weight, and nothing is drawn from it")
    if not source.layout and not source.hub and not os.path.exists(source.where) and not glob.glob(source.where):
        raise ValueError(
            f"{text!r} is not one of {', '.join(ENVIRONMENTS)}, a data set ({', '.join(LAYOUTS)}, ORG/NAME) or a file"
        )
    return LAYOUTS[source.layout].kind if source.layout else "math", text


def digest(rows: Sequence[Row]) -> int:
    """63-bit hash of the prompts and answers, in order: detects that a resumed run has other prompts.

    It uses prompts before rendering: a chat template may write today's date into them.
    """
    each = b"".join(hashlib.blake2b(_what(row).encode(), digest_size=8).digest() for row in rows)
    return int.from_bytes(hashlib.blake2b(each, digest_size=8).digest(), "little") >> 1


def _what(row: Row) -> str:
    turns = [(message["role"], message["content"]) for message in row.messages] or [("user", row.text)]
    return json.dumps([turns, row.answer] + [row.key] * bool(row.key))


def _notes(name: str, environment: Environment, problems: Problems) -> list[str]:
    """The messages on one environment's rows, prefixed with its name in a mixture."""
    lines = (*environment.notes(), *problems.notes())
    return [f"{name}: {parts.as_written(name, line)}" if name else line for line in lines]


def _numbered(rows: Iterable[Row], environment: str, *, first: int) -> list[Row]:
    return [dataclasses.replace(row, environment=environment, index=n) for n, row in enumerate(rows, first)]


def _shares(weights: Mapping[str, float]) -> dict[str, float]:
    """Weights of the sources normalized to a sum of 1; without weights all rows are one source, ""."""
    return {source: weight / sum(weights.values()) for source, weight in weights.items()} or {"": 1.0}


@contextlib.contextmanager
def _named(environment: str) -> Iterator[None]:
    """Errors name the fields of a mixture's environment as the user wrote them."""
    try:
        yield
    except ValueError as error:
        if not environment:
            raise
        raise ValueError(parts.as_written(environment, str(error))) from error
