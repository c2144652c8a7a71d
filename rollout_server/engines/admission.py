"""What an engine could never serve, however free it was: the widths of a request, and token ids."""

import numpy as np

from rollout_server.engines.engine import EngineInfo
from scalerl_jax.contract.codec import GroupRequest, check_sampling

# The widest a request may be; fixed, because an engine that compiles its shapes has them in there.
LONGEST_PHRASE = 128
LONGEST_END = 16
MOST_STOPS = 16


def check_request(request: GroupRequest, info: EngineInfo) -> None:
    """Raises ValueError where this engine could never serve it, however free it was."""
    maximum_tokens, completions = info.maximum_tokens, info.slots + info.queue_capacity
    sampling, interruption = request.sampling, request.interruption
    name = f"group {request.group_id!r}"
    if not len(request.prompt) or not request.completions:
        raise ValueError(f"{name}: it has no prompt, or asks for no completion")
    if len(request.prompt) >= maximum_tokens:
        raise ValueError(f"{name}: a prompt of {len(request.prompt)} tokens, and {maximum_tokens} with the completion")
    if len(request.completions) > completions:
        raise ValueError(f"{name}: {len(request.completions)} completions, and slots and queue hold {completions}")
    check_sampling(name, sampling)
    lists = {
        "prompt": (request.prompt, maximum_tokens),
        "phrase": (interruption.text_token_ids, LONGEST_PHRASE),
        "end_of_thinking": (interruption.end_of_thinking_token_ids, LONGEST_END),
        "stop tokens": (sampling.stop_token_ids, MOST_STOPS),
    }
    for what, (ids, longest) in lists.items():
        if len(ids) > longest:
            raise ValueError(f"{name}: {len(ids)} tokens of {what}, at most {longest} are possible")
        _check_ids(f"{name}: token ids of {what}", np.asarray(ids, np.int64), info)


def check_score(token_ids: np.ndarray, info: EngineInfo) -> None:
    """Raises ValueError on tokens that cannot be scored."""
    if not 0 < len(token_ids) <= info.maximum_tokens:
        raise ValueError(f"{len(token_ids)} tokens to score, not within 1 and {info.maximum_tokens}")
    _check_ids("token ids to score", token_ids, info)


def _check_ids(what: str, ids: np.ndarray, info: EngineInfo) -> None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < info.vocabulary):
        raise ValueError(f"{what} outside [0, {info.vocabulary})")
