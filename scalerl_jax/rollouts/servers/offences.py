"""What a server process has done wrong, and how much it may be given for it. Pure: no IO, no clock.

    offence n           nothing new is asked of it for FIRST_SECONDS * 2^(n - 1), at most LONGEST_SECONDS
    offence BANISHED_AT it is sent away for the life of its process
    good work           every GOOD completions delivered outweigh one offence
    refusal             it did not take a call or a version: a short wait, doubled while nothing is delivered in
                        between; REFUSALS of one kind in a row are an offence
    allowance           completions it may hold at once: a group, GROWTH more for each that it delivered, and as many
                        again whenever it has sampled PROOF_TOKENS for each that it holds: long completions take half
                        an hour to be delivered, and its slots are not to stand idle until then. After an offence it
                        begins again

What happens while it is not asked anyhow (its other calls end in the same way, it goes on as before) is counted for the
log and changes nothing else, so that sixteen calls that fail together are one offence.

A server that comes with another server_id is another process and is met as a new one. But an address whose processes
keep going without having delivered much waits longer and longer for the next one to be met.
"""

import collections
import dataclasses

from scalerl_jax.contract.peer_text import LogLimit

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 600.0
BANISHED_AT = 8
GOOD = 512
REFUSAL_SECONDS = (0.1, 2.0)  # first and longest wait after a refusal
REFUSALS = 8
GROWTH = 2
PROOF_TOKENS = 32
FREE_MEETINGS = 3  # that came to nothing, before the next one has to wait
KEPT_PROCESSES = 16  # records at one address
WORTH = 64  # completions that a process has to deliver for its meeting to have been worth it


@dataclasses.dataclass(frozen=True)
class Consequence:
    """Of an offence."""

    until: float  # it is asked for nothing new before
    banished: bool  # by this one: it is sent away
    tell: int  # how often it has happened since it was logged last, this time included; 0: no line now


class Record:
    """Of one server process. `now` and `until` are seconds of any clock that does not go back."""

    def __init__(self, *, until: float = 0.0, meetings: int = 0):
        """meetings: with processes before it at its address, that came to nothing."""
        self.until = until  # nothing new is asked of it before
        self.banished = False
        self.counts: collections.Counter[str] = collections.Counter()  # of all offences, by kind
        self.delivered = 0  # completions, in all
        self._strikes = 0
        self._good = 0  # completions since the last offence, or since one was outweighed
        self._trust = 0  # completions since the last offence
        self._shown = 0  # completions that it may hold for the tokens it has sampled since then
        self._tokens = 0  # sampled since `_shown` has grown
        self._refusals: collections.Counter[str] = collections.Counter()  # in a row, by kind
        self._meetings = meetings  # since it delivered something
        self._log_limit = LogLimit()

    def deliver(self) -> None:
        """It has sent a completion that is what was asked for."""
        self.delivered, self._trust, self._good = self.delivered + 1, self._trust + 1, self._good + 1
        self._meetings = 0
        self._refusals.clear()
        if self._good >= GOOD and self._strikes:
            self._strikes, self._good = self._strikes - 1, 0

    def sample(self, tokens: int, *, held: int) -> None:
        """By its status, which may be believed, it has sampled `tokens` more, and it holds `held` completions."""
        if not held:
            return
        self._tokens += tokens
        if self._tokens >= PROOF_TOKENS * held:
            self._shown, self._tokens = self._shown + held, 0

    def allowance(self, group_size: int) -> int:
        """Completions that it may hold at once, whatever it claims to have slots for."""
        first = max(1, group_size >> max(0, self._strikes - 1))
        return first + GROWTH * self._trust + self._shown

    def meet(self) -> bool:
        """It is met, for the first time or again. Whether it is worth waiting for: not all meetings came to nothing."""
        self._meetings += 1
        return self._meetings <= FREE_MEETINGS

    def refuse(self, kind: str, *, now: float) -> Consequence:
        """It has not taken what it was asked for; `kind` counts as an offence where that goes on and on."""
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
        """It has taken what it refused before."""
        self._refusals.pop(kind, None)

    def banish(self) -> None:
        """It is sent away for good."""
        self.banished = True

    def offend(self, kind: str, *, now: float, times: int = 1) -> Consequence:
        """It has done wrong `times` times. `kind` is a word of ours."""
        self.counts[kind] += times
        tell = self._log_limit.happened(kind, now=now) * times
        self._trust = self._good = self._shown = self._tokens = 0
        if now < self.until and self._strikes:
            return Consequence(self.until, False, tell)
        self._strikes += 1
        self.until = max(self.until, now + backoff(self._strikes))
        banished = self._strikes >= BANISHED_AT and not self.banished
        self.banished = self.banished or banished
        return Consequence(self.until, banished, tell or (self.counts[kind] if banished else 0))


class Records:
    """Of all servers met in the life of this process, by address and server_id."""

    def __init__(self) -> None:
        self._processes: dict[str, dict[str, Record]] = {}
        self._idle: collections.Counter[str] = collections.Counter()  # processes in a row not worth their meeting

    def of(self, address: str, server_id: str, *, now: float) -> Record:
        """The record of the process that answers there now."""
        processes = self._processes.setdefault(address, {})
        name = server_id[:64]  # its own word, of any length
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
    """Seconds to wait after so many."""
    return min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(offences - 1, 20))
