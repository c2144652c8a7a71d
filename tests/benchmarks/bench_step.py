"""Whole RL steps a minute (generate, verify, update, weights out) against TRL's GRPO trainer with its CISPO loss.

    python -m venv .venv-trl
    .venv-trl/bin/pip install torch==2.13.0 transformers==5.17.0 trl==1.16.0
    python -m tests.benchmarks.bench_step [--load=even|skewed|both] [--steps=12] [--rounds=3]
                                          [--trl_python=.venv-trl/bin/python] [--model=DIR]

Both sides start from the same policy and take steps of 24 prompts with 8 completions each, as long as the policy makes
them, in float32, on all cores:

  even    the quickstart's warm-started policy (made first, a minute and a half, unless --model names one): traces of 20
          to 45 tokens
  skewed  random weights that stop anywhere: geometric lengths with a mean of about 60 tokens, cut at 320, as skewed as
          those of reasoning traces


  here   scalerl-train with two local servers: pipeline(8), the whole recipe, integers compared as such
  TRL    GRPOTrainer in one process: the same prompts and lengths, its rewards a comparison of strings. Its ways of
         sampling (generate with a dynamic or a static cache, continuous batching) are tried for two steps, with all
         192 completions in one pass of the model or in three; the fastest one is the peer.

A round runs each side for --steps, in turn. A step's time is from the end of the one before to its own end; the first
two of each run are left out (compilation, and a pipeline that fills). Printed: the medians over all rounds, as steps
and tokens per minute, and the ratio.
"""

import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from absl import app, flags

from scalerl_jax.config import Config
from scalerl_jax.config_io import parse_argv
from scalerl_jax.environments.load import load_rows
from scalerl_jax.environments.tokenizer import Tokenizer
from tests.benchmarks.folders import write_stopping_policy
from tests.support.paths import ROOT

FLAGS = flags.FLAGS
flags.DEFINE_enum("load", "both", ["even", "skewed", "both"], "which completions")
flags.DEFINE_integer("steps", 12, "of each side in a round")
flags.DEFINE_integer("rounds", 3, "of both sides in turn")
flags.DEFINE_string("trl_python", ".venv-trl/bin/python", "of an environment with TRL")
flags.DEFINE_string("model", "", "even: a warm-started policy; empty: it is made")

CONFIG = f"--config={ROOT / 'configs' / 'quickstart.py'}"
# The skewed policy answers nothing rightly: what it makes is trained on all the same.
SKEWED = {
    "environment.name": "math",
    "rollout.thinking_budget_min": 0,
    "rollout.thinking_budget_max": 0,
    "rollout.answer_budget": 320,
    "objective.truncated": "penalize",
    "objective.filter_zero_variance": False,
    "curriculum.no_positive_resampling_at": 1.1,
    "learner.micro_batch_rows": 8,
    "optimizer.learning_rate": 1e-9,
}
WARM_UP = 2  # steps of a run that are not counted


def command(name: str, *arguments: str) -> None:
    program = pathlib.Path(sys.executable).with_name(name)
    done = subprocess.run([program, CONFIG, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")


def flags_of(overrides: dict[str, object]) -> list[str]:
    return [f"--config.{name}={value}" for name, value in overrides.items()]


def ours(model: str, folder: pathlib.Path, overrides: dict[str, object]) -> tuple[list[float], list[float]]:
    """Seconds of each step after the first ones, and the tokens trained on in it."""
    command(
        "scalerl-train",
        f"--workdir={folder}",
        f"--config.model.path={model}",
        f"--config.max_steps={FLAGS.steps + 1}",
        f"--config.checkpoint.every={FLAGS.steps + 1}",
        f"--config.evaluation.every={FLAGS.steps + 1}",
        "--config.evaluation.prompts=8",
        "--config.evaluation.samples=1",
        *flags_of(overrides),
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ends = [row["time"] for row in rows if "length_mean" in row]
    tokens = [row["length_mean"] * row["completions_counted"] for row in rows if "length_mean" in row]
    assert len(ends) == FLAGS.steps + 1
    seconds = [later - earlier for earlier, later in itertools.pairwise(ends)]
    return seconds[WARM_UP:], tokens[1 + WARM_UP :]


def trl(asked: dict, steps: int) -> tuple[list[float], list[float], float]:
    """Seconds and tokens of each step, and the share of right answers; nothing where TRL cannot do it this way."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({**asked, "steps": steps + 1}, file)
        file.flush()
        program = ROOT / "tests" / "benchmarks" / "trl_steps.py"
        # From a folder of its own: TRL takes a folder named vllm for the package.
        with tempfile.TemporaryDirectory() as where:
            done = subprocess.run(
                [pathlib.Path(FLAGS.trl_python).absolute(), program, file.name],
                capture_output=True, text=True, check=False, cwd=where,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            )  # fmt: skip
    if done.returncode:
        print(f"  not to be had: {done.stderr.strip().splitlines()[-1][:160]}")
        return [], [], 0.0
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return found["seconds"], found["tokens"], statistics.mean(found["right"])


def specification(model: str, config: Config) -> dict:
    train = load_rows(config, Tokenizer(model)).train
    return {
        "model": model,
        "prompts": [{"prompt": one.text, "ids": one.token_ids.tolist(), "answer": one.answer} for one in train[:512]],
        "group_size": config.rollout.group_size,
        "completions": config.rollout.prompts_per_step * config.rollout.group_size,
        "longest": config.rollout.thinking_budget_max + config.rollout.answer_budget,
        "learning_rate": config.optimizer.learning_rate,
    }


def fastest(asked: dict) -> dict:
    """TRL's way of taking a step that takes least time here."""
    best, least = None, float("inf")
    for passes in (1, 3):
        for name, way in (
            ("generate, dynamic cache", {"continuous": False, "cache": None}),
            ("generate, static cache", {"continuous": False, "cache": "static"}),
            ("continuous batching", {"continuous": True, "cache": None}),
        ):
            if passes > 1 and way["continuous"]:  # it knows no passes when it samples, and is the slowest by far
                continue
            print(f"TRL, {name}, {passes} passes a step:")
            tried = {**asked, **way, "micro_batch": asked["completions"] // passes}
            seconds, _, _ = trl(tried, 2)
            if seconds:
                print(f"  {min(seconds):.2f} s a step")
                if min(seconds) < least:
                    best, least = tried, min(seconds)
    if best is None:
        sys.exit("TRL did not run; see above")
    return best


def compare(load: str, folder: pathlib.Path) -> None:
    overrides: dict[str, object] = {}
    if load == "even":
        model = FLAGS.model
        if not model:
            command("scalerl-sft", f"--workdir={folder / 'warm'}")
            model = str(folder / "warm" / "model")
        model = str(pathlib.Path(model).absolute())
    else:
        model = write_stopping_policy(str(folder), width=96, layers=3, stop_every=60.0)
        for name, numbers in (("train", range(256)), ("validation", range(256, 264))):
            path = folder / f"{name}.jsonl"
            lines = [json.dumps({"prompt": f"{number} abc", "answer": str(number)}) for number in numbers]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            overrides[f"environment.{name}"] = path
        overrides |= SKEWED
    config, _ = parse_argv(["", CONFIG, *flags_of(overrides)])
    print(f"{load}:")
    peer = fastest(specification(model, config))
    results: dict[str, tuple[list[float], list[float]]] = {"here": ([], []), "TRL": ([], [])}
    for number in range(FLAGS.rounds):
        seconds, tokens = ours(model, folder / f"run-{number}", overrides)
        results["here"][0].extend(seconds)
        results["here"][1].extend(tokens)
        seconds, tokens, right = trl(peer, FLAGS.steps)
        results["TRL"][0].extend(seconds[WARM_UP:])
        results["TRL"][1].extend(tokens[WARM_UP:])
        medians = {side: statistics.median(found) for side, (found, _) in results.items()}
        print(
            f"round {number + 1}: so far {medians['here']:.2f} s a step here, {medians['TRL']:.2f} s TRL, whose "
            f"completions are right in {right:.2f}"
        )
    rates = {}
    for side, (seconds, tokens) in results.items():
        rates[side] = 60 / statistics.median(seconds)
        print(
            f"{side:5} {rates[side]:6.1f} steps a minute   {statistics.median(seconds):.2f} s a step "
            f"({min(seconds):.2f} to {max(seconds):.2f})   {statistics.median(tokens):,.0f} tokens a step"
        )
    print(f"{load}: ratio {rates['here'] / rates['TRL']:.2f}")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"{argv[1]}: not a flag")
    for load in ("even", "skewed") if FLAGS.load == "both" else (FLAGS.load,):
        with tempfile.TemporaryDirectory() as folder:
            compare(load, pathlib.Path(folder))


if __name__ == "__main__":
    app.run(main)
