"""Traces of files: what is read, what is left out and counted, what is held out, and that they are tokenized once."""

import copy
import json
import random
import re

import numpy as np
import pytest

from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.traces import trace_files
from tests.support.chat_folders import chat_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_folder(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture
def config():
    config = Config()
    config.sft.seq_len, config.sft.rows_per_step = 128, 2
    return config


def write(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def pair(i, prompt=None):
    return {"prompt": prompt or f"{i}+1=", "completion": f"<think>{i}</think>{i + 1}"}


def read(config, tokenizer, folder, *, begun=False, **fields):
    for name, value in fields.items():
        setattr(config.sft, name, value)
    return trace_files.FileTraces(config, tokenizer, str(folder), begun=begun, log=lambda _: None)


def texts(tokenizer, examples):
    return [tokenizer.decode(example.tokens.tolist()) for example in examples]


def epoch(traces, tokenizer, count):
    """The first `count` traces that are trained on."""
    found, update = [], 0
    while len(found) < count:
        found += texts(tokenizer, traces.batch(update))
        update += 1
    return found[:count]


# ---- What is read --------------------------------------------------------------------------------------------------


def test_prompts_and_completions(config, tokenizer, tmp_path):
    """Token for token: the prompt is context, the completion and its end are trained on."""
    traces = read(config, tokenizer, tmp_path / "t", traces=write(tmp_path / "a.jsonl", [pair(1)]))
    (example,) = traces.batch(0)[:1]
    prompt, completion = tokenizer.encode("1+1="), tokenizer.encode("<think>1</think>2")
    assert example.tokens.tolist() == [*prompt, *completion, tokenizer.eos_id]
    assert example.trained.tolist() == [False] * len(prompt) + [True] * (len(completion) + 1)
    assert example.tokens.dtype == np.int32
    assert traces.longest == len(example.tokens)
    assert traces.notes[-1] == f"1 traces, {len(example.tokens)} tokens"


def test_messages_of_a_parquet_file_and_columns_by_name(config, tokenizer, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    chats = [
        [{"from": "human", "value": f"{i}+1?"}, {"from": "gpt", "value": f"<think>\n{i}\n</think>\n\n{i + 1}"}]
        for i in range(3)
    ]
    parquet.write_table(
        arrow.table({"id": [1, 2, 3], "data": [{"chat": chat} for chat in chats]}), tmp_path / "a.parquet"
    )
    config.sft.columns.messages = "data.chat"
    traces = read(config, tokenizer, tmp_path / "t", traces=str(tmp_path / "a.parquet"))
    assert sorted(epoch(traces, tokenizer, 3)) == [
        f"<|im_start|>user\n{i}+1?<|im_end|>\n<|im_start|>assistant\n<think>\n{i}\n</think>\n\n{i + 1}<|im_end|>"
        for i in range(3)
    ]
    assert traces.notes[0].startswith("3 prompts are rendered by the chat template in ")


def test_messages_in_both_columns(config, tokenizer, tmp_path):
    question = [{"role": "user", "content": "1+1?"}]
    answer = [{"role": "assistant", "content": "2"}]
    rows = [{"prompt": question, "completion": answer}, {"prompt": question, "completion": "2"}]
    rows.append({"prompt": "1+1?", "completion": answer, "messages": "not looked at"})
    traces = read(config, tokenizer, tmp_path / "t", traces=write(tmp_path / "a.jsonl", rows))
    assert len(set(epoch(traces, tokenizer, 3))) == 1


def test_several_sources(config, tokenizer, tmp_path):
    a, b = write(tmp_path / "a.jsonl", [pair(1)]), write(tmp_path / "b.jsonl", ["\ufeff" + json.dumps(pair(2)) + "\n"])
    assert len(epoch(read(config, tokenizer, tmp_path / "t", traces=f"{a},{b}"), tokenizer, 2)) == 2
    with pytest.raises(ValueError, match=r"config\.sft\.traces=.*\*2: traces are not drawn by weights"):
        read(config, tokenizer, tmp_path / "t", traces=f"{a}*2")


def test_what_is_no_place_of_traces(config, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"config\.sft\.traces=gsm8k: gsm8k is a layout of problems, not of traces"):
        read(config, tokenizer, tmp_path / "t", traces="gsm8k")


def test_a_data_set_of_the_hub(config, tokenizer, tmp_path, monkeypatch):
    """Its training split; without a layout its columns are the config's."""
    from scalerl_jax.environments.data import hub

    asked = []

    def rows(name, splits, **_):
        asked.append((name.repository, *splits))
        yield "org/chats row 1", {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]}

    monkeypatch.setattr(hub, "read_rows", rows)
    config.sft.columns.messages = "conversations"
    traces = read(config, tokenizer, tmp_path / "t", traces="org/chats")
    assert asked == [("org/chats", "train")]
    assert epoch(traces, tokenizer, 1)[0].startswith("<|im_start|>user\n1+1?<|im_end|>")
    read(config, tokenizer, tmp_path / "t")
    assert len(asked) == 1


def test_the_config_s_prompts_are_those_of_the_traces(config, tokenizer, tmp_path):
    config.environment.chat_template, config.environment.prompt_suffix = "always", " Think."
    traces = read(config, tokenizer, tmp_path / "t", traces=write(tmp_path / "a.jsonl", [pair(1)]))
    assert epoch(traces, tokenizer, 1) == [
        "<|im_start|>user\n1+1= Think.<|im_end|>\n<|im_start|>assistant\n<think>\n1\n</think>\n\n2<|im_end|>"
    ]


# ---- What is left out ----------------------------------------------------------------------------------------------

BROKEN = [
    ("{\n", "row 2: is not JSON"),
    ("[1]\n", "row 2: is not a JSON object"),
    (
        {"prompt": "a", "answer": "b"},
        r"row 2: is no trace \(keys: prompt, answer; wanted: prompt and completion, or mess",
    ),
    ({"prompt": "a", "completion": " "}, "row 2: 'completion' is not a text, or is empty"),
    ({"prompt": None, "completion": "b"}, "row 2: 'prompt' is not a text, or is empty"),
    ({"prompt": "a", "completion": "\ud800"}, "row 2: 'completion' is no text: half of a surrogate pair"),
    ({"messages": "a"}, "row 2: .*messages"),
    ({"messages": [{"role": "user", "content": "a"}]}, "row 2: none of the messages is an answer of the assistant"),
    ({"messages": [{"role": "user"}]}, "row 2: 'messages': message 1 has no text as its role and its content"),
    (
        {"messages": [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "a"}]},
        "row 2: 'messages': message 1 is no text",
    ),
]


@pytest.mark.parametrize(("row", "said"), BROKEN)
def test_a_malformed_row_is_named_or_skipped(config, tokenizer, tmp_path, row, said):
    file = write(tmp_path / "a.jsonl", [pair(1), row, pair(2)])
    with pytest.raises(ValueError, match=rf"^{file} {said}[^\n]*$"):
        read(config, tokenizer, tmp_path / "t", traces=file)
    assert not (tmp_path / "t").exists()
    traces = read(config, tokenizer, tmp_path / "t", traces=file, max_malformed_rows=1)
    assert len(set(epoch(traces, tokenizer, 2))) == 2
    assert re.match(rf"malformed rows left out: 1: {file} {said}", traces.notes[0])


def test_one_malformed_row_too_many(config, tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", [pair(1), "{\n", "[]\n"])
    with pytest.raises(ValueError, match=r"config\.sft\.max_malformed_rows=1: there are more.*row 2: .*row 3: "):
        read(config, tokenizer, tmp_path / "t", traces=file, max_malformed_rows=1)


def test_long_traces_are_refused_or_dropped_and_counted(config, tokenizer, tmp_path):
    rows = [pair(1), {"prompt": "2", "completion": "9" * 20}, {"prompt": "3", "completion": "9" * 200}]
    file = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match=r"row 3: has 202 tokens, a row holds 129 \(config\.sft\.seq_len\); .*=drop"):
        read(config, tokenizer, tmp_path / "t", traces=file)
    traces = read(config, tokenizer, tmp_path / "t", traces=file, long_traces="drop", max_tokens=22)
    assert traces.longest == 22
    assert traces.notes[-2].startswith("1 traces are too long and are left out, as ")
    assert traces.notes[-2].endswith("row 3: has 202 tokens, a row holds 22 (config.sft.max_tokens=22)")
    with pytest.raises(ValueError, match=r"config\.sft\.max_tokens=130: a row holds 129 tokens"):
        read(config, tokenizer, tmp_path / "t", max_tokens=130)


@pytest.mark.parametrize("rows", [[], ["\n", "\n"]])
def test_no_traces(config, tokenizer, tmp_path, rows):
    file = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match=rf"config\.sft\.traces={file}: no traces there"):
        read(config, tokenizer, tmp_path / "t", traces=file)


def test_no_file(config, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"config\.sft\.traces=.*absent\.jsonl"):
        read(config, tokenizer, tmp_path / "t", traces=str(tmp_path / "absent.jsonl"))


# ---- What is held out ----------------------------------------------------------------------------------------------


def test_the_held_out_traces_do_not_move_and_are_never_trained_on(config, tokenizer, tmp_path):
    rows = [pair(i) for i in range(40)]
    asked = {"evaluation_traces": 5}
    traces = read(config, tokenizer, tmp_path / "t", traces=write(tmp_path / "a.jsonl", rows), **asked)
    held_out = texts(tokenizer, traces.evaluation())
    assert len(set(held_out)) == 5
    assert set(epoch(traces, tokenizer, 200)).isdisjoint(held_out)
    assert traces.notes[-1].endswith("; 5 are held out")

    random.Random(0).shuffle(rows)
    again = read(config, tokenizer, tmp_path / "t", traces=write(tmp_path / "b.jsonl", rows), **asked)
    assert texts(tokenizer, again.evaluation()) == held_out

    more = read(
        config, tokenizer, tmp_path / "t", traces=write(tmp_path / "c.jsonl", [pair(i) for i in range(80)]), **asked
    )
    kept = set(texts(tokenizer, more.evaluation()))
    both = set(held_out) | {text for text in kept if int(text.partition("+")[0]) >= 40}
    assert kept <= both and len(kept) == 5  # whoever is new there is a new trace


def test_what_has_a_held_out_prompt_is_not_trained_on(config, tokenizer, tmp_path):
    """Several completions of each prompt, some of them twice."""
    rows = [pair(i, prompt=f"{i % 8}?") for i in range(32)] * 2
    traces = read(config, tokenizer, tmp_path / "t", traces=write(tmp_path / "a.jsonl", rows), evaluation_traces=3)
    prompts = {text.partition("?")[0] for text in texts(tokenizer, traces.evaluation())}
    left = 8 * (8 - len(prompts))
    trained = epoch(traces, tokenizer, left)
    assert {text.partition("?")[0] for text in trained}.isdisjoint(prompts)
    assert len(trained) == 2 * len(set(trained))
    assert traces.notes[-1].startswith(f"{left} traces, ")
    assert traces.notes[-1].endswith(f"; 3 are held out, and {64 - left - 3} with the same prompts left out")


def test_chats_that_begin_as_a_held_out_one_are_not_trained_on(config, tokenizer, tmp_path):
    """All their turns are, so the beginning of a longer chat would be a held-out chat, prompt and answer."""
    rows = []
    for i in range(12):
        chat = [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}]
        rows.append({"messages": chat})
        system = [{"role": "system", "content": "Be brief."}] if i % 2 else []
        more = [{"role": "user", "content": "More?"}, {"role": "assistant", "content": f"{i}!!"}]
        rows.append({"messages": [*system, *chat, *more]})
    traces = read(config, tokenizer, tmp_path / "t", traces=write(tmp_path / "a.jsonl", rows), evaluation_traces=4)
    begin = re.compile(r"user\n(\d+)\?")
    asked = {begin.search(text)[1] for text in texts(tokenizer, traces.evaluation())}
    left = 24 - 2 * len(asked)
    trained = [begin.search(text)[1] for text in epoch(traces, tokenizer, left)]
    assert asked.isdisjoint(trained) and len(trained) == 2 * len(set(trained)) == left
    assert traces.notes[-1].endswith(f"; 4 are held out, and {24 - 4 - left} with the same prompts left out")


def test_prompts_that_differ_in_white_space_alone_are_one(config, tokenizer, tmp_path):
    rows = [pair(i, prompt=f"{i % 10}{space}+ 1?") for i, space in enumerate([" "] * 10 + ["\n"] * 10 + ["  "] * 10)]
    chats = [
        {"messages": [{"role": "user", "content": f" {i} + 1?\n"}, {"role": "assistant", "content": "x"}]}
        for i in range(10)
    ]
    file = write(tmp_path / "a.jsonl", rows + chats)
    traces = read(config, tokenizer, tmp_path / "t", traces=file, evaluation_traces=5)
    first = re.compile(r"(\d)\s+\+ 1\?")
    asked = {first.search(text)[1] for text in texts(tokenizer, traces.evaluation())}
    trained = {first.search(text)[1] for text in epoch(traces, tokenizer, 40 - 4 * len(asked))}
    assert asked.isdisjoint(trained) and len(asked) + len(trained) == 10


def test_all_would_be_held_out(config, tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", [pair(i) for i in range(4)])
    with pytest.raises(ValueError, match=r"config\.sft\.evaluation_traces=4: there are 4 traces, and none is left"):
        read(config, tokenizer, tmp_path / "t", traces=file, evaluation_traces=4)


# ---- Once ----------------------------------------------------------------------------------------------------------


def test_traces_are_tokenized_once(config, tokenizer, tmp_path, monkeypatch):
    file = write(tmp_path / "a.jsonl", [pair(i) for i in range(9)])
    first = read(config, tokenizer, tmp_path / "t", traces=file, evaluation_traces=2)
    batches = [texts(tokenizer, first.batch(update)) for update in range(5)]
    monkeypatch.setattr(Tokenizer, "encode_all", None)
    again = read(config, tokenizer, tmp_path / "t")
    assert [texts(tokenizer, again.batch(update)) for update in (3, 0)] == [batches[3], batches[0]]
    assert texts(tokenizer, again.evaluation()) == texts(tokenizer, first.evaluation())
    assert again.notes == first.notes


@pytest.mark.parametrize("fields", [{"evaluation_traces": 1}, {"seq_len": 64}, {"max_tokens": 60}])
def test_traces_of_another_config_are_tokenized_anew(config, tokenizer, tmp_path, fields):
    """And what fails takes nothing away."""
    file = tmp_path / "a.jsonl"
    first = read(config, tokenizer, tmp_path / "t", traces=write(file, [pair(i) for i in range(9)]))
    before = texts(tokenizer, first.batch(0))
    file.unlink()
    with pytest.raises(ValueError, match=r"a\.jsonl"):
        read(copy.deepcopy(config), tokenizer, tmp_path / "t", begun=True, **fields)
    assert texts(tokenizer, read(config, tokenizer, tmp_path / "t", begun=True).batch(0)) == before


@pytest.mark.parametrize("where", ["*.jsonl", "", "*.json[l]"])
def test_a_pattern_or_folder_that_is_gone_is_no_matter_once_there_is_a_checkpoint(config, tokenizer, tmp_path, where):
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "a.jsonl", [pair(1)])
    first = read(config, tokenizer, tmp_path / "t", traces=f"{folder}/{where}")
    (folder / "a.jsonl").unlink()
    for _ in range(2):
        again = read(config, tokenizer, tmp_path / "t", begun=True)
        assert again.notes[0].endswith("has changed; goes on with the traces it began with")
        assert texts(tokenizer, again.batch(0)) == texts(tokenizer, first.batch(0))
        with pytest.raises(ValueError, match=r"config\.sft\.traces=.*data"):
            read(config, tokenizer, tmp_path / "t")
        if folder.exists():
            folder.rmdir()


@pytest.mark.parametrize("taken", [True, False])
def test_it_goes_on_without_taking_all_updates_again(config, tokenizer, tmp_path, monkeypatch, taken):
    """From what a checkpoint says was taken; without that by taking them. One order is made for each epoch."""
    file = write(tmp_path / "a.jsonl", [pair(i) for i in range(40)])
    first = read(config, tokenizer, tmp_path / "t", traces=file)
    batches = [texts(tokenizer, first.batch(update)) for update in range(29)]
    position = first.taken
    batches += [texts(tokenizer, first.batch(update)) for update in range(29, 32)]
    fills, made = [], []
    monkeypatch.setattr(trace_files, "fill", lambda *a, fill=trace_files.fill, **k: fills.append(0) or fill(*a, **k))
    again = read(config, tokenizer, tmp_path / "t")
    default_rng = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: made.append(seed) or default_rng(seed))
    if taken:
        again.go_on(29, position)
    assert [texts(tokenizer, again.batch(update)) for update in (29, 30, 31)] == batches[29:]
    assert len(fills) == (3 if taken else 32)
    epochs = [seed[-1] for seed in made]
    assert epochs == sorted(set(epochs))


def shared(**fields):
    parts = {name: EnvironmentConfig(name="math", train=f"{name}.jsonl", weight=2.0) for name in ("a", "b")}
    for part in parts.values():
        for name, value in fields.items():
            setattr(part, name, value)
    return parts


def test_of_a_mixture_prompts_are_as_its_parts_have_them(config, tokenizer, tmp_path):
    config.mixture = shared(chat_template="always", prompt_suffix=" Think.")
    file = write(tmp_path / "a.jsonl", [pair(1)])
    traces = read(config, tokenizer, tmp_path / "t", traces=file)
    assert epoch(traces, tokenizer, 1)[0].startswith("<|im_start|>user\n1+1= Think.<|im_end|>")
    config.mixture["b"].prompt_suffix = ""
    said = r"^config\.sft\.traces=.*: how .* config\.mixture\.a\.prompt_suffix=' Think\.', config\.mixture\.b\.prompt_s"
    with pytest.raises(ValueError, match=said):
        read(config, tokenizer, tmp_path / "t")
    config.mixture = shared(chat_template="never")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ValueError, match=r"row 1: .*config\.mixture\.a\.chat_template=never"):
        read(config, tokenizer, tmp_path / "t", traces=write(tmp_path / "c.jsonl", [{"messages": chat}]))


@pytest.mark.parametrize("gone", [True, False])
def test_files_that_changed_count_until_there_is_a_checkpoint(config, tokenizer, tmp_path, gone):
    file = tmp_path / "a.jsonl"
    first = read(config, tokenizer, tmp_path / "t", traces=write(file, [pair(1)]))
    if gone:
        file.unlink()
    else:
        write(file, [pair(2), pair(3)])
    again = read(config, tokenizer, tmp_path / "t", begun=True)
    assert again.notes == [
        f"config.sft.traces={file}: has changed; goes on with the traces it began with",
        *first.notes,
    ]
    assert set(epoch(again, tokenizer, 9)) == {"1+1=<think>1</think>2<|im_end|>"}
    if gone:
        with pytest.raises(ValueError, match=r"config\.sft\.traces=.*a\.jsonl"):
            read(config, tokenizer, tmp_path / "t")
    else:
        assert len(set(epoch(read(config, tokenizer, tmp_path / "t"), tokenizer, 2))) == 2
