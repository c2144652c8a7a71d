"""From rewards to advantages (arXiv 2510.13786, sections 2 and 4; MaxRL: arXiv 2602.02710).

    A_i  = r_i - mean_j r_j                                 over the counted completions of the prompt
    Ahat = A / sqrt(mean of A^2 over the surviving batch)   `batch`: ScaleRL
         = A / (std of the prompt + 1e-6)                   `prompt`: GRPO
         = A                                                `none`: Dr. GRPO
         = A / mean_j r_j                                   `maxrl`, with r_i = 1 if correct, else 0

MaxRL is for binary rewards: it uses the verifier's `correct` in place of the reward, and a prompt without a correct
completion has advantages of 0. Rare successes count most: one correct completion of G has the advantage G - 1.

By turn, for episodes whose steps have rewards (`credit`): turn t of completion i has R_it, the rewards of that turn and
all after it, in place of r_i, and the means and scales above are over the completions that have a turn t.

Computed on the host in float64: these numbers are settled before packing, sharding and micro-batching.

Aggregation as one number per loss token (arXiv 2510.13786, section 3.2).

    prompt   1 / (P T_p)        T_p loss tokens of the prompt's counted completions, P surviving prompts
    sample   1 / (P G_p |y_i|)  G_p counted completions of the prompt, |y_i| loss tokens of the completion
    token    1 / (all loss tokens)

A completion without loss tokens has no mean: it is not counted in G_p, and a prompt of only such ones not in P.

The loss is then a plain sum over tokens, so that no packing, sharding or micro-batching can change it.
"""

import numpy as np

NORMALIZATIONS = ("batch", "prompt", "none", "maxrl")
_PROMPT_EPSILON = 1e-6  # of GRPO's division; the paper does not give one


def advantages(
    rewards: np.ndarray,
    correct: np.ndarray,
    counted: np.ndarray,
    *,
    normalization: str = "batch",
    filter_zero_variance: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages of a batch, and which prompts survive.

    Args:
      rewards: [prompts, group] float.
      correct: [prompts, group] bool, as the verifier decided (never a shaped reward).
      counted: [prompts, group] bool; False where a completion is excluded (or was never requested).
      normalization: one of NORMALIZATIONS.
      filter_zero_variance: drop prompts whose counted completions are all correct or all wrong.

    Returns: (advantages [prompts, group] float64, 0 where not counted or not surviving; survives [prompts] bool).
    Raises ValueError on an unknown normalization.
    """
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization {normalization!r} is not one of {', '.join(NORMALIZATIONS)}")
    count = counted.sum(axis=1)
    correct_count = (correct & counted).sum(axis=1)
    survives = (count >= 2) & (correct_count > 0) & (correct_count < count) if filter_zero_variance else count >= 1
    kept = counted & survives[:, None]
    return _relative(correct if normalization == "maxrl" else rewards, kept, normalization), survives


def turn_advantages(
    returns: np.ndarray, counted: np.ndarray, survives: np.ndarray, *, normalization: str
) -> np.ndarray:
    """Advantages of each turn.

    Args:
      returns: [prompts, group, turns] float, the rewards of a turn and of all later turns.
      counted: [prompts, group, turns] bool; False if a completion is excluded, or has no such turn.
      survives: [prompts] bool, as returned by `advantages`.
      normalization: one of NORMALIZATIONS except maxrl.

    Returns: [prompts, group, turns] float64, 0 where not counted or not surviving.
    """
    by_turn = np.swapaxes(returns, 1, 2)  # each turn of a prompt is treated as `advantages` treats a prompt
    shape, group = by_turn.shape, returns.shape[1]
    kept = np.swapaxes(counted & survives[:, None, None], 1, 2).reshape(-1, group)
    return np.swapaxes(_relative(by_turn.reshape(-1, group), kept, normalization).reshape(shape), 1, 2)


def _relative(rewards: np.ndarray, kept: np.ndarray, normalization: str) -> np.ndarray:
    """Each row relative to its own mean: [rows, group] float64, 0 where not kept. rewards, kept: [rows, group]."""
    count = kept.sum(axis=1)
    rewards = np.where(kept, rewards, 0.0).astype(np.float64)
    mean = rewards.sum(axis=1, keepdims=True) / np.maximum(count, 1)[:, None]
    # The mean of equal rewards is off by rounding, which a division by that error's size would turn into order 1.
    differ = np.where(kept, rewards, -np.inf).max(axis=1) > np.where(kept, rewards, np.inf).min(axis=1)
    centred = np.where(kept & differ[:, None], rewards - mean, 0.0)
    if normalization == "batch" and kept.any():
        scale = np.sqrt((centred**2).sum() / kept.sum())
        centred = centred / scale if scale > 0 else centred
    elif normalization == "prompt":
        std = np.sqrt((centred**2).sum(axis=1, keepdims=True) / np.maximum(count, 1)[:, None])
        centred = centred / (std + _PROMPT_EPSILON)
    elif normalization == "maxrl":
        centred = centred / np.where(mean > 0, mean, 1.0)
    return centred


def token_weights(loss_tokens: np.ndarray, counted: np.ndarray, survives: np.ndarray, aggregation: str) -> np.ndarray:
    """The weight of each loss token of each completion.

    Args:
      loss_tokens: [prompts, group] int, sampled (not forced) tokens.
      counted: [prompts, group] bool.
      survives: [prompts] bool.
      aggregation: "prompt", "sample" or "token".

    Returns: [prompts, group] float64, 0 where a completion does not count. Raises ValueError on another aggregation.
    """
    kept = counted & survives[:, None] & (loss_tokens > 0)
    tokens = np.where(kept, loss_tokens, 0).astype(np.float64)
    prompts = kept.any(axis=1).sum()
    if aggregation == "prompt":
        share = prompts * tokens.sum(axis=1, keepdims=True) * np.ones_like(tokens)
    elif aggregation == "sample":
        share = prompts * kept.sum(axis=1, keepdims=True) * tokens
    elif aggregation == "token":
        share = np.full_like(tokens, tokens.sum())
    else:
        raise ValueError(f"aggregation {aggregation!r} is not prompt, sample or token")
    return np.where(kept, 1.0 / np.where(kept, share, 1.0), 0.0)
