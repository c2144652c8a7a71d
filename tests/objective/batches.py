"""Random packed rows, and random batches of completions, that the losses and whole recipes are tested on."""

import dataclasses

import numpy as np

from tests.objective import reference

ROWS, LENGTH = 3, 28
NAMES = ("logp_train", "logp_gen", "advantages", "weights", "segment_ids")


def thresholds(options) -> list[float]:
    """Values of the ratio at which something jumps."""
    out = [1 - options.clip_low, 1 + options.clip_high, options.max_ratio, options.icepop_low, options.icepop_high]
    return [value for value in [*out, options.tis_cap] if value > 0]


def away_from(logp_gen: np.ndarray, logp_train: np.ndarray, options) -> np.ndarray:
    """logp_gen, moved where float32 and float64 might disagree on which side of a threshold a ratio is."""
    for value in thresholds(options):
        near = np.abs(logp_train - logp_gen - np.log(value)) < 1e-4
        logp_gen = np.where(near, logp_gen - 1e-3, logp_gen)
    return logp_gen.astype(np.float32)


def rows(seed: int, options, *, spread: float = 0.4, extremes: float = 0.0) -> dict[str, np.ndarray]:
    """Packed rows as policy_loss takes them: segments of 1 to 9 positions, padding, positions without loss.

    extremes: what stands in log-probs and advantages wherever the weight is 0.
    """
    rng = np.random.default_rng(seed)
    shape = (ROWS, LENGTH)
    segment_ids, advantages = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for r in range(ROWS):
        start, number = 0, 1
        while start < LENGTH - 4:
            stop = min(start + int(rng.integers(1, 10)), LENGTH - int(rng.integers(0, 4)))
            segment_ids[r, start:stop] = number
            advantages[r, start:stop] = rng.normal()
            start, number = stop, number + 1
    loss_token = (segment_ids > 0) & (rng.random(shape) > 0.3)
    weights = np.where(loss_token, rng.uniform(0.01, 1, shape), 0).astype(np.float32)
    logp_train = rng.uniform(-6, -0.01, shape).astype(np.float32)
    logp_gen = away_from(logp_train - spread * rng.normal(size=shape).astype(np.float32), logp_train, options)
    beside = {"reference": rng.uniform(-6, -0.01, shape)} if options.reference_kl else {}
    beside |= {"entropy": rng.uniform(0, 3, shape)} if options.entropy_bonus else {}
    if extremes:
        sign = np.where(rng.random(shape) < 0.5, 1, -1)
        logp_train, logp_gen, advantages = (
            np.where(loss_token, x, (s * extremes * sign).astype(np.float32))
            for x, s in ((logp_train, 1), (logp_gen, -1), (advantages, 1))
        )
    out = dict(zip(NAMES, (logp_train, logp_gen, advantages, weights, segment_ids), strict=True))
    out |= {name: np.where(loss_token, x, extremes or x).astype(np.float32) for name, x in beside.items()}
    return out


def batch(seed: int, options, *, prompts: int = 6, group: int = 4) -> reference.Batch:
    """Groups with right and wrong answers, excluded completions, forced tokens, prompts without variance."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(prompts):
        pass_rate = rng.choice([0.0, 0.5, 1.0], p=[0.2, 0.6, 0.2])
        completions = []
        for _ in range(group):
            tokens = int(rng.integers(2, 8))
            train = rng.uniform(-6, -0.01, tokens).astype(np.float32)
            gen = away_from(train - 0.3 * rng.normal(size=tokens).astype(np.float32), train, options)
            sampled = np.arange(tokens) != rng.integers(0, 2 * tokens)  # in half of them one token is forced
            right = bool(rng.random() < pass_rate)
            completions.append(
                reference.Completion(
                    reward=1.0 if right else -1.0,
                    right=right,
                    excluded=bool(rng.random() < 0.15),
                    train=train.tolist(),
                    gen=np.where(sampled, gen, 0).tolist(),
                    sampled=sampled.tolist(),
                )
            )
        out.append(completions)
    return out


@dataclasses.dataclass(frozen=True)
class Arrays:
    """A batch as the package takes it: [prompts, group]."""

    rewards: np.ndarray
    right: np.ndarray
    counted: np.ndarray
    loss_tokens: np.ndarray

    @staticmethod
    def of(batch: reference.Batch) -> "Arrays":
        return Arrays(
            rewards=np.array([[y.reward for y in group] for group in batch]),
            right=np.array([[y.right for y in group] for group in batch]),
            counted=np.array([[not y.excluded for y in group] for group in batch]),
            loss_tokens=np.array([[sum(y.sampled) for y in group] for group in batch]),
        )
