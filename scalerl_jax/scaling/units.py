"""Units of the compute axis, the format of its numbers, and the scale of a score."""

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
TYPICAL_HOURS = "typical_hours"  # computed from the columns step and device_hours by typical_hours() below
# Columns of a run folder, and their names.
AXES = {TYPICAL_HOURS: "typical device-hours", "device_hours": "device-hours", "model_flops": "model FLOPs"}
RANGES = {"accuracy": (0, 1), "reward": (-1, 1), "percent": (0, 100)}  # scale -> range of a score


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
    """accuracy, reward or percent, and a remark on the conversion ("" if none).

    "auto" interprets scores as rewards in [-1, 1] if some are below 0.
    """
    if scale == "auto":
        scale = "reward" if scores.min() < 0 else "accuracy"
    remarks = {
        "reward": "rewards in [-1, 1] are read as accuracy (reward + 1) / 2",
        "percent": "percent are read as accuracy / 100",
    }
    return scale, remarks.get(scale, "")


def to_accuracy(scores: np.ndarray, scale: str) -> np.ndarray:
    """Converts scores of a scale from find_scale to [0, 1]; those out of range stay so, and are refused later."""
    low, high = RANGES[scale]
    return (scores - low) / (high - low)


def typical_hours(step: np.ndarray, device_hours: np.ndarray) -> np.ndarray:
    """The cost of `step` [N] steps at the typical rate of their run, in device-hours [N]: the steps times the median,
    over the intervals between evaluations, of device-hours a step. Slow minutes of the machine change no point."""
    order = np.argsort(step, kind="stable")
    steps, hours = np.diff(step[order]), np.diff(device_hours[order])
    rates = hours[steps > 0] / steps[steps > 0]
    return step * (np.median(rates) if rates.size else 0.0)


def axis_name(column: str) -> str:
    """The name of a compute column in figures, tables and sentences."""
    return AXES.get(column, column)


def short_number(value: float) -> str:
    """A number as short text, with at most four significant digits: 1500 -> 1.5k, 2e21 -> 2Z."""
    size = abs(value)
    if size == 0 or 0.001 <= size < 1000:
        return f"{value:.4g}"
    for scale, suffix in zip((1e21, 1e18, 1e15, 1e12, 1e9, 1e6, 1e3), "ZEPTGMk"):
        if scale <= size < scale * 1000:
            return f"{value / scale:.4g}{suffix}"
    return f"{value:.3g}"
