"""The numbers of an evaluation, against counting all subsets, and intervals against what they promise."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments import Row, Score
from scalerl_jax.environments.base import RIGHT, WRONG
from scalerl_jax.rollouts.group_buffer import FinishedGroup
from scalerl_jax.run import pass_rates
from scalerl_jax.run.pass_rates import (
    by_part,
    evaluation_row,
    interval,
    majority_at,
    numbers,
    of_groups,
    pass_at,
    subset_sizes,
)


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(n, data):
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([i < correct for i in range(n)], k))
    assert pass_at(correct, n, k) == pytest.approx(np.mean([any(subset) for subset in subsets]), abs=1e-12)


def test_pass_at_k_of_many_completions_keeps_its_digits():
    assert pass_at(1, 100_000, 1) == pytest.approx(1e-5, rel=1e-6)
    assert pass_at(0, 1000, 500) == 0.0 and pass_at(501, 1000, 500) == 1.0


def winner(answers, right):
    """The probability that the answer with the most votes is right."""
    named = [answer for answer in answers if answer is not None]
    best = [a for a in set(named) if named.count(a) == max(map(named.count, named))]
    return np.mean([a in right for a in best]) if best else 0.0


def exact_majority(answers, correct, k):
    right = {answer for answer, is_right in zip(answers, correct) if is_right}
    return np.mean([winner(subset, right) for subset in itertools.combinations(answers, k)])


@given(st.lists(st.sampled_from(["1", "2", "3", None]), min_size=1, max_size=8), st.data())
def test_majority_at_k_is_what_all_subsets_give(answers, data):
    k = data.draw(st.integers(1, len(answers)))
    right = data.draw(st.sampled_from(["1", "4"]))
    correct = [answer == right for answer in answers]
    # 200 subsets of one kind: a standard deviation of at most 0.036; of all of them it is exact.
    sure = 1e-12 if k in (1, len(answers)) else 5 * 0.5 / np.sqrt(pass_rates.SUBSETS)
    assert majority_at(answers, correct, k) == pytest.approx(exact_majority(answers, correct, k), abs=sure)
    assert majority_at(answers, correct, k) == majority_at(answers, correct, k)


@pytest.mark.parametrize(("n", "k"), [(9, 2), (16, 8), (33, 32)])
def test_majority_at_k_of_the_subsets_counts_the_votes_of_each(n, k):
    answers = [[None, "1", "2", "3"][i] for i in np.random.default_rng(n).integers(0, 4, n)]
    rng = np.random.default_rng(k)
    subsets = [rng.permutation(n)[:k] for _ in range(pass_rates.SUBSETS)]
    expected = np.mean([winner([answers[i] for i in subset], {"2"}) for subset in subsets])
    assert majority_at(answers, [answer == "2" for answer in answers], k) == pytest.approx(expected, abs=1e-12)


def test_which_k_are_looked_at():
    assert subset_sizes(1) == [1] and subset_sizes(16) == [1, 2, 4, 8, 16] and subset_sizes(6) == [1, 2, 4, 6]


@pytest.mark.parametrize(("alpha", "beta"), [(2.0, 2.0), (0.3, 0.6), (8.0, 0.5)])
@pytest.mark.parametrize("prompts", [20, 200])
def test_an_interval_holds_the_mean_of_all_prompts_as_often_as_it_says(alpha, beta, prompts):
    """Prompts of every difficulty (a beta distribution), 8 completions of each."""
    rng = np.random.default_rng(0)
    truth, held = alpha / (alpha + beta), []
    for _ in range(1000):
        rates = rng.binomial(8, rng.beta(alpha, beta, prompts)) / 8
        low, high = interval(rates)
        assert 0 <= low <= rates.mean() <= high <= 1
        held.append(low <= truth <= high)
    assert 0.93 <= np.mean(held) <= 0.985


def test_an_interval_of_prompts_that_are_all_alike_is_open_on_one_side():
    low, high = interval([1.0] * 30)
    assert high == 1.0 and 0.83 < low < 0.92  # Wilson's for 30 of 30
    assert interval([0.5]) == (0.0, 1.0)


def group(index, scores, *, environment="", task="", lengths=(3, 5), cut=()):
    completions = []
    for i, length in enumerate(lengths):
        forced = ((1, 2),) if i == 1 else ()
        ids, logprobs = np.ones(length, np.int32), np.zeros(length, np.float32)
        reason = "length" if i in cut else "stop"
        completions.append(Completion(1, f"eval/0/{index}", i, ids, logprobs, ((0, 0, length),), forced, reason))
    row = Row("?", "1", index=index, environment=environment, task=task)
    return FinishedGroup(index, row, tuple(completions), tuple(scores), 0.0, 1.0)


def test_numbers_of_groups():
    right, wrong = Score(1.0, True, {"tests": 1.0}, answer="1"), Score(-1.0, False, {"tests": 0.5}, answer="2")
    groups = [group(0, [right, wrong], environment="a"), group(1, [right, right], environment="b", cut=(0,))]
    found = numbers(of_groups(groups))
    assert (found["pass_rate"], found["passes"], found["reward"]) == (0.75, [1, 2], 0.5)
    assert found["pass_at"]["1"][0] == pytest.approx(0.75) and found["pass_at"]["2"][0] == pytest.approx(1.0)
    assert found["majority_at"]["2"][0] == pytest.approx(0.75)  # of two different answers each is taken half the time
    assert (found["truncated"], found["interrupted"]) == (0.25, 0.5)
    assert (found["length_mean"], found["length_max"]) == (3.5, 4)  # without what was fed
    assert found["score/tests"] == 0.875
    assert list(by_part(of_groups(groups), "environment")) == ["a", "b"] and by_part(of_groups(groups), "task") == {}


def test_parts_without_a_name_overwrite_none():
    prompts = of_groups(
        [group(i, [Score(1.0, True)], task=task, lengths=(3,)) for i, task in enumerate(["", "other", "(none)"])]
    )
    assert {name: len(part) for name, part in by_part(prompts, "task").items()} == {"(none)": 2, "other": 1}


def test_without_answers_there_is_no_vote():
    assert numbers(of_groups([group(0, [Score(1.0, True), Score(-1.0, False)])]))["majority_at"] == {}


def test_the_parts_of_a_mixture():
    def of_part(task, environment, *scores):
        return group(0, scores, task=task, environment=environment)

    groups = [
        of_part("hard", "of hard", WRONG, RIGHT),
        of_part("", "", RIGHT, RIGHT),
        of_part("hard", "of hard", WRONG, WRONG),
    ]
    row = evaluation_row(of_groups(groups))
    assert row["tasks"] == {
        "hard": {"prompts": 2, "pass_rate": pytest.approx(0.25)},
        "(none)": {"prompts": 1, "pass_rate": pytest.approx(1.0)},
    }
    assert row["passes"] == [1, 2, 0] and row["pass_rate"] == pytest.approx(0.5)
    assert {name: part["passes"] for name, part in row["environments"].items()} == {"of hard": [1, 0], "(none)": [2]}
    row = evaluation_row(of_groups(groups[::2]))
    assert row["tasks"] == row["environments"] == {}
