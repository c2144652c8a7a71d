"""A trace in tokens, and filling the rows of an update with traces."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.learner.packing import Segment, first_fit

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Example:
    """A trace in tokens."""

    tokens: np.ndarray  # [t] int32, prompt, completion, end of sequence
    trained: np.ndarray  # [t] bool, whether it is a loss token


def join(
    prompt: Sequence[int], pieces: Sequence[Sequence[int]], trained: Sequence[bool], tokenizer: Tokenizer
) -> Example:
    """Joins prompt and pieces. The prompt and untrained pieces are context; the completion ends with the stop token.

    Tokens of a trained piece after its last stop token are not trained on: a completion ends there, and a chat template
    may have written a newline after it. A stop token that a context piece repeats is kept once, as in the episodes of
    RL.
    """
    tokens, mask = list(prompt), [False] * len(prompt)
    for ids, learnt in zip(pieces, trained, strict=True):
        if not learnt and tokens and ids[:1] == tokens[-1:] and tokens[-1] in tokenizer.stop_ids:
            ids = ids[1:]
        tokens += ids
        stops = [at for at, token in enumerate(ids) if token in tokenizer.stop_ids]
        kept = stops[-1] + 1 if stops else len(ids)
        mask += [learnt] * kept + [False] * (len(ids) - kept)
    while mask[-1:] == [False] and True in mask:
        tokens.pop()
        mask.pop()
    if tokens[-1] not in tokenizer.stop_ids:
        tokens.append(tokenizer.eos_id)
        mask.append(True)
    return Example(np.asarray(tokens, np.int32), np.asarray(mask))


def fill(items: Iterator[Item], positions: Callable[[Item], int], *, rows: int, length: int) -> list[Item]:
    """Takes items from the stream until they fill `rows` rows of `length` positions, and no more than packing fits."""
    taken: list[Item] = []
    row, free = 1, length
    for item in items:
        size = positions(item)
        assert 0 < size <= length
        if size > free:
            row, free = row + 1, length
            if row > rows:
                break
        free -= size
        taken.append(item)
    # Taken row by row; packing places the longest first, which sometimes needs one row more.
    while max(row for row, _ in first_fit([positions(item) for item in taken], length=length)) >= rows:
        taken.pop()
    return taken


def segments(examples: Sequence[Example]) -> list[Segment]:
    """Each loss token weighs 1 / all loss tokens of the update."""
    weight = 1.0 / sum(int(example.trained.sum()) for example in examples)
    out = []
    for example in examples:
        blank = np.zeros(len(example.tokens), np.float32)
        out.append(Segment(example.tokens, (weight * example.trained).astype(np.float32), blank, blank))
    return out
