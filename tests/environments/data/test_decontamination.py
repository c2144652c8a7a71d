"""Decontamination finds what is the same, in whole or thirteen words in a row, and nothing else."""

import random

from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.environments.data.decontamination import WORDS, Evaluations


def sentence(rng, count):
    return " ".join(f"w{rng.randrange(10**6)}" for _ in range(count))


def overlap(one, other):
    """The slow reference: whether two texts share WORDS words in a row."""
    one, other = f" {one} ", f" {other} "
    words = one.split()
    return any(f" {' '.join(words[n : n + WORDS])} " in other for n in range(len(words) - WORDS + 1))


@given(st.randoms(use_true_random=False))
def test_what_shares_thirteen_words_in_a_row_is_found_and_nothing_else(rng):
    asked = [sentence(rng, rng.randrange(1, 40)) for _ in range(6)]
    evaluations = Evaluations({"test": asked})
    for _ in range(10):
        source = rng.choice(asked).split()
        start = rng.randrange(len(source))
        piece = " ".join(source[start : start + rng.randrange(1, 30)])
        text = f"{sentence(rng, rng.randrange(5))} {piece} {sentence(rng, rng.randrange(5))}".strip()
        assert evaluations.has(text, "r") == (text in asked or any(overlap(text, other) for other in asked))


def test_a_short_prompt_is_the_same_only_with_its_signs():
    evaluations = Evaluations({"a": ["What is $2+3$?", "√"], "b": ["What is\n$2+3$? ", "Else?"]})
    assert evaluations.has("What  is $2+3$?", "FILE row 3")
    for other in ("What is $2-3$?", "what is 2 3", "∑∫", "", "What is $2+3$? Or $2-3$?"):
        assert not evaluations.has(other, "FILE row 4")
    assert evaluations.said() == [
        f"training prompts left out since they are in {name}: 1 (1 the same, 0 by 13 words in a row), as FILE row 3"
        for name in ("a", "b")
    ]


def test_thirteen_words_in_a_row_are_found_however_they_are_written():
    evaluations = Evaluations({"a": ["If $\\frac{1}{2}$ of all the apples are red, how many of them are green?"]})
    assert evaluations.has("Say: if  \\frac 1 2 of ALL the apples are red; how many of them are yellow?", "FILE row 3")


def test_what_all_prompts_of_a_set_are_asked_with_tells_nothing():
    rng = random.Random(0)
    asked_with = sentence(rng, 30)
    tests = [f"{asked_with} {sentence(rng, 30)}" for _ in range(20)]
    evaluations = Evaluations({"test": tests})
    assert not evaluations.has(f"{asked_with} {sentence(rng, 30)}", "r")
    assert evaluations.has(f"{asked_with} {tests[7].split(' ', 30)[-1]} {sentence(rng, 2)}", "r")
