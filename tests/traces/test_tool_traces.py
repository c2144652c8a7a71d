"""Traces with calls of tools: what is trained on is an episode of RL, token for token, and what is none is refused."""

import json

import numpy as np
import pytest

from scalerl_jax.config import Config
from scalerl_jax.environments.base import Row
from scalerl_jax.environments.prompts import Prompts, Replies
from scalerl_jax.traces.conversations import Conversations, read_messages
from scalerl_jax.traces.trace_files import FileTraces, Given
from tests.support.chat_folders import chat_folder, two_stops

pytest.importorskip("transformers")
STYLES = ("qwen2_5", "qwen3", "llama3", "deepseek_r1")
NUMBER = {"type": "integer", "description": "a number"}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]
SYSTEM, QUESTION = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3, and 7 more?"}
MORE = {"role": "user", "content": "And 1 more?"}


def call(a: int, b: int, *, name: str | None = "c1", text: bool = True, **fields):
    """An assistant's message that calls `add`."""
    arguments = {"a": a, "b": b}
    function = {"name": "add", "arguments": json.dumps(arguments) if text else arguments}
    one = {"type": "function", "function": function} if name is None else {"id": name, "type": "function"}
    return {"role": "assistant", "content": None, "tool_calls": [{**one, "function": function}], **fields}


def result(content: str, **fields):
    return {"role": "tool", "name": "add", "content": content, **fields}


def config_of(style: str, **environment) -> Config:
    config = Config()
    config.sft.seq_len, config.sft.evaluation_traces = 4000, 0
    if style == "llama3":
        config.environment.template_arguments = {"date_string": "26 Jul 2024"}
    for name, value in environment.items():
        setattr(config.environment, name, value)
    return config


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Whose first stop token ends no turn, as of many instruct models."""
    return {style: two_stops(tmp_path_factory.mktemp(style), style) for style in STYLES}


def trace_of(config, tokenizer, tmp_path, row):
    """(token ids, whether each is trained on) of a file with this row."""
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    config.sft.traces = str(tmp_path / "a.jsonl")
    traces = FileTraces(config, tokenizer, str(tmp_path / "traces"), log=lambda _: None)
    (example,) = traces.batch(0)[:1]
    return example.tokens.tolist(), example.trained.tolist(), traces.notes


def episode_of(config, tokenizer, asked, turns, replies):
    """(token ids, whether each is sampled) of an episode in which the policy writes `turns`."""
    row = Prompts(config, tokenizer).render(Row("", messages=tuple(asked), tools=tuple(TOOLS)))
    tokens, sampled = row.token_ids.tolist(), [False] * len(row.token_ids)
    for turn, reply in zip(turns, [*replies, None]):
        ids = [*tokenizer.encode(turn), tokenizer.stop_ids[1]]
        tokens, sampled = tokens + ids, sampled + [True] * len(ids)
        if reply is not None:
            _, found = Replies(config, tokenizer).encode(row, reply, behind=ids[-1])
            ids = found.token_ids.tolist()
            tokens, sampled = tokens + ids, sampled + [False] * len(ids)
    return tokens, sampled


HERMES = '<tool_call>\n{{"name": "add", "arguments": {{"a": {}, "b": {}}}}}\n</tool_call>'
THOUGHT = "<think>\n{}\n</think>\n\n"
# What the policy writes in an episode, and the same as a trace has it; 12 is the answer, 13 that to one more question.
WRITTEN = {
    "qwen2_5": (
        [HERMES.format(2, 3), "Now 7.\n" + HERMES.format(5, 7), "12", "13"],
        [call(2, 3), {**call(5, 7), "content": "Now 7."}, "12", "13"],
    ),
    "qwen3": (
        [
            THOUGHT.format("First.") + HERMES.format(2, 3),
            THOUGHT.format("Then.") + "Now 7.\n" + HERMES.format(5, 7),
            THOUGHT.format("Done.") + "12",
            THOUGHT.format("Easy.") + "13",
        ],
        [
            call(2, 3, reasoning_content="First."),
            {**call(5, 7), "content": THOUGHT.format("Then.") + "Now 7."},
            THOUGHT.format("Done.") + "12",
            THOUGHT.format("Easy.") + "13",
        ],
    ),
    "llama3": (
        [
            '{"name": "add", "parameters": {"a": 2, "b": 3}}',
            '{"name": "add", "parameters": {"a": 5, "b": 7}}',
            "12",
            "13",
        ],
        [call(2, 3), call(5, 7, text=False), "12", "13"],
    ),
}


@pytest.mark.parametrize("style", WRITTEN)
@pytest.mark.parametrize("tools", ["list", "text", "bare"])
def test_a_trace_is_the_episode_of_the_same_turns(folders, tmp_path, style, tools):
    """With the run's system prompt and suffix; the thinking of turns before another question stays, as in RL."""
    tokenizer = folders[style]
    config = config_of(style, system_prompt="Use tools.", prompt_suffix=" Think.")
    turns, (first, second, third, fourth) = WRITTEN[style]
    results = [result("5", tool_call_id="c1"), result("12"), MORE]
    given = [SYSTEM, QUESTION, first, results[0], second, results[1]]
    given += [{"role": "assistant", "content": third}, MORE, {"role": "assistant", "content": fourth}]
    written = {"list": TOOLS, "text": json.dumps(TOOLS), "bare": [tool["function"] for tool in TOOLS]}[tools]
    tokens, trained, notes = trace_of(config, tokenizer, tmp_path, {"messages": given, "tools": written})
    replies = [[{"role": m["role"], "content": m["content"]}] for m in results]
    assert (tokens, trained) == episode_of(config, tokenizer, [SYSTEM, QUESTION], turns, replies)
    form = "json" if style == "llama3" else "hermes"
    assert [line for line in notes if line.startswith(f"calls of tools are read in the form {form}, as ")]


@pytest.mark.parametrize("style", ["qwen2_5", "qwen3"])
def test_results_of_several_calls_are_one_reply(folders, tmp_path, style):
    both = {**call(2, 3), "tool_calls": [*call(2, 3)["tool_calls"], *call(4, 5, name="c2")["tool_calls"]]}
    answers = [result("9", tool_call_id="c2"), result("5", tool_call_id="c1")]
    given = {"messages": [QUESTION, both, *answers, {"role": "assistant", "content": "5, 9"}], "tools": TOOLS}
    empty = THOUGHT.format("") if style == "qwen3" else ""
    turns = [f"{HERMES.format(2, 3)}\n{HERMES.format(4, 5)}", f"{empty}5, 9"]
    reply = [{"role": "tool", "content": m["content"]} for m in answers]
    tokenizer, config = folders[style], config_of(style)
    tokens, trained, _ = trace_of(config, tokenizer, tmp_path, given)
    expected = episode_of(config, tokenizer, [QUESTION], turns, [reply])
    if style == "qwen3":  # its template writes an empty thought to the last message of a chat
        expected = episode_of(config, tokenizer, [QUESTION], [empty + turns[0], turns[1]], [reply])
    assert (tokens, trained) == expected


def test_turns_of_weight_0_and_what_comes_last_are_not_trained_on(folders, tmp_path):
    """A chat that ends with a call is learned up to that."""
    tokenizer, config = folders["qwen2_5"], config_of("qwen2_5")
    given = [QUESTION, {**call(2, 3), "weight": 0}, result("5"), call(5, 7), result("12")]
    tokens, trained, _ = trace_of(config, tokenizer, tmp_path, {"messages": given, "tools": TOOLS})
    turns = [HERMES.format(2, 3), HERMES.format(5, 7)]
    expected, sampled = episode_of(config, tokenizer, [QUESTION], turns, [[{"role": "tool", "content": "5"}]])
    assert tokens == expected
    assert tokenizer.decode(np.asarray(tokens)[trained].tolist()) == turns[1] + "<|im_end|>"
    assert np.flatnonzero(trained).tolist() == np.flatnonzero(sampled).tolist()[-sum(trained) :]


def test_a_text_with_tools_is_a_chat(folders, tmp_path):
    tokenizer, config = folders["qwen2_5"], config_of("qwen2_5")
    row = {"prompt": QUESTION["content"], "completion": HERMES.format(2, 3), "tools": TOOLS}
    tokens, trained, _ = trace_of(config, tokenizer, tmp_path, row)
    assert (tokens, trained) == episode_of(config, tokenizer, [QUESTION], [HERMES.format(2, 3)], [])


def test_calls_written_in_the_text_as_older_sets_have_them(folders, tmp_path):
    tokenizer, config = folders["qwen2_5"], config_of("qwen2_5")
    said = [("human", QUESTION["content"]), ("gpt", HERMES.format(2, 3)), ("tool", "5"), ("gpt", "5")]
    row = {"messages": [{"from": who, "value": what} for who, what in said], "tools": TOOLS}
    tokens, trained, _ = trace_of(config, tokenizer, tmp_path, row)
    reply = [{"role": "tool", "content": "5"}]
    assert (tokens, trained) == episode_of(config, tokenizer, [QUESTION], [HERMES.format(2, 3), "5"], [reply])


def test_a_template_that_drops_thinking_keeps_it_behind_the_generation_prompt(tmp_path):
    """As DeepSeek-R1's does, of which the generation prompt opens the thinking."""
    tokenizer, jinja = two_stops(tmp_path, "qwen2_5"), tmp_path / "chat_template.jinja"
    text = jinja.read_text(encoding="utf-8")
    dropped = text.replace("n' + message.content }}", "n' + message.content.split('</think>')[-1] }}", 1)
    opened = dropped.replace(
        "'<|im_start|>assistant\\n' }}\n{%- endif", "'<|im_start|>assistant\\n<think>\\n' }}\n{%- endif"
    )
    assert len({text, dropped, opened}) == 3
    jinja.write_text(opened, encoding="utf-8")
    config = config_of("qwen2_5")
    given = [QUESTION, call(2, 3, reasoning_content="First."), result("5")]
    given.append({"role": "assistant", "content": THOUGHT.format("Done.") + "5"})
    tokens, trained, notes = trace_of(config, tokenizer, tmp_path, {"messages": given, "tools": TOOLS})
    turns = ["First.\n</think>\n\n" + HERMES.format(2, 3), "Done.\n</think>\n\n5"]
    assert (tokens, trained) == episode_of(config, tokenizer, [QUESTION], turns, [[{"role": "tool", "content": "5"}]])
    assert [line for line in notes if line.startswith("2 turns stand behind the generation prompt")]


def test_a_template_that_writes_thinking_of_its_own_writes_it_once(tmp_path):
    """As Qwen3.5's does, to which thinking within the content is content."""
    tokenizer, jinja = two_stops(tmp_path, "qwen2_5"), tmp_path / "chat_template.jinja"
    text = jinja.read_text(encoding="utf-8")
    jinja.write_text(text.replace("assistant\\n' + message", "assistant\\n<think>\\n\\n</think>\\n\\n' + message"))
    assert jinja.read_text(encoding="utf-8") != text
    given = {"messages": [QUESTION, {**call(2, 3), "content": THOUGHT.format("First.") + "So:"}], "tools": TOOLS}
    tokens, trained, _ = trace_of(config_of("qwen2_5"), tokenizer, tmp_path, given)
    turn = THOUGHT.format("First.") + "So:\n" + HERMES.format(2, 3)
    assert (tokens, trained) == episode_of(config_of("qwen2_5"), tokenizer, [QUESTION], [turn], [])


def test_columns_that_a_table_fills_with_nulls(folders, tmp_path):
    """A struct of a Parquet file has the keys of all rows."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    other = {"name": "say", "arguments": {"text": "hi"}}
    both = [call(2, 3, text=False), {**call(0, 0), "tool_calls": [{"id": "c1", "type": "function", "function": other}]}]
    said = [[QUESTION, one, result("5"), {"role": "assistant", "content": "5"}] for one in both]
    table = arrow.table({"messages": said, "tools": [TOOLS, TOOLS]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert parquet.read_table(tmp_path / "a.parquet")["messages"][0].as_py()[0]["tool_calls"] is None
    config = config_of("qwen2_5")
    config.sft.traces = str(tmp_path / "a.parquet")
    traces = FileTraces(config, folders["qwen2_5"], str(tmp_path / "traces"), log=lambda _: None)
    texts = [folders["qwen2_5"].decode(example.tokens.tolist()) for example in traces.batch(0)[:2]]
    assert sum('{"name": "say", "arguments": {"text": "hi"}}' in text for text in texts) == 1
    assert sum(HERMES.format(2, 3) in text for text in texts) == 1


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"tool_calls": "add"}, "message 2: tool_calls is str, not a list"),
        ({"tool_calls": {"name": "add"}}, "message 2: tool_calls is dict, not a list"),
        ({"tool_calls": ["add"]}, "message 2: a call of tool_calls is not"),
        ({"tool_calls": [{"function": {"arguments": {}}}]}, "message 2: a call of tool_calls is not"),
        ({"tool_calls": [{"function": {"name": "add", "arguments": "{'a': 1}"}}]}, "the arguments of add are not JSON"),
        ({"tool_calls": [{"function": {"name": "add", "arguments": "[1]"}}]}, "the arguments of add are list, not an"),
        ({"content": "Five."}, "message 3 is of the role tool, and no call with the id 'c1' waits for a result there"),
        (call(2, 3, name="other"), "message 3 is of the role tool, and no call with the id 'c1' waits"),
    ],
)
def test_what_is_no_call_or_result(message, said):
    chat = [QUESTION, {"role": "assistant", "content": None, **message}, result("5", tool_call_id="c1")]
    with pytest.raises(ValueError, match=said) as raised:
        read_messages(chat)
    assert "\n" not in str(raised.value)


def test_more_results_than_calls():
    one = result("5")
    for chat in ([one], [QUESTION, one], [QUESTION, call(2, 3), one, one], [QUESTION, call(2, 3), one, MORE, one]):
        with pytest.raises(ValueError, match=rf"message {len(chat)} is of the role tool, and no call waits"):
            read_messages(chat)
    assert len(read_messages([QUESTION, call(2, 3, name=None), result("5", tool_call_id="c9")])) == 3


@pytest.mark.parametrize(
    ("style", "row", "said"),
    [
        ("qwen2_5", {"tools": "[add"}, "'tools': is neither a list of tools nor JSON: "),
        ("qwen2_5", {"tools": {"name": "add"}}, "'tools': is dict, not a list of tools"),
        ("qwen2_5", {"tools": [{"type": "function"}]}, "'tools': tool 1 has no name"),
        ("qwen2_5", {"messages": [QUESTION, call(1, 2), call(3, 4)]}, "messages 2 and 3 are both the assistant's"),
        (
            "llama3",
            {"messages": [QUESTION, {**call(1, 2), "content": "So:"}]},
            ".*leaves out what is said beside a call",
        ),
        ("deepseek_r1", {"messages": [QUESTION, call(1, 2)]}, ".*jinja: the chat template does not know tools"),
        (
            "deepseek_r1",
            {"messages": [QUESTION, call(1, 2, reasoning_content="So.")], "tools": None},
            ".*jinja: the chat template does not write",
        ),
    ],
)
def test_a_bad_trace_is_one_line_with_its_row(folders, tmp_path, style, row, said):
    row = {"messages": [QUESTION, {"role": "assistant", "content": "4"}], "tools": TOOLS, **row}
    with pytest.raises(ValueError, match=rf"^{tmp_path}/a\.jsonl row 1: {said}") as raised:
        trace_of(config_of(style), folders[style], tmp_path, row)
    assert "\n" not in str(raised.value)


def test_traces_that_differ_in_their_calls_or_tools_alone_are_two():
    one, two = ({"messages": [QUESTION, call(a, 3)]} for a in (1, 2))
    given = [
        Given("", messages=read_messages(row["messages"]), tools=t) for row, t in ((one, ()), (two, ()), (one, TOOLS))
    ]
    assert len({trace.hashes()[0] for trace in given}) == 3 and len({trace.hashes()[1] for trace in given}) == 1


def test_chats_without_tools_are_as_they_were(tmp_path):
    """Thinking that the template drops is context there, since nothing replies in an episode's way."""
    tokenizer = chat_folder(tmp_path, "qwen3")
    chat = [QUESTION, {"role": "assistant", "content": THOUGHT.format("So.") + "12"}]
    trace = Conversations(config_of("qwen3"), tokenizer).turns([*chat, MORE, chat[1]])
    assert "".join(piece.text for piece in trace.pieces).count("So.") == 1
