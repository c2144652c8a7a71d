"""How much more a server is asked for. Pure: no IO, no clock.

All its slots, and beyond them enough waiting work that no slot stands empty for want of a request: one group, and as
much more as it finishes in the time that a completion typically takes, at most a quarter of its slots. So a slow server
does not sit on work that others could begin sooner. And no more than it has earned.
"""

import itertools
from collections.abc import Iterable, Sequence


def room(
    *,
    slots: int,
    queue: int,
    in_flight: int,
    finishes: Sequence[float],
    typical_seconds: float,
    now: float,
    allowance: int | None,
    group_size: int,
) -> tuple[int, bool]:
    """Completions more to ask of it, and whether a group may be asked for in parts.

    queue: completions that may wait there. in_flight: asked of it and not delivered. finishes: when the last ones were,
    rising. typical_seconds: of a completion; 0: not known. allowance: completions that it may hold at once, see
    offences.py; None: as many as it has room for.
    """
    more = slots // 4
    if typical_seconds > 0 and finishes:
        # Asked for each completion that comes: only as many are looked at as can matter.
        lately: Iterable[float] = itertools.islice(reversed(finishes), more)
        more = sum(1 for _ in itertools.takewhile(lambda at: at > now - typical_seconds, lately))
    claimed = slots + min(queue, group_size + more)
    earned = claimed if allowance is None else allowance
    return min(claimed, earned) - in_flight, min(queue, earned) < group_size
