"""The traces of a user's files, epoch after epoch, each epoch in a new order.

Rows are rendered and tokenized once, when the warm start begins, into a folder next to its checkpoints, and read from
there through the page cache: memory holds three numbers a trace, however long they are. A warm start that continues
from a checkpoint uses these, even if the files have changed since.

    tokens.int32       all traces, one after another; a context token i is stored as -1 - i
    table.npz          lengths [traces], train and evaluation: indices of traces
    traces.json        their sources, and the notes printed

Held out are the evaluation_traces with the lowest hashes of their text, so that neither order nor new rows move
them. A trace with the same prompt as a held-out one, up to white space, is not trained on; the prompt of a chat is
its user's first message (all turns of a longer chat are trained on).

In a mixture the traces are rendered as all its parts render their prompts; parts that differ in this are refused.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.contract.fingerprint import tokenizer_fingerprint
from scalerl_jax.environments import parts
from scalerl_jax.environments.base import prompt_key
from scalerl_jax.environments.data import row_files as data_files
from scalerl_jax.environments.data import sources
from scalerl_jax.environments.data.columns import MISSING, Malformed, MalformedRows, find, keys, read_text
from scalerl_jax.environments.prompts import Prompts
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.system import files
from scalerl_jax.system.files import read_object
from scalerl_jax.traces.conversations import Conversations, Messages, Trace, read_messages, read_tools
from scalerl_jax.traces.example import Example, fill, join

ASKING = ("chat_template", "template_arguments", "system_prompt", "prompt_suffix")  # how prompts are rendered
_FORM = 4  # version of the folder: increased when the same files give other tokens or another split
_STREAM = 3  # random stream, as in built_in.py
_AT_ONCE = 256  # traces tokenized together
_PROGRESS_SECONDS = 5.0  # seconds


@dataclasses.dataclass(frozen=True)
class Given:
    """A row of a file: messages, or a prompt and a completion."""

    name: str  # "FILE row N"
    prompt: str = ""
    completion: str = ""
    messages: Messages = ()
    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas

    def texts(self) -> list[str]:
        return [message["content"] for message in self.messages] or [self.prompt, self.completion]

    def hashes(self) -> tuple[int, int]:
        """Hashes of the whole trace and of its prompt."""
        if not self.messages:
            return _hash([self.prompt, self.completion, *self.tools]), _prompt_hash(self.prompt)
        turns = [[m["role"], m["content"], *m.get("tool_calls", ())] for m in self.messages]
        asked = next((content for role, content, *_ in turns if role == "user"), turns[0][1])
        return _hash([*turns, *self.tools]), _prompt_hash(asked)


def _hash(value: Any) -> int:
    text = json.dumps(value, ensure_ascii=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _prompt_hash(text: str) -> int:
    return int.from_bytes(prompt_key(text)[:8], "little")


def asking(config: Config) -> tuple[str, Config]:
    """The name and config of the part that defines how prompts are rendered: the run ("") or a mixture's first part.

    Raises ValueError where the parts of a mixture differ in this.
    """
    try:
        return parts.common(config, ASKING)
    except ValueError as error:
        raise ValueError(
            f"config.sft.traces={config.sft.traces}: how their prompts are rendered is not clear, since {error}"
        ) from None


# ---- Rows ----------------------------------------------------------------------------------------------------------


def rows(config: Config, malformed: MalformedRows) -> Iterator[Given]:
    """Every well-formed row of config.sft.traces. Raises ValueError naming the field, or the file and row."""
    field = "config.sft.traces"
    for source in sources.parse(config.sft.traces, field):
        if source.weight is not None:
            raise ValueError(f"{field}={config.sft.traces}: traces are not drawn by weights, each comes once an epoch")
        if source.layout:
            raise ValueError(f"{source.given}: {source.layout} is a layout of problems, not of traces")
        for name, columns in source.read(held_out=False, malformed=malformed):
            try:
                yield _read(name, columns, config)
            except ValueError as error:
                malformed.skip(name, str(error))


def _read(name: str, columns: Mapping[str, Any], config: Config) -> Given:
    names = config.sft.columns
    prompt, completion, chat = (
        find(columns, column) if column else MISSING for column in (names.prompt, names.completion, names.messages)
    )
    cell = find(columns, names.tools) if names.tools else MISSING
    try:
        tools = () if cell is MISSING else read_tools(cell)
    except ValueError as error:
        raise Malformed(f"{names.tools!r}: {error}") from error
    if prompt is not MISSING and completion is not MISSING:
        if not isinstance(prompt, list) and not isinstance(completion, list):
            return Given(name, read_text(prompt, names.prompt), read_text(completion, names.completion), tools=tools)
        question, answer = _messages(prompt, names.prompt, "user"), _messages(completion, names.completion)
        return Given(name, messages=[*question, *answer], tools=tools)
    if chat is MISSING:
        wanted = " and ".join(column for column in (names.prompt, names.completion) if column)
        wanted = ", or ".join(column for column in (wanted, names.messages) if column)
        raise Malformed(f"is no trace ({keys(columns)}; wanted: {wanted})")
    return Given(name, messages=_messages(chat, names.messages), tools=tools)


def _messages(cell: Any, column: str, role: str = "assistant") -> Messages:
    if isinstance(cell, str) and column:
        return [{"role": role, "content": read_text(cell, column)}]
    try:
        return read_messages(cell)
    except ValueError as error:
        raise Malformed(f"{column!r}: {error}") from error


def _malformed(config: Config) -> MalformedRows:
    return MalformedRows(field="config.sft.max_malformed_rows", most=config.sft.max_malformed_rows)


def corpus(config: Config) -> Iterator[str]:
    """Texts from which a new tokenizer is made: the traces, with the interruption phrase after each so that its words
    get tokens."""
    for given in rows(config, _malformed(config)):
        yield "".join(given.texts())
        yield config.rollout.interruption_text


# ---- Tokens --------------------------------------------------------------------------------------------------------


class FileTraces:
    """The traces of config.sft.traces: read from the folder `path`, or tokenized into it now.

    begun: whether there are checkpoints. log: called with a progress line every few seconds while tokenizing.
    Raises ValueError naming the field, or the file and row, at fault; WriteError where the folder cannot be written.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        path: str,
        *,
        begun: bool = False,
        log: Callable[[str], None] = print,
    ):
        part, config = asking(config)
        self._config = config
        self.notes: list[str] = []  # lines on what was left out and how traces are rendered
        try:
            self._open(config, tokenizer, path, begun, log)
        except ValueError as error:
            raise ValueError(parts.as_written(part, str(error))) from error
        self.notes = [parts.as_written(part, line) for line in self.notes]

    def _open(self, config: Config, tokenizer: Tokenizer, path: str, begun: bool, log: Callable[[str], None]) -> None:
        asked, stamps = _asked(config, tokenizer), _stamps(config)
        described = os.path.join(path, "traces.json")
        old = read_object(described) if os.path.isfile(described) else {}
        if not old and os.path.isdir(path) and os.listdir(path):
            raise ValueError(f"{path}: would be replaced, and holds something else; begin in another workdir")
        if old.get("asked") != asked or (old.get("files") != stamps and not begun):
            with files.whole_folder(path, replace=True) as folder:
                notes = _Writer(config, tokenizer, folder, log).write()
                old = {"asked": asked, "files": stamps, "said": notes}
                files.write_whole(os.path.join(folder, "traces.json"), json.dumps(old))
        elif old["files"] != stamps:
            self.notes.append(
                f"config.sft.traces={config.sft.traces}: has changed; goes on with the traces it began with"
            )
        self.notes += old["said"]
        with np.load(os.path.join(path, "table.npz")) as table:
            self._lengths, self._train, self._held_out = (table[name] for name in ("lengths", "train", "evaluation"))
        self._starts = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)])
        self._tokens = np.memmap(os.path.join(path, "tokens.int32"), np.int32, mode="r")
        self.longest = int(self._lengths.max())  # tokens
        self._next, self._taken = 0, 0  # the next update; traces taken before it
        self._epoch, self._order = -1, np.zeros(0, np.int64)  # the latest epoch and its order

    @property
    def taken(self) -> int:
        """Traces taken so far, with which a warm start can continue without replaying them."""
        return self._taken

    def go_on(self, update: int, taken: int) -> None:
        """Continues from `update`, before which `taken` traces were taken."""
        self._next, self._taken = update, taken

    def batch(self, update: int) -> list[Example]:
        """The traces of one update, a function of (seed, update)."""
        sft = self._config.sft
        if update < self._next:
            self._next, self._taken = 0, 0
        while True:  # the traces of an update depend on the updates before it
            taken = fill(
                self._stream(self._taken),
                lambda trace: int(self._lengths[trace]) - 1,
                rows=sft.rows_per_step,
                length=sft.seq_len,
            )
            self._next, self._taken = self._next + 1, self._taken + len(taken)
            if self._next > update:
                return [self._example(trace) for trace in taken]

    def evaluation(self) -> list[Example]:
        """The held-out traces, the lowest hash first."""
        return [self._example(trace) for trace in self._held_out]

    def _stream(self, start: int) -> Iterator[int]:
        count = len(self._train)
        for epoch in itertools.count(start // count):
            if epoch != self._epoch:
                self._epoch = epoch
                self._order = np.random.default_rng([self._config.seed, _STREAM, epoch]).permutation(count)
            for at in range(start % count if epoch == start // count else 0, count):
                yield int(self._train[self._order[at]])

    def _example(self, trace: int) -> Example:
        written = np.asarray(self._tokens[self._starts[trace] : self._starts[trace + 1]])
        trained = written >= 0
        return Example(np.where(trained, written, -1 - written), trained)


def _asked(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """All settings that the tokens depend on, besides the files."""
    environment, sft = config.environment, config.sft
    template = Prompts(config, tokenizer).template_text
    return {
        "form": _FORM,
        "tokenizer": tokenizer_fingerprint(tokenizer.path),
        "template": hashlib.sha256(template.encode()).hexdigest(),
        "stop_ids": list(tokenizer.stop_ids),
        "rollout": [config.rollout.end_of_thinking, config.rollout.thinking_budget_max > 0],
        "columns": dataclasses.asdict(sft.columns),
        **{name: getattr(environment, name) for name in ASKING},
        **{
            name: getattr(sft, name)
            for name in ("traces", "seq_len", "max_tokens", "long_traces", "max_malformed_rows", "evaluation_traces")
        },
    }


def _stamps(config: Config) -> list[list[Any]] | None:
    """Path, size and time of each file, except the hub's; None if a file cannot be found (reading it reports why)."""
    field, stamps = "config.sft.traces", list[list[Any]]()
    try:
        for source in sources.parse(config.sft.traces, field):
            for path in () if source.hub else data_files.files_of(source.where, field):
                found = os.stat(path)
                stamps.append([path, found.st_size, found.st_mtime_ns])
    except (ValueError, OSError):
        return None
    return stamps


class _Writer:
    """Tokenizes all traces into a folder."""

    def __init__(self, config: Config, tokenizer: Tokenizer, folder: str, log: Callable[[str], None]):
        sft = config.sft
        if sft.max_tokens > sft.seq_len + 1:
            raise ValueError(
                f"config.sft.max_tokens={sft.max_tokens}: a row holds {sft.seq_len + 1} tokens (config.sft.seq_len)"
            )
        self._config, self._tokenizer, self._folder, self._log = config, tokenizer, folder, log
        self._most = sft.max_tokens or sft.seq_len + 1
        self._conversations = Conversations(config, tokenizer)
        self._malformed = _malformed(config)
        self._lengths, self._hashes, self._prompts = array("i"), array("Q"), array("Q")
        self._long, self._first_long = 0, ""
        self._tokens = 0

    def write(self) -> list[str]:
        """Writes the folder; returns the notes to print."""
        last, traces = time.monotonic(), self._traces()
        with open(os.path.join(self._folder, "tokens.int32"), "wb") as file:
            while some := list(itertools.islice(traces, _AT_ONCE)):
                for given, example in zip(some, self._tokenized([trace for _, trace in some]), strict=True):
                    self._add(given[0], example, file)
                if time.monotonic() - last > _PROGRESS_SECONDS:
                    last = time.monotonic()
                    self._log(f"warm start: {len(self._lengths):,} traces tokenized, {self._tokens:,} tokens")
        train, evaluated = self._split()
        lengths = np.asarray(self._lengths, np.int32)
        np.savez(os.path.join(self._folder, "table.npz"), lengths=lengths, train=train, evaluation=evaluated)
        return self._notes(len(train), len(evaluated))

    def _traces(self) -> Iterator[tuple[Given, Trace]]:
        for given in rows(self._config, self._malformed):
            try:
                if given.messages:
                    trace = self._conversations.turns(given.messages, given.tools)
                else:
                    trace = self._conversations.answered(given.prompt, given.completion, given.tools)
            except ValueError as error:
                self._malformed.skip(given.name, str(error))
                continue
            yield given, trace

    def _tokenized(self, traces: list[Trace]) -> Iterator[Example]:
        ids = iter(self._tokenizer.encode_all([piece.text for trace in traces for piece in trace.pieces]))
        for trace in traces:
            trained = [piece.trained for piece in trace.pieces]
            yield join(trace.prompt, [next(ids) for _ in trained], trained, self._tokenizer)

    def _add(self, given: Given, example: Example, file: Any) -> None:
        size = len(example.tokens)
        if size > self._most:
            limit = f"config.sft.max_tokens={self._most}" if self._config.sft.max_tokens else "config.sft.seq_len"
            message = f"{given.name}: has {size} tokens, a row holds {self._most} ({limit})"
            if self._config.sft.long_traces == "refuse":
                raise ValueError(f"{message}; config.sft.long_traces=drop leaves such traces out")
            self._long, self._first_long = self._long + 1, self._first_long or message
            return
        if not example.trained[1:].any():
            self._malformed.skip(given.name, "has nothing to learn: its completion has no tokens")
            return
        written = np.where(example.trained, example.tokens, -1 - example.tokens).astype(np.int32)
        file.write(written.tobytes())
        self._lengths.append(size)
        whole, prompt = given.hashes()
        self._hashes.append(whole)
        self._prompts.append(prompt)
        self._tokens += size

    def _split(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the training traces, and of the held-out ones."""
        wanted, field = self._config.sft.evaluation_traces, f"config.sft.traces={self._config.sft.traces}"
        if not self._lengths:
            raise ValueError(f"{field}: no traces there")
        whole, prompts = np.asarray(self._hashes), np.asarray(self._prompts)
        distinct, first = np.unique(whole, return_index=True)
        evaluated = first[:wanted]
        train = np.flatnonzero(~np.isin(prompts, prompts[evaluated]))
        if len(distinct) <= wanted or not len(train):
            raise ValueError(
                f"config.sft.evaluation_traces={wanted}: there are {len(distinct)} traces, and none is left to train on"
            )
        return train, evaluated

    def _notes(self, train: int, evaluated: int) -> list[str]:
        notes = [*self._malformed.notes(), *self._conversations.notes]
        if self._long:
            notes.append(f"{self._long:,} traces are too long and are left out, as {self._first_long}")
        line = f"{train:,} traces, {self._tokens:,} tokens"
        if evaluated:
            line += f"; {evaluated:,} are held out"
            if more := len(self._lengths) - train - evaluated:
                line += f", and {more:,} with the same prompts left out"
        return [*notes, line]
