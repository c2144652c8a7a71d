"""Which outputs and values count as the wanted ones."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.environments.code_judge import differing_line, same_value


@pytest.mark.parametrize(
    ("wanted", "printed", "same"),
    [
        ("42", "42", True),
        ("42\n", "42", True),
        ("42", "\n 42 \r\n\n", True),
        ("a b\nc", "a b  \n c\n", True),
        ("a b", "a  b", True),
        ("a\n\nb", "a\nb", False),
        ("a\nb", "a b", False),
        ("YES", "Yes", False),
        ("", "", True),
        ("", "x", False),
        ("x", "", False),
        ("1", "1.0", True),
        ("1", "01", True),
        ("010101", "10101", False),
        ("010101", "010101", True),
        ("0", "0.0", True),
        ("0.5", ".5", True),
        ("1", "1.0000001", False),
        ("100000000000000001", "100000000000000000", False),
        ("0.333333333", "0.3333334", True),
        ("0.333333333", "0.33334", False),
        ("1e9", "1000000001", True),
        ("1000000000.5", "1000000000.6", True),
        ("0.5", "1/2", False),
        ("0.5", "nan", False),
        ("nan", "nan", True),
        ("1.0", "inf", False),
        ("1e400", "1e500", True),  # both more than any float
        ("1.5 x 2", "1.5000001 x 2", True),
        ("1.5 x 2", "1.5 y 2", False),
        ("1 2 3", "1 2", False),
        ("1", "١", False),  # a digit, not in ASCII
        ("9" * 2000, "9" * 2000, True),
        ("9" * 2000, "9" * 1999 + "8", False),
        ("1" + "0" * 1100, "1" + "0" * 1100 + ".0", False),
    ],
)
def test_outputs(wanted, printed, same):
    assert (differing_line(wanted, printed) is None) == same


def test_the_line_that_differs():
    assert differing_line("1\n2\n3", "1\n5\n3") == ("2", "5")
    assert differing_line("1\n2", "1") == ("2", "")
    assert differing_line("1", "1\n2") == ("", "2")


@given(st.lists(st.lists(st.one_of(st.integers(), st.text("ab.-1e"), st.floats()))), st.sampled_from(["\n", "\r\n"]))
def test_an_output_equals_itself_however_its_lines_end(lines, end):
    text = "\n".join(" ".join(map(str, line)) for line in lines)
    assert differing_line(text, text) is None
    assert differing_line(text, text.replace("\n", end) + end) is None


@pytest.mark.parametrize(
    ("wanted", "value", "same"),
    [
        (3, 3, True),
        (3, 3.0, True),
        (3, 3.1, False),
        (3, "3", False),
        (5, 5.000001, False),
        (10**9, 10**9 + 999.0, False),
        ([10**17], [1e17], True),
        (5.0, 5.000001, True),
        (5.0, 5, True),
        (1.5, 10**400, False),
        (0.1 + 0.2, 0.3, True),
        (1, True, True),
        (None, None, True),
        (None, 0, False),
        (None, False, False),
        ([1, [2, "x"]], [1, [2, "x"]], True),
        ([1, 2], [2, 1], False),
        ([1, 2], [1, 2, 3], False),
        ([], {}, False),
        ([], "", False),
        ({"1": 2}, {"1": 2.0}, True),
        ({"1": 2}, {"1": 2, "2": 3}, False),
        (10**400, 10**400, True),
        (10**400, 1.5, False),
        (1.5, float("nan"), False),
        (float("inf"), float("inf"), True),
    ],
)
def test_values(wanted, value, same):
    assert same_value(wanted, value) == same


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_a_value_equals_itself_after_json(value):
    assert same_value(value, json.loads(json.dumps(value)))
