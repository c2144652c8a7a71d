"""The adapters with the libraries whose environments they bring: the examples of the docs, played in the pool.

The libraries are in an environment of their own, that of `make test-adapters`. None of it needs a network.
"""

import ast
import importlib.util
import inspect
import pathlib
import random
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.environments import Row, Score
from scalerl_jax.environments.adapters import TRL
from scalerl_jax.environments.load import make_environment
from tests.support.episodes import play, pool_of
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


def need(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: make test-adapters")


def played(path: pathlib.Path, text: str, *turns: str) -> tuple[Row, list[str], Score]:
    """(row, replies, score) of an episode of the first row of a user's file, whose function is `game`."""
    file = path / "game.py"
    file.write_text(text)
    config = Config()
    config.environment.name = f"{file}:game"
    config.rollout.thinking_budget_min = config.rollout.thinking_budget_max = 0
    config.rollout.max_turns, config.rollout.max_episode_tokens = 30, 100_000
    rows = [*make_environment(config).rows("train")]
    assert len({row.key for row in rows}) == len(rows)
    assert not {row.key for row in rows} & {row.key for row in make_environment(config).rows("validation")}
    with closing(pool_of(config)) as pool:
        return rows[0], *play(pool, rows[0], *turns)


def example(name: str) -> str:
    """The file of this name in the docs, with fewer rows."""
    pages = (ROOT / "docs" / "how_to" / page for page in ("environments.md", "other_environments.md"))
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    (found,) = re.findall(rf"```python\n(# {re.escape(name)}\n.*?)```", text, re.DOTALL)
    return found.replace("prompts=500", "prompts=5, held_out=2")


def test_gymnasium(tmp_path):
    need("gymnasium")
    row, replies, score = played(tmp_path, example("blackjack.py"), "fold", "stick")
    assert re.fullmatch(r"You have \d+( with an ace)?, the dealer shows \d+\. Hit or stick\? ", row.text)
    assert replies == ["error: say hit or stick. "] and score.metrics["invalid_actions"] == 1.0
    assert score.reward in (-1.0, 0.0, 1.0) and score.correct == (score.reward == 1.0)


def test_gymnasiums_time_limit_ends_an_episode(tmp_path):
    need("gymnasium")
    _, replies, score = played(
        tmp_path,
        """
import string
import gymnasium
from scalerl_jax.environments.adapters import Gym

class Chat(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Text(99, charset=string.printable)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"Hello {self.np_random.integers(99)}", {}
    def step(self, action):
        return f"you said {action}", 0.25, False, False, {}

gymnasium.register("Chat-v0", Chat, max_episode_steps=3)

def game():
    return Gym(lambda: gymnasium.make("Chat-v0"), prompts=3)
""",
        *("a", "b", "c"),
    )
    assert replies == ["you said a", "you said b"] and score.reward == 0.75 and not score.excluded


def test_gem(tmp_path):
    need("gem")
    row, replies, score = played(tmp_path, example("guess.py"), "\\boxed{99}", "42")
    assert "Guess The Number" in row.text and "outside the range" in replies[0]
    assert score.reward < 0 and not score.correct


def test_textarena(tmp_path):
    need("textarena")
    file = """
import textarena
from scalerl_jax.environments.adapters import TextArena

def game(): return TextArena(lambda: textarena.make("GuessTheNumber-v0"), prompts=20)
"""
    row, replies, score = played(tmp_path, file, "[1]", "none", "[21]")
    assert "You are playing Guess The Number" in row.text
    assert "You are playing" not in replies[0] and re.search(r"target number is|Congrat", replies[0])
    assert "invalid move" in replies[1] and 0 <= score.reward < 1


def test_an_opponent_in_textarena(tmp_path):
    need("textarena")
    _, replies, score = played(tmp_path, example("tic_tac_toe.py"), "[0]", "[1]", "[2]")
    assert "Player 1 placed their symbol (X) in cell 8" in replies[0] and "in cell 7" in replies[1]
    assert (score.reward, score.correct) == (1.0, True)


@pytest.fixture
def echo_server() -> Iterator[int]:
    """Port of an OpenEnv server that says a word, and is done when it hears it."""
    need("openenv")
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Said(Action):
        text: str

    class Heard(Observation):
        text: str

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **_):
            self.word, self.turns = random.Random(seed).choice(["yes", "no"]), 0
            return Heard(text=f"Say {self.word}.", done=False, reward=None)

        def step(self, action, timeout_s=None, **_):
            self.turns += 1
            right = action.text == self.word
            return Heard(text=f"{self.turns}: {action.text}", done=right, reward=float(right))

        @property
        def state(self) -> State:
            return State(step_count=self.turns)

    listening = socket.create_server(("127.0.0.1", 0))
    app = create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=8)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join()


def test_openenv(echo_server, tmp_path):
    file = example("echo.py").replace(":8000", f":{echo_server}")
    word = random.Random(0).choice(["yes", "no"])
    row, replies, score = played(tmp_path, file, "maybe", word)
    assert row.text == f"Say {word}." and replies == ["1: maybe"] and score.reward == 1.0
    # A client that is sync already.
    made: dict[str, Any] = {}
    exec(file.replace('")', '").sync()'), made)
    episode = made["game"]().episode(row)
    assert episode.step(word).reward == 1.0
    episode.close()


def test_skyrl_gym(tmp_path):
    need("skyrl_gym")
    row, replies, score = played(tmp_path, example("sums.py"), "hm", "#### 2")
    assert row.text == "0+2?" and "tentative numeric answer" in replies[0] and score.correct


class Drawer:
    """All that a class for TRL may have: what of it are tools its trainer says."""

    reward = 0.0
    ready = property(lambda self: 1 / 0)

    def reset(self, **row) -> str:
        return "Open it."

    def get_reward(self) -> float:
        return 1.0

    def open(self) -> str:
        """Opens it."""
        return "a key"

    def close(self) -> str:
        """Closes it."""
        return "closed"

    async def wait(self) -> None:
        """Waits."""

    @staticmethod
    def look() -> str:
        """Looks."""
        return "dark"

    @classmethod
    def made_of(cls) -> str:
        return "wood"

    def _hidden(self) -> None: ...


def test_tools_are_those_that_trls_trainer_finds():
    """Its source is read, not imported, which takes torch: the expression by which it finds them is evaluated."""
    need("trl")
    folder = pathlib.Path(importlib.util.find_spec("trl").origin).parent
    tree = ast.parse((folder / "trainer" / "grpo_trainer.py").read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ListComp) and "getmembers" in ast.unparse(node)]
    assert len(found) == 1, [ast.unparse(node) for node in found]
    environment = Drawer()
    methods = eval(ast.unparse(found[0]), {"inspect": inspect, "environment": environment})
    (row,) = TRL(Drawer, EnvironmentConfig(), rows=[{}]).rows("train")
    assert [tool["function"]["name"] for tool in row.tools] == [method.__name__ for method in methods]
    assert sorted(method.__name__ for method in methods) == ["close", "look", "open", "wait"]
    # And the row is what reset gets; a text is added to the last message.
    source = ast.unparse(tree)
    assert "environment.reset(**reset_kwargs)" in source and "'content': content + observation" in source


def test_a_class_of_trl_is_played(tmp_path):
    need("transformers")
    call = '<tool_call>{"name": "add", "arguments": {"by": 2}}</tool_call>'
    row, replies, score = played(tmp_path, example("counter.py"), call, "It is 2.")
    assert row.text == "Count to 2." and replies == ["The count is 2."]
    assert (score.reward, score.correct, score.metrics["tool_calls"]) == (1.0, True, 1)
