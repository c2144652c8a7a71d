"""Reads sources in a process of its own, whose hub cache is that of its environment variables.

stdin     JSON: [[text of config.environment.train, "train" or "validation"], ...]
stdout    JSON: for each the rows' (name, text, answer), or the one line that it failed with
"""

import json
import sys

from scalerl_jax.config import Config
from scalerl_jax.environments.data.reader import Reader


def found(text: str, split: str) -> object:
    config = Config()
    config.environment.name = "math"
    setattr(config.environment, split, text)
    config.environment.columns.prompt = "question"
    try:
        reader = Reader(config, kind="code" if text.startswith(("livecodebench", "deepcoder")) else "math")
        return [(row.name, row.text, row.answer) for row in reader.rows(split)]
    except ValueError as error:
        return str(error)


if __name__ == "__main__":
    json.dump([found(*asked) for asked in json.load(sys.stdin)], sys.stdout)
