"""The trainer's eye on what servers deliver: nothing counts before their log-probs have been held against the policy.

    a batch        every completion that is trained on is scored by the gradient on its way, before it is applied; of
                   the others a share, beside them in the same micro-batches
    an evaluation  a share of its completions, before it counts
    now and then   every server samples for the probe once more

What is judged is logprob_parity.py's; what is not the policy's is taken back and asked again elsewhere.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.learner.batch import Batch
from scalerl_jax.learner.packing import Segment
from scalerl_jax.learner.step import Learner, Pending, scored_only
from scalerl_jax.rollouts.fleet import Fleet
from scalerl_jax.rollouts.group_buffer import FinishedGroup, Process
from scalerl_jax.rollouts.parity.handshake import Probe
from scalerl_jax.rollouts.parity.logprob_parity import Finding, Parity, Scored, Sums, comparable, sums_of

Place = tuple[int, int]  # group, completion

SHOWN = 16  # servers, in a row of metrics
TRIES = 3  # samples of a server that come when the trainer no longer holds the version that they are by
UNJUDGED = (
    "config.rollout.temperature, top_p, top_k: sampling is not from the policy itself, so the log-probs of what "
    "servers deliver are not judged; those of the probe, at temperature 1, are"
)
STALE = "a lower config.pacing.max_off_policy_steps brings them nearer"


class Look(NamedTuple):
    """At a batch."""

    clean: bool  # False: some of it is asked for again; nothing may be applied
    pending: Pending | None  # None: there is nothing to train on


class Scrutiny:
    """Of one trainer; used by its thread. `say` writes a line for people."""

    def __init__(self, config: Config, *, learner: Learner, fleet: Fleet, probe: Probe, say: Callable[[str], None]):
        self._learner, self._fleet, self._probe, self._say = learner, fleet, probe, say
        self._every = config.parity.every
        judges = comparable(config.rollout)
        self._parity = Parity(config.parity, mean_limit=probe.limits[0], judges=judges)
        if not judges:
            say(UNJUDGED)
        self._alarmed: set[Process] = set()  # by the look before
        self._due: dict[Process, int] = {}  # tries left of those to be probed
        self._begin_row()

    def _begin_row(self) -> None:
        self._servers: dict[str, list[Sums]] = {}  # by completion
        self._row = dict.fromkeys(("scored", "scored_tokens", "taken_back", "sent_away", "probed"), 0)
        self._seconds = 0.0

    # ---- a batch

    def look(self, groups: Sequence[FinishedGroup], batch: Batch) -> Look:
        """Computes the batch's gradient, and judges the log-probs that this needs, and a few more."""
        beside = self._chosen(groups, but=set(batch.origins))
        others = self._segments(groups, beside)
        pending = None
        if batch.segments:
            pending = self._learner.differentiate(batch.segments, others)
            logprobs = pending.logprobs()
        else:
            logprobs = self._learner.score(others) if others else []
        began = time.monotonic()
        scored = _scored(groups, [*batch.origins, *beside], logprobs)
        clean = self._judge(scored)
        self._seconds += time.monotonic() - began
        return Look(clean, pending)

    def _judge(self, scored: Sequence[Scored]) -> bool:
        found = self._parity.judge(scored)
        for finding in found:
            self._dismiss(finding)
        if found:
            return False
        for process in self._parity.alarms.keys() - self._alarmed:
            what = self._parity.alarms[process]
            self._say(f"warning: {process.address}: kept, with no other server to hold it against: {what}; {STALE}")
        self._alarmed = set(self._parity.alarms)
        self._parity.accept(scored)
        for process, _, sums in scored:
            self._servers.setdefault(process.address, []).append(sums)
        return True

    def _dismiss(self, finding: Finding) -> None:
        back = self._fleet.trust.dismiss(finding.process, finding.what, finding.numbers)
        self._row["taken_back"] += back
        self._row["sent_away"] += finding.numbers is None
        what = "sent away" if finding.numbers is None else "one group is not trained on"
        self._say(f"{finding.process.address}: {what}: {finding.what}; {back} completions are asked for again")

    # ---- between batches

    def trained(self, version: int) -> None:
        """The policy is now `version`: is it time to probe?"""
        if self._every and version % self._every == 0:
            self._due = dict.fromkeys(self._fleet.trust.working(), TRIES)
        if self._due:
            self._fleet.trust.probe(self._due)

    def attend(self, version: int) -> None:
        """Looks at what has come: of servers that were probed again, and of evaluations that wait for approval."""
        probed = self._fleet.trust.probed()
        if probed:
            samples = [[(prompt.token_ids, completion) for prompt, completion in one.samples] for one in probed]
            together = self._probe.score([sample for some in samples for sample in some])
            at = 0
            for one, some in zip(probed, samples):
                scores = together[at : at + len(some)]
                at += len(some)
                why = self._probe.compare_again(some, scores, version=version)
                tries = self._due.pop(one.process, 0)
                if why is None:  # the trainer has gone on meanwhile
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
        chosen = self._chosen(groups)
        if not chosen:
            return True
        found = self._parity.judge(_scored(groups, chosen, self._learner.score(self._segments(groups, chosen))))
        for finding in found:
            # A group of an evaluation is a few completions: whoever spoils one has all of its evaluation taken back.
            self._dismiss(finding._replace(numbers=None))
        return not found

    def _chosen(self, groups: Sequence[FinishedGroup], but: Collection[Place] = ()) -> list[Place]:
        """Where the completions are that are scored though nothing else needs it."""
        places = ((p, i) for p, group in enumerate(groups) for i in range(len(group.completions)))
        return [
            (p, i) for p, i in places if (p, i) not in but and self._parity.chosen(groups[p].completions[i].group_id, i)
        ]

    def _segments(self, groups: Sequence[FinishedGroup], places: Sequence[Place]) -> list[Segment]:
        """Prompt and completion at each place; they count as scored."""
        segments = [scored_only(groups[p].row.token_ids, groups[p].completions[i]) for p, i in places]
        self._row["scored"] += len(places)
        self._row["scored_tokens"] += sum(len(segment.tokens) for segment in segments)
        return segments

    # ---- what is written down

    def take(self) -> dict[str, Any]:
        """Of the time since the last call.

        servers   of each: completions and tokens scored, mismatch (mean |d|), ratio (mean rho), effective_sample_size;
                  of more than SHOWN servers those whose ratio is furthest from 1
        parity    scored, scored_tokens: beside those trained on; seconds: of judging; taken_back: completions;
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
    for (p, i), ours in zip(places, logprobs, strict=True):
        group = groups[p]
        sums = sums_of(group.completions[i], ours[len(group.row.token_ids) :])
        out.append(Scored(group.servers[i], group.number, sums))
    return out
