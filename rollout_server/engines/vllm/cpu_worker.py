"""vLLM's worker for CPUs, with weights that can be written in place.

vLLM's CPU backend would pack the weights for oneDNN when the model is loaded and drop the originals, or, under tied
embeddings, keep both: a weight written later would be lost, or used by the embedding and not by the head. Here it
multiplies with the weights as they are, which is also what GPUs do.
"""

from typing import Any

from torch.nn.functional import linear
from vllm.model_executor.layers import utils
from vllm.v1.worker.cpu_worker import CPUWorker


class PlainCpuWorker(CPUWorker):
    def load_model(self, *arguments: Any, **options: Any) -> None:
        utils.dispatch_cpu_unquantized_gemm = _plain
        super().load_model(*arguments, **options)


def _plain(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = linear
