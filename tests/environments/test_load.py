"""Problems and their traces, the two sides kept apart, and files with mistakes in them."""

import itertools
import json
import math
import re
import typing

import numpy as np
import pytest

from scalerl_jax.config import PHRASE, Config, EnvironmentConfig
from scalerl_jax.environments import arithmetic
from scalerl_jax.environments.load import ENVIRONMENTS, load_rows, make_environment
from scalerl_jax.environments.tokenizer import make_tokenizer
from tests.environments import odd


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    corpus = arithmetic.corpus(EnvironmentConfig(minimum_terms=3, maximum_terms=8), seed=0, phrase=PHRASE)
    return make_tokenizer(corpus=corpus, path=str(tmp_path_factory.mktemp("tokenizer")), vocabulary=384)


def jsonl(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def file_config(tmp_path, train, validation):
    config = Config()
    config.environment.name = "jsonl"
    config.environment.train_file = jsonl(tmp_path / "train.jsonl", train)
    config.environment.validation_file = jsonl(tmp_path / "validation.jsonl", validation)
    return config


def test_training_and_held_out_problems_are_disjoint_whatever_the_seed(tokenizer):
    config = Config()
    config.evaluation.prompts = 300
    held_out, training = [], set()
    for config.seed in range(3):
        train, validation = load_rows(config, tokenizer)
        assert [p.index for p in train] == list(range(config.environment.train_prompts))
        assert len({p.text for p in train}) == len(train) == config.environment.train_prompts
        held_out.append([p.text for p in validation])
        training |= {p.text for p in train}
    assert held_out[0] == held_out[1] == held_out[2] and len(set(held_out[0])) == 300
    assert not training & set(held_out[0])
    assert len(training) > 2.5 * config.environment.train_prompts  # a seed has prompts of its own


def test_the_prompt_is_its_tokens(tokenizer):
    train, _ = load_rows(Config(), tokenizer)
    for prompt in train[:20]:
        assert prompt.token_ids.dtype == np.int32
        assert tokenizer.decode(prompt.token_ids.tolist()) == prompt.text
        assert eval(prompt.text.rstrip("=")) == int(prompt.answer)


def test_a_trace_without_slips_is_arithmetic():
    rng = np.random.default_rng(0)
    for _ in range(200):
        problem = arithmetic.draw(rng, EnvironmentConfig(minimum_terms=2, maximum_terms=9), validation=False)
        (piece,) = arithmetic.trace(problem, rng, error_rate=0.0)
        thinking, answer = re.fullmatch(r"<think>(.*)</think>(\d)", piece.text).groups()
        parts = re.split(r"=", thinking)
        for left, right in itertools.pairwise(parts):
            assert eval(left) == int(right[0])  # "3+4", "7-5", ...: each begins with the total before it
        assert answer == problem.answer == thinking[-1]


def test_slips_come_at_the_rate_asked_for_and_the_trace_stays_consistent():
    rng = np.random.default_rng(0)
    steps = slips = 0
    for _ in range(1500):
        problem = arithmetic.draw(rng, EnvironmentConfig(minimum_terms=3, maximum_terms=8), validation=False)
        (piece,) = arithmetic.trace(problem, rng, error_rate=0.2)
        thinking, answer = re.fullmatch(r"<think>(.*)</think>(\d)", piece.text).groups()
        found = re.findall(r"([+-]\d)=(\d)", thinking)
        assert [int(term) for term, _ in found] == list(problem.terms)
        total = problem.start
        for term, result in found:
            steps += 1
            slips += int(result) != total + int(term)
            assert abs(int(result) - total - int(term)) <= 2
            total = int(result)
        assert int(answer) == total
    assert abs(slips / steps - 0.2) < 4 * np.sqrt(0.16 / steps)


def test_an_interrupted_trace_is_cut_anywhere_and_answers_with_its_last_total():
    rng = np.random.default_rng(0)
    interrupted = cut_in_a_step = 0
    for _ in range(2000):
        problem = arithmetic.draw(rng, EnvironmentConfig(minimum_terms=3, maximum_terms=8), validation=False)
        pieces = arithmetic.trace(problem, rng, error_rate=0.2, phrase=PHRASE)
        if len(pieces) == 1:
            continue
        interrupted += 1
        thinking, phrase, answer = pieces
        assert (thinking.trained, phrase.trained, answer.trained) == (True, False, True) and phrase.text == PHRASE
        whole = re.match(r"<think>\d(?:[+-]\d=\d)*", thinking.text)[0]
        cut_in_a_step += whole != thinking.text
        assert answer.text == whole[-1]
    assert abs(interrupted / 2000 - arithmetic.INTERRUPTED_SHARE) < 0.02
    assert 0 < cut_in_a_step < interrupted


def test_of_too_few_held_out_problems_there_are_all():
    few = arithmetic.problems(5000, EnvironmentConfig(minimum_terms=2, maximum_terms=2), seed=0, validation=True)
    again = arithmetic.problems(9000, EnvironmentConfig(minimum_terms=2, maximum_terms=2), seed=1, validation=True)
    assert 0 < len(few) == len(again) < 100 and {p.text for p in few} == {p.text for p in again}


def test_too_small_a_task_is_named():
    with pytest.raises(ValueError, match="chains of 2 to 2 terms do not make 5000 different training problems"):
        arithmetic.problems(5000, EnvironmentConfig(minimum_terms=2, maximum_terms=2), seed=0, validation=False)
    with pytest.raises(ValueError, match="minimum_terms=1"):
        arithmetic.problems(5, EnvironmentConfig(minimum_terms=1, maximum_terms=2), seed=0, validation=False)


def test_a_prompt_over_the_limit_is_refused(tokenizer):
    config = Config()
    config.rollout.max_prompt_tokens = 10
    with pytest.raises(
        ValueError, match=r"problem .*=: the prompt has 1\d tokens, config.rollout.max_prompt_tokens is 10"
    ):
        load_rows(config, tokenizer)


def test_files(tokenizer, tmp_path):
    config = file_config(
        tmp_path,
        [{"prompt": "one?", "answer": "1"}, "\n", {"prompt": "half?", "answer": 0.5, "source": "kept out"}],
        [{"prompt": f"{i}?", "answer": str(i), "task": "algebra"} for i in range(5)],
    )
    config.evaluation.prompts = 3
    train, validation = load_rows(config, tokenizer)
    assert [(p.index, p.text, p.answer) for p in train] == [(0, "one?", "1"), (1, "half?", "0.5")]
    assert [p.text for p in validation] == ["0?", "1?", "2?"]
    assert {p.task for p in train} == {""} and {p.task for p in validation} == {"algebra"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json\n", r"train\.jsonl row 2: is not JSON"),
        ("[1, 2]\n", r"train\.jsonl row 2: is not a JSON object"),
        ({"prompt": "x?"}, r"train\.jsonl row 2: 'answer' is not a text"),
        ({"prompt": "x?", "answer": True}, r"train\.jsonl row 2: 'answer' is not a text"),
        ("[" * 100_000 + "\n", r"train\.jsonl row 2: is not JSON"),
        ('{"prompt": "x?", "answer": ' + 5_000 * "9" + "}\n", r"train\.jsonl row 2: is not JSON"),
        ({"prompt": "x?", "answer": math.nan}, r"train\.jsonl row 2: 'answer' is not a text"),
        ({"prompt": "  ", "answer": "1"}, r"train\.jsonl row 2: 'prompt' is not a text, or is empty"),
        ({"prompt": "x?", "answer": "1", "task": 3}, r"train\.jsonl row 2: 'task' is not a text"),
        ({"prompt": ["x?"], "answer": "1"}, r"train\.jsonl row 2: 'prompt' is not a text"),
        ({"prompt": "one?", "answer": "1"}, r"train\.jsonl row 2: the prompt is the same as in .*train\.jsonl row 1"),
    ],
)
def test_a_bad_row_is_named(tokenizer, tmp_path, row, message):
    config = file_config(tmp_path, [{"prompt": "one?", "answer": "1"}, row], [{"prompt": "two?", "answer": "2"}])
    with pytest.raises(ValueError, match=message):
        load_rows(config, tokenizer)


def test_a_held_out_prompt_among_the_training_prompts_is_refused(tokenizer, tmp_path):
    config = file_config(
        tmp_path,
        [{"prompt": "one?", "answer": "1"}],
        [{"prompt": "two?", "answer": "2"}, {"prompt": "one?", "answer": "1"}],
    )
    with pytest.raises(ValueError, match=r"validation\.jsonl row 2: the prompt is the same as in .*train\.jsonl row 1"):
        load_rows(config, tokenizer)


def test_a_missing_or_empty_file_is_named(tokenizer, tmp_path):
    config = file_config(tmp_path, [], [])
    with pytest.raises(ValueError, match=r"train\.jsonl: no prompts there"):
        load_rows(config, tokenizer)
    config.environment.train_file = str(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match=r"config\.environment\.train_file=.*absent\.jsonl: No such file"):
        load_rows(config, tokenizer)
    config.environment.train_file = ""
    with pytest.raises(ValueError, match=r"config\.environment\.train_file: no file is given"):
        load_rows(config, tokenizer)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9", "answer": "1"}\n')
    config.environment.train_file = str(tmp_path / "latin.jsonl")
    with pytest.raises(ValueError, match=r"latin\.jsonl: is not UTF-8"):
        load_rows(config, tokenizer)


def test_an_environment_that_there_is_not_is_named():
    config = Config()
    config.environment.name = "arithmatic"
    with pytest.raises(ValueError, match=r"^config\.environment\.name='arithmatic': is not one of arithmetic, jsonl$"):
        make_environment(config)


def test_an_environment_is_a_file_and_a_row_of_the_table(tokenizer, monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS, "odd", odd.make)
    config = Config()
    config.environment.name, config.evaluation.prompts = "odd", 2
    train, validation = load_rows(config, tokenizer)
    assert [(row.index, row.text, row.answer) for row in train] == [(n, f"train {n}?", str(n)) for n in range(3)]
    assert [row.text for row in validation] == ["validation 0?", "validation 1?"]
    assert tokenizer.decode(train[0].token_ids.tolist()) == "train 0?" and train[2].extra == {"bonus": 0.5}


def test_the_config_offers_every_environment():
    assert typing.get_args(typing.get_type_hints(EnvironmentConfig)["name"]) == tuple(ENVIRONMENTS)
