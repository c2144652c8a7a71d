"""How far the laws of a forecast can be trusted: numbers fitted on complete runs, and read from calibration.json."""

import dataclasses
import functools
import json
import os
from collections.abc import Mapping

import numpy as np

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "calibration.json")


@dataclasses.dataclass(frozen=True)
class Spread:
    """The discrepancy of one law."""

    scale: float  # logits where the compute has grown by a factor of e
    growth: float  # power of the distance
    prior: float  # weight of the law before its record is known

    def deviation(self, ratio) -> np.ndarray:
        """Logits [M] at `ratio` [M] times the compute so far."""
        return self.scale * np.maximum(np.log(np.maximum(ratio, 1.0)), 0.0) ** self.growth


@dataclasses.dataclass(frozen=True)
class Calibration:
    laws: Mapping[str, Spread]
    rate: float  # what a nat of mean log density is worth

    def weights(self, record: Mapping[str, float] | None) -> dict[str, float]:
        """Of the laws, their sum 1. record: of average.py."""
        logs = np.array([np.log(spread.prior) for spread in self.laws.values()])
        if record is not None:
            logs = logs + self.rate * np.array([record[name] for name in self.laws])
        shares = np.exp(logs - logs.max())
        return dict(zip(self.laws, (shares / shares.sum()).tolist()))
