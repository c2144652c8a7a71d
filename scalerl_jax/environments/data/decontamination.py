"""Training prompts that evaluation sets have too: the same text, or WORDS words in a row that are the same.

Words are what is between spaces and signs, in small letters: \\frac{1}{2} is frac 1 2. A row of words that many
prompts of a set share is what they are all asked with ("Solve the following problem ..."), and tells nothing. The same
text has the same signs too, and other white space alone (held_out.py): 2-3 is not 2+3. A prompt of fewer words is found
by it alone.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from scalerl_jax.config import Config
from scalerl_jax.environments.data import columns as columns_lib
from scalerl_jax.environments.data import held_out, layouts, sources
from scalerl_jax.environments.data.malformed import MalformedRows

WORDS = 13
_COMMON_SHARE, _COMMON = 0.1, 3  # of a set's prompts, and how many at least: more than that share a row of words
_WORD = re.compile(r"\w+")

Gram = tuple[str, ...]


@dataclasses.dataclass
class Found:
    """Training prompts that a set has too."""

    same: int = 0
    overlapping: int = 0
    first: str = ""


class Evaluations:
    """The prompts of evaluation sets, {name of the set: texts}."""

    def __init__(self, sets: Mapping[str, Iterable[str]]):
        self.found = {name: Found() for name in sets}
        self._whole: dict[bytes, set[str]] = {}  # by the key of a prompt, the sets that have it
        self._grams: dict[Gram, list[str]] = {}  # sets that have a prompt with these words in it
        for name, texts in sets.items():
            prompts = set[Gram]()
            for text in texts:
                prompts.add(words(text))
                self._whole.setdefault(held_out.key(text), set()).add(name)
            shared = Counter(gram for prompt in prompts for gram in set(grams(prompt)))
            most = max(_COMMON, _COMMON_SHARE * len(prompts))
            for gram, count in shared.items():
                if count <= most:
                    self._grams.setdefault(gram, []).append(name)

    def has(self, text: str, row: str) -> bool:
        """Whether a set has the prompt of the row of that name; it is counted for each that has."""
        same = self._whole.get(held_out.key(text), set())
        overlapping = {name for gram in grams(words(text)) for name in self._grams.get(gram, ())} - same
        for name in same | overlapping:
            found = self.found[name]
            found.same += name in same
            found.overlapping += name in overlapping
            found.first = found.first or row
        return bool(same or overlapping)

    def said(self) -> list[str]:
        """A line for each set."""
        return [
            f"training prompts left out since they are in {name}: {found.same + found.overlapping:,} "
            f"({found.same:,} the same, {found.overlapping:,} by {WORDS} words in a row)"
            + (f", as {found.first}" if found.first else "")
            for name, found in self.found.items()
        ]


def words(text: str) -> Gram:
    return tuple(_WORD.findall(text.lower()))


def grams(prompt: Gram) -> Iterator[Gram]:
    """Every WORDS words in a row."""
    return (prompt[start : start + WORDS] for start in range(len(prompt) - WORDS + 1))


def read(config: Config) -> Evaluations:
    """The sets of config.environment.decontaminate. Raises ValueError naming the field, or the file and row."""
    field = "config.environment.decontaminate"
    environment, malformed = (
        config.environment,
        MalformedRows(field="config.environment.max_malformed_rows", most=config.environment.max_malformed_rows),
    )
    sets: dict[str, list[str]] = {}
    for source in sources.parse(config.environment.decontaminate, field):
        if source.weight is not None:
            raise ValueError(f"{field}: {source.text} has a weight, and nothing is drawn from it")
        texts = sets.setdefault(source.text, [])
        for name, columns in source.read(held_out=True, malformed=malformed):
            try:
                if source.layout:
                    row = layouts.make_row(columns, dataclasses.replace(layouts.LAYOUTS[source.layout], answers=()))
                else:
                    row = columns_lib.make_row(columns, environment.columns, needs=())
                texts.append(held_out.question(row, environment))
            except ValueError as error:
                malformed.skip(name, str(error))
        if not texts:
            raise ValueError(f"{source.given}: no prompts there")
    return Evaluations(sets)
