"""config.environment.filter: what it says of a row, and what it may not say."""

import pytest

from scalerl_jax.environments.data.filter import Filter

ROW = {
    "level": 3,
    "difficulty": "4/8",
    "meta": {"source": "aime", "years": [1999, 2024]},
    "none": None,
    "problem-type": "proof",
    "len": "a column",
    "flag": False,
    "text": "Find x.\nThen y.",
}


def keeps(expression, row=ROW):
    return Filter(expression).keeps("FILE row 7", row)


@pytest.mark.parametrize(
    ("expression", "kept"),
    [
        ("", True),
        ("  ", True),
        ('difficulty != "8/8" and level >= 3', True),
        ("level > 3 or not flag", True),
        ("1 < level < 3", False),
        ("level in (1, 2, 3) and difficulty not in ['8/8']", True),
        ("meta.source == 'aime' and meta.years[-1] > 2000", True),
        ("meta['source'].upper().startswith('AI')", True),
        ("len(text) == 15 and len(text.splitlines()) == 2", True),
        ("len(meta.years) == 2 and sum(meta.years) == 4023", True),
        ("len == 'a column'", True),
        ("column('problem-type') == 'proof'", True),
        ("column('absent', 0) < 1", True),
        ("column('meta.absent', 'x') == 'x'", True),
        ("int(difficulty[0]) / int(difficulty.split('/')[1]) <= 0.5", True),
        ("none is None", True),
        ("(level if flag else -level) + 3 == 0", True),
        ("lower(text)[:4] == 'find'", True),
        ("level % 2 == 1 and level // 2 * 2 - 1 == 1", True),
        ("flag", False),
        ("none", False),
        ("text", True),
    ],
)
def test_what_it_says_of_a_row(expression, kept):
    assert keeps(expression) is kept


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("level >=", "is not an expression"),
        ("level = 3", "is not an expression"),
        ("import os", "is not an expression"),
        ("level; level", "is not an expression"),
        ("(" * 5000 + "1" + ")" * 5000, "is not an expression"),
        ("__import__('os').system('true')", r"__import__\('os'\).system\(\): is not one of"),
        ("open('/etc/passwd')", r"open\(\): is not one of"),
        ("text.__class__.__mro__ and text.format(1)", r"text.format\(\): is not one of"),
        ("'{0.__class__}'.format(text)", "is not one of"),
        ("(lambda: 1)()", "is not one of"),
        ("[x for x in meta]", "ListComp has no place in a filter"),
        ("f'{level}'", "JoinedStr has no place"),
        ("9 ** 9", "Pow has no place"),
        ("(level := 4)", "NamedExpr has no place"),
        ("len(*meta)", "Starred has no place"),
        ("sorted(meta, key=len)", "arguments have no names"),
        ("{'a': 1}", "Dict has no place"),
        ("text[0].lower", "Attribute has no place"),
        ("column(text)", r"column\(text\): is not column\(NAME\)"),
        ("column()", r"is not column\(NAME\)"),
    ],
)
def test_what_it_may_not_say(expression, expected):
    with pytest.raises(ValueError, match=rf"^config\.environment\.filter=.*: .*{expected}") as caught:
        Filter(expression)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("text.__class__", "FILE row 7 has no column 'text.__class__'"),
        (
            "absent > 3",
            r"FILE row 7 has no column 'absent' \(keys: level, difficulty, .*\); column\(\"absent\", OTHERWISE\)",
        ),
        ("meta.absent > 3", "FILE row 7 has no column 'meta.absent'"),
        ("none > 3", "FILE row 7: TypeError: '>' not supported between"),
        ("level.lower()", "FILE row 7: AttributeError"),
        ("int(text)", "FILE row 7: ValueError"),
        ("level / 0", "FILE row 7: ZeroDivisionError"),
        ("meta.years[9]", "FILE row 7: IndexError"),
        ("difficulty[0](1)", "is not one of"),
    ],
)
def test_what_it_cannot_say_of_a_row_names_both(expression, expected):
    with pytest.raises(ValueError, match=rf"^config\.environment\.filter=.*: .*{expected}") as caught:
        keeps(expression)
    assert "\n" not in str(caught.value)
