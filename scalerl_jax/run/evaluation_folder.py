"""The folder of scalerl-eval: its settings, every completion, and a row of numbers for each policy.

    settings.json                  the evaluation's settings; a folder made with other settings is refused
    completions-STEP-KEY.jsonl     a line for each completion, prompt by prompt as they are finished
    evals.jsonl                    a row for each policy whose completions are complete, as in a run's own evals.jsonl

KEY identifies the weights, the rows and the user's own code: if one of them changes, earlier completions are not used.
A prompt's completions are written in one piece. When the command is restarted, a torn end is cut off, and finished
prompts are not sampled again.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from scalerl_jax.config import RolloutConfig
from scalerl_jax.config_check import ConfigError
from scalerl_jax.environments import Row
from scalerl_jax.environments.tokenizer import Tokenizer, split_as_run
from scalerl_jax.rollouts.group_buffer import FinishedGroup
from scalerl_jax.run.folder import acquire_lock
from scalerl_jax.run.jsonl import line_of, read_rows
from scalerl_jax.run.pass_rates import Prompt, Sample, evaluation_row, of_groups
from scalerl_jax.system import files
from scalerl_jax.system.files import read_object, write_whole


class EvaluationFolder:
    """A context manager; one process at a time. Raises ConfigError if the folder holds another evaluation."""

    def __init__(self, path: str, settings: Mapping[str, Any]):
        self.path = path
        with files.naming(path):
            os.makedirs(path, exist_ok=True)
        self._lock = acquire_lock(self._file("lock"), f"--out={path}: an evaluation")
        try:
            self._compare_settings(settings)
        except BaseException:
            os.close(self._lock)
            raise

    def _compare_settings(self, settings: Mapping[str, Any]) -> None:
        settings = json.loads(json.dumps(settings))
        if os.path.exists(self._file("settings.json")):
            before = read_object(self._file("settings.json"))
            for name in {**settings, **before}:
                if before.get(name) != settings.get(name):
                    raise ConfigError(
                        f"--out={self.path}: holds another evaluation: {name} is {before.get(name)!r} there and "
                        f"{settings.get(name)!r} now; another --out starts over"
                    )
        else:
            write_whole(self._file("settings.json"), json.dumps(settings, indent=2) + "\n")

    def __enter__(self) -> "EvaluationFolder":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of evals.jsonl."""
        path = self._file("evals.jsonl")
        return read_rows(path) if os.path.exists(path) else []

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Adds a row in order of step, replacing one of the same step; the file is written whole or not at all."""
        others = [other for other in self.rows() if other["step"] != row["step"]]
        rows = sorted([*others, dict(row)], key=lambda one: one["step"])
        write_whole(self._file("evals.jsonl"), "".join(map(line_of, rows)))

    def completions(self, step: int, key: str, rows: Sequence[Row], *, samples: int) -> "Completions":
        return Completions(self._file(f"completions-{step}-{key}.jsonl"), step, rows, samples=samples)

    def _file(self, name: str) -> str:
        return os.path.join(self.path, name)


class Completions:
    """The completions of one policy; a context manager. `prompts`: the finished ones, by the index of their row."""

    def __init__(self, path: str, step: int, rows: Sequence[Row], *, samples: int):
        """Raises ValueError naming file and row if the file holds other prompts."""
        self._path, self._step = path, step
        self.prompts: dict[int, Prompt] = {}
        by_index = {row.index: row for row in rows}
        kept = []
        lines = read_rows(path) if os.path.exists(path) else []
        for at in range(0, len(lines) - samples + 1, samples):
            group = lines[at : at + samples]
            index = group[0].get("index")
            row = by_index.get(index) if isinstance(index, int) else None
            if (
                row is None
                or any(line.get("index") != row.index for line in group)
                or group[0].get("prompt") != row.text
            ):
                raise ValueError(f"{path}: row {at + 1} is of another prompt: the rows of the environment have changed")
            try:
                self.prompts[row.index] = Prompt(row.environment, row.task, tuple(map(_sample, group)))
            except (KeyError, TypeError) as error:
                raise ValueError(f"{path}: row {at + 1} and those after it are not of this program: {error}") from error
            kept += group
        if len(kept) < len(lines) or (os.path.exists(path) and not files.ends_whole(path)):
            write_whole(path, "".join(map(line_of, kept)))
        with files.naming(path):
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def add(self, group: FinishedGroup, tokenizer: Tokenizer, *, rollout: RolloutConfig) -> None:
        (prompt,), lines = of_groups([group]), []
        for i, (completion, score) in enumerate(zip(group.completions, group.scores)):
            branches = [branch.token_ids.tolist() for branch in completion.branches]
            text = "\n\n".join(map(tokenizer.decode_completion, branches))
            end, budget = rollout.end_of_thinking, rollout.thinking_budget_max
            thinking, answer = split_as_run(text, end, prompt=group.row.text, budget=budget)
            sample = prompt.samples[i]
            lines.append(
                line_of({
                    "step": self._step,
                    "environment": group.row.environment,
                    "task": group.row.task,
                    "index": group.row.index,
                    "row": group.row.name,
                    "sample": i,
                    "prompt": group.row.text,
                    "answer": group.row.answer,
                    "thinking": thinking,
                    "completion": answer,
                    "correct": score.correct,
                    "reward": score.reward,
                    "voted": score.answer,
                    "why": score.why,
                    "metrics": dict(score.metrics),
                    "tokens": sample.tokens,
                    "truncated": sample.truncated,
                    "interrupted": sample.interrupted,
                })
            )  # fmt: skip
        files.append(self._file, "".join(lines).encode(), self._path)
        self.prompts[group.row.index] = prompt

    def so_far(self) -> str:
        """The pass rate so far, for a progress line."""
        correct = [sample.correct for prompt in self.prompts.values() for sample in prompt.samples]
        return f"mean {sum(correct) / len(correct):.3f} so far"

    def row(self) -> dict[str, Any]:
        """The numbers of all prompts, in the order of their rows."""
        return evaluation_row([prompt for _, prompt in sorted(self.prompts.items())])

    def __enter__(self) -> "Completions":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


def _sample(line: Mapping[str, Any]) -> Sample:
    return Sample(**{field.name: line[field.name] for field in dataclasses.fields(Sample)})
