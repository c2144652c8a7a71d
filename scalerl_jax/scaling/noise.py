"""The noise of an evaluation's score around the policy's true score, from pass counts or from the scatter.

With the passes of every prompt, the sampling noise of a score on *these* prompts is known: each prompt contributes
p (1 - p) / (G - 1), without bias. With totals only, R (1 - R) / N is an upper bound, since the differences between
prompts are not known (prompts that always or never pass have no noise). Without counts only the residuals are used. In
all three cases the residuals contribute: the noise variance is that of the counts times a dispersion

    phi = (nu_0 + Q / variance) / (nu_0 + degrees of freedom)

i.e. the counts weigh as much as nu_0 residuals, and intervals use Student's t with both.
"""

import dataclasses

import numpy as np

BELIEF_PROMPTS = 10.0  # nu_0 with the passes of every prompt
BELIEF_TOTALS = 4.0  # nu_0 with totals only


@dataclasses.dataclass(frozen=True)
class Counts:
    """Passes and trials of each evaluation by prompt; a single column holds totals."""

    passes: np.ndarray  # [N, prompts]
    trials: np.ndarray  # [N, prompts]

    @property
    def per_prompt(self) -> bool:
        return self.passes.shape[1] > 1 and bool(np.all(self.trials[self.trials > 0] > 1))

    @property
    def total(self) -> np.ndarray:
        """Trials of each evaluation, [N]."""
        return self.trials.sum(axis=1)

    def rows(self, chosen: np.ndarray) -> "Counts":
        return Counts(self.passes[chosen], self.trials[chosen])

    def score(self) -> np.ndarray:
        """Mean over prompts of passes / trials, [N]; prompts without a trial do not count."""
        asked = self.trials > 0
        return np.sum(self.passes / np.where(asked, self.trials, 1), axis=1) / asked.sum(axis=1)

    def variance(self) -> np.ndarray:
        """Variance of the score of each evaluation with fixed prompts, [N], above 0."""
        total = self.total
        # Never 0, even if all passed: the rule of succession bounds what N trials without a failure still allow.
        shrunk = (self.passes.sum(axis=1) + 1) / (total + 2)
        floor = shrunk * (1 - shrunk) / total
        if not self.per_prompt:
            return floor
        asked = self.trials > 0
        trials = np.where(asked, self.trials, 2)
        rate = self.passes / trials
        fixed = np.sum(np.where(asked, rate * (1 - rate) / (trials - 1), 0.0), axis=1) / asked.sum(axis=1) ** 2
        return np.maximum(fixed, 0.05 * floor)


def read_counts(counts, points: int) -> Counts | None:
    """Accepts (passes, trials), each [N] or [N, prompts] (trials also a number), or an array [N, 2].

    Raises ValueError naming the row where passes and trials are inconsistent.
    """
    if counts is None or isinstance(counts, Counts):
        return counts
    if isinstance(counts, np.ndarray) and counts.ndim == 2 and counts.shape[1] == 2:
        counts = counts.T
    if len(counts) != 2:
        raise ValueError("counts: expected (passes, trials), or an array of two columns, passes and trials")
    passes, trials = counts
    passes = np.asarray(passes, np.float64)
    if passes.ndim not in (1, 2) or len(passes) != points:
        raise ValueError(f"counts: passes have shape {passes.shape}, but there are {points} points")
    trials = np.asarray(trials, np.float64)
    if trials.ndim == 1 and passes.ndim == 2 and len(trials) == points:
        trials = trials[:, None]
    if trials.ndim > passes.ndim:
        raise ValueError(f"counts: trials have shape {trials.shape}, passes {passes.shape}")
    passes, trials = np.broadcast_arrays(passes, trials)
    wrong = ~((passes >= 0) & (passes <= trials) & np.isfinite(trials))
    if wrong.any():
        row = int(np.argwhere(wrong)[0][0])
        raise ValueError(f"counts: row {row}: passes must be between 0 and the trials")
    if passes.ndim == 1:
        passes, trials = passes[:, None], trials[:, None]
    empty = trials.sum(axis=1) == 0
    if empty.any():
        raise ValueError(f"counts: row {int(np.argmax(empty))}: no trials")
    return Counts(np.array(passes), np.array(trials))
