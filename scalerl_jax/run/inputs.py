"""The inputs of a run or an evaluation besides its config: the files of the user's own code, and its rows.

Their digests are kept in the run folder, so that a change in one of them is reported.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from scalerl_jax import config_check
from scalerl_jax.config import Config
from scalerl_jax.environments import Row, parts
from scalerl_jax.environments.base import Rows
from scalerl_jax.environments.curriculum import OtherPrompts
from scalerl_jax.environments.load import load_held_out, load_rows
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.environments.user_code import named
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.run.continuing import FieldChange
from scalerl_jax.run.jsonl import line_of
from scalerl_jax.system import files
from scalerl_jax.system.files import read_object

FILE = "inputs.json"

# The fields of an environment that its training prompts do not depend on.
_NO_PROMPTS = ("weight", "reward", "correct_at", "judge", "sandbox", "verifier")


_read: dict[str, Any] = {}  # what preload() has read, by what it depends on; the next caller takes it


def preload(config: Config, *, held_out: bool = False, apart: bool = False) -> None:
    """Checks the model's folder and the rows, and keeps the rows for the next caller. Nothing here needs jax.

    held_out: only the held-out rows. Raises ValueError, one line.
    """
    tokenizer = Tokenizer(config.model.path)
    rows = held_out_rows(config, tokenizer, apart=apart) if held_out else all_rows(config, tokenizer)
    _read[_key(config, held_out, apart)] = rows


def all_rows(config: Config, tokenizer: Tokenizer) -> Rows:
    """environments.load.load_rows, or the rows that preload() has read."""
    return _read.pop(_key(config, False, False), None) or load_rows(config, tokenizer)


def held_out_rows(config: Config, tokenizer: Tokenizer, *, apart: bool) -> tuple[list[Row], list[str]]:
    """environments.load.load_held_out, or the rows that preload() has read."""
    return _read.pop(_key(config, True, apart), None) or load_held_out(config, tokenizer, apart=apart)


def _key(config: Config, *how: bool) -> str:
    """The config as a key, without what is set at the start of a run (continuing.settle_dtypes)."""
    values = dataclasses.asdict(config)
    values["model"], values["fleet"] = config.model.path, ""
    return json.dumps([values, *how], sort_keys=True)


def digests(config: Config, held_out: Sequence[Row], train: Sequence[Row] = ()) -> dict[str, str]:
    """The digest of each input by its name: "the held-out rows", or the name of a file.

    For training rows it covers only what scores them besides the answer, such as a program's tests; prompts and answers
    are in the checkpoint's digest (environments/load.py), and a run does not resume with others.
    """
    rows = {"the held-out rows": _of([row.environment, row.text, row.answer, dict(row.extra)] for row in held_out)}
    if any(row.extra for row in train):
        rows["the other columns of the training rows"] = _of(dict(row.extra) for row in train)
    return {**rows, **_user_files(config)}


def _of(values: Iterable[Any]) -> str:
    rows = hashlib.blake2b(digest_size=8)
    for value in values:
        rows.update(json.dumps(value, default=str).encode())
    return rows.hexdigest()


def _user_files(config: Config) -> dict[str, str]:
    """Digests of the code and the judge's templates that the config names, for files that exist."""
    found: dict[str, str] = {}
    for alone in parts.configs(config).values():
        environment = alone.environment
        code = [
            text.rpartition(":")[0]
            for text in (environment.name, environment.reward, *environment.rewards)
            if named(text)
        ]
        for path in (*code, environment.judge.template):
            if path and os.path.isfile(path):
                with files.naming(path), open(path, "rb") as file:
                    found[path] = hashlib.blake2b(file.read(), digest_size=8).hexdigest()
    return found


def changed(path: str, now: dict[str, str], *, first: bool = False) -> list[str]:
    """Names whose digest differs from the file at `path`, which is rewritten. first: there is no such file yet."""
    before = read_object(path) if os.path.exists(path) and not first else now
    files.write_whole(path, line_of(now))
    return [name for name, digest in now.items() if before.get(name, digest) != digest]


def check_length(config: Config, longest: int, decoder: DecoderConfig) -> None:
    """Raises ValueError if a prompt and its completion, `longest` tokens, exceed the model's positions."""
    if longest > decoder.max_positions:
        raise ValueError(
            f"config.model.path={config.model.path}: its config.json has max_position_embeddings="
            f"{decoder.max_positions}, and a prompt and its completion may have {longest} tokens: "
            "config.rollout.max_prompt_tokens, thinking_budget_max and answer_budget, and the interruption phrase"
        )


@contextlib.contextmanager
def explain_changed_prompts(config: Config, changes: Sequence[FieldChange]) -> Iterator[None]:
    """Wraps code that resumes the history of a checkpoint's prompts: if they have changed, a ValueError says why.

    changes: of the config, since the checkpoint was made.
    """
    try:
        yield
    except OtherPrompts as error:
        counts = f"{error.before:,} when the checkpoint was made, {error.now:,} now"
        if causes := [change for change in changes if _chooses_prompts(change.name, config)]:
            fields = " and ".join(f"config.{one.name} was {one.before!r} and is {one.now!r} now" for one in causes)
            raise ValueError(
                f"{fields}, and the training prompts are others by that ({counts}), whose history the checkpoint has: "
                "give the old value again, or begin in another workdir"
            ) from error
        named = [
            f"{parts.field(name, field)}={value}"
            for name, part in parts.configs(config).items()
            for field in ("train", "validation", "decontaminate")
            if (value := getattr(part.environment, field))
        ]
        where = " or ".join(named) or f"config.environment.name={config.environment.name}"
        raise ValueError(
            f"{where}: the training rows are not those that the checkpoint was made with, whose history it has "
            f"({counts}): put the old rows back, or begin in another workdir"
        ) from error


def _chooses_prompts(name: str, config: Config) -> bool:
    """Whether this field can change the training prompts."""
    each = [part.environment for part in parts.configs(config).values()]
    if name == "seed":
        return not all(one.train for one in each)  # generated problems depend on it
    if name == "evaluation.prompts":
        return not all(one.validation for one in each)  # held-out prompts are taken out of the training rows
    group, _, rest = config_check.as_environment(name).partition(".")
    own = group == "environment" and not rest.startswith(_NO_PROMPTS)
    return own or name in ("model.path", "rollout.max_prompt_tokens")
