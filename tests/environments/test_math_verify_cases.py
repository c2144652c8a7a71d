"""math-verify's own published cases: ours says of each what the library does when it is called directly.

math_verify_cases.jsonl holds the short ones of release 0.9.0 as facts: a right answer, what is said, and whether the
two are published as the same. Where ours differs it is stricter, on purpose; DIFFERENT says why.
"""

import json
import pathlib

import pytest
from math_verify import parse, verify

from scalerl_jax.environments.answers import right

CASES = [
    json.loads(line)
    for line in (pathlib.Path(__file__).parent / "math_verify_cases.jsonl").read_text(encoding="utf-8").splitlines()
]
DIFFERENT = {
    "a comma before decimals: it parts a list or thousands": [
        ("1000.99", "1000,99"),
        ("1,22", "1.22"),
        ("0,111", "0.111"),
    ],
    "a sentence with two numbers, of which the library takes the last": [
        ("1000.99", "the number is not 10 which is 1,000.99€"),
        ("1000.99", "so the number is 10 which is 1,000.99m²"),
        ("1000.99", "not it's not 10 it's 1,000.99m²"),
    ],
    "a matrix inside a sentence, neither boxed nor alone": [
        ("$\\begin{bmatrix}0 & 0 \\\\0 & 0\\end{bmatrix}$",
         "Here is a zero matrix: $ \\begin{pmatrix}0 & 0 \\\\0 & 0\\end{pmatrix} $"),
        ("$\\begin{pmatrix}1 & 2 \\\\3 & 4\\end{pmatrix}$",
         "Special matrix: $ \\left[\\begin{array}{cc}1 & 2 \\\\3 & 4\\end{array}\\right] $"),
    ],
    "a right answer that is not one formula: two boxes apart, a name before it, words in it": [
        ("$\\\\boxed{35 cm} ++++++ \\\\boxed{4}$", "${35 cm,4}$"),
        ("$S_{MBCN}:S=7:32$", "$\\boxed{7:32}$"),
        ("$\\frac{NO}{BO}=\\frac{1}{\\sqrt{6}}$", "$\\frac{1}{\\sqrt{6}}$"),
        ("\\\\boxed{W(n) = 1 \\\\text{ and } W(n) = -1", "W(x)=1orW(x)=-1"),
        ("$$(3, 3), (1, 1)$$", "$$\\boxed{(3, 3)} \\text{ for part (a) and } \\boxed{(1, 1)}$$"),
        ("$y_{1}=-2 x^{2}+4 x+3, y_{2}=3 x^{2}+12 x+10$",
         "\\($y_1 = \\boxed{-2(x - 1)^2 + 5} \\) and \\( y_2 = \\boxed{3(x + 2)^2 - 2} \\) "),
        ("\\boxed{1} papers and \\boxed{2} bins", "$\\boxed{1,2}$"),
        ("$19, 46, and 82$", "$19, 46, \\text{ and } 82$"),
    ],
    "another number, where the library drops what follows the first term": [
        ("$1 - \\frac{1}{\\mathrm{e}}$", "$1 + \\frac{1}{\\mathrm{e}}$"),
    ],
}  # fmt: skip
ON_PURPOSE = {pair for pairs in DIFFERENT.values() for pair in pairs}


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_ours_agrees_with_the_library_called_directly(case):
    gold, answer = case["gold"], case["answer"]
    gold_parsed, answer_parsed = parse(gold, parsing_timeout=None), parse(answer, parsing_timeout=None)
    library = bool(verify(gold_parsed, answer_parsed, timeout_seconds=None))
    if (gold, answer) in ON_PURPOSE:
        assert library and not right(answer, gold), "it differs no more: take it out of DIFFERENT"
    else:
        assert right(answer, gold) == library


def test_what_differs_is_among_the_cases():
    assert {(case["gold"], case["answer"]) for case in CASES} >= ON_PURPOSE
    assert len(CASES) > 150 and len(ON_PURPOSE) <= len(CASES) // 10
