"""The config over the starts of a run: the compute dtype is chosen once, and one table has what may change.

compute_dtype=auto is replaced at the start of a run, and what was chosen is written into its config.json:

    config.model.compute_dtype   auto: float32 with sync_dtype=float32; else as in the run folder's config.json, if the
                                 run has begun; else the fastest dtype on this machine (system/platforms.py)
    config.fleet.compute_dtype   auto: as the trainer's, so that both sides run one policy

Which fields of the config may change when a run is continued:

    FREE    where and how it runs, and what is logged: mesh, rows, servers, checkpoints, ...
    NOTED   the run still learns the same, but rows before and after are not quite comparable: a line says so
    BOUND   changes what is learned: refused by name, unless --allow=FIELD,... asks for it
    WARM    fields of the warm start only: BOUND in its folder, FREE in that of a run

A field has the class that FIELDS gives it, else that of its group. `max_steps` may grow, or shrink to the steps already
made. Changes, and the step from which they hold, are kept in config_history.jsonl; config.json is the current config.
"""

import dataclasses
import json
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from scalerl_jax import config_check
from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.config_check import ConfigError
from scalerl_jax.system import platforms
from scalerl_jax.system.files import read_object

AUTO = "auto"
Dtype = Literal["bfloat16", "float32"]
_DTYPES: dict[str, Dtype] = {"bfloat16": "bfloat16", "float32": "float32"}

FREE, NOTED, BOUND, WARM = "free", "said", "bound", "warm"

# A new field has the class of its group.
GROUPS = {
    "model": BOUND,  # path: initial policy, tokenizer and decoder; a folder that has only moved is allowed by name
    "environment": BOUND,
    "rollout": BOUND,
    "pacing": BOUND,
    "evaluation": NOTED,
    "learner": FREE,  # mesh, packing and chunks: the gradient is the same to rounding
    "fleet": FREE,
    "parity": FREE,  # which servers may sample
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
    "environment.verifier_processes": FREE,  # verifier_seconds is not: it decides whether a slow answer is correct
    "environment.judge.url": FREE,  # where the same model and template are asked
    "environment.judge.key_variable": FREE,
    "environment.judge.seconds": FREE,  # a judge that does not answer ends the run: no score depends on it
    "environment.judge.retries": FREE,
    "environment.judge.cache": FREE,
    "distill.teachers": NOTED,  # their addresses may change
    "distill.seconds": FREE,
    "rollout.max_prompt_tokens": FREE,  # a longer prompt fails the start: prompts are never cut
    "pacing.max_buffered_batches": NOTED,  # changes the staleness below k, as the number of servers does
    "evaluation.every": FREE,
    "evaluation.servers": FREE,
    "sft.checkpoint_every": FREE,
    "sft.evaluation_every": FREE,
    "sft.log_every": FREE,
}

# Files that depend on the config: while none of them exists, the folder may take another config.
_MADE = ("metrics.jsonl", "evals.jsonl", "checkpoints", "model")


@dataclasses.dataclass(frozen=True)
class FieldChange:
    """One field whose value has changed."""

    name: str  # without "config."
    before: Any
    now: Any
    kind: str

    def __str__(self) -> str:
        return f"config.{self.name} is {self.before!r} there and {self.now!r} now"


def kind_of(name: str) -> str | None:
    """The class of a field; None if it has no class yet."""
    name = config_check.as_environment(name)
    return FIELDS.get(name) or GROUPS.get(name.partition(".")[0])


def changes(old: Mapping[str, Any], new: Config) -> list[FieldChange]:
    """Every field in which `new` differs from `old` (a config.json's contents), in the order of the config.

    A field that `old` lacks, because it was written before the field existed, counts as the default. Raises ConfigError
    if `old` has one that is no longer a field, unless its class is FREE.
    """
    saved = config_check.saved_leaves(old)
    mixture = old.get("mixture")
    parts = dict.fromkeys(mixture if isinstance(mixture, Mapping) else (), EnvironmentConfig())
    before = config_check.leaves(Config(mixture=parts)) | saved
    after = config_check.leaves(new)
    for name in before:
        if name not in after and not name.startswith("mixture.") and kind_of(name) != FREE:
            raise ConfigError(f"config.{name} is {before[name]!r} there and is not a field any more")
    # A mixture's environment may be in only one of the two.
    return [
        FieldChange(name, before.get(name), after.get(name), kind_of(name) or BOUND)
        for name in {**after, **before}
        if before.get(name) != after.get(name) and (name in after or name.startswith("mixture."))
    ]


def allowed_fields(names: Collection[str]) -> set[str]:
    """The fields that --allow names, without "config.". Raises ConfigError if one is not a field."""
    fields = config_check.annotations()
    found = {name.strip().removeprefix("config.") for name in names} - {""}
    for name in sorted(name for name in found if config_check.as_environment(name) not in fields):
        raise ConfigError(f"--allow={name}: config has no field {name!r}")
    return found


def refused(found: Sequence[FieldChange], *, allowed: Collection[str], warm_start: bool) -> list[FieldChange]:
    """The changes that must be allowed by name and are not. allowed: as allowed_fields returns them."""
    kinds = {BOUND, WARM} if warm_start else {BOUND}
    return [change for change in found if change.kind in kinds and change.name not in allowed]


def has_begun(workdir: str) -> bool:
    """Whether the folder holds more than what a first start leaves that failed."""
    made = [os.path.join(workdir, name) for name in _MADE]
    return any(os.path.exists(name) and os.path.getsize(name) for name in made)


def history_row(found: Sequence[FieldChange], *, step: int, time: float) -> str:
    """The line of config_history.jsonl."""
    changed = {change.name: {"before": change.before, "now": change.now, "kind": change.kind} for change in found}
    return json.dumps({"step": step, "time": time, "changed": changed}) + "\n"


def settle_dtypes(config: Config, workdir: str = "") -> list[str]:
    """Replaces compute_dtype=auto by the chosen dtypes. Returns the lines to log: none if nothing was chosen.

    workdir: the folder of the run, which may have begun; empty without one.
    """
    lines = []
    if config.model.compute_dtype == AUTO:
        config.model.compute_dtype, why = _choose_dtype(config, workdir)
        lines = [f"config.model.compute_dtype=auto: {config.model.compute_dtype} ({why})"]
    if config.fleet.compute_dtype == AUTO:
        config.fleet.compute_dtype = config.model.compute_dtype
    return lines


def _choose_dtype(config: Config, workdir: str) -> tuple[Dtype, str]:
    if config.model.sync_dtype == "float32":
        return "float32", "as config.model.sync_dtype is"
    if workdir and has_begun(workdir):
        try:
            begun = config_check.saved_leaves(read_object(os.path.join(workdir, "config.json")))
        except (OSError, ValueError):  # its folder is refused later in the start
            begun = {}
        if (before := str(begun.get("model.compute_dtype"))) in _DTYPES:
            return _DTYPES[before], "as the run was begun"
    dtype, why = platforms.fastest_dtype()
    return _DTYPES[dtype], why
