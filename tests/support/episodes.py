"""Episodes in a pool, without a tokenizer: a token is a letter."""

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments import Row, Score
from scalerl_jax.environments.episode import Trajectory
from scalerl_jax.environments.episode_pool import EpisodePool
from scalerl_jax.environments.load import make_environment
from scalerl_jax.environments.scorer_pool import Complaints


class Letters:
    """What a reply is, in letters."""

    def encode(self, row, messages, *, behind):
        text = "".join(message["content"] for message in messages)
        if not text:
            raise ValueError("a reply of the environment is empty")
        return text, [ord(letter) for letter in text]


def pool_of(config: Config, complaints: Complaints | None = None) -> EpisodePool:
    return EpisodePool(
        config, {"": make_environment(config)}, replies=Letters(), decode=lambda ids: "".join(map(chr, ids)),
        turn_tokens=20, complaints=complaints or Complaints(),
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
        replies.append("".join(map(chr, found)))
    raise AssertionError(f"not over: {replies}")
