"""The score of each completion: computed once, and in the same way for training and held-out ones.

    cut by the token budget        wrong, whatever its text; the environment is not called
    nothing follows the thinking   wrong; the environment is not called
    otherwise                      the environment of the row scores the text after the thinking

The text after the thinking is what follows the last `end_of_thinking` (tokenizer.py); without a thinking budget, and if
the prompt did not open the thinking, it is the whole text. config.rollout.length_control=penalty lowers the reward of
long correct completions:

The length penalty, the paper's alternative to interruptions (equation 9).

    R_length(y) = clip( (L_max - |y|) / L_cache - 1, -1, 0 )     added to the reward of correct completions only

    |y|      sampled tokens
    L_max    thinking_budget_max + answer_budget: the longest completion
    L_cache  length_penalty_tokens: the last tokens before L_max, over which R_length falls from 0 to -1

`correct` is unchanged: filters, the curriculum and pass rates do not see lengths.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from scalerl_jax.config import Config, RolloutConfig
from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments import parts
from scalerl_jax.environments.base import Completion as AnswerText
from scalerl_jax.environments.base import Environment, Row, Score, ScorerError
from scalerl_jax.environments.episode_pool import EpisodePool
from scalerl_jax.environments.load import make_environments
from scalerl_jax.environments.prompts import Replies
from scalerl_jax.environments.score_worker import raising_scorer_errors, score_of_failure
from scalerl_jax.environments.scorer_pool import Complaints, ScorerPool, done_future
from scalerl_jax.environments.tokenizer import split_as_run

METRIC = "length_penalty"


def of_tokens(tokens: int, rollout: RolloutConfig) -> float:
    """R_length, in [-1, 0]."""
    longest = rollout.thinking_budget_max + rollout.answer_budget
    return min(0.0, max(-1.0, (longest - tokens) / rollout.length_penalty_tokens - 1))


def penalized(score: Score, *, tokens: int, rollout: RolloutConfig) -> Score:
    """`score` with the penalty added to its reward and its metrics; the penalty of a wrong completion is 0."""
    penalty = of_tokens(tokens, rollout) if score.correct else 0.0
    return dataclasses.replace(score, reward=score.reward + penalty, metrics={**score.metrics, METRIC: penalty})


CUT = Score(-1.0, False, why="cut by the token budget")
NO_ANSWER = Score(-1.0, False, why="nothing follows the thinking")


class Scorer:
    """Scores the completions of one run; a context manager.

    decode: returns the text of a completion's tokens without the stop token. everywhere: wait until every scoring
    process is ready, not only one. rows: the run's rows, if known; a score function that requires a column that no row
    has is an error. environments: the run's environments by part (parts.py); None: made from the config. replies,
    turn_tokens: for environments with episodes, see EpisodePool; replies=None: only answers are scored. Raises
    ScorerError, one line, if an environment cannot be made or prepared.
    """

    def __init__(
        self,
        config: Config,
        *,
        decode: Callable[[Sequence[int]], str],
        everywhere: bool = False,
        rows: Iterable[Row] | None = None,
        environments: Mapping[str, Environment] | None = None,
        replies: Replies | None = None,
        turn_tokens: int = 0,
    ):
        if environments is None:
            environments = make_environments(config)
        self._environments, self._rollout, self._decode = environments, config.rollout, decode
        episodic = {
            part: environment
            for part, environment in environments.items()
            if (environment.episode is not None or environment.run is not None)
            and not (replies is None and environment.scores_answers)
        }
        apart = {part: one for part, one in environments.items() if one.in_processes and part not in episodic}
        self._complaints = Complaints()
        self._pool = ScorerPool(config, apart, complaints=self._complaints) if apart else None
        self.agents = any(environment.run is not None for environment in episodic.values())
        self.episodes: EpisodePool | None = None
        try:
            if replies is not None and not episodic and config.rollout.max_turns > 1:
                raise ScorerError(
                    f"config.rollout.max_turns={config.rollout.max_turns}: no environment of the run has episodes"
                )
            if self.agents and config.rollout.router_replay:
                raise ScorerError("config.rollout.router_replay: is not possible with an environment that has `run`")
            if episodic:
                self.episodes = _episodes(
                    config, episodic, replies=replies, decode=decode, turn_tokens=turn_tokens,
                    complaints=self._complaints,
                )  # fmt: skip
            for part, environment in environments.items():
                if not environment.in_processes and environment.prepare is not None:
                    with raising_scorer_errors(part, parts.configs(config)[part], "cannot be prepared"):
                        environment.prepare()
            if self._pool is not None:
                columns: dict[str, set[str]] = {}
                for row in rows or ():
                    columns.setdefault(row.environment, set()).update(map(str, row.extra))
                    if (check := environments[row.environment].check_row) is not None:
                        try:
                            check(row)
                        except ValueError as error:
                            raise ScorerError(parts.as_written(row.environment, str(error))) from error
                self._pool.prepare(everywhere=everywhere, columns=columns)
        except ValueError as error:
            self.__exit__()
            raise ScorerError(str(error)) from error
        except BaseException:
            self.__exit__()
            raise

    def score(self, row: Row, completion: Completion) -> "Future[Score]":
        """May block briefly. The future raises ScorerError if the completion cannot be scored."""
        tokens = int(completion.sampled().sum())
        if completion.finish_reason != "stop":
            return self._worth(done_future(CUT), tokens)
        text = self._decode(completion.token_ids.tolist())
        end, budget = self._rollout.end_of_thinking, self._rollout.thinking_budget_max
        thinking, answer = split_as_run(text, end, prompt=row.text, budget=budget)
        return self.score_answer(row, answer, thinking=thinking, tokens=tokens)

    def score_answer(self, row: Row, answer: str | None, *, thinking: str, tokens: int) -> "Future[Score]":
        """As `score`, for a completion that is already split; `answer` is None if nothing follows the thinking."""
        if answer is None:
            return self._worth(done_future(NO_ANSWER), tokens)
        answer_text = AnswerText(answer, thinking=thinking, tokens=tokens)
        environment = self._environments[row.environment]
        if environment.in_processes:
            assert self._pool is not None
            return self._worth(self._pool.submit(row, answer_text), tokens)
        try:
            score = environment.score(row, answer_text)
        except Exception as error:  # noqa: BLE001 (as in the processes: it costs this completion, and is logged)
            score, kind = score_of_failure(row.environment, error)
            self._complaints.log(kind, score.why)
        return self._worth(done_future(score), tokens)

    def _worth(self, score: "Future[Score]", tokens: int) -> "Future[Score]":
        """Adds the length penalty to the environment's score, if the run has one."""
        if self._rollout.length_control != "penalty":
            return score
        worth: Future[Score] = Future()

        def scored(done: "Future[Score]") -> None:
            if done.cancelled():
                worth.cancel()
            elif error := done.exception():
                worth.set_exception(error)
            else:
                worth.set_result(penalized(done.result(), tokens=tokens, rollout=self._rollout))

        score.add_done_callback(scored)
        return worth

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()
        if self.episodes is not None:
            self.episodes.close()


def _episodes(
    config: Config, environments: Mapping[str, Environment], *, replies: Replies | None, **given: Any
) -> EpisodePool:
    part = next(iter(environments))
    field = f"{parts.field(part, 'name')}={parts.configs(config)[part].environment.name}"
    if replies is None:
        raise ScorerError(f"{field}: has episodes of several turns, which are not scored alone")
    if config.rollout.max_turns < 2:
        raise ScorerError(
            f"{field}: has episodes of several turns, which require config.rollout.max_turns of 2 or more"
        )
    return EpisodePool(config, environments, replies=replies, **given)
