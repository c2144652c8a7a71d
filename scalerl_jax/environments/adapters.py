"""Environments of other libraries, unchanged, as environments of the user's own (own.py).

    Gym(make)                 gymnasium and gem: reset(seed=) -> (observation, info); step(action) -> (observation,
                              reward, terminated, truncated, info)
    TextArena(make)           reset(num_players=, seed=), get_observation(), step(action=), close() -> (rewards, info)
    OpenEnv(connect)          a client of openenv: reset(seed=) and step(action) -> {observation, reward, done}
    SkyRL(make)               skyrl-gym: init(prompt) -> (messages, info); step(text) -> {observations, reward, done}
    TRL(factory, config)      a class as TRL's environment_factory has it: reset(**row), its other methods are tools

A row's prompt is what its environment says first. So each row is begun once where the rows are made, and again in each
of its episodes, and must say the same then; random numbers of `random` and numpy begin both times at the row's seed.
Rows are told apart by their columns, since many games begin with the same words whatever their seed is.

An episode's reward is the sum of what its steps give, and `correct` is by environment.correct_at. What the environment
truncates is done, with the rewards it gave: the limit is part of its game. None of the libraries is imported here.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import inspect
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from scalerl_jax.config import EnvironmentConfig
from scalerl_jax.environments.base import Completion, Row, Score
from scalerl_jax.environments.episode import Step
from scalerl_jax.environments.tools import ToolEpisode, Tools

HELD_OUT_SEEDS = 10**6  # the first one of held-out rows; training rows have those from 0 on
INVALID_ACTIONS = 5  # that end an episode
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # of a row, for TRL's reward functions

Columns = Mapping[str, Any]  # of a row, values of JSON
Messages = tuple[Mapping[str, str], ...]
Given = Callable[[str], Iterable[Columns]]  # rows of a split
Describe = Callable[[Any], Any]  # an observation as a text, or as messages
Parse = Callable[[str], Any]  # what the environment takes for a turn's text


class Games:
    """Rows and episodes of another library's environment.

    open_game: of a row's columns, an object with reset(columns) -> observation, step(action) -> (observation, reward,
    done) and close(). given: the rows of a split.
    describe: an observation as a text, or as messages; None where it is one already.
    parse: the action that a turn's text is; its ValueError is the policy's to read, INVALID_ACTIONS times.
    """

    def __init__(
        self,
        open_game: Callable[[Columns], Any],
        given: Given,
        *,
        describe: Describe | None = None,
        parse: Parse | None = None,
    ):
        self._open_game, self._given, self._describe, self.parse = open_game, given, describe, parse

    def rows(self, split: str) -> Iterator[Row]:
        for number, columns in enumerate(self._given(split)):
            if not isinstance(columns, Mapping):
                raise ValueError(f"a row is {type(columns).__name__}, not a dict")
            game, opening = self._begin(columns)
            game.close()
            task, answer = (str(columns.get(name, "")) for name in ("task", "answer"))
            # A model without a chat template is asked the text of a single question.
            text = opening[0]["content"] if [message["role"] for message in opening] == ["user"] else ""
            messages = () if text else opening
            row = Row(text, answer, task=task, extra=columns, messages=messages, chat=bool(text), key=_key(columns))
            if number == 0:  # what is never the same ends the start, where else each episode would fail
                self.begin(row).close()
            yield row

    def episode(self, row: Row) -> Any:
        return Playing(self, self.begin(row))

    def begin(self, row: Row) -> Any:
        """Raises ValueError where it does not say what the row's prompt says."""
        game, opening = self._begin(row.extra)
        asked = tuple(dict(message) for message in row.messages) or ({"role": "user", "content": row.text},)
        if opening != asked:
            game.close()
            first = opening[-1]["content"][:80]
            raise ValueError(f"reset is not deterministic: the row's prompt is not what it says now, {first!r}")
        return game

    def as_messages(self, observation: Any) -> Messages:
        """An observation as messages. Raises ValueError where it is none."""
        text = observation if self._describe is None else self._describe(observation)
        if isinstance(text, str):
            return ({"role": "user", "content": text},)
        if not isinstance(text, list | tuple) or not all(isinstance(message, Mapping) for message in text):
            what = "an observation is" if self._describe is None else "describe gave"
            raise ValueError(f"{what} {type(text).__name__}, not a text: describe=... makes one of it")
        return tuple(dict(message) for message in text)

    def _begin(self, columns: Columns) -> tuple[Any, Messages]:
        with _seeded(columns):
            game = self._open_game(columns)
            try:
                opening = self.as_messages(game.reset(columns))
                if not opening or not opening[-1]["content"].strip():
                    raise ValueError("there is no prompt: reset gives nothing to ask")
                return game, opening
            except BaseException:
                game.close()
                raise


class Playing:
    """An episode of Games."""

    def __init__(self, games: Games, game: Any):
        self._games, self._game = games, game
        self._invalid = 0

    def step(self, turn: Completion) -> Step:
        try:
            action = str(turn) if self._games.parse is None else self._games.parse(str(turn))
        except ValueError as error:
            self._invalid += 1
            why = ({"role": "user", "content": f"error: {error}"},)
            return Step(why, done=self._invalid == INVALID_ACTIONS, metrics=self._metrics())
        observation, reward, done = self._game.step(action)
        return Step(() if done else self._games.as_messages(observation), done, reward, metrics=self._metrics())

    def close(self) -> None:
        self._game.close()

    def _metrics(self) -> dict[str, float]:
        return {} if self._games.parse is None else {"invalid_actions": self._invalid}


class Gym(Games):
    """gymnasium's environments and gem's. Rows are seeds: so many `prompts`, and `held_out` others.

    Raises ValueError, when rows are made, where actions or observations are no texts, and parse or describe is missing.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        prompts: int,
        held_out: int = 200,
        describe: Describe | None = None,
        parse: Parse | None = None,
    ):
        super().__init__(
            lambda _: _Gym(make(), texts=parse is None), _seeds(prompts, held_out), describe=describe, parse=parse
        )


class _Gym:
    def __init__(self, environment: Any, *, texts: bool):
        self._environment = environment
        space = getattr(environment, "action_space", None)  # gem's have none, and take texts
        if texts and space is not None and "Text" not in {kind.__name__ for kind in type(space).__mro__}:
            self.close()
            raise ValueError(f"its actions are {space}, not texts: parse=... makes one of a text")

    def reset(self, row: Columns) -> Any:
        observation, _ = self._environment.reset(seed=row["seed"])
        return observation

    def step(self, action: Any) -> tuple[Any, float, bool]:
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        return observation, float(reward), bool(terminated or truncated)

    def close(self) -> None:
        if hasattr(self._environment, "close"):  # gem's have none
            self._environment.close()


class TextArena(Games):
    """TextArena's games. Rows are seeds; the policy is `player`, `opponent` says what each other player does.

    opponent: the action on an observation. The policy reads what is new of an observation that repeats the one before.
    Raises ValueError where there are several players and no opponent.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        prompts: int,
        held_out: int = 200,
        players: int = 1,
        player: int = 0,
        opponent: Callable[[Any], str] | None = None,
        describe: Describe | None = None,
    ):
        if (players > 1) != (opponent is not None) or not 0 <= player < players:
            raise ValueError(f"players={players}, player={player}: opponent plays the others, where there are any")
        super().__init__(
            lambda _: _TextArena(make(), players, player, opponent), _seeds(prompts, held_out), describe=describe
        )


class _TextArena:
    def __init__(self, environment: Any, players: int, player: int, opponent: Callable[[Any], str] | None):
        self._environment, self._players, self._player, self._opponent = environment, players, player, opponent
        self._seen = ""

    def reset(self, row: Columns) -> Any:
        self._environment.reset(num_players=self._players, seed=row["seed"])
        return self._turn(over=False)

    def step(self, action: Any) -> tuple[Any, float, bool]:
        done, _ = self._environment.step(action=action)
        observation = self._turn(over=done)
        if observation is not None:
            return observation, 0.0, False
        rewards, _ = self._environment.close()
        return None, float(rewards[self._player]), True

    def close(self) -> None:
        self._environment.close()

    def _turn(self, *, over: bool) -> Any:
        """The observation when it is the policy's turn; None where the game is over."""
        while not over:
            player, observation = self._environment.get_observation()
            if player == self._player:
                return self._new(observation)
            assert self._opponent is not None, f"player {player} of {self._players}"
            over, _ = self._environment.step(action=self._opponent(observation))
        return None

    def _new(self, observation: Any) -> Any:
        if not isinstance(observation, str):
            return observation
        new, self._seen = observation.removeprefix(self._seen), observation
        # Messages stand in lines; nothing new is a move that counted as none, and the whole is repeated.
        return new if new.startswith("\n") and new.strip() else observation


class OpenEnv(Games):
    """An environment behind a client of openenv. Rows are seeds, which its reset gets.

    connect: the client, sync or async, of each episode. action: what step sends for a turn's text; its ValueError is
    the policy's to read. describe: an observation as a text.
    """

    def __init__(
        self, connect: Callable[[], Any], *, prompts: int, held_out: int = 200, action: Parse, describe: Describe
    ):
        super().__init__(lambda _: _OpenEnv(connect()), _seeds(prompts, held_out), describe=describe, parse=action)


class _OpenEnv:
    def __init__(self, client: Any):
        self._stack = contextlib.ExitStack()
        self._client = self._stack.enter_context(client.sync() if hasattr(client, "sync") else client)

    def reset(self, row: Columns) -> Any:
        return self._client.reset(seed=row["seed"]).observation

    def step(self, action: Any) -> tuple[Any, float, bool]:
        result = self._client.step(action)
        return result.observation, float(result.reward or 0.0), bool(result.done)

    def close(self) -> None:
        self._stack.close()


class SkyRL(Games):
    """skyrl-gym's environments. make: that of a row. rows: as TRL has them; "prompt" is messages."""

    def __init__(self, make: Callable[[Columns], Any], *, rows: Sequence[Columns] | str | Given):
        super().__init__(lambda columns: _SkyRL(make(columns)), _rows(rows))


class _SkyRL:
    def __init__(self, environment: Any):
        self._environment = environment
        self.close = environment.close

    def reset(self, row: Columns) -> Any:
        messages, _ = self._environment.init([dict(message) for message in row["prompt"]])
        return messages

    def step(self, action: Any) -> tuple[Any, float, bool]:
        found = self._environment.step(action)
        return found["observations"], float(found["reward"]), bool(found["done"])


class TRL(Games):
    """A class as TRL's environment_factory has it; a turn without a call ends its episode.

    The reward is what get_reward() gives and each of reward_funcs, which TRL calls alike (of one completion here, and
    without completion_ids); without any of them it is the attribute `reward`.

    config: the EnvironmentConfig, for its tool_characters: a function that makes an environment may take it.
    rows: dicts, which reset gets; a JSONL file of them; or a function of the split, "train" or "validation".
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        config: EnvironmentConfig,
        *,
        rows: Sequence[Columns] | str | Given,
        reward_funcs: Sequence[Callable[..., Any]] = (),
    ):
        super().__init__(lambda _: _TRL(factory(), reward_funcs), _rows(rows))
        self._factory, self._characters = factory, config.tool_characters

    def rows(self, split: str) -> Iterator[Row]:
        tools = Tools(_methods(self._factory())).schemas()
        for row in super().rows(split):
            yield dataclasses.replace(row, tools=tools)

    def episode(self, row: Row) -> "_PlayingTools":
        return _PlayingTools(row, self.begin(row), self._characters)


def _methods(environment: Any) -> list[Callable]:
    """The tools of a TRL environment, found as its trainer finds them."""
    names = [name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)]
    return [getattr(environment, n) for n in names if n not in ("reset", "get_reward") and not n.startswith("_")]


class _TRL:
    def __init__(self, environment: Any, reward_funcs: Sequence[Callable[..., Any]]):
        self.environment, self._reward_funcs = environment, reward_funcs

    def reset(self, row: Columns) -> Messages:
        prompt = row.get("prompt", "")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        added = self.environment.reset(**row)
        if not isinstance(added, str | None):
            raise ValueError(f"reset gave {type(added).__name__}, not a text or None")
        messages[-1]["content"] += added or ""
        if not self._reward_funcs and not {"reward", "get_reward"} & {*dir(self.environment)}:
            raise ValueError(f"{type(self.environment).__name__} has no reward or get_reward; reward_funcs are none")
        return tuple(messages)

    def reward(self, row: Row, completion: list[dict[str, str]]) -> float:
        columns = {name: [value] for name, value in row.extra.items() if name not in _NOT_COLUMNS}
        given = {"prompts": [[*row.messages]], "completions": [completion], "environments": [self.environment]}
        found = [_result(function(**given, **columns))[0] for function in self._reward_funcs]
        if hasattr(self.environment, "get_reward"):
            found.append(_result(self.environment.get_reward()))
        elif not self._reward_funcs:
            found.append(self.environment.reward)
        rewards = [float(reward) for reward in found if reward is not None]
        if not rewards:
            raise ValueError("there is no reward: all are None")
        return sum(rewards)

    def close(self) -> None:
        """TRL's have none: a method of this name is a tool."""


class _PlayingTools:
    """An episode of TRL."""

    def __init__(self, row: Row, game: _TRL, characters: int):
        self._completion: list[dict[str, str]] = []

        def score(row: Row, turn: Completion) -> Score:
            return Score(game.reward(row, self._completion), correct=False)

        self._tools = ToolEpisode(row, Tools(_methods(game.environment)), score=score, characters=characters)

    def step(self, turn: Completion) -> Step:
        self._completion.append({"role": "assistant", "content": str(turn)})
        step = self._tools.step(turn)
        self._completion += map(dict, step.messages)
        return dataclasses.replace(step, correct=None) if step.done else step


def _result(value: Any) -> Any:
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _seeds(prompts: int, held_out: int) -> Given:
    def given(split: str) -> Iterable[Columns]:
        first, count = (0, prompts) if split == "train" else (HELD_OUT_SEEDS, held_out)
        return [{"seed": seed} for seed in range(first, first + count)]

    return given


def _rows(rows: Sequence[Columns] | str | Given) -> Given:
    def given(split: str) -> Iterable[Columns]:
        if callable(rows):
            return rows(split)
        if split != "train":  # they are taken out of the training rows
            return ()
        return _lines(rows) if isinstance(rows, str) else rows

    return given


def _lines(path: str) -> Iterator[Columns]:
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} row {number}: is no JSON: {error}") from error


def _key(columns: Columns) -> str:
    return json.dumps(columns, sort_keys=True, default=str)


@contextlib.contextmanager
def _seeded(columns: Columns) -> Iterator[None]:
    """Random numbers begin at a row's seed; afterwards they go on as if none had been drawn."""
    seed = int.from_bytes(hashlib.blake2b(_key(columns).encode(), digest_size=4).digest(), "little")
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
