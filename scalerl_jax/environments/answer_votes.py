"""Canonical form of an answer, equal for equivalent answers: majority@k counts these forms.

    a correct answer        the form of the gold answer
    a number                its exact value, with its unit: 3/4, 50 %, 5 cm
    one or several choices  their letters, in order
    anything else           its words, or its mathematics without spaces and delimiters

Two wrong answers that are the same mathematics in two forms, x+1 and 1+x, count separately.
"""

from scalerl_jax.environments import answers
from scalerl_jax.environments.answer_text import bare, final_answers, is_mathematics, squeezed, words
from scalerl_jax.environments.base import Score

_CHOICES = "abcdefghij"


def scored(text: str, gold: str) -> Score:
    """The score of `text`, where `gold` is the correct answer."""
    try:
        correct = answers.right(text, gold)
    except Exception as error:  # noqa: BLE001 (whatever parsers of any text may raise, the text is not the answer)
        return Score(-1.0, False, why=f"could not be read: {type(error).__name__}")
    return Score(
        1.0 if correct else -1.0, correct, answer=vote(text, gold, correct=correct),
        why=compared(text, gold, correct=correct),
    )  # fmt: skip


def vote(text: str, gold: str, *, correct: bool) -> str | None:
    """The canonical form of the answer in `text`; None if it gives no answer."""
    wanted = next(iter(final_answers(gold)), gold)
    if correct:
        return form(wanted, wanted)
    readings = final_answers(text)
    if not readings:
        return None
    found = form(_narrowest(readings), wanted)
    return f"not {found}" if found is not None and found == form(wanted, wanted) else found


def form(reading: str, gold: str) -> str | None:
    """The canonical form of one reading of an answer, where `gold` is the correct one."""
    if len(reading) > answers.LONGEST_GIVEN:
        return reading
    if letters := answers.letters(reading):
        return ", ".join(letters)
    if answers.letter(gold) is not None:
        for choice in _CHOICES:
            if answers.names_choice(reading, choice):
                return choice.upper()
    number = answers.measure(reading)
    if number is not None:
        return f"{number.value} {number.unit}".strip()
    if not is_mathematics(reading) and (found := words(reading)):
        return " ".join(found)
    return squeezed(reading) or bare(reading) or None


def compared(text: str, gold: str, *, correct: bool) -> str:
    """An explanation for people: the answer that was read, and the expected one."""
    readings = final_answers(text)
    wanted = _short(next(iter(final_answers(gold)), gold))
    if not readings:
        return f"gave no answer, wanted {wanted}"
    reading = _short(_narrowest(readings))
    return f"said {reading}, wanted {wanted}" if not correct or reading != wanted else f"said {reading}"


def _narrowest(readings: list[str]) -> str:
    """The shortest reading: the one with the least text besides the answer."""
    return min(readings, key=len)


def _short(text: str) -> str:
    shown = " ".join(text.split())
    return shown if len(shown) <= 80 else f"{shown[:38]} ... {shown[-37:]}"
