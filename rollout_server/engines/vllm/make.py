"""The vllm engine's flags, and the function with which scalerl-serve makes it."""

from typing import TYPE_CHECKING

from absl import flags

from rollout_server.engines import model_folder

if TYPE_CHECKING:
    from rollout_server.engines.engine import Engine, EngineOptions

TENSOR_PARALLEL = flags.DEFINE_integer("tensor_parallel", 1, "Devices that share the model; vllm only.", lower_bound=1)
DEVICE_MEMORY = flags.DEFINE_float("device_memory", 0.9, "Share of a GPU's memory to use; vllm only.", 0.05, 1.0)


async def make(options: "EngineOptions") -> "Engine":
    """Raises UsageError or ValueError in one line."""
    model_folder.check(options.model, weights=True)
    if options.numerics != "fast":
        raise model_folder.UsageError(f"--numerics={options.numerics}: only the jax engine computes the trainer's bits")
    needed = {"highest": "float32", "bfloat16": "bfloat16"}.get(options.head_precision, options.compute_dtype)
    if options.compute_dtype != needed:
        raise model_folder.UsageError(
            f"--head_precision={options.head_precision}: the vllm engine has it with --compute_dtype={needed} only"
        )
    from rollout_server.engines.vllm.adapter import Vllm
    from rollout_server.engines.vllm.engine import VllmEngine

    vllm = Vllm(options, workers=TENSOR_PARALLEL.value, device_memory=DEVICE_MEMORY.value)
    try:
        await vllm.prepare()
        return VllmEngine(vllm, slots=options.slots, queue=options.queue)
    except ValueError:
        vllm.shutdown()
        raise
