"""Makes the engine that --engine names. Nothing slow is imported before the options and the model's folder are checked.

Every function of ENGINES raises UsageError or ValueError, in one line.
"""

import glob
import logging
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from rollout_server import serve_flags as given

if TYPE_CHECKING:
    from rollout_server.engines.engine import Engine, EngineOptions


class UsageError(Exception):
    """The user's mistake: one line, exit code 2."""


def check_folder(folder: str, *, weights: bool = True) -> None:
    """Checks the folder that --model names. Raises UsageError naming what is missing.

    weights: whether the weights are needed too.
    """
    if not folder:
        raise UsageError("--model: a Hugging Face folder is needed")
    if not os.path.isdir(folder):
        raise UsageError(f"--model={folder}: no such folder")
    for name in ("config.json", "tokenizer.json"):
        if not os.path.isfile(os.path.join(folder, name)):
            raise UsageError(f"--model={folder}: it has no {name}")
    if weights and not glob.glob(os.path.join(glob.escape(folder), "*.safetensors")):
        raise UsageError(f"--model={folder}: it has no weights (*.safetensors)")


async def _make_jax(options: "EngineOptions") -> "Engine":
    check_folder(options.model)
    logging.getLogger("jax._src.xla_bridge").addFilter(_is_found)
    import jax

    from rollout_server.engines.jax.engine import JaxEngine

    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # jax asserts where it finds none of the platforms
        asked = os.environ.get("JAX_PLATFORMS", "")
        raise UsageError(f"JAX_PLATFORMS={asked}: no such device here ({error or 'jax found none'})") from None
    return JaxEngine(options)


def _is_found(record: logging.LogRecord) -> bool:
    """Filters jax's log lines about backends that it did not find; the engine logs its own device."""
    return not record.getMessage().startswith("Unable to initialize backend")


async def _make_vllm(options: "EngineOptions") -> "Engine":
    check_folder(options.model)
    if options.numerics != "fast":
        raise UsageError(f"--numerics={options.numerics}: only the jax engine computes the trainer's bits")
    needed = {"highest": "float32", "bfloat16": "bfloat16"}.get(options.head_precision, options.compute_dtype)
    if options.compute_dtype != needed:
        raise UsageError(
            f"--head_precision={options.head_precision}: the vllm engine has it with --compute_dtype={needed} only"
        )
    from rollout_server.engines.vllm.adapter import Vllm
    from rollout_server.engines.vllm.engine import VllmEngine

    vllm = Vllm(options, workers=given.TENSOR_PARALLEL.value, device_memory=given.DEVICE_MEMORY.value)
    try:
        await vllm.prepare()
        return VllmEngine(vllm, slots=options.slots, queue=options.queue)
    except ValueError:
        vllm.shutdown()
        raise


# By the values of --engine.
ENGINES: dict[str, Callable[["EngineOptions"], Awaitable["Engine"]]] = {"jax": _make_jax, "vllm": _make_vllm}
