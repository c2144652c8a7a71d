"""The records of each step: a row of metrics.jsonl, some completions to read, the progress line."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from scalerl_jax import config_check
from scalerl_jax.config import Config
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.learner.batch import Batch
from scalerl_jax.rollouts.group_buffer import FinishedGroup
from scalerl_jax.run.alarms import LearningWatch
from scalerl_jax.run.collapse_guard import CollapseGuard
from scalerl_jax.run.exporter import TrainerMetrics
from scalerl_jax.run.folder import RunFolder
from scalerl_jax.run.jsonl import read_rows
from scalerl_jax.run.progress import ProgressLine


class StepMetrics:
    """The records of one trainer; used by its thread. The folder's logs are open and end at the step to resume from."""

    def __init__(
        self,
        config: Config,
        *,
        folder: RunFolder,
        tokenizer: Tokenizer,
        line: ProgressLine,
        guard: CollapseGuard,
        exported: TrainerMetrics,
    ):
        self._guard, self._exported = guard, exported
        self._folder, self._tokenizer, self._line = folder, tokenizer, line
        self._samples = config.telemetry.samples
        self._learning = LearningWatch(config_check.leaves(config), read_rows(folder.path("metrics.jsonl")))

    def write(
        self, step: int, groups: Sequence[FinishedGroup], batch: Batch, values: Mapping[str, Any], *, waiting: str
    ) -> None:
        """Writes the row of `step`: the batch's metrics, and `values` from the other components of the step.

        values: numbers, nested mappings and lists of them; waited_seconds and update_seconds are among them.
        waiting: what the trainer waits for now, for the line.
        """
        row = {
            **batch.metrics,
            "groups": [(group.number, group.row.index) for group in groups],
            "lags": {str(lag): count for lag, count in sorted(batch.lags.items())},
            "length_quantiles": length_quantiles(groups),
            "group_seconds": float(np.mean([group.finished_at - group.asked_at for group in groups])),
            **values,
        }
        self._folder.metrics(step, row)
        numbered = {"step": step, **row}
        for remark in self._learning.row(numbered):
            self._line.log(remark)
        self._exported.row(numbered, {**self._learning.past, **self._guard.updated(numbered)})
        if self._folder.wants_rollouts(step):
            shown = groups[: self._samples]
            self._folder.rollouts(step, samples_of(shown, batch.rewards, self._tokenizer))
        seconds = max(1e-9, values["update_seconds"])
        self._line.update(
            step=step,
            pass_rate=batch.metrics["pass_rate"],
            reward=batch.metrics["reward"],
            staleness=batch.metrics["lag_mean"],
            trained_per_second=batch.prompt_tokens / seconds,
            sampled_per_second=batch.lags.total() / (values["waited_seconds"] + seconds),
            waiting=waiting,
        )


def length_quantiles(groups: Sequence[FinishedGroup]) -> list[float]:
    """The 0, 10, .. 100 % quantiles of the completions' tokens; forced tokens count, since they take time too."""
    lengths = [len(completion.token_ids) for group in groups for completion in group.completions]
    return [round(float(tokens), 1) for tokens in np.quantile(lengths, np.linspace(0, 1, 11))]


def samples_of(groups: Sequence[FinishedGroup], rewards: np.ndarray, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Rows of rollouts/step-*.jsonl, without the step: one completion of each group, as it was trained on.

    Its index in the group differs from group to group, so that right and wrong ones are seen. A row is one branch.
    rewards: [prompts, group].
    """
    for p, group in enumerate(groups):
        completion = group.completions[p % len(group.completions)]
        for number, branch in enumerate(completion.branches, 1):
            prompt, ids = branch.prompt, branch.token_ids.tolist()
            yield {
                "group": group.number,
                "index": completion.index,  # in its group
                "branch": [number, len(completion.branches)],  # the first one is 1; and how many there are
                "prompt": group.row.text if prompt is None else tokenizer.decode(prompt.tolist()),
                "answer": group.row.answer,  # the right one
                "completion": tokenizer.decode(ids),
                "token_ids": ids,  # [tokens]
                # [tokens], the generator's own; 0 at forced tokens
                "logprobs": [round(float(value), 6) for value in branch.logprobs],
                "versions": branch.versions,  # (step, start, end), covering [0, tokens)
                "forced": branch.forced,  # (start, end)
                "replies": branch.replies,  # (start, end) of the environment's replies, among the forced tokens
                "verdict": group.scores[completion.index].correct,
                "reward": float(rewards[p, completion.index]),
                "finish_reason": completion.finish_reason,
                "task": group.row.task,  # of the prompt
                # [tokens] the part of `completion` that each token adds; empty if it is unknown
                "pieces": tokenizer.pieces(ids),
            }
