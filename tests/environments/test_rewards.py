"""Reward functions of the user's, through the processes that score."""

import dataclasses
from contextlib import closing

import pytest

from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.environments import Completion, Row, Score
from scalerl_jax.environments.base import ScorerError
from scalerl_jax.environments.load import make_environment, make_environments
from scalerl_jax.environments.scorer_pool import ScorerPool

FUNCTIONS = """
from helper import LENGTH
from scalerl_jax.environments import Score

def everything(prompt, messages, completion, thinking, tokens, answer, task, difficulty, other="none"):
    found = (prompt, messages, completion, thinking, tokens, answer, task, difficulty, other)
    return {"reward": 1.0, "why": "|".join(map(str, found))}

def all_columns(completion, **row):
    return Score(0.5, True, why=",".join(sorted(row)))

def brief(completion):
    return -len(completion) / LENGTH

async def says_please(completion, answer):
    return "please" in completion

def words(completion):
    return Score(2.0, False, {"words": float(len(completion.split()))}, answer="vote")

class Counts:
    def __init__(self):
        self.calls = 0
    def __call__(self, completion):
        self.calls += 1
        return self.calls

class Refuses:
    def __init__(self):
        raise RuntimeError("no weights")

def fails_at_b(completion):
    if completion == "b":
        raise KeyError("b")
    return True

def sometimes(completion, difficulty):
    return True

def by_position(completion, /):
    return True

def blind(prompt):
    return True

def ends_the_run(completion):
    from scalerl_jax.environments.base import ScorerError
    raise ScorerError("the licence server is gone")

NUMBER = 3
"""
ROW = Row("1+1?", "2", task="sums", extra={"difficulty": 3})


@pytest.fixture
def named(tmp_path, monkeypatch):
    """The reward of a function's name, with the folder as the working directory."""
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    (tmp_path / "helper.py").write_text("LENGTH = 10\n")
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "unfinished.py").write_text("def reward(:\n")
    monkeypatch.chdir(tmp_path)
    return lambda name: f"my_rewards.py:{name}"


def config_of(**fields) -> Config:
    config = Config()
    config.environment = EnvironmentConfig(name="arithmetic", **fields)
    return config


class Pool(ScorerPool):
    def __init__(self, **fields):
        config = config_of(**fields)
        super().__init__(config, {"": make_environment(config)})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def of(self, text, row=ROW, **further):
        return self.submit(row, Completion(text, **further)).result(600)


def test_a_function_gets_by_name_what_it_takes(named):
    with Pool(reward=named("everything")) as pool:
        score = pool.of("two", thinking="hm", tokens=7)
        messages = [{"role": "user", "content": "1+1?"}]
        assert score.why == f"1+1?|{messages}|two|hm|7|2|sums|3|none"
        assert score.metrics == {"rewards/everything": 1.0, "rewards/everything/errors": 0.0} and score.correct
        asked = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"})
        score = pool.of("two", Row("<|im_start|>1+1?", messages=asked, extra={"difficulty": 1, "other": "x"}))
        assert score.why == f"1+1?|{list(asked)}|two||0|||1|x"
    with Pool(reward=named("all_columns")) as pool:
        assert pool.of("x").why == "answer,difficulty,messages,prompt,task,thinking,tokens"


def test_several_are_summed_by_weight_and_reported_by_name(named):
    weights = {"environment": 1.0, named("brief"): 0.5, named("says_please"): 0.25, named("words"): 0.0}
    with Pool(rewards=weights) as pool:
        score = pool.of("2 please")
        assert score.reward == pytest.approx(-1.0 - 0.5 * 0.8 + 0.25)  # more than an integer
        assert score.metrics == {
            "rewards/environment": -1.0, "rewards/brief": -0.8, "rewards/says_please": 1.0, "rewards/words": 2.0,
            "words": 2.0, **{f"rewards/{name}/errors": 0.0 for name in ("brief", "says_please", "words")},
        }  # fmt: skip
        assert not score.correct and "brief -0.8" in score.why and score.answer == "vote"
        right = pool.of("2")
        assert right.correct and right.answer == "2" and right.reward == pytest.approx(1 - 0.05 - 0.25)


def test_without_the_environments_word_the_sum_is_compared(named):
    with Pool(rewards={named("says_please"): 0.9, named("brief"): -0.1}, correct_at=0.94) as pool:
        assert pool.of("please").correct  # 0.9 + 0.06
        assert not pool.of("pleas").correct
    with Pool(reward=named("words")) as pool:  # one alone has its own word, and vote
        assert pool.of("a b") == Score(
            2.0, False, {"words": 2.0, "rewards/words": 2.0, "rewards/words/errors": 0.0}, "vote"
        )


def test_a_column_that_no_row_has_is_said_before_any_row_is_scored(named):
    with Pool(reward=named("sometimes")) as pool:
        with pytest.raises(ScorerError, match=r"rewards\.py:sometimes: takes difficulty; rows have prompt, .*, level$"):
            pool.prepare(columns={"": {"level"}})
        pool.prepare(columns={"": {"level", "difficulty"}})
        pool.prepare()


def test_a_class_is_made_once_in_a_process(named):
    with Pool(reward=named("Counts")) as pool:
        assert [pool.of(text).reward for text in "abc"] == [1, 2, 3]


def test_a_failure_makes_that_completion_wrong_and_is_said_once(named, caplog):
    with Pool(rewards={"environment": 1.0, named("fails_at_b"): 1.0}) as pool:
        failed = [pool.of("b", dataclasses.replace(ROW, answer=str(n))) for n in range(3)]
        assert all((score.reward, score.correct) == (-1.0, False) for score in failed)
        assert failed[0].metrics == {"rewards/fails_at_b/errors": 1.0}
        assert pool.of("2").correct
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("config.environment.rewards=my_rewards.py:fails_at_b: failed: KeyError: 'b' (my_rewards.py ")


def test_a_column_that_no_row_has_ends_the_run_and_one_that_a_row_lacks_costs_that_row(named):
    bare = Row("1+1?", "2")
    with Pool(reward=named("sometimes")) as pool:
        with pytest.raises(ScorerError, match=r"my_rewards\.py:sometimes: takes difficulty; rows have prompt,"):
            pool.of("x", bare)
        assert pool.of("x").correct
        assert "takes difficulty" in pool.of("y", bare).why


def test_a_function_may_end_the_run(named):
    with Pool(reward=named("ends_the_run")) as pool, pytest.raises(ScorerError, match="the licence server is gone"):
        pool.of("x")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reward": "nowhere.py:f"}, r"^config\.environment\.reward=nowhere\.py:f: there is no file nowhere\.py"),
        ({"reward": "my_rewards.py"}, r"my_rewards\.py: is not FILE\.py:FUNCTION, 'environment' or 'judge'$"),
        ({"reward": "my_rewards:f"}, r"is not FILE\.py:FUNCTION"),
        ({"reward": "judge", "rewards": {"judge": 1.0}}, "give one of them"),
        ({"rewards": {"my_rewards.py:brief": "1"}}, r"the weight of my_rewards\.py:brief is '1', not a number"),
        ({"rewards": {"my_rewards.py:brief": True}}, "is True, not a number"),
    ],
)
def test_what_cannot_be_is_said_when_the_environment_is_made(named, fields, expected):
    with pytest.raises(ValueError, match=expected):
        make_environment(config_of(**fields))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            "my_rewards.py:brie",
            r"^config\.environment\.reward=my_rewards\.py:brie: my_rewards\.py has no brie \(it has: ",
        ),
        ("my_rewards.py:NUMBER", "is int, which cannot be called$"),
        ("my_rewards.py:by_position", "takes completion by position; they are given by name$"),
        ("my_rewards.py:blind", "takes none of completion, thinking, tokens"),
        ("my_rewards.py:Refuses", r"cannot be made: RuntimeError: no weights \(my_rewards\.py line \d+\)$"),
        ("broken.py:f", r"ModuleNotFoundError: No module named 'nowhere_to_be_found' \(broken\.py line 1\)$"),
        ("unfinished.py:f", r"SyntaxError: invalid syntax \(unfinished\.py line 1\)$"),
    ],
)
def test_what_cannot_be_called_is_said_before_the_first_row(named, given, expected):
    with Pool(reward=given) as pool, pytest.raises(ScorerError, match=expected) as caught:
        pool.prepare()
    assert "\n" not in str(caught.value)


def test_parts_of_a_mixture_have_rewards_of_their_own_in_one_pool(named):
    config = Config()
    config.mixture = {
        "sums": EnvironmentConfig(rewards={"environment": 1.0}),
        "style": EnvironmentConfig(reward=named("brief")),
        "bad": EnvironmentConfig(reward=named("brie")),
    }
    with closing(ScorerPool(config, make_environments(config))) as pool:
        assert pool.submit(dataclasses.replace(ROW, environment="sums"), Completion("2")).result(600).reward == 1.0
        assert pool.submit(dataclasses.replace(ROW, environment="style"), Completion("2")).result(600).reward == -0.1
        with pytest.raises(ScorerError, match=r"^config\.mixture\.bad\.reward=my_rewards\.py:brie: "):
            pool.prepare()
