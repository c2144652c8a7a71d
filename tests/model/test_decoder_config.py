"""config.json, both ways: the files people have are read, and what changes the maths is refused by name."""

import json
import pathlib
from typing import Any

import pytest

from scalerl_jax.model.decoder_config import DecoderConfig, read_config
from tests.support.models import toy_decoder

# As published, but for long lists and what is of no interest to anybody.
LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.45.0",
    "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
QWEN2_5_0_5B = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
    "image_token_index": 200092, "model_type": "llama4", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "text_config": {
        "attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0, "attn_scale": 0.1,
        "attn_temperature_tuning": 4, "bos_token_id": 200000, "eos_token_id": [200001, 200007, 200008],
        "floor_scale": 8192, "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "initializer_range": 0.02, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760, "model_type": "llama4_text",
        "moe_layers": list(range(48)), "no_rope_layers": [1, 1, 1, 0] * 12, "num_attention_heads": 40,
        "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16,
        "output_router_logits": False, "pad_token_id": 200018, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "torch_dtype": "bfloat16", "use_cache": True,
        "use_qk_norm": True, "vocab_size": 202048,
    },
    "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 1408, "rope_theta": 10000},
}  # fmt: skip
TOOLS = {  # what other people's tools leave in such files
    "_name_or_path": "somebody/something", "unsloth_version": "2026.1", "unsloth_fixed": True, "is_llama_config": True,
    "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}, "pad_token_id": 2,
    "quantization_config": None, "chunk_size_feed_forward": 0, "output_attentions": False, "temperature": 1.0,
    "prune_heads": {}, "num_beams": 1,
    "add_cross_attention": False, "resid_pdrop": 0.1, "logits_scaling": 1.0, "num_nextn_predict_layers": 0,
    "_attn_implementation_autoset": True, "attn_logit_softcapping": None, "id2label": {"0": "LABEL_0"},
    "neftune_noise_alpha": 5, "image_token_index": 7, "router_aux_loss_coef": 0.001,
}  # fmt: skip


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Ellipsis: without the key."""
    return {key: value for key, value in {**config, **changes}.items() if value is not ...}


def test_published_files_are_read() -> None:
    llama = DecoderConfig.from_hf(LLAMA_3_2_1B)
    assert llama == DecoderConfig(
        vocab_size=128256, hidden_size=2048, layers=16, heads=32, kv_heads=8, head_dim=64, intermediate_size=8192,
        rope_theta=500_000.0, rope_scaling=(32.0, 1.0, 4.0, 8192.0), norm_epsilon=1e-5, family="llama",
        tied_embeddings=True, max_positions=131072, stop_token_ids=(128001, 128008, 128009),
    )  # fmt: skip
    assert DecoderConfig.from_hf(LLAMA_3_2_1B | TOOLS) == llama
    qwen2 = DecoderConfig.from_hf(QWEN2_5_0_5B)
    assert (qwen2.head_dim, qwen2.kv_heads, qwen2.rope_theta, qwen2.tied_embeddings) == (64, 2, 1e6, True)
    qwen3 = DecoderConfig.from_hf(QWEN3_0_6B)
    assert (qwen3.head_dim, qwen3.rope_theta, qwen3.rope_scaling, qwen3.stop_token_ids) == (128, 1e6, None, (151645,))
    assert DecoderConfig.from_hf(QWEN3_0_6B | {"use_qk_norm": True}) == qwen3


def test_the_text_model_of_scout() -> None:
    scout = DecoderConfig.from_hf(SCOUT)
    assert scout == DecoderConfig(
        vocab_size=202048, hidden_size=5120, layers=48, heads=40, kv_heads=8, head_dim=128, intermediate_size=8192,
        rope_theta=500_000.0, rope_scaling=(16.0, 1.0, 1.0, 8192.0), norm_epsilon=1e-5, family="llama4_text",
        max_positions=10485760, stop_token_ids=(200001, 200007, 200008), experts=16, experts_per_token=1,
        moe_intermediate_size=8192, nope_interval=4, attention_chunk=8192, head_l2_norm=True, temperature_tuning=True,
        floor_scale=8192, attn_scale=0.1,
    )  # fmt: skip
    assert scout.local_layers() == (True, True, True, False) * 12
    assert DecoderConfig.from_hf(scout.to_hf()) == scout
    text = SCOUT["text_config"]
    assert isinstance(text, dict)
    left_out = ("no_rope_layers", "moe_layers", "attn_scale", "floor_scale", "attn_temperature_tuning", "use_qk_norm")
    assert DecoderConfig.from_hf({**text, "no_rope_layers": []}) == scout
    assert DecoderConfig.from_hf({key: value for key, value in text.items() if key not in left_out}) == scout
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(**scout.to_hf()).to_dict()
    assert DecoderConfig.from_hf(theirs) == scout
    for change, words in (
        ({"moe_layers": [1, 3]}, "moe_layers has other layers"),
        ({"no_rope_layers": [1, 0, 0, 0] * 12}, "no_rope_layers has other layers"),
        ({"layer_types": ["full_attention"] * 48}, "layer_types has other layers"),
        ({"interleave_moe_layer_step": 2}, "interleave_moe_layer_step=2 is not supported"),
        ({"num_local_experts": ...}, "num_local_experts is missing"),
        ({"attention_chunk_size": "8k"}, 'attention_chunk_size="8k" is not a positive'),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
    ):
        with pytest.raises(ValueError) as error:
            DecoderConfig.from_hf({**SCOUT, "text_config": changed(text, **change)})
        assert words in str(error.value)


def test_the_other_generation_says_the_same() -> None:
    scaling = LLAMA_3_2_1B["rope_scaling"]
    assert isinstance(scaling, dict)
    nested = {**scaling, "rope_theta": 500000.0}
    wanted = DecoderConfig.from_hf(LLAMA_3_2_1B)
    for changes in (
        {"rope_scaling": ..., "rope_theta": ..., "rope_parameters": nested},
        {"rope_parameters": nested},  # both
        {"rope_scaling": {**scaling, "type": "llama3"}},
        {
            "rope_scaling": changed(scaling, original_max_position_embeddings=...),
            "original_max_position_embeddings": 8192,
        },
        {"rope_scaling": {**scaling, "partial_rotary_factor": 1.0}},
    ):
        assert DecoderConfig.from_hf(changed(LLAMA_3_2_1B, **changes)) == wanted, changes
    plain = {"rope_type": "default", "rope_theta": 1e6}
    assert DecoderConfig.from_hf(changed(QWEN3_0_6B, rope_theta=..., rope_parameters=plain)) == DecoderConfig.from_hf(
        QWEN3_0_6B
    )


def test_what_is_left_out_has_transformers_default() -> None:
    bare = DecoderConfig.from_hf(
        changed(
            LLAMA_3_2_1B,
            head_dim=..., num_key_value_heads=..., rope_theta=..., rope_scaling=..., rms_norm_eps=..., eos_token_id=...,
            tie_word_embeddings=..., architectures=..., attention_bias=...,
        )
    )  # fmt: skip
    assert (bare.head_dim, bare.kv_heads, bare.rope_theta, bare.norm_epsilon) == (64, 32, 10_000.0, 1e-6)
    assert not bare.tied_embeddings and bare.rope_scaling is None and bare.stop_token_ids == ()


def test_windows_that_no_layer_has_are_none() -> None:
    wanted = DecoderConfig.from_hf(QWEN3_0_6B)
    for changes in (
        {"sliding_window": 4096},
        {"use_sliding_window": True},  # of no size
        {"use_sliding_window": True, "sliding_window": 4096},  # of the layers from 28 on
        {"layer_types": ["full_attention"] * 28, "sliding_window": 4096},
    ):
        assert DecoderConfig.from_hf(QWEN3_0_6B | changes) == wanted


QWEN3_MOE = {
    **QWEN3_0_6B, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = LLAMA_3_2_1B["rope_scaling"]
assert isinstance(LLAMA3, dict)
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA_3_2_1B, {"attention_bias": True}, "attention_bias=true is not supported: only false is"),
    (QWEN2_5_0_5B, {"attention_bias": False}, "attention_bias=false is not supported: only true is"),
    (QWEN2_5_0_5B, {"use_sliding_window": True}, "sliding_window=32768"),
    (LLAMA_3_2_1B, {"attention_bias": "false"}, 'attention_bias="false"'),
    (QWEN3_0_6B, {"attention_bias": True}, "attention_bias=true"),
    (LLAMA_3_2_1B, {"mlp_bias": True}, "mlp_bias=true"),
    (LLAMA_3_2_1B, {"hidden_act": "gelu"}, 'hidden_act="gelu"'),
    (LLAMA_3_2_1B, {"sliding_window": 4096}, "sliding_window=4096"),
    (QWEN3_0_6B, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 27}, "sliding_window=9"),
    (QWEN3_0_6B, {"layer_types": ["full_attention", "sliding_attention"]}, 'layer_types[1]="sliding_attention"'),
    (QWEN3_MOE, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 99}, "use_sliding_window=true"),
    (LLAMA_3_2_1B, {"layer_types": "full_attention"}, 'layer_types="full_attention"'),
    (LLAMA_3_2_1B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (LLAMA_3_2_1B, {"no_rope_layers": [1, 1, 0]}, "no_rope_layers=[1, 1, 0]"),
    (LLAMA_3_2_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    (LLAMA_3_2_1B, {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    (LLAMA_3_2_1B, {"attention_multiplier": 0.0078125}, "attention_multiplier=0.0078125"),
    (LLAMA_3_2_1B, {"residual_multiplier": 0.22}, "residual_multiplier=0.22"),
    (LLAMA_3_2_1B, {"embedding_multiplier": 12.0}, "embedding_multiplier=12.0"),
    (LLAMA_3_2_1B, {"logits_scaling": 8.0}, "logits_scaling=8.0"),
    (LLAMA_3_2_1B, {"query_pre_attn_scalar": 224}, "query_pre_attn_scalar=224"),
    (QWEN3_0_6B, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
    (QWEN3_0_6B, {"num_experts": 128}, "num_experts=128"),
    (LLAMA_3_2_1B, {"use_qk_norm": True}, "use_qk_norm=true"),
    (LLAMA_3_2_1B, {"qkv_bias": True}, "qkv_bias=true"),
    (LLAMA_3_2_1B, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config="),
    (LLAMA_3_2_1B, {"quantization": {"group_size": 64, "bits": 4}}, "quantization="),
    (LLAMA_3_2_1B, {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}, "auto_map="),
    (LLAMA_3_2_1B, {"architectures": ["LlamaForSequenceClassification"]}, "architectures="),
    (LLAMA_3_2_1B, {"architectures": 5}, "architectures=5"),
    (LLAMA_3_2_1B, {"rope_scaling": YARN}, 'rope_scaling.rope_type="yarn"'),
    (QWEN3_0_6B, {"rope_parameters": YARN}, 'rope_parameters.rope_type="yarn"'),
    (QWEN3_0_6B, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_scaling.rope_type="dynamic"'),
    (
        QWEN3_0_6B,
        {"rope_scaling": {"rope_type": "default", "type": "mrope"}},
        'rope_scaling.rope_type=["default", "mrope"]',
    ),
    (QWEN3_0_6B, {"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "rope_scaling.mrope_section=[1, 2]"),
    (QWEN3_0_6B, {"rope_scaling": "yarn"}, 'rope_scaling="yarn"'),
    (QWEN3_0_6B, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters.full_attention="),
    (QWEN3_0_6B, {"rope_parameters": {"partial_rotary_factor": 0.25}}, "rope_parameters.partial_rotary_factor=0.25"),
    (
        QWEN3_0_6B,
        {"rope_parameters": {"rope_theta": 1e4}},
        "rope_parameters.rope_theta=10000.0 do not agree",
    ),
    (LLAMA_3_2_1B, {"rope_parameters": {**LLAMA3, "factor": 8.0}}, "do not agree"),
    (LLAMA_3_2_1B, {"rope_scaling": changed(LLAMA3, factor=...)}, "rope_scaling.factor is missing"),
    (LLAMA_3_2_1B, {"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}}, "high_freq_factor=0.5 is below"),
    (LLAMA_3_2_1B, {"rope_theta": float("nan")}, "rope_theta=NaN is not a positive number"),
    (LLAMA_3_2_1B, {"rms_norm_eps": -1}, "rms_norm_eps=-1"),
    (LLAMA_3_2_1B, {"num_hidden_layers": ...}, "num_hidden_layers is missing"),
    (LLAMA_3_2_1B, {"num_hidden_layers": "16"}, 'num_hidden_layers="16" is not a positive whole number'),
    (LLAMA_3_2_1B, {"vocab_size": 1e5}, "vocab_size=100000.0 is not a positive whole number"),
    (LLAMA_3_2_1B, {"hidden_size": 0}, "hidden_size=0"),
    (QWEN3_0_6B, {"head_dim": ...}, "head_dim is missing"),
    (QWEN3_0_6B, {"num_key_value_heads": ...}, "num_key_value_heads is missing"),
    (LLAMA_3_2_1B, {"tie_word_embeddings": 1}, "tie_word_embeddings=1 is not true or false"),
    (LLAMA_3_2_1B, {"eos_token_id": "</s>"}, 'eos_token_id="</s>" is not a token id'),
    (LLAMA_3_2_1B, {"eos_token_id": []}, "eos_token_id=[] is not a token id"),
    (LLAMA_3_2_1B, {"eos_token_id": [0, None]}, "eos_token_id=[0, null] is not a token id"),
    (LLAMA_3_2_1B, {"eos_token_id": 2.0}, "eos_token_id=2.0 is not a token id"),
    (LLAMA_3_2_1B, {"eos_token_id": True}, "eos_token_id=true is not a token id"),
    (LLAMA_3_2_1B, {"eos_token_id": [1, 128256]}, "eos_token_id has 128256, beyond the vocabulary of 128256"),
    (QWEN3_0_6B, {"use_qk_norm": False}, "use_qk_norm=false is not supported: only true is"),
    (LLAMA_3_2_1B, {"model_type": "mistral"}, "model_type 'mistral' is not one of llama"),
    (LLAMA_3_2_1B, {"model_type": ["llama"]}, "model_type ['llama'] is not one of llama"),
    (LLAMA_3_2_1B, {"num_key_value_heads": 7}, "32 query heads cannot share 7"),
]


@pytest.mark.parametrize(("config", "changes", "words"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_changes_the_maths_is_refused_by_name(
    tmp_path: pathlib.Path, config: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changed(config, **changes)))
    with pytest.raises(ValueError) as error:
        read_config(tmp_path)
    assert words in str(error.value) and str(error.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert "\n" not in str(error.value) and len(str(error.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_file_that_is_no_object_is_named(tmp_path: pathlib.Path, data: bytes) -> None:
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"config\.json: is not") as error:
        read_config(tmp_path)
    assert "\n" not in str(error.value)


def test_a_byte_order_mark_is_no_harm(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_0_6B), encoding="utf-8-sig")
    assert read_config(tmp_path) == DecoderConfig.from_hf(QWEN3_0_6B)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "llama4_text"])
@pytest.mark.parametrize("scaling", [None, (8.0, 1.0, 4.0, 64.0)])
def test_what_is_written_is_read_back(family: str, scaling: tuple[float, float, float, float] | None) -> None:
    model = toy_decoder(
        family=family, rope_scaling=scaling, rope_theta=5e5, stop_token_ids=(3, 4), max_positions=99, norm_epsilon=1e-5
    )
    written = model.to_hf()
    assert DecoderConfig.from_hf(json.loads(json.dumps(written))) == model
    # Either generation alone is enough.
    assert DecoderConfig.from_hf(changed(written, rope_parameters=...)) == model
    assert DecoderConfig.from_hf(changed(written, rope_scaling=..., rope_theta=...)) == model


@pytest.mark.parametrize(
    "left_out",
    [
        ("rope_theta", "rope_parameters", "rope_scaling"),
        ("rope_theta", "rope_scaling"),  # and theta in the table
        ("rope_theta", "rope_parameters"),
        ("head_dim",),
        ("attention_chunk_size", "no_rope_layer_interval", "floor_scale", "attn_scale", "use_qk_norm"),
        ("max_position_embeddings", "rms_norm_eps", "attn_temperature_tuning"),
    ],
)
def test_what_llama_4_leaves_out_is_as_transformers_has_it(left_out: tuple[str, ...]) -> None:
    transformers = pytest.importorskip("transformers")
    model = toy_decoder(
        family="llama4_text", rope_scaling=(8.0, 1.0, 4.0, 64.0), rope_theta=1e6, norm_epsilon=1e-6, max_positions=99
    )
    left = {key: value for key, value in model.to_hf().items() if key not in left_out}
    if "rope_theta" in left_out and "rope_parameters" in left:
        left["rope_parameters"] = changed(left["rope_parameters"], rope_theta=...)
    assert DecoderConfig.from_hf(left) == DecoderConfig.from_hf(transformers.Llama4TextConfig(**left).to_dict())


@pytest.mark.parametrize("key", ["attention_chunk_size", "use_qk_norm", "floor_scale", "attn_temperature_tuning"])
def test_what_is_null_in_a_llama_4_is_refused(key: str) -> None:
    """transformers has a default where the key is left out, and refuses null or computes something else."""
    with pytest.raises(ValueError, match=key):
        DecoderConfig.from_hf({**toy_decoder(family="llama4_text").to_hf(), key: None})


def test_transformers_reads_both_generations_as_we_do() -> None:
    transformers = pytest.importorskip("transformers")
    for config in (LLAMA_3_2_1B, QWEN2_5_0_5B, QWEN3_0_6B):
        ours = DecoderConfig.from_hf(config)
        theirs = transformers.AutoConfig.for_model(**config)
        assert DecoderConfig.from_hf(theirs.to_dict()) == ours
        written = transformers.AutoConfig.for_model(**ours.to_hf())
        assert written.rope_parameters == theirs.rope_parameters
        for key in ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "eos_token_id"):
            assert getattr(written, key) == getattr(theirs, key)
