"""Answers that mean the same are one vote, others are not; and what is said of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.environments.base import Row, Score
from scalerl_jax.environments.math import score

SAME = {
    "7": [["1/2", "0.5", r"\boxed{\frac12}", "The answer is 0.50.", "½"], ["5 cm", r"5\text{ cm}"], ["5"], ["50%"]],
    "B": [["A", "(A)", r"\boxed{\text{A}}", "The answer is A.", "(A) 12"], ["C", "**C**", "Option C"]],
    "Paris": [["London", "london.", r"\boxed{\text{London}}"], ["Rome"]],
    "101": [["101_2"], ["101_3"]],
    "x+1": [["x+2", "$x + 2$", r"\boxed{x+2}"], ["2x"]],
}  # fmt: skip


def scored(text: str, gold: str) -> Score:
    return score(Row("?", gold), text)


@pytest.mark.parametrize("gold", SAME)
def test_wrong_answers_vote_by_what_they_mean(gold):
    votes = [{scored(text, gold).answer for text in texts} for texts in SAME[gold]]
    assert all(len(found) == 1 for found in votes), votes
    assert len(set.union(*votes)) == len(votes)
    assert scored(gold, gold).answer not in set.union(*votes)


@pytest.mark.parametrize(
    ("gold", "texts"),
    [
        ("0.75", ["3/4", r"\boxed{\frac{6}{8}}", "75%"]),
        (r"\{1,2\}", ["2, 1", "x=1 or x=2", r"\left\{1,2\right\}"]),
        ("(x+1)^2", ["x^2+2x+1", "(1+x)^2"]),
        ("B", ["(B) 7", "b", "The answer is B"]),
    ],
)
def test_all_that_is_right_is_one_vote(gold, texts):
    found = [scored(text, gold) for text in texts]
    assert all(score.correct for score in found) and len({score.answer for score in found}) == 1


def test_no_answer_is_no_vote():
    assert scored(r"\boxed{7", "7").answer is None and scored("", "7").why == "gave no answer, wanted 7"


def test_what_is_said_is_short_and_one_line():
    assert scored("So 3/4.", "0.8").why == "said 3/4, wanted 0.8"
    assert scored(r"\boxed{2}", "2").why == "said 2"
    why = scored("a" * 10_000 + "\n" + "b" * 10_000, "c\nd" * 1000).why
    assert len(why) < 200 and "\n" not in why


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60), gold=st.text(min_size=1, max_size=20))
def test_a_wrong_answer_never_has_the_right_ones_vote(text, gold):
    found = scored(text, gold)
    if not found.correct and found.answer is not None:
        assert found.answer != scored(gold, gold).answer
