"""Answers judged right and wrong: what a person would say of them, both ways."""

from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scalerl_jax.environments.answer_text import final_answers, is_mathematics
from scalerl_jax.environments.answers import right

# gold -> texts that give it
RIGHT = {
    # money
    r"\$5": [r"\$5", "5", "$5", r"\boxed{\$5}", r"The answer is $\$5$.", "It costs $5.", "5 dollars", r"\$5.00"],
    r"\$18.90": [r"\boxed{\$18.90}", "18.9", "$18.90", "18.90", r"$\$18.90$", r"The answer is \$18.90."],
    r"\$32,\!348": [r"\$32,\!348", "32348", "$32,348", r"\boxed{32{,}348}", r"32\,348"],
    r"-\$5": [r"\$-5", "-5", "-$5"],
    # numbers
    "5": ["+5", "5.0", "５", "x=5", "x = 5", r"5\text{ cm}", "5 apples", "answer: 5", "Answer: $5$", "5 cm", "**5**",
          r"\[ 5 \]", r"\(5\)", "The answer is 5. I hope it is correct.", "So we get 2 + 3 = 5.", "#### 5",
          "$$\n5\n$$"],
    "+5": ["5"],
    "5.0": ["5"],
    "-5": ["−5", "-5.", r"\boxed{-5}"],
    "1000": ["1,000", r"1\,000", "1 000", "1e3", r"10^3", r"1 \times 10^{3}"],
    "0.001": ["10^{-3}", r"\frac{1}{1000}", "1e-3"],
    "1e-07": ["0.0000001", r"1 \times 10^{-7}"],
    "1/2": ["0.5", r"\tfrac12", r"\frac{2}{4}", "$$\n\\frac{1}{2}\n$$", ".5", "½", r"\left(\frac{1}{2}\right)",
            r"The final answer is $\boxed{\frac{1}{2}}$. I hope it is correct."],
    r"\frac32": [r"1\frac12", "1.5", "1 1/2", r"1 \frac{1}{2}", "3/2"],
    r"-\frac{1}{2}": [r"\frac{-1}{2}", "-1/2", "-0.5"],
    r"\frac13": ["0.333333", "1/3"],
    r"50\%": ["50%", "0.5", "50", "1/2", "50 percent", r"50 \%"],
    "0.5": [r"50\%"],
    "50": [r"50\%"],
    r"90^\circ": ["90 degrees", "90°", r"90^{\circ}", "90", r"90\degree"],
    r"5\text{ cm}": ["5", "5 cm", r"5\,\mathrm{cm}", "5 centimeters", "5cm"],
    r"5\text{ cm}^2": [r"5\text{ cm}^{2}", "5"],
    # mathematics
    "x+1": ["x+1", "1+x", "x + 1", "$x+1$"],
    "(x+1)^2": ["x^2 + 2x + 1", "(x+1)**2", "$x^2 + 2x + 1$"],
    r"\sqrt{2}": [r"\sqrt{2}", "√2", r"\sqrt2", "sqrt(2)", r"\frac{2}{\sqrt{2}}"],
    r"\sqrt{18}": [r"3\sqrt{2}"],
    "(1,2)": ["(1,2)", "(1, 2)", r"\left(1,2\right)", r"\boxed{(1,2)}"],
    "[1,2]": ["[1, 2]", r"x \in [1,2]"],
    r"[2,\infty)": [r"$x \geq 2$", r"[2, \infty)"],
    r"(-\infty,3]": [r"(-\infty, 3]", r"\left(-\infty,3\right]"],
    r"\{1,2\}": [r"\{2,1\}", r"\left\{1, 2\right\}", "1, 2", "x=1 or x=2", r"\boxed{1} and \boxed{2}"],
    "1,2": ["2,1", "1 and 2", r"x = 1 \text{ or } x = 2"],
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": [r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"],
    r"\pi": ["π", "pi", r"$\pi$"],
    r"12\pi": ["12 pi", "12π", r"\pi \cdot 12"],
    r"\dfrac ab": ["a/b", r"\frac{a}{b}"],
    r"\sin x": ["sin(x)", r"\sin(x)"],
    "2x": ["x*2", r"2 \cdot x"],
    "2ab": ["2ba"],
    "101_2": ["101_{2}", "$101_2$", r"101_{\text{two}}", "x = 101_2", r"\boxed{5 = 101_2}"],
    "10_2, 11_2": ["11_{2}, 10_{2}"],
    "101": ["101_{10}", "101"],
    "2x_1": ["2x_{1}"],
    r"x \le 3": ["x ≤ 3", r"x\leq 3", r"3 \geq x"],
    "y=2x+1": ["y = 2x + 1", "2x+1"],
    "2+3i": ["3i+2"],
    "x=5": ["5", "x = 5.0"],
    "5 m": ["5", r"5\text{ m}", "5 meters"],
    r"\varnothing": [r"\emptyset", "∅"],
    "11:30": ["11:30"],
    # letters alone
    "e^x": [r"\boxed{e^{x}}"],
    "ab+c": ["c+ab", "ab + c"],
    "x_n": [r"\boxed{x_{n}}"],
    "ab/c": [r"\frac{ab}{c}"],
    "ac-bd": ["-bd+ac"],
    "F=ma": ["F = ma"],
    "well-known": ["well known", "- well-known"],
    # what multiplies a number, and units that are not known
    "5 million": ["5000000", "5,000,000", r"5 \text{ million}", "5 million people"],
    r"\$5 million": ["$5000000", "5 million dollars"],
    "24": ["2 dozen", "2 dozen eggs"],
    "5 apples": ["5 apple", "5"],
    "5 square feet": ["5 ft^2", "5 square foot"],
    "10 PM": ["10 p.m.", "10"],
    r"20^\circ\text{C}": ["20 degrees Celsius", "20 degrees", "20"],
    # words and choices
    "A": ["A", "(A)", "A.", r"\text{A}", r"\textbf{(A)}", "a", "The answer is A", "The answer is (A).", "**A**", "[A]",
          "The answer is (A) 12", "Option A", r"\boxed{A}", r"\boxed{\text{(A)}}", "The answer is **A**.",
          "It cannot be B.\nA", "A) a square", "The correct option is A."],
    r"\text{(B)}": ["B"],
    "Paris": ["Paris", "paris.", r"\boxed{Paris}", r"\boxed{\text{Paris}}", "The answer is Paris.", "**Paris**",
              '"Paris"', "It is the capital.\n\nParis"],
    "no solution": ["no solution", "No solution.", r"\text{no solution}", r"\boxed{\text{No solution}}"],
    "May 5": ["May 5", r"\text{May } 5", "may 5."],
    "Route 66": ["route 66"],
    "C++": ["C++", r"\boxed{C++}"],
    "A+": ["A+"],
    "O'Neil": ["O’Neil", "o'neil"],
    "U.S.A.": ["USA"],
    "the Moon": ["Moon", "The moon."],
    "yes": ["Yes.", r"\text{Yes}"],
    "Москва": ["москва"],
    "x": ["x", "$x$"],
    "ab": ["ab"],
}  # fmt: skip
RIGHT_IN_A_SENTENCE = {
    "B": ["I choose B", "I choose (B).", "I would pick B", "So B.", "It's B", "Therefore, B", "The correct letter is B",
          "B is correct.", "B is the answer", "B, because it fits", "The answer is B, not A",
          "(B) is the correct choice.", "A. 5\nB. 6\nB", "A. 5\nB. 6\nSo B.", "A. 5\nB. 6\nThe answer is B",
          "The answer is B. A is wrong."],
    "A, B": [r"\boxed{B, A}", "B and A", "(A), (B)"],
    "Paris": ["The capital is Paris.", "Therefore, the capital is Paris", "<answer>Paris</answer>",
              "Paris, because it is large", "France is a country, and its capital is Paris."],
    "no solution": ["There is no solution."],
    "yes": ["Yes, because 3 > 2.", "<answer>yes</answer>"],
    "5": ["<answer>5</answer>", "`5`", "```\n5\n```", "```text\n5\n```", "5,", "5;", "= 5", "The answer is 5, not 8.",
          "The answer is 5 because 2 + 3 = 5.", "Therefore, 5", "There are 5 apples.", "so x = 5"],
    "3": [r"\boxed{\approx 3}"],
    "y=5": ["so y = 5"],
}  # fmt: skip
WRONG_IN_A_SENTENCE = {
    "5": ["It cannot be 5.", "It can't be 5", "The answer is never 5", "The answer is at most 5", "at most 5",
          "greater than 5", "The answer is one of 3, 4, 5", "none of 3, 4, 5", "The answer is none of 3, 4, 5",
          "such as 1, 2, 3, 4, 5", "I doubt that the answer is 5", "It is impossible that it is 5", "3, 4 and 5",
          "The numbers are 3, 4, 5", "So 3, 4, 5", "The wrong answer is 5", "It is between 3 and 5", "5 is wrong",
          "The answer is 6, not 5", "6, because 5 is odd", "Is it 5?", "<answer>6</answer> 5"],
    "2": ["The answer is between 1 and 2", "7 pets in 2 houses", "The answer is 7 pets in 2 houses"],
    "y=5": ["so x = 5", "We find that x = 5"],
    "B": ["A. 5\nB. 6", "(A) 5\n(B) 6", "Choices:\nA. 5\nB. 6", "a) 5\nb) 6", "The options are A. 5 B. 6",
          "I would not choose B", "I doubt B is correct", "B is not correct", "It's A or B", "So A, B", "B is wrong",
          "Is it B?", "The wrong answer is B", "The answer is A, not B", "A is correct, not B", "I choose A, B, C",
          "C\nA\nB", "A) 5 B) 6"],
    "A": ["A. 5\nB. 6", "Choices:\nA. 5\nB. 6", "The options are A. 5 B. 6", "The answer is\nA\nB\nC",
          "It is either A or B"],
    "A, B": ["A", "A, C", "A, B, C", "A or B"],
    "Paris": ["The capital is not Paris", "The capital isn't Paris", "The capital is Paris or London",
              "I doubt that the capital is Paris", "If it is Paris", "<answer>London</answer> Paris"],
    "true": ["It is false that it is true", "It is not true"],
    "no solution": ["There is a solution."],
}  # fmt: skip
# gold -> texts that do not
WRONG = {
    r"\$5": ["€5", r"\$6", "5 euros", r"\$50"],
    "5": ["7", "-5", "5i", "5.0000001", "5 or 6", "5 and 6", "Either 5 or 6", "The answer is not 5", "", r"\boxed{}",
          "no solution", r"\boxed{5}, no, \boxed{6}", r"\boxed{5", "55", "5x", "five",
          "5 million", "5 thirds", "5 thousand", "$5k", "5 dozen", "5 halves", "5 squared",
          "It is 5 thirds", "It has 5 million", r"5\text{ factorial}"],
    "4": ["3 or 4", "The answer is 3 or 4", "The answer is 4 or 3", "4, 3"],
    "12": ["1 2", "1,2"],
    "2": ["1,2", "2c"],
    "1000": ["1000,2000", "100", "1,00"],
    "0": ["0.0000001", "10^{100}", r"3\times10^{-8}"],
    "1": ["1.000001", "1+x"],
    "0.0000001": ["0"],
    "0.5": ["50", r"0.5\%", "½%"],
    r"\frac13": ["0.33", "0.3333", "3"],
    r"50\%": ["5", "0.05", "5000"],
    r"5\text{ cm}": [r"5\text{ m}", "5 kg", r"5\text{ cm}^2"],
    "ac+bd": ["ac-bd", "ac bd"],
    "ac-bd": ["ac+bd"],
    "ac bd": ["ac-bd"],
    "ax+by=c": ["ax-by=c"],
    "ab": ["-ab", "- ab", "ba", "a"],
    "-ab": ["ab"],
    "F=ma": ["F/ma", "F+ma"],
    "xy>z": ["xy<z"],
    "e^{x}": ["e^{-x}", "e^{y}"],
    "x^{n}": ["x^{-n}"],
    "(a)+(b)": ["(a)-(b)"],
    "a_{n}+b_{n}": ["a_{n}-b_{n}"],
    "(x)/(y)": ["(x)(y)"],
    "(x)(y)": ["(x)/(y)", "(x)-(y)"],
    "one+two": ["one=two", "one two"],
    "5 million": ["5", "5 billion", "The number is 5"],
    "5 apples": ["5 oranges"],
    "10 PM": ["10 AM"],
    "10 north": ["10 south"],
    "5 square feet": ["5 ft"],
    r"20^\circ\text{C}": ["20 degrees Fahrenheit"],
    "(1,2)": ["(2,1)", "1"],
    "[1,2]": ["[1,2)", "(1,2)", "[1,3]"],
    "11:30": ["12:30", "11"],
    "1:2": ["2:1"],
    "x>3": ["x<3", "3", "x"],
    "x=5": ["y=5", "x=6"],
    "7": ["It isn't 7", "7m", "m=8"],
    "x+1": ["x", "no solution", "1", "x+2"],
    "2ab": ["2", "2a"],
    "101_2": ["101", "101_3", r"101_{16}", "11_2"],
    "101": ["101_2", "101_{2}", "The number is 101_2.", r"101_{\text{two}}"],
    "2c": ["2"],
    "x+3t": ["x+3"],
    "A": ["B", "A or B", "B or A", "The answer is A or B", "(A) or (B)", r"\boxed{A} or \boxed{B}",
          "not A", "A+", "A-", "(A)(B)", "A/B", "A and B", "The answer is A. Or B.", "AA", "",
          r"\boxed{B}. Not A.",
          "Neither A nor B", "A B C D", "A, B, C, D", "x", "1", "-A"],
    "B": ["(A) B", "A: B", "The answer is A or B."],
    "Paris": ["sirap", r"\boxed{sirap}", "pairs", "London", "no Paris", "London, Paris", "Paris or London", "P",
              r"\boxed{iPars}", "par is"],
    "no solution": ["5", "solution", "one solution", "no"],
    "May 5": ["June 5", "5", "May"],
    "Route 66": ["Route 67", "66"],
    "C++": ["C", "C+"],
    "A+": ["A", "A-"],
    "A-": ["A", "A+"],
    "yes": ["yes or no", "no", "yes, no"],
    "x": ["x+1", "y", "2x"],
}  # fmt: skip
# No two of them are the same answer.
DIFFERENT = (
    *(r"\$5", r"\$18.90", "7", "-7", "0.25", r"\frac{1}{3}", "1,234,567", r"30\%", "x+1", "x-1", "2x", r"\sqrt{2}"),
    *(r"\sqrt{3}", "(1,2)", "(2,1)", "[1,2]", r"\{3,4\}", r"\pi", r"\frac{a}{b}", r"\frac{b}{a}", "x^2+y^2", "2+3i"),
    *(r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", r"(-\infty,3]", "A", "B", "E", "Paris"),
    *("pairs", "no solution", "one solution", "true", "false", "May 5", "May 6", "blue", "red", r"\text{Tuesday}", "x"),
    *("well-known", "New York", "York", "C++", r"x \in [5,6]", r"17^\circ", r"12\text{ cm}", "10:30"),
)
WRITTEN = ("{}", r"\boxed{{{}}}", "${}$", r"\({}\)", r"\[{}\]", "The answer is {}", "The answer is ${}$.", "{}.",
           "So I think.\n\nThe final answer is: $\\boxed{{{}}}$", " {} \n", "Answer: {}", "It is clear.\n{}",
           "Well, 3 + 4 = 7, so\n\n\\boxed{{{}}}.")  # fmt: skip


def cases(table):
    return [(text, gold) for gold, texts in table.items() for text in texts]


@pytest.mark.parametrize(("text", "gold"), cases(RIGHT) + cases(RIGHT_IN_A_SENTENCE))
def test_right(text, gold):
    assert right(text, gold)


@pytest.mark.parametrize(("text", "gold"), cases(WRONG) + cases(WRONG_IN_A_SENTENCE))
def test_wrong(text, gold):
    assert not right(text, gold)


@pytest.mark.parametrize("gold", DIFFERENT)
def test_whatever_is_right_is_right_however_it_is_written_and_nothing_else_is(gold):
    for written in WRITTEN:
        assert right(written.format(gold), gold), written
        # A box or dollar signs around the gold are no part of it.
        assert right(written.format(gold), f"\\boxed{{{gold}}}") and right(written.format(gold), f"${gold}$"), written


@settings(max_examples=150, deadline=None)
@given(gold=st.sampled_from(DIFFERENT), text=st.sampled_from(DIFFERENT), written=st.sampled_from(WRITTEN))
def test_another_answer_is_wrong_however_it_is_written(gold, text, written):
    assert right(written.format(text), gold) == (text == gold)


@settings(max_examples=100, deadline=None)
@given(word=st.text(st.characters(categories=["L"]), min_size=2, max_size=12), written=st.sampled_from(WRITTEN[:5]))
def test_a_word_is_itself_and_no_product_of_its_letters(word, written):
    if is_mathematics(word):  # pi
        return
    assert right(written.format(word), word)
    if word[::-1].casefold() != word.casefold():
        assert not right(written.format(word[::-1]), word) or word.casefold()[::-1] == word[::-1].casefold() == word


@settings(max_examples=200, deadline=None)
@given(number=st.integers(-(10**9), 10**9), other=st.integers(-(10**9), 10**9), written=st.sampled_from(WRITTEN))
def test_numbers(number, other, written):
    assert right(written.format(f"{number:,}"), str(number)) and right(written.format(number), f"{number:,}")
    assert right(written.format(other), str(number)) == (other == number)


@settings(max_examples=60, deadline=None)
@given(up=st.integers(1, 400), down=st.integers(2, 40), other=st.integers(1, 400), minus=st.sampled_from(("", "-")))
@example(up=11, down=2, other=12, minus="")  # not 1 1/2
@example(up=13, down=4, other=7, minus="")  # not 1 3/4
def test_a_fraction_is_its_numerator_by_its_denominator_and_no_other(up, down, other, minus):
    value, decimals = Fraction(up, down), f"{minus}{up / down:.9f}"
    for text in (
        f"{minus}{up}/{down}",
        f"\\boxed{{{minus}\\frac{{{up}}}{{{down}}}}}",
        f"{minus}{up} / {down}",
        decimals,
    ):
        for gold in (f"{minus}{value.numerator}/{value.denominator}", f"{minus}\\frac{{{up}}}{{{down}}}"):
            assert right(text, gold)
        assert right(text, f"{minus}{other}/{down}") == (other == up)
    whole, rest = divmod(up, down)
    if whole and rest:
        assert right(f"{minus}{whole} {rest}/{down}", f"{minus}{up}/{down}")
        assert right(f"{minus}{whole}\\frac{{{rest}}}{{{down}}}", f"{minus}{up}/{down}")
        assert not right(f"{whole}{rest}/{down}", f"{up}/{down}")


PIECES = (
    "\\frac", "\\sqrt", "{", "}", "{", "}", "1", "2", "x", "+", "-", "^", "_", "\\text", "\\boxed", "$", "\\$", "(",
    ")", " ", "=", ",", "\\left", "\\right", "[", "]", "or", "answer is ", "A", "\\", "\\\\", "\\begin{pmatrix}", "&",
    "%", "\\end{pmatrix}", "\x00", "\ud83d", "½", "²", "𝔸", "\n", ".", "Paris", "\\int", "\\sum", "\\infty", "|", "!",
    "'",
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=25), gold=st.sampled_from(DIFFERENT))
def test_any_text_has_a_final_answer_or_none(pieces, gold):
    """The text side alone, which no limit should have to end."""
    for text in final_answers("".join(pieces)):
        assert text.strip()
        is_mathematics(text)


@pytest.mark.parametrize(
    "text",
    ["\\boxed{" * 15_000, "{" * 100_000, "}" * 100_000, "$" * 100_000, "\\text{" * 16_000, "answer is " * 10_000,
     "1," * 50_000, "\\frac" * 20_000, "(," * 50_000, "\\" * 100_000, " " * 100_000 + "x", "5" * 100_000, "**" * 50_000,
     "\\boxed{" * 9_000 + "1" + "}" * 9_000, "$1 " * 30_000, "1 " * 50_000, "a." * 50_000, "\n" * 99_999 + "7"],
    ids=lambda text: text[:9] + "...",
)  # fmt: skip
@pytest.mark.timeout(120)
def test_long_texts_are_read_in_linear_time(text):
    right(text, "Paris")
