"""How far the laws of a forecast can be trusted: numbers fitted on complete runs (calibrate.py), kept in a file.

calibration.json, beside this file, was fitted on configs/bank.csv; `scalerl-calibrate` makes one of runs of your own.
"""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from scalerl_jax.system import files

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "calibration.json")


@dataclasses.dataclass(frozen=True)
class Spread:
    """One law's discrepancy, and how likely the law is."""

    scale: float  # logits where the compute has grown by a factor of e
    growth: float  # power of the distance
    prior: float  # weight of the law before its record is known

    def deviation(self, ratio) -> np.ndarray:
        """Logits [M] at `ratio` [M] times the compute so far."""
        return self.scale * np.log(np.maximum(ratio, 1.0)) ** self.growth


@dataclasses.dataclass(frozen=True)
class Calibration:
    laws: Mapping[str, Spread]
    rate: float  # what a nat of mean log density in the record is worth
    runs: int = 0  # that it was fitted on

    def weights(self, record: Mapping[str, float] | None) -> dict[str, float]:
        """Of the laws, their sum 1. record: mean log density of each (average.py); None: the priors alone."""
        logs = np.log([max(spread.prior, 1e-12) for spread in self.laws.values()])
        if record is not None:
            logs = logs + self.rate * np.array([record[name] for name in self.laws])
        shares = np.exp(logs - logs.max())
        return dict(zip(self.laws, (shares / shares.sum()).tolist()))


@functools.cache
def default() -> Calibration:
    """The one that comes with this package."""
    return read(FILE)


def read(path: str) -> Calibration:
    """Raises ValueError (one line, naming the file) where it holds no calibration."""
    with files.naming(path), open(path, encoding="utf-8") as file:
        try:
            found = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path}: is not JSON ({error})") from error
    from scalerl_jax.scaling.laws import LAWS  # which brings scipy's stable of distributions

    try:
        laws = {name: Spread(**{key: _number(value) for key, value in found["laws"][name].items()}) for name in LAWS}
        return Calibration(laws, _number(found["rate"]), int(found["runs"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: is not a calibration as scalerl-calibrate writes it ({error!r})") from error


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{value!r} is not a number from 0 on")
    return float(value)


def document(calibration: Calibration) -> dict[str, Any]:
    """As the file holds it, with the digits that are known."""
    return {
        "laws": {
            name: {key: float(f"{value:.3g}") for key, value in dataclasses.asdict(spread).items()}
            for name, spread in calibration.laws.items()
        },
        "rate": float(f"{calibration.rate:.3g}"),
        "runs": calibration.runs,
    }
