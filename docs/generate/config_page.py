"""reference/config.md: every field of the typed tree, from its annotation, its default and the comment beside it."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from docs.generate.markdown import code, escaped, prose, sentence, table
from scalerl_jax import config as config_lib
from scalerl_jax.cli import command_help
from scalerl_jax.config_bounds import Above, AtLeast, Between
from scalerl_jax.run import continuing

# What each group is for; a group without its line here fails the build.
GROUPS = {
    "": "Of the run as a whole.",
    "model": "The policy to start from, and what it is computed in. See [models](../how_to/models.md) and "
    "[memory](../how_to/memory.md).",
    "environment": "Where prompts come from and what an answer is worth. See [data](../how_to/data.md), "
    "[rewards](../how_to/rewards.md) and [environments](../how_to/environments.md). An environment of a mixture has "
    "the same fields under `config.mixture.NAME`; the config file names the environments.",
    "environment.columns": "",
    "environment.judge": "A model that judges: the reward `judge`. See [rewards](../how_to/rewards.md).",
    "environment.sandbox": "In which programs of the environment `code` are run, and commands of a `Shell`.",
    "sft": "The supervised warm start, `scalerl-sft`.",
    "sft.columns": "",
    "curriculum": "Which prompts are drawn again. See [the curriculum](../algorithms/curriculum.md).",
    "rollout": "What is sampled for one step. The product of `prompts_per_step` and `group_size` is the batch.",
    "objective": "What a batch teaches. See [losses](../algorithms/losses.md) and "
    "[advantages](../algorithms/advantages.md).",
    "distill": "The teacher to learn from. See [distillation](../algorithms/distillation.md).",
    "optimizer": "AdamW.",
    "learner": "How the update lies on the trainer's devices. See [memory](../how_to/memory.md) and "
    "[many hosts](../how_to/many_hosts.md).",
    "pacing": "How far generators may run ahead. See [pacing](../algorithms/pacing.md).",
    "fleet": "The generators: those started beside the trainer, and the connection to all. See "
    "[the fleet](../how_to/fleet.md) and [security](../how_to/security.md).",
    "parity": "The comparison of the trainer's log-probs with the generators'.",
    "evaluation": "Held-out prompts. See [evaluate](../how_to/evaluate.md).",
    "checkpoint": "What is kept to go on from. See [stopping and killing](../how_to/stopping_and_killing.md).",
    "telemetry": "What is written down beside metrics.jsonl and evals.jsonl.",
}
CHANGES = {
    continuing.FREE: "yes",
    continuing.NOTED: "yes, noted",
    continuing.BOUND: "`--allow`",
    continuing.WARM: "warm start: `--allow`",
}
_TYPES = {"bool": "true or false", "int": "integer", "float": "number", "str": "text", "dict": "JSON object"}

INTRODUCTION = """# Config

A run has one config. A config file is Python: it defines `get_config() -> Config` and sets what differs from the
defaults below. Every field is a flag too, and a flag wins over the file:

```sh
scalerl-train --config=configs/quickstart.py --workdir=runs/mine --config.objective.max_ratio=4
```

The page is made from [config.py](../../scalerl_jax/config.py). `scalerl-train --help` prints the same list.

**When a run goes on** from its folder, the last column says whether the field may have another value than before:

| word | what happens |
|---|---|
| yes | the run goes on with the new value |
| yes, noted | likewise, and a line says from which step on: rows before and after are not quite comparable |
| `--allow` | it changes what is learned, so it is refused unless `--allow=FIELD` names it |
| warm start: `--allow` | likewise in the folder of `scalerl-sft`; a run of `scalerl-train` does not read it |

`config_history.jsonl` in the run folder keeps what was changed, and when.
"""


def anchors() -> dict[str, str]:
    """Dotted name of each field -> where on the page it is."""
    return {name: f"#{name}" for _, name, *_ in _fields(config_lib.Config)}


def page() -> str:
    said, links = command_help.comments(config_lib.__name__), anchors()
    rows: dict[str, list[list[str]]] = {}
    for owner, name, hint, default in _fields(config_lib.Config):
        group, _, field = name.rpartition(".")
        kind, bound = described(hint)
        meaning = prose(sentence(said[owner, field]), links)
        changes = CHANGES[continuing.kind_of(name) or continuing.BOUND]
        before = f"--config.{name}"[: -len(field)]
        # In two lines where there is no room for one, and no others.
        flag = f'<code id="{name}"><span>{escaped(before)}</span><wbr><span>{escaped(field)}</span></code>'
        rows.setdefault(group, []).append([flag, "; ".join(filter(None, (kind, bound))), default, meaning, changes])
    parts = [INTRODUCTION]
    for group, fields in rows.items():
        title = f"config.{group}" if group else "config"
        anchor = f"config-{group.replace('.', '-')}" if group else "config-of-the-run"
        parts.append(f"\n## {title} {{ #{anchor} }}\n\n{GROUPS[group]}\n\n")
        parts.append(table(["Flag", "Type", "Default", "Meaning", "When a run goes on"], fields))
    return "".join(parts)


def described(hint: Any) -> tuple[str, str]:
    """A field's type and bounds, in words."""
    bound = ""
    if get_origin(hint) is Annotated:
        hint, limit = get_args(hint)[:2]
        bound = bounded(limit)
    if get_origin(hint) is Literal:
        return " ".join(code(choice) for choice in get_args(hint)), ""
    name = (get_origin(hint) or hint).__name__
    return _TYPES[name], bound


def bounded(limit: Above | AtLeast | Between) -> str:
    if isinstance(limit, Between):
        return f"{limit.low:g} to {limit.high:.15g}"
    low = f"above {limit.low:g}" if isinstance(limit, Above) else f"{limit.low:.15g} or more"
    if limit.below != float("inf"):
        return f"{low}, below {limit.below:g}"
    if isinstance(limit, Above) and limit.up_to != float("inf"):
        return f"{low}, up to {limit.up_to:g}"
    return low


def _fields(kind: type, prefix: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """(class, dotted name, annotation, default as it is written) of every leaf; of a mixture there is none."""
    hints, made = get_type_hints(kind, include_extras=True), kind()
    groups = []
    for field in dataclasses.fields(kind):
        value = getattr(made, field.name)
        if dataclasses.is_dataclass(value):
            groups.append((type(value), f"{prefix}{field.name}."))
        elif field.name != "mixture":
            yield kind.__name__, prefix + field.name, hints[field.name], _written(value)
    for group, inner in groups:
        yield from _fields(group, inner)


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return code(str(value).lower())
    if value in ("", {}):
        return "empty"
    return code(f"{value:,}".replace(",", "_") if isinstance(value, int) and value >= 100_000 else str(value))
