"""The console lines about a run's learning, as rows of metrics.jsonl are made; alarms.py decides and words them.

    no gradient   once when it begins, once when it is over
    a limit       once when the mean of the last 10 updates has passed it, again when a warning becomes an alarm, once
                  when it has been within its limits for 10 consecutive updates; an alarm again every 50 updates

A resumed run logs at once what is past its limits: the rows before count, the lines logged about them do not.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from scalerl_jax.run.alarms import (
    COVERED_BY_NO_GRADIENT,
    RECENT,
    SIGNS,
    Alarm,
    Row,
    enough,
    has_gradient,
    no_gradient,
    past_limits,
    recent_mean,
)

REMIND = 50  # updates
# The columns that the signs need, kept of each row: an episode may last for the rest of a long run.
_NAMES = ("step", "pass_rate", "no_end_of_thinking", "prompts", *(sign.column for sign in SIGNS.values()))


@dataclasses.dataclass
class _Episode:
    """A period in which one sign is past a limit."""

    updates: int = 0  # its length so far
    within: int = 0  # how many of its last updates are within all limits
    loud: bool = False  # an alarm has been raised
    logged_at: int = 0  # `updates` when it was last logged


class LearningWatch:
    """Follows the rows of a run as they are made."""

    def __init__(self, settings: Mapping[str, Any], earlier: Iterable[Row] = ()):
        """earlier: the rows from before a restart."""
        self._settings = settings
        self._first: list[Row] = []  # at most one: the first row with an entropy
        self._recent: collections.deque[Row] = collections.deque(maxlen=RECENT)
        self._without: list[Row] = []  # consecutive rows without a gradient
        self._warned = False  # whether their alarm has been raised
        self._episodes: dict[str, _Episode] = {}
        for row in earlier:
            self._remember(_short(row))

    def row(self, row: Row) -> list[str]:
        """Takes the next row; returns the lines to log."""
        short = _short(row)
        self._remember(short)
        # `_gradient` needs the gradient's norm, which `short` lacks.
        lines = [*self._gradient(row, short), *self._limits()]
        return [f"update {row.get('step')}: {line}" for line in lines]

    @property
    def past(self) -> dict[str, bool]:
        """The signs that are past a limit now; True: an alarm has been raised."""
        found = {key: episode.loud for key, episode in self._episodes.items()}
        return {**found, "surviving": True} if self._warned else found

    def _remember(self, row: Row) -> None:
        self._recent.append(row)
        if not self._first and row.get("entropy") is not None:
            self._first = [row]

    def _gradient(self, row: Row, short: Row) -> list[str]:
        if has_gradient(row):
            count, warned, self._without, self._warned = len(self._without), self._warned, [], False
            return [f"learning again, after {count} updates without a gradient"] if warned else []
        self._without.append(short)
        if self._warned or (alarm := no_gradient(self._without, self._settings)) is None:
            return []
        self._warned = True
        return [str(alarm)]

    def _limits(self) -> list[str]:
        if not enough(self._recent):
            return []
        past = {alarm.chart: alarm for alarm in past_limits([*self._first, *self._recent], self._settings)}
        silent = COVERED_BY_NO_GRADIENT if self._warned else ()
        lines = [self._past(key, alarm) for key, alarm in past.items() if key not in silent]
        lines += [self._within(key) for key in [*self._episodes] if key not in past]
        return [line for line in lines if line]

    def _past(self, key: str, alarm: Alarm) -> str:
        begins = key not in self._episodes
        episode = self._episodes.setdefault(key, _Episode())
        episode.updates, episode.within = episode.updates + 1, 0
        due = alarm.loud and (not episode.loud or episode.updates - episode.logged_at >= REMIND)
        if not begins and not due:
            return ""
        episode.loud, episode.logged_at = episode.loud or alarm.loud, episode.updates
        return f"{'ALARM' if alarm.loud else 'warning'}: {alarm}"

    def _within(self, key: str) -> str:
        episode, sign = self._episodes[key], SIGNS[key]
        latest = recent_mean([*self._recent], sign.column)
        if latest is None:  # updates without a gradient lack the column
            return ""
        episode.updates, episode.within = episode.updates + 1, episode.within + 1
        if episode.within < RECENT:
            return ""
        del self._episodes[key]
        count = episode.updates - RECENT
        past = f"{count} update{'s' if count > 1 else ''} past them"
        return f"{sign.name} is within its limits again ({latest:.2g} in the mean), after {past}"


def _short(row: Row) -> Row:
    """The numbers that the signs need. Rows from before a restart were on a disk, where they may have been edited."""
    return {name: row[name] for name in _NAMES if isinstance(row.get(name), int | float)}
