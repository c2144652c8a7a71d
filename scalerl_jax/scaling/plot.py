"""Plots of curves: evaluations used and held out, the fitted curve, its band and its asymptote.

Drawn with matplotlib's Figure directly, without pyplot: no global state, no display, safe in a trainer's process. Files
are written whole or not at all.
"""

import io
import os
import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, PercentFormatter

from scalerl_jax.scaling.backtest import LAST, LEVEL, PERCENT, Backtest
from scalerl_jax.scaling.fit import Run
from scalerl_jax.scaling.points import MOST_POINTS, thinned
from scalerl_jax.scaling.units import short_number
from scalerl_jax.system.files import write_whole

# Okabe and Ito's colours: distinct for colour-blind readers, and in grey by their lightness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B8A800")
_INK = "#222222"
_CAPTION = 110  # characters of a line
GREY = "#8a8a8a"


def write_figure(figure: Figure, path: str) -> None:
    """Writes PNG or SVG, by the ending of the path."""
    picture = io.BytesIO()
    figure.savefig(picture, format=os.path.splitext(path)[1][1:], dpi=150)
    write_whole(path, picture.getvalue())


def style_axes(axes, *, x_label: str, y_label: str) -> None:
    """Applies the common style of all plots."""
    axes.set_xlabel(x_label, color=_INK)
    axes.set_ylabel(y_label, color=_INK)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)


def write_beside(axes, text: str, place, offset: tuple[float, float], colour: str, *, size: float = 9, **how) -> None:
    """Writes a text at an offset, in typographical points, from a place."""
    axes.annotate(text, place, xytext=offset, textcoords="offset points", color=colour, fontsize=size, **how)


def log_compute_axis(axes, x: np.ndarray, ticks_at: Sequence[float] = (1, 2, 5)) -> None:
    """A logarithmic compute axis over all of x, whose ticks are short numbers, minor ones not labelled."""
    axes.set_xscale("log")  # before the limits: a linear axis widens those of very small numbers to below 0
    axes.set_xlim(x[0], x[-1])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    low, high = axes.get_xlim()
    decades = np.log10(high) - np.log10(low)  # the ratio may be beyond what a float holds
    if decades < 2.5:
        exponents = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
        axes.set_xticks([m * 10.0**e for e in exponents for m in ticks_at if low <= m * 10.0**e <= high])
        axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def plot_forecast(result: Backtest, path: str, *, axis: str, y_label: str, more: str = "") -> None:
    """curve.png of a run: the measurements, and the forecast from its first half. The compute axis is linear from 0.

    axis: name of the compute; more: a line below the forecast's text.
    """
    figure = Figure(figsize=(8, 5.2), layout="constrained")
    axes = figure.subplots()
    style_axes(axes, x_label=f"compute: {axis}", y_label=y_label)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    compute, reward, fit = result.compute, result.reward, result.fit
    end = compute.max()
    x = np.linspace(end / 400, 1.04 * end, 400)
    ahead = x[x >= result.ahead.reached]
    low, high = result.ahead.band(ahead, level=LEVEL)
    used = fit.used | (compute == 0)
    axes.fill_between(ahead, low, high, color=COLOURS[0], alpha=0.15, linewidth=0, label=f"{PERCENT} of evaluations")
    axes.plot(ahead, result.ahead.predict(ahead), color=COLOURS[0], linewidth=2, label="forecast by all laws")
    curve = np.concatenate([[0.0], x])
    axes.plot(curve, fit.predict(curve), color=COLOURS[0], linewidth=1, label="sigmoid fitted on the first half")
    axes.axvline(end / 2, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.axhline(fit.asymptote, color=COLOURS[0], linewidth=1, linestyle=(0, (1, 2)))
    axes.plot(compute[used], reward[used], "o", color=_INK, markersize=5, label="evaluated, used by the fit")
    axes.plot(
        compute[~used], reward[~used], "o", markerfacecolor="white", markeredgecolor=COLOURS[1], markeredgewidth=1.6,
        markersize=6, label="evaluated, held out",
    )  # fmt: skip
    axes.plot(
        (LAST * end, end), (result.measured,) * 2, color=COLOURS[1], linewidth=1.6, label="at the end, their mean"
    )  # fmt: skip
    axes.set_xlim(-0.02 * end, 1.04 * end)
    bottom = max(0.0, min(reward.min(), fit.initial_reward) - 0.06)
    axes.set_ylim(bottom, min(1.02, max(reward.max(), high.max()) + 0.06))
    write_beside(axes, f"A = {fit.asymptote:.3f}", (0, fit.asymptote), (4, -12), COLOURS[0])
    middle = {"xycoords": ("data", "axes fraction"), "ha": "right"}
    write_beside(axes, "half of the compute", (end / 2, 0.0), (-5, 5), GREY, **middle)
    texts = (result.statement(axis), result.outcome, more)
    title = "\n".join(line for text in texts for line in textwrap.wrap(text, _CAPTION))
    axes.set_title(title, loc="left", fontsize=9, color=_INK)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    write_figure(figure, path)


_TOGETHER = 3  # more runs would hide each other: then each has its own panel
_PANEL = (2.7, 2.1)  # inches


def plot_fits(curves: Sequence[Run], *, x_label: str, y_label: str) -> Figure:
    """Runs with their curves over a logarithmic compute axis, up to twice the largest compute.

    Up to three runs share one picture; more are drawn as panels with one scale, each before the curves of the others.
    """
    positive = np.concatenate([one.compute[one.compute > 0] for one in curves])
    x = np.geomspace(positive.min() / 1.5, positive.max() * 2, 300)
    if len(curves) > _TOGETHER:
        return _panels(curves, x, x_label=x_label, y_label=y_label)
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    style_axes(axes, x_label=x_label, y_label=y_label)
    alone = len(curves) == 1
    for one, colour in zip(curves, COLOURS):
        label = f"A {one.fit.asymptote:.3f}  B {one.fit.exponent:.2f}  C_mid {short_number(one.fit.midpoint)}"
        label = label if one.fit.rises else one.fit.trend
        _draw_run(axes, one, x, colour, label=label if alone else f"{one.name}   {label}", parts_labelled=alone)
    log_compute_axis(axes, x)
    if alone and curves[0].fit.rises:
        asymptote = curves[0].fit.asymptote
        write_beside(axes, f"A {asymptote:.3f}", (x[0], asymptote), (4, 3), COLOURS[0])
    if alone:
        axes.set_title(curves[0].name, loc="left", fontsize=11, color=_INK)
        axes.legend(loc="lower right", frameon=False, fontsize=9)
    else:
        figure.legend(
            loc="outside upper left", frameon=False, fontsize=9, title=_KEY, title_fontsize=9, alignment="left"
        )
    return figure


_KEY = "filled: used by the fit, open: held out, grey: before the burn-in; shaded: 95 % band, dotted: A"


def _panels(curves: Sequence[Run], x: np.ndarray, *, x_label: str, y_label: str) -> Figure:
    columns = min(len(curves), max(4, int(np.ceil(np.sqrt(len(curves))))))
    rows = -(-len(curves) // columns)
    size = (max(8.0, columns * _PANEL[0]), rows * _PANEL[1] + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    predicted = [one.fit.predict(x) for one in curves if one.fit.rises]
    for index, axes in enumerate(grid.flat):
        if index >= len(curves):
            axes.set_axis_off()
            continue
        one = curves[index]
        style_axes(axes, x_label="", y_label="")
        axes.tick_params(labelsize=8)
        for other in predicted:
            axes.plot(x, other, color="#d4d4d4", linewidth=0.8, zorder=1)
        _draw_run(axes, one, x, COLOURS[0], points_colour=_INK)  # the points must not drown in the line
        low, high = one.fit.intervals["asymptote"]
        axes.set_title(one.name, loc="left", fontsize=9, color=_INK)
        label = f"A {one.fit.asymptote:.3f}\n[{low:.3f}, {high:.3f}]" if one.fit.rises else one.fit.trend
        axes.annotate(
            label, (0.97, 0.05), xycoords="axes fraction", ha="right",
            fontsize=8, color=COLOURS[0], path_effects=[withStroke(linewidth=2.5, foreground="white")], zorder=5,
        )  # fmt: skip
        if index + columns >= len(curves):
            axes.xaxis.set_tick_params(labelbottom=True)  # the lowest of its column, even if the last row is short
    scores = np.concatenate([*(one.reward for one in curves), *predicted])
    margin = 0.06 * (scores.max() - scores.min())
    grid[0, 0].set_ylim(scores.min() - margin, scores.max() + margin)
    for axes in grid.flat[: len(curves)]:
        log_compute_axis(axes, x, ticks_at=(1,) if x[-1] / x[0] > 30 else (1, 3))
    figure.supxlabel(x_label, fontsize=10, color=_INK)
    figure.supylabel(y_label, fontsize=10, color=_INK)
    figure.suptitle(f"{_KEY}; behind: the other runs", x=0.01, ha="left", fontsize=9, color=_INK)
    return figure


def _draw_run(
    axes,
    one: Run,
    x: np.ndarray,
    colour: str,
    *,
    label: str | None = None,
    parts_labelled: bool = False,
    points_colour: str | None = None,
) -> None:
    """Band, asymptote, points and curve of one run."""
    if one.fit.rises:
        low, high = one.fit.band(x)
        band_label = "95 % band of the curve" if parts_labelled else None
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0, label=band_label)
        axes.plot(x, one.fit.predict(x), color=colour, linewidth=1.5, label=label, zorder=3)
        axes.axhline(one.fit.asymptote, color=colour, linewidth=1, linestyle=(0, (1, 2)))
    elif label is not None:  # no curve, only points
        axes.plot([], [], color=colour, linewidth=1.5, label=label)
    points_colour = points_colour or colour
    used = one.fit.used
    points = min(int(np.sum(one.compute > 0)), MOST_POINTS)
    wide = axes.get_position().width * axes.figure.get_figwidth()  # inches
    size = float(np.clip(60 * wide / 7 / points**0.6, 2.0, 5.0))
    dropped = ~used & ~one.held & (one.compute > 0)
    for chosen, face, edge, what in (
        (used, points_colour, points_colour, "used"),
        (one.held, "white", points_colour, "held out"),
        (dropped, GREY, GREY, "before the burn-in"),
    ):
        if chosen.any():
            axes.plot(
                *thinned(one.compute[chosen], one.reward[chosen]), "o", markerfacecolor=face, markeredgecolor=edge,
                markersize=size, markeredgewidth=min(1.0, size / 4), label=what if parts_labelled else None, zorder=4,
            )  # fmt: skip
