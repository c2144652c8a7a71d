"""How evenly the router spreads tokens over experts: numbers of one step, for metrics.jsonl.

Of each layer, with n_e the tokens that came to expert e (padding left out):

    load   = max_e n_e / mean_e n_e          1: all alike; E / k: k experts get everything
    unused = share of the experts with n_e = 0
    moved  = share of the pairs (token, expert) of router replay that the router itself would not have made

An expert that nothing comes to no longer learns; a load that rises says that the router collapses, and on a mesh whose
axis `expert` is above 1 it is the time that the fullest device takes. Nothing here acts on the router.
"""

from typing import Any

import numpy as np

_MOST_LISTED = 4096  # counts in a row of metrics.jsonl; of larger models only each layer's load is listed


def expert_load(tokens: np.ndarray, moved: np.ndarray | None = None) -> dict[str, Any]:
    """Numbers, and lists of them by layer.

    tokens: [layers, experts], of one step. moved: [layers] pairs; None: there is no router replay.
    """
    mean = np.maximum(tokens.mean(axis=1), 1e-9)
    load = tokens.max(axis=1) / mean
    out: dict[str, Any] = {
        "expert_load": float(load.mean()),
        "expert_load_max": float(load.max()),
        "experts_unused": float((tokens == 0).mean()),
        "expert_load_by_layer": [round(float(value), 4) for value in load],
    }
    if moved is not None:
        out["experts_moved"] = float(moved.sum() / max(1.0, tokens.sum()))
    if tokens.size <= _MOST_LISTED:
        out["expert_tokens"] = tokens.astype(np.int64).tolist()
    return out
