"""Which GPUs, and how much of their memory, each process of a run on one machine gets.

Left alone, JAX takes three quarters of every GPU that it sees as soon as it computes, so the second process of a run
finds none. With n GPUs and s local servers:

    n > s    each of the last s GPUs is one server's; the trainer has all others
    else     server i is on GPU i mod n, and the servers on one GPU together have the fraction `share` of its memory;
             the trainer is on all GPUs, with 1 - share - SPARE of the memory of each

If the user has set JAX's memory (XLA_PYTHON_CLIENT_MEM_FRACTION and similar variables), nothing is set here.

Left out on purpose: TPUs, which only one process can use, and several hosts; both use --servers.
"""

import dataclasses
import os
from collections.abc import Mapping

from scalerl_jax.system.platforms import jax_uses_gpus, visible_gpus

# The share of a shared GPU's memory left free: every process also has a CUDA context and the libraries' workspace.
SPARE = 0.1
LEAST_VLLM = 0.05  # the least value that scalerl-serve accepts for --device_memory
_OWN_CHOICE = (
    "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sharing:
    """Variables to add to each process's environment."""

    trainer: dict[str, str]
    servers: list[dict[str, str]]  # one for each local server
    vllm_memory: float  # the share of its GPU that each server may use; vLLM gets it as a flag
    sentence: str  # for the user


def share_out(
    *, servers: int, share: float, engine: str = "jax", environment: Mapping[str, str] | None = None
) -> Sharing | None:
    """Splits this machine's GPUs between trainer and local servers.

    Returns None without GPUs, without local servers, or if the user has set JAX's memory.

    Raises ValueError where a server's share is less than its engine accepts.

    Args:
        servers: number of local servers.
        share: share of a GPU's memory for all local servers on it together, where the trainer is on it too.
        engine: the servers' engine.
        environment: environment variables to read; by default this process's.
    """
    environment = os.environ if environment is None else environment
    if any(environment.get(name) for name in _OWN_CHOICE):
        return None
    gpus = visible_gpus(environment) if jax_uses_gpus(environment) else []
    if not gpus or not servers:
        return None
    if len(gpus) > servers:
        theirs = gpus[-servers:]
        return Sharing(
            trainer={"CUDA_VISIBLE_DEVICES": ",".join(gpus[:-servers])},
            servers=[{"CUDA_VISIBLE_DEVICES": gpu} for gpu in theirs],
            vllm_memory=0.9,
            sentence=f"{len(gpus)} GPUs: {_count(servers, 'server')} on {_gpus(theirs)}, the trainer on "
            f"{_gpus(gpus[:-servers])}",
        )
    most = -(-servers // len(gpus))  # servers on one GPU
    trainer, server = 1 - SPARE - share, share / most
    if engine == "vllm" and server < LEAST_VLLM:
        raise ValueError(
            f"config.fleet.gpu_share={share}: {most} of config.fleet.servers={servers} are on one GPU, and vLLM takes "
            f"no less than {LEAST_VLLM} of one"
        )
    each = "each " if servers > 1 else "the "
    return Sharing(
        trainer=_memory(trainer),
        servers=[{"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)], **_memory(server)} for i in range(servers)],
        vllm_memory=server,
        sentence=f"{_count(len(gpus), 'GPU')} for the trainer and {_count(servers, 'local server')}: of its memory the "
        f"trainer takes {trainer:.0%}, {each}server {server:.0%} (config.fleet.gpu_share)",
    )


def _memory(share: float) -> dict[str, str]:
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.3f}"}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}" if number > 1 else f"one {what}"


def _gpus(names: list[str]) -> str:
    return ("GPU " if len(names) == 1 else "GPUs ") + ", ".join(names)
