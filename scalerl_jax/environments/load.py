"""The environments there are, and the rows of a run: training and held out, as token ids.

No prompt may be in both splits, nor twice in one: then the curriculum would not know it as the one prompt it is, and
the held-out score would not be of held-out prompts.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.environments import arithmetic, math
from scalerl_jax.environments.base import Environment, Row
from scalerl_jax.environments.tokenizer import Tokenizer

ENVIRONMENTS: dict[str, Callable[[Config], Environment]] = {
    "arithmetic": arithmetic.make,
    "jsonl": math.make,
}


def make_environment(config: Config) -> Environment:
    """The run's. Raises ValueError where there is none of that name."""
    name = config.environment.name
    if name not in ENVIRONMENTS:
        raise ValueError(f"config.environment.name={name!r}: is not one of {', '.join(ENVIRONMENTS)}")
    return ENVIRONMENTS[name](config)


def load_rows(config: Config, tokenizer: Tokenizer) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows: at most config.evaluation.prompts of them).

    Raises ValueError naming the config field, or the file and row, at fault.
    """
    rows = make_environment(config).rows
    train, validation = list(rows("train")), list(rows("validation"))
    first: dict[str, str] = {}
    for row in itertools.chain(train, validation):
        if row.text in first:
            raise ValueError(f"{row.name}: the prompt is the same as in {first[row.text]}")
        first[row.text] = row.name
    return _tokenized(train, config, tokenizer), _tokenized(validation[: config.evaluation.prompts], config, tokenizer)


def _tokenized(rows: Iterable[Row], config: Config, tokenizer: Tokenizer) -> list[Row]:
    tokenized = []
    for index, row in enumerate(rows):
        ids = np.asarray(tokenizer.encode_prompt(row.text), np.int32)
        if len(ids) > config.rollout.max_prompt_tokens:
            raise ValueError(
                f"{row.name}: the prompt has {len(ids)} tokens, "
                f"config.rollout.max_prompt_tokens is {config.rollout.max_prompt_tokens}"
            )
        tokenized.append(dataclasses.replace(row, index=index, token_ids=ids))
    return tokenized
