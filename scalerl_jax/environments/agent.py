"""An agent: a program that requests any number of turns from the policy by HTTP, and returns its score.

    async def run(self, row, client): ...      method of an environment, sync or async; returns a score (own.py)

It uses OpenAI's or Anthropic's API of the run's own gateway, with any client or program. Every turn is recorded as the
input and sampled tokens. A turn whose prompt does not continue an earlier one starts a new branch; all branches are
trained on with the same advantage, from the agent's score, and each token once.

    done        it returned its score
    cut         it failed with no turn left (rollout.max_turns) or with a prompt that was too long (max_tokens), or ran
                out of time (deadline: environment.episode_seconds): treated as a completion that is too long
    failed      it failed otherwise, or requested no turn: the completion is excluded, and counted in the metrics
"""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np

from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments.base import Row, Score
from scalerl_jax.environments.episode import Part


@dataclasses.dataclass(frozen=True)
class Client:
    """Connection settings with which an agent reaches the policy."""

    base_url: str  # for OpenAI clients
    anthropic_base_url: str
    api_key: str = dataclasses.field(repr=False)
    session: str  # records the agent's turns
    model: str

    def environment(self) -> dict[str, str]:
        """Environment variables with which other programs reach the policy."""
        openai = {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "OPENAI_MODEL": self.model}
        anthropic = {"ANTHROPIC_BASE_URL": self.anthropic_base_url, "ANTHROPIC_API_KEY": self.api_key}
        return {**openai, **anthropic, "ANTHROPIC_MODEL": self.model}


class Outcome(NamedTuple):
    """The result of an agent's run."""

    branches: tuple[Completion, ...]  # the first one's finish reason applies to the run
    parts: tuple[tuple[Part, ...], ...]  # of each branch
    score: Score


@dataclasses.dataclass(eq=False)
class AgentRun:
    """A completion of a group whose turns are requested by an agent."""

    index: int  # in its group
    attempt: int = 0  # number of earlier attempts
    processes: set[Any] = dataclasses.field(default_factory=set)  # that sampled any part of it
    branch_parts: tuple[tuple[Part, ...], ...] = ()
    _completion: Completion | None = None

    @property
    def completion(self) -> Completion:
        """The first branch, with the others in `others`. Available after `finish`."""
        assert self._completion is not None
        return self._completion

    def finish(self, outcome: Outcome, *, group_id: str) -> Score:
        """Stores the branches of the outcome and returns its score."""
        first, *others = outcome.branches
        self._completion = dataclasses.replace(first, group_id=group_id, index=self.index, others=tuple(others))
        self.branch_parts = outcome.parts
        self.processes.update(part.process for parts in outcome.parts for part in parts)
        return outcome.score


# (prompt [tokens] int32, name of the turn, process of the previous turn, maximal tokens) -> (turn, its process).
Ask = Callable[[np.ndarray, str, Any, int | None], "Future[tuple[Completion, Any]]"]


class Agents(Protocol):
    """Runs the agents of a training run."""

    def run(self, row: Row, name: str, ask: Ask, *, attempt: int) -> "Future[Outcome]":
        """Plays a row. name: of the completion; attempt: number of earlier attempts, whose turns are discarded.

        Cancelling the future ends the agent.
        """
