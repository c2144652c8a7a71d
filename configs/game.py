"""A game of several turns: find a number from 1 to 7 in three guesses, each answered with "+" (it is greater) or "-".

    python -m configs.game traces.jsonl         the traces of the warm start: every guess is somewhere in what is left
    scalerl-sft --config=configs/game.py ...    then scalerl-train, as docs/tutorials/games.md has them

Halving what is left finds every number. Who guesses at random in it finds two of three.
"""

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.config_io import load_file
from scalerl_jax.environments.episode import Step

NUMBERS, GUESSES = 7, 3
SEEDS = {"train": 0, "validation": 1}
END = "<|endoftext|>"  # the stop token, which ends each turn


class Guessing:
    """One episode."""

    def __init__(self, number: int):
        self.number, self.guesses = number, 0

    def step(self, turn: str) -> Step | str:
        guess = int(turn) if turn.isdecimal() else 0
        self.guesses += 1
        if guess == self.number or self.guesses == GUESSES:
            found = guess == self.number
            return Step(done=True, reward=1.0 if found else -1.0, correct=found)
        return "+ " if guess < self.number else "- "


class Game:
    def __init__(self, config: Any):
        self.train_prompts = config.train_prompts

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        rng = random.Random(SEEDS[split])
        first = 1000 if split == "train" else 9000  # a game has a number of its own, which says nothing
        for game in range(first, first + (self.train_prompts if split == "train" else 300)):
            yield {"prompt": f"game {game}: ", "answer": rng.randint(1, NUMBERS)}

    def episode(self, row: Any) -> Guessing:
        return Guessing(int(row.answer))


def write_traces(path: str, *, games: int = 3000) -> None:
    rng = random.Random(2)
    with open(path, "w") as traces:
        for _ in range(games):
            text, game, left = f"game {rng.randint(1000, 9999)}: ", Guessing(rng.randint(1, NUMBERS)), [1, NUMBERS]
            while True:
                guess = rng.randint(*left)
                traces.write(json.dumps({"prompt": text, "completion": str(guess)}) + "\n")
                reply = game.step(str(guess))
                if isinstance(reply, Step):
                    break
                left = [guess + 1, left[1]] if reply == "+ " else [left[0], guess - 1]
                text += f"{guess}{END}{reply}"


def get_config() -> Config:
    config = load_file("configs/quickstart.py")
    config.max_steps = 50
    config.model.path = "warm-start/model"

    config.environment.name = "configs/game.py:Game"
    config.environment.train_prompts = 2000
    config.sft.traces = "traces.jsonl"
    config.sft.max_steps = 200

    config.rollout.max_turns = GUESSES
    config.rollout.max_episode_tokens = 48
    config.rollout.thinking_budget_min = config.rollout.thinking_budget_max = 0
    config.rollout.answer_budget = 8

    config.rollout.prompts_per_step = 16
    config.optimizer.learning_rate = 6e-4
    config.learner.micro_batch_rows = 16
    config.evaluation.every = 10
    config.evaluation.prompts = 64
    return config


if __name__ == "__main__":
    write_traces(sys.argv[1])
