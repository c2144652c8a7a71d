"""Whether scalerl-train is one host of several, and how these join: by their own line (link.py), then jax.distributed.

Nothing may have queried JAX's devices before. The first host listens at the address given to all; JAX's own
coordinator, which the first host runs too, is at a free port of it, which is sent to the others on that line.
"""

import atexit
import contextlib
import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from scalerl_jax.config import Config
from scalerl_jax.config_io import to_json
from scalerl_jax.hosts import rank as ranks
from scalerl_jax.hosts.follow import follow
from scalerl_jax.hosts.lead import Lead
from scalerl_jax.hosts.link import BEAT_SECONDS, JOIN_SECONDS, SILENCE_SECONDS, FirstHost, OtherHost
from scalerl_jax.hosts.rank import Rank
from scalerl_jax.rollouts.servers.discovery import Discovery, read_credentials
from scalerl_jax.system import signals

# JAX's own watch over the hosts, later than link.SILENCE_SECONDS: it ends a process with a dump of its stack.
HEARTBEAT_SECONDS = 45
SHUTDOWN_SECONDS = 20


def enter(config: Config, flags: Any, stack: contextlib.ExitStack) -> Lead | None:
    """None if there is one host. On the first of several: its Lead of the others, until the stack is closed.

    Another host follows the first one's commands and exits with its exit code (SystemExit). To be called before
    anything queries JAX's devices. Raises ValueError, one line, if the hosts cannot join.

    flags: those of scalerl-train.
    """
    rank = ranks.find(flags.hosts, coordinator=flags.coordinator, count=flags.host_count, index=flags.host_index)
    if rank is None:
        return None
    print(rank, file=sys.stderr, flush=True)
    if not flags.servers:
        raise ValueError("--servers: needed with several hosts, each of which sends its part of the weights to them")
    if rank.first:
        first = stack.enter_context(joined(rank, config, flags.workdir))
        assert isinstance(first, FirstHost)
        return Lead(first)
    credentials = read_credentials(config.fleet, name=Discovery(flags.servers).name)
    with joined(rank, config, flags.workdir) as other:
        assert isinstance(other, OtherHost)
        signals.be(signals.HOLD)
        code = follow(rank=rank, other=other, workdir=flags.workdir, credentials=credentials)
    if code:
        leave_alone(code)
    raise SystemExit(code)


@contextlib.contextmanager
def joined(rank: Rank, config: Config, workdir: str) -> Iterator[FirstHost | OtherHost]:
    """Within it jax.devices() are those of all hosts; however it exits, the others are notified.

    Raises link.JoinError if they cannot join, or are not started alike.
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
        signals.before_exit(lambda: first.end("it was told to stop", 128 + signals.number()))
        with _reporting(first.end):
            port = first.wait_for_all(lambda line: print(line, file=sys.stderr, flush=True))["port"]
            _initialize(f"{host}:{port}", rank, bind=f"0.0.0.0:{port}")
            yield first
        first.end("", 0)
    else:
        other = OtherHost(rank.coordinator, rank.index, greeting=greeting)
        with _reporting(other.fail):
            port = other.welcome()["port"]
            _initialize(f"{host}:{port}", rank)
            yield other
        other.close()


def _initialize(address: str, rank: Rank, bind: str | None = None) -> None:
    if "grpc_proxy" not in os.environ:  # as limits.PROXY has it; JAX's own channel has no option for it
        os.environ["no_grpc_proxy"] = address.rpartition(":")[0]  # noqa: SIM112 (gRPC's own spelling)
    jax.config.update("jax_enable_preemption_service", False)  # it would intercept our SIGTERM (system/signals.py)
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
def _reporting(fail: Callable[[str, int], None]) -> Iterator[None]:
    """If this host cannot continue, all end: `fail` sends the others its error, in one line, and its exit code."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            # If a host is gone a computation fails before it is known which: the line detects it, and exits.
            time.sleep(SILENCE_SECONDS + 4 * BEAT_SECONDS)
        code = _code_of(error)
        leave_alone(code)
        fail((str(error).strip().splitlines() or [type(error).__name__])[0], code)
        raise


def leave_alone(code: int) -> None:
    """Makes this process exit without waiting for the others: jax.distributed would, and abort if they are gone."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)  # what is registered last is called first


def _code_of(error: BaseException) -> int:
    """The exit code that entry.py will use."""
    match error:
        case signals.Interrupted():
            return 128 + error.number
        case SystemExit():
            return error.code if isinstance(error.code, int) else int(bool(error.code))
        case ValueError():
            return 2
        case _:
            return 1
