"""The token graph of a session, its journal, and retries: with a real chat template, and completions made up here."""

import asyncio
import dataclasses
import functools
import gc
import math
import os
import pathlib
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.config import ObjectiveConfig
from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments import Row
from scalerl_jax.environments.base import RIGHT, WRONG
from scalerl_jax.environments.chat_template import read_chat_template
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.gateway import openai_wire
from scalerl_jax.gateway.agents import completions_of
from scalerl_jax.gateway.chat import Chat, NotRendered
from scalerl_jax.gateway.journal import Journal
from scalerl_jax.gateway.sessions import Branch, ClientRequest, Session, SessionOver, Sessions, Turn, branches
from scalerl_jax.learner.batch import build
from tests.learner.test_batch import Group
from tests.support.chat_folders import chat_folder

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
WORDS = ("Two and two: ", "2+2=4.", "reason ", "é", "boxed", " step\n", "<tool_call>{}</tool_call>", CALL)
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}},)


class Client:
    """A client of one session, and the generator behind it; both do what `rng` says."""

    def __init__(self, chat: Chat, rng: random.Random, *, journal: Journal | None = None):
        self.chat, self.rng = chat, rng
        self.session = Session("s", journal=journal)
        self.sampled = 0  # completions
        self.cut: dict[int, Completion] = {}  # id of what was sampled -> what is left of it
        # Of each turn, by its number: what was fed, what was sampled, and who asked.
        self.fed: dict[int, tuple[np.ndarray, Completion]] = {}
        self.asked: dict[int, ClientRequest] = {}

    async def generate(
        self, made_of: dict[int, Any], prompt: np.ndarray, name: str, index: int, seed: int
    ) -> tuple[Completion, str]:
        self.sampled += 1
        for _ in range(self.rng.randrange(4)):  # calls that run beside each other end in any order
            await asyncio.sleep(0)
        tokenizer, rng = self.chat.tokenizer, self.rng
        # As no tokenizer would cut it, so that what is tokenized again is never the same.
        ids = [one for character in self.say(index) for one in tokenizer.encode(character)]
        finish = rng.choice(["stop", "stop", "length"])
        ids += [tokenizer.eos_id] if finish == "stop" else []
        forced = ((1, 3),) if len(ids) > 5 and rng.random() < 0.2 else ()
        whole, logprobs = ((7, 0, len(ids)),), -np.ones(len(ids), np.float32)
        made = Completion(1, name, index, np.asarray(ids, np.int32), logprobs, whole, forced, finish)
        made_of[index] = prompt, made
        return made, rng.choice(["a:1 x", "b:2 y"])

    def say(self, choice: int) -> str:
        text = "".join(self.rng.choices(WORDS, k=self.rng.randint(1, 4)))
        return text if self.rng.random() < 0.5 else f"<think>\n{self.rng.choice(WORDS)}\n</think>\n\n{text}"

    def read(self, prompt: np.ndarray, completion: Completion) -> tuple[Completion, Any, str | None]:
        cut, text, stop = self.chat.text(completion, ["and two"] if self.rng.random() < 0.3 else [])
        self.cut[id(completion)] = cut
        return cut, self.chat.message(prompt, cut, text, tools=True), stop

    async def ask(self, call: ClientRequest) -> tuple[Turn, ...]:
        made_of: dict[int, tuple[np.ndarray, Completion]] = {}  # by choice; stays empty if it was asked before
        generate = functools.partial(self.generate, made_of)
        turns = await self.session.ask(call, chat=self.chat, generate=generate, read=self.read)
        for turn in turns if made_of else ():
            prompt, made = made_of[turn.index]
            self.fed[turn.turn_id], self.asked[turn.turn_id] = (prompt, self.cut[id(made)]), call
        return turns

    def edited(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What a harness does to a history."""
        rng, kept = self.rng, [dict(message) for message in messages]
        kind = rng.choice(["none", "none", "thinking", "rewrite", "cut", "compact", "insert"])
        at = rng.randrange(len(kept))
        if kind == "thinking":
            for message in kept[: at + 1]:
                message.pop("reasoning_content", None)
        elif kind == "rewrite":
            kept[at]["content" if rng.random() < 0.7 else "reasoning_content"] = rng.choice(WORDS)
        elif kind == "cut":
            kept = kept[: at + 1]
        elif kind == "compact":
            kept = [{"role": "user", "content": "so far: reason"}, *kept[at + 1 :]]
        elif kind == "insert":
            kept[at:at] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": rng.choice(WORDS)}]
        return kept

    def call(self, name: str, history: list[dict[str, Any]]) -> ClientRequest:
        rng, messages = self.rng, list(history)
        calls = messages[-1].get("tool_calls", ()) if messages else ()
        messages += [{"role": "tool", "tool_call_id": one["id"], "content": rng.choice(WORDS)} for one in calls]
        if messages:
            messages = self.edited(messages)
        if not messages or rng.random() < (0.9 if messages[-1]["role"] != "tool" else 0.2):
            messages.append({"role": rng.choice(["user", "user", "system"]), "content": rng.choice(WORDS)})
        prompt, tools = None, rng.choice([(), TOOLS])
        if rng.random() < 0.1 and self.session.turns:  # tokens, as some clients ask
            path = self.session.path(rng.randrange(len(self.session.turns)))
            prompt = np.concatenate([path[: rng.randint(1, len(path))], np.asarray([3, 4], np.int32)])
        return ClientRequest(name, tuple(messages), tools, prompt=prompt, choices=rng.choice([1, 1, 3]))

    async def edits(self, count: int) -> None:
        histories: list[list[dict[str, Any]]] = [[]]
        while count > 0:
            beside = self.rng.choice([1, 1, 1, 3])  # agents within the agent
            calls = [self.call(f"{count} {one}", self.rng.choice(histories[-4:])) for one in range(beside)]
            for call, turns in zip(calls, await asyncio.gather(*map(self.ask, calls)), strict=True):
                histories += [[*call.messages, dict(turn.message)] for turn in turns]
            count -= beside


def check(client: Client) -> None:
    """What holds of every session, however its client went about."""
    session, fed = client.session, client.fed
    assert len(session.turns) == len(fed)
    rows = branches(session.turns)
    check_completions(session, rows)
    trained = dict.fromkeys(range(len(fed)), 0)
    for row in rows:
        by_turn = {len(session.path(turn_id)): session.turns[turn_id] for turn_id in row.turns}
        leaf = session.turns[row.turns[-1]]
        prompt, completion = fed[leaf.turn_id]
        np.testing.assert_array_equal(row.token_ids, np.concatenate([prompt, completion.token_ids]))
        assert len(row.loss) == len(row.logprobs) == len(row.steps) == len(row.token_ids)
        for end, turn in by_turn.items():
            # Every turn of the branch was fed what the branch has before it.
            np.testing.assert_array_equal(fed[turn.turn_id][0], row.token_ids[: turn.prompt])
            sampled = fed[turn.turn_id][1].sampled()
            loss = row.loss[turn.prompt : end]
            assert not loss.any() or np.array_equal(loss, sampled)
            trained[turn.turn_id] += int(loss.any())
        assert row.loss.sum() == sum(row.loss[turn.prompt : end].sum() for end, turn in by_turn.items())
    for turn_id, (prompt, completion) in fed.items():
        assert trained[turn_id] == int(completion.sampled().any())
        assert is_what_was_asked(client, turn_id, prompt.tolist())


def check_completions(session: Session, rows: list[Branch]) -> None:
    """What an agent's run is trained on: the same."""
    for row, (completion, parts) in zip(rows, completions_of(session), strict=True):
        behind = session.turns[row.turns[0]].prompt
        assert completion.prompt is not None
        np.testing.assert_array_equal(np.concatenate([completion.prompt, completion.token_ids]), row.token_ids)
        np.testing.assert_array_equal(completion.sampled(), row.loss[behind:])
        np.testing.assert_array_equal(completion.token_steps(), row.steps[behind:])
        np.testing.assert_array_equal(completion.logprobs, row.logprobs[behind:])
        by_turn = [session.turns[turn_id] for turn_id in row.turns]
        ends = [len(session.path(turn_id)) - behind for turn_id in row.turns]
        assert [(" ".join(part.process), part.end) for part in parts] == list(zip([t.server for t in by_turn], ends))
        first = [turn for end, turn in zip(ends, by_turn) if row.loss[behind + end - len(turn.token_ids) :][:1].any()]
        assert completion.interrupted == any(turn.forced for turn in first)


def is_what_was_asked(client: Client, turn_id: int, prompt: list[int]) -> bool:
    """The tokens asked, or the messages rendered, or the path of a turn that they go on from with what is behind it."""
    session, chat, call = client.session, client.chat, client.asked[turn_id]
    if call.prompt is not None:
        return prompt == call.prompt.tolist()
    parent, messages = session.turns[turn_id].parent, call.messages
    said = [at for at, message in enumerate(messages, 1) if message["role"] == "assistant"]
    if parent is not None and said and said[-1] < len(messages):
        turn, last = session.turns[parent], dict(messages[said[-1] - 1])
        thinking = last.pop("reasoning_content", None)
        same = last == {name: value for name, value in turn.message.items() if name != "reasoning_content"}
        if same and thinking in (None, turn.message.get("reasoning_content")):
            behind = chat.reply(messages[said[-1] :], behind=int(turn.token_ids[-1]))
            if prompt == [*session.path(parent).tolist(), *behind]:
                return True
    return prompt == chat.render(messages, call.tools)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    """Of a template that drops the thinking of earlier turns, as Qwen3's does."""
    return chat_of(tmp_path_factory.mktemp("model"), "qwen3")


def chat_of(folder: pathlib.Path, style: str) -> Chat:
    chat_folder(folder, style)
    tokenizer = Tokenizer(str(folder))
    return Chat(tokenizer, read_chat_template(str(folder)), end_of_thinking="</think>")


def run(chat: Chat, seed: int, count: int) -> None:
    client, other = (Client(chat, random.Random(seed + i)) for i in range(2))
    asyncio.run(client.edits(count))
    asyncio.run(other.edits(2))
    check(client)
    check_weights(client.session, other.session)


def check_weights(*sessions: Session) -> None:
    """A group of these, and as another prompt's the same: each token that was sampled has a weight, together 1/2."""
    whole = [[completion for completion, _ in completions_of(session)] for session in sessions]
    rows = tuple(dataclasses.replace(first, others=tuple(others)) for first, *others in whole)
    groups = [Group(Row("", "", index=i), rows, (RIGHT, WRONG)) for i in range(2)]
    batch = build(groups, ObjectiveConfig(truncated="penalize", filter_zero_variance=False), number=8)
    for prompt in range(2):
        weights = [one.weights for one, (p, _, _) in zip(batch.segments, batch.origins, strict=True) if p == prompt]
        assert sum(float(one.astype(np.float64).sum()) for one in weights) == pytest.approx(1 / 2, rel=1e-6)
        sampled = sum(int(branch.sampled().sum()) for branches in whole for branch in branches)
        assert sum(np.count_nonzero(one) for one in weights) == sampled


@settings(max_examples=3)
@given(seed=st.integers(0, 2**32))
def test_a_branch_is_what_was_fed_and_each_sampled_token_is_in_one_loss(chat: Chat, seed: int) -> None:
    run(chat, seed, 12)


@pytest.mark.slow
@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_branches_over_thousands_of_edits(chat: Chat, seed: int) -> None:
    run(chat, seed, 40)


def ask(client: Client, *calls: ClientRequest) -> list[tuple[Turn, ...]]:
    async def all_of_them() -> list[tuple[Turn, ...]]:
        return [await client.ask(call) for call in calls]

    return asyncio.run(all_of_them())


USER = {"role": "user", "content": "2+2?"}


def test_the_next_turn_begins_with_the_path_and_the_separator(chat: Chat) -> None:
    tokenizer, turn, tried = chat.tokenizer, None, 0
    while turn is None or turn.finish_reason != "stop" or "reasoning_content" not in turn.message or turn.stop:
        client = Client(chat, random.Random(tried))
        ((turn,),) = ask(client, ClientRequest("1", (USER,)))
        tried += 1
    bare = {name: value for name, value in turn.message.items() if name != "reasoning_content"}
    for number, said in enumerate(
        [turn.message, bare, {**bare, "reasoning_content": "other"}, {**bare, "content": "5"}]
    ):
        ((then,),) = ask(client, ClientRequest(f"then {number}", (USER, said, {"role": "user", "content": "So?"})))
        assert then.parent == (turn.turn_id if number < 2 else None)
        if number < 2:
            assert tokenizer.decode(then.added.tolist()) == (
                "\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
            )


class Calling(Client):
    """Its choices call the same tool after other thoughts."""

    def say(self, choice: int) -> str:
        return f"<think>\n{choice}\n</think>\n\n{CALL}"


def test_the_ids_of_calls_say_which_choice_goes_on(chat: Chat) -> None:
    client = Calling(chat, random.Random(0))
    (choices,) = ask(client, ClientRequest("1", (USER,), TOOLS, choices=3))
    for turn in choices:
        assert turn.message["tool_calls"], "cut by a stop string"
        said = {name: value for name, value in turn.message.items() if name != "reasoning_content"}
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "4"}
        ((then,),) = ask(client, ClientRequest(f"then {turn.turn_id}", (USER, said, result), TOOLS))
        assert then.parent == turn.turn_id


def test_thinking_of_others_is_part_of_the_history(chat: Chat) -> None:
    client = Client(chat, random.Random(2))
    others = [{"role": "assistant", "content": "4", "reasoning_content": thinking} for thinking in ("a", "b")]
    ((turn,),) = ask(client, ClientRequest("1", (USER, others[0], USER)))
    parents = [
        ask(client, ClientRequest(other["reasoning_content"], (USER, other, USER, turn.message, USER)))
        for other in others
    ]
    assert [then.parent for ((then,),) in parents] == [turn.turn_id, None]


def test_siblings_and_other_tools_begin_at_their_own_node(chat: Chat) -> None:
    client = Client(chat, random.Random(5))
    ((first, second, third),) = ask(client, ClientRequest("1", (USER,), choices=3))
    assert [turn.index for turn in (first, second, third)] == [0, 1, 2] and first.parent is None
    assert len(branches(client.session.turns)) == 3
    ((then,),) = ask(client, ClientRequest("2", (USER, second.message, USER)))
    assert then.parent == second.turn_id


def test_a_request_gives_arguments_of_the_template(chat: Chat) -> None:
    def call(digest: str, thinks: bool, *messages: Any) -> ClientRequest:
        return ClientRequest(digest, messages, template_arguments={"enable_thinking": thinks})

    body = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}}
    assert openai_wire.chat(body).template_arguments == {"enable_thinking": False}
    client = Client(chat, random.Random(5))
    ((turn,),) = ask(client, call("1", False, USER))
    begins = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert chat.tokenizer.decode(turn.added.tolist()).endswith(begins)
    then, other = [ask(client, call(f"{thinks}", thinks, USER, turn.message, USER))[0][0] for thinks in (False, True)]
    assert then.parent == turn.turn_id and chat.tokenizer.decode(then.added.tolist()).endswith(begins)
    assert not chat.tokenizer.decode(other.added.tolist()).endswith(begins)
    for wrong, said in (("messages", "not for it to give"), ("no_such", "does not read 'no_such'")):
        with pytest.raises(NotRendered, match=f"chat_template_kwargs: .*{said}"):
            chat.render((USER,), (), {wrong: 1})


@pytest.mark.parametrize("again", [{"key": "k"}, {"retry": True}], ids=["key", "retry"])
def test_what_is_asked_for_again_is_sampled_once(chat: Chat, again: dict[str, Any]) -> None:
    client = Client(chat, random.Random(7))

    async def dropped() -> tuple[Turn, ...]:
        first = asyncio.ensure_future(client.ask(ClientRequest("1", (USER,), key=again.get("key", ""))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()  # the connection is gone, and the turn goes on
        turns = await client.ask(ClientRequest("1", (USER,), **again))
        assert await client.ask(ClientRequest("1", (USER,), **again)) is turns
        return turns

    turns = asyncio.run(dropped())
    assert client.session.turns == list(turns) and client.sampled == 1
    ask(client, ClientRequest("1", (USER,)))  # asked for anew
    assert client.sampled == 2


def test_what_fails_is_sampled_again(chat: Chat) -> None:
    client = Client(chat, random.Random(7))
    whole: Callable[..., Any] = client.generate

    async def fail(*_: object) -> Completion:
        raise ConnectionError("gone")

    client.generate = fail  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        ask(client, ClientRequest("1", (USER,), key="k", choices=2))
    client.generate = whole  # type: ignore[method-assign]
    assert len(ask(client, ClientRequest("1", (USER,), key="k", retry=True, choices=2))[0]) == 2


def test_a_journal_answers_what_it_has_and_goes_on(chat: Chat, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "s.journal")
    before = Client(chat, random.Random(11), journal=Journal(path))
    asyncio.run(before.edits(6))
    calls = [ClientRequest("a", (USER,)), ClientRequest("a", (USER,)), ClientRequest("b", (USER,), choices=2, key="k")]
    answered = ask(before, *calls)
    before.session.close()
    with open(path, "ab") as file:
        file.write(b"\x10\x00\x00\x00torn")

    after = Client(chat, random.Random(12), journal=Journal(path))
    assert [turn.to_json() for turn in after.session.turns] == [turn.to_json() for turn in before.session.turns]
    again = ask(after, *calls, calls[2])
    assert [[turn.turn_id for turn in turns] for turns in again] == [
        [turn.turn_id for turn in turns] for turns in [*answered, answered[2]]
    ]
    assert not after.sampled
    last = answered[0][0]
    ((then,),) = ask(after, ClientRequest("c", (USER, last.message, USER)))
    assert then.turn_id == len(before.session.turns) and then.parent is not None
    after.session.end()
    over = Session("s", journal=Journal(path))
    assert over.over and len(over.turns) == then.turn_id + 1


def test_a_session_may_be_closed_while_a_record_is_written(chat: Chat, tmp_path: pathlib.Path) -> None:
    journal = Journal(str(tmp_path / "s.journal"))
    client = Client(chat, random.Random(7), journal=journal)
    begun, closed, append, faults = threading.Event(), threading.Event(), journal.append, list[Any]()

    def late(record: Any) -> None:
        begun.set()
        closed.wait(600)
        append(record)

    journal.append = late  # type: ignore[method-assign]

    async def close() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: faults.append(context))
        asked = asyncio.ensure_future(client.ask(ClientRequest("1", (USER,))))
        await asyncio.to_thread(begun.wait, 60)
        client.session.close()
        closed.set()
        await asyncio.gather(asked, return_exceptions=True)
        await loop.shutdown_default_executor()
        await asyncio.sleep(0)
        gc.collect()

    asyncio.run(close())
    assert not faults and not client.session.turns


def test_a_damaged_journal_is_named(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "s.journal")
    journal = Journal(path)
    journal.append({"a": 1})
    journal.append({"a": 2})
    journal.close()
    data = bytearray(pathlib.Path(path).read_bytes())
    data[10] ^= 1
    pathlib.Path(path).write_bytes(data)
    with pytest.raises(ValueError, match=r"s\.journal: the record at byte 0 is damaged"):
        Journal(path)
    data[10] ^= 1
    for length in (0, 2**31):  # of the first record: what is behind it is not cut off
        pathlib.Path(path).write_bytes(length.to_bytes(4, "little") + data[4:])
        with pytest.raises(ValueError, match="the record at byte 0 is damaged"):
            Journal(path)
        assert os.path.getsize(path) == len(data)
    pathlib.Path(path).write_bytes(data[:-1])
    whole = Journal(path)
    assert [record["a"] for record in whole.records] == [1] and os.path.getsize(path) == len(data) // 2
    whole.close()


def test_a_journal_that_fails_is_closed(tmp_path: pathlib.Path) -> None:
    sessions = Sessions(folder=str(tmp_path), seed=0, most=10, most_turns=10, most_bytes=2**20)
    with pytest.raises(ValueError, match="not JSON compliant"):
        sessions.find("a", {"x": math.inf})
    assert not sessions.find("a").turns
    sessions.close()


def test_a_session_has_an_end(chat: Chat) -> None:
    client = Client(chat, random.Random(1))
    client.session = Session("s", most_turns=2)
    ask(client, ClientRequest("1", (USER,)))
    with pytest.raises(SessionOver, match="has 1 turns, and 2 may be"):
        ask(client, ClientRequest("2", (USER,), choices=2))
    ((turn,),) = ask(client, ClientRequest("2", (USER,)))
    client.session.end()
    with pytest.raises(SessionOver, match="is over"):
        ask(client, ClientRequest("3", (USER,)))
    assert ask(client, ClientRequest("2", (USER,), retry=True)) == [(turn,)]


def test_a_stop_string_keeps_the_tokens_up_to_the_one_that_completes_it(chat: Chat) -> None:
    ids = np.asarray(chat.tokenizer.encode("Zwei é und zwei"), np.int32)
    whole = Completion(1, "g", 0, ids, -np.ones(len(ids), np.float32), ((3, 0, len(ids)),), ((0, 2),), "length")
    cut, text, stop = chat.text(whole, ["und", "é u"])
    assert (text, stop, cut.finish_reason) == ("Zwei ", "é u", "stop")
    assert chat.tokenizer.decode(cut.token_ids.tolist()).endswith("é u")
    assert "é u" not in chat.tokenizer.decode(cut.token_ids[:-1].tolist())
    assert len(cut.logprobs) == len(cut.token_ids) and cut.versions == ((3, 0, len(cut.token_ids)),)
    assert chat.text(whole, ["nie"]) == (whole, "Zwei é und zwei", None)
