"""Bounds on numbers of the config, for their annotations: Annotated[float, Above(0, up_to=1)]."""

import dataclasses
import math
from typing import Annotated, TypeVar


@dataclasses.dataclass(frozen=True)
class Above:
    low: float
    below: float = math.inf
    up_to: float = math.inf

    def holds(self, value: float) -> bool:
        return self.low < value < self.below and value <= self.up_to

    def __str__(self) -> str:
        below = f" and below {self.below:g}" if self.below < math.inf else ""
        return f"be above {self.low:g}{below}" + (f" and not above {self.up_to:g}" if self.up_to < math.inf else "")


@dataclasses.dataclass(frozen=True)
class AtLeast:
    low: float
    below: float = math.inf

    def holds(self, value: float) -> bool:
        return self.low <= value < self.below

    def __str__(self) -> str:
        if self.below == math.inf:
            return f"not be below {self.low:g}"
        return f"be from {self.low:g} to below {self.below:g}"


@dataclasses.dataclass(frozen=True)
class Between:
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"be between {self.low:.15g} and {self.high:.15g}"


Number = TypeVar("Number", int, float)
Positive = Annotated[Number, Above(0)]
NotNegative = Annotated[Number, AtLeast(0)]
Share = Annotated[float, Between(0, 1)]
