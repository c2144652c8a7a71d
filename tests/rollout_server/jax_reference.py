"""What the tests of the embedded generator share: a tiny decoder, and references written without jax.

Reference is the decoder of scalerl_jax/model once more, one token at a time in float64 numpy, with an explicit list of
keys and values, so that each token can be fed with other weights than the one before. replay is the state machine of
thinking and answer, on the tokens that came out.
"""

import math

import numpy as np

from scalerl_jax.contract.codec import CompletionRequest, GroupRequest, Interruption, Sampling
from scalerl_jax.model import DecoderConfig
from tests.support.models import toy_decoder


def tiny(*, kind: str = "qwen3", tied: bool = True, vocabulary: int = 48) -> DecoderConfig:
    """Two layers, three query heads on each of two key/value heads."""
    return toy_decoder(
        vocab_size=vocabulary, hidden_size=24, heads=6, intermediate_size=40,
        family=kind, tied_embeddings=tied, rope_theta=10_000.0 if kind == "qwen3" else 500_000.0,
        rope_scaling=None if kind == "qwen3" else (8.0, 1.0, 4.0, 16.0),
    )  # fmt: skip


class Reference:
    """One sequence, fed a token at a time."""

    def __init__(self, config: DecoderConfig):
        self.config = config
        self.keys: list[list[np.ndarray]] = [[] for _ in range(config.layers)]  # per layer and position: [K, h]
        self.values: list[list[np.ndarray]] = [[] for _ in range(config.layers)]

    def feed(self, named: dict[str, np.ndarray], token: int) -> np.ndarray:
        """log p of the token after `token`: [V] float64. Earlier keys and values are as earlier calls left them."""
        c, w = self.config, named  # float32 weights: float64 times float32 is float64
        position = len(self.keys[0])
        x = w["model.embed_tokens.weight"][token].astype(np.float64)
        for i in range(c.layers):
            at = f"model.layers.{i}."
            y = self._norm(x, w[at + "input_layernorm.weight"])
            q = (w[at + "self_attn.q_proj.weight"] @ y).reshape(c.heads, c.head_dim)
            k = (w[at + "self_attn.k_proj.weight"] @ y).reshape(c.kv_heads, c.head_dim)
            v = (w[at + "self_attn.v_proj.weight"] @ y).reshape(c.kv_heads, c.head_dim)
            if c.family in ("qwen3", "qwen3_moe"):
                q = self._norm(q, w[at + "self_attn.q_norm.weight"])
                k = self._norm(k, w[at + "self_attn.k_norm.weight"])
            self.keys[i].append(self._rotate(k, position))
            self.values[i].append(v)
            keys, values, q = np.stack(self.keys[i]), np.stack(self.values[i]), self._rotate(q, position)
            mixed = []
            for head in range(c.heads):
                shared = head // (c.heads // c.kv_heads)
                score = keys[:, shared] @ q[head] / math.sqrt(c.head_dim)
                weight = np.exp(score - score.max())
                mixed.append(weight / weight.sum() @ values[:, shared])
            x = x + w[at + "self_attn.o_proj.weight"] @ np.concatenate(mixed)
            y = self._norm(x, w[at + "post_attention_layernorm.weight"])
            x = x + (self._experts(w, at + "mlp.", y) if c.experts else self._mlp(w, at + "mlp.", y))
        head = w["model.embed_tokens.weight" if c.tied_embeddings else "lm_head.weight"]
        logits = head @ self._norm(x, w["model.norm.weight"])
        logits -= logits.max()
        return logits - np.log(np.exp(logits).sum())

    def _mlp(self, w: dict[str, np.ndarray], at: str, y: np.ndarray, expert: int | None = None) -> np.ndarray:
        gate, up, down = (
            w[f"{at}{part}_proj.weight"] if expert is None else w[f"{at}experts.{part}_proj"][expert]
            for part in ("gate", "up", "down")
        )
        inner = gate @ y
        return down @ (inner / (1 + np.exp(-inner)) * (up @ y))

    def _experts(self, w: dict[str, np.ndarray], at: str, y: np.ndarray) -> np.ndarray:
        logits = w[at + "gate.weight"] @ y
        weights = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        chosen = np.argsort(-weights)[: self.config.experts_per_token]
        if self.config.norm_topk_prob:
            weights = weights / weights[chosen].sum()
        return sum(weights[expert] * self._mlp(w, at, y, expert) for expert in chosen)

    def _norm(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config.norm_epsilon) * scale

    def _rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        c, half = self.config, self.config.head_dim // 2
        out = np.empty_like(x)
        for i in range(half):
            frequency = c.rope_theta ** (-2 * i / c.head_dim)
            if c.rope_scaling is not None:
                factor, low, high, original = c.rope_scaling
                turns = original * frequency / (2 * math.pi)  # that the pair makes in the original context
                smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
                frequency *= smooth + (1 - smooth) / factor
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            out[:, i] = x[:, i] * cos - x[:, half + i] * sin
            out[:, half + i] = x[:, half + i] * cos + x[:, i] * sin
        return out


def reference_logprobs(config, prompt, token_ids, weights_of) -> np.ndarray:
    """[tokens] float64: log p of each of `token_ids` after the prompt, at temperature 1.

    weights_of(t) are the weights that sample completion token t; they also make the keys and values of the token that
    is fed for it. The prompt before its last token is fed with weights_of(0).
    """
    reference = Reference(config)
    for token in prompt[:-1]:
        reference.feed(weights_of(0), int(token))
    fed, out = int(prompt[-1]), []
    for t, token in enumerate(token_ids):
        out.append(reference.feed(weights_of(t), fed)[token])
        fed = int(token)
    return np.array(out)


def replay(request: GroupRequest, budget: int, token_ids, maximum_tokens: int) -> tuple[np.ndarray, str]:
    """What must have been forced, [tokens] bool, and why it must have ended, given the tokens that came out.

    Fails where a completion goes on after its end, ends before it, or forces another token than the phrase's.
    """
    phrase, end = request.interruption.text_token_ids, request.interruption.end_of_thinking_token_ids
    thinking = budget > 0 and len(phrase) > 0
    thought, answered, to_force, sampled, forced = 0, 0, [], [], []
    reason = None
    for t, token in enumerate(int(token) for token in token_ids):
        assert reason is None, f"token {t} comes after the end ({reason})"
        if to_force:
            forced.append(True)
            assert token == to_force.pop(0)
        else:
            forced.append(False)
            sampled.append(token)
            if thinking:
                thought += 1
                if end and tuple(sampled[-len(end) :]) == end:
                    thinking = False
                elif thought == budget:
                    thinking, to_force = False, list(phrase)
            else:
                answered += 1
            if token in request.sampling.stop_token_ids:
                reason = "stop"
        if reason is None and (
            answered == request.sampling.answer_budget or len(request.prompt) + t + 1 == maximum_tokens
        ):
            reason = "length"
    assert reason is not None, "it ended too early"
    return np.array(forced), reason


def ask(
    prompt, *, seeds=(1,), budgets=None, name="train/0", incarnation=0, minimum_step=0, pinned_step=None,
    phrase=(), end=(), **sampling,
) -> GroupRequest:  # fmt: skip
    budgets = budgets or [0] * len(seeds)
    completions = tuple(CompletionRequest(i, s, b) for i, (s, b) in enumerate(zip(seeds, budgets, strict=True)))
    return GroupRequest(
        incarnation=incarnation, group_id=name, prompt=np.asarray(prompt, np.int32), completions=completions,
        sampling=Sampling(**{"answer_budget": 20, **sampling}), interruption=Interruption(tuple(phrase), tuple(end)),
        minimum_step=minimum_step, pinned_step=pinned_step,
    )  # fmt: skip
