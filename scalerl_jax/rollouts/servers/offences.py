"""Offences of a server process, and how much work it may hold after them. Pure: no IO, no clock.

    offence n           it gets no new requests for FIRST_SECONDS * 2^(n - 1), at most LONGEST_SECONDS
    offence BANISHED_AT it is rejected for the life of its process
    good work           every GOOD completions delivered outweigh one offence
    refusal             it did not accept a call or a version: a short wait, doubled while nothing is delivered in
                        between; REFUSALS of one kind in a row are an offence
    allowance           completions it may hold at once: a group, GROWTH more for each that it delivered, and as many
                        more as it holds whenever it has sampled PROOF_TOKENS for each of those: long completions take
                        half an hour to be delivered, and its slots should not be idle until then. An offence resets
                        the allowance

Offences during such a wait (its other calls end in the same way, it continues as before) are counted for the log and
change nothing else, so that sixteen calls that fail together are one offence.

A server with another server_id is another process and is met as a new one. But at an address whose processes keep
ending without having delivered much, each next process waits longer before it is met.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from scalerl_jax.contract.peer_text import LogLimit
from scalerl_jax.rollouts.servers.validate_status import MAXIMUM_NAME

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 600.0
BANISHED_AT = 8
GOOD = 512
REFUSAL_SECONDS = (0.1, 2.0)  # first and longest wait after a refusal
REFUSALS = 8
GROWTH = 2
PROOF_TOKENS = 32
FREE_MEETINGS = 3  # without result, before the next one has to wait
KEPT_PROCESSES = 16  # records at one address
WORTH = 64  # completions that a process must deliver for its meeting to count as useful


@dataclasses.dataclass(frozen=True)
class Consequence:
    """Of an offence or a refusal."""

    until: float  # it gets no new requests before
    banished: bool  # by this offence: it is rejected
    log_times: int  # how often it has happened since it was last logged, this time included; 0: do not log now


class Record:
    """Record of one server process. `now` and `until` are seconds of any monotonic clock."""

    def __init__(self, *, until: float = 0.0, meetings: int = 0):
        """meetings: with earlier processes at its address, in a row, that had no result."""
        self.until = until  # it gets no new requests before
        self.banished = False
        self.counts: collections.Counter[str] = collections.Counter()  # of all offences, by kind
        self.delivered = 0  # completions, in total
        self._strikes = 0
        self._good = 0  # completions since the last offence, or since one was outweighed
        self._trust = 0  # completions since the last offence
        self._shown = 0  # further completions that it may hold, for the tokens it has sampled since then
        self._tokens = 0  # sampled since `_shown` last grew
        self._refusals: collections.Counter[str] = collections.Counter()  # in a row, by kind
        self._meetings = meetings  # since it delivered something
        self._log_limit = LogLimit()

    def deliver(self) -> None:
        """Records a valid completion."""
        self.delivered, self._trust, self._good = self.delivered + 1, self._trust + 1, self._good + 1
        self._meetings = 0
        self._refusals.clear()
        if self._good >= GOOD and self._strikes:
            self._strikes, self._good = self._strikes - 1, 0

    def sample(self, tokens: int, *, held: int) -> None:
        """Records a plausible status: it has sampled `tokens` more, and it holds `held` completions."""
        if not held:
            return
        self._tokens += tokens
        if self._tokens >= PROOF_TOKENS * held:
            self._shown, self._tokens = self._shown + held, 0

    def allowance(self, group_size: int) -> int:
        """Completions that it may hold at once, however many slots it claims."""
        first = max(1, group_size >> max(0, self._strikes - 1))
        return first + GROWTH * self._trust + self._shown

    def meet(self) -> bool:
        """Records a meeting. Returns whether it is worth waiting for: at most FREE_MEETINGS since it last delivered."""
        self._meetings += 1
        return self._meetings <= FREE_MEETINGS

    def refuse(self, kind: str, *, now: float) -> Consequence:
        """Records that it did not accept a request; REFUSALS of one `kind` in a row count as an offence."""
        if now < self.until:
            return Consequence(self.until, False, 0)
        self._refusals[kind] += 1
        if self._refusals[kind] >= REFUSALS:
            del self._refusals[kind]
            return self.offend(kind, now=now, times=REFUSALS)
        first, longest = REFUSAL_SECONDS
        self.until = now + min(longest, first * 2 ** (self._refusals[kind] - 1))
        return Consequence(self.until, False, 0)

    def forgive(self, kind: str) -> None:
        """Clears the refusals of a kind that it now accepts."""
        self._refusals.pop(kind, None)

    def banish(self) -> None:
        """Rejects it for good."""
        self.banished = True

    def offend(self, kind: str, *, now: float, times: int = 1) -> Consequence:
        """Records `times` offences. `kind` is our own text, not the server's."""
        self.counts[kind] += times
        log_times = self._log_limit.happened(kind, now=now) * times
        self._trust = self._good = self._shown = self._tokens = 0
        if now < self.until and self._strikes:
            return Consequence(self.until, False, log_times)
        self._strikes += 1
        self.until = max(self.until, now + backoff(self._strikes))
        banished = self._strikes >= BANISHED_AT and not self.banished
        self.banished = self.banished or banished
        return Consequence(self.until, banished, log_times or (self.counts[kind] if banished else 0))


class Records:
    """Records of all servers met in the life of this process, by address and server_id."""

    def __init__(self) -> None:
        self._processes: dict[str, dict[str, Record]] = {}
        self._idle: collections.Counter[str] = collections.Counter()  # processes in a row that delivered too little

    def of(self, address: str, server_id: str, *, now: float) -> Record:
        """The record of the process that answers there now."""
        processes = self._processes.setdefault(address, {})
        name = server_id[:MAXIMUM_NAME]  # chosen by the server, of any length
        if name not in processes:
            if processes:
                before = next(reversed(processes.values()))
                self._idle[address] = 0 if before.delivered >= WORTH else self._idle[address] + 1
            idle = self._idle[address]
            late = idle - FREE_MEETINGS
            processes[name] = Record(until=now + backoff(late) if late > 0 else 0.0, meetings=idle)
            while len(processes) > KEPT_PROCESSES:
                del processes[next(iter(processes))]
        return processes[name]


def backoff(offences: int) -> float:
    """Seconds to wait after that many offences."""
    return min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(offences - 1, 20))


def free_capacity(
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
    """Number of further completions to request from a server, and whether a group may be requested in parts.

    It may hold one completion for each slot, and enough queued ones that no slot is idle: one group, and as many more
    as it finishes in the time that a completion typically takes, at most a quarter of its slots. So a slow server does
    not queue work that others could begin sooner. It never gets more than it has earned.

    queue: completions that may wait there. in_flight: requested and not delivered. finishes: when the last ones
    finished, rising. typical_seconds: of a completion; 0 if not known. allowance: completions that it may hold at once;
    None: as many as it reports.
    """
    more = slots // 4
    if typical_seconds > 0 and finishes:
        # Called for each completion that arrives: only as many times are read as can matter.
        lately: Iterable[float] = itertools.islice(reversed(finishes), more)
        more = sum(1 for _ in itertools.takewhile(lambda at: at > now - typical_seconds, lately))
    claimed = slots + min(queue, group_size + more)
    earned = claimed if allowance is None else allowance
    return min(claimed, earned) - in_flight, min(queue, earned) < group_size
