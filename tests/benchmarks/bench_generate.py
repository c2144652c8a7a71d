"""The embedded generator's tokens/s against batched transformers.generate, on the same cores.

    python -m tests.benchmarks.bench_generate [--size=quickstart|10m|both] [--repeats=7] [--clock=wall|cpu]

Both sides have the same weights (a Hugging Face folder of random ones, float32), the same prompts and the same lengths
to produce: 64 completions at a time, 16 of each of 4 prompts, whose lengths are log-normal and skewed as those of
reasoning traces are (the mean is about a third of the longest). transformers samples a batch until its longest sequence
is done; the generator frees a slot when its completion is done and, where more are waiting, starts the next one in it.
Before anything is timed, transformers scores what the generator has sampled: the log-probabilities must agree to 1e-4.

  one     64 completions, nothing waits for a free slot: the pure cost of a step, and the tail of the longest
  stream  4 x 64 completions: what a trainer asks for; transformers takes one 64 after the other

A repeat times both sides in turn, so that a slow moment of the machine hits both. Printed: tokens/s (asked for; padding
and what is sampled past a completion's length are not counted) and the ratio of the medians.
"""

import asyncio
import os
import statistics
import tempfile
import time

import numpy as np
import torch
from absl import app, flags
from transformers import AutoModelForCausalLM

from rollout_server.engines.engine import EngineOptions
from rollout_server.engines.jax.engine import JaxEngine
from scalerl_jax.contract.codec import Completion, CompletionRequest, GroupRequest, Interruption, Sampling
from scalerl_jax.model import DecoderConfig
from tests.benchmarks.folders import QUICKSTART, write_folder

FLAGS = flags.FLAGS
flags.DEFINE_enum("size", "quickstart", ["quickstart", "10m", "both"], "which decoder")
flags.DEFINE_integer("repeats", 7, "timed runs of each side")
flags.DEFINE_integer("longest", 256, "tokens of the longest completion that may be drawn")
flags.DEFINE_integer("maximum_tokens", 320, "the generator's: prompt and completion")
flags.DEFINE_integer("decode_chunk", 8, "the generator's: steps between two looks at the queue")
flags.DEFINE_integer("lookahead", -1, "the generator's: chunks started ahead; -1: its own choice")
flags.DEFINE_integer("torch_threads", 0, "0: as many as there are cores")
flags.DEFINE_enum("clock", "wall", ["wall", "cpu"], "cpu: processor seconds, for a machine that others use too")

SLOTS, GROUP = 64, 16
SIZES = {
    "quickstart": QUICKSTART,
    "10m": DecoderConfig(
        vocab_size=4096,
        hidden_size=320,
        layers=6,
        heads=8,
        kv_heads=4,
        head_dim=40,
        intermediate_size=1024,
        tied_embeddings=True,
    ),
}


def make_requests(config: DecoderConfig, groups: int, rng: np.random.Generator) -> list[GroupRequest]:
    """Each completion gets its own length: a thinking budget, one forced token, and one token of answer."""
    requests = []
    for group in range(groups):
        prompt = rng.integers(0, config.vocab_size, rng.integers(12, 33)).astype(np.int32)
        budgets = np.clip(rng.lognormal(np.log(60), 0.7, GROUP), 6, FLAGS.longest).astype(int) - 2
        completions = tuple(CompletionRequest(i, int(rng.integers(2**62)), int(b)) for i, b in enumerate(budgets))
        requests.append(
            GroupRequest(0, f"{group}", prompt, completions, Sampling(answer_budget=1), Interruption((0,), ()))
        )
    return requests


def lengths(requests: list[GroupRequest]) -> np.ndarray:
    """[completions]"""
    return np.array([c.thinking_budget + 2 for request in requests for c in request.completions])


async def generate(engine: JaxEngine, requests: list[GroupRequest]) -> list[Completion]:
    async def one(request: GroupRequest) -> list[Completion]:
        return [completion async for completion in engine.generate(request)]

    return [completion for group in await asyncio.gather(*map(one, requests)) for completion in group]


def torch_generate(model: torch.nn.Module, requests: list[GroupRequest]) -> None:
    """One batch of 64: prompts padded on the left, sampled at temperature 1 until the longest is done."""
    longest = max(len(request.prompt) for request in requests)
    ids = torch.zeros((SLOTS, longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row in range(SLOTS):
        prompt = requests[row // GROUP].prompt
        ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, longest - len(prompt) :] = 1
    steps = int(lengths(requests).max())
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=steps,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    assert out.shape == (SLOTS, longest + steps)


def check(model: torch.nn.Module, requests: list[GroupRequest], completions: list[Completion]) -> None:
    """transformers gives the sampled tokens the probabilities with which the generator says it sampled them."""
    prompts = {request.group_id: request.prompt for request in requests}
    for completion in completions[:: len(completions) // 8]:
        prompt = prompts[completion.group_id]
        row = torch.from_numpy(np.concatenate([prompt, completion.token_ids]).astype(np.int64))[None]
        with torch.inference_mode():
            logp = torch.log_softmax(model(row).logits[0, len(prompt) - 1 : -1].float(), dim=-1).numpy()
        logp = logp[np.arange(len(completion.token_ids)), completion.token_ids]
        np.testing.assert_allclose(completion.logprobs, np.where(completion.sampled(), logp, 0), atol=1e-4)


async def compare(size: str) -> None:
    config, clock = SIZES[size], {"wall": time.perf_counter, "cpu": time.process_time}[FLAGS.clock]
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_folder(folder, config)
        began = time.perf_counter()
        options = EngineOptions(
            folder, slots=SLOTS, queue=4 * SLOTS, decode_chunk=FLAGS.decode_chunk, compute_dtype="float32",
            sync_dtype="float32", maximum_tokens=FLAGS.maximum_tokens,
        )  # fmt: skip
        engine = JaxEngine(options, lookahead=None if FLAGS.lookahead < 0 else FLAGS.lookahead)
        print(
            f"{size}: {parameters / 1e6:.2f} M parameters; the generator started in {time.perf_counter() - began:.1f} s"
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rng = np.random.default_rng(1)
    for case, batches in (("one", 1), ("stream", 4)):
        ours, theirs = [], []
        for repeat in range(FLAGS.repeats + 1):  # the first warms both up
            requests = make_requests(config, batches * SLOTS // GROUP, rng)
            asked = int(lengths(requests).sum())
            start = clock()
            completions = await generate(engine, requests)
            middle = clock()
            for batch in range(batches):
                torch_generate(model, requests[batch * SLOTS // GROUP : (batch + 1) * SLOTS // GROUP])
            end = clock()
            assert sum(len(completion.token_ids) for completion in completions) == asked
            if repeat == 0:
                check(model, requests, completions)
                continue
            ours.append(asked / (middle - start))
            theirs.append(asked / (end - middle))
        a, b = statistics.median(ours), statistics.median(theirs)
        share = np.mean(lengths(requests)) / lengths(requests).max()
        print(
            f"  {case:6s} generator {a:8.0f} tokens/s   transformers {b:8.0f} tokens/s   ratio {a / b:5.2f}   "
            f"({FLAGS.clock} clock, {FLAGS.repeats} repeats, mean/longest {share:.2f})",
            flush=True,
        )
    await engine.close()


def main(_) -> None:
    torch.set_num_threads(FLAGS.torch_threads or len(os.sched_getaffinity(0)))
    for size in ("quickstart", "10m") if FLAGS.size == "both" else (FLAGS.size,):
        asyncio.run(compare(size))


if __name__ == "__main__":
    app.run(main)
