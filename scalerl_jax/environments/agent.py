"""An agent: a program that asks the policy for its turns by HTTP, as often as it likes, and returns its score.

    async def run(self, row, client): ...      of an environment, or no coroutine; gives what `score` would (own.py)

It speaks OpenAI's or Anthropic's wire to the run's own gateway, with whatever client or other program it likes. Every
turn is recorded as the tokens that were fed and sampled. A turn whose prompt does not go on from one before begins
another branch; all branches are trained on, with the one advantage of the agent's score, and each token once.

    done        it has returned its score
    cut         it failed with no turn left (rollout.max_turns), with a prompt that was too long (max_tokens), or it had
                no more time (deadline: environment.episode_seconds): as a completion that is too long
    failed      it failed otherwise, or has asked for nothing: the completion is excluded, and counted in the metrics
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
    """How an agent reaches the policy."""

    base_url: str  # of OpenAI's clients
    anthropic_base_url: str
    api_key: str = dataclasses.field(repr=False)
    session: str  # that its turns are recorded in
    model: str

    def environment(self) -> dict[str, str]:
        """The variables by which other programs find the policy."""
        openai = {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "OPENAI_MODEL": self.model}
        anthropic = {"ANTHROPIC_BASE_URL": self.anthropic_base_url, "ANTHROPIC_API_KEY": self.api_key}
        return {**openai, **anthropic, "ANTHROPIC_MODEL": self.model}


class Outcome(NamedTuple):
    """Of an agent's run."""

    branches: tuple[Completion, ...]  # the first one's finish reason is that of the run
    parts: tuple[tuple[Part, ...], ...]  # of each branch
    score: Score


@dataclasses.dataclass(eq=False)
class AgentRun:
    """A completion of a group whose turns an agent asks for."""

    index: int  # in its group
    attempt: int = 0  # how often it began before
    processes: set[Any] = dataclasses.field(default_factory=set)  # that have sampled any of it
    branch_parts: tuple[tuple[Part, ...], ...] = ()
    _completion: Completion | None = None

    @property
    def completion(self) -> Completion:
        """With the other branches. Once it is finished."""
        assert self._completion is not None
        return self._completion

    def finish(self, outcome: Outcome, *, group_id: str) -> Score:
        """Returns the score."""
        first, *others = outcome.branches
        self._completion = dataclasses.replace(first, group_id=group_id, index=self.index, others=tuple(others))
        self.branch_parts = outcome.parts
        self.processes.update(part.process for parts in outcome.parts for part in parts)
        return outcome.score


# (prompt [tokens] int32, the turn's name, who sampled the turn before, the most tokens) -> the turn, and by whom.
Ask = Callable[[np.ndarray, str, Any, int | None], "Future[tuple[Completion, Any]]"]


class Agents(Protocol):
    """Runs the agents of a training run."""

    def run(self, row: Row, name: str, ask: Ask, *, attempt: int) -> "Future[Outcome]":
        """Plays a row; name: of the completion; attempt: how often it began before, all of which is forgotten.

        Cancelled, it ends the agent.
        """
