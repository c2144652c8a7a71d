"""Whether each server's log-probs are those of the policy, judged on what it delivers. Pure: no IO, no clock.

    d = logp_trainer - logp_server,  rho = min(exp(d), CAP)     of each sampled token of a completion that was scored

Whatever the policy has learned since, a token drawn from the distribution mu that the server tells of has
E[rho] = E_mu[pi / mu] = 1 exactly; and rho - 1 has no memory, so a sum of it over tokens is as uncertain as its squares
say. Log-probs that are shifted, invented, copied or noisy move the mean away from 1 by far more than that; so do tokens
that were not drawn at all. So, of each server process:

    group    of one server: grossly wrong alone where mean rho is further than GROSS from 1, or mean |d| is beyond
             GROSS_DIFFERENCE and several times that of the other servers' groups, or without any of those that were
             accepted last; it is asked again elsewhere. A second one sends the server away
    window   its last groups, at least FEWEST of them: sent away where the median of their mean rho is further from 1
             than the limit, or the median of mean |d| is beyond its limit and several times that of the other servers
    alarm    what mean |d| alone says of a server that no other is there to be held against: staleness does that too, so
             it is kept, and said
    certain  a mean counts as far from 1 only where it is CERTAIN standard errors away: a constant shift is after
             CERTAIN^2 tokens, noise after some hundreds. So longer windows are looked at too, for groups of few tokens

A policy that moves fast towards tokens which were rare lowers the mean until one of those is drawn. So a low mean
counts only as far as it is below that of the other servers' groups, and below what groups differed by that were
accepted.

A server tells of the distribution that it samples from, the trainer scores with temperature 1 and the whole vocabulary.
Where the run samples otherwise the two differ by right, and nothing is judged here; the probe samples at 1 always.
"""

import collections
import dataclasses
import math
import operator
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from scalerl_jax.config import ParityConfig, RolloutConfig
from scalerl_jax.contract.codec import Completion
from scalerl_jax.rollouts.group_buffer import Process
from scalerl_jax.rollouts.requests import stable_hash

CAP = 20.0  # on rho: what one token can do to a mean
GROSS = 0.3  # of one group's mean rho; honest ones at a staleness of 8 were seen within 0.03 of 1
GROSS_DIFFERENCE = 2.0  # nats, mean |d| of one group
FEWEST_TOKENS = 16  # of a group that may be grossly wrong alone
CERTAIN = 6.0  # standard errors
WINDOWS, FEWEST = (6, 24, 96), 4  # groups
TYPICAL = 64  # groups of all servers, accepted last
TIMES_OTHERS = 4.0  # mean |d|, against the median of the other servers' groups
REMEMBERED = 1024  # server processes


@dataclasses.dataclass(frozen=True)
class Sums:
    """Over sampled tokens; they add up."""

    tokens: int = 0
    difference: float = 0.0  # of |d|
    ratio: float = 0.0  # of rho
    squared: float = 0.0  # of rho^2

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    @property
    def mean_difference(self) -> float:
        return self.difference / max(1, self.tokens)

    @property
    def mean_ratio(self) -> float:
        return self.ratio / max(1, self.tokens)

    @property
    def effective(self) -> float:
        """Kish's effective sample size, as a share of the tokens."""
        return self.ratio**2 / max(1e-30, self.squared * self.tokens)

    @property
    def errors(self) -> float:
        """How many standard errors the mean of rho is away from 1."""
        spread = self.squared - 2 * self.ratio + self.tokens  # sum of (rho - 1)^2
        return abs(self.ratio - self.tokens) / math.sqrt(spread) if spread > 0 else 0.0


def comparable(rollout: RolloutConfig) -> bool:
    """Whether the log-probs of what a run samples are those that the trainer scores."""
    return rollout.temperature == 1 and rollout.top_p == 1 and rollout.top_k == 0


def sums_of(completion: Completion, logprobs: np.ndarray) -> Sums:
    """logprobs: the trainer's, of the completion's tokens: [tokens] float32."""
    sampled = completion.sampled()
    difference = (np.asarray(logprobs, np.float64) - completion.logprobs)[sampled]
    ratio = np.exp(np.minimum(difference, math.log(CAP)))
    return Sums(len(difference), float(np.abs(difference).sum()), float(ratio.sum()), float((ratio**2).sum()))


class Scored(NamedTuple):
    """A completion that the trainer has scored."""

    process: Process
    number: int  # of the group
    sums: Sums


class Finding(NamedTuple):
    """What `process` delivered to groups `numbers` is not to be trained on; None: it is sent away."""

    process: Process
    numbers: frozenset[int] | None
    what: str


class Parity:
    """Keeps each process's last groups. `judge` looks, `accept` remembers."""

    def __init__(self, config: ParityConfig, *, mean_limit: float, judges: bool = True):
        """mean_limit: of |d| when trainer and server meet; who allows more there allows its consequences here.

        judges: the run samples what is `comparable`; else nothing is chosen, and nothing found.
        """
        self._share, self._judges = config.share if judges else 0.0, judges
        # A mean difference of m may move a mean ratio by e^m - 1.
        allowed = math.expm1(min(mean_limit, 100.0))
        self._limit, self._gross = max(config.ratio_limit, allowed), max(GROSS, 3 * allowed)
        self._difference_limit = max(config.difference_limit, 10 * mean_limit)
        self._gross_difference = max(GROSS_DIFFERENCE, 2 * self._difference_limit)
        self._typical: collections.deque[float] = collections.deque(maxlen=TYPICAL)  # mean |d| of groups
        self._groups: dict[Process, collections.deque[Sums]] = {}
        self._gross_ones: collections.Counter[Process] = collections.Counter()
        self.alarms: dict[Process, str] = {}  # of those judged last

    def chosen(self, group_id: str, index: int) -> bool:
        """Whether a completion that nobody scores otherwise is to be scored: the same share whoever delivers it."""
        return stable_hash("share", group_id, index) < self._share * 2**64

    def judge(self, scored: Sequence[Scored]) -> list[Finding]:
        """What is wrong with these completions and those accepted before; nothing: []."""
        groups = _by_group(scored) if self._judges else {}
        found: list[Finding] = []
        self.alarms = {}
        for process, numbered in groups.items():
            others = [sums for other, theirs in groups.items() if other != process for sums in theirs.values()]
            gross = {number: why for number, sums in numbered.items() if (why := self._grossly(sums, others))}
            window = self._window(process, [sums for number, sums in numbered.items() if number not in gross], others)
            if len(gross) + self._gross_ones[process] > 1:
                found.append(Finding(process, None, f"{next(iter(gross.values()))}, of one group, and not the first"))
            elif window:
                found.append(Finding(process, None, window))
            elif gross:
                found.append(Finding(process, frozenset(gross), next(iter(gross.values()))))
        for finding in found:
            self._gross_ones[finding.process] += finding.numbers is not None
        return found

    def accept(self, scored: Sequence[Scored]) -> None:
        """They count."""
        for process, numbered in _by_group(scored).items():
            kept = self._groups.pop(process, None)
            self._groups[process] = kept = collections.deque(maxlen=WINDOWS[-1]) if kept is None else kept
            kept.extend(numbered.values())
            self._typical.extend(sums.mean_difference for sums in numbered.values())
        while len(self._groups) > REMEMBERED:
            oldest = next(iter(self._groups))
            del self._groups[oldest]
            self._gross_ones.pop(oldest, None)

    def _grossly(self, sums: Sums, others: Sequence[Sums]) -> str:
        if sums.tokens < FEWEST_TOKENS:
            return ""
        usual = _usual(others) if others else TIMES_OTHERS * self._drift
        if sums.mean_difference > max(self._gross_difference, usual):
            return _difference(sums.mean_difference, self._gross_difference)
        if self._off(sums.mean_ratio, self._gross, others) and sums.errors > CERTAIN:
            return _ratio(sums.mean_ratio, self._gross)
        return ""

    def _window(self, process: Process, groups: Sequence[Sums], others: Sequence[Sums]) -> str:
        """What is wrong with the last groups together, in the first window that shows it."""
        kept = [*self._groups.get(process, ()), *groups]
        if len(kept) < FEWEST or not groups:
            return ""
        if not others and (difference := _median(kept[-WINDOWS[0] :])) > self._difference_limit:
            self.alarms[process] = _difference(difference, self._difference_limit)
        lengths = sorted({min(len(kept), max(window, len(groups))) for window in WINDOWS})
        return next((why for length in lengths if (why := self._wrong(kept[-length:], others))), "")

    def _wrong(self, last: Sequence[Sums], others: Sequence[Sums]) -> str:
        """What is wrong with these groups together."""
        ratio = statistics.median(sums.mean_ratio for sums in last)
        total = sum(last, start=Sums())
        same_side = (ratio > 1) == (total.mean_ratio > 1)
        if self._off(ratio, self._limit, others) and same_side and total.errors > CERTAIN:
            return f"{_ratio(ratio, self._limit)}, of its last {len(last)} groups"
        difference = _median(last)
        if others and difference > max(self._difference_limit, _usual(others)):
            return f"{_difference(difference, self._difference_limit)}, of its last {len(last)} groups"
        return ""

    def _off(self, ratio: float, limit: float, others: Sequence[Sums]) -> bool:
        if ratio > 1 + limit:
            return True
        usual = min(1.0, statistics.median(sums.mean_ratio for sums in others)) if len(others) >= FEWEST else 1.0
        return ratio < usual - max(limit, self._drift)

    @property
    def _drift(self) -> float:
        """Mean |d| of the groups that were accepted last."""
        return statistics.median(self._typical) if self._typical else 0.0


def _median(groups: Sequence[Sums]) -> float:
    """Of mean |d|."""
    return statistics.median(sums.mean_difference for sums in groups)


def _usual(others: Sequence[Sums]) -> float:
    return TIMES_OTHERS * _median(others)


def _by_group(scored: Iterable[Scored]) -> dict[Process, dict[int, Sums]]:
    groups: dict[Process, dict[int, Sums]] = {}
    for process, number, sums in scored:
        if sums.tokens:
            of = groups.setdefault(process, {})
            of[number] = of.get(number, Sums()) + sums
    return groups


def _ratio(ratio: float, limit: float) -> str:
    return f"its tokens' mean importance ratio is {ratio:.3g} (1 +- {limit:.3g} is allowed)"


def _difference(difference: float, limit: float) -> str:
    return f"its log-probs differ from the trainer's by {difference:.3g} on average (limit {limit:.3g})"
