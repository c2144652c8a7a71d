"""Golds and answers whose verdict is known: what math-verify takes for equal and is not, and what it does not find."""

import pytest

from scalerl_jax.environments.answers import right

RIGHT = [
    (r"\int_0^1 x dx", r"\frac{1}{2}"), (r"\frac{d}{dx} x^2", r"2x"),
    (r"1,2,2", r"2,1,2"), (r"\{1,2\}", r"1,2"), (r"\{1,2\}", r"\{2,1\}"), (r"(1,2)", r"(1,2)"),
    (r"192.168.0.1", r"192.168.0.1"), (r"CO2", r"CO_2"), ("CO2", "CO₂"), (r"6:1", r"6 : 1"), (r"H2O", r"H_2O"),
    (r"3+4i", r"3+4\mathrm{i}"), (r"25\pi", r"25\pi\text{ cm}^2"), (r"\frac{14}{3}", r"4.666667"),
    (r"\frac{14.0}{3}", r"14/3"), (r"10101", r"010101"), (r"7", r"7 apples"), (r"7", r"\text{7 apples}"),
    (r"x=5", r"5"), (r"5", r"x=5"), (r"y=2x+1", r"2x+1"), (r"2x+1", r"1+2x"), (r"\sqrt{2}/2", r"\frac{1}{\sqrt2}"),
    (r"\ln 8", r"3\ln 2"), (r"\frac{1}{3}", r"0.333333"), (r"\sin^2 x+\cos^2 x", r"1"), (r"e^{2\pi i}", r"1"),
    (r"2+3i", r"3i+2"), (r"\frac{1}{1+i}", r"\frac{1-i}{2}"), (r"[0,1)\cup(2,3]", r"0\le x<1 \text{ or } 2<x\le3"),
    (r"x>2", r"\{x\in\mathbb{R}: x>2\}"), (r"\pm 2", r"2,-2"), (r"2 \text{ or } -2", r"-2,2"),
    (r"300\text{ K}", r"300"), (r"9.8\,\mathrm{N}", r"9.8"), (r"5\text{ m}", r"5"), (r"0.\overline{142857}", r"1/7"),
    (r"\binom{10}{3}", r"120"), (r"AC", r"A, C"), (r"A, C", r"AC"), (r"BAD", r"A,B,D"), (r"2^{10}", r"1024"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"), (r"x^2+y^2=1", r"x^2+y^2-1=0"),
    (r"x^2+y^2=1", r"2x^2+2y^2=2"), (r"x=2,y=3", r"y=3,x=2"), (r"x<2", r"-x>-2"), (r"a^2-b^2", r"(a-b)(a+b)"),
    (r"\sqrt[3]{2}", r"2^{1/3}"), (r"\log_2 8", r"3"), (r"\log_{2}8", r"3"), (r"\sin^{2}30^\circ", r"0.25"),
    (r"\cos 60^\circ", r"0.5"), (r"45^\circ", r"45"), (r"\$5", r"5 dollars"), (r"\$5", r"500 cents"),
    (r"50\%", r"0.5"), (r"\frac{7}{2}", r"3 1/2"), (r"\frac{7}{2}", r"3.5"), (r"f(x)=x^2", r"x^2"), (r"f(2)=3", r"3"),
    ("f'(x)=2x", "2x"), ("y′=2x", "y'=2x"), ("* B", "B"),
    (r"\frac{n(n-1)}{2}", r"\binom{n}{2}"), (r"10:30", r"10:30"), (r"3.0\times10^8", r"3\cdot10^8"),
    (r"2x", r"2\mathrm{x}"), (r"\mathrm{e}", r"e"), (r"x^{2}3", r"3x^2"), (r"(-1)^n", r"(-1)^{n+2}"),
    (r"\infty", r"\infty"), (r"\emptyset", r"\{\}"), (r"\frac{1}{\sqrt{n}}", r"\sqrt{1/n}"),
    (r"\frac{7!}{(3!)^{2}2!}", r"\frac{7!}{(3!)^{2}\cdot 2!}"), (r"14 - i", r"14 - 1i"), (r"7", r"\color{blue}{7}"),
    (r"7", r"\textcolor{red}{7}"), (r"(2x+3)\text{ cm}", r"2x+3"), (r"2\sqrt{5}\text{ units}", r"2\sqrt5"),
    (r"\begin{cases}x=1\\y=2\end{cases}", r"(1,2)"), (r"(1,2)", r"\begin{cases}y=2\\x=1\end{cases}"),
    (r"\begin{cases}x=1\\y=2\end{cases}", r"y=2, x=1"), (r"x=\frac{1}{2}, y=3", r"\left(\frac12, 3\right)"),
]  # fmt: skip
WRONG = [
    (r"1,1,2", r"1,2,2"), (r"(1,2)", r"\{1,2\}"), (r"192.168.0.1", r"10.0.0.1"), (r"2020-01-05", r"2014"),
    (r"555-1234", r"-679"), (r"3-2", r"1"), (r"0x1F", r"0"), (r"CO2", r"C2O"), (r"6:1", r"6"), (r"12", r"12\text{k}"),
    (r"5", r"5\mathrm{e}"), (r"2", r"2\mathrm{e}^{3}"), (r"25\pi\text{ cm}", r"25\pi\text{ m}"),
    (r"7", r"\text{8 apples}"), (r"x^2=4", r"4"), (r"y=2x+1", r"y=2x+2"), (r"\sqrt{x^2}", r"x"), (r"|x|", r"x"),
    (r"\frac{1}{3}", r"0.333"), (r"i", r"-i"), (r"[0,1)\cup(2,3]", r"0\le x\le1 \text{ or } 2<x\le3"),
    (r"x>2", r"\{x: x\ge2\}"), (r"2 \text{ or } -2", r"2"), (r"5\text{ m}", r"5\text{ cm}"),
    (r"0.1\overline{6}", r"0.16"), (r"n\equiv 1 \pmod 4", r"n\equiv 3 \pmod{4}"),
    (r"x \equiv 2 \pmod{7}", r"2 \pmod 7"), (r"{10 \choose 3}", r"210"), (r"AC", r"A"),
    (r"\lim_{x\to0} f(x)=2", r"3"), (r"\text{Area}=10", r"11"), (r"10^{100}", r"10^{99}"),
    (r"10^{100}+1", r"10^{100}"), (r"\frac{1}{10^{100}}", r"0"), (r"0", r"\frac{1}{10^{100}}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"), (r"x^2+y^2=1", r"x^2+y^2=2"),
    (r"x=2,y=3", r"x=3,y=2"), (r"x<2", r"x>2"), (r"x\le 2", r"x<2"), (r"\frac{x}{2^{99}}", r"\frac{x}{2^{98}}"),
    (r"\$5", r"5 cents"), (r"C(n,2)", r"\frac{n(n-1)}{2}"), (r"k\pi", r"n\pi"), (r"\pi", r"3.14159"),
    (r"\frac{30!}{15!15!}", r"\frac{30!}{14!16!}"), (r"\frac1{2^{99}}", r"\frac1{2^{98}}"),
    (r"\frac{dy}{dx}=2x", r"\frac{dy}{dx}=3x"), (r"f(2)=3", r"f(2)=4"), (r"x^2=-1", r"x^2=-4"),
    (r"|x|=-1", r"|x|=-2"), (r"f(0)=1,f(1)=2", r"f(0)=3,f(1)=4"), (r"\sqrt{10^{40}+1}", r"10^{20}"),
    (r"e^{-50}", r"e^{-49}"), (r"\begin{cases}x=1\\y=2\end{cases}", r"(2,1)"), (r"x=1,y=2", r"(2,1)"),
    (r"(1,2)", r"x=2, y=1"), (r"\begin{cases}x&x>0\\-x&x<0\end{cases}", r"(x,-x)"),
]  # fmt: skip
# Whichever of the two is the gold.
SAME = [
    (r"\{(1,2),(2,1)\}", r"(1,2),(2,1)"), (r"\{(1,2),(2,1)\}", r"(2,1) \text{ and } (1,2)"), (r"1<x<3", r"(1,3)"),
    (r"x\in(1,3)", r"1<x<3"), (r"(1,3)", r"1,3"), (r"(x,y)=(1,3)", r"1,3"), (r"(1,3)", r"x=1, y=3"),
    (r"x=1 \text{ or } x=3", r"1,3"), (r"(1,\infty)", r"1<x\le 2 \text{ or } x>2"), (r"(2,\infty)", r"\{x \mid x>2\}"),
    ("2¹⁰", "1024"), ("2¹⁰", "2^{10}"), ("2⁻³", "1/8"), ("10⁺²", "100"), ("2ⁿ", "2^n"), ("x⁽ⁿ⁺¹⁾", "x^{n+1}"),
    ("x₁₂", "x_{12}"), ("101₂", "101_2"), ("⌊x⌋", r"\lfloor x \rfloor"), ("p∨q", "p ∨ q"),
    ("Paris", "→ Paris ✓"), ("B", "■ B."), ("yes", "Yes!"), ("Lego", "Lego®"), ("the letter x", "the letter 'x'"),
]  # fmt: skip
DIFFERENT = [
    (r"\{(1,2),(3,4)\}", r"(1,2),(3,5)"), (r"\{1,2\}", r"(1,2)"), (r"1<x<3", r"1,3"), (r"1<x<3", r"\{1,3\}"),
    (r"1<x<3", r"x=1 \text{ or } x=3"), (r"1<x<3", r"x=1, y=3"), (r"x\in(1,3)", r"1,3"), (r"(1,3)", r"x=1, x=3"),
    (r"(1,3)", r"x=1 \text{ or } x=3"), (r"(1,3)", r"1 \text{ or } 3"), (r"1\le x\le3", r"1,3"),
    ("2¹⁰", "1"), ("2⁻³", "8"), ("2ⁿ", "2"), ("x₁", "x_2"), ("x₁", "x"), ("n", "n!"), ("x", "x'"), ("x", "⌊x⌋"),
    ("⌊x⌋", "⌈x⌉"), ("p", "¬p"), ("p∨q", "p∧q"), ("p→q", "p q"), ("ABC", "△ABC"), ("x", "‖x‖"), ("p'", "p''"),
    ("y'=2x", "y=2x"), ("y''=y", "y'=y"), ("x'+1", "x+1"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), RIGHT + SAME + [(b, a) for a, b in SAME])
def test_right(gold: str, answer: str) -> None:
    assert right(f"\\boxed{{{answer}}}", gold)


@pytest.mark.parametrize(("gold", "answer"), WRONG + DIFFERENT + [(b, a) for a, b in DIFFERENT])
def test_wrong(gold: str, answer: str) -> None:
    assert not right(f"\\boxed{{{answer}}}", gold)
