"""A policy of ten words, its task, and rollouts that a replay server can play of it.

The policy has random weights with a leaning: at every position it says 1, 2, "=" or stops, each about as often. So some
answers are right and some wrong without any warm start.
"""

import json
import os
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.environments.tokenizer import Tokenizer, make_tokenizer
from scalerl_jax.model import DecoderConfig
from scalerl_jax.model.hf_folder import write_model_folder
from tests.support.params import leaning_params

TRAIN_PROMPTS, HELD_OUT = 14, 6


EXPERTS: dict[str, Any] = {
    "family": "qwen3_moe", "experts": 8, "experts_per_token": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip


def write_model(
    folder: str, *, words: Sequence[str] = ("time is up",), leaning: float = 0.25, likes: str = "12=", **sizes: Any
) -> str:
    """A policy in a Hugging Face folder. Other `words` make another tokenizer. leaning, likes: to which tokens, and how
    much. sizes: fields of DecoderConfig, EXPERTS for one."""
    base = os.path.join(os.path.dirname(folder), os.path.basename(folder) + "-tokenizer")
    tokenizer = make_tokenizer(corpus=[*words] * 9, path=base, vocabulary=280)
    decoder = DecoderConfig(
        vocab_size=280,
        hidden_size=32,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=16,
        intermediate_size=64,
        tied_embeddings=False,
        stop_token_ids=tokenizer.stop_ids,
        **{"family": "qwen3", **sizes},
    )

    def lean(head: np.ndarray, common: np.ndarray) -> None:
        for token in (*tokenizer.encode(likes), tokenizer.eos_id):
            head[token] += leaning * common

    params = leaning_params(decoder, lean, spread=0.5, head=0.02)
    write_model_folder(folder, params=params, decoder=decoder, tokenizer_dir=base)
    return folder


def smaller(model: str, folder: os.PathLike[str]) -> str:
    """A copy whose config.json has a vocabulary that the tokenizer's is larger than."""
    shutil.copytree(model, folder)
    file = os.path.join(folder, "config.json")
    with open(file) as stream:
        config = json.load(stream)
    with open(file, "w") as stream:
        json.dump(config | {"vocab_size": 100}, stream)
    return str(folder)


def prompts() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows of the training and of the held-out file; every answer is 1 or 2."""
    rows = [{"prompt": f"{'abcd'[n % 4]}{n}=", "answer": str(1 + n % 2)} for n in range(TRAIN_PROMPTS + HELD_OUT)]
    return rows[:TRAIN_PROMPTS], rows[TRAIN_PROMPTS:]


def write_task(folder: str) -> list[str]:
    """The task's files; returns the flags that name them."""
    flags = []
    for name, rows in zip(("train", "validation"), prompts()):
        path = os.path.join(folder, f"{name}.jsonl")
        with open(path, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        flags.append(f"--config.environment.{name}={path}")
    return flags


def write_rollouts(path: str, tokenizer: Tokenizer, config: Config) -> str:
    """Eight completions of each prompt for replay servers. Every fifth prompt is always right, every seventh never."""
    rng = np.random.default_rng(1)
    phrase = tokenizer.encode(config.rollout.interruption_text)
    train, held_out = prompts()
    with open(path, "w") as file:
        for n, row in enumerate([*train, *held_out]):
            for i in range(8):
                right = n % 5 == 0 or (n % 7 != 0 and i % 2 == 0)
                thought = rng.integers(3, 200, size=rng.integers(1, 10)).tolist()
                interrupted = i % 3 == 0
                end = phrase if interrupted else tokenizer.encode(config.rollout.end_of_thinking)
                answer = tokenizer.encode(row["answer"] if right else "0")
                cut = i == 5  # by the token budget
                tokens = [*thought, *end, *answer, *([] if cut else [tokenizer.eos_id])]
                logprobs = rng.uniform(-7, -4, size=len(tokens))
                forced = [(len(thought), len(thought) + len(end))] if interrupted else []
                for start, stop in forced:
                    logprobs[start:stop] = 0
                made = {
                    "prompt_token_ids": tokenizer.encode_prompt(row["prompt"]),
                    "token_ids": tokens,
                    "logprobs": logprobs.tolist(),
                    "forced": forced,
                    "finish_reason": "length" if cut else "stop",
                }
                file.write(json.dumps(made) + "\n")
    return path
