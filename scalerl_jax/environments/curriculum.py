"""Which prompt group n is: epochs of seeded permutations, without the prompts that are already solved.

No-Positive-Resampling: a prompt with a group at or over `no_positive_resampling_at` is retired, and never drawn again.
Acting at the draw only, it does not touch a group already sampled.

    batch of group n            b = n // groups_per_batch
    history that a draw sees    batches 0 .. b - k - 1

A server may sample group n as soon as version b - k exists, that is after batches 0 .. b - k - 1; a draw that looked at
anything later would depend on timing. So the sequence of prompts is a function of (seed, the scores), whatever the
fleet's speed, and a run resumed at batch v draws what the uninterrupted run drew.

The fleet's thread draws and the trainer's records, so each of these holds the lock.

Left out on purpose: weights, difficulty pools, pass-rate targets.
"""

import threading
from collections.abc import Iterable, Mapping

import numpy as np

NEVER = np.iinfo(np.int64).max  # the batch in which a prompt not yet retired was retired


class NoPromptLeft(ValueError):
    """Every prompt is retired; the message is one line."""


class Curriculum:
    """The draw order of `prompts` prompts.

    Args:
        prompts: how many there are.
        no_positive_resampling_at: pass rate of a group at which its prompt is retired; above 1: never.
        k: largest lag of a group, in batches.
        groups_per_batch: groups of one update.
        seed: the run's.
    """

    def __init__(self, *, prompts: int, no_positive_resampling_at: float, k: int, groups_per_batch: int, seed: int):
        if prompts < 1:
            raise ValueError("there are no training prompts to draw from")
        self._lock = threading.Lock()
        self._prompts, self._retire_at, self._k = prompts, no_positive_resampling_at, k
        self._groups, self._seed = groups_per_batch, seed
        self._retired_in = np.full(prompts, NEVER, np.int64)  # [prompts] the batch whose scores retired it
        self._next_group = 0
        self._epoch, self._at = 0, 0  # permutation in use, and how much of it is drawn or skipped
        self._order = self._permutation(0)
        self._recorded = 0  # batches 0 .. recorded-1 are in the history
        self._starts = {0: (0, 0)}  # batch -> (epoch, at) before its first draw

    def draw(self, n: int) -> int:
        """The prompt of group n; n must be the number after the last one drawn.

        Raises NoPromptLeft when every prompt is retired.
        """
        with self._lock:
            assert n == self._next_group, f"group {n} drawn out of order, {self._next_group} comes next"
            batch = n // self._groups
            assert self._recorded >= batch - self._k, f"group {n} drawn before batch {batch - self._k - 1} was recorded"
            if n % self._groups == 0:
                self._starts[batch] = (self._epoch, self._at)
            seen = batch - self._k  # the draw sees the history of batches before this one
            skipped = 0
            while True:
                if self._at == self._prompts:
                    self._epoch, self._at = self._epoch + 1, 0
                    self._order = self._permutation(self._epoch)
                prompt = int(self._order[self._at])
                self._at += 1
                if self._retired_in[prompt] >= seen:
                    self._next_group = n + 1
                    return prompt
                skipped += 1
                # Two whole permutations hold every prompt at least once, wherever the first skip stood.
                if skipped >= 2 * self._prompts:
                    raise NoPromptLeft(
                        f"every prompt is retired: all {self._prompts} have a group with a pass rate of "
                        f"{self._retire_at:g} or more; the task is solved, or it has too few prompts"
                    )

    def record(self, batch: int, groups: Iterable[tuple[int, int, int]]) -> None:
        """Enters the outcomes of a trained batch: (prompt, correct, total) per group, batches in order.

        `total` is every completion asked for: an excluded one counts as wrong.
        """
        with self._lock:
            assert batch == self._recorded, f"batch {batch} recorded, {self._recorded} comes next"
            for prompt, correct, total in groups:
                assert 0 <= correct <= total and total > 0
                if correct >= self._retire_at * total:
                    self._retired_in[prompt] = min(self._retired_in[prompt], batch)
            self._recorded = batch + 1
            for old in [b for b in self._starts if b < self._recorded]:
                del self._starts[old]

    def retired(self) -> int:
        """How many prompts the outcomes recorded so far have retired."""
        with self._lock:
            return int((self._retired_in != NEVER).sum())

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint after the last recorded batch keeps: the draw order as of the start of the batch after it.

        Draws made ahead for later batches are not part of it: a resumed run makes them again, and gets the same.
        """
        with self._lock:
            batch = self._recorded
            if batch in self._starts:
                epoch, at = self._starts[batch]
            else:
                assert self._next_group == batch * self._groups, (
                    f"batch {batch} starts before batch {batch - 1} was drawn"
                )
                epoch, at = self._epoch, self._at
            return {
                "retired_in": self._retired_in.copy(),  # [prompts] int64
                "cursor": np.asarray([batch, epoch, at], np.int64),
                "identity": np.asarray([self._prompts, self._k, self._groups, self._seed], np.int64),
            }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Goes on from `state`; the next draw is the first of its batch. Raises ValueError for another run's state."""
        identity = [self._prompts, self._k, self._groups, self._seed]
        found = np.asarray(state["identity"]).tolist()
        if found != identity:
            raise ValueError(
                f"the checkpoint's curriculum has (prompts, k, groups, seed) = {found}, the config says {identity}"
            )
        batch, epoch, at = (int(value) for value in state["cursor"])
        self._retired_in = np.array(state["retired_in"], np.int64)
        self._recorded = batch
        self._next_group = batch * self._groups
        self._epoch, self._at = epoch, at
        self._order = self._permutation(epoch)
        self._starts = {batch: (epoch, at)}

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(self._prompts)
