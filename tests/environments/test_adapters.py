"""Environments of other libraries: small ones in each library's shape, as a user's file has them."""

import dataclasses
import json
import random
import subprocess
import sys
from contextlib import closing

import pytest

from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.environments import Completion as Turn
from scalerl_jax.environments import adapters
from scalerl_jax.environments.adapters import TRL, Gym, OpenEnv, SkyRL, TextArena
from scalerl_jax.environments.episode import Step, as_step
from scalerl_jax.environments.load import load_rows, make_environment
from scalerl_jax.environments.tokenizer import Tokenizer, make_tokenizer
from scalerl_jax.environments.tool_calls import read_calls
from tests.support.episodes import play, pool_of

FILE = """
import random
from scalerl_jax.environments.adapters import Gym

class Guess:
    def reset(self, seed=None):
        self.number = random.Random(seed).randint(1, 9)
        return "Guess. ", {}
    def step(self, action):
        if action == "give up": return "", -1.0, False, True, {}
        right = action == str(self.number)
        return ("yes " if right else "no "), (1.0 if right else 0.25), right, False, {}

class Drawn(Guess):
    def reset(self, seed=None):
        super().reset(seed)
        return f"Guess. {random.random()} ", {}

class Clock(Guess):
    def reset(self, seed=None):
        import time
        return f"It is {time.monotonic_ns()}.", {}

def guess(): return Gym(Guess, prompts=20, held_out=5)
def drawn(): return Gym(Drawn, prompts=3)
def clock(): return Gym(Clock, prompts=3)
"""


def config_of(path, name: str) -> Config:
    (path / "games.py").write_text(FILE)
    config = Config()
    config.environment.name = f"{path}/games.py:{name}"
    config.rollout.thinking_budget_min = config.rollout.thinking_budget_max = 0
    config.rollout.max_turns, config.rollout.max_episode_tokens = 12, 1000
    return config


def first(games: adapters.Games, *turns: str, split: str = "train") -> list[Step]:
    """What an episode of its first row says to these turns."""
    row = next(iter(games.rows(split)))
    episode = games.episode(row)
    steps = [as_step(episode.step(Turn(turn, tool_calls=read_calls(turn, "hermes")))) for turn in turns]
    if hasattr(episode, "close"):
        episode.close()
    return steps


def replies(steps: list[Step]) -> list[str]:
    return ["".join(message["content"] for message in step.messages) for step in steps]


def test_a_game_is_played_in_the_pool(tmp_path):
    config = config_of(tmp_path, "guess")
    rows = [*make_environment(config).rows("train")]
    assert {row.text for row in rows} == {"Guess. "} and len({row.key for row in rows}) == 20
    number = random.Random(rows[0].extra["seed"]).randint(1, 9)
    with closing(pool_of(config)) as pool:
        replies, score = play(pool, rows[0], str(number % 9 + 1), str(number))
        assert replies == ["no "] and (score.reward, score.correct) == (1.25, True)
        # What the environment itself truncates is done.
        replies, score = play(pool, rows[0], "give up")
        assert (score.reward, score.correct, score.excluded) == (-1.0, False, False)


def test_seeds_tell_prompts_of_the_same_words_apart(tmp_path):
    config = config_of(tmp_path, "guess")
    make_tokenizer(corpus=["Guess. "], path=str(tmp_path), vocabulary=270)
    rows = load_rows(config, Tokenizer(str(tmp_path)))
    assert [len(rows.train), len(rows.held_out)] == [20, 5]
    seeds = [{row.extra["seed"] for row in some} for some in (rows.train, rows.held_out)]
    assert len(seeds[0]) == 20 and len(seeds[1]) == 5 and not seeds[0] & seeds[1]


def test_random_numbers_begin_at_the_rows_seed_and_leave_the_runs_alone(tmp_path):
    random.seed(3)
    expected = random.random()
    random.seed(3)
    games = make_environment(config_of(tmp_path, "drawn"))
    row, other, _ = games.rows("train")
    assert random.random() == expected and row.text != other.text
    assert games.episode(row).step(Turn("give up")).done


def test_what_resets_otherwise_is_refused_with_its_first_row(tmp_path):
    games = make_environment(config_of(tmp_path, "clock"))
    with pytest.raises(ValueError, match=r"environment.name=.*:clock: .*reset is not deterministic: .* now, 'It is"):
        next(iter(games.rows("train")))


def test_an_episode_that_resets_otherwise_fails(tmp_path):
    games = make_environment(config_of(tmp_path, "guess"))
    row = next(iter(games.rows("train")))
    with pytest.raises(ValueError, match=r"reset is not deterministic: .* now, 'Guess"):
        games.episode(dataclasses.replace(row, text="Guess again. "))


class Discrete:
    """A space of gymnasium's."""


class Line:
    """Walks to 3; observations and actions are numbers."""

    action_space = Discrete()
    closed = 0

    def reset(self, seed=None):
        self.at = 0
        return self.at, {}

    def step(self, action: int):
        assert action in (-1, 1)
        self.at += action
        return self.at, float(self.at == 3), self.at == 3, False, {}

    def close(self) -> None:
        Line.closed += 1


def walked(text: str) -> int:
    try:
        return {"left": -1, "right": 1}[text]
    except KeyError:
        raise ValueError(f"{text!r} is neither left nor right") from None


def test_observations_and_actions_that_are_no_texts():
    games = Gym(Line, prompts=1, describe=lambda at: f"At {at}.", parse=walked)
    before = Line.closed
    steps = first(games, "right", "up", "right", "right")
    assert replies(steps) == ["At 1.", "error: 'up' is neither left nor right", "At 2.", ""]
    assert steps[-1] == Step(done=True, reward=1.0, metrics={"invalid_actions": 1.0})
    assert Line.closed - before == 3  # the row's, that of its check, and the episode's
    steps = first(games, *["up"] * adapters.INVALID_ACTIONS)
    assert [step.done for step in steps] == [False] * (adapters.INVALID_ACTIONS - 1) + [True]
    with pytest.raises(ValueError, match="an observation is int, not a text: describe="):
        first(Gym(Line, prompts=1, parse=walked))
    with pytest.raises(ValueError, match=r"its actions are .*, not texts: parse="):
        first(Gym(Line, prompts=1, describe=str))


class Nim:
    """TextArena's shape: who takes the last of the sticks wins; what is observed grows."""

    def __init__(self, sticks: int = 5):
        self.sticks = sticks

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.player, self.players, self.log = 0, num_players, "\n[GAME] Take one or two."
        self.rewards: dict[int, int] | None = None

    def get_observation(self) -> tuple[int, str]:
        return self.player, self.log

    def step(self, action: str) -> tuple[bool, dict]:
        self.log += f"\n[Player {self.player}] {action}"
        self.sticks -= int(action)
        if self.sticks <= 0:
            self.rewards = {player: 1 if player == self.player else -1 for player in range(self.players)}
        self.player = (self.player + 1) % self.players
        return self.sticks <= 0, {}

    def close(self) -> tuple[dict[int, int] | None, dict]:
        return self.rewards, {}


def test_a_game_of_textarena():
    steps = first(TextArena(Nim, prompts=1), "2", "2", "1")
    assert replies(steps) == ["\n[Player 0] 2", "\n[Player 0] 2", ""] and steps[-1].reward == 1.0


def test_an_opponent_plays_the_others():
    steps = first(TextArena(Nim, prompts=1, players=2, opponent=lambda seen: "1"), "1", "1", "1")
    assert replies(steps)[0] == "\n[Player 0] 1\n[Player 1] 1" and steps[-1].reward == 1.0
    games = TextArena(lambda: Nim(4), prompts=1, players=2, player=1, opponent=lambda seen: "2")
    assert next(iter(games.rows("train"))).text == "\n[GAME] Take one or two.\n[Player 0] 2"
    assert first(games, "1")[-1].reward == -1.0
    with pytest.raises(ValueError, match="players=2, player=0: opponent plays the others"):
        TextArena(Nim, prompts=1, players=2)


class Client:
    """A client of openenv, whose sync() is entered."""

    entered = 0

    def sync(self) -> "Client":
        return self

    def __enter__(self) -> "Client":
        Client.entered += 1
        return self

    def __exit__(self, *_) -> None:
        Client.entered -= 1

    def reset(self, seed: int) -> "Client":
        assert self.entered > 0
        self.observation, self.reward, self.done = {"text": f"Say {seed}"}, None, False
        return self

    def step(self, action: dict) -> "Client":
        self.done = f"Say {action['text']}" == self.observation["text"]
        self.reward = 1 if self.done else None
        return self


def test_a_client_of_openenv():
    games = OpenEnv(
        Client, prompts=2, held_out=1, action=lambda text: {"text": int(text)}, describe=lambda seen: seen["text"]
    )
    steps = first(games, "7", "seven", str(adapters.HELD_OUT_SEEDS), split="validation")
    first_reply, second_reply, _ = replies(steps)
    assert first_reply == f"Say {adapters.HELD_OUT_SEEDS}" and second_reply.startswith("error: invalid literal")
    assert steps[-1].done and steps[-1].reward == 1.0 and Client.entered == 0


class Sums:
    """skyrl-gym's shape."""

    def __init__(self, answer: str):
        self.answer = answer

    def init(self, prompt):
        return [{"role": "system", "content": "Be brief."}, *prompt], {}

    def step(self, action: str):
        right = action == self.answer
        again = [{"role": "user", "content": "Again."}]
        return {"observations": [] if right else again, "reward": float(right), "done": right, "metadata": {}}

    def close(self) -> None:
        pass


def test_an_environment_of_skyrl_gym():
    row = {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"}
    games = SkyRL(lambda row: Sums(row["answer"]), rows=[row])
    (made,) = games.rows("train")
    assert [message["content"] for message in made.messages] == ["Be brief.", "2+2?"] and made.answer == "4"
    assert [*games.rows("validation")] == []
    steps = first(games, "5", "4")
    assert replies(steps) == ["Again.", ""] and steps[-1].reward == 1.0


class Counter:
    """TRL's shape: counts up to the row's goal."""

    reward = 0.0

    def reset(self, goal: int, **row) -> str:
        self.goal, self.count = goal, 0
        return f" Count to {goal}."

    def add(self, by: int) -> str:
        """Adds to the count.

        Args:
            by: how much
        """
        if by < 1:
            raise ValueError("only upwards")
        self.count += by
        self.reward = float(self.count == self.goal)
        return f"{self.count} so far"

    def _hidden(self) -> None:
        pass


class Paid(Counter):
    async def get_reward(self) -> float:
        return 10.0 * self.reward


def add(by: int) -> str:
    return f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'by': by}})}</tool_call>"


def trl(factory, *reward_funcs, **row) -> TRL:
    rows = [{"prompt": [{"role": "user", "content": "Please!"}], "goal": 3, **row}]
    return TRL(factory, EnvironmentConfig(), rows=rows, reward_funcs=reward_funcs)


@pytest.mark.slow  # for the import of transformers
def test_a_class_of_trl():
    pytest.importorskip("transformers")
    (row,) = trl(Counter).rows("train")
    assert row.text == "Please! Count to 3." and [tool["function"]["name"] for tool in row.tools] == ["add"]
    steps = first(trl(Counter), add(1) + add(0), add(2), "done")
    assert steps[0].messages[0]["content"] == "1 so far"
    assert replies(steps)[0].startswith("1 so farerror: ValueError: only upwards")
    assert (steps[-1].done, steps[-1].reward, steps[-1].correct) == (True, 1.0, None)
    assert steps[-1].metrics["tool_errors/add"] == 1
    assert first(trl(Counter), "done")[-1].reward == 0.0


@pytest.mark.slow  # for the import of transformers
def test_rewards_of_trl_add_up():
    pytest.importorskip("transformers")

    def turns(completions, environments, goal, **_) -> list[float]:
        assert goal == [3] and environments[0].count == 3
        return [float(len(completions[0]))]

    async def none(environments, **_) -> list[None]:
        return [None]

    assert first(trl(Paid), add(3), "done")[-1].reward == 10.0
    assert first(trl(Paid, turns, none), add(3), "done")[-1].reward == 13.0  # of an assistant's turn, a tool's, another
    with pytest.raises(ValueError, match="there is no reward: all are None"):
        first(trl(Counter, none), "done")


@pytest.mark.slow  # for the import of transformers
def test_rows_of_trl(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "rows.jsonl").write_text('{"goal": 1}\n{"goal": 2}\n')
    games = TRL(Counter, EnvironmentConfig(), rows=f"{tmp_path}/rows.jsonl")
    assert [row.text for row in games.rows("train")] == [" Count to 1.", " Count to 2."]
    games = TRL(Counter, EnvironmentConfig(), rows=lambda split: [{"goal": len(split)}])
    assert [row.text for row in games.rows("validation")] == [" Count to 10."]
    (tmp_path / "rows.jsonl").write_text('{"goal": 1}\n{"goal"\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl row 2: is no JSON"):
        [*TRL(Counter, EnvironmentConfig(), rows=f"{tmp_path}/rows.jsonl").rows("train")]

    class Silent(Counter):
        def reset(self, **row) -> None:
            pass

    with pytest.raises(ValueError, match="there is no prompt"):
        [*trl(Silent, prompt=[{"role": "user", "content": ""}]).rows("train")]

    class Unpaid:
        def reset(self, **row) -> str:
            return "x"

    with pytest.raises(ValueError, match="Unpaid has no reward or get_reward"):
        [*trl(Unpaid).rows("train")]


IMPORTS = """
import numpy.random  # the library loads it when it is first used
import sys
from scalerl_jax.config import EnvironmentConfig
from scalerl_jax.environments.adapters import TRL
from scalerl_jax.environments.base import Row

class Counter:
    reward = 0.0
    def reset(self, **row): return "Count."
    def add(self, by: int):
        '''Adds.

        Args:
            by: how much
        '''

games = TRL(Counter, EnvironmentConfig(), rows=[{"goal": 1}])
before = {*sys.modules}
games.episode(Row("Count.", extra={"goal": 1}))
print(sorted({*sys.modules} - before))
"""


@pytest.mark.slow
def test_an_episode_of_trl_imports_nothing():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
