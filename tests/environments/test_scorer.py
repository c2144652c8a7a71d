"""What a completion is worth: one rule for those trained on and those held out, and integers compared as integers."""

import numpy as np
import pytest

from scalerl_jax.config import Config
from scalerl_jax.config_check import check
from scalerl_jax.config_names import ConfigError
from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments import Environment, Row, Score, arithmetic
from scalerl_jax.environments.base import RIGHT, WRONG
from scalerl_jax.environments.load import make_environment
from scalerl_jax.environments.scorer import Scorer


def completion(text: str, finish_reason: str = "stop") -> Completion:
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return Completion(
        incarnation=1,
        group_id="0",
        index=0,
        token_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        versions=((0, 0, len(ids)),),
        forced=(),
        finish_reason=finish_reason,
    )


def scorer(config: Config) -> Scorer:
    return Scorer(make_environment(config), config, decode=lambda ids: bytes(ids).decode())


def is_right(scorer: Scorer, answer: str, completion: Completion) -> bool:
    score = scorer.score(Row("1+1=", answer), completion).result(60)
    assert score == (RIGHT if score.correct else WRONG)
    return score.correct


def is_integer(text: str, answer: str) -> bool:
    return arithmetic.score(Row("", answer), text).correct


def test_a_completion_cut_by_the_budget_is_wrong_and_no_verifier_is_asked():
    asked = []

    def score(row: Row, text: str) -> Score:
        asked.append(text)
        return arithmetic.score(row, text)

    environment = Environment(lambda split: [], score, in_processes=False)
    with Scorer(environment, Config(), decode=lambda ids: bytes(ids).decode()) as answers:
        assert is_right(answers, "7", completion("<think>3+4=7</think>7"))
        assert not is_right(answers, "7", completion("<think>3+4=7</think>7", "length"))
    assert asked == ["7"]


@pytest.mark.parametrize("right", ["7", " 7", "7\n", "+7", "07"])
def test_the_integer_is_right(right):
    assert is_integer(right, "7")


@pytest.mark.parametrize(
    "wrong",
    [
        *("3+4", "3+4=", "3+4=7", "14/2", "7.0", "7.", "8", "-7", "--7", "", " ", "7 7", "seven", "\\boxed{7}", "7=7"),
        *("7e0", "7_0", "٧", "７", "7" * 5000, "7\x00", "0x7"),
    ],
)
def test_what_is_not_the_integer_is_wrong(wrong):
    assert not is_integer(wrong, "7")


def test_no_question_of_the_arithmetic_task_is_its_own_answer():
    """Nor is what it comes to, in the middle of a sum: the work is the policy's to do."""
    config = Config()
    with scorer(config) as answers:
        assert answers._pool is None  # no process is started for it
        for problem in arithmetic.problems(200, config.environment, seed=0, validation=False):
            thought = f"<think>{problem.text}{problem.answer}</think>"
            assert is_right(answers, problem.answer, completion(thought + problem.answer))
            for said in (problem.text, problem.text.rstrip("="), problem.text + problem.answer):
                assert not is_right(answers, problem.answer, completion(thought + said))
            assert not is_right(answers, problem.answer, completion(f"<think>{problem.answer}"))  # it never answers


def test_without_thinking_the_whole_text_is_the_answer():
    config = Config()
    config.rollout.thinking_budget_min = config.rollout.thinking_budget_max = 0
    with scorer(config) as answers:
        assert is_right(answers, "7", completion(" 7"))
        assert not is_right(answers, "7", completion("7</think>8"))


@pytest.mark.parametrize("field", ["verifier_processes", "verifier_seconds"])
def test_limits_must_be_positive(field):
    config = Config()
    config.model.path = "somewhere"
    setattr(config.environment, field, type(getattr(config.environment, field))(0))
    with pytest.raises(ConfigError, match=rf"config\.environment\.{field}=0"):
        check(config)
