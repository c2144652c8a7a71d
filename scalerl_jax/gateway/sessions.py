"""Sessions: a client's conversation with the policy, as the tokens that were fed and sampled. No HTTP, no gRPC here.

    turn      one completion; its prompt is the path of its parent and the tokens `added` after that
    path      the tokens from a root to the end of a turn
    branch    the path of a turn that no other one extends

Where a turn's prompt comes from:
1. Its messages are those of a recorded turn, that turn's answer, and further ones that are not the assistant's: then it
   is that turn's path and what the chat template writes after it. Thinking that a client leaves out stays in the path;
   thinking that it changed makes the messages different ones. With history=template only if the template, given all
   messages, writes the text of the path first.
2. Otherwise they are rendered whole, and the parent is the turn with the longest path that the rendering begins with.
   Prompts given as tokens or text are placed in the same way.
3. If there is no such turn, the turn is a root.

Nothing is tokenized again and nothing realigned: a branch is what a generator was fed, token for token. A repeated call
(with the same key, or a retry with the same digest) is sampled once.
"""

import asyncio
import base64
import dataclasses
import hashlib
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from scalerl_jax.contract.codec import Completion
from scalerl_jax.gateway.chat import Chat, Message
from scalerl_jax.gateway.journal import Journal

# (prompt [tokens] int32, the call's name, index among its choices, seed) -> the completion, and the server's name.
Generate = Callable[[np.ndarray, str, int, int], Awaitable[tuple[Completion, str]]]
# (prompt, completion) -> (the completion, cut at a stop string; its message; the stop string that it was cut at).
Read = Callable[[np.ndarray, Completion], tuple[Completion, Message, str | None]]

T = TypeVar("T")

KEY = "sk-scalerl-"  # prefix of a client's key that names its session
_MOST_ENDED = 100_000  # names kept of ended sessions
TURN_BYTES = 1000  # of a turn in memory, without its tokens and its text
_ARRAYS = {"added": "<i4", "token_ids": "<i4", "logprobs": "<f4"}  # of a turn, and how they are written as JSON
_ENCODER = json.JSONEncoder(sort_keys=True)  # json.dumps would make one at each call


class SessionOver(Exception):
    """The session accepts no further calls."""


class SessionsFull(Exception):
    """The limit on sessions, or on their bytes, is reached."""


@dataclasses.dataclass(frozen=True)
class ClientRequest:
    """A client's request: messages, or the tokens of a prompt."""

    digest: str = ""  # of the whole request
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    template_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the chat template
    prompt: np.ndarray | None = None  # [tokens] int32; None: the messages
    choices: int = 1
    seed: int | None = None
    key: str = ""  # Idempotency-Key
    retry: bool = False  # the client has sent it before


@dataclasses.dataclass(frozen=True)
class Turn:
    """One completion, and where its prompt comes from."""

    turn_id: int  # from 0, in the order in which they were recorded
    parent: int | None  # whose path the prompt begins with; None: a root
    prompt: int  # tokens of the prompt, the parent's path included
    added: np.ndarray  # [prompt - path] int32: after the parent's path; never part of the loss
    token_ids: np.ndarray  # [tokens] int32
    logprobs: np.ndarray  # [tokens] float32
    versions: tuple[tuple[int, int, int], ...]  # (step, start, end) of tokens
    forced: tuple[tuple[int, int], ...]  # (start, end) of tokens
    finish_reason: str  # "stop" | "length"
    index: int = 0  # among the choices of its call
    message: Message = dataclasses.field(default_factory=dict)  # the answer to the client
    stop: str | None = None  # the stop string that ended it
    server: str = ""  # that sampled it: address and process

    @property
    def size(self) -> int:
        """Approximate bytes in memory."""
        return TURN_BYTES + 4 * len(self.added) + 8 * len(self.token_ids) + len(str(self.message.get("content")))

    def to_json(self) -> dict[str, Any]:
        """Arrays are base64 of little-endian int32 and float32."""
        fields = vars(self)
        coded = {name: base64.b64encode(fields[name].astype(kind).tobytes()).decode() for name, kind in _ARRAYS.items()}
        return {**fields, **coded}


def turn_from_json(found: Mapping[str, Any]) -> Turn:
    coded = {name: base64.b64decode(found[name]) for name in _ARRAYS}
    arrays = {name: np.frombuffer(coded[name], kind).astype(kind[1:]) for name, kind in _ARRAYS.items()}
    spans = {name: tuple(map(tuple, found[name])) for name in ("versions", "forced")}
    return Turn(**{**found, **arrays, **spans})


@dataclasses.dataclass(frozen=True)
class Branch:
    """A row to train on."""

    turns: tuple[int, ...]  # from the root on
    token_ids: np.ndarray  # [tokens] int32
    loss: np.ndarray  # [tokens] bool: sampled, not forced, and in no branch before this one
    logprobs: np.ndarray  # [tokens] float32, 0 where nothing was sampled
    steps: np.ndarray  # [tokens] int64: version that sampled it; of added tokens: of the turn after them


def branches(turns: Sequence[Turn], leaves: Collection[int] | None = None) -> list[Branch]:
    """One for each turn that no other extends, in order; a turn in several branches counts in the first of them.

    leaves: only these turns and those that they extend are used.
    """
    ends = turns if leaves is None else [turn for turn in turns if turn.turn_id in leaves]
    extended, counted = {turn.parent for turn in ends}, set[int]()
    found = []
    for leaf in ends:
        if leaf.turn_id in extended:
            continue
        path = _ancestry(turns, leaf.turn_id)
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        for turn in path:
            tokens, before = len(turn.token_ids), len(turn.added)
            loss, steps = np.full(tokens, turn.turn_id not in counted), np.zeros(tokens, np.int64)
            for start, end in turn.forced:
                loss[start:end] = False
            for step, start, end in turn.versions:
                steps[start:end] = step
            parts.append((turn.added, np.zeros(before, bool), np.zeros(before, np.float32), np.full(before, steps[0])))
            parts.append((turn.token_ids, loss, turn.logprobs, steps))
        counted.update(turn.turn_id for turn in path)
        found.append(Branch(tuple(turn.turn_id for turn in path), *(np.concatenate(row) for row in zip(*parts))))
    return found


def _ancestry(turns: Sequence[Turn], turn_id: int | None) -> list[Turn]:
    """From its root to the turn itself."""
    path, at = list[Turn](), turn_id
    while at is not None:
        path.append(turns[at])
        at = turns[at].parent
    return path[::-1]


class Session:
    """The turns of one session; everything runs on one event loop.

    name: of its calls on the generators. seed: the calls' seeds come from it and the name. journal: its records restore
    the session; each answers one call with its digest without sampling, for a client that restarts.
    about: fields set by its owner; `deadline`, in Unix seconds, is when it ends.
    """

    def __init__(
        self, name: str, *, seed: int = 0, journal: Journal | None = None, about: Mapping[str, Any] | None = None,
        most_turns: int = 0,
    ):  # fmt: skip
        self.name, self.about, self.over = name, dict(about or {}), False
        self.turns: list[Turn] = []
        self.size = 0  # bytes, approximately
        self.answered = set[int]()  # turns returned to a client since this object was made
        self.full = False  # a prompt was too long for a turn after it
        self.chat: Chat | None = None  # set by its owner if it is not the gateway's
        self._seed, self._journal, self._most_turns = seed, journal, most_turns
        self._children: dict[int | None, list[Turn]] = defaultdict(list)
        self._by_history: dict[str, list[Turn]] = defaultdict(list)  # the digest of all messages, including the turn's
        self._names = 0  # calls so far
        self._calls: dict[str, asyncio.Task[tuple[Turn, ...]]] = {}  # the last call of each key, and of each digest
        self._running: set[asyncio.Task[tuple[Turn, ...]]] = set()
        self._journalled: dict[str, list[tuple[Turn, ...]]] = defaultdict(list)  # not requested again yet
        self._record = asyncio.Lock()
        if journal is not None:
            self._restore(journal)

    # ---- calls

    async def ask(self, call: ClientRequest, *, chat: Chat, generate: Generate, read: Read) -> tuple[Turn, ...]:
        """The turns of a call, one for each choice. A caller that is cancelled leaves it running, for its retry.

        Raises SessionOver, ValueError if the template fails, OSError if the journal cannot be written, and what
        `generate` raises: then nothing is recorded, and a retry samples again.
        """
        keyed = f"key {call.key} {call.digest}"
        again = self._calls.get(keyed if call.key else call.digest if call.retry else "")
        if again is None:
            if journalled := self._journalled.get(call.digest):
                again = asyncio.create_task(_known(journalled.pop(0)))
            elif self.over or time.time() >= self.deadline:
                raise SessionOver(f"session {self.name} is over")
            elif self._most_turns and len(self.turns) + call.choices > self._most_turns:
                raise SessionOver(f"session {self.name} has {len(self.turns)} turns, and {self._most_turns} may be")
            else:
                again = asyncio.create_task(self._sample(call, chat, generate, read))
            names = [call.digest, keyed] if call.key else [call.digest]
            self._running.add(again)
            self._calls.update(dict.fromkeys(names, again))
            again.add_done_callback(lambda done: self._forget(done, names))
        try:
            turns = await asyncio.shield(again)
            self.answered.update(turn.turn_id for turn in turns)
            return turns
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if again.cancelled() and task is not None and not task.cancelling():  # the session was closed meanwhile
                raise SessionOver(f"session {self.name} is over") from None
            raise

    def end(self) -> None:
        """Accepts no further calls, and ends those that are running. Raises OSError as `ask`."""
        if not self.over and self._journal is not None:
            self._journal.append({"kind": "over"})
        self.over = True
        self.close()

    def close(self) -> None:
        for task in self._running:
            task.cancel()
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    @property
    def deadline(self) -> float:
        """Unix seconds."""
        return float(self.about.get("deadline", math.inf))

    @property
    def busy(self) -> int:
        """Number of calls that are running."""
        return len(self._running)

    def path(self, turn_id: int | None) -> np.ndarray:
        """[tokens] int32 up to the end of a turn; None: nothing."""
        parts = [part for turn in _ancestry(self.turns, turn_id)
                 for part in (turn.added, turn.token_ids)]  # fmt: skip
        return np.concatenate([np.zeros(0, np.int32), *parts])

    def prompt(self, turn: Turn) -> np.ndarray:
        """[tokens] int32 that a turn was sampled after."""
        return np.concatenate([self.path(turn.parent), turn.added])

    def _forget(self, done: "asyncio.Task[tuple[Turn, ...]]", names: Sequence[str]) -> None:
        self._running.discard(done)
        if done.cancelled() or done.exception() is not None:
            for name in names:
                if self._calls.get(name) is done:
                    del self._calls[name]

    async def _sample(self, call: ClientRequest, chat: Chat, generate: Generate, read: Read) -> tuple[Turn, ...]:
        number, self._names = self._names, self._names + 1
        parent, added, history = self._place(call, chat)
        prompt = np.concatenate([self.path(parent), added])
        seed = (self._seed, self.name, number) if call.seed is None else (call.seed,)
        completions = await all_of([
            generate(prompt, f"{self.name}/{number}", index, _number(*seed, index)) for index in range(call.choices)
        ])  # fmt: skip
        async with self._record:  # the order of the turns is that of the journal
            found = []
            for index, (completion, server) in enumerate(completions):
                completion, message, stop = read(prompt, completion)
                found.append(Turn(
                    turn_id=len(self.turns) + index, parent=parent, prompt=len(prompt), added=added,
                    token_ids=completion.token_ids, logprobs=completion.logprobs, versions=completion.versions,
                    forced=completion.forced, finish_reason=completion.finish_reason, index=index, message=message,
                    stop=stop, server=server,
                ))  # fmt: skip
            turns = tuple(found)
            if self._journal is not None:
                record: dict[str, Any] = {"kind": "call", "number": number, "digest": call.digest, "history": history}
                record["turns"] = [turn.to_json() for turn in turns]
                written = asyncio.ensure_future(asyncio.to_thread(self._journal.append, record))
                # If the session is closed meanwhile it fails, and no task waits for it.
                written.add_done_callback(lambda done: done.cancelled() or done.exception())
                await asyncio.shield(written)
            self._add(turns, history)
        return turns

    # ---- the graph

    def _place(self, call: ClientRequest, chat: Chat) -> tuple[int | None, np.ndarray, str]:
        """(parent, tokens added after its path, digest of the messages) of a call's prompt."""
        if call.prompt is not None:
            parent = self._longest(call.prompt)
            return parent, call.prompt[len(self.path(parent)) :], ""
        turn, behind, history = self._extends(call)
        if turn is not None and chat.history == "template":
            rest = chat.continued(self.path(turn.turn_id), call.messages, call.tools, call.template_arguments)
            if rest is not None:
                return turn.turn_id, np.asarray(rest, np.int32), history
        elif turn is not None:
            try:
                reply = chat.reply(call.messages[behind:], call.template_arguments, behind=int(turn.token_ids[-1]))
                return turn.turn_id, np.asarray(reply, np.int32), history
            except ValueError:  # a template that renders such messages only in a whole chat
                pass
        whole = np.asarray(chat.render(call.messages, call.tools, call.template_arguments), np.int32)
        parent = self._longest(whole)
        return parent, whole[len(self.path(parent)) :], history

    def _extends(self, call: ClientRequest) -> tuple[Turn | None, int, str]:
        """The turn that the messages continue, the number of messages up to it, and the digest of all."""
        at, found, behind = _digest("", call.tools), None, 0
        if call.template_arguments:  # with others, what is before the messages may be different
            at = _digest(at, call.template_arguments)
        for number, message in enumerate(call.messages, 1):
            if message["role"] != "assistant":
                at = _digest(at, message)
                continue
            thinking = message.get("reasoning_content")
            without = _digest(at, {**message, "reasoning_content": None})
            same = [turn for turn in self._by_history.get(without, ())
                    if thinking in (None, turn.message.get("reasoning_content"))]  # fmt: skip
            # Of choices that differ only in their thinking, the one whose calls have these ids.
            same = [turn for turn in same if _call_ids(turn.message) == _call_ids(message)] or same
            at = without if same else _digest(at, message)
            found, behind = (same[-1], number) if same else (None, 0)
        return (found, behind, at) if behind < len(call.messages) else (None, 0, at)

    def _longest(self, prompt: np.ndarray) -> int | None:
        """The turn with the longest path that the prompt begins with."""
        best: int | None = None
        longest, stack = 0, list[tuple[int | None, int]]([(None, 0)])
        while stack:
            parent, at = stack.pop()
            for turn in self._children.get(parent, ()):
                middle, end = at + len(turn.added), at + len(turn.added) + len(turn.token_ids)
                if np.array_equal(prompt[at:middle], turn.added) and np.array_equal(prompt[middle:end], turn.token_ids):
                    stack.append((turn.turn_id, end))
                    if end > longest:
                        best, longest = turn.turn_id, end
        return best

    def _add(self, turns: Sequence[Turn], history: str) -> None:
        for turn in turns:
            self.turns.append(turn)
            self.size += turn.size
            self._children[turn.parent].append(turn)
            if history:
                self._by_history[_digest(history, {**turn.message, "reasoning_content": None})].append(turn)

    def _restore(self, journal: Journal) -> None:
        for record in journal.records:
            if record["kind"] == "call":
                turns = tuple(turn_from_json(turn) for turn in record["turns"])
                self._add(turns, record["history"])
                self._names = max(self._names, record["number"] + 1)
                self._journalled[record["digest"]].append(turns)
            elif record["kind"] == "open":
                self.about = record["about"]
            else:
                self.over = True
        if not journal.records:
            journal.append({"kind": "open", "about": self.about, "at": time.time()})
        journal.records.clear()


async def all_of(asked: Sequence[Awaitable[T]]) -> list[T]:
    """Awaits all of them; if one fails the others are cancelled."""
    if len(asked) == 1:  # nearly always, and a task costs more than awaiting it here
        return [await asked[0]]
    tasks = [asyncio.ensure_future(one) for one in asked]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _known(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    return turns


def _digest(before: str, what: object) -> str:
    """Of a message after those of the digest `before`, without the ids that a client gives to tool calls."""
    if isinstance(what, Mapping):
        what = {name: value for name, value in what.items() if value not in (None, [])}
        if "tool_calls" in what:
            what["tool_calls"] = [call["function"] for call in what["tool_calls"]]
    return hashlib.blake2b(_ENCODER.encode([before, what]).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _call_ids(message: Message) -> list[str | None]:
    return [call.get("id") for call in message.get("tool_calls") or ()]


def _number(*parts: object) -> int:
    """64 bits that depend on `parts` alone."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Sessions:
    """The sessions of a gateway, by name.

    folder: of the journals; "": there are none. most_turns: of one session; most_bytes: of all sessions in memory.
    """

    def __init__(self, *, folder: str, seed: int, most: int, most_turns: int, most_bytes: int):
        self.folder, self._seed, self._most_turns = folder, seed, most_turns
        self._most, self._most_bytes = most, most_bytes
        self.open: dict[str, Session] = {}
        self._ended: dict[str, None] = {}  # names, the oldest first

    def find(self, name: str, about: Mapping[str, Any] | None = None, *, journal: bool = True) -> Session:
        """The session of that name; if it is not in memory, it is restored from its journal or created. journal:
        whether it has a journal, if there is a folder.

        Raises SessionOver, SessionsFull, ValueError if its journal is damaged, OSError naming the file.
        """
        if name in self.open:
            return self.open[name]
        if name in self._ended:
            raise SessionOver(f"session {name} is over")
        if len(self.open) >= self._most:
            raise SessionsFull(f"there are {self._most} sessions: DELETE those that are over")
        if sum(session.size for session in self.open.values()) >= self._most_bytes:
            raise SessionsFull(f"the sessions hold {self._most_bytes} bytes: DELETE those that are over")
        written = Journal(self.path(name)) if self.folder and journal else None
        try:
            session = Session(name, seed=self._seed, journal=written, about=about, most_turns=self._most_turns)
        except BaseException:
            if written is not None:
                written.close()
            raise
        self.open[name] = session
        return session

    def known(self, name: str) -> bool:
        """Whether it is open, or has a journal here and was not ended since the gateway started."""
        return name in self.open or bool(self.folder and name not in self._ended and os.path.exists(self.path(name)))

    def path(self, name: str) -> str:
        return os.path.join(self.folder, f"{name}.journal")

    def end(self, name: str) -> None:
        """Ends and drops an open session but keeps its journal; calls with its name are refused from now on."""
        self.open[name].end()
        self.leave(name)

    def leave(self, name: str) -> None:
        """As `end`, but the journal does not record the end: a later process can continue the session."""
        self.open.pop(name).close()
        self._ended[name] = None
        if len(self._ended) > _MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    def close(self) -> None:
        for session in self.open.values():
            session.close()
