"""What a run or an evaluation depends on beside its config: the files of its user's own code, its rows.

Their digests are kept in the run folder, so that it is said where one of them has changed.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.environments import Row, parts
from scalerl_jax.environments.user_code import named
from scalerl_jax.run.jsonl import line_of
from scalerl_jax.system import files
from scalerl_jax.system.json_values import read_object

FILE = "inputs.json"


def digests(config: Config, held_out: Sequence[Row], train: Sequence[Row] = ()) -> dict[str, str]:
    """Of each input by what it is called: "the held-out rows", the name of a file.

    Of training rows only what scores them beside the answer, as a program's tests; prompts and answers are a
    checkpoint's (environments/load.py), with which a run does not go on with others.
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
    """Of the code and the judge's questions that the config names, as far as they are there."""
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


def changed(path: str, now: dict[str, str], *, anew: bool = False) -> list[str]:
    """What is not what it was when the file at `path` was written; writes it anew. anew: nothing was before."""
    before = read_object(path) if os.path.exists(path) and not anew else now
    files.write_whole(path, line_of(now))
    return [name for name, digest in now.items() if before.get(name, digest) != digest]
