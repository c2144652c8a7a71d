"""What the warning signs cost a step on the host: effective sample sizes, the 99th percentile, repetition, staleness.

    python -m tests.benchmarks.bench_signs [--repeats=5]

The device computes nothing for them: the log-probs are on the host already, since each is judged before an update is
applied. So their cost is the time of these functions, on batches of the quickstart's size and of the paper's (768
completions of 14,000 tokens, of which the update itself takes minutes). `build` is the whole batch with the signs of
its completions; the rest is what an update adds after the gradient.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
from absl import app, flags

from scalerl_jax.config import ObjectiveConfig
from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments import Row
from scalerl_jax.environments.base import RIGHT, WRONG
from scalerl_jax.learner.batch import build, off_policy_metrics, repetition_metrics
from tests.learner.test_batch import Group

FLAGS = flags.FLAGS
flags.DEFINE_integer("repeats", 5, "timed calls of each", lower_bound=1)

SIZES = {"quickstart": (24, 8, 40), "paper": (48, 16, 14_000)}  # prompts, completions of each, tokens


def make_groups(prompts: int, size: int, tokens: int) -> list[Group]:
    """Half of every group is right; each completion was sampled by three versions; token ids as Zipf has them."""
    rng = np.random.default_rng(0)

    def completion(index: int) -> Completion:
        thirds = [0, tokens // 3, 2 * tokens // 3, tokens]
        return Completion(
            incarnation=1, group_id="train/0", index=index,
            token_ids=(rng.zipf(1.3, tokens) % 150_000).astype(np.int32),
            logprobs=-rng.random(tokens, np.float32),
            versions=tuple((step, a, b) for step, a, b in zip((3, 4, 5), thirds, thirds[1:])),
            forced=(), finish_reason="stop",
        )  # fmt: skip

    return [
        Group(
            Row("", "", index=p, token_ids=np.arange(200, dtype=np.int32)),
            tuple(completion(index) for index in range(size)),
            tuple(RIGHT if index % 2 else WRONG for index in range(size)),
        )
        for p in range(prompts)
    ]


def seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(FLAGS.repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(prompts: int, size: int, tokens: int) -> dict[str, float]:
    """Seconds of each part."""
    groups = make_groups(prompts, size, tokens)
    batch = build(groups, ObjectiveConfig(), number=8)
    rng = np.random.default_rng(1)
    logprobs = [s.generator_logprobs + rng.normal(0, 0.02, len(s.tokens)).astype(np.float32) for s in batch.segments]
    completions = [completion.token_ids for group in groups for completion in group.completions]
    return {
        "ratios": seconds(lambda: off_policy_metrics(batch.segments, logprobs, batch.origins)),
        "repetition": seconds(lambda: repetition_metrics(completions)),
        "build, repetition included": seconds(lambda: build(groups, ObjectiveConfig(), number=8)),
    }


def main(_) -> None:
    for name, (prompts, size, tokens) in SIZES.items():
        print(f"{name}: {prompts * size} completions of {tokens:,} tokens")
        for what, took in measure(prompts, size, tokens).items():
            print(f"  {what:<28} {1000 * took:9.2f} ms")


if __name__ == "__main__":
    app.run(main)
