"""Where a worker holds what: against fused and split tensors put together by numpy, one kind of model at a time."""

import itertools

import numpy as np
import pytest

from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.tensor_layout import check_workers, hf_tensors, pieces


def config(*, tied: bool = True, family: str = "qwen3", vocabulary: int = 150, kv_heads: int = 4) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocabulary, hidden_size=6, layers=2, heads=8, kv_heads=kv_heads, head_dim=2, intermediate_size=12,
        family=family, tied_embeddings=tied, experts=3, experts_per_token=2, moe_intermediate_size=8,
    )  # fmt: skip


def numbered(model: DecoderConfig) -> dict[str, np.ndarray]:
    """No two entries of all tensors are equal, and none is 0."""
    counter = itertools.count(1)
    return {
        name: np.array([next(counter) for _ in range(int(np.prod(shape)))], np.int64).reshape(shape)
        for name, shape in hf_tensors(model).items()
    }


def expected(model: DecoderConfig, tensors: dict[str, np.ndarray], rank: int, workers: int) -> dict[str, np.ndarray]:
    """What vLLM's layers hold: by its own rules (QKVParallelLinear, VocabParallelEmbedding), not by the table's."""

    def vocabulary(matrix: np.ndarray) -> np.ndarray:
        padded = np.zeros((-(-len(matrix) // 64) * 64, matrix.shape[1]), np.int64)
        padded[: len(matrix)] = matrix
        return np.split(padded, workers)[rank]

    def rows(matrix: np.ndarray) -> np.ndarray:
        return np.split(matrix, workers)[rank]

    def heads(matrix: np.ndarray) -> np.ndarray:
        each = np.split(matrix, model.kv_heads)
        copies = max(1, workers // model.kv_heads)
        return np.split(np.concatenate([head for head in each for _ in range(copies)]), workers)[rank]

    out = {"model.embed_tokens.weight": vocabulary(tensors["model.embed_tokens.weight"])}
    for i in range(model.layers):
        at = f"model.layers.{i}."
        q, k, v = (tensors[f"{at}self_attn.{part}_proj.weight"] for part in "qkv")
        out[f"{at}self_attn.qkv_proj.weight"] = np.concatenate([rows(q), heads(k), heads(v)])
        if f"{at}self_attn.q_proj.bias" in tensors:
            q, k, v = (tensors[f"{at}self_attn.{part}_proj.bias"] for part in "qkv")
            out[f"{at}self_attn.qkv_proj.bias"] = np.concatenate([rows(q), heads(k), heads(v)])
        out[f"{at}self_attn.o_proj.weight"] = rows(tensors[f"{at}self_attn.o_proj.weight"].T).T
        if model.family != "qwen3_moe":
            gate, up = (tensors[f"{at}mlp.{part}_proj.weight"] for part in ("gate", "up"))
            out[f"{at}mlp.gate_up_proj.weight"] = np.concatenate([rows(gate), rows(up)])
            out[f"{at}mlp.down_proj.weight"] = rows(tensors[f"{at}mlp.down_proj.weight"].T).T
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            if f"{at}{name}.weight" in tensors:
                out[f"{at}{name}.weight"] = tensors[f"{at}{name}.weight"]
        if model.family == "qwen3_moe":
            out[f"{at}mlp.gate.weight"] = tensors[f"{at}mlp.gate.weight"]
            at += "mlp.experts."
            split = [np.split(tensors[f"{at}{part}_proj"], workers, axis=1)[rank] for part in ("gate", "up")]
            out[f"{at}w13_weight"] = np.concatenate(split, axis=1)
            out[f"{at}w2_weight"] = np.split(tensors[f"{at}down_proj"], workers, axis=2)[rank]
    out["model.norm.weight"] = tensors["model.norm.weight"]
    if "lm_head.weight" in tensors:
        out["lm_head.weight"] = vocabulary(tensors["lm_head.weight"])
    return out


CASES = [
    pytest.param(config(), 1, id="alone"),
    pytest.param(config(tied=False, family="llama"), 1, id="alone-untied-llama"),
    pytest.param(config(), 2, id="two"),
    pytest.param(config(tied=False), 4, id="a-head-each"),
    pytest.param(config(kv_heads=2), 4, id="heads-are-copied"),
    pytest.param(config(vocabulary=65, tied=False), 4, id="a-worker-with-padding-only"),
    pytest.param(config(family="qwen2"), 1, id="biases-alone"),
    pytest.param(config(family="qwen2", kv_heads=2), 4, id="biases-are-copied-with-their-heads"),
    pytest.param(config(family="qwen3_moe"), 1, id="experts-alone"),
    pytest.param(config(family="qwen3_moe"), 4, id="experts-are-cut-inside"),
]


@pytest.mark.parametrize(("model", "workers"), CASES)
def test_a_whole_version_lands_where_the_layers_hold_it(model: DecoderConfig, workers: int) -> None:
    tensors = numbered(model)
    for rank in range(workers):
        wanted = expected(model, tensors, rank, workers)
        got = {name: np.zeros_like(value) for name, value in wanted.items()}
        for name, piece in pieces(model, rank, workers).items():
            got[piece.parameter][piece.target] = tensors[name][piece.source]
        for name, value in wanted.items():
            np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize(("model", "workers"), CASES)
def test_changes_land_there_too(model: DecoderConfig, workers: int) -> None:
    rng, tensors = np.random.default_rng(0), numbered(model)
    ranks = [pieces(model, rank, workers) for rank in range(workers)]
    held = [expected(model, tensors, rank, workers) for rank in range(workers)]
    for name, tensor in tensors.items():
        positions = np.flatnonzero(rng.random(tensor.size) < 0.3)
        values = -rng.integers(1, 1000, len(positions))
        tensor.reshape(-1)[positions] = values
        for places, parameters in zip(ranks, held, strict=True):
            mine, targets = places[name].scatter(positions)
            parameters[places[name].parameter].reshape(-1)[targets] = values[mine]
    for rank in range(workers):
        for name, value in expected(model, tensors, rank, workers).items():
            np.testing.assert_array_equal(held[rank][name], value, err_msg=name)


@pytest.mark.parametrize(("workers", "words"), [(0, "0 workers"), (3, "8 query heads"), (16, "8 query heads")])
def test_what_cannot_be_split_is_named(workers: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_workers(config(), workers)
    with pytest.raises(ValueError, match="6 key/value heads"):
        check_workers(DecoderConfig(8, 8, 1, heads=12, kv_heads=6, head_dim=2, intermediate_size=4), 4)
