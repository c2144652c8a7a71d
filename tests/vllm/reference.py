"""What transformers' own model says, in float32: the independent reference for log-probabilities."""

import pathlib
from typing import Any

import numpy as np
import torch
import transformers

from scalerl_jax.contract.codec import Completion
from tests.support.models import random_tensors


class Reference:
    """transformers' model with the weights of a seed, one sequence at a time."""

    def __init__(self, shared: Any, seed: int):
        folder = pathlib.Path(shared.vllm.options.model)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tensors = {name: torch.from_numpy(value) for name, value in random_tensors(shared.vllm.config, seed).items()}
        missing, unexpected = self._model.load_state_dict(tensors, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        self._model.tie_weights()

    @torch.no_grad()
    def feed(self, tokens: np.ndarray, cache: Any = None) -> tuple[torch.Tensor, Any]:
        """(log p of the token after each [tokens, vocabulary], the keys and values of all so far)."""
        ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
        out = self._model(input_ids=ids, past_key_values=cache, use_cache=True)
        return out.logits[0].log_softmax(-1), out.past_key_values


def logprobs_of(parts: list[torch.Tensor], prompt: np.ndarray, completion: Completion) -> np.ndarray:
    """[tokens] of a completion, from the rows that `feed` gave for prompt and tokens."""
    rows = torch.cat(parts)[len(prompt) - 1 : len(prompt) - 1 + len(completion.token_ids)]
    chosen = torch.from_numpy(completion.token_ids.astype(np.int64))
    return rows.gather(1, chosen[:, None])[:, 0].numpy()


def alone(reference: Reference, prompt: np.ndarray, completion: Completion) -> np.ndarray:
    """All of it by one version's weights, keys and values."""
    rows, _ = reference.feed(np.concatenate([prompt, completion.token_ids]))
    return logprobs_of([rows], prompt, completion)


def swapped(before: Reference, after: Reference, prompt: np.ndarray, completion: Completion, at: int) -> np.ndarray:
    """Tokens from `at` on by `after`, over the keys and values that `before` made."""
    tokens = np.concatenate([prompt, completion.token_ids])
    # The token before `at` was sampled by the old weights and is fed to the new ones.
    old, cache = before.feed(tokens[: len(prompt) + at - 1])
    new, _ = after.feed(tokens[len(prompt) + at - 1 :], cache)
    return logprobs_of([old, new], prompt, completion)
