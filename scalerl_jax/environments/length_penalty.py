"""The length penalty, the paper's alternative to interruptions (equation 9).

    R_length(y) = clip( (L_max - |y|) / L_cache - 1, -1, 0 )     added to the reward of correct completions only

    |y|      sampled tokens
    L_max    thinking_budget_max + answer_budget: the longest completion
    L_cache  length_penalty_tokens: before L_max, over which the penalty grows from 0 to 1

`correct` is as it was: filters, the curriculum and pass rates do not see lengths.
"""

import dataclasses

from scalerl_jax.config import RolloutConfig
from scalerl_jax.environments.base import Score

METRIC = "length_penalty"


def of_tokens(tokens: int, rollout: RolloutConfig) -> float:
    """R_length, in [-1, 0]."""
    longest = rollout.thinking_budget_max + rollout.answer_budget
    return min(0.0, max(-1.0, (longest - tokens) / rollout.length_penalty_tokens - 1))


def penalized(score: Score, *, tokens: int, rollout: RolloutConfig) -> Score:
    """`score` with the penalty, which stands in its metrics; 0 where it is wrong."""
    penalty = of_tokens(tokens, rollout) if score.correct else 0.0
    return dataclasses.replace(score, reward=score.reward + penalty, metrics={**score.metrics, METRIC: penalty})
