"""Every kind of file that scalerl-fit reads, written by the programs that write them."""

import gzip
import json
import pathlib

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_DOUBLE, DT_FLOAT, DT_INT64
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from scalerl_jax.scaling import readers, tables, tfevents, units


def one(path, **options):
    (run,) = readers.read_runs([str(path)], **{"x": "x", "y": "y", **options})
    return run


def test_csv_and_tsv(tmp_path):
    (tmp_path / "a.csv").write_text('\ufeffx, y ,note\n0,0.4,"first, of all"\n\n1e3,.5,\n')
    run = one(tmp_path / "a.csv")
    assert (run.name, run.seed) == ("a", "")
    np.testing.assert_array_equal(run.compute, [0, 1000])
    np.testing.assert_array_equal(run.reward, [0.4, 0.5])
    assert run.place(1).endswith("a.csv: line 4")
    (tmp_path / "b.tsv").write_text("x\ty\n1\t0.25\n")
    np.testing.assert_array_equal(one(tmp_path / "b.tsv").reward, [0.25])


def test_rows_without_the_score_are_left_out(tmp_path):
    # The history of Weights & Biases: most steps log no evaluation.
    (tmp_path / "history.csv").write_text("_step,loss,eval/acc\n0,,0.4\n1,2.0,\n2,1.9,0.45\n")
    run = one(tmp_path / "history.csv", x="_step", y="eval/acc")
    np.testing.assert_array_equal(run.compute, [0, 2])
    rows = [
        {"_step": 0, "eval/acc": 0.4},
        {"_step": 1, "loss": 2.0},
        {"_step": 2, "eval/acc": None},
        {"_step": 5, "eval/acc": 0.6},
    ]
    (tmp_path / "history.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    run = one(tmp_path / "history.jsonl", x="_step", y="eval/acc")
    np.testing.assert_array_equal(run.reward, [0.4, 0.6])


def test_chart_export_has_a_column_for_each_run(tmp_path):
    (tmp_path / "chart.csv").write_text(
        '"Step","lr-1 - eval/acc","lr-1 - eval/acc__MIN","lr-2 - eval/acc"\n'
        '"0","0.4","0.4","0.41"\n'
        '"10","0.5","0.5",""\n'
    )
    runs = readers.read_runs([str(tmp_path / "chart.csv")], x="Step", y="eval/acc")
    assert [run.name for run in runs] == ["lr-1", "lr-2"]
    for name in ("run_column", "seed_column", "passes_column", "trials_column"):
        flag = name if name[0] in "rs" else name.removesuffix("_column")
        with pytest.raises(readers.InputError, match=f"chart.csv: --{flag}=Step: the export of a chart has no"):
            readers.read_runs([str(tmp_path / "chart.csv")], x="Step", y="eval/acc", **{name: "Step"})
    np.testing.assert_array_equal(runs[0].reward, [0.4, 0.5])
    np.testing.assert_array_equal(runs[1].reward, [0.41])


def test_runs_and_seeds_by_column_and_by_folder(tmp_path):
    (tmp_path / "all.csv").write_text("r,s,x,y\na,0,1,.1\na,0,2,.2\na,1,1,.3\nb,0,1,.4\n")
    runs = readers.read_runs([str(tmp_path / "all.csv")], x="x", y="y", run_column="r", seed_column="s")
    assert [(run.name, run.seed, len(run.compute)) for run in runs] == [("a", "0", 2), ("a", "1", 1), ("b", "0", 1)]
    for name in ("base/seed0.csv", "base/seed1.csv", "new/seed0.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x,y\n1,.1\n")
    paths = [str(tmp_path / name) for name in ("base/seed0.csv", "base/seed1.csv", "new/seed0.csv")]
    runs = readers.read_runs(paths, x="x", y="y", seeds_by_folder=True)
    assert [(run.name, run.seed) for run in runs] == [("base", "seed0"), ("base", "seed1"), ("new", "seed0")]


def test_run_folder_brings_its_counts(tmp_path):
    rows = [
        {"step": 0, "device_hours": 0, "pass_rate": 0.25, "prompts": 2, "samples": 4, "passes": [0, 2]},
        {"step": 5, "device_hours": 0.5, "pass_rate": 0.75, "prompts": 2, "samples": 4, "passes": [2, 4]},
        {"step": 10, "device_hours": 1.0, "pass_rate": 0.75, "prompts": 2, "samples": 4, "passes": [3, 3]},
        {"step": 15, "device_hours": 2.5, "pass_rate": 0.75, "prompts": 2, "samples": 4, "passes": [3, 3]},
    ]
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path in (folder, folder / "evals.jsonl"):
        run = one(path, x=None, y=None)
        assert run.name == "mine"
        np.testing.assert_allclose(run.compute, [0, 0.5, 1.0, 1.5])  # the last stretch was slow
        assert readers.hours_rate([run, run]) == pytest.approx(2.5 / 1.5)
        np.testing.assert_array_equal(run.counts.passes, [[0, 2], [2, 4], [3, 3], [3, 3]])
        np.testing.assert_array_equal(run.counts.trials, [[4, 4]] * 4)
    by_hours = one(folder, x="device_hours", y=None)
    np.testing.assert_array_equal(by_hours.compute, [0, 0.5, 1.0, 2.5])
    assert readers.hours_rate([by_hours]) is None
    without = [{name: value for name, value in row.items() if name != "device_hours"} for row in rows]
    (folder / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in without))
    with pytest.raises(readers.InputError, match=r"evals.jsonl: no column 'device_hours' \(--x\); "):
        one(folder, x=None, y=None)


def test_a_run_folder_of_a_mixture_has_a_curve_for_each_environment(tmp_path):
    def part(passes):
        return {"pass_rate": sum(passes) / 4 / len(passes), "passes": passes, "samples": 4, "prompts": len(passes)}

    rows = [
        {"step": s, "device_hours": s / 10, **part(m + c), "environments": {"math": part(m), "code": part(c)}}
        for s, m, c in ((0, [0, 2], [1]), (5, [2, 4], [3]))
    ]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path in ("mine", "mine/evals.jsonl"):
        whole, math, code = readers.read_runs([str(tmp_path / path)], x=None, y=None)
        assert [run.name for run in (whole, math, code)] == ["mine", "mine/math", "mine/code"]
        np.testing.assert_array_equal(math.reward, [0.25, 0.75])
        np.testing.assert_array_equal(math.counts.passes, [[0, 2], [2, 4]])
        np.testing.assert_array_equal(code.counts.trials, [[4], [4]])
        (alone,) = readers.read_runs([str(tmp_path / path)], x=None, y="code - pass_rate", parts_too=False)
        np.testing.assert_array_equal(alone.counts.passes, code.counts.passes)


def test_totals_where_the_prompts_change(tmp_path):
    rows = [{"x": 0, "y": 0.5, "p": [1, 1], "n": 2}, {"x": 1, "y": 0.5, "p": [2, 1, 0], "n": [2, 2, 2]}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    run = one(tmp_path / "a.jsonl", passes_column="p", trials_column="n")
    np.testing.assert_array_equal(run.counts.passes, [[2], [3]])
    np.testing.assert_array_equal(run.counts.trials, [[4], [6]])


def scalar(tag, value):
    return Summary(value=[Summary.Value(tag=tag, simple_value=value)])


def test_tensorboard_folder(tmp_path):
    writer = EventFileWriter(str(tmp_path))
    for step, value in ((0, 0.4), (10, 0.5), (20, 0.9)):
        writer.add_event(Event(step=step, wall_time=1.0, summary=scalar("eval/acc", value)))
    writer.add_event(Event(step=10, wall_time=1.0, summary=scalar("gpu_hours", 3.0)))
    # A resumed run: what was logged from step 11 on no longer holds.
    writer.add_event(Event(step=11, session_log=SessionLog(status=SessionLog.START)))
    shape = TensorShapeProto()
    for step, kind, fields in (
        (20, DT_FLOAT, {"float_val": [0.6]}),
        (30, DT_DOUBLE, {"tensor_content": np.float64(0.7).tobytes()}),
        (40, DT_INT64, {"int64_val": [1]}),
    ):
        tensor = TensorProto(dtype=kind, tensor_shape=shape, **fields)
        writer.add_event(Event(step=step, summary=Summary(value=[Summary.Value(tag="eval/acc", tensor=tensor)])))
    writer.close()
    run = one(tmp_path, x="step", y="eval/acc")
    np.testing.assert_array_equal(run.compute, [0, 10, 20, 30])
    np.testing.assert_allclose(run.reward, [0.4, 0.5, 0.6, 0.7], rtol=1e-6)
    (path,) = tfevents.event_files(str(tmp_path))
    for seed in (tmp_path, path):
        run = one(seed, x="step", y="eval/acc", seeds_by_folder=True)
        assert (run.name, run.seed, run.folder) == (tmp_path.parent.name, tmp_path.name, str(tmp_path.parent))
    np.testing.assert_allclose(one(path, x="step", y="gpu_hours").reward, [3.0])
    # A record that is still being written is not there yet; one that is damaged is said.
    file = pathlib.Path(path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-30])
    assert len(one(tmp_path, x="step", y="eval/acc").compute) == 4
    file.write_bytes(whole[:9] + bytes([whole[9] ^ 1]) + whole[10:])
    with pytest.raises(readers.InputError, match="damaged"):
        readers.read_table(path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "", "is empty"),
        ("a.csv", "1,2\n3,4\n", "line 1 is no header"),
        ("a.csv", "x,y\n", "has no rows"),
        ("a.csv", "x,y\n1,2\n3\n", "line 3: 1 cells, but the header has 2"),
        ("a.csv", "x,y,x\n1,2,3\n", "column 'x' appears twice"),
        ("a.csv", "x,a - y,a - y__MIN,a - y\n1,2,2,3\n", "column 'a - y' appears twice in the header, as two runs of"),
        ("a.csv", "x,yy\n1,2\n", "no column 'y' (--y); did you mean 'yy'?"),
        ("a.csv", "x,score\n1,2\n", "it has: x, score"),
        ("a.csv", "x,y\n1,many\n", "line 2: column 'y': 'many' is not a number"),
        ("a.csv", "x,y\n1,inf\n", "line 2: column 'y': inf is not a finite number"),
        ("a.csv", "x,y\n1,nan\n", "every row that has a value in column 'y' has NaN in 'y'"),
        ("a.csv", "x,y\n-1,.1\n", "line 2: column 'x': -1 is below 0"),
        ("a.csv", "x,y\n,.1\n", "line 2: column 'x' is empty"),
        ("a.csv", "x,y\n1,\n", "no row has a value in column 'y'"),
        ("a.jsonl", '{"x": 1, "y": 2}\n{"x": 1\n', "line 2: is not JSON"),
        ("a.jsonl", '{"x": 1, "y": Infinity}\n', "line 1: column 'y': inf is not a finite number"),
        ("a.jsonl", '{"x": 1, "y": true}\n', "line 1: column 'y': true is not a number"),
        ("a.jsonl", "[1, 2]\n", "line 1: is not a JSON object"),
        ("a.txt", "x,y\n", "is not .csv"),
    ],
)
def test_mistakes_are_named_with_file_and_row(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(readers.InputError) as caught:
        one(tmp_path / name)
    assert said in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_mistakes(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"x,y\n1,\xff\n")
    with pytest.raises(readers.InputError, match="byte 6 is not UTF-8"):
        one(tmp_path / "a.csv")
    with pytest.raises(readers.InputError, match="holds none of evals"):
        one(tmp_path)
    (tmp_path / "b.csv").write_text("x,y\n1,2\n")
    with pytest.raises(readers.InputError, match="--x is needed; the columns are x, y"):
        one(tmp_path / "b.csv", x=None)


def test_rows_out_of_order_are_sorted_and_said(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n3,.3\n1,.1\n2,.2\n")
    run = one(tmp_path / "a.csv")
    np.testing.assert_array_equal(run.compute, [1, 2, 3])
    np.testing.assert_array_equal(run.reward, [0.1, 0.2, 0.3])
    assert [place.rpartition(": ")[2] for place in map(run.place, range(3))] == ["line 3", "line 4", "line 2"]
    (said,) = run.remarks
    assert "column 'x' goes back 1 times; the rows were sorted by it" in said and "--run_column" in said


@pytest.mark.parametrize("missing", ["NA", "null", "None", "N/A"])
def test_other_words_for_nan_are_nan(tmp_path, missing):
    (tmp_path / "a.csv").write_text(f"x,y\n1,.1\n2,{missing}\n3,.5\n")
    run = one(tmp_path / "a.csv")
    np.testing.assert_array_equal(run.reward, [0.1, 0.5])
    assert run.remarks == (f"{tmp_path}/a.csv: 1 of 3 rows are left out: NaN in 'y'",)


def test_a_row_that_is_cut_off_in_a_run_folder_is_left_out_and_said(tmp_path):
    rows = '{"x": 1, "y": 0.5}\n{"x": 2, "y": 0.6}\n'
    log = tmp_path / "evals.jsonl"
    log.write_text(rows + '{"x": 3, "y"')
    run = one(tmp_path)
    np.testing.assert_array_equal(run.reward, [0.5, 0.6])
    assert run.remarks == (f"{log}: line 3 is left out: it is cut off",)
    log.write_text(rows + '{"x": 3, "y": 0.7}')  # whole, though its line is not ended
    assert len(one(tmp_path).reward) == 3 and one(tmp_path).remarks == ()
    log.write_text(rows + '{"x": 3, "y"\n')
    with pytest.raises(tables.InputError, match=r"evals\.jsonl: line 3: is not JSON"):
        one(tmp_path)
    (tmp_path / "mine.jsonl").write_text(rows + '{"x": 3, "y"')  # no trainer's
    with pytest.raises(tables.InputError, match=r"mine\.jsonl: line 3: is not JSON"):
        one(tmp_path / "mine.jsonl")


def test_nan_is_left_out_and_counted(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,.1\n2,nan\nNaN,.3\n4,\n5,.5\n")
    run = one(tmp_path / "a.csv")
    np.testing.assert_array_equal(run.compute, [1, 5])
    assert run.remarks == (f"{tmp_path}/a.csv: 2 of 4 rows are left out: NaN in 'x' and 'y'",)
    (tmp_path / "b.jsonl").write_text('{"x": 1, "y": 0.5}\n{"x": 2, "y": NaN}\n{"x": 3}\n')
    assert one(tmp_path / "b.jsonl").remarks[0].endswith("1 of 2 rows are left out: NaN in 'y'")


@pytest.mark.parametrize(
    ("rows", "looks", "last", "mean"),
    [
        ("1,.1\n2,.2\n2,.2\n3,.3\n", "logged again: --duplicates=last", [0.1, 0.2, 0.3], [0.1, 0.2, 0.3]),
        ("1,.1\n2,.2\n3,.3\n2,.4\n3,.5\n", "a resumed run: --duplicates=last", [0.1, 0.4, 0.5], [0.1, 0.3, 0.4]),
        ("1,.1\n2,.2\n1,.3\n2,.4\n", "several runs in one file: tell them", [0.3, 0.4], [0.2, 0.3]),
        ("1,.1\n2,.2\n2,.4\n3,.3\n", "several evaluations at one compute: --dup", [0.1, 0.4, 0.3], [0.1, 0.3, 0.3]),
    ],
)
def test_repeated_compute_says_what_it_looks_like(tmp_path, rows, looks, last, mean):
    (tmp_path / "a.csv").write_text(f"x,y\n{rows}")
    with pytest.raises(readers.InputError, match=looks) as caught:
        one(tmp_path / "a.csv")
    assert "is there already, in line" in str(caught.value) and "\n" not in str(caught.value)
    np.testing.assert_allclose(one(tmp_path / "a.csv", duplicates="last").reward, last)
    run = one(tmp_path / "a.csv", duplicates="mean")
    np.testing.assert_allclose(run.reward, mean)
    assert "--duplicates=mean" in run.remarks[0]


def test_the_latest_by_its_time_is_the_last(tmp_path):
    """Sorted by step, as an export is: only the times tell which row came of the resumed run."""
    (tmp_path / "a.csv").write_text("step,y,_timestamp\n1,.1,10\n2,.4,99\n2,.2,20\n3,.5,100\n3,.3,30\n")
    with pytest.raises(readers.InputError, match="written later, which looks like a resumed run"):
        one(tmp_path / "a.csv", x="step")
    np.testing.assert_array_equal(one(tmp_path / "a.csv", x="step", duplicates="last").reward, [0.1, 0.4, 0.5])


def test_a_mean_of_repeated_rows_sums_their_counts(tmp_path):
    (tmp_path / "a.csv").write_text("x,y,p,n\n1,.5,1,2\n1,.25,2,8\n2,.5,4,8\n")
    run = one(tmp_path / "a.csv", passes_column="p", trials_column="n", duplicates="mean")
    np.testing.assert_array_equal(run.counts.passes, [[3], [4]])
    np.testing.assert_array_equal(run.counts.trials, [[10], [8]])
    np.testing.assert_allclose(run.reward, [0.3, 0.5])


@pytest.mark.parametrize(
    ("text", "compute"),
    [
        ("x;y\n0,5;0,1\n1234,5;0,2\n", [0.5, 1234.5]),  # decimal commas
        ("x;y\n500;0,1\n1.500;0,2\n", [500, 1500]),  # and points between thousands
        ("x;y\n0.5;0.1\n1.5;0.2\n", [0.5, 1.5]),  # semicolons alone change nothing
        ('x,y\n"1,500",0.1\n"2,500,000",0.2\n', [1500, 2_500_000]),
        ('x,y\n"1,500",0.1\n', [1500]),  # in a file of commas a quoted one is between thousands
        ("x\ty\n1e3\t0.1\n1.5E+3\t0.2\n", [1000, 1500]),
        ('x,y,z,z\r\n1,0.1,"a\r\nb",\r\n\r\n2,0.2,,\r\n', [1, 2]),  # of no concern: columns that are not asked for
    ],
)
def test_how_numbers_are_written(tmp_path, text, compute):
    (tmp_path / "a.csv").write_bytes(text.encode())
    run = one(tmp_path / "a.csv")
    np.testing.assert_array_equal(run.compute, compute)
    np.testing.assert_array_equal(run.reward, [0.1, 0.2][: len(compute)])


def test_a_comma_that_may_be_either_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x;y\n1,500;0\n")
    with pytest.raises(readers.InputError, match=r"'1,500' may be 1.500 or 1500; write it with a decimal point"):
        one(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text("x;y\n0,5;0.1\n")
    with pytest.raises(
        readers.InputError, match=r"line 2: column 'y': '0.1': commas are the decimal marks of this file"
    ):
        one(tmp_path / "a.csv")


def test_the_log_of_transformers_trainers(tmp_path):
    history = [
        {"step": 10, "loss": 0.5, "reward": 0.2, "epoch": 0.1},
        {"step": 10, "eval_reward": 0.25, "eval_runtime": 3.0},
        {"step": 20, "loss": 0.4, "reward": float("nan")},
        {"step": 20, "eval_reward": 0.5},
        {"step": 20, "train_runtime": 9.0, "total_flos": 1e15},
    ]
    for step, count in ((5, 1), (20, 5)):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": history[:count]}))
    for path in (tmp_path / "out", folder, folder / "trainer_state.json"):
        run = one(path, x=None, y="eval_reward")
        assert run.name == "out"
        np.testing.assert_array_equal(run.compute, [10, 20])
        np.testing.assert_array_equal(run.reward, [0.25, 0.5])
        assert run.place(1).endswith("trainer_state.json: log entry 4")
        assert run.x == "step"
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "evals.jsonl").write_text('{"step": 1, "device_hours": 0.5, "eval_reward": 0.25}\n')
    both = [str(tmp_path / "ours"), str(folder)]
    assert one(both[0], x=None, y="eval_reward").x == "typical_hours"
    with pytest.raises(readers.InputError, match="--x is needed: by default it is 'step' here, and 'typical_hours' in"):
        readers.read_runs(both, x=None, y="eval_reward")
    assert [run.x for run in readers.read_runs(both, x="step", y="eval_reward")] == ["step", "step"]
    with pytest.raises(
        readers.InputError, match="--y is needed; the columns are step, loss, reward, epoch, eval_reward"
    ):
        one(folder, x=None, y=None)
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    with pytest.raises(readers.InputError, match="holds neither a log_history"):
        one(folder, x=None)


def test_packed_and_wide_files(tmp_path):
    text = "x,y\n1,0.1\n2,0.2\n"
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "b.csv").write_bytes(text.replace(",", "\t").encode("utf-16"))  # as a spreadsheet saves "Unicode text"
    for name in ("a.csv.gz", "b.csv"):
        run = one(tmp_path / name)
        assert run.name == name[0]
        np.testing.assert_array_equal(run.compute, [1, 2])
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode())[:-9])
    with pytest.raises(readers.InputError, match="cannot be unpacked"):
        one(tmp_path / "a.csv.gz")


def test_long_files_are_read_as_short_ones_are(tmp_path, monkeypatch):
    """Many rows are read at once where they can be: the same rows and mistakes with any size of these blocks."""
    lines = [f"{n},{n / 100}" for n in range(1, 50)]
    (tmp_path / "a.csv").write_text("x,y\n" + "\n".join(lines) + "\n")
    (tmp_path / "gap.csv").write_text("x,y\n" + "\n".join([*lines[:20], "", *lines[20:]]) + "\n")
    rows = [json.dumps({"x": n, "y": n / 100} | ({"z": 1} if n > 30 else {})) for n in range(1, 50)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows[:20], "", *rows[20:]]))
    (tmp_path / "bad.jsonl").write_text("\n".join([*rows[:20], '{"x": 1}, {"x": 2}', *rows[20:]]))
    (tmp_path / "list.jsonl").write_text("\n".join([*rows[:20], "[1]", *rows[20:]]))
    for block in (7, 1000):
        monkeypatch.setattr(tables, "_BLOCK", block)
        for name, last in (("a.csv", 50), ("gap.csv", 51), ("a.jsonl", 50)):
            run = one(tmp_path / name)
            np.testing.assert_allclose(run.reward, np.arange(1, 50) / 100)
            assert run.place(48).endswith(f"line {last}")
        with pytest.raises(readers.InputError, match="line 21: is not JSON"):
            one(tmp_path / "bad.jsonl")
        with pytest.raises(readers.InputError, match="line 21: is not a JSON object"):
            one(tmp_path / "list.jsonl")


def test_units():
    factor, unit = units.conversion("s:h")
    assert (factor * 7200, unit) == (2.0, "h")
    assert units.conversion("FLOP:EFLOP")[0] * 3e18 == pytest.approx(3.0)
    assert units.conversion("GPU-hours") == (1.0, "GPU-hours")
    with pytest.raises(ValueError, match="no conversion"):
        units.conversion("s:FLOP")
    scores = np.array([-0.2, 0.4])
    scale, said = units.find_scale(scores, "auto")
    assert scale == "reward" and "reward" in said
    np.testing.assert_allclose(units.to_accuracy(scores, scale), [0.4, 0.7])
    assert units.find_scale(np.array([0.2, 0.4]), "auto") == ("accuracy", "")
    np.testing.assert_allclose(units.to_accuracy(np.array([40.0]), "percent"), [0.4])
