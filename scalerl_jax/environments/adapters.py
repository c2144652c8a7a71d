"""Adapters for unchanged environments of other libraries, to be used as user environments (own.py).

    Gym(make)                 gymnasium and gem: reset(seed=) -> (observation, info); step(action) -> (observation,
                              reward, terminated, truncated, info)
    TextArena(make)           reset(num_players=, seed=), get_observation(), step(action=), close() -> (rewards, info)
    OpenEnv(connect)          a client of openenv: reset(seed=) and step(action) -> {observation, reward, done}
    SkyRL(make)               skyrl-gym: init(prompt) -> (messages, info); step(text) -> {observations, reward, done}
    TRL(factory, config)      a class for TRL's environment_factory: reset(**row), its other methods are tools
    Verifiers(settings)       a taskset of verifiers, played by its own agents, which call the policy by HTTP

In all but the last, a row's prompt is the first observation of its environment: each row is reset once when rows are
made, and again in each of its episodes, and must give the same prompt; `random` and numpy are seeded alike both times,
from the row. Rows are identified by their columns, since many games begin with the same text whatever their seed. An
episode's reward is the sum of its steps' rewards, and `correct` is reward >= environment.correct_at. An episode that
the environment truncates is done, with the rewards so far: the limit is part of the game.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from scalerl_jax.config import EnvironmentConfig
from scalerl_jax.environments.base import Completion, Row, Score
from scalerl_jax.environments.episode import Client, Step
from scalerl_jax.environments.tools import ToolEpisode, Tools

HELD_OUT_SEEDS = 10**6  # the first seed of held-out rows; those of training rows start at 0
INVALID_ACTIONS = 5  # so many end an episode
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # not passed to TRL's reward functions as columns

Columns = Mapping[str, Any]  # of a row, as JSON values
Messages = tuple[Mapping[str, str], ...]
Given = Callable[[str], Iterable[Columns]]  # split -> rows
Describe = Callable[[Any], Any]  # observation -> text or messages
Parse = Callable[[str], Any]  # a turn's text -> action of the environment


class Games:
    """Rows and episodes of another library's environment.

    open_game: makes from a row's columns an object with reset(columns) -> observation, step(action) -> (observation,
    reward, done) and close(). given: returns the rows of a split.
    describe: converts an observation to a text or messages; None if it already is one.
    parse: converts a turn's text to an action; a ValueError is sent to the policy, and the INVALID_ACTIONS-th ends the
    episode.
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
            # A model without a chat template gets the text of a single question.
            text = opening[0]["content"] if [message["role"] for message in opening] == ["user"] else ""
            messages = () if text else opening
            row = Row(text, answer, task=task, extra=columns, messages=messages, chat=bool(text), key=_key(columns))
            if number == 0:  # an environment whose prompt changes at each reset fails here, not in each episode
                self.begin(row).close()
            yield row

    def episode(self, row: Row) -> Any:
        return Playing(self, self.begin(row))

    def begin(self, row: Row) -> Any:
        """Opens the row's game. Raises ValueError if its first observation is not the row's prompt."""
        game, opening = self._begin(row.extra)
        asked = tuple(dict(message) for message in row.messages) or ({"role": "user", "content": row.text},)
        if opening != asked:
            game.close()
            first = opening[-1]["content"][:80]
            raise ValueError(f"reset is not deterministic: the row's prompt is not what it says now, {first!r}")
        return game

    def as_messages(self, observation: Any) -> Messages:
        """An observation as messages. Raises ValueError if it cannot be converted."""
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
    """gymnasium's environments and gem's. Rows are seeds: `prompts` for training, and `held_out` others.

    Raises ValueError, when rows are made, if actions or observations are not texts and parse or describe is missing.
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
            lambda _: _GymEpisode(make(), texts=parse is None),
            _seeds(prompts, held_out),
            describe=describe,
            parse=parse,
        )


class _GymEpisode:
    def __init__(self, environment: Any, *, texts: bool):
        self._environment = environment
        space = getattr(environment, "action_space", None)  # gem's environments have none, and accept texts
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
        if hasattr(self._environment, "close"):  # gem's environments have none
            self._environment.close()


class TextArena(Games):
    """TextArena's games. Rows are seeds; the policy is number `player`, `opponent` plays all other players.

    opponent: maps an observation to an action. If an observation repeats the previous one, the policy gets only the new
    part. Raises ValueError if there are several players and no opponent, or an opponent and one player.
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
            lambda _: _TextArenaEpisode(make(), players, player, opponent), _seeds(prompts, held_out), describe=describe
        )


class _TextArenaEpisode:
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
        """The observation when it is the policy's turn; None if the game is over."""
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
        # Each message is a line. If there is nothing new, the move was rejected: the whole observation is repeated.
        return new if new.startswith("\n") and new.strip() else observation


class OpenEnv(Games):
    """An environment behind a client of openenv. Rows are seeds, which are passed to its reset.

    connect: returns the client, sync or async, of an episode. action: converts a turn's text to an action; a ValueError
    is sent to the policy. describe: converts an observation to a text.
    """

    def __init__(
        self, connect: Callable[[], Any], *, prompts: int, held_out: int = 200, action: Parse, describe: Describe
    ):
        super().__init__(
            lambda _: _OpenEnvEpisode(connect()), _seeds(prompts, held_out), describe=describe, parse=action
        )


class _OpenEnvEpisode:
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
    """skyrl-gym's environments. make: makes the environment of a row. rows: as for TRL; "prompt" is messages."""

    def __init__(self, make: Callable[[Columns], Any], *, rows: Sequence[Columns] | str | Given):
        super().__init__(lambda columns: _SkyRLEpisode(make(columns)), _rows(rows))


class _SkyRLEpisode:
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
    """A class for TRL's environment_factory; a turn without a tool call ends its episode.

    The reward is the sum of get_reward() and of all reward_funcs, which are called as in TRL (with one completion, and
    without completion_ids); if there are none of these, it is the attribute `reward`.

    config: the EnvironmentConfig, for its tool_characters; a function that makes an environment receives it.
    rows: dicts, which are passed to reset; a JSONL file of them; or a function of the split, "train" or "validation".
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        config: EnvironmentConfig,
        *,
        rows: Sequence[Columns] | str | Given,
        reward_funcs: Sequence[Callable[..., Any]] = (),
    ):
        super().__init__(lambda _: _TRLEpisode(factory(), reward_funcs), _rows(rows))
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


class _TRLEpisode:
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
        """TRL's environments have no close(): a method of this name is a tool."""


class _PlayingTools:
    """An episode of TRL."""

    def __init__(self, row: Row, game: _TRLEpisode, characters: int):
        self._completion: list[dict[str, str]] = []

        def score(row: Row, turn: Completion) -> Score:
            return Score(game.reward(row, self._completion), correct=False)

        self._tools = ToolEpisode(row, Tools(_methods(game.environment)), score=score, characters=characters)

    def step(self, turn: Completion) -> Step:
        self._completion.append({"role": "assistant", "content": str(turn)})
        step = self._tools.step(turn)
        self._completion += map(dict, step.messages)
        return dataclasses.replace(step, correct=None) if step.done else step


class Verifiers:
    """An environment of verifiers (`verifiers.v1`). Each episode is one of its: its agents' programs call the policy.

    settings: fields of its EnvConfig, {"taskset": {"id": ...}, "agent": {...}}. prompts: the most tasks, if any.

    The reward is the mean of the traces' rewards. An agent with a `client` of its own is not the policy: its turns are
    not trained on, nor do its rewards count. Raises ValueError for settings that retry episodes, and in an episode for
    an agent that is the policy and not to be trained.
    """

    def __init__(self, settings: Mapping[str, Any], *, prompts: int | None = None):
        self._settings, self._prompts = settings, prompts

    def prepare(self) -> None:
        _ = self._environment  # imports verifiers once, and not in every episode's process

    def rows(self, split: str) -> Iterator[Row]:
        tasks = self._environment.taskset
        if self._prompts is None and tasks.INFINITE:
            raise ValueError("the taskset has no end: prompts=... says how many of its tasks are rows")
        for task in itertools.islice(tasks, self._prompts) if split == "train" else ():
            data = task.data.model_dump(mode="json")
            text = data["prompt"] if isinstance(data["prompt"], str) else json.dumps(data["prompt"] or data["name"])
            yield Row(text, extra={"task": data}, key=_key(data))

    async def run(self, row: Row, client: Client) -> dict[str, Any]:
        from verifiers import v1

        kind = type(self._environment.taskset).task_type()
        task = kind(kind.data_type().model_validate(row.extra["task"]), self._environment.config.taskset.task)
        os.environ["SCALERL_API_KEY"] = client.api_key  # verifiers reads keys only from variables
        policy = v1.EvalClientConfig(base_url=client.base_url, api_key_var="SCALERL_API_KEY")
        (slot,) = self._environment.slots(task)
        async with self._environment.serving():
            episode = await self._environment.run_slot(slot, v1.ModelContext(model=client.model, client=policy))
        if errors := [error for part in (episode, *episode.traces) for error in part.errors]:
            raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
        traces = [trace for trace in episode.traces if trace.agent.config.client.base_url == client.base_url]
        if fixed := [trace.agent.name for trace in traces if not trace.agent.trainable]:
            raise ValueError(f"the agent {fixed[0]!r} is not to be trained: give it a client of its own")
        if not traces:
            raise ValueError("no agent is the policy: each has a client of its own")
        found = collections.defaultdict[str, list[float]](list)
        for trace in traces:
            for name, value in {**trace.metrics, **{name: r and r.value for name, r in trace.rewards.items()}}.items():
                if value is not None:
                    found[f"{trace.agent.name}/{name}"].append(value)
        metrics = {name: statistics.fmean(values) for name, values in found.items()}
        return {"reward": statistics.fmean(trace.reward for trace in traces), "metrics": metrics}

    @functools.cached_property
    def _environment(self) -> Any:
        from verifiers import v1

        settings = v1.resolve_env_config(dict(self._settings))
        agents = [value for _, value in settings if isinstance(value, v1.AgentConfig)]
        if any(each.retries.max_retries or getattr(each.retries, "rules", ()) for each in (settings, *agents)):
            raise ValueError("leave retries out: every turn of a repeated episode would be trained on")
        return v1.load_environment(settings)


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
        if split != "train":  # held-out rows are taken from the training rows
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
    """Seeds `random` and numpy from a row's columns; restores their previous states afterwards."""
    seed = int.from_bytes(hashlib.blake2b(_key(columns).encode(), digest_size=4).digest(), "little")
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
