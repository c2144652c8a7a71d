"""What a run folder says of its own speed: metrics.jsonl row by row, the config, samples of completions.

A row's time is that of its step: the wait, the update, what is written down, and the evaluation and the checkpoint that
came before it. The first steps are left out (programs are still being compiled, the fleet fills), as is the step after
a restart of the trainer.
"""

import collections
import dataclasses
import itertools
import math
import os
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from scalerl_jax.planning.twin.lengths import Sampled
from scalerl_jax.planning.twin.speeds import Recipe
from scalerl_jax.report.log_rows import Row, log_rows
from scalerl_jax.report.run_data import read_settings
from scalerl_jax.report.samples import MOST_STEPS, evenly, read_samples, sample_files

FEWEST = 8  # steps that tell of anything
_CLASSES = ("trainer_busy", "trainer_idle", "trainer_evaluation", "generator_busy", "generator_idle",
            "generator_evaluation")  # fmt: skip
_STALLED = ("trainer_stalled", "generator_stalled")  # of which a simulation has none but the trainer's between steps
_NUMBERS = ("waited_seconds", "update_seconds", "cpu_seconds", "length_mean")


@dataclasses.dataclass(frozen=True)
class Observed:
    """Means over the steps that were looked at."""

    settings: dict[str, Any]  # the config's leaves by their dotted names
    recipe: Recipe
    servers: int
    local: bool  # the generators were started by the trainer, on its machine
    steps: int
    seconds: float  # a step, evaluations included
    update_seconds: float  # of a step with no evaluation before it
    update_behind_seconds: float  # of a step right behind one; 0: there was none
    spread: tuple[float, ...]  # of single updates with no evaluation before them, over their mean
    between_seconds: float  # a step: neither update nor evaluation nor wait
    generator_seconds: float  # busy, a step, all generators together
    shares: dict[str, float]  # class of the ledger -> of the time; of a generator's, where it is one's
    evaluation_seconds: float  # of one; 0: there was none
    lengths: Sampled
    evaluation_lengths: Sampled | None
    staleness: dict[int, float]  # steps -> share of the tokens
    cores_seconds: float  # of the trainer's process, a step with no evaluation before it; 0: the rows do not say
    cores_behind_seconds: float  # and of a step behind one, the evaluation included

    @property
    def steps_per_hour(self) -> float:
        return 3600 / self.seconds


def observe(workdir: str, *, steps: Collection[int] | None = None) -> Observed:
    """Of a run's folder. steps: to be looked at; None: all after the first ones.

    Raises ValueError (one line) where the folder holds no run, or too little of one.
    """
    settings = read_settings(workdir)
    rows = log_rows(workdir, "metrics.jsonl", _NUMBERS)
    pairs = [(a, b) for a, b in itertools.pairwise(rows) if b["step"] == a["step"] + 1 and _together(a, b)]
    if steps is None:
        first = first_steps(settings)
        steps = [b["step"] for _, b in pairs if b["step"] > first]
    pairs = [(a, b) for a, b in pairs if b["step"] in set(steps)]
    if len(pairs) < FEWEST:
        raise ValueError(
            f"{os.path.join(workdir, 'metrics.jsonl')}: {len(pairs)} steps after the first {first_steps(settings)} "
            f"that tell how long they took, {FEWEST} are needed"
        )
    return _observed(workdir, settings, pairs)


def first_steps(settings: dict[str, Any]) -> int:
    """That are left out: until the fleet is as far ahead as it will be, and an evaluation has been in between."""
    every = settings["evaluation.every"]
    return min(max(5, every), 10, max(1, settings["max_steps"] // 4))


def recipe_of(settings: dict[str, Any]) -> Recipe:
    """What the config's leaves say of it."""
    return Recipe(
        prompts_per_step=settings["rollout.prompts_per_step"],
        group_size=settings["rollout.group_size"],
        kind=settings["pacing.kind"],
        max_off_policy_steps=settings["pacing.max_off_policy_steps"],
        max_buffered_batches=settings["pacing.max_buffered_batches"],
        evaluation_every=settings["evaluation.every"],
        evaluation_prompts=settings["evaluation.prompts"],
        evaluation_samples=settings["evaluation.samples"],
        evaluation_servers=settings["evaluation.servers"],
        checkpoint_every=0,  # what checkpoints take is in the mean between two steps
    )


def _together(before: Row, row: Row) -> bool:
    """Of one trainer process, with a ledger."""
    return before.get("incarnation") == row.get("incarnation") and all(r.get("compute") for r in (before, row))


def _observed(workdir: str, settings: dict[str, Any], pairs: Sequence[tuple[Row, Row]]) -> Observed:
    recipe, count = recipe_of(settings), len(pairs)
    seconds = sum(b["time"] - a["time"] for a, b in pairs)
    spent = {name: sum(_passed(a, b, f"{name}_hours") for a, b in pairs) * 3600 for name in (*_CLASSES, *_STALLED)}
    if not seconds > 0 or not spent["trainer_busy"] > 0:
        raise ValueError(f"{os.path.join(workdir, 'metrics.jsonl')}: its rows do not say how long the updates took")
    waited = sum(b.get("waited_seconds") or 0.0 for _, b in pairs)
    generators = sum(spent[name] for name in spent if name.startswith("generator"))
    servers = max(1, round(generators / seconds))
    evaluated = [_passed(a, b, "trainer_evaluation_hours") * 3600 for a, b in pairs]
    evaluations = sum(found > 0 for found in evaluated)
    ages: collections.Counter[int] = collections.Counter()
    for _, row in pairs:
        ages.update({int(age): tokens for age, tokens in (row.get("lags") or {}).items()})
    lengths, evaluation_lengths = _lengths(workdir, recipe, pairs, evaluations)
    behind = np.array(evaluated) > 0
    plain = ~behind if not behind.all() else behind
    updates = np.array([_passed(a, b, "trainer_busy_hours") * 3600 for a, b in pairs])
    cores = np.array([row.get("cpu_seconds") or math.nan for _, row in pairs], np.float64)
    cores = cores if np.isfinite(cores).all() else np.zeros(count)
    of = {name: servers if name.startswith("generator") else 1 for name in _CLASSES}
    return Observed(
        settings=settings,
        recipe=recipe,
        servers=servers,
        local=os.path.isdir(os.path.join(workdir, "servers")),
        steps=count,
        seconds=seconds / count,
        update_seconds=float(updates[plain].mean()),
        update_behind_seconds=float(updates[behind].mean()) if behind.any() else 0.0,
        spread=tuple((updates[plain] / updates[plain].mean()).tolist()),
        between_seconds=max(0.0, spent["trainer_idle"] + spent["trainer_stalled"] - waited) / count,
        generator_seconds=spent["generator_busy"] / count,
        shares={name: spent[name] / seconds / of[name] for name in _CLASSES},
        evaluation_seconds=sum(evaluated) / evaluations if evaluations else 0.0,
        lengths=lengths,
        evaluation_lengths=evaluation_lengths,
        staleness={age: ages[age] / max(1, ages.total()) for age in sorted(ages)},
        cores_seconds=float(cores[plain].mean()),
        cores_behind_seconds=float(cores[behind].mean()) if behind.any() else 0.0,
    )


def _passed(before: Row, row: Row, column: str) -> float:
    """Of a cumulative column of the ledger's."""
    return max(0.0, (row["compute"].get(column) or 0.0) - (before["compute"].get(column) or 0.0))


def _lengths(
    workdir: str, recipe: Recipe, pairs: Sequence[tuple[Row, Row]], evaluations: int
) -> tuple[Sampled, Sampled | None]:
    """Of completions in training and in evaluations, forced tokens included."""
    quantiles = [row["length_quantiles"] for _, row in pairs if _is_quantiles(row.get("length_quantiles"))]
    if quantiles:
        # Straight lines between each step's deciles, at the middles of a hundred parts.
        shares = (np.arange(100) + 0.5) / 100
        tokens = np.concatenate([np.interp(shares, np.linspace(0, 1, len(q)), q) for q in quantiles])
    else:
        files = evenly(sample_files(os.path.join(workdir, "rollouts")), MOST_STEPS)
        tokens = np.array([len(row["token_ids"]) for _, path, _ in files for row in read_samples(path)[0]], np.float64)
    if not len(tokens):
        raise ValueError(f"{workdir}: its rows have no length_quantiles, and rollouts/ no completions: "
                         "--lengths_quantiles says how long they are")  # fmt: skip
    lengths = Sampled(np.maximum(1, tokens))
    sampled = sum(_passed(a, b, "evaluation_tokens") for a, b in pairs)
    asked = evaluations * recipe.evaluation_prompts * recipe.evaluation_samples
    return lengths, Sampled(np.maximum(1, tokens), mean=sampled / asked) if asked and sampled >= asked else None


def _is_quantiles(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(isinstance(v, int | float) for v in value)
