"""A comparison as one picture: the curves, A with its intervals, the straightened slopes, B with one A for all.

The baseline is drawn in black. In the panel of A, the shaded strip is the margin around its A; in the panel of slopes
every line goes through the origin, and a steeper run climbs faster.
"""

import math

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from scalerl_jax.scaling.compare import Comparison, straightened
from scalerl_jax.scaling.fit import Run
from scalerl_jax.scaling.plot import COLOURS, GREY, log_compute_axis, style_axes, write_beside
from scalerl_jax.scaling.points import thinned

_BLACK = "#000000"
_OTHERS = tuple(colour for colour in COLOURS if colour != _BLACK)
_HELD_SIZE, _SIZE = 3.2, 3.5


def plot_comparison(found: Comparison, *, x_label: str, y_label: str) -> Figure:
    figure = Figure(figsize=(12, 4.4 + 0.34 * len(found.runs) + 1.2), layout="constrained")
    lower = max(1.6, 0.34 * len(found.runs) + 0.9)
    (curves, slope), (asymptotes, exponents) = figure.subplots(2, 2, height_ratios=(4.2, lower))
    styles = _styles(found)
    _curves(curves, found, styles, x_label, y_label)
    _slopes(slope, found, styles, x_label)
    _asymptotes(asymptotes, found, styles)
    _exponents(exponents, found, styles)
    return figure


def _styles(found: Comparison) -> dict[str, tuple[str, str]]:
    """Colour and line of each run by name."""
    others = [run for run in found.runs if run is not found.baseline]
    lines = ("-", "--", "-.", ":")
    styles = {found.baseline.name: (_BLACK, "-")}
    for index, run in enumerate(others):
        styles[run.name] = (_OTHERS[index % len(_OTHERS)], lines[index // len(_OTHERS) % len(lines)])
    return styles


def _used_and_held(run: Run) -> list[tuple[np.ndarray, np.ndarray]]:
    """Compute and reward of the rows that the fit used, and of later ones; means of neighbours if there are many."""
    return [thinned(run.compute[chosen], run.reward[chosen]) for chosen in (run.fit.used, run.held)]


def _curves(axes, found: Comparison, styles, x_label: str, y_label: str) -> None:
    style_axes(axes, x_label=x_label, y_label=y_label)
    positive = np.concatenate([run.compute[run.compute > 0] for run in found.runs])
    x = np.geomspace(positive.min() / 1.3, positive.max() * 2, 300)
    for run in found.runs:
        colour, line = styles[run.name]
        used, held = _used_and_held(run)
        axes.plot(x, run.fit.predict(x), color=colour, linestyle=line, linewidth=1.6, label=run.name)
        axes.plot(*used, "o", color=colour, markersize=_SIZE)
        axes.plot(*held, "o", markerfacecolor="white", markeredgecolor=colour, markersize=_HELD_SIZE)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))  # with as many decimals as the ticks need
    log_compute_axis(axes, x)
    axes.set_title("Fitted curves (filled: used, open: held out)", loc="left", fontsize=10)
    size = 8 if len(found.runs) <= 8 else 6.5
    axes.legend(loc="upper left", frameon=False, fontsize=size, ncols=1 if len(found.runs) <= 10 else 2)


def _slopes(axes, found: Comparison, styles, x_label: str) -> None:
    refitted = [row for row in found.table if row.slope is not None]
    if not refitted:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no run is shown to have the baseline's A:\nno common A to straighten with",
                  ha="center", va="center", transform=axes.transAxes, color=GREY)  # fmt: skip
        return
    style_axes(axes, x_label=f"ln {x_label}", y_label="ln F")
    axes.yaxis.set_major_formatter("{x:g}")
    for row in refitted:
        colour, line = styles[row.run.name]
        used, held = _used_and_held(row.run)
        for (compute, reward), face in ((used, colour), (held, "white")):
            log_compute, log_straight = straightened(compute, reward, row.slope)
            axes.plot(
                log_compute, log_straight, "o", markerfacecolor=face, markeredgecolor=colour, markersize=_HELD_SIZE,
                markeredgewidth=0.8,
            )  # fmt: skip
        ends = np.log([used[0].min(), max(used[0].max(), held[0].max(initial=0.0))])
        axes.plot(ends, row.slope.exponent * ends, color=colour, linestyle=line, linewidth=1.6)
    axes.set_title(f"Straightened with A = {found.common_asymptote:.3f}: the slope is B", loc="left", fontsize=10)


def _asymptotes(axes, found: Comparison, styles) -> None:
    baseline = found.baseline.fit.asymptote
    axes.axvspan(baseline - found.margin, baseline + found.margin, color="#eeeeee", linewidth=0)
    rows = [(row.run.name, row.run.fit.asymptote, row.interval_95) for row in found.table]
    _intervals(axes, rows, styles, "A, 95 %", digits=3)
    axes.set_title(f"A (shaded: {found.margin:g} around {found.baseline.name})", loc="left", fontsize=10)


def _exponents(axes, found: Comparison, styles) -> None:
    rows = [
        (row.run.name, row.slope.exponent, row.slope.exponent_95) if row.slope else (row.run.name, math.nan, None)
        for row in found.table
    ]
    _intervals(axes, rows, styles, "B, 95 %", digits=2)
    where = "" if found.common_asymptote is None else f" with A = {found.common_asymptote:.3f}"
    axes.set_title(f"B{where}", loc="left", fontsize=10)
    for position, row in enumerate(found.table):
        if row.slope is None:
            word = "A is undecided" if row.verdict == "open" else "A differs"
            axes.text(0.02, position, word, transform=axes.get_yaxis_transform(), va="center", color=GREY,
                      fontsize=8)  # fmt: skip


def _intervals(axes, rows, styles, label: str, *, digits: int) -> None:
    """A dot and its interval for each (name, value, interval), from the top; an open end runs to the frame."""
    style_axes(axes, x_label=label, y_label="")
    values = [value for _, value, _ in rows if not math.isnan(value)]
    ends = [end for _, _, interval in rows if interval for end in interval if math.isfinite(end)]
    low, high = min([*values, *ends], default=0.0), max([*values, *ends], default=1.0)
    pad = 0.12 * max(high - low, 1e-3)
    axes.set_xlim(low - pad, high + 2.5 * pad)
    for position, (name, value, interval) in enumerate(rows):
        if interval is None:
            continue
        colour, line = styles[name]
        left, right = (end if math.isfinite(end) else limit for end, limit in zip(interval, axes.get_xlim()))
        axes.plot((left, right), (position, position), color=colour, linestyle=line, linewidth=2)
        axes.plot(value, position, "o", color=colour, markersize=5)
        beside = {"va": "center", "annotation_clip": False}
        write_beside(axes, f"{value:.{digits}f}", (right, position), (5, 0), colour, size=8, **beside)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(False, axis="y")
