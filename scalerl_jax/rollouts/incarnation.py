"""The number by which servers identify this trainer process. Of two trainers, a server obeys the later one.

    at its start    ours is raised above any that a server reports, so that a clock that is behind does no harm
    from the first version on    it is fixed. A server that reports a larger one was taken over by a trainer that was
                    started after us: it is superseded, and left alone

So two trainers on one fleet do not take it from each other in turn: the later one keeps it, the earlier one waits and
reports that. A server that appears later with a larger incarnation of a finished run (its clock was ahead) is
superseded too, until it is restarted: we cannot tell the two apart, and taking it would need a new incarnation mid-run.

Incarnations are nanoseconds since 1970, so none comes near HEARD for a century. A server that reports one above HEARD
made it up: it is superseded and left alone, because a trainer above that would leave no numbers for later ones.
"""

from collections.abc import Callable

MOST = 2**64 - 1  # what fits in the contract
HEARD = 2**62  # bound for servers that are outranked: the year 2116. A run itself counts further, see run/folder.py


class Incarnation:
    """`raised` is called with a value that replaces the one given."""

    def __init__(self, value: int, raised: Callable[[int], None] = lambda value: None):
        assert 0 < value <= MOST
        self.value, self._raised, self._settled = value, raised, False

    def settle(self) -> None:
        """Fixes the value: the first version is published with it."""
        self._settled = True

    def outranks(self, theirs: int) -> bool:
        """Whether a server that reports `theirs` may be ours: its trainer is an earlier one, none, or this one."""
        if not self._settled and self.value <= theirs < HEARD:
            self.value = theirs + 1
            self._raised(self.value)
        return theirs <= self.value
