"""Prompts and answers from files and the hub (data/); a completion is correct if its answer equals the row's
(answers.py).

An answer's canonical form is equal for equivalent answers: majority@k counts these forms.

    a correct answer        the form of the gold answer
    a number                its exact value, with its unit: 3/4, 50 %, 5 cm
    one or several choices  their letters, in order
    anything else           its words, or its mathematics without spaces and delimiters

Two wrong answers that are the same mathematics in two forms, x+1 and 1+x, count separately.

Comparing answers imports sympy, which the scoring processes need and the trainer does not: hence the local imports.
"""

from scalerl_jax.config import Config
from scalerl_jax.environments.answer_text import bare, final_answers, is_mathematics, squeezed, words
from scalerl_jax.environments.base import Environment, Row, Score, shortened
from scalerl_jax.environments.data.reader import Reader

_CHOICES = "abcdefghij"


def make(config: Config) -> Environment:
    reader = Reader(config)
    return Environment(
        reader.rows, score, prepare=prepare, deterministic=lambda: True, weights=reader.weights, notes=reader.notes,
        filters=True,
    )  # fmt: skip


def prepare() -> None:
    from scalerl_jax.environments.answers import right

    right("$x$", "y")  # the first question loads the grammars


def score(row: Row, completion: str) -> Score:
    from scalerl_jax.environments.answers import right

    try:
        correct = right(completion, row.answer)
    except Exception as error:  # noqa: BLE001 (whatever parsers of any text may raise, the text is not the answer)
        return Score(-1.0, False, why=f"could not be read: {type(error).__name__}")
    wanted = next(iter(final_answers(row.answer)), row.answer)
    # The shortest reading has the least text besides the answer.
    reading = min(final_answers(completion), key=len, default=None)
    return Score(
        1.0 if correct else -1.0, correct, answer=vote(reading, wanted, correct=correct),
        why=compared(reading, wanted, correct=correct),
    )  # fmt: skip


def vote(reading: str | None, wanted: str, *, correct: bool) -> str | None:
    """The canonical form of the answer that was read; None if there is none."""
    if correct:
        return form(wanted, wanted)
    if reading is None:
        return None
    found = form(reading, wanted)
    return f"not {found}" if found is not None and found == form(wanted, wanted) else found


def form(reading: str, gold: str) -> str | None:
    """The canonical form of one reading of an answer, where `gold` is the correct one."""
    from scalerl_jax.environments import answers

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


def compared(reading: str | None, wanted: str, *, correct: bool) -> str:
    """An explanation for people: the answer that was read, and the expected one."""
    expected = shortened(wanted)
    if reading is None:
        return f"gave no answer, wanted {expected}"
    given = shortened(reading)
    return f"said {given}, wanted {expected}" if not correct or given != expected else f"said {given}"
