"""Rows of every known layout, and of none: what becomes of columns, and what is said of those that do not fit."""

import json

import pyarrow
import pytest
from pyarrow import parquet

from scalerl_jax.config import Config
from scalerl_jax.environments.data import layouts
from scalerl_jax.environments.data.columns import MalformedRows
from scalerl_jax.environments.data.layouts import LAYOUTS
from scalerl_jax.environments.data.reader import Reader
from scalerl_jax.environments.data.sources import parse, weights
from tests.environments.data.published import ASKED, LOOKS, PUBLISHED


def config_of(train, **fields):
    config = Config()
    config.environment.name, config.environment.train = "math", train
    for name, value in fields.items():
        setattr(config.environment, name, value)
    return config


def rows_of(config, split="train", **options):
    return list(Reader(config, **options).rows(split))


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_every_layout_is_tried_here():
    assert set(PUBLISHED) == set(LAYOUTS)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_layout(tmp_path, name, kind):
    columns, expected = PUBLISHED[name]
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist([columns]), path)
    else:
        jsonl(path, [columns])
    (row,) = rows_of(config_of(f"{name}:{path}"), kind=LAYOUTS[name].kind)
    assert (row.text, row.answer, row.task) == expected and row.chat and row.name == f"{path} row 1"
    assert row.messages == (({"role": "user", "content": "Solve: 2+2?"},) if columns.get("prompt") == ASKED else ())
    assert row.extra == {**dict.fromkeys(row.extra), **columns}


def test_open_r1s_form_of_dapo(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "2+2?", "solution": "4", "data_source": "math_dapo"}])
    (row,) = rows_of(config_of(f"dapo:{path}"))
    assert (row.text, row.answer, row.messages, row.chat) == ("2+2?", "4", (), True)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_rows_of_a_layout_are_known_where_it_was_not_named(tmp_path, name):
    columns, _ = PUBLISHED[name]
    assert layouts.looks_like(columns, LAYOUTS[name].kind) == LOOKS.get(name, name)
    if name in ("gsm8k", "math500", "livecodebench"):
        path = jsonl(tmp_path / "rows.jsonl", [columns])
        with pytest.raises(
            ValueError, match=rf"^{path} row 1: has no 'prompt' \(keys: .*\); that looks like {name}: {name}:{path}"
        ):
            rows_of(config_of(path))


def test_rows_of_other_kinds_in_a_data_set_are_left_out(tmp_path):
    rows = [PUBLISHED[name][0] for name in ("intellect2", "intellect2_code", "intellect2")]
    path = jsonl(tmp_path / "rows.jsonl", [*rows, {**rows[0], "task_type": None}])
    reader = Reader(config_of(f"intellect2:{path}"))
    assert [row.name for row in reader.rows("train")] == [f"{path} row 1", f"{path} row 3"]
    assert reader.notes() == ["rows left out since their 'task_type' is not verifiable_math: 2 (intellect2)"]


def test_a_list_of_lists_is_rows_with_numbers_for_columns(tmp_path):
    columns, expected = PUBLISHED["orz"]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([list(columns.values())]))
    (row,) = rows_of(config_of(f"orz:{path}"))
    assert (row.text, row.answer, row.task) == expected


@pytest.mark.parametrize(
    ("answer", "column", "expected"),
    [
        ('["\\\\frac{1}{2}"]', "answer", "'answer' is a list of 1; answer.0 is the first of it"),
        ([4, 5], "answer", "'answer' is a list of 2; answer.0 is the first of it"),
        ('{"ground_truth": "4"}', "answer", r"'answer' is an object \(keys: ground_truth\); answer.KEY is what"),
        ('["4"]', "answer.0", ""),
        ("{'ground_truth': '4'}", "answer.ground_truth", ""),
        ("[4, 5]", "answer", ""),  # an interval, as mathematics writes it
    ],
)
def test_an_answer_that_no_completion_would_say_is_refused_or_read_by_its_path(tmp_path, answer, column, expected):
    config = config_of(jsonl(tmp_path / "rows.jsonl", [{"prompt": "2+2?", "answer": answer}]))
    config.environment.columns.answer = column
    if expected:
        with pytest.raises(ValueError, match=expected):
            rows_of(config)
    else:
        (row,) = rows_of(config)
        assert row.answer == ("4" if "." in column else answer)


def test_numbers_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "rows.parquet"
    table = pyarrow.table(
        {
            "prompt": ["0.1?"],
            "answer": pyarrow.array([0.1], pyarrow.float32()),
            "in": pyarrow.array([{"a": [0.3, None]}], pyarrow.struct([("a", pyarrow.list_(pyarrow.float32()))])),
            "half": pyarrow.array([0.1], pyarrow.float16()),
            "level": [3],
            "double": [0.1],
        }
    )
    parquet.write_table(table, path)
    config = config_of(str(path))
    config.environment.columns.task = "level"
    (row,) = rows_of(config)
    assert (row.answer, row.task) == ("0.1", "3")
    assert (row.extra["in"], row.extra["half"], row.extra["double"]) == ({"a": [0.3, None]}, 0.1, 0.1)


def test_a_column_of_tasks_that_no_row_has(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "2+2?", "answer": 4, "topic": "sums"}])
    config = config_of(path)
    config.environment.columns.task = "topik"
    expected = rf"^config\.environment\.columns\.task=topik: no row of config\.environment\.train={path} has it"
    with pytest.raises(ValueError, match=expected):
        rows_of(config)
    config.environment.validation = jsonl(tmp_path / "test.jsonl", [{"prompt": "3?", "answer": 3, "topik": None}])
    assert rows_of(config) and rows_of(config, "validation")  # tasks are reported of evaluations


def test_a_row_that_a_layout_does_not_fit(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"question": "2+2?", "answer": "four"}])
    other = jsonl(tmp_path / "b.jsonl", [{"problem": "2+2?", "answer": "", "solution": "?"}])
    for train, line in (
        (f"gsm8k:{path}", r"a\.jsonl row 1: 'answer' has nothing behind ####"),
        (f"polaris:{path}", r"row 1: has no 'problem' \(keys: question, answer; wanted: problem, answer\)"),
        (f"dapo:{path}", r"has no 'prompt' \(keys: .*; wanted: prompt, reward_model.ground_truth or sol"),
        (path, r"row 1: has no 'prompt' .*; perhaps config\.environment\.columns\.prompt=question"),
        (f"deepscaler:{other}", r"b\.jsonl row 1: 'answer' is not a text, or is empty \(a few rows have no answ"),
    ):
        with pytest.raises(ValueError, match=line):
            rows_of(config_of(train))


def test_layouts_go_with_their_environment(tmp_path):
    with pytest.raises(
        ValueError, match=r"^config\.environment\.train=taco: taco is a layout for .*name=code, not math$"
    ):
        Reader(config_of("taco"))
    with pytest.raises(
        ValueError, match=r"^config\.environment\.validation=gsm8k: gsm8k is a layout for .*name=math, not"
    ):
        rows_of(config_of("x.jsonl", validation="gsm8k", name="code"), "validation", kind="code")


def test_columns_by_name(tmp_path):
    columns = {
        "problem": {"text": "2+2?", "figure": None},
        "meta": {"right": [4, 5], "part": "algebra"},
        "level": 3,
        "answer": "not this one",
    }
    config = config_of(jsonl(tmp_path / "rows.jsonl", [columns]))
    names = config.environment.columns
    names.prompt, names.answer, names.task = "problem.text", "meta.right.0", "meta.part"
    (row,) = rows_of(config)
    assert (row.text, row.answer, row.task, row.chat) == ("2+2?", "4", "algebra", False)
    assert row.extra == columns  # nothing is used up whole
    names.answer = ""
    with pytest.raises(ValueError, match=r"^config\.environment\.columns\.answer is empty, so rows of .*rows\.jsonl"):
        rows_of(config)
    config.environment.reward = "judge"
    (row,) = rows_of(config)
    assert row.answer == "" and not row.extra["answer"].startswith("4")
    names.answer = "meta.wrong"
    with pytest.raises(
        ValueError, match=r"has no 'meta.wrong' \(keys: problem, meta, level, answer; wanted: problem.text"
    ):
        rows_of(config)


def test_messages_in_parts(tmp_path):
    content = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    asked = [{"role": "system", "content": "Be brief.", "name": None}, {"role": "user", "content": content}]
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": asked, "answer": 4}])
    (row,) = rows_of(config_of(path))
    assert row.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"})
    assert row.text == "Be brief.\n\n2+2?" and row.chat
    image = [{"role": "user", "content": [{"type": "image", "url": "x"}]}]
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": image, "answer": 4}])
    with pytest.raises(ValueError, match=r"row 1: message 1 of 'prompt' has a part that is not text"):
        rows_of(config_of(path))


def test_what_an_environment_makes_of_a_row_may_fail(tmp_path):
    def finish(row, columns):
        if "tests" not in columns:
            raise ValueError("there are no unit tests")
        return row

    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "tests": []}, {"prompt": "b"}])
    reader = Reader(config_of(path, max_malformed_rows=1), kind="code", finish=finish)
    assert [row.text for row in reader.rows("train")] == ["a"]
    assert reader.notes() == [f"malformed rows left out: 1: {path} row 2: there are no unit tests"]


def test_a_filter_sees_the_columns(tmp_path):
    rows = [{"problem": f"{n}?", "answer": "4", "difficulty": f"{n}/8"} for n in range(9)]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    reader = Reader(config_of(f"polaris:{path}", filter="difficulty not in ('0/8', '8/8') and problem != '3?'"))
    assert [row.text for row in reader.rows("train")] == ["1?", "2?", "4?", "5?", "6?", "7?"]
    assert reader.notes() == ["rows left out by config.environment.filter: 3"]
    with pytest.raises(
        ValueError, match=r"filter=levl > 3: .*rows\.jsonl row 1 has no column 'levl' \(keys: prompt, answer"
    ):
        rows_of(config_of(f"polaris:{path}", filter="levl > 3"))


def test_a_row_that_the_filter_leaves_out_may_be_malformed(tmp_path):
    rows = [{"prompt": "1?", "answer": "1"}, {"prompt": "2?", "answer": None}, {"prompt": "3?", "answer": ""}]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    reader = Reader(config_of(path, filter="column('answer', None) is not None and answer != ''"))
    assert [row.text for row in reader.rows("train")] == ["1?"]
    assert reader.notes() == ["rows left out by config.environment.filter: 2"]
    for wanted, given in (("prompt != '3?'", rows), ("levl > 3", rows[1:])):  # true, and no column of the row
        bad = jsonl(tmp_path / "bad.jsonl", given)
        with pytest.raises(ValueError, match=r"bad\.jsonl row [12]: 'answer' is not a text, or is empty"):
            rows_of(config_of(bad, filter=wanted))
    with pytest.raises(ValueError, match=r"rows\.jsonl row 2: 'answer' is not a text, or is empty"):
        rows_of(config_of("", validation=path, filter="prompt == '1?'"), split="validation")


def test_what_is_evaluated_on_has_no_weight(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "b"}])
    config = config_of(path, validation=f"{path}*3")
    with pytest.raises(
        ValueError, match=r"^config\.environment\.validation=.*rows\.jsonl: has a weight, and nothing is"
    ):
        rows_of(config, "validation")


@pytest.mark.parametrize("text", ['{\n  "prompt": "a",\n  "answer": "b"\n}\n', '{"prompt": "a"}\r{"prompt": "b"}\r'])
def test_where_all_rows_are_malformed_that_is_said(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text, newline="")
    with pytest.raises(
        ValueError, match=r"rows\.json: no prompts there; malformed rows left out: \d: .*row 1: is not JSON"
    ):
        rows_of(config_of(str(path), max_malformed_rows=5))


def test_a_solution_that_is_taken_for_an_answer_is_said_once(tmp_path):
    rows = [{"question": f"{n}+{n}?", "answer": f"It is\n#### {2 * n}"} for n in range(4)]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    config = config_of(path)
    config.environment.columns.prompt = "question"
    reader = Reader(config)
    assert len(list(reader.rows("train"))) == 4
    assert reader.notes() == [
        f"the whole answer of {path} row 1 is taken for the right one, which reads like a solution: gsm8k:{path} takes "
        "what is behind its ####"
    ]


def test_of_several_validation_sets_each_is_a_task(tmp_path):
    one = jsonl(tmp_path / "one.jsonl", [PUBLISHED["math500"][0]])
    two = jsonl(tmp_path / "two.jsonl", [{"problem": "3+3?", "answer": "6", "id": "0"}])
    config = config_of("x.jsonl", validation=f"math500:{one},aime25:{two}")
    assert [row.task for row in rows_of(config, "validation")] == [f"math500:{one} level 2", f"aime25:{two}"]
    config.environment.validation = f"math500:{one}"
    assert [row.task for row in rows_of(config, "validation")] == ["level 2"]


# ---- The grammar -----------------------------------------------------------------------------------------------------


def parsed(text):
    return [
        (source.text, source.layout, source.where, str(source.hub or ""), source.weight)
        for source in parse(text, "train")
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" ", []),
        ("a.jsonl", [("a.jsonl", "", "a.jsonl", "", None)]),
        (
            "a.jsonl*2, b/*.parquet*.5",
            [("a.jsonl", "", "a.jsonl", "", 2.0), ("b/*.parquet", "", "b/*.parquet", "", 0.5)],
        ),
        ("b/*", [("b/*", "", "b/*", "", None)]),
        ("gsm8k:a.jsonl", [("gsm8k:a.jsonl", "gsm8k", "a.jsonl", "", None)]),
        ("gsm8k", [("gsm8k", "gsm8k", "", "openai/gsm8k", None)]),
        ("gsm8k#test*3", [("gsm8k#test", "gsm8k", "", "openai/gsm8k#test", 3.0)]),
        ("gsm8k@socratic", [("gsm8k@socratic", "gsm8k", "", "openai/gsm8k@socratic", None)]),
        ("gsm8k:gsm8k", [("gsm8k:gsm8k", "gsm8k", "", "openai/gsm8k", None)]),
        ("gsm8k:openai/gsm8k", [("gsm8k:openai/gsm8k", "gsm8k", "", "openai/gsm8k", None)]),
        ("gsm8k:me/mine@b", [("gsm8k:me/mine@b", "gsm8k", "", "me/mine@b", None)]),
        ("me/my-set_1.5@all#train", [("me/my-set_1.5@all#train", "", "", "me/my-set_1.5@all#train", None)]),
        (
            "deepcoder",
            [("deepcoder", "deepcoder", "", "agentica-org/DeepCoder-Preview-Dataset", None)],
        ),
    ],
)
def test_the_grammar(text, expected):
    assert parsed(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.jsonl,", "train=a.jsonl,: there is nothing between two of its commas"),
        ("a.jsonl*0", r"train=a.jsonl\*0: the weight of a.jsonl is 0, and must be above 0"),
        ("a.jsonl,a.jsonl*2", r"train=a.jsonl,a.jsonl\*2: a.jsonl is there twice"),
        ("a.jsonl*1,./a.jsonl*1", r"train=a.jsonl\*1,./a.jsonl\*1: ./a.jsonl is there twice"),
        ("b/,b", "train=b/,b: b is there twice"),
        ("gsm8k,gsm8k:openai/gsm8k", "train=gsm8k,gsm8k:openai/gsm8k: gsm8k:openai/gsm8k is there twice"),
        ("gsm9k:a.jsonl", "train=gsm9k:a.jsonl: gsm9k is not one of the known layouts, polaris, deepscaler"),
    ],
)
def test_what_the_grammar_does_not_have(text, expected):
    with pytest.raises(ValueError, match=f"^{expected}"):
        parse(text, "train")


def test_what_is_there_is_taken_before_what_a_name_may_mean(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "a*2", [])
    (tmp_path / "me").mkdir()
    (tmp_path / "me" / "mine").mkdir()
    (tmp_path / "gsm8k").mkdir()
    assert parsed("a*2") == [("a*2", "", "a*2", "", None)]
    assert parsed("me/mine") == [("me/mine", "", "me/mine", "", None)]
    assert parsed("gsm8k") == [("gsm8k", "", "gsm8k", "", None)]


def test_weights_of_sources():
    assert weights(parse("a.jsonl,b.jsonl", "train")) == {}
    assert weights(parse("a.jsonl*3,b.jsonl", "train")) == {"a.jsonl": 3.0, "b.jsonl": 1.0}


def test_rows_as_others_read_them(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}])
    malformed = MalformedRows(field="most", most=0)
    (source, absent) = parse(f"{path},absent.jsonl", "config.sft.traces")
    assert list(source.read(held_out=False, malformed=malformed)) == [
        (f"{path} row 1", {"prompt": "a", "completion": "b"})
    ]
    (tmp_path / "a,b.jsonl").write_text('{"prompt": "c"}\n')
    with pytest.raises(ValueError, match=r"^train=.*a,b\.jsonl: commas stand between .* a pattern: .*/a\?b\.jsonl$"):
        parse(f"{tmp_path}/a,b.jsonl", "train")
    (source,) = parse(f"{tmp_path}/a?b.jsonl", "train")
    assert [columns for _, columns in source.read(held_out=False, malformed=malformed)] == [{"prompt": "c"}]
    with pytest.raises(ValueError, match=r"^config\.sft\.traces=absent\.jsonl: No such file or directory$"):
        list(absent.read(held_out=False, malformed=malformed))
