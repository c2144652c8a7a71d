"""Whole RL steps a minute (generate, verify, update, weights out) against TRL's GRPO trainer with its CISPO loss.

    python -m tests.benchmarks.bench_step [--load=even|skewed|both] [--steps=12] [--rounds=3]
                                          [--trl_python=.venv-trl/bin/python] [--model=DIR]

Both sides start from the same policy and take steps of 24 prompts with 8 completions each, as long as the policy makes
them, in float32, on all cores. TRL's environment is made as trl_peer.py has it.

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

import json
import pathlib
import sys
import tempfile

from absl import app, flags

from scalerl_jax.config import Config
from scalerl_jax.config_io import parse_argv
from scalerl_jax.environments.load import load_rows
from scalerl_jax.environments.tokenizer import Tokenizer
from tests.benchmarks import trl_peer
from tests.benchmarks.folders import write_stopping_policy

FLAGS = flags.FLAGS
flags.DEFINE_enum("load", "both", ["even", "skewed", "both"], "which completions")
flags.DEFINE_integer("steps", 12, "of each side in a round")
flags.DEFINE_integer("rounds", 3, "of both sides in turn")
flags.DEFINE_string("trl_python", ".venv-trl/bin/python", "of an environment with TRL")
flags.DEFINE_string("model", "", "even: a warm-started policy; empty: it is made")

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


def specification(model: str, config: Config) -> dict:
    train = load_rows(config, Tokenizer(model)).train
    return {
        "model": model,
        "prompts": [{"prompt": one.text, "ids": one.token_ids.tolist(), "answer": one.answer} for one in train[:512]],
        "group_size": config.rollout.group_size,
        "completions": config.rollout.prompts_per_step * config.rollout.group_size,
        "environment": "",
        "turns": 1,
        "longest": config.rollout.thinking_budget_max + config.rollout.answer_budget,
        "learning_rate": config.optimizer.learning_rate,
    }


def compare(load: str, folder: pathlib.Path) -> None:
    overrides: dict[str, object] = {}
    if load == "even":
        model = FLAGS.model
        if not model:
            trl_peer.command("scalerl-sft", f"--workdir={folder / 'warm'}")
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
    config, _ = parse_argv(["", trl_peer.CONFIG, *trl_peer.flags_of(overrides)])
    print(f"{load}:")
    peer = trl_peer.fastest(FLAGS.trl_python, specification(model, config))
    trl_peer.compare(
        load, model, peer, overrides, folder, python=FLAGS.trl_python, steps=FLAGS.steps, rounds=FLAGS.rounds
    )


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"{argv[1]}: not a flag")
    for load in ("even", "skewed") if FLAGS.load == "both" else (FLAGS.load,):
        with tempfile.TemporaryDirectory() as folder:
            compare(load, pathlib.Path(folder))


if __name__ == "__main__":
    app.run(main)
