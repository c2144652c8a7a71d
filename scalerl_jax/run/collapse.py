"""The collapse alarm: whether a run has collapsed, and since when, from its rows of metrics.jsonl and evals.jsonl.

    low           an evaluation that is a fifth below the best one, and by four standard errors (of the differences per
                  prompt, if both used the same prompts)
    below         one that is a fifth below the lowest that the live forecast expected, and by three standard errors
    training      the pass rate of the last 5 batches is a third below that of the best ten consecutive ones, and by
                  four standard errors. More than for an evaluation, since the curriculum removes easy prompts
    the updates   sequence effective sample size (a quarter of the last 10 updates at most a third of the usual),
                  gradient norm (a quarter of them at least 4 times the usual), truncation and loops (0.2 of the
                  completions more than usual), no gradient in half of the updates while the training pass rate is under
                  a tenth of its best. Usual: the median of the 50 updates before these 10

    collapse      an evaluation is low and the one before was low or below; or one is low or below, and the updates or
                  the training pass rate show a sign; or both the training pass rate and the updates show a sign, and no
                  evaluation since the drop contradicts them; or a gradient or a loss is not finite

One unlucky evaluation is not a collapse, nor is one update that jumps: a policy that has recovered shows none of these
signs. The last good step is that of the newest evaluation as good as the best one, within two standard errors or a
twentieth; if no evaluation came after it, the update before the first sign.

Pure: nothing is read or written here. The limits are this project's choice.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]

_RECENT, _USUAL = 10, 50  # updates
_BATCHES, _BEST_BATCHES = 5, 10  # the mean pass rate of 5 batches is compared with the best mean of 10 consecutive ones
_LOW, _LOW_ERRORS, _BELOW_ERRORS = 1 / 5, 4.0, 3.0
_TRAINING_LOW = 1 / 3
_GOOD, _GOOD_ERRORS = 1 / 20, 2.0
_ESS, _GRADIENT, _SHARE = 1 / 3, 4.0, 0.2
_NOTHING_RIGHT = 1 / 10  # of the best training pass rate
_95_PERCENT = 2 * 1.96  # an interval's width in standard errors

COLLAPSE = "collapse"  # its name among the alarms
_SEQUENCE_ESS = "effective_sample_size_sequence"
_SHARES = {"truncated": "truncated completions", "repetitive": "completions that end in a loop"}
_FINITE = ("gradient_norm", "loss")
_RATES = ("samples", "pass_rate", "pass_rate_low", "pass_rate_high")  # of an evaluation


@dataclasses.dataclass(frozen=True)
class Collapse:
    """A collapse, as the alarm reports it."""

    step: int  # when the alarm was raised
    since: int  # the update with the first sign
    last_good: int  # the newest step at which the policy was still good
    signs: tuple[str, ...]  # each with its figures

    def __str__(self) -> str:
        return f"the policy has collapsed since update {self.since}: {'; '.join(self.signs)}"


@dataclasses.dataclass(frozen=True)
class _EvaluatedStep:
    step: int
    rate: float
    error: float  # standard error of the rate
    each: np.ndarray  # [prompts] float64: their rates

    @staticmethod
    def of(row: Row) -> "_EvaluatedStep | None":
        """From a row of evals.jsonl; None if it lacks a column: written by an older version, or edited."""
        passes, numbers = row.get("passes"), [row.get(name) for name in _RATES]
        if not isinstance(passes, list) or not passes or not all(map(_finite, [*passes, *numbers])):
            return None
        samples, rate, low, high = (float(row[name]) for name in _RATES)
        return _EvaluatedStep(row["step"], rate, (high - low) / _95_PERCENT, np.array(passes, np.float64) / samples)

    def errors_below(self, best: "_EvaluatedStep") -> float:
        """By how many standard errors of the difference this one is below `best`."""
        drop = best.rate - self.rate
        if len(self.each) == len(best.each) > 1:
            error = float(np.std(best.each - self.each, ddof=1)) / math.sqrt(len(self.each))
        else:
            error = math.hypot(self.error, best.error)
        return drop / error if error > 0 else math.copysign(math.inf, drop) if drop else 0.0


class CollapseWatch:
    """Follows the rows of a run as they are written; raises one collapse alarm.

    An evaluation may arrive after rows of later steps.
    """

    def __init__(self) -> None:
        self.raised: Collapse | None = None
        self._rows: collections.deque[Row] = collections.deque(maxlen=_RECENT + _USUAL)
        self._begun: dict[str, int] = {}  # each current sign of the updates -> the update where it began
        self._signs: list[str] = []  # the current signs of the updates, with their figures
        self._training = ""  # the sign of the training pass rate; empty: none
        self._best_batches: tuple[float, float] | None = None  # mean pass rate, prompts
        self._evaluations: list[_EvaluatedStep] = []
        self._low: list[int] = []  # steps of the trailing consecutive evaluations that are low or below
        self._low_reasons: list[str] = []  # the reason of the last of them
        self._forecast: tuple[int, float] | None = None  # its step; the lowest later pass rate that it expects

    def update(self, row: Row) -> Collapse | None:
        """Takes the next row of metrics.jsonl; returns the collapse if this row raises it."""
        short = {name: value for name, value in row.items() if name in _NAMES}
        self._rows.append(short)
        self._forecast = _forecast_of(row) or self._forecast
        broken = [name for name in _FINITE if name in short and not _finite(short[name])]
        if broken:
            return self.not_finite(row["step"], f"the {broken[0].replace('_', ' ')} is not finite")
        self._check_batches()
        self._check_updates()
        if not self._training or not self._signs:
            return None
        if self._evaluations and not self._low and self._evaluations[-1].step >= self._fall():
            return None  # the evaluations are not low: the batches have harder prompts
        return self._raise()

    def evaluation(self, row: Row) -> Collapse | None:
        """Takes the next row of evals.jsonl; returns the collapse if this row raises it."""
        now = _EvaluatedStep.of(row)
        if now is None:
            return None
        reason, low, below = f"held-out pass rate {now.rate:.3f} at step {now.step}", False, False
        if self._evaluations:
            best = self._best()
            low = best.rate - now.rate >= _LOW * best.rate and now.errors_below(best) >= _LOW_ERRORS
            reason += f", after {best.rate:.3f} at step {best.step}" if low else ""
        if self._forecast is not None and now.step > self._forecast[0]:
            expected = self._forecast[1]
            below = expected - now.rate >= max(_LOW * expected, _BELOW_ERRORS * now.error)
            reason += f", below the {expected:.3f} that the forecast expects at least" if below else ""
        twice = low and bool(self._low)
        self._evaluations.append(now)
        self._low = [*self._low, now.step] if low or below else []
        self._low_reasons = [reason] if low or below else []
        if (low or below) and (twice or self._training or self._signs):
            return self._raise()
        return None

    def not_finite(self, step: int, message: str) -> Collapse | None:
        """Records an update whose gradient is not finite, which may have no row."""
        return self._raise(message, step=step)

    @property
    def good_evaluation(self) -> int | None:
        """The step of the newest evaluation that is as good as the best; None without evaluations."""
        if not self._evaluations:
            return None
        best = self._best()
        return next(
            there.step
            for there in reversed(self._evaluations)
            if best.rate - there.rate <= _GOOD * best.rate or there.errors_below(best) < _GOOD_ERRORS
        )

    def _best(self) -> _EvaluatedStep:
        return max(self._evaluations, key=lambda there: there.rate)

    def _raise(self, *reasons: str, step: int | None = None) -> Collapse | None:
        if self.raised is not None:
            return None
        newest = [row["step"] for row in [*self._rows][-1:]] + [there.step for there in self._evaluations[-1:]]
        step = max(newest, default=0) if step is None else step
        since = min([*self._begun.values(), *self._low[:1], *([self._fall()] if self._training else []), step])
        good = self.good_evaluation
        later = [there.step for there in self._evaluations if there.step > (good or 0)]
        if good is None or not later:
            good = max(good or 0, since - 1)
        training = [self._training] if self._training else []
        self.raised = Collapse(
            step, max(since, good + 1), good, (*reasons, *self._low_reasons, *training, *self._signs)
        )
        return self.raised

    def _fall(self) -> int:
        """The step of the first of the last _BATCHES batches."""
        return [*self._rows][-_BATCHES:][0]["step"]

    def _check_batches(self) -> None:
        self._training = ""
        last = [row for row in [*self._rows][-_BATCHES:] if _finite(row.get("pass_rate"))]
        if len(last) == _BATCHES and self._best_batches is not None:
            (best, best_prompts), (rate, prompts) = self._best_batches, _mean_of(last)
            both = (best * best_prompts + rate * prompts) / (best_prompts + prompts)
            error = math.sqrt(max(both * (1 - both), 1e-12) * (1 / best_prompts + 1 / prompts))
            if best - rate >= max(_TRAINING_LOW * best, _LOW_ERRORS * error):
                self._training = (
                    f"pass rate of the last {_BATCHES} batches {rate:.3f}, after {best:.3f} in the best {_BEST_BATCHES}"
                )
        window = [row for row in [*self._rows][-_BEST_BATCHES:] if _finite(row.get("pass_rate"))]
        if len(window) == _BEST_BATCHES:
            found = _mean_of(window)
            if self._best_batches is None or found[0] > self._best_batches[0]:
                self._best_batches = found

    def _check_updates(self) -> None:
        rows = [*self._rows]
        found = _signs(rows[:-_RECENT], rows[-_RECENT:], self._best_batches[0] if self._best_batches else None)
        begins = int(rows[-_RECENT:][0]["step"])
        self._begun = {name: self._begun.get(name, begins) for name in found}
        self._signs = [*found.values()]


_NAMES = ("step", "pass_rate", "prompts", "prompts_surviving", _SEQUENCE_ESS, *_FINITE, *_SHARES)


def first_collapse(metrics: Iterable[Row], evals: Iterable[Row]) -> Collapse | None:
    """The collapse that a run's rows show; None if there is none."""
    watch = CollapseWatch()
    follow(watch, metrics, evals)
    return watch.raised


def follow(watch: CollapseWatch, metrics: Iterable[Row], evals: Iterable[Row]) -> None:
    """Passes the rows of a run to a watch in order of step, an evaluation after the update of its step."""
    rows = sorted(
        [(row["step"], 0, row) for row in metrics] + [(row["step"], 1, row) for row in evals], key=lambda row: row[:2]
    )
    for _, is_evaluation, row in rows:
        (watch.evaluation if is_evaluation else watch.update)(row)


def _signs(before: Sequence[Row], recent: Sequence[Row], best: float | None) -> dict[str, str]:
    """The signs that the updates show, by name. best: mean pass rate of the best batches."""
    if len(before) < _RECENT:
        return {}
    found = {}
    ess, usual = _values(recent, _SEQUENCE_ESS), _values(before, _SEQUENCE_ESS)
    if _enough(ess) and _enough(usual) and (now := np.quantile(ess, 0.25)) <= _ESS * (was := np.median(usual)):
        found["ess"] = f"sequence effective sample size down to {now:.1%} of the completions, usually {was:.1%}"
    norms, usual = _values(recent, "gradient_norm"), _values(before, "gradient_norm")
    if _enough(norms) and _enough(usual) and (now := np.quantile(norms, 0.75)) >= _GRADIENT * (was := np.median(usual)):
        found["gradient"] = f"gradient norm up to {now:.2g}, usually {was:.2g}"
    for name, what in _SHARES.items():
        shares, usual = _values(recent, name), _values(before, name)
        if _enough(shares) and _enough(usual) and (share := np.mean(shares)) >= (was := np.median(usual)) + _SHARE:
            found[name] = f"{share:.0%} {what}, usually {was:.0%}"
    without = sum(row.get("prompts_surviving") == 0 for row in recent)
    rates = _values(recent, "pass_rate")
    if best and rates and without >= len(recent) / 2 and np.mean(rates[-_BATCHES:]) <= _NOTHING_RIGHT * best:
        found["nothing"] = f"{without} of the last {len(recent)} updates without a gradient"
    return found


def _enough(values: Sequence[float]) -> bool:
    """Whether there are enough values: a quarter of fewer is a single update."""
    return len(values) >= _BATCHES


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if _finite(row.get(name))]


def _mean_of(rows: Sequence[Row]) -> tuple[float, float]:
    """(mean pass rate, prompts)."""
    return float(np.mean([row["pass_rate"] for row in rows])), float(sum(row.get("prompts") or 1 for row in rows))


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _forecast_of(row: Row) -> tuple[int, float] | None:
    """The live forecast in a row of metrics.jsonl, if any: (its step, the lowest pass rate that it expects next)."""
    forecast = row.get("forecast")
    if not isinstance(forecast, Mapping) or not _finite(forecast.get("next_low")):
        return None
    return forecast["step"], forecast["next_low"]
