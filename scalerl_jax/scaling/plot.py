"""Curves as pictures: evaluations used and held out, the fitted curve, its band and its asymptote.

Drawn with matplotlib's Figure directly, without pyplot: no global state, no display, safe in a trainer's process. Files
are written whole or not at all.
"""

import dataclasses
import os
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from scalerl_jax.scaling.fit import SigmoidFit
from scalerl_jax.scaling.report import BAND_LEVEL, HalfTimeForecast

# Okabe and Ito's colours: told apart by colour-blind readers, and in grey by their lightness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B8A800")
_INK = "#222222"
_GREY = "#8a8a8a"


def write_figure(figure: Figure, path: str, *, dpi: int = 150) -> None:
    """Writes PNG or SVG, by the ending of the path, through a temporary file beside it."""
    ending = os.path.splitext(path)[1][1:]
    temporary = f"{path}.tmp"
    figure.savefig(temporary, format=ending, dpi=dpi)
    os.replace(temporary, path)


def short_number(value: float) -> str:
    """1500 -> 1.5k, 2e21 -> 2e+21: at most four digits that matter."""
    size = abs(value)
    if size == 0 or 0.001 <= size < 1000:
        return f"{value:.4g}"
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if scale <= size < scale * 1000:
            return f"{value / scale:.4g}{suffix}"
    return f"{value:.3g}"


def style_axes(axes, *, x_label: str, y_label: str) -> None:
    """The look that all our plots share."""
    axes.set_xlabel(x_label, color=_INK)
    axes.set_ylabel(y_label, color=_INK)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_GREY)


def log_compute_axis(axes, ticks_at: Sequence[float] = (1, 2, 5)) -> None:
    """A logarithmic compute axis whose ticks are short numbers, minor ones not labelled."""
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    low, high = axes.get_xlim()
    decades = np.log10(high / low)
    if decades < 2.5:
        exponents = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
        axes.set_xticks([m * 10.0**e for e in exponents for m in ticks_at if low <= m * 10.0**e <= high])
        axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def plot_forecast(result: HalfTimeForecast, path: str, *, x_label: str = "compute", y_label: str = "pass rate") -> None:
    """curve.png of a run: what was measured, and what its first half said. The compute axis is linear, 0 included."""
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    style_axes(axes, x_label=x_label, y_label=y_label)
    compute, reward, fit = result.compute, result.reward, result.fit
    end = compute.max()
    x = np.linspace(end / 400, 1.04 * end, 400)
    low, high = fit.band(x, level=BAND_LEVEL)
    used = result.used | (compute == 0)
    axes.fill_between(x, low, high, color=COLOURS[0], alpha=0.15, linewidth=0, label="90 % of the curves it allows")
    curve = np.concatenate([[0.0], x])
    axes.plot(curve, fit.predict(curve), color=COLOURS[0], linewidth=2, label="sigmoid fitted on the first half")
    axes.axvline(end / 2, color=_GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.axhline(fit.asymptote, color=COLOURS[0], linewidth=1, linestyle=(0, (1, 2)))
    axes.plot(compute[used], reward[used], "o", color=_INK, markersize=5, label="evaluated, used by the fit")
    axes.plot(
        compute[~used], reward[~used], "o", markerfacecolor="white", markeredgecolor=COLOURS[1], markeredgewidth=1.6,
        markersize=6, label="evaluated, held out",
    )  # fmt: skip
    quarter = (0.75 * end, end)
    axes.plot(quarter, (result.measured_mean,) * 2, color=COLOURS[1], linewidth=1.6, label="mean of the last quarter")
    axes.set_xlim(-0.02 * end, 1.04 * end)
    bottom = max(0.0, min(reward.min(), fit.initial_reward) - 0.06)
    axes.set_ylim(bottom, min(1.02, max(reward.max(), high.max()) + 0.06))
    axes.annotate(
        f"A = {fit.asymptote:.3f}", (0, fit.asymptote), xytext=(4, -12), textcoords="offset points",
        color=COLOURS[0], fontsize=9,
    )  # fmt: skip
    axes.annotate(
        "half of the compute",
        (end / 2, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-5, -10),
        textcoords="offset points",
        color=_GREY,
        fontsize=9,
        ha="right",
    )
    axes.set_title(
        f"Forecast at half time {result.forecast_mean:.3f}, measured {result.measured_mean:.3f} "
        f"(error {result.error:+.3f})",
        loc="left",
        fontsize=11,
        color=_INK,
    )
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    write_figure(figure, path)


@dataclasses.dataclass(frozen=True)
class Curve:
    """One run of a plot: its points, its fit, and which points (compute above 0) the fit has not seen."""

    name: str
    compute: np.ndarray  # [N]
    reward: np.ndarray  # [N]
    fit: SigmoidFit
    held: np.ndarray  # [N] bool


_BANDS = 4  # more bands than this hide each other: then only curves and points are drawn


def plot_fits(curves: Sequence[Curve], *, x_label: str, y_label: str) -> Figure:
    """Runs with their curves over a logarithmic compute axis, up to twice the compute that there is."""
    figure = Figure(figsize=(8, 4.8) if len(curves) <= 6 else (10, 5.6), layout="constrained")
    axes = figure.subplots()
    style_axes(axes, x_label=x_label, y_label=y_label)
    positive = np.concatenate([one.compute[one.compute > 0] for one in curves])
    x = np.geomspace(positive.min() / 1.5, positive.max() * 2, 300)
    few = len(curves) == 1
    for index, one in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        line = ("-", "--", "-.", ":")[index // len(COLOURS) % 4]
        if len(curves) <= _BANDS:
            low, high = one.fit.band(x)
            label = "95 % of the curves that fit" if few else None
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0, label=label)
        label = f"A {one.fit.asymptote:.3f}  B {one.fit.exponent:.2f}  C_mid {short_number(one.fit.midpoint)}"
        label = label if few else f"{one.name}   {label}"
        axes.plot(x, one.fit.predict(x), color=colour, linestyle=line, linewidth=1.8, label=label)
        if len(curves) <= _BANDS:
            axes.axhline(one.fit.asymptote, color=colour, linewidth=1, linestyle=(0, (1, 2)))
        used = one.fit.used
        size = 5 if len(curves) <= _BANDS else 3.5
        dropped = ~used & ~one.held & (one.compute > 0)
        for chosen, face, edge, what in (
            (used, colour, colour, "used"),
            (one.held, "white", colour, "held out"),
            (dropped, _GREY, _GREY, "before the burn-in"),
        ):
            if chosen.any():
                axes.plot(
                    one.compute[chosen], one.reward[chosen], "o", markerfacecolor=face, markeredgecolor=edge,
                    markersize=size, label=what if few else None, zorder=3,
                )  # fmt: skip
    axes.set_xlim(x[0], x[-1])
    log_compute_axis(axes)
    if few:
        axes.set_title(curves[0].name, loc="left", fontsize=11, color=_INK)
        axes.legend(loc="lower right", frameon=False, fontsize=9)
    else:
        figure.legend(
            loc="outside upper left" if len(curves) <= 3 else "outside right center",
            frameon=False,
            fontsize=9 if len(curves) <= 12 else 7.5,
            title="filled: used by the fit, open: held out",
            title_fontsize=9,
            alignment="left",
        )
    return figure
