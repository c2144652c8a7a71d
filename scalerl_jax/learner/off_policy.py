"""How far the policy that is trained is from those that sampled the batch, from the log-probs of its loss tokens.

    d_t = logp_train_t - logp_gen_t,  rho_t = exp(d_t)                      of loss token t of completion i
    mismatch_p99                      99th percentile of |d_t| over all loss tokens, exact
    effective_sample_size_sequence    ESS of the N weights w_i = prod_t rho_t, which importance sampling of whole
                                      completions would give them
    effective_sample_size_geometric   ESS of the N weights w_i = exp(mean_t d_t), GSPO's ratio
    ESS(w) = (sum w)^2 / (N sum w^2)  Kish's, as a share of the N completions: from 1/N to 1, 1 where all weigh alike

The variance of log prod rho grows with the length, so the first ESS falls to a few completions in a long-reasoning run
that is well; the second one has no such slope. Weights are compared as logarithms with the greatest taken away: a
product of ten thousand ratios fits no float.

Everything else of the kind is a sum that comes with the gradient (objective/losses.py). These are no sums: a percentile
needs the tokens, a completion's product its whole row. The log-probs are on the host in any case, since each is judged
before the update is applied; so the device computes nothing more, and how the batch was packed has no part in it.
"""

from collections.abc import Sequence

import numpy as np

from scalerl_jax.learner.packing import Segment

# As in the losses: a token that one side finds impossible is one bad token, and not the end of the arithmetic.
_MAXIMUM_LOG_RATIO = 20.0


def off_policy_metrics(segments: Sequence[Segment], logprobs: Sequence[np.ndarray]) -> dict[str, float]:
    """Of the completions that are trained on; {} without any.

    Args:
        logprobs: the trainer's, of each segment's tokens: [t] float32; what comes after the segments' is left out.
    """
    differences = [
        (ours - segment.generator_logprobs)[segment.weights > 0]  # [loss tokens] float32
        for segment, ours in zip(segments, logprobs, strict=False)
    ]
    assert len(differences) == len(segments) and all(map(len, differences)), "a segment has a loss token"
    if not differences:
        return {}
    clipped = [np.clip(part, -_MAXIMUM_LOG_RATIO, _MAXIMUM_LOG_RATIO) for part in differences]
    totals = np.array([part.sum(dtype=np.float64) for part in clipped])
    return {
        "mismatch_p99": float(np.quantile(np.abs(np.concatenate(differences)), 0.99)),
        "effective_sample_size_sequence": effective_share(totals),
        "effective_sample_size_geometric": effective_share(totals / [len(part) for part in clipped]),
    }


def effective_share(log_weights: np.ndarray) -> float:
    """Kish's effective sample size of weights given by their logarithms, [n] float64, as a share of their number."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
