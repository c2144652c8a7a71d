"""scalerl-serve: one generator process.

    scalerl-serve --engine=jax --model=DIR --port=N       sample from the policy in a Hugging Face folder
    scalerl-serve --engine=vllm --model=DIR --port=N      the same by vLLM, in an environment without jax

It builds an engine from the flags (engines/make.py), serves the contract, health checks and reflection in front of it
(service.py), and stops at SIGTERM, SIGINT or, with --exit_with_parent, the end of standard input. It then finishes
nothing: it reports NOT_SERVING, ends the calls with UNAVAILABLE (a trainer asks another server) and exits with code 0.
Wrong flags end it with one line on stderr and exit code 2.

Every client that may call it can replace its weights:

    loopback                 no TLS and no token required
    any other --host         TLS and a token, or --insecure

With --tls_client_authority a client must show a certificate as well as the token.
"""

import asyncio
import dataclasses
import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NoReturn

import grpc
from absl import app, flags, logging

from rollout_server import serve_flags as given
from rollout_server.connections import raise_file_limit
from rollout_server.engines.engine import Engine, EngineOptions
from rollout_server.engines.make import ENGINES, UsageError
from rollout_server.service import RolloutServer, serve_metrics
from scalerl_jax.contract import security
from scalerl_jax.contract.limits import STOP_SECONDS
from scalerl_jax.contract.security import OPEN, Access
from scalerl_jax.system import ending
from scalerl_jax.system.files import write_whole

MakeEngine = Callable[[], Awaitable[Engine]]
Interceptors = Callable[[], Sequence[grpc.aio.ServerInterceptor]]


# --------------------------------------------------------------------------------------------------- the server


def _check_address(host: str, port: int, *, flags: tuple[str, str] = ("host", "port")) -> None:
    """Raises UsageError that names the flags where the server cannot listen there; gRPC's own error has many lines."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise UsageError(f"--{flags[0]}={host} --{flags[1]}={port}: cannot listen there ({error})") from None


async def serve(
    make_engine: MakeEngine,
    *,
    host: str,
    port: int,
    port_file: str,
    with_parent: bool,
    stop_seconds: float = 5.0,
    access: Access = OPEN,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    metrics: tuple[str, int] | None = None,
) -> None:
    """Serves until asked to stop. Raises UsageError where it cannot start, RuntimeError when its engine has failed.

    stop_seconds: how long stopping may take before the process exits, whatever still hangs.
    metrics: host and port on which metrics are served, or None.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    if with_parent:
        if sys.stdin is None:
            raise UsageError("--exit_with_parent: standard input is closed, so the parent's end cannot be seen")
        watch = threading.Thread(target=_watch_parent, args=(loop, stop, stop_seconds), daemon=True)
        watch.start()

    # 1. Check the address first: an occupied one is reported before minutes of loading.
    _check_address(host, port)
    if metrics is not None:
        _check_address(*metrics, flags=("metrics_host", "metrics_port"))
    folder = os.path.dirname(os.path.abspath(port_file))
    if port_file and not os.access(folder, os.W_OK):
        raise UsageError(f"--port_file={port_file}: {folder} is no folder that can be written to")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the loop's own would wait until the engine is loaded
    try:
        engine = await make_engine()
    except ValueError as error:
        raise UsageError(f"--engine={given.ENGINE.value}: {error}") from error

    # 2. Start answering.
    raise_file_limit()
    try:
        server = RolloutServer(engine, host=host, port=port, access=access, interceptors=interceptors)
    except RuntimeError as error:
        raise UsageError(f"--host={host} --port={port}: cannot listen there ({error})") from None
    await server.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    for warning in access.warnings:
        logging.warning("%s", warning)
    name, identity = engine.info.name, server.service.server_id
    logging.info("%s engine at %s:%d, open to %s; server %s", name, host, server.port, access.words(host), identity)
    if metrics is not None:
        try:
            endpoint = serve_metrics(server.service, *metrics)
        except ValueError as error:
            raise UsageError(str(error)) from None
        logging.info("metrics at http://%s:%d/metrics", metrics[0], endpoint.port)
    if port_file:
        write_whole(port_file, f"{server.port}\n", durable=False)

    # 3. Wait for the end. A server whose engine has failed ends too: its supervisor can restart it.
    stopped, failed = asyncio.create_task(stop.wait()), asyncio.create_task(server.failure())
    await asyncio.wait({stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
    over = failed.done()
    logging.info("stopping")
    ending.after(stop_seconds, 1 if over else 0)
    failed.cancel()
    await server.stop()
    if over:
        raise failed.result()


def _watch_parent(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, stop_seconds: float) -> None:
    """Stops the server at the end of standard input, which comes when the parent is gone for any reason."""
    while os.read(0, 4096):
        pass
    # The event loop may be busy loading a model for long.
    ending.after(stop_seconds, 0)
    loop.call_soon_threadsafe(stop.set)


def read_access(host: str) -> security.Access:
    """Reads who may call from the flags. Raises ValueError, one line that names the flag and the file."""
    where = ("--tls_certificate", "--tls_key")
    pair = security.read_pair(given.TLS_CERTIFICATE.value, given.TLS_KEY.value, where=where)
    if given.TLS_CLIENT_AUTHORITY.value and not any(pair):
        flag = given.TLS_CLIENT_AUTHORITY
        raise ValueError(f"--{flag.name}={flag.value}: requires --tls_certificate and --tls_key")
    clients = security.read_authority(given.TLS_CLIENT_AUTHORITY.value, where="--tls_client_authority")
    token = security.read_token(given.TOKEN_FILE.value, where="--token_file")
    try:
        local = security.is_loopback(host)
    except ValueError as error:
        raise ValueError(f"--host={error}") from None
    if not (any(pair) and token) and not given.INSECURE.value and not local:
        raise ValueError(
            f"--host={host}: beyond this machine a server needs --tls_certificate, --tls_key and --token_file "
            "(or --insecure, where everybody on the network may replace its weights)"
        )
    return security.Access(
        security.server_credentials(*pair, clients) if any(pair) else None,
        bool(clients),
        token,
        warnings=tuple(_warnings(token, any(pair), "" if local else host)),
    )


def _warnings(token: str, tls: bool, beyond: str) -> Iterator[str]:
    """Warnings for the operator. beyond: the host, or empty if only this machine can reach the server."""
    for flag in (given.TLS_KEY, given.TOKEN_FILE):
        if why := security.exposed(flag.value, where=f"--{flag.name}"):
            yield why
    if beyond and not token:
        free = "may read the prompts and replace the weights"
        yield f"--insecure: every client that reaches {beyond} {free}: no token is asked for"
    if beyond and not tls:
        yield f"--insecure: a reader of the packets to and from {beyond} reads prompts and weights: there is no TLS"
        if token:
            yield f"--token_file={given.TOKEN_FILE.value}: the token is sent in plaintext, since there is no TLS"


# ---------------------------------------------------------------------------------------------------- the entry


def _fail(message: object) -> NoReturn:
    print(f"scalerl-serve: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


def _parse(argv: Sequence[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        _fail(error)


def _compute_dtype(sync_dtype: str) -> tuple[str, str]:
    """The dtype that `auto` means on this machine, and the reason."""
    from scalerl_jax.system import platforms

    if sync_dtype == "float32":
        return sync_dtype, "as --sync_dtype is"
    # vLLM's environment has no jax, and vLLM finds GPUs by itself.
    on_gpu = bool(platforms.visible_gpus(os.environ)) if given.ENGINE.value == "vllm" else None
    return platforms.fastest_dtype(on_accelerator=on_gpu)


def main(argv: Sequence[str], interceptors: Interceptors = list) -> None:
    if len(argv) > 1:
        _fail(f"{argv[1]}: not a flag")
    logging.set_verbosity(logging.INFO)
    options: dict[str, Any] = {field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(EngineOptions)}
    why = ""  # the flag gives the dtype
    if options["compute_dtype"] == "auto":
        options["compute_dtype"], why = _compute_dtype(options["sync_dtype"])

    async def make() -> Engine:
        made = await ENGINES[given.ENGINE.value](EngineOptions(**options))
        if why:  # logged only after the engine was made
            logging.info("--compute_dtype=auto: %s (%s)", options["compute_dtype"], why)
        return made

    try:
        try:
            access, further = read_access(given.HOST.value), interceptors()
        except ValueError as error:
            raise UsageError(str(error)) from None
        metrics_port = given.METRICS_PORT.value
        asyncio.run(
            serve(
                make,
                host=given.HOST.value,
                port=given.PORT.value,
                port_file=given.PORT_FILE.value,
                with_parent=given.EXIT_WITH_PARENT.value,
                stop_seconds=STOP_SECONDS[given.ENGINE.value],
                access=access,
                interceptors=further,
                metrics=(given.METRICS_HOST.value, metrics_port) if metrics_port is not None else None,
            )
        )
    except UsageError as error:
        _fail(error)
    except KeyboardInterrupt:  # before it serves, while the engine is loading
        sys.exit(128 + signal.SIGINT)


def run(interceptors: Interceptors = list) -> None:
    """interceptors: makes further interceptors, once the flags are read."""
    from scalerl_jax.cli import command_help

    command_help.print_if_asked("rollout_server.serve", config=False)
    ending.run(lambda: app.run(functools.partial(main, interceptors=interceptors), flags_parser=_parse))


if __name__ == "__main__":
    run()
