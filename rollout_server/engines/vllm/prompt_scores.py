"""Scores of a prompt's tokens, of the likeliest ones and of given ones, from the hidden states of vLLM's own steps.

Runs in vLLM's worker processes. A score request carries its arguments in SamplingParams.extra_args (KEY). Each step
computes the head for its part of the prompt, a chunk at a time, and keeps the requested scores until the server
collects them. The server scores one sequence after another, so only the latest is kept.

vLLM's own prompt_logprobs makes a Python object of every number, and supports given tokens only in its newer model
runner, in which forced phrases do not work.
"""

from typing import Any

import numpy as np
import torch

# In extra_args: a dict of name, first and top_k, and `ids`, the bytes of codec.ScoreRequest.ids().
KEY = "scalerl_score"

CHUNK = 1024  # tokens whose logits are in memory at once

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]  # scored [n, 1 + k] float32, top ids [n, top_k] int32, log-probs


class PromptScores:
    def __init__(self, runner: Any):
        self._runner = runner
        self._kept: tuple[str, Arrays] | None = None
        # vLLM calls this in every step, with the hidden states of all tokens fed.
        self._prompt_logprobs = runner._get_prompt_logprobs_dict
        runner._get_prompt_logprobs_dict = self._step

    def _step(self, hidden: torch.Tensor, scheduled: dict[str, int]) -> Any:
        """hidden [tokens fed, width]; scheduled: how many of them are of each request."""
        runner = self._runner
        for request_id, count in scheduled.items():
            request = runner.requests[request_id]
            asked = request.sampling_params and (request.sampling_params.extra_args or {}).get(KEY)
            if asked:
                at = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]])
                length = len(request.prompt_token_ids)
                self._score(hidden[at : at + count], request.num_computed_tokens, length, **asked)
        return self._prompt_logprobs(hidden, scheduled)

    def _score(
        self, hidden: torch.Tensor, place: int, length: int, *, name: str, first: int, top_k: int, ids: bytes
    ) -> None:
        """hidden: of the tokens at `place` and behind it, of a prompt of `length`."""
        wanted = np.frombuffer(ids, np.int32).reshape(length - first, -1)
        if self._kept is None or self._kept[0] != name:
            # NaN, so that scores never computed are noticed.
            scored, top = np.full(wanted.shape, np.nan, np.float32), np.full((len(wanted), top_k), np.nan, np.float32)
            top_ids = np.full(top.shape, -1, np.int32)
            if first == 0:
                scored[0], top[0] = 0, 0
            self._kept = name, (scored, top_ids, top)
        scored, top_ids, top = self._kept[1]
        # A token predicts the next one.
        for start in range(max(place + 1, first), min(place + 1 + len(hidden), length), CHUNK):
            end = min(start + CHUNK, place + 1 + len(hidden), length)
            logits = self._runner.model.compute_logits(hidden[start - 1 - place : end - 1 - place])
            logprobs, rows = logits.float().log_softmax(-1), slice(start - first, end - first)
            own = torch.from_numpy(wanted[rows].astype(np.int64)).to(logprobs.device)
            scored[rows] = logprobs.gather(1, own.clamp(min=0)).masked_fill(own < 0, 0.0).cpu().numpy()
            values, places = logprobs.topk(top_k)
            top[rows], top_ids[rows] = values.cpu().numpy(), places.cpu().numpy()

    def pop(self, name: str) -> tuple[bytes, ...]:
        """The bytes of Arrays. Raises ValueError where no such request was fed."""
        kept, self._kept = self._kept, None
        if kept is None or kept[0] != name:
            raise ValueError(f"{name} was not fed to this worker")
        return tuple(array.tobytes() for array in kept[1])
