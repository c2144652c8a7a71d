"""The calibration of a forecast's laws: numbers fitted on complete runs (calibrate.py), kept in a file.

calibration.json, next to this file, was fitted on configs/bank.csv; `scalerl-calibrate` makes one from your own runs.
"""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping, Sequence

import numpy as np

from scalerl_jax.system import files

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "calibration.json")
SCALES = (0.01, 0.05, 0.2, 0.6, 2.0)  # logits that a law may be off by where the compute has grown by a factor of e

Weights = Mapping[str, tuple[float, ...]]  # law -> weight for each of SCALES


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The parameters of a forecast that do not depend on the run."""

    prior: Weights  # weights without a record; their sum is 1
    growth: float  # power of ln(compute / compute so far) with which a law's error grows
    rate: float  # weight of a nat of mean log density in the record
    runs: int = 0  # number of runs in the fit

    def deviation(self, scale: float, ratio) -> np.ndarray:
        """A law's standard deviation in logits [M] at `ratio` [M] times the compute so far."""
        return scale * np.log(np.maximum(ratio, 1.0)) ** self.growth

    def weights(self, record: Mapping[str, Sequence[float]] | None, *, alone: str | None = None) -> Weights:
        """The weights of laws and scales. record: mean log density of each law at each of SCALES (average.py); None
        uses the prior alone. alone: the law that gets all of the weight."""
        logs = np.log(np.maximum(list(self.prior.values()), 1e-12))
        if record is not None:
            logs = logs + self.rate * np.array([record[name] for name in self.prior])
        if alone is not None:
            logs = np.where(np.array(list(self.prior))[:, None] == alone, logs, -np.inf)
        shares = np.exp(logs - logs.max())
        shares /= shares.sum()
        return {name: tuple(row.tolist()) for name, row in zip(self.prior, shares)}


@functools.cache
def default() -> Calibration:
    """The calibration shipped with this package."""
    return read(FILE)


def read(path: str) -> Calibration:
    """Reads a calibration. Raises ValueError (one line, naming the file) where the file is no calibration."""
    with files.naming(path), open(path, encoding="utf-8") as file:
        try:
            found = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path}: is not JSON ({error})") from error
    from scalerl_jax.scaling.laws import LAWS  # imported late, since it imports scipy.special

    try:
        if [_number(scale) for scale in found["scales"]] != list(SCALES):
            raise ValueError(f"scales are {found['scales']}, not {list(SCALES)}")
        prior = {name: tuple(_number(weight) for weight in found["prior"][name]) for name in LAWS}
        if any(len(row) != len(SCALES) for row in prior.values()) or sum(map(sum, prior.values())) == 0:
            raise ValueError("prior: a weight for each of the scales")
        return Calibration(prior, _number(found["growth"]), _number(found["rate"]), int(found["runs"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: is not a calibration as scalerl-calibrate writes it ({error!r})") from error


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{value!r} is not a number from 0 on")
    return float(value)


def text(calibration: Calibration) -> str:
    """The text of the file, with significant digits only; a line for each part."""
    document = {
        "scales": list(SCALES),
        "prior": {name: [float(f"{weight:.3g}") for weight in row] for name, row in calibration.prior.items()},
        "growth": float(f"{calibration.growth:.3g}"),
        "rate": float(f"{calibration.rate:.3g}"),
        "runs": calibration.runs,
    }
    return "{\n" + ",\n".join(f'  "{name}": {json.dumps(part)}' for name, part in document.items()) + "\n}\n"
