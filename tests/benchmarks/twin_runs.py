"""Quickstart runs for bench_fleet_twin: on all cores or pinned, with what other programs took of the cores meanwhile.

unpinned   as a user starts it: local servers; every process may use every core
pinned     the trainer has the first core, all servers share the second; one XLA thread each
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import psutil

from launch.local import LocalServers
from launch.starting import serve_command
from scalerl_jax import config_io
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.rollouts.requests import Requests
from tests.support.paths import ROOT

CONFIG = "configs/quickstart.py"
LOAD = "load.jsonl"  # in a run's folder, beside the run itself
_SECONDS = 0.5  # between two looks at the cores


def command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def environment(core: int | None) -> dict[str, str]:
    """One XLA thread where a process has one core."""
    one = {"NPROC": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"} if core is not None else {}
    return {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **one}


def on_core(core: int, argv: Sequence[str]) -> list[str]:
    """Pinned before the program begins, so that every thread of it is there."""
    pin = f"import os, sys; os.sched_setaffinity(0, {{{core}}}); os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", pin, *argv]


def warm_start(folder: str) -> str:
    """The model folder that the runs begin with; made where it is not there."""
    model = os.path.join(folder, "warm-start", "model")
    if not os.path.exists(os.path.join(model, "config.json")):
        argv = command("scalerl_jax.sft", f"--config={CONFIG}", f"--workdir={os.path.dirname(model)}")
        subprocess.run(argv, cwd=ROOT, env=environment(None), check=True)
    return model


def run(workdir: str, *, model: str, servers: int, steps: int, pinned: bool) -> None:
    """A whole run; nothing where it is there already. Raises CalledProcessError."""
    if os.path.exists(os.path.join(workdir, "summary.done")):
        return
    os.makedirs(workdir, exist_ok=True)
    first, second = sorted(os.sched_getaffinity(0))[:2]
    arguments = [f"--config={CONFIG}", f"--workdir={os.path.join(workdir, 'run')}", f"--config.model.path={model}",
                 f"--config.max_steps={steps}", f"--config.fleet.servers={servers}"]  # fmt: skip
    with contextlib.ExitStack() as stack:
        if pinned:
            addresses = stack.enter_context(_pinned_servers(workdir, model=model, servers=servers, core=second))
            arguments.append(f"--servers={','.join(addresses)}")
        argv = command("scalerl_jax.train", *arguments)
        log = stack.enter_context(open(os.path.join(workdir, "train.log"), "wb"))
        process = subprocess.Popen(
            on_core(first, argv) if pinned else argv, cwd=ROOT, env=environment(first if pinned else None), stdout=log,
            stderr=log, start_new_session=True,
        )  # fmt: skip
        stack.callback(_end, process)
        stack.enter_context(_watched(os.path.join(workdir, LOAD)))
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, argv)
    with open(os.path.join(workdir, "summary.done"), "w", encoding="ascii") as file:
        file.write("whole\n")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def _pinned_servers(workdir: str, *, model: str, servers: int, core: int) -> Iterator[Sequence[str]]:
    config = config_io.load_file(os.path.join(ROOT, CONFIG))
    longest = config.rollout.max_prompt_tokens + Requests(config, Tokenizer(model)).maximum_tokens
    argv = on_core(core, serve_command(config, model=model, maximum_tokens=longest))
    fleet = LocalServers(argv, count=servers, workdir=workdir, threads=1, environments=[environment(core)] * servers)
    try:
        yield fleet.addresses
    finally:
        fleet.close()


@contextlib.contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """`work` on a thread of its own, until it sees that the event which it is given is set."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name="beside", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watched(path: str) -> contextlib.AbstractContextManager[None]:
    """Writes down, again and again: the time, seconds that all cores have worked, and those for this process's own."""

    def watch(over: threading.Event) -> None:
        known: dict[int, float] = {}  # of processes that may be gone by now
        with open(path, "w", encoding="ascii") as file:
            while not over.wait(_SECONDS):
                spent = psutil.cpu_times()
                for process in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        times = process.cpu_times()
                        known[process.pid] = times.user + times.system
                total = spent.user + spent.system + spent.nice + getattr(spent, "steal", 0.0)
                file.write(json.dumps({"time": time.time(), "all": total, "ours": sum(known.values())}) + "\n")
                file.flush()

    return beside(watch)
