"""Aggregation as one number per loss token (arXiv 2510.13786, section 3.2).

    prompt   1 / (P T_p)        T_p loss tokens of the prompt's counted completions, P surviving prompts
    sample   1 / (P G_p |y_i|)  G_p counted completions of the prompt, |y_i| loss tokens of the completion
    token    1 / (all loss tokens)

A completion without loss tokens has no mean of its own: it is none of G_p, and a prompt of nothing else none of P.

The loss is then a plain sum over tokens, so that no packing, sharding or micro-batching can change it.
"""

import numpy as np


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
