"""Names that fields of the config have had, and the line that a name which is none gets."""

from collections.abc import Sequence
from typing import Any

# Under their old names the configs of runs that were begun before are read; on a command line they are an error.
RENAMED = {
    "config.updates": "config.max_steps",
    "config.model.wire_dtype": "config.model.sync_dtype",
    **{
        f"config.task.{name}": f"config.environment.{name}"
        for name in (
            *("name", "train_prompts", "minimum_terms", "maximum_terms", "verifier_processes", "verifier_seconds"),
        )
    },
    **{
        f"config.{group}.{split}_file": f"config.environment.{split}"
        for group in ("task", "environment")
        for split in ("train", "validation")
    },
    "config.sft.traces_file": "config.sft.traces",
    "config.sft.updates": "config.sft.max_steps",
    "config.sft.rows": "config.sft.rows_per_step",
    "config.sft.row_length": "config.sft.seq_len",
    "config.sft.warmup": "config.sft.warmup_steps",
    "config.sft.slip_rate": "config.sft.error_rate",
    "config.sft.width": "config.sft.hidden_size",
    "config.sft.head_size": "config.sft.head_dim",
    "config.sft.mlp_width": "config.sft.intermediate_size",
    "config.sft.vocabulary": "config.sft.vocab_size",
    "config.curriculum.retire_at": "config.curriculum.no_positive_resampling_at",
    "config.rollout.groups": "config.rollout.prompts_per_step",
    "config.rollout.prompt_limit": "config.rollout.max_prompt_tokens",
    "config.rollout.thinking_low": "config.rollout.thinking_budget_min",
    "config.rollout.thinking_high": "config.rollout.thinking_budget_max",
    "config.rollout.phrase": "config.rollout.interruption_text",
    "config.objective.surrogate": "config.objective.loss",
    "config.objective.cap": "config.objective.max_ratio",
    "config.objective.normalisation": "config.objective.advantage_normalization",
    "config.objective.truncated_is": "config.objective.tis_cap",
    "config.objective.total_variation": "config.objective.dppo_tv_threshold",
    "config.optimizer.warmup": "config.optimizer.warmup_steps",
    "config.optimizer.gradient_clip": "config.optimizer.max_grad_norm",
    "config.learner.row_length": "config.learner.seq_len",
    "config.learner.rows": "config.learner.micro_batch_rows",
    "config.pacing.k": "config.pacing.max_off_policy_steps",
    "config.pacing.store_batches": "config.pacing.max_buffered_batches",
    "config.fleet.sparse_share": "config.fleet.max_delta_density",
    "config.fleet.pass_on": "config.fleet.relay",
    "config.fleet.patch_bytes": "config.fleet.delta_cache_bytes",
    **{
        f"config.probe.{name}": f"config.parity.{name}"
        for name in ("completions", "mean_limit", "p99_limit", "every", "share", "ratio_limit", "difference_limit")
    },
}
RENAMED_VALUES: dict[str, dict[Any, str]] = {
    "config.objective.truncated": {"excluded": "exclude", "fail": "penalize"},
    "config.environment.name": {"jsonl": "math"},
    "config.task.name": {"jsonl": "math"},
    "config.model.remat": {False: "none", True: "block"},
}

# Fields that are no longer there, and what to set instead.
REPLACED = {"config.fleet.completion_seconds": "config.fleet.stall_seconds, which bounds the time without progress"}


class ConfigError(ValueError):
    """A user's mistake in a config file or flag; the message is one line that names it."""


def no_field(where: str, name: str, names: Sequence[str]) -> str:
    """What is said of a name that is no field of `where`; a group that was renamed is named by its fields' new one."""
    full = f"{where}.{name}"
    if full in REPLACED:
        return f"{full} was replaced by {REPLACED[full]}"
    if full in RENAMED:
        return f"{full} was renamed to {RENAMED[full]}"
    if groups := {new.rpartition(".")[0] for old, new in RENAMED.items() if old.startswith(f"{full}.")}:
        return f"{full} was renamed to {groups.pop()}"
    return f"{where} has no field {name!r} (it has: {', '.join(names) or 'none'})"
