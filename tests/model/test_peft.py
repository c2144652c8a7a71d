"""Adapters against PEFT and transformers: they load what is written here and compute the same, and what PEFT writes is
read here. About 15 CPU seconds, many of them torch's and PEFT's imports."""

import pathlib

import jax
import numpy as np
import pytest

from scalerl_jax.model import Precision, forward, load_hf, logits
from scalerl_jax.model.lora import Lora, read_adapter, write_adapter
from tests.model.lora_meshes import nowhere_zero
from tests.support.families import decoder
from tests.support.params import packed

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

CLOSE = 2e-5
CASES = {
    "llama-fours-untied-scaled": "all-linear,lm_head,embed_tokens",
    "qwen2-alone-tied": "all-linear",
    "qwen3-eights-tied-scaled": "q_proj,down_proj",
    "qwen3_moe-two-of-eight": "all-linear",
    "llama4_text-one-of-four": "all-linear",
}


@pytest.mark.parametrize("case", CASES)
def test_peft_and_transformers_compute_what_is_computed_here(case: str, tmp_path: pathlib.Path) -> None:
    from tests.model.test_transformers import model_of

    plain = model_of(decoder(case))
    plain.save_pretrained(tmp_path / "base")
    config, frozen = load_hf(str(tmp_path / "base"))
    lora = Lora.of(config, rank=3, alpha=6.0, targets=CASES[case], folder="", seed=0)
    adapter = nowhere_zero(jax.device_get(lora.new()))
    out = str(tmp_path / "adapter")
    write_adapter(out, adapter, lora, model=str(tmp_path / "base"), base="abc")

    tokens = packed([[31]], 31, config.vocab_size)[0]
    positions, ids = np.arange(31)[None], np.ones((1, 31), np.int32)
    params = lora.join(adapter, frozen)
    hidden = forward(params, config, tokens, positions, ids)
    ours = np.asarray(logits(params, config, hidden, precision=Precision()))

    model = peft.AutoPeftModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        adapted = model(torch.tensor(tokens)).logits.numpy()
        with model.disable_adapter():
            alone = model(torch.tensor(tokens)).logits.numpy()
    assert np.abs(adapted - ours).max() < CLOSE and np.abs(adapted - alone).max() > 100 * CLOSE
    plain.load_adapter(out)  # transformers itself
    with torch.no_grad():
        assert np.abs(plain(torch.tensor(tokens)).logits.numpy() - ours).max() < CLOSE

    model.save_pretrained(tmp_path / "again")
    for folder in ("adapter", "again"):
        found = read_adapter(str(tmp_path / folder), lora)
        assert jax.tree.structure(found) == jax.tree.structure(adapter)
        assert all(np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (found, adapter)), strict=True))
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = load_hf(str(tmp_path / "merged"))[1]
    hidden = forward(merged, config, tokens, positions, ids)
    assert np.abs(np.asarray(logits(merged, config, hidden)) - ours).max() < CLOSE
