"""What both sides of bench_accelerator measure: the model, the batch, the FLOPs, the clock."""

import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from launch.machines import CHIPS, Machine, parse
from scalerl_jax.learner.packing import Segment
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.run.ledger import ModelShape

LEARNING_RATE, BETAS, EPSILON, DECAY = 5e-7, (0.9, 0.95), 1e-15, 0.01


@dataclasses.dataclass(frozen=True)
class Work:
    """The sizes of one run of the benchmark."""

    decoder: DecoderConfig
    lengths: tuple[int, ...]  # positions of the segments, which fill one packed row
    chunk: int  # tokens of the head at once
    repeats: int
    slots: int
    prompt: int  # tokens
    sampled: int  # tokens of each completion
    cache: int  # positions of long caches

    @property
    def positions(self) -> int:
        return sum(self.lengths)


LLAMA_1B = DecoderConfig(
    vocab_size=128_256, hidden_size=2048, layers=16, heads=32, kv_heads=8, head_dim=64, intermediate_size=8192,
    tied_embeddings=True, rope_theta=500_000.0, family="llama",
)  # fmt: skip
FULL = Work(LLAMA_1B, (4096, 3072, 2560, 2048, 1536, 1280, 1024, 768), 1024, 5, 64, 128, 512, 8192)
TINY = Work(
    DecoderConfig(vocab_size=320, hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate_size=128,
                  tied_embeddings=True, family="llama"),
    (96, 64, 48, 32, 16), 64, 3, 8, 16, 24, 64,
)  # fmt: skip


def make_segments(work: Work) -> list[Segment]:
    """Random tokens; a fifth of each segment is the prompt, and the log-probs are those of a nearly uniform policy."""
    rng = np.random.default_rng(0)
    loss_tokens = sum(n - n // 5 for n in work.lengths)
    out = []
    for n in work.lengths:
        mask = (np.arange(n + 1) > n // 5).astype(np.float32)
        logprobs = -np.log(work.decoder.vocab_size) + 0.1 * rng.normal(size=n + 1)
        out.append(
            Segment(
                tokens=rng.integers(0, work.decoder.vocab_size, n + 1).astype(np.int32),
                weights=mask / np.float32(loss_tokens),
                advantages=np.full(n + 1, rng.normal(), np.float32),
                generator_logprobs=logprobs.astype(np.float32),
            )
        )
    return out


def update_flops(work: Work) -> float:
    """Forward and backward: products with the weights, the head included, and causal attention inside the segments.

    What is computed a second time (remat) does not count.
    """
    return ModelShape.of(work.decoder).update_flops(work.lengths)


def machine_of(kind: str) -> Machine | None:
    """One device, by its name, with its maker's figures; None: not known here."""
    words = re.findall(r"\w+", kind.lower())
    known = [name for name, chip in CHIPS.items() if chip.flops and not chip.is_tpu and name.split("-")[0] in words]
    return parse(f"{known[0]}:1") if known else None


def timed(run: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Seconds of the first call, which compiles, and of `repeats` after one more. `run` returns when it is done."""
    seconds = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return {"first_seconds": seconds[0], "seconds": statistics.median(seconds[2:]), "all_seconds": seconds[2:]}


def speeds(work: Work, found: dict[str, Any], kind: str) -> dict[str, Any]:
    """`found` of an update with what follows from it."""
    machine, flops = machine_of(kind), update_flops(work)
    return {
        **found,
        "tokens": work.positions,
        "tokens_per_second": work.positions / found["seconds"],
        "model_flops": flops,
        "mfu": None if machine is None else flops / found["seconds"] / machine.chip.flops,
    }


def prompts(work: Work, seed: int = 0) -> Sequence[np.ndarray]:
    """One for each slot."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, work.decoder.vocab_size, (work.slots, work.prompt)).astype(np.int32)
