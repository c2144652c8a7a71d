"""What an environment is: rows to be answered, and what an answer is worth.

    rows(split)             the problems of "train" or of "validation"
    score(row, completion)  reward and correctness of what follows the thinking

An environment is one file with a `make(config) -> Environment`, and one row of ENVIRONMENTS in load.py.

Environments with turns are not built yet. They would be one more function here, `reply(row, turns) -> messages | None`:
a completion is then the policy's part of one turn of an episode, a row's episode is one sequence of all its turns, and
what the environment says in between are forced spans of that sequence, which the learner leaves out of the loss.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A problem. An environment makes it without `index` and `token_ids`, which are given when the run's rows are."""

    text: str  # of the prompt, rendered
    answer: str  # the right one
    task: str = ""  # the part of a mixture that it is from
    name: str = ""  # what messages call it: "FILE row N"
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what else the scorer wants: values of JSON
    index: int = -1  # in its split
    token_ids: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))  # [tokens] int32


@dataclasses.dataclass(frozen=True)
class Score:
    """What a completion is worth. Raises ValueError for a reward that is not a finite number."""

    reward: float  # what the objective sees
    correct: bool  # what filters, the curriculum and pass rates look at
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)  # written down as their means over a batch

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"the reward is {self.reward}")


WRONG, RIGHT = Score(-1.0, False), Score(1.0, True)


@dataclasses.dataclass(frozen=True)
class Environment:
    """See the module."""

    rows: Callable[[str], Iterable[Row]]  # may raise ValueError naming the config field, or the file and row, at fault
    score: Callable[[Row, str], Score]
    # `score` is a function of a module, and is called in processes of their own, within a limit of CPU time; an
    # exception, a crash or the limit make that completion wrong. False: it is called at once, where the run is.
    in_processes: bool = True
    prepare: Callable[[], None] | None = None  # as `score`: called once in each process, before the first row
