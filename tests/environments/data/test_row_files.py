"""Every kind of file gives the same rows, and each kind of damage its one line."""

import csv
import datetime
import decimal
import gzip
import json
import math

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from scalerl_jax.environments.data import row_files
from scalerl_jax.environments.data.columns import MalformedRows
from scalerl_jax.environments.data.row_files import json_row

ROWS = [
    {"prompt": "one?", "answer": "1"},
    {"prompt": 'a "quoted",\n\nlong\tcell', "answer": "ü – 中\U0001f600"},
    {"prompt": "x" * 200_000, "answer": ","},
]


def read(path, most=0):
    return list(row_files.read_file(str(path), MalformedRows(field="most", most=most)))


def write(path, rows=ROWS, mark=b""):
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    if kind in ("csv", "tsv"):
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
        held = path.read_bytes()
    else:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        held = (json.dumps(rows, indent=1) if kind == "json" else lines).encode()
    path.write_bytes(gzip.compress(mark + held) if path.name.endswith(".gz") else mark + held)
    return path


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("kind", [".jsonl", ".ndjson", ".json", ".csv", ".tsv"])
def test_kinds_of_text_files(tmp_path, kind, packed, mark):
    path = write(tmp_path / f"rows{kind}{packed}", mark=mark)
    assert read(path) == [(f"{path} row {n}", row) for n, row in enumerate(ROWS, 1)]


def test_parquet_in_several_batches(tmp_path):
    rows = [
        {"prompt": f"{n}?", "messages": [{"role": "user", "content": f"{n}"}], "more": {"n": n}} for n in range(700)
    ]
    path = write(tmp_path / "rows.parquet", rows)
    assert read(path) == [(f"{path} row {n}", row) for n, row in enumerate(rows, 1)]


def test_a_json_file_may_have_an_object_a_line(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert [row for _, row in read(path)] == ROWS


def test_rows_keep_their_line_numbers(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\n{"a": 1}\r\n   \n{"a": NaN, "b": [1e999, -Infinity, 0.5]}')
    assert read(path) == [(f"{path} row 2", {"a": 1}), (f"{path} row 4", {"a": None, "b": [None, None, 0.5]})]


def test_malformed_rows_are_skipped_and_the_rest_is_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n[1]\n\xff\xfe\n"text"\n{"a": 2}\n' + b"[" * 100_000 + b"\n")
    assert [row for _, row in read(path, most=5)] == [{"a": 1}, {"a": 2}]
    with pytest.raises(ValueError, match=r"rows\.jsonl row 2: is not JSON .* \(most lets such rows be left out\)$"):
        read(path)
    cells = tmp_path / "rows.csv"
    cells.write_text('a,b\n1,2\n\n3\n"4\n",5\n6,7,8\n')
    assert read(cells, most=2) == [(f"{cells} row 1", {"a": "1", "b": "2"}), (f"{cells} row 3", {"a": "4\n", "b": "5"})]
    with pytest.raises(ValueError, match=r"rows\.csv row 2: has 1 cells, the header has 2"):
        read(cells)


@pytest.mark.parametrize(
    ("name", "held", "expected"),
    [
        ("a.json", b"[1, 2", "is not JSON"),
        ("a.json", b'["\xff"]', "is not UTF-8"),
        ("a.json", b"[" * 100_000, "is not JSON"),
        ("a.csv", b"a,b\n1,caf\xe9\n", "is not UTF-8"),
        ("a.csv", b"a,a\n1,2\n", "the header has 'a' twice"),
        ("a.csv", b'a,b\n1,2\n3,"4\n', "behind row 1, line 3: unexpected end of data"),
        ("a.parquet", b"PAR1 and then nothing", "is not Parquet, or is broken"),
        ("a.parquet", b"", "is not Parquet, or is broken"),
        ("a.jsonl.gz", b'{"a": 1}\n', "is not gzip, or is cut off"),
        ("a.csv.gz", gzip.compress(b"a,b\n" + bytes(range(32, 127)) * 9, mtime=0)[:60], "is not gzip, or is cut off"),
    ],
)
def test_a_file_that_is_none_is_one_line(tmp_path, name, held, expected):
    path = tmp_path / name
    path.write_bytes(held)
    with pytest.raises(ValueError, match=f"^{path}: {expected}") as caught:
        read(path, most=9)
    assert "\n" not in str(caught.value)


def test_a_parquet_cell_that_is_no_value_is_of_a_malformed_row(tmp_path):
    late = pyarrow.array([0, 2**62, 1], pyarrow.int64()).cast(pyarrow.timestamp("ms"), safe=False)
    text = pyarrow.array([b"a", b"b", b"\xff\xfe"], pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), 3, text.buffers())  # as a writer leaves it that checks nothing
    path = tmp_path / "rows.parquet"
    for columns, number in (({"n": [1, 2, 3], "at": late}, 2), ({"n": [1, 2, 3], "text": text}, 3)):
        parquet.write_table(pyarrow.table(columns), path)
        with pytest.raises(
            ValueError, match=rf"rows\.parquet row {number}: has a cell that cannot be read: \S+"
        ) as caught:
            read(path)
        assert "\n" not in str(caught.value)
        found = read(path, most=1)
        assert [(name, row["n"]) for name, row in found] == [(f"{path} row {n}", n) for n in (1, 2, 3) if n != number]


def test_a_parquet_cut_in_half_is_one_line(tmp_path):
    path = write(tmp_path / "rows.parquet", [{"a": f"{n}"} for n in range(5000)])
    held = path.read_bytes()
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(held[: len(held) // 4] + bytes(len(held) // 2) + held[3 * len(held) // 4 :])
    with pytest.raises(ValueError, match=r"broken\.parquet: is not Parquet, or is broken"):
        read(broken)


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.json", "empty.csv", "header.csv", "empty.parquet"])
def test_an_empty_file_has_no_rows(tmp_path, name):
    path = tmp_path / name
    path.write_text({"header.csv": "a,b\n", "empty.json": "[]"}.get(name, ""))
    if name == "empty.parquet":
        parquet.write_table(pyarrow.table({"a": pyarrow.array([], pyarrow.string())}), path)
    assert read(path) == []


def test_values_are_those_of_json():
    row = {
        "date": datetime.date(2024, 2, 29),
        "time": datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.UTC),
        "nan": math.nan,
        "infinite": [math.inf, np.float32(0.5), np.int64(3), np.array([[1, 2]]), np.array([math.nan])],
        "decimal": [decimal.Decimal("7.00"), decimal.Decimal("0.25"), decimal.Decimal("NaN")],
        "bytes": [b"text", b"\xff\x00"],
        "map": [("a", 1), ("b", None)],
        3: {"deep": {True: (False,)}},
        "duration": datetime.timedelta(seconds=5),
    }
    found = json_row(row)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found == {
        "date": "2024-02-29",
        "time": "2024-02-29T12:30:00+00:00",
        "nan": None,
        "infinite": [None, 0.5, 3, [[1, 2]], [None]],
        "decimal": [7, 0.25, None],
        "bytes": ["text", "/wA="],
        "map": [["a", 1], ["b", None]],
        "3": {"deep": {"True": [False]}},
        "duration": "0:00:05",
    }


def test_a_folder_is_its_files_in_order(tmp_path):
    write(tmp_path / "b.jsonl", [{"a": 2}])
    write(tmp_path / "a.parquet", [{"a": 1}])
    write(tmp_path / "c.csv.gz", [{"a": 3}])
    (tmp_path / "README.md").write_text("not rows")
    (tmp_path / ".hidden.jsonl").write_text("{")
    (tmp_path / "more.jsonl").mkdir()
    assert [path.rpartition("/")[2] for path in row_files.files_of(str(tmp_path), "train")] == [
        "a.parquet",
        "b.jsonl",
        "c.csv.gz",
    ]
    assert row_files.files_of(f"{tmp_path}/[ab].*", "train") == [f"{tmp_path}/a.parquet", f"{tmp_path}/b.jsonl"]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("absent.jsonl", "absent.jsonl: No such file or directory"),
        ("*.parquet", r"\*.parquet: no file is of that pattern"),
        ("rows.txt", "rows.txt: .*rows.txt is not one of .jsonl, .ndjson, .json, .csv, .tsv, .parquet by its name"),
        ("*.txt", r"\*.txt: .*rows.txt is not one of .jsonl"),
        ("data", r"data: the folder has no file of rows \(.*\); there are folders in it: train"),
        (
            "splits",
            r"splits: the folder has files of several splits \(test, train\): name those .*, as in .*splits/test\*",
        ),
    ],
)
def test_what_is_no_file_of_rows_is_named(tmp_path, where, expected):
    (tmp_path / "rows.txt").write_text("{}")
    (tmp_path / "data" / "train").mkdir(parents=True)
    (tmp_path / "splits").mkdir()
    for name in ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test.jsonl"):
        write(tmp_path / "splits" / name, [{"a": 1}])
    with pytest.raises(ValueError, match=f"^train={tmp_path}/{expected}"):
        row_files.files_of(f"{tmp_path}/{where}", "train")
    assert len(row_files.files_of(f"{tmp_path}/splits/train*", "train")) == 2
