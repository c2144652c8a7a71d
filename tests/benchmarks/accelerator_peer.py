"""The parts of bench_accelerator that measure PyTorch on the same machine: the peer.

transformers' LlamaForCausalLM of the same shape, eager, attention by scaled_dot_product_attention (flash attention on a
GPU), float32 masters under bfloat16 autocast, fused AdamW, the same loss. Segments go through one at a time, each as
long as it is: nothing is padded, and attention sees no mask, PyTorch's quickest way with segments of these lengths.
"""

import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tests.benchmarks.accelerator_model import (
    BETAS,
    DECAY,
    EPSILON,
    LEARNING_RATE,
    Work,
    make_segments,
    prompts,
    speeds,
    timed,
)

GIB = 2**30
CAP = 5.0
FIELDS = ("tokens", "weights", "advantages", "generator_logprobs")  # of a segment
_CUDA = torch.cuda.is_available()
_DEVICE = torch.device("cuda" if _CUDA else "cpu")


def make_model(work: Work, dtype: torch.dtype) -> LlamaForCausalLM:
    d = work.decoder
    config = LlamaConfig(
        vocab_size=d.vocab_size,
        hidden_size=d.hidden_size,
        intermediate_size=d.intermediate_size,
        num_hidden_layers=d.layers,
        num_attention_heads=d.heads,
        num_key_value_heads=d.kv_heads,
        head_dim=d.head_dim,
        rms_norm_eps=d.norm_epsilon,
        max_position_embeddings=d.max_positions,
        tie_word_embeddings=d.tied_embeddings,
        attn_implementation="sdpa",
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with _DEVICE:
        return LlamaForCausalLM(config).to(dtype)


def device() -> dict[str, Any]:
    name = torch.cuda.get_device_name() if _CUDA else "cpu"
    return {"device": name, "platform": _DEVICE.type, "torch": torch.__version__}


def settle() -> None:
    if _CUDA:
        torch.cuda.synchronize()


def peak_memory() -> float | None:
    return torch.cuda.max_memory_allocated() / GIB if _CUDA else None


def update(work: Work, *, remat: bool = True) -> dict[str, Any]:
    model = make_model(work, torch.float32).train()
    if remat:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adamw = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY, fused=True
    )
    segments = [
        {name: torch.from_numpy(np.asarray(getattr(segment, name))).to(_DEVICE) for name in FIELDS}
        for segment in make_segments(work)
    ]

    def run() -> None:
        adamw.zero_grad(set_to_none=True)
        for segment in segments:
            tokens = segment["tokens"].long()
            with torch.autocast(_DEVICE.type, dtype=torch.bfloat16):
                logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
            logp = -F.cross_entropy(logits.float(), tokens[1:], reduction="none")
            weights, advantages = segment["weights"][1:], segment["advantages"][1:]
            with torch.no_grad():
                ratio = (logp - segment["generator_logprobs"][1:]).exp().clamp(max=CAP)
            (-(weights * ratio * advantages * logp).sum()).backward()
        adamw.step()
        settle()

    return {**device(), **speeds(work, timed(run, work.repeats), device()["device"]), "peak_gib": peak_memory()}


def update_without_remat(work: Work) -> dict[str, Any]:
    return update(work, remat=False)


def generate(work: Work) -> dict[str, Any]:
    """One batch of as many sequences as there are slots, all sampled to the same length, in bfloat16."""
    model = make_model(work, torch.bfloat16).eval()
    ids = torch.from_numpy(np.stack(list(prompts(work)))).long().to(_DEVICE)
    seconds = {}
    with torch.inference_mode():
        for tokens in (4, work.sampled):  # the first warms up
            settle()
            began = time.perf_counter()
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0,
            )  # fmt: skip
            settle()
            seconds[tokens] = time.perf_counter() - began
            assert out.shape == (work.slots, work.prompt + tokens)
    return {
        **device(),
        "sampled_tokens_per_second": work.slots * work.sampled / seconds[work.sampled],
        "step_milliseconds": 1e3 * seconds[work.sampled] / work.sampled,
        "peak_gib": peak_memory(),
    }
