"""The rows of a run: the two sides kept apart, and files with mistakes in them."""

import hashlib
import json
import math
import re
import shutil

import numpy as np
import pytest

from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.environments.base import Row, Stratum, asked
from scalerl_jax.environments.load import digest, load_rows, make_environment, place_of
from scalerl_jax.environments.tokenizer import Tokenizer
from tests.environments import odd


def jsonl(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def file_config(tmp_path, train, validation):
    config = Config()
    config.environment.name = "math"
    config.environment.train = jsonl(tmp_path / "train.jsonl", train)
    config.environment.validation = jsonl(tmp_path / "validation.jsonl", validation)
    return config


def test_the_prompt_is_its_tokens(tokenizer):
    for prompt in load_rows(Config(), tokenizer).train[:20]:
        assert prompt.token_ids.dtype == np.int32
        assert tokenizer.decode(prompt.token_ids.tolist()) == prompt.text
        assert eval(prompt.text.rstrip("=")) == int(prompt.answer)


def test_a_prompt_over_the_limit_is_refused_or_left_out(tokenizer):
    config = Config()
    config.rollout.max_prompt_tokens = 10
    with pytest.raises(
        ValueError, match=r"problem .*=: the prompt has 1\d tokens, config.rollout.max_prompt_tokens is 10"
    ):
        load_rows(config, tokenizer)
    config.environment.long_prompts = "drop"
    rows = load_rows(config, tokenizer)
    for split in (rows.train, rows.held_out):
        assert split and max(len(row.token_ids) for row in split) <= 10
        assert [row.index for row in split] == list(range(len(split)))
    left_out = config.environment.train_prompts + config.evaluation.prompts - len(rows.train) - len(rows.held_out)
    (line,) = [line for line in rows.notes if "longer" in line]
    text = f"prompts left out since they are longer than config.rollout.max_prompt_tokens=10: {left_out:,}, as problem "
    assert line.startswith(text)


def test_of_prompts_that_are_left_out_for_their_length_others_are_held_out(tokenizer, tmp_path):
    rows = [{"prompt": f"{n}" * (1 + 9 * (n % 3 == 0)), "answer": "1"} for n in range(60)]
    config = file_config(tmp_path, rows, [])
    config.environment.validation, config.evaluation.prompts = "", 20
    config.rollout.max_prompt_tokens, config.environment.long_prompts = 8, "drop"
    found = load_rows(config, tokenizer)
    assert len(found.held_out) == 20 and len(found.train) == 20
    assert max(len(row.token_ids) for row in (*found.train, *found.held_out)) <= 8


def test_files(tokenizer, tmp_path):
    config = file_config(
        tmp_path,
        [{"prompt": "one?", "answer": "1"}, "\n", {"prompt": "half?", "answer": 0.5, "source": "kept"}],
        [{"prompt": f"{i}?", "answer": str(i), "task": "algebra"} for i in range(5)],
    )
    config.evaluation.prompts = 3
    rows = load_rows(config, tokenizer)
    assert [(p.index, p.text, p.answer) for p in rows.train] == [(0, "one?", "1"), (1, "half?", "0.5")]
    lowest = sorted((hashlib.blake2b(f"{i}?".encode(), digest_size=16).digest(), f"{i}?") for i in range(5))[:3]
    assert [(p.index, p.text) for p in rows.held_out] == [(n, text) for n, (_, text) in enumerate(lowest)]
    assert {p.task for p in rows.train} == {""} and {p.task for p in rows.held_out} == {"algebra"}
    assert [p.name for p in rows.train] == [f"{config.environment.train} row {n}" for n in (1, 3)]
    assert [p.extra for p in rows.train] == [
        {"prompt": "one?", "answer": "1"},
        {"prompt": "half?", "answer": 0.5, "source": "kept"},
    ]


MALFORMED = [
    ("{not json\n", r"train\.jsonl row 2: is not JSON"),
    ("[1, 2]\n", r"train\.jsonl row 2: is not a JSON object"),
    ({"prompt": "x?"}, r"train\.jsonl row 2: has no 'answer' \(keys: prompt; wanted: prompt, answer; config\."),
    ({"question": "x?", "answer": 1}, r"train\.jsonl row 2: has no 'prompt' \(keys: question, answer; wanted: p"),
    ({"prompt": "x?", "answer": True}, r"train\.jsonl row 2: 'answer' is not a text"),
    ({"prompt": "x?", "answer": None}, r"train\.jsonl row 2: 'answer' is not a text"),
    ("[" * 100_000 + "\n", r"train\.jsonl row 2: is not JSON"),
    ('{"prompt": "x?", "answer": ' + 5_000 * "9" + "}\n", r"train\.jsonl row 2: is not JSON"),
    ({"prompt": "x?", "answer": math.nan}, r"train\.jsonl row 2: 'answer' is not a text"),
    ('{"prompt": "x?", "answer": 1e999}\n', r"train\.jsonl row 2: 'answer' is not a text"),
    ({"prompt": "  ", "answer": "1"}, r"train\.jsonl row 2: 'prompt' is not a text, or is empty"),
    ({"prompt": "\ud83d", "answer": "1"}, r"train\.jsonl row 2: 'prompt' is no text: half of a surrogate pair"),
    ({"prompt": "x?", "answer": "1", "task": [3]}, r"train\.jsonl row 2: 'task' is not a text"),
    ({"prompt": ["x?"], "answer": "1"}, r"train\.jsonl row 2: message 1 of 'prompt' is not an object with 'role'"),
    ({"prompt": [], "answer": "1"}, r"train\.jsonl row 2: 'prompt' has no messages"),
    (
        {"prompt": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}], "answer": "1"},
        r"train\.jsonl row 2: the last message of 'prompt' is the assistant's",
    ),
]


@pytest.mark.parametrize(("row", "message"), MALFORMED)
def test_a_bad_row_is_named(tokenizer, tmp_path, row, message):
    config = file_config(tmp_path, [{"prompt": "one?", "answer": "1"}, row], [{"prompt": "two?", "answer": "2"}])
    with pytest.raises(ValueError, match=message):
        load_rows(config, tokenizer)
    config.environment.max_malformed_rows = 1
    rows = load_rows(config, tokenizer)
    assert [row.text for row in rows.train] == ["one?"]
    assert re.search("^malformed rows left out: 1: .*" + message, rows.notes[0])


def test_malformed_rows_are_skipped_up_to_the_limit(tokenizer, tmp_path):
    train = [{"prompt": "one?", "answer": "1"}, *(row for row, _ in MALFORMED)]
    config = file_config(tmp_path, train, [{"prompt": "two?", "answer": "2"}, "{"])
    config.environment.max_malformed_rows = len(MALFORMED) + 1
    rows = load_rows(config, tokenizer)
    assert [row.text for row in rows.train] == ["one?"] and [row.text for row in rows.held_out] == ["two?"]
    assert rows.notes[0].startswith(f"malformed rows left out: {len(MALFORMED) + 1}: ")
    assert "validation.jsonl row 2: is not JSON" in rows.notes[0] and rows.notes[0].endswith("; ...")
    config.environment.max_malformed_rows -= 1
    with pytest.raises(
        ValueError, match=r"^config\.environment\.max_malformed_rows=16: there are more malformed rows: .*"
    ):
        load_rows(config, tokenizer)


def test_a_repeated_prompt_is_kept_once_and_counted(tokenizer, tmp_path):
    train = [
        {"prompt": "one?", "answer": "1"},
        {"prompt": "one?", "answer": "1"},
        {"prompt": "three?", "answer": "3"},
        {"prompt": " one? ", "answer": "7"},
    ]
    config = file_config(tmp_path, train, [{"prompt": "two?", "answer": "2"}, {"prompt": "two?", "answer": "2"}])
    rows = load_rows(config, tokenizer)
    assert [(row.text, row.answer) for row in rows.train] == [("one?", "1"), ("three?", "3")]
    assert [row.text for row in rows.held_out] == ["two?"]
    here = config.environment.train
    assert rows.notes == [
        f"rows left out since they repeat a prompt: 3, as {config.environment.validation} row 2 that of "
        f"{config.environment.validation} row 1",
        f"of them with another answer than the row that is kept: 1, as {here} row 4 (7) and {here} row 1 (1)",
        "2 training prompts, 1 held out",
    ]


def test_a_training_prompt_that_is_held_out_is_left_out(tokenizer, tmp_path):
    config = file_config(
        tmp_path,
        [{"prompt": f"{n}?", "answer": "1"} for n in range(6)],
        [{"prompt": f"{n} ?" if n == 3 else f"{n}?", "answer": "1"} for n in range(2, 5)],
    )
    config.evaluation.prompts = 1  # those that are not asked this time are no training prompts either
    rows = load_rows(config, tokenizer)
    assert [row.text for row in rows.train] == ["0?", "1?", "3?", "5?"] and len(rows.held_out) == 1
    (line,) = [line for line in rows.notes if "prompt is held out" in line]
    assert line == (
        f"training rows left out since their prompt is held out: 2, as {config.environment.train} row 3 that of "
        f"{config.environment.validation} row 1"
    )


@pytest.mark.parametrize("validation", [True, False])
@pytest.mark.parametrize(
    ("system_prompt", "role", "template"),
    [
        ("Be brief.", "system", "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"),
        ("", "assistant", "{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}<assistant>"),
    ],
)
def test_prompts_are_the_same_by_what_is_asked(tokenizer, tmp_path, system_prompt, role, template, validation):
    """The first message differs: the system's, which the config replaces, or one that the template does not show."""
    shutil.copytree(tokenizer.path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(template)

    def row(first, asked):
        messages = [{"role": role, "content": first}, {"role": "user", "content": f"{asked}?"}]
        return {"prompt": messages if first else f"{asked}?", "answer": "1"}

    held_out = [row("You are kind.", n) for n in range(8)]
    config = file_config(
        tmp_path, [row(f"Be {n}.", n % 16) for n in range(32)] + ([] if validation else held_out), held_out * validation
    )
    config.environment.system_prompt, config.environment.chat_template = system_prompt, "always"
    config.environment.decontaminate = jsonl(tmp_path / "tests.jsonl", [row("Test!", 15), row("", 14)])
    config.evaluation.prompts = 4
    if not validation:
        config.environment.validation = ""
    rows = load_rows(config, Tokenizer(str(tmp_path)))
    asked = [row.messages[-1]["content"] for row in rows.held_out]
    trained = [row.messages[-1]["content"] for row in rows.train]
    assert len(set(asked)) == len(asked) == 4 and len(set(trained)) == len(trained)
    assert not set(asked) & set(trained)
    if system_prompt and validation:  # those that are not asked this time are no training prompts either
        assert set(trained) <= {f"{n}?" for n in range(8, 16)}
    if system_prompt:
        assert not {"14?", "15?"} & set(trained)


def test_without_rows_for_validation_the_lowest_are_taken_out_of_the_training_rows(tokenizer, tmp_path):
    texts = [f"{n}?" for n in range(200)]
    config = file_config(tmp_path, [{"prompt": text, "answer": "1"} for text in texts], [])
    config.environment.validation, config.evaluation.prompts = "", 50
    rows = load_rows(config, tokenizer)
    by_hash = sorted(texts, key=lambda text: hashlib.blake2b(text.encode(), digest_size=16).digest())
    assert [row.text for row in rows.held_out] == by_hash[:50]
    assert [row.text for row in rows.train] == [text for text in texts if text not in by_hash[:50]]
    assert [row.index for row in rows.train] == list(range(150)) and rows.strata == [Stratum("", 1.0, range(150))]
    assert rows.notes == ["150 training prompts, 50 held out of the same rows"]
    config.evaluation.prompts = 200
    with pytest.raises(
        ValueError, match=r"^config\.evaluation\.prompts=200: there are 200 prompts in all, and none is"
    ):
        load_rows(config, tokenizer)


def test_validation_rows_that_are_all_left_out_are_an_error(tokenizer, tmp_path):
    config = file_config(tmp_path, [{"prompt": "1?", "answer": "1"}], [{"prompt": "2?"}])
    config.environment.max_malformed_rows = 1
    with pytest.raises(ValueError, match=r"^config\.environment\.validation: no prompt is left"):
        load_rows(config, tokenizer)


def test_what_is_evaluated_on_is_never_filtered(tokenizer, tmp_path):
    train = [{"prompt": f"{n}?", "answer": "1", "level": n} for n in range(6)]
    config = file_config(
        tmp_path, train, [{"prompt": "a?", "answer": "2"}, {"prompt": "b?", "answer": "2", "level": 1}]
    )
    config.environment.filter = "level >= 3"
    rows = load_rows(config, tokenizer)
    assert [row.text for row in rows.train] == ["3?", "4?", "5?"]
    assert {row.text for row in rows.held_out} == {"a?", "b?"}
    config.environment.validation, config.evaluation.prompts = "", 1  # taken out of rows that are for training
    rows = load_rows(config, tokenizer)
    assert sorted(row.text for row in (*rows.train, *rows.held_out)) == ["3?", "4?", "5?"]


def test_long_answers_that_differ_are_cut_in_what_is_said(tokenizer, tmp_path):
    train = [{"prompt": "1?", "answer": "a\n" * 500}, {"prompt": "1?", "answer": "b" * 81}]
    rows = load_rows(file_config(tmp_path, train, [{"prompt": "2?", "answer": "2"}]), tokenizer)
    (line,) = [line for line in rows.notes if "another answer" in line]
    assert f"row 2 ({'b' * 77}...)" in line and f"row 1 ({'a ' * 38}a...)" in line


def test_sources_with_weights_are_strata_of_their_own(tokenizer, tmp_path):
    for name, count in (("a", 3), ("b", 5)):
        jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{n}?", "answer": "1"} for n in range(count)])
    config = file_config(tmp_path, [], [{"prompt": "two?", "answer": "2"}])
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    config.environment.train = f"{a}*3, {b}"
    rows = load_rows(config, tokenizer)
    assert rows.strata == [Stratum(str(a), 0.75, range(3)), Stratum(str(b), 0.25, range(3, 8))]
    assert [row.source for row in rows.train] == 3 * [str(a)] + 5 * [str(b)]
    config.environment.train = f"{a},{b}"
    rows = load_rows(config, tokenizer)
    assert rows.strata == [Stratum("", 1.0, range(8))] and {row.source for row in rows.train} == {""}
    config.environment.train = f"{a}*3,{b}"
    config.environment.filter = "not prompt.startswith('b')"
    with pytest.raises(ValueError, match=r"^config\.environment\.train: no training prompt of .*b\.jsonl is left"):
        load_rows(config, tokenizer)


def test_where_nothing_is_left_it_is_said_why(tokenizer, tmp_path):
    config = file_config(tmp_path, [{"prompt": "1?", "answer": "1", "level": 2}, "{"], [])
    config.environment.validation, config.environment.filter = "", "level > 2"
    config.environment.max_malformed_rows = 1
    expected = (
        r"^config\.environment\.train: no training prompt is left; malformed rows left out: 1: .*; "
        r"rows left out by config\.environment\.filter: 1$"
    )
    with pytest.raises(ValueError, match=expected):
        load_rows(config, tokenizer)


def test_a_mixture_has_its_environments_one_behind_the_other(tokenizer, tmp_path):
    for name, count in (("a", 3), ("b", 5)):
        rows = [{"prompt": f"{name}{n}?", "answer": "1"} for n in range(count)]
        jsonl(tmp_path / f"{name}.jsonl", [*rows, {"prompt": "both?", "answer": "1"}])
    config = Config()
    config.evaluation.prompts = 2
    words = EnvironmentConfig(name="math", train=f"{tmp_path}/a.jsonl*3,{tmp_path}/b.jsonl*1", weight=2.0)
    config.mixture = {"sums": EnvironmentConfig(train_prompts=7), "words": words}
    rows = load_rows(config, tokenizer)
    assert {row.environment for row in rows.train[:7]} == {row.environment for row in rows.held_out[:2]} == {"sums"}
    assert {row.environment for row in rows.train[7:]} == {row.environment for row in rows.held_out[2:]} == {"words"}
    assert len(rows.train) == 7 + 9 - 2 and len(rows.held_out) == 4
    for split in (rows.train, rows.held_out):
        assert [row.index for row in split] == list(range(len(split)))
    sums, a, b = rows.strata
    assert sums == Stratum("sums", 1.0, range(7))
    assert (a.name, a.weight, b.name, b.weight) == (
        f"words:{tmp_path}/a.jsonl",
        1.5,
        f"words:{tmp_path}/b.jsonl",
        0.5,
    )
    assert [*a.rows, *b.rows] == list(range(7, 14))
    for stratum in (a, b):
        assert {f"words:{rows.train[n].source}" for n in stratum.rows} == {stratum.name}
    assert rows.notes == [
        "sums: 7 training prompts, 2 held out",
        f"words: rows left out since they repeat a prompt: 1, as {tmp_path}/b.jsonl row 6 that of "
        f"{tmp_path}/a.jsonl row 4",
        "words: 7 training prompts, 2 held out of the same rows",
    ]


def test_a_prompt_is_in_one_environment_of_a_mixture_only(tokenizer, tmp_path):
    a = jsonl(tmp_path / "a.jsonl", [{"prompt": f"{n}?", "answer": "1"} for n in range(6)])
    b = jsonl(tmp_path / "b.jsonl", [{"prompt": f"{n}?", "answer": "1"} for n in range(3, 10)])
    held = jsonl(tmp_path / "held.jsonl", [{"prompt": "1?", "answer": "1"}])
    config = Config()
    config.evaluation.prompts = 1
    config.mixture = {
        "a": EnvironmentConfig(name="math", train=a),
        "b": EnvironmentConfig(name="math", train=b, validation=held),
    }
    rows = load_rows(config, tokenizer)
    texts = [row.text for row in (*rows.train, *rows.held_out)]
    assert sorted(texts) == [f"{n}?" for n in range(10)]  # each once
    assert [row.text for row in rows.held_out if row.environment == "b"] == ["1?"]
    assert {row.text for row in rows.train if row.environment == "b"} == {"6?", "7?", "8?", "9?"}


def test_a_fault_in_a_mixture_names_its_field(tokenizer, tmp_path):
    config = Config()
    config.mixture = {"sums": EnvironmentConfig(), "words": EnvironmentConfig(name="math", train="absent.jsonl")}
    with pytest.raises(ValueError, match=r"^config\.mixture\.words\.train=absent\.jsonl: No such file or directory$"):
        load_rows(config, tokenizer)
    config.mixture["words"].name = "maths"
    with pytest.raises(ValueError, match=r"^config\.mixture\.words\.name='maths': is not one of arithmetic, "):
        load_rows(config, tokenizer)


def test_other_prompts_or_answers_or_another_order_have_another_digest():
    rows = [Row(f"{n}?", "1", index=n) for n in range(5)]
    assert 0 <= digest(rows) < 2**63 and 0 <= digest([]) < 2**63
    chats = [({"role": "user", "content": f"{n}?"},) for n in range(5)]
    assert digest(rows) == digest([Row(f"On 1 Jan: {n}?", "1", messages=chats[n], index=9) for n in range(5)])
    system = {"role": "system", "content": "Be brief."}
    others = (
        rows[::-1],
        rows[:4],
        [*rows[:4], Row("4? ", "1")],
        [*rows[:4], Row("4?", "2")],
        [*rows[:4], Row("4?", "1", messages=(system, *chats[4]))],
        [],
    )
    assert len({digest(rows), *map(digest, others)}) == 7


def test_how_prompts_are_rendered_makes_no_other_rows(tokenizer, tmp_path):
    """A template that writes today's date renders other prompts tomorrow."""
    config = file_config(
        tmp_path, [{"prompt": f"{n}?", "answer": "1"} for n in range(3)], [{"prompt": "a?", "answer": 1}]
    )
    today = load_rows(config, tokenizer)
    config.environment.system_prompt, config.environment.prompt_suffix = "Be brief.", "!"
    tomorrow = load_rows(config, tokenizer)
    assert [row.text for row in tomorrow.train] == [f"Be brief.\n\n{n}?!" for n in range(3)]
    assert digest(today.train) == digest(tomorrow.train)
    assert [asked(row) for row in tomorrow.train] == [f"{n}?" for n in range(3)]  # what a reward gets as the prompt
    jsonl(tmp_path / "train.jsonl", [{"prompt": f"{n}?", "answer": "1" if n else "2"} for n in range(3)])
    assert digest(load_rows(config, tokenizer).train) != digest(today.train)


def test_a_missing_or_empty_file_is_named(tokenizer, tmp_path):
    config = file_config(tmp_path, [], [])
    with pytest.raises(ValueError, match=r"^config\.environment\.validation=.*validation\.jsonl: no prompts there"):
        load_rows(config, tokenizer)
    config.environment.validation = ""
    with pytest.raises(ValueError, match=r"^config\.environment\.train=.*train\.jsonl: no prompts there"):
        load_rows(config, tokenizer)
    config.environment.train = str(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match=r"config\.environment\.train=.*absent\.jsonl: No such file"):
        load_rows(config, tokenizer)
    config.environment.train = ""
    with pytest.raises(ValueError, match=r"config\.environment\.train: no file is given"):
        load_rows(config, tokenizer)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9", "answer": "1"}\n')
    config.environment.train = str(tmp_path / "latin.jsonl")
    with pytest.raises(ValueError, match=r"latin\.jsonl row 1: is not UTF-8"):
        load_rows(config, tokenizer)


def test_an_environment_that_there_is_not_is_named():
    config = Config()
    config.environment.name = "arithmatic"
    with pytest.raises(ValueError, match=r"^config\.environment\.name='arithmatic': is not one of arithmetic, math"):
        make_environment(config)


def test_an_environment_is_a_file(tokenizer):
    config = odd.config(filter="bonus != 0.25")
    config.evaluation.prompts = 2
    rows = load_rows(config, tokenizer)
    assert [(row.index, row.text, row.answer) for row in rows.train] == [(0, "train 0?", "0"), (1, "train 2?", "2")]
    assert len(rows.held_out) == 2
    assert tokenizer.decode(rows.train[0].token_ids.tolist()) == "train 0?" and rows.train[1].extra == {"bonus": 0.5}
    assert rows.notes[0] == f"rows left out by config.environment.filter: 1, as {odd.__file__}:Odd train row 2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" ", "an environment has no name"),
        ("math500*3", r"'math500\*3': has a weight, and nothing is drawn from it"),
        ("no_such", "'no_such' is not one of arithmetic, "),
        ("math", "math: of which rows"),
    ],
)
def test_what_is_no_place(text, expected):
    with pytest.raises(ValueError, match=f"^{expected}"):
        place_of(text)


@pytest.mark.parametrize("name", ["arithmetic", "programs", "reasoning_gym:chain_sum"])
@pytest.mark.parametrize("field", ["train", "validation"])
def test_data_for_an_environment_that_makes_its_own_problems_are_refused(name, field):
    config = Config()
    config.environment.name = name
    setattr(config.environment, field, "gsm8k:mine.jsonl")
    expected = (
        rf"^config\.environment\.{field}=gsm8k:mine\.jsonl: is not read, since config\.environment\.name={name} makes "
    )
    with pytest.raises(ValueError, match=expected + "its own problems; math or code has those of files and data sets$"):
        make_environment(config)
