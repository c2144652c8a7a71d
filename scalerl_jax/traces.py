"""What the warm start learns from: traces, (prompt, pieces of the completion), as tokens and as segments.

An update takes as many as fill its rows, from a stream that is a function of (seed, update): the built-in task's traces
are made as they are needed, those of a file come epoch after epoch.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.environments import arithmetic
from scalerl_jax.environments.text_rows import read_jsonl
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.learner.packing import Segment, pack

_STREAM = 3  # of random numbers, beside those of environments/arithmetic.py


@dataclasses.dataclass(frozen=True)
class Example:
    """A trace in tokens."""

    tokens: np.ndarray  # [t] int32, prompt, completion, end of sequence
    trained: np.ndarray  # [t] bool, the loss tokens


def tokenize(prompt: str, pieces: Sequence[arithmetic.Piece], tokenizer: Tokenizer) -> Example:
    """The prompt is context, and so are pieces that are not trained on; the completion ends with the stop token."""
    tokens = tokenizer.encode_prompt(prompt)
    trained = [False] * len(tokens)
    for piece in pieces:
        ids = tokenizer.encode(piece.text)
        tokens += ids
        trained += [piece.trained] * len(ids)
    if tokens[-1] not in tokenizer.stop_ids:
        tokens.append(tokenizer.eos_id)
        trained.append(True)
    return Example(np.asarray(tokens, np.int32), np.asarray(trained))


def fill(examples: Iterator[Example], *, rows: int, length: int) -> list[Example]:
    """Takes from the stream what fills `rows` rows of `length` positions, and no more than packing puts there."""
    taken: list[Example] = []
    row, room = 1, length
    for example in examples:
        positions = len(example.tokens) - 1
        if positions > room:
            row, room = row + 1, length
            if row > rows:
                break
        room -= positions
        taken.append(example)
    # Taken row by row; packing places the longest first, which now and then needs one row more.
    while max(place.row for place in pack(segments(taken), length=length, rows=len(taken))[1]) >= rows:
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


class ArithmeticTraces:
    """The built-in task's traces, made as they are needed, from training problems only."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        self._config, self._tokenizer = config, tokenizer
        # Interruptions are part of what is taught only where the run will interrupt.
        self._phrase = config.rollout.interruption_text if config.rollout.thinking_budget_max else ""
        term = len(tokenizer.encode("+9=9")) + len(tokenizer.encode("+9"))
        fixed = tokenize("9=", [arithmetic.Piece("<think>9" + self._phrase + "</think>9")], tokenizer)
        self.longest = len(fixed.tokens) + term * (config.environment.maximum_terms - 1)  # tokens

    def batch(self, update: int) -> list[Example]:
        config = self._config
        rng = np.random.default_rng([config.seed, _STREAM, update])

        def examples() -> Iterator[Example]:
            while True:
                problem = arithmetic.draw(rng, config.environment, validation=False)
                pieces = arithmetic.trace(problem, rng, error_rate=config.sft.error_rate, phrase=self._phrase)
                yield tokenize(problem.text, pieces, self._tokenizer)

        return fill(examples(), rows=config.sft.rows_per_step, length=config.sft.seq_len)


class FileTraces:
    """The rows of a JSONL file of {"prompt", "completion"}, epoch after epoch, each in an order of its own.

    Raises ValueError naming a row that does not fit into config.sft.seq_len.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer):
        self._config = config
        self._examples = []
        for prompt, completion, where in read_traces(config.sft.traces_file):
            example = tokenize(prompt, [arithmetic.Piece(completion)], tokenizer)
            if len(example.tokens) - 1 > config.sft.seq_len:
                raise ValueError(
                    f"{where}: has {len(example.tokens)} tokens, a row holds {config.sft.seq_len + 1} "
                    "(config.sft.seq_len)"
                )
            self._examples.append(example)
        if not self._examples:
            raise ValueError(f"{config.sft.traces_file}: no traces there")
        self.longest = max(len(example.tokens) for example in self._examples)
        self._next, self._taken = 0, 0  # update that comes next; examples taken before it

    def batch(self, update: int) -> list[Example]:
        if update < self._next:
            self._next, self._taken = 0, 0
        while True:  # what an update takes depends on those before it
            taken = fill(
                self._stream(self._taken), rows=self._config.sft.rows_per_step, length=self._config.sft.seq_len
            )
            self._next, self._taken = self._next + 1, self._taken + len(taken)
            if self._next > update:
                return taken

    def _stream(self, start: int) -> Iterator[Example]:
        count = len(self._examples)
        for epoch in itertools.count(start // count):
            order = np.random.default_rng([self._config.seed, _STREAM, epoch]).permutation(count)
            for at in range(start % count if epoch == start // count else 0, count):
                yield self._examples[order[at]]


def read_traces(path: str) -> Iterator[tuple[str, ...]]:
    return read_jsonl(path, "config.sft.traces_file", ("prompt", "completion"))


def corpus(config: Config) -> Iterator[str]:
    """What a new tokenizer is made from: the traces, and the interruption phrase as often as its words need."""
    if not config.sft.traces_file:
        yield from arithmetic.corpus(config.environment, seed=config.seed, phrase=config.rollout.interruption_text)
        return
    for prompt, completion, _ in read_traces(config.sft.traces_file):
        yield prompt + completion
        yield config.rollout.interruption_text
