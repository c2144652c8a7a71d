"""Episodes in a pool: without a tokenizer, where a token is a letter, or of a chat model; turns that call tools."""

import json

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments import Completion as Turn
from scalerl_jax.environments import Environment, Row, Score, parts
from scalerl_jax.environments.episode import Reply, Trajectory
from scalerl_jax.environments.episode_pool import EpisodePool
from scalerl_jax.environments.load import make_environment
from scalerl_jax.environments.prompts import Replies
from scalerl_jax.environments.scorer_pool import Complaints
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.environments.tool_calls import read_calls


class Letters:
    """What a reply is, in letters."""

    def encode(self, row, messages, *, behind):
        text = "".join(message["content"] for message in messages)
        if not text:
            raise ValueError("a reply of the environment is empty")
        return text, Reply(np.array([ord(letter) for letter in text], np.int32))


def pool_of(config: Config, complaints: Complaints | None = None) -> EpisodePool:
    return EpisodePool(
        config, {part: make_environment(of_part) for part, of_part in parts.configs(config).items()},
        replies=Letters(), decode=lambda ids: "".join(map(chr, ids)), turn_tokens=20,
        complaints=complaints or Complaints(),
    )  # fmt: skip


def turn_of(text: str, *, finish: str = "stop") -> Completion:
    ids, zeros = np.array([ord(letter) for letter in text], np.int32), np.zeros(len(text), np.float32)
    return Completion(1, "train/0", 0, ids, zeros, ((0, 0, len(ids)),), (), finish)


def play(pool: EpisodePool, row: Row, *turns: str) -> tuple[list[str], Score]:
    """(replies, score) of an episode that the last of these turns ends."""
    replies, trajectory = list[str](), None
    for text in turns:
        if trajectory is None:
            trajectory = Trajectory(turn_of(text), "a:1")
        else:
            trajectory.add_turn(turn_of(text), "a:1")
        found = pool.step(row, trajectory).result()
        if isinstance(found, Score):
            assert text == turns[-1], f"over at {text!r}: {found}"
            return replies, found
        trajectory.add_reply(found)
        replies.append("".join(map(chr, found.token_ids)))
    raise AssertionError(f"not over: {replies}")


def chat_pool(config: Config, environment: Environment, tokenizer: Tokenizer) -> EpisodePool:
    return EpisodePool(
        config, {"": environment}, replies=Replies(config, tokenizer), decode=tokenizer.decode_completion,
        turn_tokens=50, complaints=Complaints(),
    )  # fmt: skip


def chat_turn(tokenizer: Tokenizer, text: str, finish: str = "stop") -> Completion:
    ids = np.array([*tokenizer.encode(text), tokenizer.eos_id], np.int32)
    return Completion(1, "g", 0, ids, np.zeros(len(ids), np.float32), ((0, 0, len(ids)),), (), finish)


def call(name: str, /, **arguments: object) -> str:
    """As a policy writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def with_calls(text: str) -> Turn:
    """The turn of a policy that writes this."""
    return Turn(text, tool_calls=read_calls(text, "hermes"))
