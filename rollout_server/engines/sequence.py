"""One completion being decoded, from the queue to its end: its tokens, and the spans made from them.

    token_ids  5 9 9 1 2 6 8        as they arrive, a chunk or a token at a time
    steps      3 3 3 3 4 4 4        of the weights that sampled (or fed) them   -> versions  (3, 0, 4) (4, 4, 7)
    forced     . . . x x . .        fed, whatever would have been sampled       -> forced    (3, 5)

The engine decides where the thinking budget is tracked. An engine that decodes inside jit tracks it on the device, and
a recording already contains its effect: both call `extend`. An engine whose tokens only arrive on the host calls
`extend_within_budget`, which checks each token.
"""

import array
import dataclasses
import functools
import itertools
import time
from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from rollout_server.engines.thinking_budget import ThinkingBudget
from scalerl_jax.contract.codec import Completion, CompletionRequest, GroupRequest


@dataclasses.dataclass
class Counters:
    """What an engine has done since its start; see StatusReply in rollout.proto for the meaning of each."""

    sampled_tokens: int = 0
    forced_tokens: int = 0
    prefill_tokens: int = 0
    busy_seconds: float = 0.0
    pause_seconds: float = 0.0
    reused_tokens: int = 0


class Sequence:
    """The completion `wanted` of `request`. Its tokens are counted in `counters`; prompt and completion together have
    at most `maximum_tokens`."""

    def __init__(self, request: GroupRequest, wanted: CompletionRequest, *, counters: Counters, maximum_tokens: int):
        self.request, self.wanted = request, wanted
        self.asked, self.began = time.monotonic(), 0.0  # when it entered the queue, and a slot
        self.finish_reason = ""  # "stop" | "length" once it is over
        self.prefix_step: int | None = None  # of the version that computed all keys and values of its prompt
        self._counters, self._maximum_tokens = counters, maximum_tokens
        self._token_ids, self._logprobs = array.array("i"), array.array("f")
        self._steps, self._forced = array.array("q"), array.array("b")
        self._experts: list[Any] = []  # of the tokens fed: first the prompt's, then a part at a time

    @property
    def length(self) -> int:
        """Number of tokens so far."""
        return len(self._token_ids)

    @functools.cached_property
    def budget(self) -> ThinkingBudget:
        arguments = ThinkingBudget.arguments(self.request, self.wanted, maximum_tokens=self._maximum_tokens)
        return ThinkingBudget(**arguments)

    def extend(self, token_ids: Many[int], logprobs: Many[float], forced: Many[bool], step: int) -> None:
        """Appends the next tokens, sampled (fed, where forced) by the weights of version `step`."""
        self._token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        self._forced.extend(forced)
        self._steps.extend([step] * len(token_ids))
        fed = sum(forced)
        self._counters.forced_tokens += fed
        self._counters.sampled_tokens += len(token_ids) - fed

    def extend_within_budget(self, token_ids: Many[int], logprobs: Many[float], step: int) -> None:
        """The same, but the thinking budget decides which tokens were forced and where the completion ends; tokens
        after its end are dropped."""
        for token, logprob in zip(token_ids, logprobs, strict=True):
            if not self.finish_reason:
                forced = self.budget.advance(token)
                self.extend([token], [0.0 if forced else logprob], [forced], step)
                self.finish_reason = self.budget.finish

    def begin_experts(self, of_prompt: Any, known: int) -> None:
        """Starts the record of experts with the prompt's; an earlier record is dropped. Experts of later tokens come by
        `fed`. of_prompt: [known or more, layers, experts per token]; may be on a device, and is fetched at the end."""
        self._experts = [(of_prompt, known)]

    def fed(self, experts: np.ndarray) -> None:
        """Appends the experts [tokens, layers, experts per token] of the tokens fed next."""
        self._experts.append((experts, len(experts)))

    def tokens_fed(self) -> np.ndarray:
        """[tokens] int32: prompt and completion without the last token."""
        return np.concatenate([self.request.prompt, np.array(self._token_ids[:-1], np.int32)])

    def only_step(self) -> int | None:
        """The step of the version that computed all of its keys and values; None if several did."""
        steps = {self.prefix_step, *self._steps}
        return steps.pop() if len(steps) == 1 else None

    def recorded_experts(self) -> np.ndarray | None:
        if not self._experts:
            return None
        recorded = np.concatenate([np.asarray(experts)[:known] for experts, known in self._experts])
        fed = len(self.request.prompt) + len(self._token_ids) - 1
        assert len(recorded) >= fed, (len(recorded), fed)
        return recorded[:fed]

    def completion(self) -> Completion:
        steps, forced = np.array(self._steps), np.array(self._forced)
        return Completion(
            incarnation=self.request.incarnation,
            group_id=self.request.group_id,
            index=self.wanted.index,
            token_ids=np.array(self._token_ids),
            logprobs=np.array(self._logprobs),
            versions=tuple((int(steps[start]), start, end) for start, end in _runs(steps)),
            forced=tuple((start, end) for start, end in _runs(forced) if forced[start]),
            finish_reason=self.finish_reason,
            queued_seconds=self.began - self.asked,
            sampling_seconds=time.monotonic() - self.began,
            experts=self.recorded_experts(),
        )


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    """[start, end) of each stretch of equal values."""
    edges = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return list(itertools.pairwise(edges))
