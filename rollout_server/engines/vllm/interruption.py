"""vLLM's side of the interruption: where the phrase is due, its token is the only one that can be sampled.

Runs in vLLM's worker processes. A request that thinks carries its ThinkingBudget in SamplingParams.extra_args; each
step the tokens that came since the last one are taken, and where the next is forced all other logits become -inf. The
request goes on with its key/value cache, and vLLM reports log-probability 0 for what was forced. The server follows the
same tokens with a budget of its own, so nothing has to come back from here.

Needs vLLM's first model runner and synchronous scheduling: only there are all tokens up to the last step known.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from rollout_server.engines.thinking_budget import ThinkingBudget

KEY = "scalerl_thinking_budget"  # in extra_args: the arguments of ThinkingBudget


class _Follower:
    """One request. Rebuilt, with all its tokens still to be read, where vLLM preempted and resumed it."""

    def __init__(self, arguments: dict[str, Any]):
        self._budget = ThinkingBudget(**arguments)
        self._taken = 0

    def __call__(self, output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """logits [vocabulary] of the next token."""
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
