"""vLLM's worker for CPUs, with weights that can be written in place.

vLLM's CPU backend would pack the weights for oneDNN when the model is loaded and drop the originals, or, under tied
embeddings, keep both: a weight written later would be lost, or used by the embedding and not by the head. Here it
multiplies with the weights as they are, as GPUs do. So do experts, one after another, each on its tokens' rows.
"""

from typing import Any

import torch
from torch.nn.functional import linear, silu
from vllm.model_executor.layers import utils
from vllm.v1.worker.cpu_worker import CPUWorker

from rollout_server.engines.vllm.expert_record import Recording


class PlainCpuWorker(CPUWorker):
    def load_model(self, *arguments: Any, **options: Any) -> None:
        utils.dispatch_cpu_unquantized_gemm = _plain
        _plain_experts()
        super().load_model(*arguments, **options)


class RecordingCpuWorker(Recording, PlainCpuWorker):
    """Also records the experts of tokens."""


def _plain(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = linear


def _plain_experts() -> None:
    """Patches vLLM's backend for experts, if this vLLM has it; in another one the weights are not found, and
    scalerl_prepare raises."""
    try:
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    except ImportError:
        return
    experts: Any = cpu_moe.CPUUnquantizedExperts
    experts._supports_grouped_gemm = classmethod(lambda cls, moe_config: (True, None))
    experts.process_weights_after_loading = lambda self, layer: None
    experts.apply = _apply_experts


def _apply_experts(
    self: Any,
    output: Any,
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    *rest: Any,
    **named: Any,
) -> None:
    """output [tokens, width] = sum over the experts of each token, in float32; w1 [E, 2 F, width], w2 [E, width, F]."""
    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in torch.unique(topk_ids).tolist():
        token, which = torch.where(topk_ids == expert)
        gate, up = linear(hidden_states[token], w1[expert]).chunk(2, dim=-1)
        made = linear(silu(gate) * up, w2[expert])
        total.index_add_(0, token, made.float() * topk_weights[token, which, None].float())
    output.copy_(total)
