"""reasoning-gym's data sets as environments."""

import dataclasses
import itertools
import os
from contextlib import closing

import pytest

from scalerl_jax.config import Config
from scalerl_jax.environments import Completion, Row
from scalerl_jax.environments.base import ScorerError
from scalerl_jax.environments.load import make_environment, make_environments
from scalerl_jax.environments.reasoning_gym import answer_in
from scalerl_jax.environments.scorer_pool import ScorerPool


def config_of(name, *, train=6, held_out=3, **options):
    config = Config()
    config.environment.name = f"reasoning_gym:{name}"
    config.environment.train_prompts, config.evaluation.prompts = train, held_out
    config.environment.options = options
    config.environment.verifier_seconds = 60.0
    return config


def rows_of(config):
    environment = make_environment(config)
    return environment, list(environment.rows("train")), list(environment.rows("validation"))


@pytest.mark.slow
def test_its_own_answers_are_right_and_others_are_not():
    """Of one whose questions depend on the order of Python's sets, one that makes all entries at once, one without an
    answer."""
    config = Config()
    names = ("polynomial_multiplication", "word_ladder", "graph_color")
    config.mixture = {name: config_of(name).environment for name in names}
    config.evaluation.prompts = 3
    environments, rows = make_environments(config), {}
    for name, environment in environments.items():
        train, held_out = list(environment.rows("train")), list(environment.rows("validation"))
        assert len(train) == 6 and len(held_out) == 3 and len({row.text for row in (*train, *held_out)}) == 9
        assert all(row.chat and row.task == name for row in train)
        rows[name] = [dataclasses.replace(row, environment=name) for row in (train[5], held_out[0])]
    with closing(ScorerPool(config, environments)) as pool:
        for row in itertools.chain(*rows.values()):
            assert not pool.submit(row, Completion("no idea")).result(300).correct
            if row.answer:
                right = pool.submit(row, Completion(f"So <answer> {row.answer}\n</answer> it is")).result(300)
                assert (right.reward, right.correct, right.answer) == (1.0, True, row.answer)
        (row, _) = rows["graph_color"]
        other = dataclasses.replace(row, extra={**row.extra, "question": "another"})
        with pytest.raises(ScorerError, match="another is another question when made again"):
            pool.submit(other, Completion("1")).result(300)
        with pytest.raises(ScorerError, match="a row has no question, seed, size, index"):
            pool.submit(Row("?", environment="graph_color"), Completion("1")).result(300)


@pytest.mark.slow
@pytest.mark.parametrize("each", [pytest.param(1, marks=pytest.mark.long), 48], ids=["all 106", "one of 48"])
def test_data_sets_call_their_own_answers_right(each):
    from reasoning_gym.factory import DATASETS  # takes seconds

    config, wrong = Config(), []
    for name in sorted(DATASETS)[::each]:
        options = {"datasets": [{"name": "chain_sum", "weight": 1.0}]} if name == "composite" else {}
        config.mixture[name] = config_of(name, train=2, held_out=1, **options).environment
    config.evaluation.prompts = 1
    environments = make_environments(config)
    with closing(ScorerPool(config, environments)) as pool:
        for name, environment in environments.items():
            row = dataclasses.replace(list(environment.rows("train"))[1], environment=name)
            score = pool.submit(row, Completion(row.answer or "?")).result(300)
            wrong += [(name, score)] if row.answer and not score.correct else []
    assert not wrong


@pytest.mark.slow
def test_a_seed_has_training_prompts_of_its_own_and_the_held_out_ones_stay():
    first = config_of("chain_sum")
    second = config_of("chain_sum")
    second.seed = 1000
    (_, train, held_out), (_, others, again) = rows_of(first), rows_of(second)
    assert [row.text for row in held_out] == [row.text for row in again]
    assert {row.text for row in train}.isdisjoint(row.text for row in others)


@pytest.mark.slow
def test_a_held_out_prompt_is_no_training_prompt_though_there_are_few():
    config = config_of("chain_sum", train=5000, held_out=20, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    environment = make_environment(config)
    with pytest.raises(ValueError, match=r"makes \d+ different training prompts beside the held-out .* is 5000: other"):
        list(environment.rows("train"))
    held_out = {row.text for row in environment.rows("validation")}
    config.environment.train_prompts = 60
    train = {row.text for row in environment.rows("train")}
    assert len(train) > 60 and len(held_out) == 20 and not train & held_out


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("chain_sums", {}, "has no data set of that name; near it are chain_sum"),
        ("chain_sum", {"terms": 3}, r"options: reasoning_gym:chain_sum has no option 'terms' to give \(it has: "),
        ("chain_sum", {"seed": 3}, "has no option 'seed' to give"),
        ("chain_sum", {"min_terms": -1}, "AssertionError"),
    ],
)
def test_what_cannot_be_is_one_line(name, options, expected):
    prepare = make_environment(config_of(name, **options)).prepare
    assert prepare is not None
    with pytest.raises(ValueError, match=expected) as caught:
        prepare()
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_fault_where_prompts_are_made_is_the_same_line():
    with pytest.raises(ValueError, match=r"^config\.environment\.name=reasoning_gym:chain_sums: reasoning-gym has no"):
        list(make_environment(config_of("chain_sums")).rows("train"))


def test_without_the_package_it_says_how_to_get_it(tmp_path, monkeypatch):
    (tmp_path / "reasoning_gym.py").write_text("raise ImportError('no')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(ValueError, match=r"needs the package reasoning-gym: pip install 'scalerl-jax\[environments\]'"):
        list(make_environment(config_of("chain_sum")).rows("train"))


def test_what_stands_in_the_last_answer_tags():
    assert answer_in("<answer>1</answer> or <answer>\n 2 </answer>.") == "2"
    assert answer_in(" 3 ") == "3"


@pytest.mark.slow
def test_what_a_data_set_prints_is_no_part_of_its_rows():
    _, train, held_out = rows_of(config_of("bf", train=2, held_out=1))
    assert len(train) == 2 and len(held_out) == 1
