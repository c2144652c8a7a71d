"""The hosts of one trainer come together: first on a line of their own (link.py), then as one jax.distributed.

Nothing may have looked for JAX's devices before. The first host listens where all were told to find it; JAX's own
coordinator, which the first host runs too, is at a free port of it that the others hear of on that line.
"""

import atexit
import contextlib
import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator

import jax

from scalerl_jax.config import Config
from scalerl_jax.config_io import to_json
from scalerl_jax.hosts.link import BEAT_SECONDS, JOIN_SECONDS, SILENCE_SECONDS, FirstHost, OtherHost
from scalerl_jax.hosts.rank import Rank
from scalerl_jax.system import signals

# JAX's own watch over the hosts, behind link.SILENCE_SECONDS: it ends a process with a dump of its stack.
HEARTBEAT_SECONDS = 45
SHUTDOWN_SECONDS = 20


@contextlib.contextmanager
def joined(rank: Rank, config: Config, workdir: str) -> Iterator[FirstHost | OtherHost]:
    """In it jax.devices() are those of all hosts; however it is left, the others hear of it.

    Raises link.JoinError where they do not come together, or are not started alike.
    """
    greeting = {
        "key": hashlib.sha256(os.path.abspath(workdir).encode()).hexdigest(),
        "jax": jax.__version__,
        "config": hashlib.sha256(to_json(config).encode()).hexdigest()[:16],
        "host_count": rank.count,
    }
    host = rank.coordinator.rpartition(":")[0]
    if rank.first:
        first = FirstHost(rank.coordinator, rank.count, greeting=greeting, welcome=lambda: {"port": _free_port()})
        with _ending(first):
            port = first.wait_for_all(lambda line: print(line, file=sys.stderr, flush=True))["port"]
            _initialize(f"{host}:{port}", rank, bind=f"0.0.0.0:{port}")
            yield first
    else:
        other = OtherHost(rank.coordinator, rank.index, greeting=greeting)
        with _failing(other):
            port = other.welcome()["port"]
            _initialize(f"{host}:{port}", rank)
            yield other


def _initialize(address: str, rank: Rank, bind: str | None = None) -> None:
    if "grpc_proxy" not in os.environ:  # as limits.PROXY has it; JAX's own channel has no option for it
        os.environ["no_grpc_proxy"] = address.rpartition(":")[0]  # noqa: SIM112 (gRPC's own spelling)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us (system/signals.py)
    jax.distributed.initialize(
        address,
        rank.count,
        rank.index,
        initialization_timeout=int(JOIN_SECONDS),
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        coordinator_bind_address=bind,
    )
    jax.devices()  # here the hosts wait for each other


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _ending(first: FirstHost) -> Iterator[None]:
    """However the first host leaves, it says how."""
    signals.before_exit(lambda: first.end("it was told to stop", 128 + signals.number()))
    try:
        yield
    except BaseException as error:
        _tell(error, first.end)
        raise
    first.end("", 0)


@contextlib.contextmanager
def _failing(other: OtherHost) -> Iterator[None]:
    """A host that cannot go on ends all."""
    try:
        yield
    except BaseException as error:
        _tell(error, other.fail)
        raise
    other.close()


def _tell(error: BaseException, say: Callable[[str, int], None]) -> None:
    """Says to the other hosts what this one ends with, in a line, and its exit code."""
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
        # With a host that is gone a computation fails before anybody knows which: the line finds out, and leaves.
        time.sleep(SILENCE_SECONDS + 4 * BEAT_SECONDS)
    code = _code_of(error)
    leave_alone(code)
    say((str(error).strip().splitlines() or [type(error).__name__])[0], code)


def leave_alone(code: int) -> None:
    """At its end this process does not wait for the others, as jax.distributed would, and abort where they are gone."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)  # what is registered last is called first


def _code_of(error: BaseException) -> int:
    """With which entry.py will leave."""
    match error:
        case signals.Interrupted():
            return 128 + error.number
        case SystemExit():
            return error.code if isinstance(error.code, int) else int(bool(error.code))
        case ValueError():
            return 2
        case _:
            return 1
