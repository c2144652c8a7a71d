"""scalerl-tinker: serves Tinker's public client, training and sampling on your machines.

    scalerl-tinker --model=DIR --workdir=DIR [--servers=host:port,...] [--port=8000] [--config.a.b=v]

A client needs TINKER_BASE_URL=http://HOST:PORT and TINKER_API_KEY=tml-anything. It trains the model in --model, all of
its parameters (rank 0) or an adapter, on this process's devices, and samples on rollout servers: those of --servers, or
local ones, as many as config.fleet says. Of the config only fleet, learner, model and seed are read. It serves until
SIGTERM or Ctrl-C; after a kill the same command continues where it was.

    loopback                 no TLS and no token required
    any other --host         --token_file and TLS, or --insecure
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from absl import flags

from launch.local import StartError
from scalerl_jax.cli import command_flags, entry
from scalerl_jax.config import Config
from scalerl_jax.contract.fingerprint import tokenizer_fingerprint
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.gateway.command import (
    access,
    listening_socket,
    model_folder,
    names_of_model,
    serve_app,
    servers,
)
from scalerl_jax.gateway.generators import Generators, NoServer
from scalerl_jax.gateway.server import check_installed
from scalerl_jax.model.decoder_config import DecoderConfig, check_folder, read_config
from scalerl_jax.rollouts.servers.discovery import ListedServers
from scalerl_jax.run import continuing
from scalerl_jax.run.folder import acquire_lock, explain_write_errors
from scalerl_jax.system import files, signals

FLAGS = flags.FLAGS
_BASE = "base_model.json"  # of the workdir


def main(config: Config, arguments: list[str]) -> None:
    signals.expect("the server has stopped: the same command goes on")
    if arguments:
        raise entry.UserError(f"{arguments[0]}: not a flag")
    # ---- 1. What is given --------------------------------------------------------------------------------------------
    with entry.user_mistakes():
        check_installed()
        entry.check_out("--workdir", FLAGS.workdir)
        model = config.model.path = _base_model(FLAGS.workdir)
        check_folder("--model", model)
        tokenizer, decoder = Tokenizer(model), read_config(model)
        tokenizer.check_vocabulary(decoder.vocab_size)
        token = access()
        longest = FLAGS.maximum_tokens
        if longest > config.learner.seq_len + 1:
            raise ValueError(f"--maximum_tokens={longest}: above config.learner.seq_len={config.learner.seq_len}")
        listed = ListedServers.of(FLAGS.servers, config.fleet)
    os.makedirs(FLAGS.workdir, exist_ok=True)

    # ---- 2. Serving --------------------------------------------------------------------------------------------------
    chosen = continuing.settle_dtypes(config, FLAGS.workdir)
    print(*chosen, sep="\n", end="\n" * bool(chosen), file=sys.stderr)
    with explain_write_errors(FLAGS.workdir), contextlib.ExitStack() as stack:
        stack.enter_context(entry.user_mistakes(NoServer, StartError, ValueError))
        lock = acquire_lock(os.path.join(FLAGS.workdir, "lock"), f"--workdir={FLAGS.workdir}: another server")
        stack.callback(os.close, lock)
        files.write_whole(os.path.join(FLAGS.workdir, _BASE), json.dumps({"folder": model}) + "\n")
        listening = stack.enter_context(contextlib.closing(listening_socket(FLAGS.host, FLAGS.port)))
        share = config.fleet.gpu_share
        local = servers(config, listed, folder=FLAGS.workdir, maximum_tokens=longest, share=share)
        addresses = stack.enter_context(local)
        signals.be(signals.HOLD)
        if FLAGS.exit_with_parent:
            signals.request_with_parent()

        def generators() -> Generators:
            fingerprint = tokenizer_fingerprint(model)
            shown, vocabulary = listed.credentials, decoder.vocab_size
            return Generators(addresses, credentials=shown, fingerprint=fingerprint, vocabulary=vocabulary)

        asyncio.run(_serve(config, listening, generators, decoder, tokenizer, longest=longest, token=token))
    signals.raise_if_interrupted()


def _base_model(workdir: str) -> str:
    """The folder of --model; of a run's, the one that the first start exported, however far the run has come since.

    Raises ValueError where the runs in the workdir are of another model.
    """
    path, given = os.path.join(workdir, _BASE), os.path.abspath(FLAGS.model)
    if not os.path.exists(path):
        return os.path.abspath(model_folder())
    folder = str(files.read_object(path).get("folder"))
    if folder != given and not folder.startswith(os.path.join(given, "exported", "")):
        raise ValueError(f"--model={FLAGS.model}: the runs in --workdir={workdir} are of {folder}")
    return folder


async def _serve(
    config: Config, listening: socket.socket, make: Callable[[], Generators], decoder: DecoderConfig,
    tokenizer: Tokenizer, *, longest: int, token: str,
) -> None:  # fmt: skip
    from scalerl_jax.tinker.samplers import Samplers
    from scalerl_jax.tinker.sampling_calls import SamplingCalls
    from scalerl_jax.tinker.store import Future, Store
    from scalerl_jax.tinker.tinker_app import Tinker
    from scalerl_jax.tinker.training import Training

    loop, failed, generators = asyncio.get_running_loop(), asyncio.Event(), make()
    faults: list[BaseException] = []

    def fail(error: BaseException) -> None:
        faults.append(error)
        loop.call_soon_threadsafe(failed.set)

    def answered(future: Future) -> None:
        loop.call_soon_threadsafe(tinker.answered, future)

    samplers = Samplers(
        generators, decoder=decoder, dtype=config.model.sync_dtype, chunk_bytes=config.fleet.chunk_bytes,
        push_seconds=config.fleet.push_seconds, score_seconds=FLAGS.request_seconds,
    )  # fmt: skip
    training = Training(config, decoder, folder=FLAGS.workdir, longest=longest, answered=answered, fail=fail)
    names = names_of_model()
    store = Store(FLAGS.workdir)

    def capacity() -> int:
        return min(longest, generators.maximum_tokens or longest)

    sampling = SamplingCalls(
        store, samplers, vocabulary=decoder.vocab_size, tokenizer=tokenizer, capacity=capacity, seed=config.seed,
        seconds=FLAGS.request_seconds, answered=answered, fail=fail,
    )  # fmt: skip
    tinker = Tinker(
        store, training, sampling, family=decoder.family, capacity=capacity, folder=config.model.path, names=names,
        token=token, longest=longest,
    )  # fmt: skip
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(generators.run())]
    try:
        await generators.ready(config.fleet.connect_seconds)
        tasks += [asyncio.create_task(samplers.run()), asyncio.create_task(failed.wait())]
        training.start()
        tinker.begin()
        tasks.append(asyncio.create_task(serve_app(listening, tinker.app(), what=names[0])))
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for error in faults:
            raise error
        for task in done:
            task.result()
        await asyncio.to_thread(training.close)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        store.close()


def run() -> None:
    command_flags.tinker()
    entry.run_with_arguments(main, default=Config())


if __name__ == "__main__":
    run()
