"""scalerl-gateway: serves OpenAI's and Anthropic's HTTP API from rollout servers; every session is recorded.

    scalerl-gateway --model=DIR [--servers=host:port,...] [--port=8000] [--journal=DIR] [--config.a.b=v]

The base URL of an OpenAI client is http://HOST:PORT/v1, of an Anthropic client http://HOST:PORT. With /s/NAME behind
the port its calls belong to the session NAME, and /sessions/NAME/trace returns the session's tokens, log-probabilities
and versions. Without --servers, local servers are started with the weights in --model, as many as config.fleet says;
--model may be a run's folder, too: then it is the policy of the newest checkpoint.
Of the config only fleet, seed, rollout.end_of_thinking and environment's template_arguments and history are read. It
serves until SIGTERM or Ctrl-C.

    loopback                 no TLS and no token required
    any other --host         --token_file and TLS, or --insecure

With --journal each session is a file there, written before a call is answered. The same command continues from these
files, and answers repeated calls from them.
"""

import asyncio
import contextlib
import gc
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from absl import flags

from launch.local import StartError
from launch.starting import SPARE, StartingServers
from scalerl_jax.cli import command_flags, entry
from scalerl_jax.config import Config
from scalerl_jax.contract import security
from scalerl_jax.contract.fingerprint import tokenizer_fingerprint
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.gateway.chat import Chat, vocabulary_of
from scalerl_jax.gateway.generators import Generators, NoServer
from scalerl_jax.gateway.server import check_installed, listen, serve
from scalerl_jax.gateway.sessions import Sessions
from scalerl_jax.model.decoder_config import check_folder
from scalerl_jax.rollouts.servers.discovery import ListedServers
from scalerl_jax.system import files, signals

FLAGS = flags.FLAGS


def main(config: Config, arguments: list[str]) -> None:
    signals.expect("the gateway has stopped")
    if arguments:
        raise entry.UserError(f"{arguments[0]}: not a flag")
    with entry.user_mistakes():
        check_installed()

    # ---- 1. What is given --------------------------------------------------------------------------------------------
    model = config.model.path = model_folder()
    with entry.user_mistakes():
        check_folder("--model", model)
        tokenizer = Tokenizer(model)
        chat = Chat.of(config, tokenizer)
        token = access()
        listed = ListedServers.of(FLAGS.servers, config.fleet)
    template = chat.template
    for line in [template.unknown_end(tokenizer)] if template is not None else ["the model has no chat template"]:
        if line:
            print(line, file=sys.stderr)
    if FLAGS.journal:
        entry.check_out("--journal", FLAGS.journal)
        os.makedirs(FLAGS.journal, exist_ok=True)
    sessions = Sessions(
        folder=FLAGS.journal, seed=config.seed, most=FLAGS.sessions, most_turns=FLAGS.turns,
        most_bytes=FLAGS.session_bytes,
    )  # fmt: skip

    # ---- 2. Serving --------------------------------------------------------------------------------------------------
    with contextlib.ExitStack() as stack:
        stack.enter_context(entry.user_mistakes(NoServer, StartError, ValueError))
        listening = stack.enter_context(contextlib.closing(listening_socket(FLAGS.host, FLAGS.port)))
        # This process computes nothing, so the servers may have all of the machine's GPUs.
        share = 1 - 2 * SPARE
        longest = FLAGS.maximum_tokens
        addresses = stack.enter_context(
            servers(config, listed, folder=FLAGS.journal, maximum_tokens=longest, share=share)
        )
        signals.be(signals.HOLD)
        if FLAGS.exit_with_parent:
            signals.request_with_parent()

        async def serve_http() -> None:
            generators = Generators(
                addresses,
                credentials=listed.credentials,
                fingerprint=tokenizer_fingerprint(model),
                vocabulary=vocabulary_of(model),
                resolve=listed.resolve,
                seconds=config.fleet.discovery_seconds,
            )
            watching = asyncio.create_task(generators.run())
            try:
                await generators.ready(config.fleet.connect_seconds)

                from scalerl_jax.gateway.app import Gateway, Options

                names = names_of_model()
                app = Gateway(chat, generators, sessions, Options(names, token, FLAGS.request_seconds)).app()
                serving = asyncio.ensure_future(serve_app(listening, app, what=names[0]))
                await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
                await (serving if serving.done() else watching)  # which ends only by an exception
            finally:
                sessions.close()
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

        from uvicorn.loops.auto import auto_loop_factory

        gc.collect()
        gc.freeze()  # existing objects stay: garbage collection skips them, which saves a fifth of a turn's time
        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:  # uvloop's, which is faster
            runner.run(serve_http())
    signals.raise_if_interrupted()


def model_folder() -> str:
    """--model; for a run's folder, RUN/exported/STEP, where the policy of its newest checkpoint is written if needed.

    Raises UserError if that cannot be done.
    """
    if not os.path.isdir(os.path.join(FLAGS.model, "checkpoints")):
        return FLAGS.model
    out = os.path.join(FLAGS.model, "exported", str(files.newest_step(FLAGS.model) or 0))
    if not os.path.isdir(out):
        command = [sys.executable, "-m", "scalerl_jax.export", f"--workdir={FLAGS.model}", f"--out={out}"]
        # A process of its own: this one has no JAX, and leaves the devices to the servers.
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            why = done.stderr.strip().removeprefix("error: ") or "its policy was not written"
            raise entry.UserError(f"--model={FLAGS.model}: {why}")
        print(done.stdout, end="", file=sys.stderr)
    return out


def access() -> str:
    """The token that calls must carry; "": none. Raises ValueError if the flags do not fit together."""
    token = security.read_token(FLAGS.token_file, where="--token_file")
    tls = security.read_pair(FLAGS.tls_certificate, FLAGS.tls_key, where=("--tls_certificate", "--tls_key"))
    try:
        local = security.is_loopback(FLAGS.host)
    except ValueError as error:
        raise ValueError(f"--host={error}") from None
    if not local and not FLAGS.insecure and not (token and any(tls)):
        raise ValueError(
            f"--host={FLAGS.host}: beyond this machine it needs --token_file, --tls_certificate and --tls_key "
            "(or --insecure, where everybody on the network may read and ask)"
        )
    return token


def listening_socket(host: str, port: int) -> socket.socket:
    """Raises ValueError naming the flags if the address cannot be used."""
    try:
        return listen(host, port)
    except OSError as error:
        raise ValueError(f"--host={host} --port={port}: cannot listen there ({error})") from None


@contextlib.contextmanager
def servers(
    config: Config, listed: ListedServers, *, folder: str, maximum_tokens: int, share: float
) -> Iterator[tuple[str, ...]]:
    """The addresses of the given servers, or of local ones, which end with the context.

    folder: for the files of local servers; empty: a temporary one. share: see StartingServers.
    """
    if listed.addresses:
        yield listed.addresses
        return
    with tempfile.TemporaryDirectory(prefix="scalerl-servers-") as temporary:
        local = StartingServers(config, folder or temporary, maximum_tokens=maximum_tokens, share=share)
        for line in local.remarks:
            print(line, file=sys.stderr)
        with local:
            yield local.servers().addresses


def names_of_model() -> tuple[str, ...]:
    """Model names that clients may use, the first is its own; "*": any."""
    folder = os.path.basename(os.path.abspath(FLAGS.model))
    return (folder, "*") if FLAGS.names == ["*"] else tuple(FLAGS.names) or (folder,)


async def serve_app(listening: socket.socket, app: Any, *, what: str) -> None:
    """Serves an application on the socket, as the flags say, until a signal."""
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"serving {what} at http{'s' * bool(FLAGS.tls_certificate)}://{shown}:{port}", flush=True)
    listening.listen(2048)  # before the port file: its readers can connect
    if FLAGS.port_file:
        files.write_whole(FLAGS.port_file, f"{port}\n", durable=False)
    tls: dict[str, Any] = {"ssl_certfile": FLAGS.tls_certificate or None, "ssl_keyfile": FLAGS.tls_key or None}
    await serve(app, listening, over=signals.requested, **tls)


def run() -> None:
    command_flags.gateway()
    entry.run_with_arguments(main, default=Config())


if __name__ == "__main__":
    run()
