"""Completions as they were trained on, for people to read."""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class RolloutSample:
    """A completion as it was trained on."""

    group: int
    index: int  # in its group
    prompt: str
    answer: str  # the right one
    completion: str
    token_ids: Sequence[int]  # [tokens]
    logprobs: Sequence[float]  # [tokens], the generator's own; 0 at forced tokens
    versions: Sequence[tuple[int, int, int]]  # (step, start, end), covering [0, tokens)
    forced: Sequence[tuple[int, int]]  # (start, end)
    correct: bool  # "verdict" in the file
    reward: float
    finish_reason: str
    task: str = ""  # of the prompt
    pieces: Sequence[str] = ()  # [tokens] the part of `completion` that each token adds; empty: it cannot be told

    def row(self) -> dict[str, Any]:
        """Of rollouts/step-*.jsonl, beside its step."""
        fields = {"verdict" if name == "correct" else name: value for name, value in vars(self).items()}
        return fields | {"logprobs": [round(float(value), 6) for value in self.logprobs]}
