"""Chooses the prompt of group n: a stratum by weight, then one of its unsolved prompts, by epochs or uniformly.

    stratum     the one furthest behind its share of the draws so far: after n draws each stratum's count is within
                less than one draw per other stratum of its share
    epochs      each stratum separately: consecutive seeded permutations of its prompts
    uniform     a random prompt of the stratum, from (seed, n)

No-Positive-Resampling: a prompt with at least `minimum_groups` groups, whose last `window` groups have a pass rate of
at least `no_positive_resampling_at`, is retired and never drawn again. Groups that are already sampled are not
affected. A stratum without prompts leaves its share to the others; if all are empty, the run ends, or starts a new
history in which nothing is retired (`when_empty`).

    batch of group n            b = n // groups_per_batch
    history used by a draw      batches 0 .. b - k - 1; in a new history those since the batch at which it started

A server may sample group n as soon as version b - k exists, that is after batches 0 .. b - k - 1; using anything later
would make a draw depend on timing. So the sequence of prompts is a function of (seed, scores), whatever the fleet's
speed, and a run resumed at batch v draws the same prompts as the uninterrupted run. A run resumed with another k, seed
or batch size uses these from batch v on, and keeps the history of each prompt.

The fleet's thread draws and the trainer's thread records, so both methods hold the lock.

Left out on purpose: difficulty pools, pass-rate targets.
"""

import copy
import dataclasses
import threading
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import numpy as np

from scalerl_jax.config import CurriculumConfig
from scalerl_jax.environments.base import Stratum

NEVER = np.iinfo(np.int64).max  # the batch in which a prompt not yet retired was retired
_UNIFORM = 5  # id of the random stream, distinct from those of the environments


class NoPromptLeft(ValueError):
    """Every prompt is retired; the message is one line."""


class OtherPrompts(ValueError):
    """A checkpoint's history is of `before` prompts, which are not the run's `now` prompts."""

    def __init__(self, before: int, now: int):
        super().__init__(
            "the training rows are not those that the checkpoint was made with "
            f"({before:,} prompts then, {now:,} now), and the history of each is kept by its place"
        )
        self.before, self.now = before, now


@dataclasses.dataclass
class _History:
    """Results of each prompt in the batches from `start` on."""

    start: int
    retired_in: np.ndarray  # [prompts] int64, the batch whose scores retired it
    groups: np.ndarray  # [prompts] int64, number of its groups
    correct: np.ndarray  # [prompts, window] int64, correct completions of its last groups
    total: np.ndarray  # [prompts, window] int64, all completions of its last groups

    @classmethod
    def new(cls, start: int, *, prompts: int, window: int) -> "_History":
        zeros = np.zeros((prompts, window), np.int64)
        return cls(start, np.full(prompts, NEVER), np.zeros(prompts, np.int64), zeros, zeros.copy())


@dataclasses.dataclass
class _DrawPosition:
    """Position in the sequence of draws, kept per batch so that a run can resume."""

    epochs: np.ndarray  # [strata, 2] int64: index of the current permutation, and how much of it is drawn or skipped
    credit: np.ndarray  # [strata] float64: number of draws by which a stratum is behind its share


class Curriculum:
    """The order in which the prompts of the strata are drawn.

    Args:
        k: largest staleness of a group, in batches.
        groups_per_batch: groups of one optimizer step.
        seed: the run's seed.
        digest: of the prompts, so that a checkpoint's history is not applied to other prompts.
    """

    def __init__(
        self,
        strata: Sequence[Stratum],
        config: CurriculumConfig,
        *,
        k: int,
        groups_per_batch: int,
        seed: int,
        digest: int = 0,
    ):
        self._strata = [stratum for stratum in strata if len(stratum.rows)]
        self._prompts = sum(len(stratum.rows) for stratum in self._strata)
        if not self._prompts:
            raise ValueError("there are no training prompts to draw from")
        self._lock = threading.Lock()
        self._config, self._k, self._groups, self._seed, self._digest = config, k, groups_per_batch, seed, digest
        # Exact: 0.55 of 100 completions are 55, but slightly more in floats.
        self._retired_at = Fraction(str(config.no_positive_resampling_at))
        self._weights = np.asarray([stratum.weight for stratum in self._strata], np.float64)
        self._histories = [_History.new(0, prompts=self._prompts, window=config.window)]  # in order of start
        self._recorded = 0  # batches 0 .. recorded-1 are in the history
        self._begin_at(0, _DrawPosition(np.zeros((len(self._strata), 2), np.int64), np.zeros(len(self._strata))))

    def _begin_at(self, batch: int, place: _DrawPosition) -> None:
        self._next_group = batch * self._groups
        self._place = place
        self._orders = [self._permutation(s, int(epoch)) for s, (epoch, _) in enumerate(place.epochs)]
        self._starts = {batch: copy.deepcopy(place)}  # batch -> the position before its first draw
        self._left: list[np.ndarray] = []  # per stratum, the prompts that may be drawn for the current batch

    def draw(self, n: int) -> int:
        """The prompt of group n; groups must be drawn in order.

        Raises NoPromptLeft if every prompt is retired and `when_empty` is "stop".
        """
        with self._lock:
            assert n == self._next_group, f"group {n} drawn out of order, {self._next_group} comes next"
            batch = n // self._groups
            assert self._recorded >= batch - self._k, f"group {n} drawn before batch {batch - self._k - 1} was recorded"
            if n % self._groups == 0:
                self._starts[batch] = copy.deepcopy(self._place)
                self._begin_batch(batch)
            stratum = self._next_stratum()
            if self._config.sampling == "uniform":
                left = self._left[stratum]
                prompt = int(left[np.random.default_rng([self._seed, _UNIFORM, n]).integers(len(left))])
            else:
                prompt = self._next_of_epoch(stratum, seen=batch - self._k)
            self._next_group = n + 1
            return prompt

    def _begin_batch(self, batch: int) -> None:
        """Computes the prompts that the batch may draw: all its draws use the same history."""
        self._left = self._not_retired(batch - self._k)
        if any(map(len, self._left)):
            return
        if self._config.when_empty == "stop":
            raise NoPromptLeft(
                f"every prompt is retired: all {self._prompts} have a pass rate of "
                f"{self._config.no_positive_resampling_at:g} or more; the task is solved, or it has too few prompts"
            )
        self._histories.append(_History.new(batch, prompts=self._prompts, window=self._config.window))
        self._left = self._not_retired(batch - self._k)

    def _not_retired(self, seen: int) -> list[np.ndarray]:
        retired_in = self._histories[-1].retired_in
        return [s.rows.start + np.flatnonzero(retired_in[s.rows.start : s.rows.stop] >= seen) for s in self._strata]

    def _next_stratum(self) -> int:
        open_ones = np.asarray([len(left) > 0 for left in self._left])
        share = np.where(open_ones, self._weights, 0.0)
        self._place.credit += share / share.sum()
        chosen = int(np.argmax(np.where(open_ones, self._place.credit, -np.inf)))
        self._place.credit[chosen] -= 1
        return chosen

    def _next_of_epoch(self, s: int, *, seen: int) -> int:
        retired_in, rows = self._histories[-1].retired_in, self._strata[s].rows
        while True:  # terminates: at least one prompt of the stratum is not retired
            epoch, at = self._place.epochs[s]
            if at == len(rows):
                self._place.epochs[s] = epoch + 1, 0
                self._orders[s] = self._permutation(s, int(epoch) + 1)
                continue
            self._place.epochs[s, 1] += 1
            prompt = rows.start + int(self._orders[s][at])
            if retired_in[prompt] >= seen:
                return prompt

    def record(self, batch: int, groups: Iterable[tuple[int, int, int]]) -> None:
        """Records the outcomes of a trained batch: (prompt, correct, total) per group. Batches come in order.

        `total` counts every requested completion: an excluded one counts as wrong.
        """
        with self._lock:
            assert batch == self._recorded, f"batch {batch} recorded, {self._recorded} comes next"
            history = self._history_of(batch)
            for prompt, correct, total in groups:
                assert 0 <= correct <= total and total > 0
                at = history.groups[prompt] % self._config.window
                history.correct[prompt, at], history.total[prompt, at] = correct, total
                history.groups[prompt] += 1
                limit = self._retired_at * int(history.total[prompt].sum())
                solved = int(history.correct[prompt].sum()) >= limit
                if solved and history.groups[prompt] >= self._config.minimum_groups:
                    history.retired_in[prompt] = min(history.retired_in[prompt], batch)
            self._recorded = batch + 1
            for old in [b for b in self._starts if b < self._recorded]:
                del self._starts[old]
            while len(self._histories) > 1 and self._histories[1].start < self._recorded:
                del self._histories[0]

    def _history_of(self, batch: int) -> _History:
        return next(history for history in reversed(self._histories) if history.start <= batch)

    def retired(self) -> int:
        """Number of prompts that the outcomes recorded so far have retired."""
        with self._lock:
            return int((self._history_of(max(0, self._recorded - 1)).retired_in != NEVER).sum())

    def state(self) -> dict[str, np.ndarray]:
        """State for a checkpoint after the last recorded batch: the draw position at the start of the next batch.

        Draws made ahead for later batches are not included: a resumed run repeats them with the same result.
        """
        with self._lock:
            batch = self._recorded
            place = self._starts.get(batch)
            if place is None:
                assert self._next_group == batch * self._groups, (
                    f"batch {batch} starts before batch {batch - 1} was drawn"
                )
                place = self._place
            place, history = copy.deepcopy((place, self._history_of(max(0, batch - 1))))
            return {
                "retired_in": history.retired_in,
                "history_groups": history.groups,
                "history_correct": history.correct,
                "history_total": history.total,
                "epochs": place.epochs,
                "credit": place.credit,
                "cursor": np.asarray([batch, history.start], np.int64),
                "identity": np.asarray(self._identity(), np.int64),
            }

    def _identity(self) -> list[int]:
        return [self._prompts, self._k, self._groups, self._seed, self._digest]

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Resumes from `state`; the next draw is the first of its batch.

        k, groups and seed may differ: the caller checks whether the config allows it. Raises OtherPrompts, and
        ValueError if the prompts are the same but divided into another number of strata.
        """
        before, now = np.asarray(state["identity"]).tolist(), self._identity()
        if before[0] != now[0] or before[4:] not in ([], now[4:]):
            raise OtherPrompts(before[0], now[0])
        cursor = [int(value) for value in state["cursor"]]
        history = _History.new(0, prompts=self._prompts, window=self._config.window)
        history.retired_in = np.array(state["retired_in"], np.int64)
        place = self._place
        if "epochs" not in state:  # of an old release with one stratum and a window of one group
            place.epochs = np.asarray([cursor[1:]], np.int64)
        else:
            history.start = cursor[1]
            history.groups = np.array(state["history_groups"], np.int64)
            for name in ("correct", "total"):
                saved = np.array(state[f"history_{name}"], np.int64)
                setattr(history, name, _latest(saved, history.groups, self._config.window))
            place = _DrawPosition(np.array(state["epochs"], np.int64), np.array(state["credit"], np.float64))
        if len(place.epochs) != len(self._strata):
            raise ValueError(
                f"the training rows have {len(self._strata)} sources with a weight, and had {len(place.epochs)} when "
                "the checkpoint was made: give the weights in the config to the same ones, or begin in another workdir"
            )
        self._histories, self._recorded = [history], cursor[0]
        self._begin_at(cursor[0], place)

    def _permutation(self, stratum: int, epoch: int) -> np.ndarray:
        count = len(self._strata[stratum].rows)
        return np.random.default_rng([self._seed, epoch, *([stratum] if stratum else [])]).permutation(count)


def _latest(saved: np.ndarray, groups: np.ndarray, window: int) -> np.ndarray:
    """Converts [prompts, old window] values to [prompts, window]: the latest ones, each at index group % window."""
    if saved.shape[1] == window:
        return saved
    found = np.zeros((len(saved), window), np.int64)
    for back in range(1, min(window, saved.shape[1]) + 1):
        had = np.flatnonzero(groups >= back)
        number = groups[had] - back
        found[had, number % window] = saved[had, number % saved.shape[1]]
    return found
