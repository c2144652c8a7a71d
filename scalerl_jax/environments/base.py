"""What an environment is: rows to be answered, and what an answer is worth.

    rows(split)             the problems of "train" or of "validation"
    score(row, completion)  reward and correctness of what follows the thinking
    episode(row)            in its place: an object that replies to the policy's turns, see episode.py
    run(row, client)        in its place: a program that asks the policy by HTTP as often as it likes, see agent.py

An environment is one file with a `make(config) -> Environment`, and one row of ENVIRONMENTS in load.py. Where a run has
several, `make` gets the run's config with the environment's own as config.environment. It does no work: `rows` reads
what there is to read, and a process that scores makes the environment for `score` alone.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from scalerl_jax.config import EnvironmentConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A problem. What stands last, from `environment` on, is not its environment's to give: it comes with the run."""

    text: str  # the prompt; of messages, what they say; rendered when the run's rows are made
    answer: str = ""  # the right one
    task: str = ""  # the part that evaluations report by itself
    name: str = ""  # what messages call it: "FILE row N"
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what else the scorer wants: values of JSON
    # ({"role", "content"}, ...): the prompt as a chat; (): it is a text. A rendered row has what was asked in any case.
    messages: tuple[Mapping[str, str], ...] = ()
    chat: bool = False  # a text that is asked as a user asks it: for the chat template, where the model has one
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas of what it may call, for the chat template
    source: str = ""  # where its environment has it from, if sources are drawn from with weights
    key: str = ""  # tells problems of the same prompt apart: a game's seed, of which its first words say nothing
    environment: str = ""  # its name in a mixture
    index: int = -1  # in its split
    token_ids: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))  # [tokens] int32
    rendered: bool = False  # by the chat template
    calls: str = "hermes"  # the form in which the model writes calls of tools, see tool_calls.py
    agent: bool = False  # its environment has `run`


def asked(row: Row) -> str:
    """The question of a row as its environment wrote it: what the user says last, or the text."""
    return next((m["content"] for m in reversed(row.messages) if m.get("role") == "user"), row.text)


def joined_content(messages: Iterable[Mapping[str, str]]) -> str:
    """What messages say, as one text."""
    return "\n\n".join(message["content"] for message in messages)


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool that a turn makes."""

    name: str = ""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    error: str = ""  # why it cannot be read; it has neither name nor arguments then


class Completion(str):
    """What a completion says after its thinking, with what else of it a score may look at."""

    thinking: str  # its thinking, also where the prompt has opened that already; "": none
    tokens: int  # sampled, thinking included
    tool_calls: tuple[ToolCall, ...]  # of a turn of an episode
    # In an episode with tools: opened(toolset) is what it has open for the episode, opened now if no call did.
    opened: Callable[[Any], Any]

    def __new__(
        cls, answer: str, *, thinking: str = "", tokens: int = 0, tool_calls: tuple[ToolCall, ...] = ()
    ) -> "Completion":
        made = super().__new__(cls, answer)
        made.thinking, made.tokens, made.tool_calls = thinking, tokens, tool_calls
        made.opened = _nothing_opened
        return made


def _nothing_opened(toolset: Any) -> Any:
    raise LookupError(f"{type(toolset).__name__} is opened by an episode, and this is an answer alone")


@dataclasses.dataclass(frozen=True)
class Score:
    """What a completion is worth. Raises ValueError for a reward that is not a finite number."""

    reward: float  # what the objective sees
    correct: bool  # what filters, the curriculum and pass rates look at
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)  # written down as their means over a batch
    answer: str | None = None  # what it was taken to answer, in one form for all that mean the same; None: no vote
    why: str = ""  # for people: what was compared with what, which test failed
    failed: bool = False  # there is no true score: a function failed, or took too long; it counts as wrong
    excluded: bool = False  # likewise, and nothing is learned from it: its environment failed, not the policy
    turns: tuple[float, ...] = ()  # of an episode the reward of each turn, which add up; (): it came with the last

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"the reward is {self.reward}")
        object.__setattr__(self, "turns", tuple(self.turns))  # JSON has lists


WRONG, RIGHT = Score(-1.0, False), Score(1.0, True)


class ScorerError(ValueError):
    """Nothing can be scored, and the run ends; the message is one line."""


class ScoreFailed(Exception):
    """A score function could not score this completion, which is wrong then; the line is said once for its `kind`."""

    def __init__(self, line: str, *, kind: str = "", metrics: Mapping[str, float] | None = None):
        super().__init__(line)
        self.line, self.kind, self.metrics = line, kind or line, dict(metrics or {})


@dataclasses.dataclass(frozen=True)
class Environment:
    """See the module."""

    rows: Callable[[str], Iterable[Row]]  # may raise ValueError naming the config field, or the file and row, at fault
    score: Callable[[Row, Completion], Score]
    # Begins an episode of a row, in a process of its own; `score` is not asked then. None: a completion is one turn.
    episode: "Callable[[Row], Any] | None" = None
    # Likewise: an agent that plays a row, in a process of its own, and says what that is worth.
    run: "Callable[[Row, Any], Score] | None" = None
    scores_answers: bool = True  # `score` can be asked of an answer alone, without its episode
    # `score` is called in processes of their own, which make the environment again from its config, within a limit of
    # CPU time; an exception, a crash or the limit make that completion wrong, and ScorerError ends the run. False: it
    # is called where the run is.
    in_processes: bool = True
    # It looks at a completion's thinking or tokens. False: where two say the same after it they are scored once.
    reads_thinking: bool = False
    # Whether `score` says the same of the same row and completion whenever it is asked; asked once it is prepared. Only
    # then is a score in those processes remembered for the run. A model that judges, a function that draws at random
    # and a program with a limit of time do not.
    deterministic: Callable[[], bool] = bool
    # Called once in each such process, before the first row; ValueError there ends the start.
    prepare: Callable[[], None] | None = None
    # Called behind it, with the columns that rows have in `extra`; ScorerError there ends the start.
    check: Callable[[Collection[str]], None] | None = None
    # How long a score may take by clock beside the CPU time, where it waits for others: programs, a judge.
    waits_seconds: float = 0.0
    # Of sources that rows name: how often each is drawn from beside the others. Empty: all rows alike.
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # Lines for people on what `rows` left out so far.
    notes: Callable[[], list[str]] = list
    # `rows` leaves out what config.environment.filter does: it knows a row's columns, load.py only what became of them.
    filters: bool = False


def scores_itself(environment: EnvironmentConfig) -> bool:
    """Whether the environment's own score is asked, and not rewards in its place alone."""
    rewards = (environment.reward,) if environment.reward else tuple(environment.rewards)
    return not rewards or "environment" in rewards


@dataclasses.dataclass(frozen=True)
class Stratum:
    """Training rows that are drawn from with a weight of their own."""

    name: str  # environment and source; "" where there is only one
    weight: float  # beside those of the others
    rows: range  # their indices


@dataclasses.dataclass(frozen=True)
class Rows:
    """The problems of a run, rendered and as token ids."""

    train: list[Row]
    held_out: list[Row]
    strata: list[Stratum]  # they divide `train`
    notes: list[str]  # lines on what was left out and how prompts are rendered
