"""The results of a study on a terminal: a table for each, the comparisons' sentences, the margin."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scalerl_jax.scaling.commands import results as lay_out
from scalerl_jax.scaling.units import axis_name, short_number
from scalerl_jax.study.results import Member, Results, StudyResults

HEADS = (
    "member", "seeds", "A", "B", "C_mid", "points", "identified", "first", "last quarter", "device-hours",
)  # fmt: skip


def tell(console: Console, found: Results) -> None:
    for one in found.studies:
        console.print(_table(one, found.x))
        for line in sentences(one):
            lay_out.say(console, line)


def sentences(one: StudyResults) -> list[str]:
    """Of one study, in order, each a line."""
    said = [f"{line}." for line in one.left_out]
    if one.missing:
        said.append(f"not evaluated yet: {', '.join(one.missing)}.")
    if one.comparison is not None:
        said += [f"{pair.sentence}." for pair in one.comparison.pairs]
    if one.margin is not None:
        said += [f"{line}." for line in one.margin.sentences()]
    return said


def cells(one: Member) -> list[str]:
    """Of HEADS."""
    seeds = f"{len(one.runs)} of {len(one.all_runs)}" if len(one.runs) < len(one.all_runs) else str(len(one.runs))
    ends = [f"{one.first:.3f}", f"{one.last:.3f}", f"{one.device_hours:.3g}"]
    if one.fitted is None:
        return [one.name, seeds, "", "", "", "", "too few points", *ends]
    fit = one.fitted.fit
    if one.curve is None:
        return [one.name, seeds, "", "", "", str(fit.points), fit.trend, *ends]
    low, high = fit.intervals["asymptote"]
    return [
        one.name, seeds, f"{fit.asymptote:.3f} [{low:.3f}, {high:.3f}]", f"{fit.exponent:.2f}",
        short_number(fit.midpoint), str(fit.points), "yes" if fit.identified else "no", *ends,
    ]  # fmt: skip


def _table(found: StudyResults, x: str) -> Table:
    title = (
        f"{found.name}: R0 + (A - R0) / (1 + (C_mid / C)^B), C is {axis_name(x)}; intervals 95 %; pass rates held out"
    )
    table = lay_out.new_table(title, *HEADS, overflow="fold")
    table.columns[0].min_width = 10
    for one in found.members:
        table.add_row(*map(escape, cells(one)))
    return table
