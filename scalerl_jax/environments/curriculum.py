"""Which prompt group n is: a stratum by its weight, a prompt of it by epochs or uniformly, without those solved.

    stratum     the one that is furthest behind its share of the draws so far: after n draws each has had its share
                of them to within less than one draw for every other stratum
    epochs      of each stratum for itself: seeded permutations, one after another
    uniform     any of its prompts, from (seed, n)

No-Positive-Resampling: a prompt whose last `window` groups have a pass rate at or over `no_positive_resampling_at`, and
which has had `minimum_groups` of them, is retired, and never drawn again. Acting at the draw only, it does not touch a
group already sampled. A stratum without prompts leaves its share to the others; when all are without, the run ends, or
begins a new history in which nothing is retired (`when_empty`).

    batch of group n            b = n // groups_per_batch
    history that a draw sees    batches 0 .. b - k - 1, of a new history those from the batch on that it was begun for

A server may sample group n as soon as version b - k exists, that is after batches 0 .. b - k - 1; a draw that looked at
anything later would depend on timing. So the sequence of prompts is a function of (seed, the scores), whatever the
fleet's speed, and a run resumed at batch v draws what the uninterrupted run drew. One that goes on with another k, seed
or size of batches draws by those from batch v on; what it knows of each prompt stays.

The fleet's thread draws and the trainer's records, so each of these holds the lock.

Left out on purpose: difficulty pools, pass-rate targets.
"""

import dataclasses
import threading
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import numpy as np

from scalerl_jax.config import CurriculumConfig
from scalerl_jax.environments.base import Stratum

NEVER = np.iinfo(np.int64).max  # the batch in which a prompt not yet retired was retired
_UNIFORM = 5  # a stream of random numbers, beside those of the environments


class NoPromptLeft(ValueError):
    """Every prompt is retired; the message is one line."""


class OtherPrompts(ValueError):
    """A checkpoint's history is of `before` prompts that are not the `now` prompts there are."""

    def __init__(self, before: int, now: int):
        super().__init__(
            "the training rows are not those that the checkpoint was made with "
            f"({before:,} prompts then, {now:,} now), and the history of each is kept by its place"
        )
        self.before, self.now = before, now


@dataclasses.dataclass
class _History:
    """What batches `start` and later have shown of each prompt."""

    start: int
    retired_in: np.ndarray  # [prompts] int64, the batch whose scores retired it
    groups: np.ndarray  # [prompts] int64, how many it has had
    correct: np.ndarray  # [prompts, window] int64, completions of the last ones
    total: np.ndarray  # [prompts, window] int64

    @classmethod
    def new(cls, start: int, *, prompts: int, window: int) -> "_History":
        zeros = np.zeros((prompts, window), np.int64)
        return cls(start, np.full(prompts, NEVER), np.zeros(prompts, np.int64), zeros, zeros.copy())

    def copy(self) -> "_History":
        arrays = (self.retired_in, self.groups, self.correct, self.total)
        return _History(self.start, *(array.copy() for array in arrays))


@dataclasses.dataclass
class _Place:
    """How far the draws have come, batch by batch: what a resumed run goes on from."""

    epochs: np.ndarray  # [strata, 2] int64: permutation in use, how much of it is drawn or skipped
    credit: np.ndarray  # [strata] float64: draws that it is behind its share

    def copy(self) -> "_Place":
        return _Place(self.epochs.copy(), self.credit.copy())


class Curriculum:
    """The draw order of the prompts that the strata divide.

    Args:
        k: largest staleness of a group, in batches.
        groups_per_batch: groups of one update.
        seed: the run's.
        digest: of the prompts, so that a checkpoint's history is not taken for that of others.
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
        # As it is written: 0.55 of 100 completions are 55, and a little more in floats.
        self._retired_at = Fraction(str(config.no_positive_resampling_at))
        self._weights = np.asarray([stratum.weight for stratum in self._strata], np.float64)
        self._histories = [_History.new(0, prompts=self._prompts, window=config.window)]  # in order of start
        self._recorded = 0  # batches 0 .. recorded-1 are in the history
        self._begin_at(0, _Place(np.zeros((len(self._strata), 2), np.int64), np.zeros(len(self._strata))))

    def _begin_at(self, batch: int, place: _Place) -> None:
        self._next_group = batch * self._groups
        self._place = place
        self._orders = [self._permutation(s, int(epoch)) for s, (epoch, _) in enumerate(place.epochs)]
        self._starts = {batch: place.copy()}  # batch -> the place before its first draw
        self._left: list[np.ndarray] = []  # of each stratum, the prompts that the batch being drawn may have

    def draw(self, n: int) -> int:
        """The prompt of group n; n must be the number after the last one drawn.

        Raises NoPromptLeft when every prompt is retired, and the run is to end then.
        """
        with self._lock:
            assert n == self._next_group, f"group {n} drawn out of order, {self._next_group} comes next"
            batch = n // self._groups
            assert self._recorded >= batch - self._k, f"group {n} drawn before batch {batch - self._k - 1} was recorded"
            if n % self._groups == 0:
                self._starts[batch] = self._place.copy()
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
        """Which prompts its draws may have: the history that they see is the same for all of them."""
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
        while True:  # it ends: one of them is not retired
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
        """Enters the outcomes of a trained batch: (prompt, correct, total) per group, batches in order.

        `total` is every completion asked for: an excluded one counts as wrong.
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
        """How many prompts the outcomes recorded so far have retired."""
        with self._lock:
            return int((self._history_of(max(0, self._recorded - 1)).retired_in != NEVER).sum())

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint after the last recorded batch keeps: the draw order as of the start of the batch after it.

        Draws made ahead for later batches are not part of it: a resumed run makes them again, and gets the same.
        """
        with self._lock:
            batch = self._recorded
            place = self._starts.get(batch)
            if place is None:
                assert self._next_group == batch * self._groups, (
                    f"batch {batch} starts before batch {batch - 1} was drawn"
                )
                place = self._place
            place, history = place.copy(), self._history_of(max(0, batch - 1)).copy()
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
        """Goes on from `state`; the next draw is the first of its batch.

        k, groups and seed may be others: the run's config says whether they may. Raises OtherPrompts, and ValueError
        where the prompts are the same but divided otherwise.
        """
        before, now = np.asarray(state["identity"]).tolist(), self._identity()
        if before[0] != now[0] or before[4:] not in ([], now[4:]):
            raise OtherPrompts(before[0], now[0])
        cursor = [int(value) for value in state["cursor"]]
        history = _History.new(0, prompts=self._prompts, window=self._config.window)
        history.retired_in = np.array(state["retired_in"], np.int64)
        place = self._place
        if "epochs" not in state:  # of a release that had one stratum, and looked at one group of a prompt
            place.epochs = np.asarray([cursor[1:]], np.int64)
        else:
            history.start = cursor[1]
            history.groups = np.array(state["history_groups"], np.int64)
            for name in ("correct", "total"):
                saved = np.array(state[f"history_{name}"], np.int64)
                setattr(history, name, _latest(saved, history.groups, self._config.window))
            place = _Place(np.array(state["epochs"], np.int64), np.array(state["credit"], np.float64))
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
    """The latest of [prompts, another window] values as [prompts, window], each at its group's number modulo that."""
    if saved.shape[1] == window:
        return saved
    found = np.zeros((len(saved), window), np.int64)
    for back in range(1, min(window, saved.shape[1]) + 1):
        had = np.flatnonzero(groups >= back)
        number = groups[had] - back
        found[had, number % window] = saved[had, number % saved.shape[1]]
    return found
