"""User-defined reward functions, instead of an environment's score or in addition to it.

    config.environment.reward=my_rewards.py:reward
    config.environment.rewards='{"environment": 1.0, "my_rewards.py:brief": 0.2, "judge": 0.5}'

    def reward(prompt, completion, answer, **row) -> float | bool | Score | dict: ...      # or async def

A function receives by keyword the arguments it names: prompt (the last user message), messages, completion (the text
after the thinking), thinking, tokens (number sampled), answer, task, and the row's other columns; with **row all of
them. A class is instantiated once per process and called. `reward.deterministic = True` declares that equal inputs give
equal results, so that scores may be cached. Return values and failures: user_functions.py. Functions run in the scoring
processes, within config.environment.reward_seconds of wall-clock time and verifier_seconds of CPU time; their output is
discarded.

Two names are not files: `environment` is the environment's own score, `judge` a judge model (judge.py).

The reward is the weighted sum of all. `correct` is that of `environment` if it is one of them, or that of the only
reward; else the sum is compared with config.environment.correct_at. Metrics: rewards/NAME is each function's reward,
rewards/NAME/errors the share of completions on which it failed.
"""

import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.environments import judge, parts, user_code
from scalerl_jax.environments.base import (
    Completion,
    Environment,
    Row,
    Score,
    ScorerError,
    asked,
    reaches,
    scores_itself,
)
from scalerl_jax.environments.user_functions import UserFunction

OWN, JUDGE = "environment", "judge"
_GIVEN = ("prompt", "messages", "completion", "thinking", "tokens", "answer", "task")
ScoreFunction = Callable[[Row, Completion], Score]


def with_rewards(environment: Environment, config: Config) -> Environment:
    """`environment` with the rewards of its config; unchanged if there are none. Raises ValueError naming the field."""
    weights = _weights(config.environment)
    if not weights:
        return environment
    if environment.episode is not None or environment.run is not None:
        has = "an agent, which says what its run is worth"
        if environment.run is None:
            has = "episodes, whose steps say what they are worth"
        name = f"config.environment.name={config.environment.name}"
        raise ValueError(f"{_field(config.environment)}: is not asked: {name} has {has}")
    names, functions, deterministic = _names(weights), dict[str, ScoreFunction](), list[bool]()
    own: list[_UsersReward] = []
    waits = environment.waits_seconds + len(weights) * config.environment.reward_seconds
    asks = judge.Judge(config) if JUDGE in weights else None
    if asks is not None:
        waits += asks.waits_seconds

    def prepare() -> None:
        if environment.prepare is not None:
            environment.prepare()
        for given in weights:
            if given == OWN:
                functions[given] = environment.score
                deterministic.append(environment.deterministic())
            elif given == JUDGE:
                assert asks is not None
                asks.prepare()
                functions[given] = asks.score
                deterministic.append(False)
            else:
                own.append(_UsersReward(given, names[given], _field(config.environment), config))
                functions[given] = own[-1].score
                deterministic.append(own[-1].deterministic)

    def check(columns: Collection[str]) -> None:
        for each in own:
            each.check(columns)

    def score(row: Row, completion: Completion) -> Score:
        assert functions, "prepare comes first"
        scores = {given: functions[given](row, completion) for given in weights}
        return _sum(scores, weights, names, correct_at=config.environment.correct_at)

    return dataclasses.replace(
        environment, score=score, prepare=prepare, in_processes=True, reads_thinking=True, waits_seconds=waits,
        check=check, check_row=asks.check if asks is not None else None, deterministic=lambda: all(deterministic),
    )  # fmt: skip


def functions(environment: EnvironmentConfig, part: str) -> dict[str, str]:
    """The user-defined score functions of a part: {setting as the user wrote it: name in metrics}."""
    weights = _chosen(environment)
    names = _names(weights)
    field = parts.as_written(part, _field(environment))
    found = {f"{field}={given}": names[given] for given in weights if given not in (OWN, JUDGE)}
    if user_code.named(environment.name) and scores_itself(environment):
        found[f"{parts.field(part, 'name')}={environment.name}"] = OWN
    return found


def _field(environment: EnvironmentConfig) -> str:
    return "config.environment.reward" if environment.reward else "config.environment.rewards"


def _chosen(environment: EnvironmentConfig) -> Mapping[str, float]:
    return {environment.reward: 1.0} if environment.reward else environment.rewards


def _weights(environment: EnvironmentConfig) -> Mapping[str, float]:
    """Weight of each reward, by the name the user gave. Raises ValueError for an invalid one or a missing file."""
    if environment.reward and environment.rewards:
        raise ValueError("config.environment.reward and config.environment.rewards: give one of them")
    field, chosen = _field(environment), _chosen(environment)
    for given, weight in chosen.items():
        if given not in (OWN, JUDGE):
            if not user_code.named(given):
                raise ValueError(f"{field}={given}: is not FILE.py:FUNCTION, {OWN!r} or {JUDGE!r}")
            user_code.check(field, given)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ValueError(f"{field}: the weight of {given} is {weight!r}, not a number")
    return chosen


def _names(weights: Mapping[str, float]) -> dict[str, str]:
    """Each reward's name in metrics: the function's name, prefixed with the file's if two functions share it."""
    short = {given: given.rpartition(":")[2] for given in weights}
    twice = {name for name in short.values() if list(short.values()).count(name) > 1}
    return {
        given: f"{os.path.basename(given.rpartition(':')[0])}:{name}" if name in twice and ":" in given else name
        for given, name in short.items()
    }


def _sum(
    scores: Mapping[str, Score], weights: Mapping[str, float], names: Mapping[str, str], *, correct_at: float
) -> Score:
    """Combines the scores into one."""
    reward = sum(weights[given] * score.reward for given, score in scores.items())
    metrics: dict[str, float] = {}
    for given, score in scores.items():
        metrics |= score.metrics
        metrics[f"rewards/{names[given]}"] = score.reward
        if given not in (OWN, JUDGE):
            metrics[f"rewards/{names[given]}/errors"] = 0.0
    alone = next(iter(scores.values())) if len(scores) == 1 else None
    decides = scores.get(OWN, alone)
    correct = decides.correct if decides is not None else reaches(reward, correct_at)
    answers = [scores[given].answer for given in (OWN, *scores) if given in scores]
    answer = next((answer for answer in answers if answer is not None), None)
    if alone is not None:
        return Score(reward, correct, metrics, answer, alone.why)
    why = "; ".join(
        f"{names[given]} {score.reward:g}" + (f" ({score.why})" if score.why else "") for given, score in scores.items()
    )
    return Score(reward, correct, metrics, answer, why)


class _UsersReward:
    """A user-defined function, called by keyword. Raises ValueError, one line, if that is not possible."""

    def __init__(self, given: str, name: str, field: str, config: Config):
        self._setting = f"{field}={given}"
        function = user_code.load(field, given)
        if inspect.isclass(function):
            try:
                function = function()
            except Exception as error:  # the user's own code, which may raise anything
                file = user_code.file_of(function)
                raise ValueError(
                    f"{self._setting}: cannot be made: {user_code.error_line(error, file=file)}"
                ) from error
        if not callable(function):
            raise ValueError(f"{self._setting}: is {type(function).__name__}, which cannot be called")
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            raise ValueError(f"{self._setting}: its arguments have no names, by which they are given") from None
        by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
        if by_position:
            raise ValueError(f"{self._setting}: takes {', '.join(by_position)} by position; they are given by name")
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._takes = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        self._needs = {p.name for p in parameters if p.name in self._takes and p.default is p.empty}
        if not self._takes_all and not self._takes & {"completion", "thinking", "tokens"}:
            raise ValueError(
                f"{self._setting}: takes none of completion, thinking, tokens, so it cannot tell them apart"
            )
        self.deterministic: bool = getattr(function, "deterministic", False)
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"{self._setting}: deterministic is {self.deterministic!r}, not True or False")
        self._function = UserFunction(
            function, setting=self._setting, name=name, seconds=config.environment.reward_seconds,
            correct_at=config.environment.correct_at,
        )  # fmt: skip
        self._has_worked = False

    def check(self, columns: Collection[str]) -> None:
        """Raises ScorerError if it requires an argument that no row has."""
        if lacks := self._lacks(columns):
            raise ScorerError(f"{self._setting}: {lacks}")

    def _lacks(self, columns: Collection[str]) -> str:
        """An error message on the required arguments that rows with these columns lack; "" if there are none."""
        missing = sorted(self._needs - {*columns, *_GIVEN})
        return f"takes {', '.join(missing)}; rows have {', '.join([*_GIVEN, *map(str, columns)])}" if missing else ""

    def score(self, row: Row, completion: Completion) -> Score:
        given: dict[str, Any] = {
            **row.extra,
            "prompt": asked(row),
            "messages": [dict(m) for m in row.messages] or [{"role": "user", "content": row.text}],
            "completion": str(completion),
            "thinking": completion.thinking,
            "tokens": completion.tokens,
            "answer": row.answer,
            "task": row.task,
        }
        if lacks := self._lacks(row.extra):
            if not self._has_worked:  # most likely no other row has them either
                raise ScorerError(f"{self._setting}: {lacks}")
            raise self._function.failed(lacks, "columns")
        score = self._function.score(**given if self._takes_all else {n: given[n] for n in self._takes if n in given})
        self._has_worked = True
        return score
