"""For the style sheet (assets/site.css): short flags are not broken at a hyphen, and cells of a generated table say
which column they are of, since on a phone each row is a paragraph."""

import re

_PLAIN = ("Flag", "Key", "Name", "Field", "Value", "Target", "Meaning", "What it does")  # seen without being said
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)


def labelled(page: str) -> str:
    """HTML with `data-label` at each cell under a column whose name is not plain to see."""
    return _TABLE.sub(lambda table: _of_table(table[0]), page)


def unbroken(page: str) -> str:
    """HTML with short flags as one word."""
    return re.sub(
        r"<code>(--[\w.=\[\]]{1,30}|-[\w-]{1,12}|[a-z]+-[a-z]+)</code>", r'<code class="flag">\1</code>', page
    )


def _of_table(table: str) -> str:
    names = re.findall(r"<th>(.*?)</th>", table)

    def row(found: re.Match[str]) -> str:
        left = iter(names)

        def cell(_: re.Match[str]) -> str:
            name = next(left, "")
            return "<td>" if name in _PLAIN or not name else f'<td data-label="{name}">'

        return re.sub(r"<td>", cell, found[0])

    return _ROW.sub(row, table)
