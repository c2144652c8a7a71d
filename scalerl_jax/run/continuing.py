"""Which fields of the config a run may be continued with other values of: one table.

    FREE    where and how it runs, and what is written down: mesh, rows, servers, checkpoints, ...
    NOTED   what is learned stays the same run's, but rows before and after are not quite comparable: a line says so
    BOUND   changes what is learned: refused by name, unless --allow=FIELD,... asks for it
    WARM    the warm start's alone: BOUND in its folder, FREE in that of a run

A field that is listed has that class; else that of its group. `max_steps` may grow, or shrink to what has been made.
What changed, and from which step on, is kept in config_history.jsonl; config.json is the config that holds now.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from scalerl_jax import config_check
from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.config_check import ConfigError

FREE, NOTED, BOUND, WARM = "free", "said", "bound", "warm"

# A new field is of its group's kind.
GROUPS = {
    "model": BOUND,  # path: the start, the tokenizer and the decoder; a folder that has only moved is allowed by name
    "environment": BOUND,
    "rollout": BOUND,
    "pacing": BOUND,
    "evaluation": NOTED,
    "learner": FREE,  # mesh, packing and chunks: the gradient is the same to rounding
    "fleet": FREE,
    "parity": FREE,  # who may sample
    "checkpoint": FREE,
    "telemetry": FREE,
    "sft": WARM,
    "curriculum": BOUND,
    "objective": BOUND,
    "distill": BOUND,
    "optimizer": BOUND,
    "lora": BOUND,
}
FIELDS = {
    "seed": BOUND,
    "numerics": BOUND,
    "max_steps": FREE,
    "model.remat": FREE,
    "model.attention": FREE,
    "environment.verifier_processes": FREE,  # verifier_seconds is not: a slow answer is right or wrong by it
    "environment.judge.url": FREE,  # where the same model and template are asked
    "environment.judge.key_variable": FREE,
    "environment.judge.seconds": FREE,  # a judge that does not answer ends the run: nothing becomes wrong by it
    "environment.judge.retries": FREE,
    "environment.judge.cache": FREE,
    "distill.teachers": NOTED,  # where they are may change
    "distill.seconds": FREE,
    "rollout.max_prompt_tokens": FREE,  # a prompt that is longer ends the start: it is never cut
    "pacing.max_buffered_batches": NOTED,  # how stale tokens are, below k: as the number of servers is
    "evaluation.every": FREE,
    "evaluation.servers": FREE,
    "sft.checkpoint_every": FREE,
    "sft.evaluation_every": FREE,
    "sft.log_every": FREE,
}


@dataclasses.dataclass(frozen=True)
class Change:
    """One field that is not what it was."""

    name: str  # without "config."
    before: Any
    now: Any
    kind: str

    def __str__(self) -> str:
        return f"config.{self.name} is {self.before!r} there and {self.now!r} now"


def kind_of(name: str) -> str | None:
    """The class of a field; None: it is in no class yet."""
    name = config_check.as_environment(name)
    return FIELDS.get(name) or GROUPS.get(name.partition(".")[0])


def changes(old: Mapping[str, Any], new: Config) -> list[Change]:
    """Every field in which `new` differs from `old` (a config.json's contents), in the order of the config.

    A field that `old` lacks, because it was written before the field existed, counts as the default. Raises ConfigError
    where `old` has one that is not a field any more, and it was not at a default that could be told.
    """
    saved = config_check.saved_leaves(old)
    mixture = old.get("mixture")
    parts = dict.fromkeys(mixture if isinstance(mixture, Mapping) else (), EnvironmentConfig())
    before = config_check.leaves(Config(mixture=parts)) | saved
    after = config_check.leaves(new)
    for name in before:
        if name not in after and not name.startswith("mixture.") and kind_of(name) != FREE:
            raise ConfigError(f"config.{name} is {before[name]!r} there and is not a field any more")
    # Of a mixture's environments one or the other may have none of that name.
    return [
        Change(name, before.get(name), after.get(name), kind_of(name) or BOUND)
        for name in {**after, **before}
        if before.get(name) != after.get(name) and (name in after or name.startswith("mixture."))
    ]


def allowed_fields(names: Collection[str]) -> set[str]:
    """The fields that --allow names, without "config.". Raises ConfigError where one is no field."""
    fields = config_check.annotations()
    found = {name.strip().removeprefix("config.") for name in names} - {""}
    for name in sorted(name for name in found if config_check.as_environment(name) not in fields):
        raise ConfigError(f"--allow={name}: config has no field {name!r}")
    return found


def refused(found: Sequence[Change], *, allowed: Collection[str], warm_start: bool) -> list[Change]:
    """Those that need to be allowed by name, and are not. allowed: as allowed_fields gives them."""
    kinds = {BOUND, WARM} if warm_start else {BOUND}
    return [change for change in found if change.kind in kinds and change.name not in allowed]


def history_row(found: Sequence[Change], *, step: int, time: float) -> str:
    """The line of config_history.jsonl."""
    changed = {change.name: {"before": change.before, "now": change.now, "kind": change.kind} for change in found}
    return json.dumps({"step": step, "time": time, "changed": changed}) + "\n"
