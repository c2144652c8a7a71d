"""Parity: whether trainer and servers run the same policy. A server's log-probs are compared before they count.

    met            the status, see servers/validate_status.py; then the server samples, the trainer scores:
                   d_t = |logp_trainer(t) - logp_server(t)| over sampled tokens;  mean d and the 99th percentile of d
                   must be under their limits; repeated now and then
    a batch        every completion that is trained on is scored while its gradient is computed, before it is applied;
                   a share of the others is scored with them, in the same micro-batches
    an evaluation  a share of its completions, before it counts

A server that fails is rejected with one line, and the run continues with the others; if there are none, it ends with
that line. Completions that are not the policy's are taken back and requested again elsewhere. How a batch is judged:

    d = logp_trainer - logp_server,  rho = min(exp(d), 20)     of each sampled token of a completion that was scored

However the policy has changed since, a token drawn from the distribution mu that the server reports has
E[rho] = E_mu[pi / mu] = 1 exactly; and rho - 1 is uncorrelated between tokens, so its squares give the standard error
of its sum. Log-probs that are shifted, invented, copied or noisy move the mean away from 1 by far more than that; so do
tokens that were not drawn at all. So, for each server process:

    group    of one server: grossly wrong alone if mean rho is further than GROSS from 1, or if mean |d| is beyond
             GROSS_DIFFERENCE and several times that of the other servers' groups, or if there are none, of the groups
             accepted last; it is requested again elsewhere. A second one rejects the server
    window   its last groups, at least FEWEST of them: rejected if the median of their mean rho is further from 1
             than the limit, or the median of mean |d| is beyond its limit and several times that of the other servers
    alarm    mean |d| alone is beyond its limit, and there is no other server to compare with: staleness can cause that
             too, so the server is kept, and a warning is logged
    certain  a mean counts as far from 1 only if it is CERTAIN standard errors away: a constant shift is after
             CERTAIN^2 tokens, noise after some hundreds. So longer windows are checked too, for groups of few tokens

A policy that moves fast towards tokens which were rare lowers the mean until one of those is drawn. So a low mean
counts only as far as it is below that of the other servers' groups, and by more than accepted groups differed from
the trainer.

A server reports the distribution that it samples from, the trainer scores with temperature 1 and the whole vocabulary.
If the run samples otherwise the two differ legitimately, and nothing is judged here; the probe always samples at 1.
"""

import collections
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from scalerl_jax.config import Config, ParityConfig, RolloutConfig
from scalerl_jax.contract.codec import Completion
from scalerl_jax.learner.batch import Batch, Sums, prompt_of, sums_of
from scalerl_jax.learner.packing import Segment, scored_only
from scalerl_jax.rollouts.fleet import Fleet
from scalerl_jax.rollouts.group_buffer import FinishedGroup, Process
from scalerl_jax.rollouts.requests import stable_hash
from scalerl_jax.rollouts.servers.validate_status import Expected

# Measured between XLA programs with the same weights: 1e-6 in float32; in bfloat16 about 1e-2 mean, and 1e-3 if only
# the logits are rounded to it. With experts an undecided router may choose another: 2e-2 mean and 2e-1 at the 99th
# percentile were measured, on small models with random weights, and three times that is allowed.
LIMITS = {"float32": (1e-3, 1e-2), "bfloat16": (2e-2, 2e-1)}  # mean, 99th percentile
LIMITS_WITH_EXPERTS = {**LIMITS, "bfloat16": (6e-2, 6e-1)}

GROSS = 0.3  # of one group's mean rho; honest ones at a staleness of 8 were within 0.03 of 1
GROSS_DIFFERENCE = 2.0  # nats, mean |d| of one group
# Of a group that may be grossly wrong alone, and of a later probe's samples by the trainer's version.
FEWEST_TOKENS = 16
CERTAIN = 6.0  # standard errors
WINDOWS, FEWEST = (6, 24, 96), 4  # groups
TYPICAL = 64  # groups of all servers, accepted last
TIMES_OTHERS = 4.0  # mean |d|, against the median of the other servers' groups
REMEMBERED = 1024  # server processes

SHOWN = 16  # servers, in a row of metrics
TRIES = 3  # if a server's samples arrive when the trainer no longer holds the version that sampled them
UNJUDGED = """config.rollout.temperature, top_p, top_k: sampling is not from the policy itself, so the log-probs of \
what servers deliver are not judged; those of the probe, at temperature 1, are"""
STALE = "a lower config.pacing.max_off_policy_steps brings them nearer"

Place = tuple[int, int, int]  # group, completion, branch
# Pairs of prompt ids [tokens] int32 and completion -> the trainer's log-probs of each completion's tokens [tokens].
Score = Callable[[Sequence[tuple[np.ndarray, Completion]]], Sequence[np.ndarray]]


# ---- when a server is met --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """|log-prob difference| over sampled tokens, nats."""

    mean: float
    p99: float
    tokens: int
    other_bits: int  # tokens whose two log-probs differ


def mismatch(
    samples: Sequence[tuple[np.ndarray, Completion]], logprobs: Sequence[np.ndarray], *, step: int | None = None
) -> Mismatch:
    """Compares the servers' log-probs with the trainer's, each [tokens] float32; forced tokens are left out.

    step: only completions sampled entirely by this version; None: all. If the weights were swapped during a completion,
    its later tokens use the KV cache of the earlier weights; that is allowed, and no limit here applies to it.
    """
    assert len(samples) == len(logprobs) > 0
    parts = []
    for (_, completion), ours in zip(samples, logprobs):
        assert len(ours) == len(completion.token_ids)
        if step is None or {by for by, *_ in completion.versions} == {step}:
            difference = np.abs(np.asarray(ours, np.float64) - completion.logprobs)
            parts.append(difference[completion.sampled()])
    differences = np.concatenate([np.zeros(0), *parts])
    if not len(differences) or not np.isfinite(differences).all():
        return Mismatch(float("inf"), float("inf"), len(differences), len(differences))
    mean, p99 = float(differences.mean()), float(np.quantile(differences, 0.99))
    return Mismatch(mean, p99, len(differences), int(np.count_nonzero(differences)))


class Probe:
    """Compares what candidates sample with the policy. Used by the trainer's thread."""

    def __init__(self, config: ParityConfig, *, expected: Expected, score: Score, dtype: str):
        """dtype: the coarser compute dtype of the two sides. It sets the limits that config leaves at 0, unless logits
        are rounded to a coarser one."""
        limits = LIMITS_WITH_EXPERTS if expected.experts else LIMITS
        mean, p99 = limits["bfloat16" if expected.head_precision == "bfloat16" else dtype]
        self.limits = (config.mean_limit or mean, config.p99_limit or p99)
        self.score, self._bitwise = score, expected.numerics == "bitwise"

    def admit_candidates(self, fleet: Fleet) -> list[tuple[str, Mismatch]]:
        """Scores what candidates sampled with the version the trainer holds now; admits or rejects each.

        Returns the servers admitted. If one fails before any was admitted, and no other is left, the fleet's next
        call raises ProbeError.
        """
        admitted = []
        for candidate in fleet.trust.due():
            samples = [(prompt.token_ids, completion) for prompt, completion in candidate.samples]
            found = mismatch(samples, self.score(samples))
            server, what = candidate.process.address, self._too_far(found)
            if what:
                fleet.trust.reject(server, f"server {server}: {what}")
            else:
                admitted.append((server, found))
                fleet.trust.admit(server)
        return admitted

    def compare_again(
        self, samples: Sequence[tuple[np.ndarray, Completion]], logprobs: Sequence[np.ndarray], *, version: int
    ) -> str | None:
        """What is wrong with the samples of an admitted server; "": nothing. None: too few are by `version` alone.

        logprobs: by the policy `version`.
        """
        found = mismatch(samples, logprobs, step=version)
        return None if found.tokens < FEWEST_TOKENS else self._too_far(found)

    def _too_far(self, found: Mismatch) -> str:
        mean, p99 = self.limits
        if self._bitwise and found.other_bits:
            return f"its log-probs of {found.other_bits} of {found.tokens} tokens are not the trainer's to the bit"
        if found.mean <= mean and found.p99 <= p99:
            return ""
        return (
            f"its log-probs differ from the trainer's by {found.mean:.2g} on average and {found.p99:.2g} at the 99th "
            f"percentile of {found.tokens} tokens (limits {mean:g} and {p99:g}): "
            "the two sides do not run the same policy"
        )


# ---- what it delivers, judged: no IO, no clock -----------------------------------------------------------------------


def comparable(rollout: RolloutConfig) -> bool:
    """Whether a run's servers sample from the distribution that the trainer scores with."""
    return rollout.temperature == 1 and rollout.top_p == 1 and rollout.top_k == 0


class Scored(NamedTuple):
    """A completion that the trainer has scored."""

    process: Process
    number: int  # of the group
    sums: Sums


class Finding(NamedTuple):
    """What `process` delivered to groups `numbers` must not be trained on; None: the process is rejected."""

    process: Process
    numbers: frozenset[int] | None
    what: str


class LogprobJudge:
    """Keeps each process's last groups. `judge` only checks, `accept` stores."""

    def __init__(self, config: ParityConfig, *, mean_limit: float, judges: bool = True):
        """mean_limit: of |d| in the probe; a larger limit there also raises the limits here.

        judges: whether the run's samples are `comparable`; if not, nothing is chosen, and nothing found.
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
        """Whether to score a completion that is not scored otherwise: the same share for every server."""
        return stable_hash("share", group_id, index) < self._share * 2**64

    def judge(self, scored: Sequence[Scored]) -> list[Finding]:
        """What is wrong with these completions and those accepted before; [] if nothing is."""
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
        """Stores completions that count."""
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


# ---- the trainer's side ----------------------------------------------------------------------------------------------


class Beside(NamedTuple):
    """Completions that are scored although they are not trained on."""

    places: list[Place]
    segments: list[Segment]  # prompt and completion at each place


class Parity:
    """Parity checks of one trainer; used by its thread. `say` prints a line for the user."""

    def __init__(
        self,
        config: Config,
        *,
        score: Callable[[Sequence[Segment]], Sequence[np.ndarray]],
        expected: Expected,
        fleet: Fleet,
        log: Callable[[str], None],
    ):
        """score: Trainer.score."""
        dtypes = (config.model.compute_dtype, config.fleet.compute_dtype)
        dtype = "bfloat16" if "bfloat16" in dtypes else "float32"
        self._probe = probe = Probe(config.parity, expected=expected, score=self._score_completions, dtype=dtype)
        self._score, self._fleet, self._log = score, fleet, log
        self._every = config.parity.every
        judges = comparable(config.rollout)
        self._judge = LogprobJudge(config.parity, mean_limit=probe.limits[0], judges=judges)
        if not judges:
            log(UNJUDGED)
        self._alarmed: set[Process] = set()  # by the previous check
        self._due: dict[Process, int] = {}  # tries left of those to be probed
        self._begin_row()

    def _begin_row(self) -> None:
        self._servers: dict[str, list[Sums]] = {}  # by completion
        self._row = dict.fromkeys(("scored", "scored_tokens", "taken_back", "sent_away", "probed"), 0)
        self._seconds = 0.0

    # ---- a batch

    def beside(self, groups: Sequence[FinishedGroup], batch: Batch) -> Beside:
        """The share of the completions not trained on that is scored with the others."""
        return self._segments(groups, self._chosen(groups, but=set(batch.origins)))

    def judge(self, groups: Sequence[FinishedGroup], places: Sequence[Place], logprobs: Sequence[np.ndarray]) -> bool:
        """Whether the completions at these places may be trained on, by the trainer's log-probs [tokens] of prompt and
        completion. If not, some are requested again, and the batch must be fetched again."""
        began = time.monotonic()
        clean = self._counts(_scored(groups, places, logprobs))
        self._seconds += time.monotonic() - began
        return clean

    def _counts(self, scored: Sequence[Scored]) -> bool:
        """Whether nothing is wrong with them; if so, they are accepted."""
        found = self._judge.judge(scored)
        for finding in found:
            self._dismiss(finding)
        if found:
            return False
        for process in self._judge.alarms.keys() - self._alarmed:
            what = self._judge.alarms[process]
            self._log(f"warning: {process.address}: kept, with no other server to hold it against: {what}; {STALE}")
        self._alarmed = set(self._judge.alarms)
        self._judge.accept(scored)
        for process, _, sums in scored:
            self._servers.setdefault(process.address, []).append(sums)
        return True

    def _dismiss(self, finding: Finding) -> None:
        back = self._fleet.trust.dismiss(finding.process, finding.what, finding.numbers)
        self._row["taken_back"] += back
        self._row["sent_away"] += finding.numbers is None
        what = "sent away" if finding.numbers is None else "one group is not trained on"
        self._log(f"{finding.process.address}: {what}: {finding.what}; {back} completions are asked for again")

    # ---- between batches

    def trained(self, version: int) -> None:
        """Called when the policy is `version`; probes the servers if it is time."""
        if self._every and version % self._every == 0:
            self._due = dict.fromkeys(self._fleet.trust.working(), TRIES)
        if self._due:
            self._fleet.trust.probe(self._due)

    def attend(self, version: int) -> None:
        """Handles what has arrived: samples of candidates and of servers that were probed again, and evaluations that
        wait for approval."""
        for server, found in self._probe.admit_candidates(self._fleet):
            self._log(
                f"{server} joined: |log-prob difference| {found.mean:.1e} on average, {found.p99:.1e} at p99, "
                f"over {found.tokens} tokens"
            )
        probed = self._fleet.trust.probed()
        if probed:
            samples = [[(prompt.token_ids, completion) for prompt, completion in one.samples] for one in probed]
            together = iter(self._probe.score([sample for some in samples for sample in some]))
            for one, some in zip(probed, samples):
                scores = list(itertools.islice(together, len(some)))
                why = self._probe.compare_again(some, scores, version=version)
                tries = self._due.pop(one.process, 0)
                if why is None:  # the trainer has moved on meanwhile
                    if tries > 1:
                        self._due[one.process] = tries - 1
                    continue
                self._row["probed"] += 1
                if why:
                    self._dismiss(Finding(one.process, None, why))
        groups = self._fleet.trust.evaluation()
        if groups is not None and self._evaluation_counts(groups):
            self._fleet.trust.approve_evaluation()

    def _evaluation_counts(self, groups: Sequence[FinishedGroup]) -> bool:
        chosen = self._segments(groups, self._chosen(groups))
        if not chosen.places:
            return True
        found = self._judge.judge(_scored(groups, chosen.places, self._score(chosen.segments)))
        for finding in found:
            # A group of an evaluation is a few completions: a server that spoils one loses its whole evaluation.
            self._dismiss(finding._replace(numbers=None))
        return not found

    def _score_completions(self, samples: Sequence[tuple[np.ndarray, Completion]]) -> list[np.ndarray]:
        scored = self._score([scored_only(prompt, completion) for prompt, completion in samples])
        return [logprobs[len(prompt) :] for (prompt, _), logprobs in zip(samples, scored, strict=True)]

    def _chosen(self, groups: Sequence[FinishedGroup], but: Collection[Place] = ()) -> list[Place]:
        """Places of the completions that are scored although nothing else needs it, except those in `but`."""
        every = ((p, i, c) for p, group in enumerate(groups) for i, c in enumerate(group.completions))
        chosen = ((p, i, c) for p, i, c in every if self._judge.chosen(c.group_id, i))
        places = ((p, i, b) for p, i, c in chosen for b, branch in enumerate(c.branches) if len(branch.token_ids))
        return [place for place in places if place not in but]

    def _segments(self, groups: Sequence[FinishedGroup], places: list[Place]) -> Beside:
        """The segments at these places; counts them as scored."""
        branches = [(groups[p].row, groups[p].completions[i].branches[b]) for p, i, b in places]
        segments = [scored_only(prompt_of(branch, row), branch) for row, branch in branches]
        self._row["scored"] += len(places)
        self._row["scored_tokens"] += sum(len(segment.tokens) for segment in segments)
        return Beside(places, segments)

    # ---- metrics

    def drain(self) -> dict[str, Any]:
        """Metrics since the last call.

        servers   for each: completions and tokens scored, mismatch (mean |d|), ratio (mean rho), effective_sample_size;
                  of more than SHOWN servers those whose ratio is furthest from 1
        parity    scored, scored_tokens: not trained on; seconds: of judging; taken_back: completions;
                  sent_away, probed: servers
        """
        totals = {server: sum(of, start=Sums()) for server, of in self._servers.items()}
        shown = sorted(totals, key=lambda server: -abs(totals[server].mean_ratio - 1))[:SHOWN]
        servers = {
            server: {
                "completions": len(self._servers[server]),
                "tokens": totals[server].tokens,
                "mismatch": totals[server].mean_difference,
                "ratio": totals[server].mean_ratio,
                "effective_sample_size": totals[server].effective,
            }
            for server in sorted(shown)
        }
        row = {"servers": servers, "parity": {**self._row, "seconds": self._seconds}}
        self._begin_row()
        return row


def _scored(groups: Sequence[FinishedGroup], places: Sequence[Place], logprobs: Sequence[np.ndarray]) -> list[Scored]:
    """logprobs: of prompt and completion at each place."""
    out = []
    for (p, i, b), ours in zip(places, logprobs, strict=True):
        group, branch, start = groups[p], groups[p].completions[i].branches[b], 0
        for process, end in group.servers[i][b]:
            sums = sums_of(branch, ours[len(prompt_of(branch, group.row)) :], start, end)
            out.append(Scored(process, group.number, sums))
            start = end
    return out
