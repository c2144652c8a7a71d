"""Decontamination finds what is the same, in whole or thirteen words in a row, and nothing else."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.environments.data.decontamination import WORDS, EvaluationPrompts, words


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
    evaluations = EvaluationPrompts({"test": asked})
    for _ in range(10):
        source = rng.choice(asked).split()
        start = rng.randrange(len(source))
        piece = " ".join(source[start : start + rng.randrange(1, 30)])
        text = f"{sentence(rng, rng.randrange(5))} {piece} {sentence(rng, rng.randrange(5))}".strip()
        assert evaluations.has(text, "r") == (text in asked or any(overlap(text, other) for other in asked))


def test_a_short_prompt_is_the_same_only_with_its_signs():
    evaluations = EvaluationPrompts({"a": ["What is $2+3$?", "√"], "b": ["What is\n$2+3$? ", "Else?"]})
    assert evaluations.has("What  is $2+3$?", "FILE row 3")
    for other in ("What is $2-3$?", "what is 2 3", "∑∫", "", "What is $2+3$? Or $2-3$?"):
        assert not evaluations.has(other, "FILE row 4")
    assert evaluations.notes() == [
        f"training prompts left out since they are in {name}: 1 (1 the same, 0 by 13 words in a row), as FILE row 3"
        for name in ("a", "b")
    ]


def test_thirteen_words_in_a_row_are_found_however_they_are_written():
    evaluations = EvaluationPrompts({"a": ["If $\\frac{1}{2}$ of all the apples are red, how many of them are green?"]})
    assert evaluations.has("Say: if  \\frac 1 2 of ALL the apples are red; how many of them are yellow?", "FILE row 3")


def test_what_all_prompts_of_a_set_are_asked_with_tells_nothing():
    rng = random.Random(0)
    asked_with = sentence(rng, 30)
    tests = [f"{asked_with} {sentence(rng, 30)}" for _ in range(20)]
    evaluations = EvaluationPrompts({"test": tests})
    assert not evaluations.has(f"{asked_with} {sentence(rng, 30)}", "r")
    assert evaluations.has(f"{asked_with} {tests[7].split(' ', 30)[-1]} {sentence(rng, 2)}", "r")


# A problem, a passage of another prompt that is in it, and what many problems of that language have.
UNSPACED = {
    "Chinese": (
        "小明有一个装满红球和蓝球的盒子，他每次随机取出两个球，如果颜色相同就放回一个红球，否则放回一个蓝球。请问最后剩下蓝球的概率是多少？",
        "盒子，他每次随机取出两个球，如果颜色相同就放回一个红球，否则放回一个蓝球",
        "请解决下面的数学问题，并写出最终答案：最后的概率是多少？",
    ),
    "Japanese": (
        "太郎君は赤い玉と青い玉が入った箱を持っています。箱から二つの玉を同時に取り出し、色が同じならば赤い玉を一つ戻します。最後に青い玉が残る確率を求めなさい。",
        "箱から二つの玉を同時に取り出し、色が同じならば赤い玉を一つ戻します。最後に",
        "次の問題を解いて答えを書きなさい。残る確率を求めなさい。",
    ),
    "Thai": (
        "สมชายมีกล่องใบหนึ่งที่เต็มไปด้วยลูกบอลสีแดงและสีน้ำเงิน "
        "เขาหยิบลูกบอลออกมาครั้งละสองลูกโดยการสุ่ม ถ้าสีเหมือนกันจะใส่ลูกบอลสีแดงคืนหนึ่งลูก จงหาความน่าจะเป็น",
        "เขาหยิบลูกบอลออกมาครั้งละสองลูกโดยการสุ่ม ถ้าสีเหมือนกันจะใส่ลูกบอลสีแดงคืน",
        "จงแก้โจทย์ปัญหาต่อไปนี้ ลูกบอลสีแดงและสีน้ำเงิน จงหาความน่าจะเป็น",
    ),
}


@pytest.mark.parametrize("language", UNSPACED)
def test_scripts_without_spaces_are_counted_by_their_characters(language):
    problem, passage, phrase = UNSPACED[language]
    evaluations = EvaluationPrompts({"test": [problem]})
    assert passage in problem
    assert evaluations.has(f"1. {passage}!", "r")
    assert evaluations.has(" ".join(passage), "r")  # spaces there say nothing
    assert not evaluations.has(phrase, "r")
    for half in (passage[: len(passage) // 2], passage[len(passage) // 2 :]):
        assert not evaluations.has(f"{phrase} {half}", "r")


def test_a_row_of_words_may_be_of_several_scripts():
    assert len(words("设 f(x) = x^2，求 f(3)")) == 8
    tail = " ".join(f"w{n}" for n in range(11))
    evaluations = EvaluationPrompts({"test": [f"求解方程 {tail}"]})
    assert evaluations.has(f"如何求解方程 {tail}", "r")  # 4 / 2 + 11
    assert not evaluations.has(f"如何解方程 {tail}", "r")
    assert evaluations.has(f"Ｑ？求解方程 {tail.upper()}", "r")


def test_a_word_has_its_marks():
    """Of Indic scripts the vowel signs are marks, and of other texts the accents may be."""
    assert words("हिन्दी में गणित") == ("हिन्दी", "में", "गणित")
    assert words("re\u0301sume\u0301") == words("Résumé")
