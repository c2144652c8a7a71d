"""Checks a completion before it is used: it must answer the request, by a version that was allowed to sample it.

The codec has checked the message by itself: as many log-probs as tokens, finite, none above 0, spans that cover the
tokens. Here it is checked against the request. A failure means that the server breaks the contract; what it sent is
never scored, stored or trained on.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

from scalerl_jax.contract.codec import Completion, GroupRequest


class Routed(NamedTuple):
    """How a mixture of experts routes a token."""

    layers: int
    experts_per_token: int
    experts: int


def validate(
    completion: Completion, request: GroupRequest, *, newest: int, vocabulary: int, routed: Routed | None = None
) -> None:
    """Raises ValueError naming the completion and what is wrong with it.

    newest: the latest version that any server can hold. vocabulary: token ids are below it; 0: not known.
    routed: of the policy; None: it has no experts.
    """
    name = f"completion {completion.group_id!r}/{completion.index}"
    if completion.incarnation != request.incarnation or completion.group_id != request.group_id:
        raise ValueError(f"{name} of trainer {completion.incarnation} came for {request.group_id!r}")
    asked = {wanted.index: wanted for wanted in request.completions}.get(completion.index)
    if asked is None:
        raise ValueError(f"{name} was not asked for")

    for what, seconds in (("waiting", completion.queued_seconds), ("sampling", completion.sampling_seconds)):
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{name} says that its {what} took {seconds} s")

    steps = [step for step, _, _ in completion.versions]
    if min(steps) < request.minimum_step:
        raise ValueError(f"{name} was sampled by version {min(steps)}, older than {request.minimum_step}")
    if max(steps) > newest:
        raise ValueError(f"{name} was sampled by version {max(steps)}, and the newest there is is {newest}")
    if request.pinned_step is not None and set(steps) != {request.pinned_step}:
        raise ValueError(f"{name} was sampled by versions {steps}, pinned to {request.pinned_step}")

    tokens, phrase = completion.token_ids, np.array(request.interruption.text_token_ids, np.int32)
    if tokens.min() < 0 or (vocabulary and tokens.max() >= vocabulary):
        raise ValueError(f"{name} has tokens from {tokens.min()} to {tokens.max()}, of a vocabulary of {vocabulary}")
    most = request.most_tokens(asked)
    if len(tokens) > most:
        raise ValueError(f"{name} has {len(tokens)} tokens, its budgets and the phrase make {most}")
    if len(completion.forced) > 1:
        raise ValueError(f"{name} was interrupted {len(completion.forced)} times")
    for start, end in completion.forced:
        # The end of the cache may have truncated it.
        if not np.array_equal(tokens[start:end], phrase[: end - start]):
            raise ValueError(f"{name} has forced tokens that are not the interruption phrase")
    stops = request.sampling.stop_token_ids
    if completion.finish_reason == "stop" and stops and int(tokens[-1]) not in stops:
        raise ValueError(f"{name} has stopped, and its last token {tokens[-1]} is not one to stop at")
    if request.router_replay and routed is not None:
        _check_experts(name, completion.experts, len(request.prompt) + len(tokens) - 1, routed)


def _check_experts(name: str, experts: np.ndarray | None, fed: int, routed: Routed) -> None:
    if experts is None:
        raise ValueError(f"{name} does not tell its experts")
    wanted = (fed, routed.layers, routed.experts_per_token)
    if experts.shape != wanted:
        raise ValueError(f"{name} tells experts {list(experts.shape)}, and not {list(wanted)}")
    if experts.max() >= routed.experts:
        raise ValueError(f"{name} has expert {experts.max()}, of {routed.experts}")
    for one, other in itertools.combinations(range(routed.experts_per_token), 2):
        if (experts[..., one] == experts[..., other]).any():
            raise ValueError(f"{name} sends a token to one expert twice")
