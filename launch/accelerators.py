"""Which GPUs, and how much of their memory, each process of a run on one machine gets.

Left alone, JAX takes three quarters of every GPU that it sees as soon as it computes, so the second process of a run
finds none. With n GPUs and s local servers:

    n > s    each of the last s GPUs is one server's; the trainer has all others
    else     server i is on GPU i mod n, and those on one GPU take `share` of its memory between them; the trainer is on
             all GPUs, and takes of each what they leave, less SPARE

A user's own word on JAX's memory (XLA_PYTHON_CLIENT_MEM_FRACTION and its like) is kept: then nothing is set here.

Left out on purpose: TPUs, which one process has to itself, and several hosts; both use --servers.
"""

import dataclasses
import os
from collections.abc import Mapping

from scalerl_jax.system.platforms import jax_uses_gpus, visible_gpus

# The share of a shared GPU's memory left free: every process also has a CUDA context and the libraries' workspace.
SPARE = 0.1
LEAST_VLLM = 0.05  # the least that scalerl-serve takes for --device_memory
_OWN_CHOICE = (
    "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sharing:
    """What is added to each process's environment."""

    trainer: dict[str, str]
    servers: list[dict[str, str]]  # one for each local server
    vllm_memory: float  # the share of its GPU that each server may take, for vLLM, which asks for it by a flag
    sentence: str  # for the user; empty: there is nothing to say


def share_out(
    *, servers: int, share: float, engine: str = "jax", environment: Mapping[str, str] | None = None
) -> Sharing | None:
    """How trainer and local servers share this machine's GPUs; None: there are none, or the user has chosen.

    Raises ValueError where the share of a server is one that its engine cannot take.

    Args:
        servers: how many local ones.
        share: of a GPU's memory, for the local servers on it together where the trainer is on it too.
        engine: of the servers.
        environment: default: this process's own.
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
