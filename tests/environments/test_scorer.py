"""What a completion is worth: one rule for those trained on and those held out, and integers compared as integers."""

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.config import Config, RolloutConfig
from scalerl_jax.config_check import ConfigError, check
from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments import Environment, Row, Score, arithmetic
from scalerl_jax.environments.base import ScorerError
from scalerl_jax.environments.scorer import Scorer, of_tokens, penalized

PAPER = RolloutConfig(thinking_budget_max=12_000, answer_budget=2000, length_penalty_tokens=2000)


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
    return Scorer(config, decode=lambda ids: bytes(ids).decode())


def is_right(scorer: Scorer, answer: str, completion: Completion) -> bool:
    score = scorer.score(Row("1+1=", answer), completion).result(600)
    assert score.reward == (1 if score.correct else -1)
    return score.correct


def is_integer(text: str, answer: str) -> bool:
    return arithmetic.score(Row("", answer), text).correct


def test_a_completion_cut_by_the_budget_is_wrong_and_no_verifier_is_asked():
    asked = []

    def score(row: Row, text: str) -> Score:
        asked.append(text)
        return arithmetic.score(row, text)

    environment = Environment(lambda split: [], score, in_processes=False)
    with Scorer(Config(), decode=lambda ids: bytes(ids).decode(), environments={"": environment}) as answers:
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


def test_a_prompt_that_opens_thinking_is_answered_after_it_whatever_the_budget():
    config = Config()
    config.rollout.thinking_budget_min = config.rollout.thinking_budget_max = 0
    with scorer(config) as answers:
        opened = Row("1+1=<think>\n", "7")
        assert answers.score(opened, completion("3+4</think>7")).result(600).correct
        assert not answers.score(opened, completion("7")).result(600).correct


def test_the_penalty_is_of_correct_completions_that_are_long():
    config = Config()
    config.rollout.length_control, config.rollout.thinking_budget_max = "penalty", 10
    config.rollout.answer_budget, config.rollout.length_penalty_tokens = 10, 10  # from 10 to 20 tokens
    with scorer(config) as answers:
        for text, reward in (("</think>7", 1.0), ("<think></think>7", 0.4), ("<think></think>8", -1.0)):
            score = answers.score(Row("", "7"), completion(text)).result(600)
            assert score.reward == pytest.approx(reward) and score.correct == text.endswith("7")
            assert score.metrics["length_penalty"] == pytest.approx(min(0.0, reward - 1.0) if score.correct else 0.0)
        cut = answers.score(Row("", "7"), completion("</think>7", "length")).result(600)
        assert (cut.reward, cut.metrics) == (-1.0, {"length_penalty": 0.0})


@pytest.mark.parametrize("error", [OSError("no such\ndisk"), SystemExit(3), ValueError("config.environment.x: is bad")])
def test_what_cannot_be_prepared_where_the_run_is_is_one_line(error):
    def prepare():
        raise error

    config = Config()
    environment = Environment(lambda split: [], arithmetic.score, in_processes=False, prepare=prepare)
    with pytest.raises(
        ScorerError, match=r"^config\.environment\.(name=arithmetic: cannot be prepared: |x: is bad$)"
    ) as said:
        Scorer(config, decode=str, environments={"": environment})
    assert "\n" not in str(said.value) and type(error).__name__ in str(said.value) + "ValueError"


def test_what_cannot_be_made_is_said_when_it_starts_and_leaves_no_process(tmp_path):
    config = Config()
    (tmp_path / "mine.py").write_text("")
    config.environment.reward = f"{tmp_path}/mine.py:reward"
    with pytest.raises(ScorerError, match=r"^config\.environment\.reward=.*mine\.py has no reward \(it has: nothing"):
        scorer(config)
    assert not [child for child in psutil.Process().children() if "score_worker" in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(1, 0), (12_000, 0), (12_500, -0.25), (13_000, -0.5), (14_000, -1), (15_000, -1)]
)
def test_the_papers_values(tokens, penalty):
    """Equation 9, L_max = 14k and L_cache = 2k: nothing up to 12k, then linear to -1."""
    assert of_tokens(tokens, PAPER) == penalty


@given(
    tokens=st.integers(0, 10**6),
    thinking=st.integers(0, 10**5),
    answer=st.integers(1, 10**5),
    cache=st.integers(1, 10**5),
)
def test_the_formula_in_float64(tokens, thinking, answer, cache):
    rollout = RolloutConfig(thinking_budget_max=thinking, answer_budget=answer, length_penalty_tokens=cache)
    wanted = np.clip((np.float64(thinking + answer) - tokens) / cache - 1, -1, 0)
    assert of_tokens(tokens, rollout) == wanted


def test_correct_ones_alone_are_worth_less_and_stay_correct():
    right = penalized(Score(1.0, True, {"a": 2.0}, "7", "why"), tokens=13_000, rollout=PAPER)
    assert right == Score(0.5, True, {"a": 2.0, "length_penalty": -0.5}, "7", "why")
    wrong = penalized(Score(-1.0, False), tokens=13_000, rollout=PAPER)
    assert wrong == Score(-1.0, False, {"length_penalty": 0.0})
