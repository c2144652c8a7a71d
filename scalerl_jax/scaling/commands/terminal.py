"""How scalerl-fit and scalerl-compare tell and write: lines, tables, intervals, NAME.json and pictures."""

import json
import math
import os
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from scalerl_jax.scaling.plot import write_figure
from scalerl_jax.system.files import plain, write_whole

WIDE = 160  # columns that a table needs with intervals on the same line as the values


def make_console() -> Console:
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDE)  # lines of a log are not wrapped
    return console


def print_line(console: Console, line: str) -> None:
    """Prints a line without markup, since names of runs are not markup, and without wrapping."""
    console.print(line, markup=False, soft_wrap=True)


def new_table(title: str, *heads: str, **columns: Any) -> Table:
    """An empty table. columns: name -> options of its layout."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, **columns)
    return table


def ends(interval: tuple[float, float], form: Callable[[float], str], unbounded: str = "open") -> str:
    low, high = (form(end) if math.isfinite(end) else unbounded for end in interval)
    return f"\\[{low}, {high}]"  # escaped: rich interprets [word] as markup


def write(out: str, name: str, document: dict[str, Any], figure: Figure | None) -> list[str]:
    """Writes NAME.png and NAME.svg, if there is a figure, then NAME.json into the folder; returns their paths."""
    os.makedirs(out, exist_ok=True)
    paths = [os.path.join(out, f"{name}.{ending}") for ending in (("png", "svg", "json") if figure else ("json",))]
    for path in paths[:-1]:
        write_figure(figure, path)
    write_whole(paths[-1], json.dumps(plain(document), indent=2, allow_nan=False) + "\n")
    return paths
