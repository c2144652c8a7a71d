"""The name by which servers know this trainer process, and which of two trainers a server listens to: the later one.

    at its start    ours is made larger than any that a server tells, so that a clock that is behind costs nothing
    from the first version on    it stays what it is. A server that tells a larger one has been taken over by a trainer
                    that was started after us: it is superseded, and left alone

So two trainers on one fleet do not take it from each other in turn: the later one keeps it, the earlier one waits and
says so. A server that appears later with a larger one of a run that is over (its clock was ahead) is superseded too,
until it is restarted: to tell the two apart is not ours, and to take it would mean a new name in mid-run.

Names are nanoseconds since 1970, so none comes near HEARD for a century. A server that tells one above it made it up:
it is superseded by its own word and left alone, for a trainer that went above that would leave no room for later ones.
"""

from collections.abc import Callable

MOST = 2**64 - 1  # what fits in the contract
HEARD = 2**62  # of a server that is outranked: the year 2116. A run itself counts further, see run/folder.py


class Incarnation:
    """`raised` is told a value that replaces the one given."""

    def __init__(self, value: int, raised: Callable[[int], None] = lambda value: None):
        assert 0 < value <= MOST
        self.value, self._raised, self._settled = value, raised, False

    def settle(self) -> None:
        """The first version goes out under it."""
        self._settled = True

    def outranks(self, theirs: int) -> bool:
        """Whether a server that tells `theirs` may be ours: it tells of an earlier trainer, of none, or of us."""
        if not self._settled and self.value <= theirs < HEARD:
            self.value = theirs + 1
            self._raised(self.value)
        return theirs <= self.value
