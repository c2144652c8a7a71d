"""What transformers' own model says, in float32: the independent reference for log-probabilities and experts.

Where a completion tells its experts, tokens go to those, with weights of the model's own routers: else a tie between
two experts, which rounding decides, would make two right answers of one.
"""

import os
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from scalerl_jax.contract.codec import Completion
from scalerl_jax.model.decoder_config import DecoderConfig
from tests.support.models import random_tensors

CLOSE = 1e-5  # of the difference of two probabilities: rounding may decide which expert is taken


class Choice(NamedTuple):
    """Of one router and the tokens of one `feed`."""

    experts: np.ndarray  # [tokens, k], those of the highest probability
    margin: np.ndarray  # [tokens]: how far the probability of the last of them is above the next one's


class Reference:
    """transformers' model with the weights of a seed, one sequence at a time."""

    def __init__(self, folder: str | os.PathLike[str], config: DecoderConfig, seed: int):
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tensors = {name: torch.from_numpy(value) for name, value in random_tensors(config, seed).items()}
        for name in [name for name in tensors if name.endswith(".experts.gate_proj")]:
            stem = name.removesuffix("gate_proj")
            tensors[stem + "gate_up_proj"] = torch.cat(
                [tensors.pop(stem + part) for part in ("gate_proj", "up_proj")], 1
            )
        missing, unexpected = self._model.load_state_dict(tensors, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        self._model.tie_weights()
        self.choices: list[Choice] = []  # of each layer, in the last `feed`
        self._given: torch.Tensor | None = None  # [tokens, layers, k]
        for name, module in self._model.named_modules():
            if config.experts and name.endswith(".mlp.gate"):
                module.register_forward_hook(self._routed)

    def _routed(self, module: Any, _: Any, output: Any) -> Any:
        logits, _, chosen = output
        probabilities = logits.softmax(-1)
        ordered = probabilities.sort(dim=-1, descending=True).values
        k = chosen.shape[-1]
        self.choices.append(Choice(chosen.numpy(), (ordered[:, k - 1] - ordered[:, k]).numpy()))
        if self._given is None:
            return output
        given = self._given[:, len(self.choices) - 1]
        weights = probabilities.gather(-1, given)
        return logits, weights / weights.sum(-1, keepdim=True) if module.norm_topk_prob else weights, given

    @torch.no_grad()
    def feed(
        self, tokens: np.ndarray, cache: Any = None, *, experts: np.ndarray | None = None
    ) -> tuple[torch.Tensor, Any]:
        """(log p of the token after each [tokens, vocabulary], the keys and values of all so far).

        experts: [tokens, layers, k], to which tokens go; None: as the routers have it.
        """
        ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
        self.choices = []
        self._given = None if experts is None else torch.from_numpy(experts.astype(np.int64))
        out = self._model(input_ids=ids, past_key_values=cache, use_cache=True)
        return out.logits[0].log_softmax(-1), out.past_key_values


def logprobs_of(parts: list[torch.Tensor], prompt: np.ndarray, completion: Completion) -> np.ndarray:
    """[tokens] of a completion, from the rows that `feed` gave for prompt and tokens."""
    rows = torch.cat(parts)[len(prompt) - 1 : len(prompt) - 1 + len(completion.token_ids)]
    chosen = torch.from_numpy(completion.token_ids.astype(np.int64))
    return rows.gather(1, chosen[:, None])[:, 0].numpy()


def alone(reference: Reference, prompt: np.ndarray, completion: Completion) -> np.ndarray:
    """All of it by one version's weights, keys and values."""
    fed = np.concatenate([prompt, completion.token_ids])[:-1]
    rows, _ = reference.feed(fed, experts=completion.experts)
    return logprobs_of([rows], prompt, completion)


def swapped(before: Reference, after: Reference, prompt: np.ndarray, completion: Completion, at: int) -> np.ndarray:
    """Tokens from `at` on by `after`, over the keys and values that `before` made."""
    fed = np.concatenate([prompt, completion.token_ids])[:-1]
    # The token before `at` was sampled by the old weights and is fed to the new ones.
    here, told = len(prompt) + at - 1, completion.experts
    old, cache = before.feed(fed[:here], experts=None if told is None else told[:here])
    new, _ = after.feed(fed[here:], cache, experts=None if told is None else told[here:])
    return logprobs_of([old, new], prompt, completion)


def check_experts(prompt: np.ndarray, completion: Completion, config: DecoderConfig, *fed: list[Choice]) -> None:
    """That a completion's experts are those of the highest probability. fed: the choices of each part that was fed."""
    told = completion.experts
    assert told is not None and told.dtype == np.uint8
    assert told.shape == (len(prompt) + len(completion.token_ids) - 1, config.layers, config.experts_per_token)
    clear = 0
    for layer in range(config.layers):
        own = np.concatenate([choices[layer].experts for choices in fed])
        margin = np.concatenate([choices[layer].margin for choices in fed])
        same = (np.sort(told[:, layer]) == np.sort(own)).all(axis=1)
        assert same[margin > CLOSE].all(), np.flatnonzero(~same & (margin > CLOSE))
        clear += (margin > CLOSE).sum()
    assert clear > 0.95 * told.shape[0] * told.shape[1]
