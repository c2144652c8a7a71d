"""Arithmetic's problems, their traces, and what an answer is worth."""

import itertools
import re

import numpy as np
import pytest

from scalerl_jax.config import PHRASE, Config, EnvironmentConfig
from scalerl_jax.environments import Row, arithmetic, made_problems
from scalerl_jax.environments.base import Stratum
from scalerl_jax.environments.load import load_rows


def test_training_and_held_out_problems_are_disjoint_whatever_the_seed(tokenizer):
    config = Config()
    config.evaluation.prompts = 300
    held_out, training = [], set()
    for config.seed in range(3):
        rows = load_rows(config, tokenizer)
        assert [p.index for p in rows.train] == list(range(config.environment.train_prompts))
        assert len({p.text for p in rows.train}) == len(rows.train) == config.environment.train_prompts
        assert rows.strata == [Stratum("", 1.0, range(config.environment.train_prompts))]
        held_out.append([p.text for p in rows.held_out])
        training |= {p.text for p in rows.train}
    assert held_out[0] == held_out[1] == held_out[2] and len(set(held_out[0])) == 300
    assert not training & set(held_out[0])
    assert len(training) > 2.5 * config.environment.train_prompts  # a seed has prompts of its own


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
    assert abs(interrupted / 2000 - made_problems.INTERRUPTED_SHARE) < 0.02
    assert 0 < cut_in_a_step < interrupted


def test_of_too_few_held_out_problems_there_are_all():
    few = arithmetic.problems(5000, EnvironmentConfig(minimum_terms=2, maximum_terms=2), seed=0, validation=True)
    again = arithmetic.problems(9000, EnvironmentConfig(minimum_terms=2, maximum_terms=2), seed=1, validation=True)
    assert 0 < len(few) == len(again) < 100 and {p.text for p in few} == {p.text for p in again}


def test_too_small_a_task_is_named(tokenizer):
    with pytest.raises(ValueError, match="chains of 2 to 2 terms do not make 5000 different training problems"):
        arithmetic.problems(5000, EnvironmentConfig(minimum_terms=2, maximum_terms=2), seed=0, validation=False)
    config = Config()
    config.mixture = {"sums": EnvironmentConfig(minimum_terms=2, maximum_terms=2, train_prompts=5000)}
    with pytest.raises(ValueError, match=r"^config\.mixture\.sums\.train_prompts=5000: chains of 2 to 2 terms"):
        load_rows(config, tokenizer)
    with pytest.raises(ValueError, match="minimum_terms=1"):
        arithmetic.problems(5, EnvironmentConfig(minimum_terms=1, maximum_terms=2), seed=0, validation=False)


@pytest.mark.parametrize(
    ("text", "correct", "answer"),
    [
        ("7", True, "7"),
        (" 7\n", True, "7"),
        ("+07", True, "7"),
        ("8", False, "8"),
        ("+8", False, "8"),
        ("-7", False, "-7"),
        ("-0", False, "0"),
        ("3+4", False, None),
        ("7.0", False, None),
        ("7 7", False, None),
        ("٧", False, None),  # a digit, not in ASCII
        ("7" * 19, False, None),
        ("", False, None),
    ],
)
def test_an_answer_and_its_vote(text, correct, answer):
    found = arithmetic.score(Row("3+4=", "7"), text)
    assert (found.reward, found.correct, found.answer) == (1.0 if correct else -1.0, correct, answer)
    assert found.why.endswith("said 7" if correct else "wanted 7") and len(found.why) < 60


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 1.0])
def test_what_is_unanswerable_caps_every_policy_at_a_known_rate(tokenizer, share):
    config = Config()
    config.evaluation.prompts, config.environment.train_prompts = 300, 400
    plain = load_rows(config, tokenizer)
    config.environment.unanswerable = share
    rows = load_rows(config, tokenizer)
    for before, after in ((plain.train, rows.train), (plain.held_out, rows.held_out)):
        assert [row.text for row in after] == [row.text for row in before]
        random = [row for row in after if row.task == "unanswerable"]
        assert len(random) == round(share * len(after))
        counts = np.bincount([int(row.answer) for row in random], minlength=10)
        assert counts.max() - counts.min() <= 1
        answerable = [(a, b) for a, b in zip(after, before) if a.task != "unanswerable"]
        assert all(a.answer == b.answer and a.task == b.task for a, b in answerable)
        # The sum is right of what is left, and of the rest as often as chance has it: 6 standard deviations.
        right = sum(arithmetic.score(a, b.answer).correct for a, b in zip(after, before))
        assert abs(right - (len(after) - 0.9 * len(random))) <= 6 * (0.09 * len(random)) ** 0.5
    # A hash chooses, so a held-out problem is answered alike in every run of these settings.
    config.seed = 1
    assert [(row.text, row.answer) for row in load_rows(config, tokenizer).held_out] == [
        (row.text, row.answer) for row in rows.held_out
    ]
