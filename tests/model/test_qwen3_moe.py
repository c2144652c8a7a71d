"""Experts in folders, one by one in the files and together in the tree; what a config.json may not say; their FLOPs."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from scalerl_jax.model import DecoderConfig, load_hf
from scalerl_jax.model.hf_folder import write_model_folder
from scalerl_jax.run.ledger import ModelShape
from tests.support.families import decoder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """(folder, transformers' model)"""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**decoder("qwen3_moe-two-of-eight").to_hf())
    made = transformers.Qwen3MoeForCausalLM(config).float().eval()
    folder = str(tmp_path_factory.mktemp("model"))
    made.save_pretrained(folder)
    return folder, made


def test_folders_both_ways_bit_for_bit(model, tmp_path: pathlib.Path) -> None:
    folder, theirs = model
    (pathlib.Path(folder) / "tokenizer.json").write_text("{}")
    config, params = load_hf(folder)
    out = str(tmp_path / "out")
    write_model_folder(out, params=params, decoder=config, tokenizer_dir=folder, shard_bytes=20_000)
    written = {}
    for file in pathlib.Path(out).glob("*.safetensors"):
        written |= load_file(file)
    stored = load_file(f"{folder}/model.safetensors")
    assert written.keys() == stored.keys() and "model.layers.1.mlp.experts.7.down_proj.weight" in stored
    for name, value in stored.items():
        np.testing.assert_array_equal(written[name], value)
    again = transformers.Qwen3MoeForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens = torch.arange(2, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits)
    # Our own config.json, too, and the one of transformers before 5, which has the number of experts by another name.
    theirs_config = json.loads((pathlib.Path(folder) / "config.json").read_text())
    assert DecoderConfig.from_hf(config.to_hf()) == config == DecoderConfig.from_hf(theirs_config)
    theirs_config["num_experts"] = theirs_config.pop("num_local_experts")
    assert DecoderConfig.from_hf(theirs_config) == config


def test_what_is_missing_or_unknown_is_named(model, tmp_path: pathlib.Path) -> None:
    folder, _ = model
    config = json.loads((pathlib.Path(folder) / "config.json").read_text())
    for change, words in (
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
        ({"num_experts_per_tok": 9}, "9 experts per token cannot be chosen of"),
        ({"num_local_experts": 0}, "num_experts=0"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size=8 is not supported"),
    ):
        with pytest.raises(ValueError, match=words):
            DecoderConfig.from_hf({**config, **change})
    tensors = load_file(f"{folder}/model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    save_file({other: value for other, value in tensors.items() if other != name}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"tensor {name} is missing"):
        load_hf(str(tmp_path))
    save_file({**tensors, name: tensors[name][:-1].copy()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"tensor {name} has shape"):
        load_hf(str(tmp_path))


def test_only_a_tokens_own_experts_cost() -> None:
    config = DecoderConfig(
        vocab_size=10, hidden_size=4, layers=2, heads=2, kv_heads=1, head_dim=2, intermediate_size=9,
        family="qwen3_moe", experts=8, experts_per_token=3, moe_intermediate_size=5, tied_embeddings=True,
    )  # fmt: skip
    layer = 2 * 4 * 4 + 2 * 4 * 2 + 8 * 4 + 3 * (3 * 4 * 5)
    assert ModelShape.of(config).matrix_parameters == 2 * layer + 10 * 4
