"""Completions of several turns: episodes, with the environment's replies between the turns, and agents.

    prompt | turn, reply, turn, reply, ..., turn      one sequence; the replies are forced spans of it

The policy samples a turn with the weight version that its server has at that time; a reply is only input, never part of
the loss. A turn's prompt is the sequence so far, token for token: nothing is retokenized, so a sequence is exactly what
was sampled, and each sampled token is trained on once. A completion of an environment without episodes is a trajectory
of one turn.

An agent is a program that requests any number of turns from the policy by HTTP, and returns its score:

    async def run(self, row, client): ...      method of an environment, sync or async; returns a score (own.py)

It uses OpenAI's or Anthropic's API of the run's own gateway, with any client or program. Every turn is recorded as the
input and sampled tokens. A turn whose prompt does not continue an earlier one starts a new branch; all branches are
trained on with the same advantage, from the agent's score, and each token once. So are those of an episode whose
earlier turns are not kept as they were sampled (config.environment.history=template).

    done        it returned its score
    cut         it failed with no turn left (rollout.max_turns) or with a prompt that was too long (max_tokens), or ran
                out of time (deadline: environment.episode_seconds): treated as a completion that is too long
    failed      it failed otherwise, or requested no turn: the completion is excluded, and counted in the metrics
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np

from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments.base import Completion as Turn
from scalerl_jax.environments.base import Row, Score

LONGEST_REPLY = 100_000  # characters of one reply of an environment


@dataclasses.dataclass(frozen=True)
class Step:
    """An environment's response to a turn."""

    messages: tuple[Mapping[str, str], ...] = ()  # the reply: {"role", "content"}; at least one unless done
    done: bool = False
    reward: float = 0.0  # of this turn; an episode's reward is the sum
    correct: bool | None = None  # of the episode, with `done`; None: reward >= environment.correct_at
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of the episode; the last value is kept


class Episode(Protocol):
    """One episode of one row, in a separate process."""

    def step(self, turn: Turn) -> "Step | Mapping[str, Any] | str":
        """The environment's response to the policy's turn: a Step, its fields as a dict, or the text of a reply."""


def as_step(found: object) -> Step:
    """Converts the result of an episode's step to a Step. Raises ValueError or TypeError if that is not possible."""
    if isinstance(found, str):
        found = Step(({"role": "user", "content": found},))
    elif isinstance(found, Mapping):
        names = {field.name for field in dataclasses.fields(Step)}
        if unknown := set(found) - names:
            raise ValueError(
                f"a step has no field {sorted(map(str, unknown))[0]!r} (it has: {', '.join(sorted(names))})"
            )
        found = Step(**found)
    if not isinstance(found, Step):
        raise TypeError(f"a step is {type(found).__name__}, not Step, dict or str")
    messages = [found.messages] if isinstance(found.messages, str) else list(found.messages)
    messages = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    for message in messages:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ValueError(f"a message of a step is {message!r}, not {{'role': ..., 'content': ...}}")
        try:
            f"{message['role']}\n{message['content']}".encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:  # tokenizers raise TypeError for it
            raise ValueError("a message of a step is no text: it has half of a surrogate pair") from None
    if not messages and not found.done:
        raise ValueError("a step has no messages, and the episode is not done")
    length = sum(len(message["content"]) for message in messages)
    if length > LONGEST_REPLY:
        raise ValueError(f"a step says {length} characters, more than {LONGEST_REPLY}")
    reward, metrics = float(found.reward), {str(name): float(value) for name, value in found.metrics.items()}
    if not all(map(math.isfinite, (reward, *metrics.values()))):
        raise ValueError(f"the reward or a metric of a step is not a finite number: {reward}, {metrics}")
    correct = None if found.correct is None else bool(found.correct)
    plain = tuple({"role": message["role"], "content": message["content"]} for message in messages)
    return Step(plain, bool(found.done), reward, correct, metrics)


class SampledPart(NamedTuple):
    """The process that sampled a completion's tokens from the end of the previous part up to `end`."""

    process: Any  # rollouts' Process
    end: int


class Reply(NamedTuple):
    """What the next turn is sampled after."""

    token_ids: np.ndarray  # [tokens] int32
    new_branch: bool = False  # they are the whole prompt of a new branch; otherwise they are appended to the last turn


class Trajectory:
    """A completion that is sampled turn by turn."""

    def __init__(self, first: Completion, process: Any):
        """first: the first turn, sampled by `process`."""
        self.index = first.index  # in its group
        self.turns = 0
        self.begin = 0  # index of the last turn's first token in its branch
        self._branches: list[Completion] = []
        self._parts: list[list[SampledPart]] = []  # of each branch
        self._prompt: np.ndarray | None = None  # of the branch that the next turn begins; None: it begins none
        self.add_turn(first, process)

    @property
    def completion(self) -> Completion:
        """All tokens so far: the first branch, with the others in `others`, and the finish reason of the last turn."""
        first, *others = self._branches
        if not others:
            return first
        return dataclasses.replace(first, others=tuple(others), finish_reason=self._branches[-1].finish_reason)

    @property
    def turn_ids(self) -> np.ndarray:
        """Tokens of the last turn: [tokens] int32."""
        return self._branches[-1].token_ids[self.begin :]

    def next_prompt(self, prompt: np.ndarray) -> np.ndarray:
        """The tokens that the next turn is sampled after: [tokens] int32. prompt: the first turn's."""
        if self._prompt is not None:
            return self._prompt
        branch = self._branches[-1]
        return np.concatenate([prompt if branch.prompt is None else branch.prompt, branch.token_ids])

    @property
    def last(self) -> Any:
        """The process that sampled the last turn."""
        return self._parts[-1][-1].process

    @property
    def processes(self) -> set[Any]:
        """The processes that sampled any part of it."""
        return {part.process for parts in self._parts for part in parts}

    @property
    def branch_parts(self) -> tuple[tuple[SampledPart, ...], ...]:
        """The parts of each branch."""
        return tuple(map(tuple, self._parts))

    def add_turn(self, turn: Completion, process: Any) -> None:
        """Appends a turn, sampled by `process`."""
        if not self._branches or self._prompt is not None:
            self.begin = 0
            self._branches.append(turn if self._prompt is None else dataclasses.replace(turn, prompt=self._prompt))
            self._parts.append([])
            self._prompt = None
        else:
            self.begin = len(self._branches[-1].token_ids)
            self._branches[-1] = _joined(self._branches[-1], turn)
        self._parts[-1].append(SampledPart(process, len(self._branches[-1].token_ids)))
        self.turns += 1

    def add_reply(self, reply: Reply) -> None:
        """Appends the environment's reply to the last turn, or has the next turn begin a new branch."""
        count, whole = len(reply.token_ids), ((0, len(reply.token_ids)),)
        assert count > 0
        if reply.new_branch:
            self._prompt = reply.token_ids
            return
        branch = self._branches[-1]
        fed = dataclasses.replace(
            branch, token_ids=np.asarray(reply.token_ids, np.int32), logprobs=np.zeros(count, np.float32),
            versions=((branch.versions[-1][0], 0, count),), forced=whole, replies=whole,
            queued_seconds=0.0, sampling_seconds=0.0, experts=None,
        )  # fmt: skip
        self._branches[-1] = joined = dataclasses.replace(_joined(branch, fed), experts=branch.experts)
        self._parts[-1].append(SampledPart(self.last, len(joined.token_ids)))

    def cut(self) -> None:
        """Marks the episode as cut: it ran out of turns or tokens before its environment was done."""
        self._branches[-1] = dataclasses.replace(self._branches[-1], finish_reason="length")


def _joined(first: Completion, then: Completion) -> Completion:
    """Concatenates two completions; `then` was sampled after `first`."""
    at = len(first.token_ids)
    versions = list(first.versions)
    for step, start, end in then.versions:
        if versions[-1][0] == step:
            versions[-1] = (step, versions[-1][1], end + at)
        else:
            versions.append((step, start + at, end + at))

    def behind(spans: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        return tuple((start + at, end + at) for start, end in spans)

    experts = then.experts
    if experts is not None and first.experts is not None:
        # The generator also returns experts for the tokens fed again; keep those with which a token was sampled.
        experts = np.concatenate([first.experts, experts[len(first.experts) :]])
    return dataclasses.replace(
        first,
        token_ids=np.concatenate([first.token_ids, then.token_ids]),
        logprobs=np.concatenate([first.logprobs, then.logprobs]),
        versions=tuple(versions),
        forced=first.forced + behind(then.forced),
        replies=first.replies + behind(then.replies),
        finish_reason=then.finish_reason,
        queued_seconds=first.queued_seconds + then.queued_seconds,
        sampling_seconds=first.sampling_seconds + then.sampling_seconds,
        experts=experts,
    )


# ---- Agents --------------------------------------------------------------------------------------------------------


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
    parts: tuple[tuple[SampledPart, ...], ...]  # of each branch
    score: Score


@dataclasses.dataclass(eq=False)
class AgentRun:
    """A completion of a group whose turns are requested by an agent."""

    index: int  # in its group
    attempt: int = 0  # number of earlier attempts
    processes: set[Any] = dataclasses.field(default_factory=set)  # that sampled any part of it
    branch_parts: tuple[tuple[SampledPart, ...], ...] = ()
    # The first branch, with the others in `others`. Available after `finish`.
    completion: Completion = dataclasses.field(init=False, repr=False)

    def finish(self, outcome: Outcome, *, group_id: str) -> Score:
        """Stores the branches of the outcome and returns its score."""
        first, *others = outcome.branches
        self.completion = dataclasses.replace(first, group_id=group_id, index=self.index, others=tuple(others))
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
