"""Checks for requests that an engine could never serve, even when idle: their values, widths and token ids."""

import collections

import numpy as np

from rollout_server.engines.engine import EngineInfo
from scalerl_jax.contract import limits
from scalerl_jax.contract.codec import GroupRequest, ScoreRequest

# Limits on a request's widths; fixed, because they are shapes that an engine compiles.
LONGEST_PHRASE = 128
LONGEST_END = 16
MOST_STOPS = 16


def check_request(request: GroupRequest, info: EngineInfo) -> None:
    """Raises ValueError where this engine could never serve the request, even when idle."""
    maximum_tokens = info.maximum_tokens
    sampling, interruption = request.sampling, request.interruption
    name = f"group {request.group_id!r}"
    if not len(request.prompt):
        raise ValueError(f"{name}: the prompt is empty")
    if not request.completions:
        raise ValueError(f"{name}: no completion is asked for")
    check_places(request.group_id, len(request.completions), info)
    (twice, times), *_ = collections.Counter(wanted.index for wanted in request.completions).most_common(1)
    if times > 1:
        raise ValueError(f"{name}: completion {twice} is asked for twice in one request")
    lowest, highest = limits.TEMPERATURES
    # As float32, which the field is.
    if not np.float32(lowest) <= sampling.temperature <= highest:
        raise ValueError(f"{name}: temperature {sampling.temperature:g} is not within {lowest:g} and {highest:g}")
    if not np.float32(limits.SMALLEST_TOP_P) <= sampling.top_p <= 1:
        raise ValueError(f"{name}: top_p {sampling.top_p:g} is not within {limits.SMALLEST_TOP_P:g} and 1")
    if sampling.top_k < 0 or sampling.answer_budget < 1:
        raise ValueError(f"{name}: top_k is {sampling.top_k}, the answer budget {sampling.answer_budget}")
    phrase, end = interruption.text_token_ids, interruption.end_of_thinking_token_ids
    if phrase[len(phrase) - len(end) :] != end:
        raise ValueError(f"{name}: the interruption phrase does not end with end_of_thinking")
    if not phrase and any(wanted.thinking_budget for wanted in request.completions):
        raise ValueError(f"{name}: a thinking budget without an interruption phrase")
    if request.router_replay and not info.router_replay:
        raise ValueError(f"{name}: experts are asked for, and this server does not tell them")
    if len(request.prompt) >= maximum_tokens:
        raise ValueError(f"{name}: a prompt of {len(request.prompt)} tokens, and {maximum_tokens} with the completion")
    lists = {
        "prompt": (request.prompt, maximum_tokens),
        "phrase": (phrase, LONGEST_PHRASE),
        "end_of_thinking": (end, LONGEST_END),
        "stop tokens": (sampling.stop_token_ids, MOST_STOPS),
    }
    for what, (ids, longest) in lists.items():
        if len(ids) > longest:
            raise ValueError(f"{name}: {len(ids)} tokens of {what}, at most {longest} are possible")
        _check_ids(f"{name}: token ids of {what}", np.asarray(ids, np.int64), info)


def check_places(group: str, completions: int, info: EngineInfo) -> None:
    """Raises ValueError where slots and queue together cannot hold so many completions."""
    places = info.slots + info.queue_capacity
    if completions > places:
        raise ValueError(f"group {group!r}: {completions} completions, slots and queue hold {places}")


def check_score(request: ScoreRequest, info: EngineInfo) -> None:
    """Raises ValueError where this engine cannot score the request."""
    if not 0 < len(request.token_ids) <= info.maximum_tokens:
        raise ValueError(f"{len(request.token_ids)} tokens to score, not within 1 and {info.maximum_tokens}")
    for what, most in (("top ids", request.top_k), ("target ids", request.target_ids.shape[1])):
        if most > info.maximum_top_k:
            raise ValueError(f"{most} {what} a token, at most {info.maximum_top_k} are possible")
    _check_ids("token ids to score", request.token_ids, info)
    _check_ids("target ids that are not -1 and", request.target_ids[request.target_ids != -1], info)


def _check_ids(what: str, ids: np.ndarray, info: EngineInfo) -> None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < info.vocabulary):
        raise ValueError(f"{what} outside [0, {info.vocabulary})")
