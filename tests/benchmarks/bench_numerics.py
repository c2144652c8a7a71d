"""What config.numerics=bitwise costs, beside fast: an update, and sampling with the embedded generator.

    python -m tests.benchmarks.bench_numerics [--size=quickstart|10m|both] [--dtype=float32|bfloat16] [--repeats=7]

update    one gradient and step of 16 thousand tokens in segments of 32 to 128, in rows of 512
sampling  256 completions through 64 slots, as bench_generate's stream asks for them

A repeat times both in turn. Printed: seconds of the medians, and their ratio. Before anything is timed, the trainer's
log-probs of what was sampled bitwise are compared with the generator's: no bit may differ.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import app, flags

from rollout_server.engines.engine import EngineOptions
from rollout_server.engines.jax.engine import JaxEngine
from scalerl_jax.config import Config
from scalerl_jax.contract.codec import Completion
from scalerl_jax.learner.make_trainer import make_trainer
from scalerl_jax.learner.packing import Segment, plain, scored_only
from scalerl_jax.learner.trainer import Trainer
from scalerl_jax.model import DecoderConfig, load_hf
from tests.benchmarks import bench_generate
from tests.benchmarks.folders import write_folder

FLAGS = flags.FLAGS  # size and repeats are bench_generate's
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of both sides")

KINDS = ("fast", "bitwise")


def trainer_of(kind: Any, decoder: DecoderConfig, folder: str) -> Trainer:
    config = Config(numerics=kind)
    config.model.compute_dtype = config.model.sync_dtype = FLAGS.dtype
    config.learner.seq_len, config.learner.micro_batch_rows = 512, 8
    trainer = make_trainer(config, decoder, max_segment=FLAGS.maximum_tokens)
    trainer.start(load_hf(folder)[1])
    return trainer


def segments_of(vocabulary: int) -> list[Segment]:
    rng = np.random.default_rng(0)
    out = []
    for length in rng.integers(32, 129, 200):
        segment = plain(rng.integers(0, vocabulary, length))
        segment.weights[8:] = 1 / 200
        segment.advantages[8:] = rng.normal()
        segment.generator_logprobs[:] = -np.log(vocabulary)
        out.append(segment)
    return out


def in_turn(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each."""
    seconds: dict[str, list[float]] = {kind: [] for kind in runs}
    for repeat in range(FLAGS["repeats"].value + 1):  # the first warms up
        for kind, run in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            if repeat:
                seconds[kind].append(time.perf_counter() - began)
    return {kind: statistics.median(times) for kind, times in seconds.items()}


def check(trainer: Trainer, completions: list[Completion], prompts: dict[str, np.ndarray]) -> None:
    """The generator's log-probs are the trainer's to the bit."""
    pairs = [(prompts[completion.group_id], completion) for completion in completions]
    scored = trainer.score([scored_only(prompt, completion) for prompt, completion in pairs])
    for (prompt, completion), ours in zip(pairs, scored, strict=True):
        at = completion.sampled()
        assert np.array_equal(ours[len(prompt) :][at], np.asarray(completion.logprobs, np.float32)[at])


async def compare(size: str) -> None:
    decoder, rng = bench_generate.SIZES[size], np.random.default_rng(1)
    engines, trainers, updates = {}, {}, {}
    with tempfile.TemporaryDirectory() as folder:
        write_folder(folder, decoder)
        for kind in KINDS:
            options = EngineOptions(
                folder, slots=bench_generate.SLOTS, queue=4 * bench_generate.SLOTS, compute_dtype=FLAGS.dtype,
                sync_dtype=FLAGS.dtype, maximum_tokens=FLAGS.maximum_tokens, numerics=kind,
            )  # fmt: skip
            engines[kind] = JaxEngine(options)
            trainers[kind] = trainer_of(kind, decoder, folder)
    requests = bench_generate.make_requests(decoder, 16, rng)
    found = await bench_generate.generate(engines["bitwise"], requests)
    check(trainers["bitwise"], found, {request.group_id: request.prompt for request in requests})

    segments = segments_of(decoder.vocab_size)
    for kind, trainer in trainers.items():
        updates[kind] = lambda trainer=trainer: trainer.optim_step(trainer.forward_backward(segments))
    print(f"{size}, {FLAGS.dtype}", flush=True)
    show("update", in_turn(updates))
    sampling: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for repeat in range(FLAGS["repeats"].value + 1):
        requests = bench_generate.make_requests(decoder, 16, rng)
        for kind, engine in engines.items():
            began = time.perf_counter()
            await bench_generate.generate(engine, requests)
            if repeat:
                sampling[kind].append(time.perf_counter() - began)
    show("sampling", {kind: statistics.median(times) for kind, times in sampling.items()})
    for engine in engines.values():
        await engine.close()


def show(what: str, seconds: dict[str, float]) -> None:
    fast, bitwise = (seconds[kind] for kind in KINDS)
    print(f"  {what:9s} fast {fast:6.2f} s   bitwise {bitwise:6.2f} s   ratio {bitwise / fast:5.2f}", flush=True)


def main(_) -> None:
    wanted = FLAGS["size"].value
    for size in bench_generate.SIZES if wanted == "both" else (wanted,):
        asyncio.run(compare(size))


if __name__ == "__main__":
    app.run(main)
