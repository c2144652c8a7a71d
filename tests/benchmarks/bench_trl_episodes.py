"""Whole RL steps on episodes of several turns, against TRL's GRPO trainer with the same class as environment_factory.

    python -m tests.benchmarks.bench_trl_episodes [--load=even|skewed|both] [--steps=8] [--rounds=3]
                                                  [--trl_python=.venv-trl/bin/python] [--model=DIR]

The class is trl_guessing.py's: a number is found by calls of a tool, up to three, and a turn without a call ends the
episode. A policy of 0.37 M parameters is warm-started on such games, unless --model names one, made for one load. Both
sides start from it and take steps of 16 prompts with 8 episodes each, of at most 4 turns and LONGEST tokens behind the
prompt, in float32, on all cores. TRL's environment is made as trl_peer.py has it.

  even    a turn is a call and nothing else: all are of one length
  skewed  before its call a turn thinks, in words whose number is geometric, with a mean of THINKING

  here   scalerl-train with two local servers: pipeline(8), the class through adapters.py, each episode in a process
  TRL    GRPOTrainer in one process. Its ways of sampling are tried as in bench_step.py; the fastest one is the peer.

A round runs each side for --steps, in turn. A step's time is from the end of the one before to its own end; the first
two of each run are left out. Printed: the medians over all rounds, and the ratio. Tokens of a step are the sampled ones
here; TRL's include what the tool replies.
"""

import json
import pathlib
import random
import sys
import tempfile

from absl import app, flags

from scalerl_jax.config import Config
from scalerl_jax.config_io import parse_argv
from scalerl_jax.environments.chat_template import read_chat_template
from scalerl_jax.environments.load import load_rows
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.environments.tools import schema_of
from scalerl_jax.model import DecoderConfig
from tests.benchmarks import trl_guessing, trl_peer
from tests.support.chat_folders import chat_folder
from tests.support.models import random_tensors, write_folder

FLAGS = flags.FLAGS
flags.DEFINE_enum("load", "both", ["even", "skewed", "both"], "which turns")
flags.DEFINE_integer("steps", 8, "of each side in a round")
flags.DEFINE_integer("rounds", 3, "of both sides in turn")
flags.DEFINE_string("trl_python", ".venv-trl/bin/python", "of an environment with TRL")
flags.DEFINE_string("model", "", "a policy that an earlier run has warm-started; empty: it is made")

HOME = pathlib.Path(trl_guessing.__file__)
THINKING, LONGEST = 15, 352
OVERRIDES = {
    "environment.name": f"{HOME}:game",
    "rollout.max_turns": trl_guessing.GUESSES + 1,
    "rollout.max_episode_tokens": LONGEST,
    "rollout.max_prompt_tokens": 160,
    "rollout.thinking_budget_min": 0,
    "rollout.thinking_budget_max": 0,
    "rollout.answer_budget": 96,
    "rollout.prompts_per_step": 16,
    "learner.micro_batch_rows": 16,
}
WARM_START = {
    "sft.max_steps": 240,
    "sft.rows_per_step": 8,
    "sft.seq_len": 320,
    "sft.long_traces": "drop",
    "sft.learning_rate": 5e-3,
}


def ask(game: int) -> dict[str, str]:
    return {"role": "user", "content": f"game {game}: find a number from 1 to {trl_guessing.NUMBERS}. "}


def conversation(rng: random.Random, thinking: int) -> list[dict]:
    """A game whose guesses are anywhere in what is left."""
    number, left = rng.randint(1, trl_guessing.NUMBERS), [1, trl_guessing.NUMBERS]
    messages: list[dict] = [ask(rng.randint(1000, 9999))]
    game = trl_guessing.Guessing()
    game.reset(number)
    reply = ""
    while reply != "over":
        guess = rng.randint(*left)
        words = 0
        while thinking and rng.random() > 1 / (1 + thinking):
            words += 1
        function = {"name": "guess", "arguments": {"number": guess}}
        reply = game.guess(guess)
        messages += [
            {"role": "assistant", "content": " hm" * words, "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "name": "guess", "content": reply},
        ]
        left = [guess + 1, left[1]] if reply == "+" else [left[0], guess - 1]
    return [*messages, {"role": "assistant", "content": "Done."}]


def write_rows(path: pathlib.Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def warm_start(folder: pathlib.Path, thinking: int) -> str:
    """The folder of a policy that plays."""
    rng = random.Random(0)
    games = [conversation(rng, thinking) for _ in range(2000)]
    tools = [schema_of(trl_guessing.Guessing().guess)]
    traces = write_rows(folder / "traces.jsonl", [{"messages": game, "tools": tools} for game in games])
    start = folder / "start"
    start.mkdir()
    chat_folder(start, "qwen2_5")
    template = read_chat_template(str(start))
    corpus = [template.render(game, generation_prompt=False, tools=tools) for game in games[:300]]
    tokenizer = chat_folder(start, "qwen2_5", corpus=corpus, vocabulary=512)
    decoder = DecoderConfig(
        vocab_size=tokenizer.vocabulary, hidden_size=96, layers=3, heads=4, kv_heads=2, head_dim=32,
        intermediate_size=256, family="qwen3", tied_embeddings=True, stop_token_ids=tokenizer.stop_ids,
    )  # fmt: skip
    kept = (start / "tokenizer.json").read_text(encoding="utf-8")
    write_folder(start, decoder, {name: tensor * 0.2 for name, tensor in random_tensors(decoder, 0).items()})
    (start / "tokenizer.json").write_text(kept, encoding="utf-8")
    given = {**WARM_START, "sft.model_path": start, "sft.traces": traces}
    trl_peer.command("scalerl-sft", f"--workdir={folder / 'warm'}", *trl_peer.flags_of(given))
    return str(folder / "warm" / "model")


def specification(model: str, config: Config) -> dict:
    prompts = [
        {
            "prompt": [{"role": "user", "content": row.extra["prompt"]}],
            "number": row.extra["number"],
            "ids": row.token_ids.tolist(),
        }
        for row in load_rows(config, Tokenizer(model)).train
    ]
    return {
        "model": model,
        "prompts": prompts,
        "environment": f"{HOME}:Guessing",
        "turns": config.rollout.max_turns,
        "group_size": config.rollout.group_size,
        "completions": config.rollout.prompts_per_step * config.rollout.group_size,
        "longest": config.rollout.max_episode_tokens,
        "learning_rate": config.optimizer.learning_rate,
    }


def compare(load: str, folder: pathlib.Path) -> None:
    rng = random.Random(1)
    rows = [
        {"prompt": ask(game)["content"], "number": rng.randint(1, trl_guessing.NUMBERS)} for game in range(1000, 1500)
    ]
    overrides = {**OVERRIDES, "environment.train": write_rows(folder / "games.jsonl", rows)}
    model = FLAGS.model or warm_start(folder, THINKING if load == "skewed" else 0)
    model = str(pathlib.Path(model).absolute())
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
