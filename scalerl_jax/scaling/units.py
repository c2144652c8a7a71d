"""Units of the compute axis, how its numbers are written, and the scale of a score."""

import numpy as np

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "day": 86400.0}
_FLOPS = {
    "FLOP": 1.0,
    "GFLOP": 1e9,
    "TFLOP": 1e12,
    "PFLOP": 1e15,
    "EFLOP": 1e18,
    "ZFLOP": 1e21,
    "PFLOP/s-day": 1e15 * 86400,
}
_TOKENS = {"token": 1.0, "Ktoken": 1e3, "Mtoken": 1e6, "Gtoken": 1e9, "Ttoken": 1e12}
_KINDS = (_SECONDS, _FLOPS, _TOKENS)
TYPICAL_HOURS = "typical_hours"  # made of the columns step and device_hours: typical_hours() below
# Columns of a run folder, as they are called.
AXES = {TYPICAL_HOURS: "typical device-hours", "device_hours": "device-hours", "model_flops": "model FLOPs"}
RANGES = {"accuracy": (0, 1), "reward": (-1, 1), "percent": (0, 100)}  # of the scales of a score


def conversion(text: str) -> tuple[float, str]:
    """The factor and the new unit of "s:h" (seconds to hours); "h" alone only names the unit. Raises ValueError."""
    source, separator, target = text.partition(":")
    if not separator:
        return 1.0, source
    for kind in _KINDS:
        if source in kind and target in kind:
            return kind[source] / kind[target], target
    known = "; ".join(" ".join(kind) for kind in _KINDS)
    raise ValueError(f"{text!r} is no conversion FROM:TO within one of: {known}")


def find_scale(scores: np.ndarray, scale: str) -> tuple[str, str]:
    """accuracy, reward or percent, and a word on what it makes of the scores ("" if nothing).

    "auto" takes scores that go below 0 for rewards in [-1, 1].
    """
    if scale == "auto":
        scale = "reward" if scores.min() < 0 else "accuracy"
    remarks = {
        "reward": "rewards in [-1, 1] are read as accuracy (reward + 1) / 2",
        "percent": "percent are read as accuracy / 100",
    }
    return scale, remarks.get(scale, "")


def to_accuracy(scores: np.ndarray, scale: str) -> np.ndarray:
    """Scores in [0, 1] from those of a scale that find_scale gave; what is out of range stays so, to be refused."""
    low, high = RANGES[scale]
    return (scores - low) / (high - low)


def typical_hours(step: np.ndarray, device_hours: np.ndarray) -> np.ndarray:
    """What `step` [N] steps cost at the typical rate of their run, in device-hours [N]: the median over the stretches
    between evaluations of device-hours a step, times the steps. Slow minutes of the machine move no point."""
    order = np.argsort(step, kind="stable")
    steps, hours = np.diff(step[order]), np.diff(device_hours[order])
    rates = hours[steps > 0] / steps[steps > 0]
    return step * (np.median(rates) if rates.size else 0.0)


def axis_name(column: str) -> str:
    """A column of compute as figures, tables and sentences call it."""
    return AXES.get(column, column)


def short_number(value: float) -> str:
    """1500 -> 1.5k, 2e21 -> 2Z: at most four digits that matter."""
    size = abs(value)
    if size == 0 or 0.001 <= size < 1000:
        return f"{value:.4g}"
    for scale, suffix in zip((1e21, 1e18, 1e15, 1e12, 1e9, 1e6, 1e3), "ZEPTGMk"):
        if scale <= size < scale * 1000:
            return f"{value / scale:.4g}{suffix}"
    return f"{value:.3g}"
