"""Run folders written the way the trainer writes them, by arithmetic instead of training."""

import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.run.folder import RunFolder
from tests.support.evaluations import counted

PROMPTS, SAMPLES = 100, 8
TASKS = {"6 terms": 60, "10 terms": 40}
STALENESS = {"0": 10, "1": 50, "2": 60, "4": 5}  # tokens of each update, by their staleness

# What a policy could say to get out of a page: ends of elements and comments, markup that runs, line ends that only
# JavaScript knows, half a character, a change of direction, a byte 0.
HOSTILE = (
    '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2"><!--<script>]]>'
    "<svg/onload=window.hacked=3>${window.hacked = 4}'`\\u003c\u2028\u2029\ud800\u202e\x00&lt;</think>"
)


def rate(hours: float, final: float = 0.9) -> float:
    """0.3 at 0, half of the gain at 0.2 device-hours."""
    return 0.3 + (final - 0.3) / (1 + (0.2 / hours) ** 1.6) if hours else 0.3


def compute(step: int) -> dict[str, float]:
    hours = 0.01 * step
    row = {
        "device_hours": hours,
        "model_flops": 3e13 * hours,
        "trainer_flops": 2e13 * hours,
        "generator_flops": 1e13 * hours,
    }
    row |= {"trainer_busy_hours": 0.4 * hours, "trainer_idle_hours": 0.1 * hours}
    row |= {"generator_busy_hours": 0.3 * hours, "generator_idle_hours": 0.2 * hours}
    for side in ("trainer", "generator"):
        row |= {f"{side}_evaluation_hours": 0.003 * step, f"{side}_setup_hours": 0.02}
        row |= {f"{side}_stalled_hours": 0.002 * step}
    return row | {
        "evaluation_flops": 1e12,
        "sampled_tokens": 2000 * step,
        "trained_tokens": 1500 * step,
        "evaluation_tokens": 1234,
    }


def sample(step: int, group: int, completion: str = "<think>1+1=2</think>2", **changes) -> dict[str, Any]:
    """One token a character; the third to the sixth are of the next version, every third group was interrupted."""
    count = len(completion)
    interrupted = group % 3 == 0
    fields = {
        "group": group,
        "index": group % SAMPLES,
        "prompt": f"{group}+1=",
        "answer": str(group + 1),
        "completion": completion,
        "token_ids": list(range(count)),
        "logprobs": [0.0 if interrupted and 7 <= i < 10 else -0.4 * (i % 9) for i in range(count)],
        "versions": [(step - 3, 0, 2), (step - 2, 2, 6), (step - 1, 6, count)],
        "forced": [(7, 10)] if interrupted else [],
        "verdict": group % 2 == 0,
        "reward": 1.0 if group % 2 == 0 else -1.0,
        "finish_reason": "length" if group % 5 == 4 else "stop",
        "task": "6 terms",
        "pieces": list(completion),
    }
    return {**fields, **changes}


def metrics(step: int) -> dict:
    row = {
        "pass_rate": rate(0.01 * step),
        "reward": 2 * rate(0.01 * step) - 1,
        "prompts": 24.0,
        "prompts_surviving": 20.0,
        "truncated": 0.02 if step < 20 else 0.12,
        "interrupted": 0.04,
        "repetition": 0.1,
        "repetitive": 0.0,
        "lag_mean": 1.5,
        "lag_max": 3.0,
        "lags": STALENESS,
        "length_mean": 30.0,
        "length_max": 44.0,
        "prompts_retired": step // 4,
        "optimizer_step": step - step // 10,
        "waited_seconds": 0.2,
        "update_seconds": 0.7,
        "waited_for": [["127.0.0.1:4001", 0.15], ["verifier", 0.05]],
        "compute": compute(step),
    }
    if step % 10:  # without a gradient an update has none of these
        row |= {
            "entropy": 0.3 / step**0.3,
            "mismatch": 0.002,
            "mismatch_p99": 0.03,
            "kl": 1e-5,
            "clipped": 0.0,
            "gradient_norm": 0.1,
            "effective_sample_size": 0.999,
            "effective_sample_size_sequence": 0.7,
            "effective_sample_size_geometric": 0.998,
        }
    return row


def write_run(
    path: pathlib.Path,
    *,
    updates: int = 30,
    every: int = 2,
    final: float = 0.9,
    samples: Sequence[dict[str, Any]] = (),
    parts: Sequence[str] = (),
) -> str:
    """`samples` beside those that every fifth update has. parts: the environments of a mixture, of 50 prompts each."""
    config = Config(max_steps=updates)
    config.telemetry.tensorboard, config.telemetry.samples_every, config.telemetry.samples = False, 5, 8
    clock = iter(range(1_795_000_000, 1_796_000_000))
    with RunFolder(str(path), config, clock=lambda: float(next(clock))) as run:
        run.resume(0)
        for step in range(updates + 1):
            if step:
                run.metrics(step, metrics(step))
            if step and run.wants_rollouts(step):
                run.rollouts(step, [*samples, *(sample(step, group) for group in range(8))][:8])
            if step % every == 0:
                right = round(rate(0.01 * step, final) * PROMPTS * SAMPLES)
                passes = np.full(PROMPTS, right // PROMPTS) + (np.arange(PROMPTS) < right % PROMPTS)
                tasks = {name: {"prompts": n, "pass_rate": right / PROMPTS / SAMPLES} for name, n in TASKS.items()}
                each = np.split(passes, len(parts)) if parts else []
                environments = {name: counted(part.tolist(), SAMPLES) for name, part in zip(parts, each)}
                found = counted(passes.tolist(), SAMPLES, tasks=tasks, environments=environments)
                run.evaluation(step=step, found=found, seconds=0.5, compute=compute(step))
    return str(path)


def write_warm_start(folder: pathlib.Path) -> str:
    """A supervised warm start of 60 updates, evaluated every 30: five rows of metrics; returns its folder."""
    config = Config()
    config.sft.max_steps, config.telemetry.tensorboard = 60, False
    with RunFolder(str(folder), config) as run:
        run.resume(0)
        run.metrics(0, {"evaluation_loss": 6.0})
        for step in (20, 30, 40, 60):
            row = {"loss": 60 / step, "gradient_norm": 1.0, "row_use": 0.9, "examples": 9, "tokens": 99.0}
            run.metrics(step, row if step % 30 else {**row, "evaluation_loss": 75 / step})
    return str(folder)


def embedded(text: str) -> dict:
    """The data of a page, read as a browser finds it: up to the first end of a script."""
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(block)
