"""Finds training prompts that overlap with evaluation sets: equal texts, or WORDS consecutive words in common.

Words are separated by spaces and punctuation, in lower case: \\frac{1}{2} is frac 1 2. In scripts without spaces each
character is a separate word, and counts as a fraction of a word with about the same information:

    Chinese characters                     1/2    26 in a row are as rare as 13 words
    hiragana and katakana                  1/3    39; so about 30 characters of Japanese
    Thai, Lao, Burmese, Khmer              1/5    65, vowel signs and tone marks counted

(an English word in context has about 8 bits, at 1.5 bits per letter; a Chinese character has 4 to 5 bits, a Thai
letter, like an English one, 1 to 2). Word sequences that many prompts of a set share are a common instruction ("Solve
the following problem ...") and are ignored. Equal texts may differ only in white space (base.prompt_key), not in
punctuation: 2-3 is not 2+3. Prompts of fewer than WORDS words are only found by equality.
"""

import dataclasses
import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from scalerl_jax.config import Config
from scalerl_jax.environments.base import prompt_key, question
from scalerl_jax.environments.data import columns as columns_lib
from scalerl_jax.environments.data import layouts, sources
from scalerl_jax.environments.data.columns import MalformedRows

WORDS = 13
_COMMON_SHARE, _COMMON = 0.1, 3  # a sequence in more than this share of a set's prompts, and more than 3, is ignored
_WORD = re.compile(r"\w+")
_WORD_PARTS = 30  # parts of a whole word
# Scripts without spaces: the characters, and the number of parts that each of them counts.
_SPACELESS = (
    ("\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff", 15),  # Chinese characters
    ("\u3041-\u30ff\u31f0-\u31ff", 10),  # hiragana, katakana
    ("\u0e00-\u0eff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff", 6),  # Thai, Lao, Burmese, Khmer
)

Gram = tuple[str, ...]


@dataclasses.dataclass
class Overlap:
    """Counts of training prompts that overlap with one set, and the first row."""

    same: int = 0
    overlapping: int = 0
    first: str = ""


class EvaluationPrompts:
    """The prompts of evaluation sets, {name of the set: texts}."""

    def __init__(self, sets: Mapping[str, Iterable[str]]):
        self.found = {name: Overlap() for name in sets}
        self._whole: dict[bytes, set[str]] = {}  # key of a prompt -> the sets that contain it
        self._grams: dict[Gram, list[str]] = {}  # word sequence -> the sets with a prompt that contains it
        for name, texts in sets.items():
            prompts = set[Gram]()
            for text in texts:
                prompts.add(words(text))
                self._whole.setdefault(prompt_key(text), set()).add(name)
            shared = Counter(gram for prompt in prompts for gram in set(grams(prompt)))
            most = max(_COMMON, _COMMON_SHARE * len(prompts))
            for gram, count in shared.items():
                if count <= most:
                    self._grams.setdefault(gram, []).append(name)

    def has(self, text: str, row: str) -> bool:
        """Whether any set overlaps with the prompt `text` of the row named `row`; counts it for each such set."""
        same = self._whole.get(prompt_key(text), set())
        overlapping = {name for gram in grams(words(text)) for name in self._grams.get(gram, ())} - same
        for name in same | overlapping:
            found = self.found[name]
            found.same += name in same
            found.overlapping += name in overlapping
            found.first = found.first or row
        return bool(same or overlapping)

    def notes(self) -> list[str]:
        """One message per set."""
        return [
            f"training prompts left out since they are in {name}: {found.same + found.overlapping:,} "
            f"({found.same:,} the same, {found.overlapping:,} by {WORDS} words in a row)"
            + (f", as {found.first}" if found.first else "")
            for name, found in self.found.items()
        ]


def words(text: str) -> Gram:
    """The words of a text in order; for scripts without spaces the characters."""
    text = unicodedata.normalize("NFKC", text).lower()
    plain = text.isascii() or not any(map(_is_special, set(text)))
    return tuple((_WORD if plain else _any_word()).findall(text))


@functools.cache
def _any_word() -> re.Pattern[str]:
    """Matches a character of a script without spaces, or a word of another one with its marks (vowel signs, accents).

    It is ten times slower than _WORD.
    """
    marks = re.escape("".join(mark for mark in map(chr, range(0x300, 0x12000)) if unicodedata.category(mark)[0] == "M"))
    alone = "".join(characters for characters, _ in _SPACELESS)
    return re.compile(rf"(?=[\w{marks}])[{alone}]|(?:(?![{alone}])[\w{marks}])+")


@functools.cache
def _is_special(character: str) -> bool:
    """Whether the character requires _any_word instead of _WORD."""
    return unicodedata.category(character)[0] == "M" or _parts(character) != _WORD_PARTS


@functools.cache
def _parts(word: str) -> int:
    for characters, parts in _SPACELESS:
        if re.fullmatch(f"[{characters}]", word):
            return parts
    return _WORD_PARTS


def grams(prompt: Gram) -> Iterator[Gram]:
    """Every sequence of WORDS words: from each word on the shortest one whose parts add up to WORDS whole words."""
    end, sum_of_parts = 0, 0
    for start, word in enumerate(prompt):
        while sum_of_parts < WORDS * _WORD_PARTS:
            if end == len(prompt):
                return
            sum_of_parts += _parts(prompt[end])
            end += 1
        yield prompt[start:end]
        sum_of_parts -= _parts(word)


def read(config: Config) -> EvaluationPrompts:
    """The sets of config.environment.decontaminate. Raises ValueError naming the field, or the file and row."""
    field = "config.environment.decontaminate"
    environment, malformed = config.environment, MalformedRows.of(config.environment)
    sets: dict[str, list[str]] = {}
    for source in sources.parse(environment.decontaminate, field):
        if source.weight is not None:
            raise ValueError(f"{field}: {source.text} has a weight, and nothing is drawn from it")
        texts = sets.setdefault(source.text, [])
        for name, columns in source.read(held_out=True, malformed=malformed):
            try:
                if source.layout:
                    row = layouts.make_row(columns, dataclasses.replace(layouts.LAYOUTS[source.layout], answers=()))
                else:
                    row = columns_lib.make_row(columns, environment.columns, needs_answer=False)
                texts.append(question(row, environment))
            except ValueError as error:
                malformed.skip(name, str(error))
        if not texts:
            raise ValueError(f"{source.given}: no prompts there")
    return EvaluationPrompts(sets)
