"""Sizes that numbers of points are rounded up to.

The fit is compiled for every new size: three seconds, and some 35 MiB of programs that stay. A trainer fits its own
curve for as long as it runs; with these sizes most runs compile it once, and one of a thousand evaluations five times.
"""

LEAST = 64


def padded(count: int, *, least: int = LEAST) -> int:
    """The first of least, 2 least, 4 least, ... that is not below `count`."""
    size = least
    while size < count:
        size *= 2
    return size
