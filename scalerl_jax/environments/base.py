"""An environment: problems to be answered, and the scoring of answers.

    rows(split)             the problems of "train" or of "validation"
    score(row, completion)  reward and correctness of the text after the thinking
    episode(row)            instead of score: an object that replies to the policy's turns, see episode.py
    run(row, client)        instead of score: a program that requests any number of turns by HTTP, see episode.py

An environment is one file with a `make(config) -> Environment`, and one row of ENVIRONMENTS in load.py. In a mixture
`make` gets the run's config with the environment's own as config.environment. `make` itself reads no data: `rows` does,
and a scoring process makes the environment only for `score`.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from scalerl_jax.config import EnvironmentConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A problem. The environment leaves the fields from `environment` on at their defaults: the run sets them."""

    text: str  # the prompt, or the joined content of its messages; rendered when the run's rows are made
    answer: str = ""  # the correct answer
    task: str = ""  # evaluations report each task separately
    name: str = ""  # used in messages to the user: "FILE row N"
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # further inputs of the score, as JSON values
    # The prompt as a chat, ({"role", "content"}, ...); empty for a text until Prompts.render, which always sets it.
    messages: tuple[Mapping[str, str], ...] = ()
    chat: bool = False  # the text is a user's message: render it with the chat template if the model has one
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas of the callable tools, for the chat template
    source: str = ""  # the row's data source, if sources are sampled with weights
    key: str = ""  # distinguishes problems with equal prompts: a game's seed does not show in its first message
    environment: str = ""  # name of its environment in a mixture
    index: int = -1  # in its split
    token_ids: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))  # [tokens] int32
    rendered: bool = False  # by the chat template
    calls: str = "hermes"  # the model's format of tool calls, see tool_calls.py
    agent: bool = False  # its environment has `run`


def asked(row: Row) -> str:
    """The question of a row as its environment wrote it: the last user message, or the text."""
    return next((m["content"] for m in reversed(row.messages) if m.get("role") == "user"), row.text)


def question(row: Row, environment: EnvironmentConfig) -> str:
    """A row's question before any template, without a system message that config.environment.system_prompt replaces.

    Rows that differ only in that message get the same prompt.
    """
    if environment.system_prompt and row.messages and row.messages[0].get("role") == "system":
        return joined_content(row.messages[1:])
    return row.text


def prompt_key(text: str, apart: str = "") -> bytes:
    """[16] hash of a prompt's text, with white space normalized, and of `apart`, which distinguishes equal texts
    (Row.key). Prompts with equal keys are the same prompt."""
    whole = " ".join(text.split()) + (f"\0{apart}" if apart else "")
    return hashlib.blake2b(whole.encode("utf-8"), digest_size=16).digest()


def joined_content(messages: Iterable[Mapping[str, str]]) -> str:
    """The contents of the messages as one text."""
    return "\n\n".join(message["content"] for message in messages)


def shortened(text: str) -> str:
    """A text in one line of at most 80 characters, its middle left out, for messages."""
    shown = " ".join(text.split())
    return shown if len(shown) <= 80 else f"{shown[:38]} ... {shown[-37:]}"


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A tool call in a turn."""

    name: str = ""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    error: str = ""  # why it cannot be parsed; name and arguments are empty then


class Completion(str):
    """The text of a completion after its thinking, with further attributes that a score may read."""

    thinking: str  # also if the prompt opened the thinking; "" if there is none
    tokens: int  # number of sampled tokens, thinking included
    tool_calls: tuple[ToolCall, ...]  # in a turn of an episode
    # In an episode with tools, what came before this turn and after the row's prompt: {"role": "assistant", "content",
    # "tool_calls"} and {"role": "tool", "content"}.
    messages: tuple[Mapping[str, Any], ...]
    # In an episode with tools: opened(toolset) returns the episode's open toolset, and opens it if no call did.
    opened: Callable[[Any], Any]

    def __new__(
        cls, answer: str, *, thinking: str = "", tokens: int = 0, tool_calls: tuple[ToolCall, ...] = ()
    ) -> "Completion":
        made = super().__new__(cls, answer)
        made.thinking, made.tokens, made.tool_calls = thinking, tokens, tool_calls
        made.messages, made.opened = (), _nothing_opened
        return made


def _nothing_opened(toolset: Any) -> Any:
    raise LookupError(f"{type(toolset).__name__} is opened by an episode, and this is an answer alone")


@dataclasses.dataclass(frozen=True)
class Score:
    """The score of a completion. Raises ValueError for a reward that is not a finite number."""

    reward: float  # used by the objective
    correct: bool  # used by filters, the curriculum and pass rates
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)  # logged as their means over a batch
    answer: str | None = None  # the extracted answer in a canonical form, for majority votes; None: no vote
    why: str = ""  # explanation for people: what was compared with what, which test failed
    failed: bool = False  # not a real score: a function failed or timed out; the completion counts as wrong
    excluded: bool = False  # also not trained on: the environment failed, not the policy
    turns: tuple[float, ...] = ()  # reward of each turn of an episode, summing to `reward`; (): all with the last turn

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"the reward is {self.reward}")
        object.__setattr__(self, "turns", tuple(self.turns))  # JSON has lists


WRONG, RIGHT = Score(-1.0, False), Score(1.0, True)


def reaches(reward: float, correct_at: float) -> bool:
    """Whether a reward is at least `correct_at`: terms like 0.7, 0.2 and 0.1 add up to a little less than 1."""
    return reward >= correct_at - 1e-9


class ScorerError(ValueError):
    """Scoring is impossible and ends the run; the message is one line."""


class ScoreFailed(Exception):
    """A score function could not score this completion, which counts as wrong; `line` is logged once per `kind`."""

    def __init__(self, line: str, *, kind: str = "", metrics: Mapping[str, float] | None = None):
        super().__init__(line)
        self.line, self.kind, self.metrics = line, kind or line, dict(metrics or {})


@dataclasses.dataclass(frozen=True)
class Environment:
    """See the module's docstring."""

    rows: Callable[[str], Iterable[Row]]  # may raise ValueError naming the config field, or the file and row, at fault
    score: Callable[[Row, Completion], Score]
    # Begins an episode of a row, in a separate process; `score` is not called then. None: a completion is one turn.
    episode: "Callable[[Row], Any] | None" = None
    # An agent that plays a row, in a separate process, and returns its score.
    run: "Callable[[Row, Any], Score] | None" = None
    scores_answers: bool = True  # `score` accepts an answer alone, without its episode
    # `score` is called in separate processes, which rebuild the environment from its config, within a limit of CPU
    # time. An exception, a crash or the limit makes that completion wrong; ScorerError ends the run. False: `score` is
    # called in the process of the run.
    in_processes: bool = True
    # `score` reads a completion's thinking or token count. False: completions with equal answers are scored once.
    reads_thinking: bool = False
    # Whether `score` always returns the same for the same row and completion; called after `prepare`. Only then do the
    # scoring processes cache scores for the run. A judge model, a randomized function and a program with a time limit
    # are not deterministic.
    deterministic: Callable[[], bool] = bool
    # Called once in each scoring process, before the first row; ValueError aborts the start.
    prepare: Callable[[], None] | None = None
    # Called after `prepare`, with the columns that rows have in `extra`; ScorerError aborts the start.
    check: Callable[[Collection[str]], None] | None = None
    # Called with each row that is to be scored, in the run's process; ScorerError aborts the start.
    check_row: Callable[[Row], None] | None = None
    # Wall-clock seconds that a score may wait for others, in addition to its CPU time: for programs, a judge.
    waits_seconds: float = 0.0
    # Sampling weight of each source that rows name, relative to the others. Empty: all rows are pooled.
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # Messages on the rows that `rows` left out so far.
    notes: Callable[[], list[str]] = list
    # `rows` applies config.environment.filter itself: it sees the original columns, load.py only the finished row.
    filters: bool = False


def scores_itself(environment: EnvironmentConfig) -> bool:
    """Whether the environment's own score is used, alone or as one of the configured rewards."""
    rewards = (environment.reward,) if environment.reward else tuple(environment.rewards)
    return not rewards or "environment" in rewards


@dataclasses.dataclass(frozen=True)
class Stratum:
    """Training rows that are sampled with a common weight."""

    name: str  # environment and source; "" if there is only one
    weight: float  # relative to the other strata
    rows: range  # indices of its rows


@dataclasses.dataclass(frozen=True)
class Rows:
    """The problems of a run, rendered and tokenized."""

    train: list[Row]
    held_out: list[Row]
    strata: list[Stratum]  # a partition of `train`
    notes: list[str]  # messages on left-out rows and on how prompts are rendered
