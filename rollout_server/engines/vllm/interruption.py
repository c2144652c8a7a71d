"""vLLM's side of the interruption: while the phrase is forced, its next token is the only one that can be sampled.

Runs in vLLM's worker processes. A request that thinks carries its ThinkingBudget in SamplingParams.extra_args. Each
step the budget advances over the new tokens, and if the next token is forced all other logits become -inf. The request
keeps its key/value cache, and vLLM reports log-probability 0 for forced tokens. The server tracks the same tokens with
its own budget, so nothing has to be sent back.

Requires vLLM's first model runner and synchronous scheduling: only there are all tokens up to the last step known.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from rollout_server.engines.thinking_budget import ThinkingBudget

KEY = "scalerl_thinking_budget"  # in extra_args: the arguments of ThinkingBudget


class _Follower:
    """The budget of one request. After a preemption vLLM makes a new one, which reads all tokens from the start."""

    def __init__(self, arguments: dict[str, Any]):
        self._budget = ThinkingBudget(**arguments)
        self._taken = 0

    def __call__(self, output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Forces a token if due. logits: [vocabulary] of the next token."""
        while self._taken < len(output_ids) and not self._budget.finish:
            self._budget.advance(output_ids[self._taken])
            self._taken += 1
        token = self._budget.forced
        if token is not None:
            logits.fill_(-torch.inf)
            logits[token] = 0.0
        return logits


class ForcedPhrase(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> _Follower | None:
        arguments = (params.extra_args or {}).get(KEY)
        return _Follower(arguments) if arguments else None
