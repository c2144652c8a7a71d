"""The run folder: what survives a kill, what is refused, what other tools read back."""

import importlib.machinery
import json
import math
import os
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scalerl_jax.config import Config
from scalerl_jax.config_check import ConfigError
from scalerl_jax.contract.codec import Completion
from scalerl_jax.run.folder import RunFolder
from scalerl_jax.run.jsonl import read_rows
from scalerl_jax.run.metrics import samples_of
from tests.support.evaluations import counted
from tests.support.paths import ROOT
from tests.support.processes import begin_python

COMPUTE = {"device_hours": 0.5, "model_flops": 1e12}


def make_config(**changes):
    config = Config()
    config.telemetry.tensorboard = False
    for name, value in changes.items():
        node = config
        *parents, leaf = name.split("__")
        for parent in parents:
            node = getattr(node, parent)
        setattr(node, leaf, value)
    return config


def evaluate(run, step, passes=(3, 0, 4)):
    return run.evaluation(step=step, found=counted(passes, 4), seconds=1.5, compute=COMPUTE)


def test_rows_of_a_run(tmp_path):
    with RunFolder(tmp_path / "run", make_config(), clock=lambda: 7.0) as run:
        run.resume(0)
        run.metrics(1, {"reward": np.float32(0.25), "lag": {"mean": 1.5, "counts": np.arange(3)}, "bad": math.nan})
        row = evaluate(run, 1)
        incarnation = run.incarnation
        assert run.evaluations() == [row]
    (metrics,) = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert metrics == {
        "step": 1,
        "time": 7.0,
        "incarnation": incarnation,
        "reward": 0.25,
        "lag": {"mean": 1.5, "counts": [0, 1, 2]},
        "bad": None,
    }
    assert row == {
        "step": 1,
        "version": 1,
        "time": 7.0,
        "incarnation": incarnation,
        "pass_rate": 7 / 12,
        "prompts": 3,
        "samples": 4,
        "seconds": 1.5,
        "device_hours": 0.5,
        "model_flops": 1e12,
        "passes": [3, 0, 4],
    }


def test_going_on_cuts_what_is_past_the_checkpoint(tmp_path):
    config = make_config(telemetry__samples_every=2)
    with RunFolder(tmp_path, config) as run:
        run.resume(0)
        first = run.incarnation
        evaluate(run, 0)
        for step in range(1, 8):
            run.metrics(step, {"x": step})
            if run.wants_rollouts(step):
                run.rollouts(step, [])
        evaluate(run, 4)
        evaluate(run, 6)
    # killed while it wrote a row, and while it wrote a sample
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "ti')
    (tmp_path / "rollouts" / "step-00000004.jsonl.tmp").write_text("{")

    with RunFolder(tmp_path, config) as run:
        run.resume(5)
        assert [row["step"] for row in run.evaluations()] == [0, 4]
        run.metrics(6, {"x": 60})
        assert run.incarnation > first
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["x"]) for row in rows] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 60)]
    assert [row["incarnation"] == first for row in rows] == [True] * 5 + [False]
    assert sorted(os.listdir(tmp_path / "rollouts")) == ["step-00000002.jsonl", "step-00000004.jsonl"]
    with RunFolder(tmp_path, config) as run:
        run.resume(0)  # killed before its first checkpoint: the evaluation at step 0 still holds
        assert [row["step"] for row in run.evaluations()] == [0]
        assert read_rows(tmp_path / "metrics.jsonl") == []


def test_a_torn_row_alone_is_mended(tmp_path):
    with RunFolder(tmp_path, make_config()) as run:
        run.resume(0)
        run.metrics(1, {})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2')
    with RunFolder(tmp_path, make_config()) as run:
        run.resume(1)
        run.metrics(2, {})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_damaged_row_is_named(tmp_path):
    (tmp_path / "evals.jsonl").write_text('{"step": 0}\n{"step":\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"evals\.jsonl: row 2 is not JSON"):
        read_rows(tmp_path / "evals.jsonl")


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (b"garbage", "is not JSON (Expecting value: line 1 column 1 (char 0))"),
        (b'{"step": 2}{"step": 3}', "is not JSON (Extra data: line 1 column 12 (char 11))"),
        (b"\0\0\0\0", "is not JSON (Expecting value: line 1 column 1 (char 0))"),
        (b'{"step": 2, "task": "\xff"}', "is not UTF-8 (byte 22)"),
        (b"[2]", "is not an object"),
        (b'{"loss": 1.0}', "has no step"),
        (b'{"step": "two"}', "has no step"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "evals.jsonl"])
def test_a_garbage_row_is_one_line_that_names_it(tmp_path, name, row, what):
    leave_a_row(tmp_path)
    (tmp_path / name).write_bytes(b'{"step": 1}\n' + row + b'\n{"step": 3}\n')
    with RunFolder(tmp_path, make_config()) as run, pytest.raises(ValueError) as caught:
        run.resume(3)
    assert str(caught.value) == f"{tmp_path / name}: row 2 {what}; remove that row, or put the file back from a copy"


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b"[1]", b"\0" * 64, b'{"model": 3}'])
def test_a_config_that_is_none_is_one_line(tmp_path, data):
    leave_a_row(tmp_path)
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        RunFolder(tmp_path, make_config())
    assert "config.json: is not" in str(caught.value) or "config.model is 3 there" in str(caught.value)
    assert "\n" not in str(caught.value)


def leave_a_row(path):
    with RunFolder(path, make_config()) as run:
        run.resume(0)
        evaluate(run, 0)


def test_workdir_of_another_config_is_refused_by_name(tmp_path):
    leave_a_row(tmp_path)
    before = (tmp_path / "config.json").read_text()
    with pytest.raises(ConfigError) as caught:
        RunFolder(tmp_path, make_config(optimizer__learning_rate=1e-4, learner__micro_batch_rows=7))
    assert str(caught.value) == (
        f"--workdir={tmp_path}: holds a run of another config: config.optimizer.learning_rate is 5e-07 there and "
        "0.0001 now; --allow=optimizer.learning_rate goes on with what is given now"
    )
    with pytest.raises(
        ConfigError, match=r"config.seed is 0 .* \(and 1 more\); --allow=seed,objective.max_ratio goes on"
    ):
        RunFolder(tmp_path, make_config(seed=3, objective__max_ratio=4.0))
    assert (tmp_path / "config.json").read_text() == before


def test_what_is_changed_on_purpose_is_written_down(tmp_path):
    leave_a_row(tmp_path)
    other = make_config(objective__max_ratio=4.0, learner__micro_batch_rows=3, evaluation__prompts=7)
    with pytest.raises(ConfigError, match=r"--allow=objective\.lid: config has no field 'objective\.lid'"):
        RunFolder(tmp_path, other, allow=["objective.lid"])
    with RunFolder(tmp_path, other, allow=["objective.max_ratio"], clock=lambda: 7.0) as run:
        assert [(change.name, change.kind) for change in run.changes] == [
            ("objective.max_ratio", "bound"),
            ("learner.micro_batch_rows", "free"),
            ("evaluation.prompts", "said"),
        ]
        run.resume(0)
    assert json.loads((tmp_path / "config.json").read_text())["objective"]["max_ratio"] == 4.0
    (row,) = read_rows(tmp_path / "config_history.jsonl")
    assert (row["step"], row["time"]) == (0, 7.0)
    assert row["changed"]["objective.max_ratio"] == {"before": 5.0, "now": 4.0, "kind": "bound"}
    assert row["changed"].keys() == {"objective.max_ratio", "learner.micro_batch_rows", "evaluation.prompts"}
    with RunFolder(tmp_path, other) as run:  # from now on that is the run's config
        run.resume(0)
    assert len(read_rows(tmp_path / "config_history.jsonl")) == 1


def test_a_first_start_that_failed_binds_nobody(tmp_path):
    for config in (make_config(model__path="mistyped"), make_config(model__path="right"), make_config(seed=3)):
        with RunFolder(tmp_path, config) as run:
            run.resume(0)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match=r"config\.seed is 3 there and 4 now"):
        RunFolder(tmp_path, make_config(seed=4))


def test_what_may_change_is_taken_over(tmp_path):
    leave_a_row(tmp_path)
    other = make_config(
        max_steps=2000, telemetry__samples=3, fleet__servers=7, checkpoint__keep=5, sft__rows_per_step=9
    )
    with RunFolder(tmp_path, other) as run:
        run.resume(0)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["max_steps"], saved["fleet"]["servers"], saved["checkpoint"]["keep"]) == (2000, 7, 5)
    with pytest.raises(ConfigError, match=r"config\.sft\.rows_per_step is 9 there and 10 now"):
        RunFolder(tmp_path, make_config(sft__rows_per_step=10), warm_start=True)


class FakeWandb(types.ModuleType):
    """As W&B documents itself: what is logged with an older step than the last is dropped; an axis is a value."""

    def __init__(self):
        super().__init__("wandb")
        self.rows, self.axes, self.last = [], {}, -1
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)

    def init(self, **options):
        self.options = options
        return self

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, values, step=None):
        step = self.last + 1 if step is None else step
        if step >= self.last:
            self.last = step
            self.rows.append(values)

    def finish(self):
        pass

    def curve(self, name):
        axis = self.axes.get(name, "step")
        return [(row[axis], row[name]) for row in self.rows if name in row]


def test_wandb_gets_evaluations_beside_training_and_what_is_made_again(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = make_config(telemetry__wandb_project="mine")
    with RunFolder(tmp_path, config) as run:
        run.resume(0)
        for step in range(1, 7):
            run.metrics(step, {"reward": step, "lag": {"mean": 0.5}})
        evaluate(run, 4)  # two updates later
    with RunFolder(tmp_path, config) as run:  # the checkpoint was that of step 4
        run.resume(4)
        run.metrics(5, {"reward": 50})
    assert wandb.curve("reward") == [*((s, s) for s in range(1, 7)), (5, 50)]
    assert wandb.curve("lag/mean") == [(s, 0.5) for s in range(1, 7)]
    assert wandb.curve("evaluation/pass_rate") == [(4, pytest.approx(7 / 12))]
    (tmp_path / "wandb_id").write_bytes(b"\xff\0")
    with RunFolder(tmp_path, config) as run, pytest.raises(ConfigError, match="wandb_id: is no W&B id"):
        run.resume(4)


def test_each_trainer_of_a_run_is_above_the_one_before(tmp_path, monkeypatch):
    """Whatever the clock says, and before there is any checkpoint."""
    with RunFolder(tmp_path, make_config()) as run:
        first = run.incarnation
        run.outrank(5)
        assert run.incarnation == first
        run.outrank(first + 10**9)  # what a server tells
        assert run.incarnation == first + 10**9 + 1
    monkeypatch.setattr(time, "time_ns", lambda: 1000)  # a clock that begins anew
    with RunFolder(tmp_path, make_config()) as run:
        assert run.incarnation == first + 10**9 + 2
    (tmp_path / "incarnation").write_text("torn")
    with RunFolder(tmp_path, make_config()) as run:
        assert run.incarnation == 1000
    for left, named in ((2**64 - 1, 1000), (2**63, 1000), (2**63 - 1, 2**63), (-5, 1000)):
        (tmp_path / "incarnation").write_text(str(left))  # of one that believed a server that made it up
        for expected in (named, 1000 if named == 2**63 else 1001):
            with RunFolder(tmp_path, make_config()) as run:
                assert run.incarnation == expected
    with RunFolder(tmp_path, make_config()) as run:
        first = run.incarnation
        run.outrank(2**64 - 2)  # a checkpoint's
        assert run.incarnation == first


HOLDS = """
import sys
from scalerl_jax.config import Config
from scalerl_jax.run.folder import RunFolder
run = RunFolder(sys.argv[1], Config())
print("holds", flush=True)
sys.stdin.read()
"""


def test_two_trainers_cannot_share_a_workdir(tmp_path):
    holder, said = begin_python("-c", HOLDS, tmp_path, stdin=subprocess.PIPE)
    assert said.readline() == "holds\n"
    with pytest.raises(ConfigError, match=f"a trainer \\(process {holder.pid}\\) is running in it"):
        RunFolder(tmp_path, Config())
    holder.kill()  # the lock goes with its process, however that ended
    holder.wait()
    holder.stdin.close()
    said.close()
    RunFolder(tmp_path, Config()).close()


def test_a_workdir_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--workdir=.*file"):
        RunFolder(tmp_path / "file", make_config())
    with pytest.raises(ConfigError, match=r"--workdir=.*inside"):
        RunFolder(tmp_path / "file" / "inside", make_config())


def test_wandb_asked_for_but_not_installed(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.telemetry\.wandb_project=mine: the package wandb is not installed"):
        RunFolder(tmp_path / "run", make_config(telemetry__wandb_project="mine"))
    assert not (tmp_path / "run").exists()


def read_events(path):
    accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_reads_one_curve_over_restarts(tmp_path):
    config = Config()
    for start, end, factor in ((0, 6, 1), (4, 8, 10), (8, 9, 100)):
        with RunFolder(tmp_path, config) as run:
            run.resume(start)
            for step in range(start + 1, end + 1):
                run.metrics(step, {"reward": factor * step, "lag": {"mean": 0.5}, "name": "text", "list": [1]})
            evaluate(run, end)
    scalars = read_events(tmp_path / "tensorboard")
    assert scalars["reward"] == [(s, s) for s in (1, 2, 3, 4)] + [(s, 10 * s) for s in (5, 6, 7, 8)] + [(9, 900)]
    assert [step for step, _ in scalars["lag/mean"]] == list(range(1, 10))
    assert scalars["evaluation/pass_rate"] == [(8, pytest.approx(7 / 12)), (9, pytest.approx(7 / 12))]
    assert "name" not in scalars and "list" not in scalars


def test_writing_events_needs_neither_torch_nor_tensorflow(tmp_path):
    code = (
        "import sys, scalerl_jax.run.event_file as e; f = e.EventFile(sys.argv[1], first_step=1); f.add(1, {'x': 2.0});"
        "assert not {'torch', 'tensorflow', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, cwd=ROOT)
    assert read_events(tmp_path) == {"x": [(1, 2.0)]}  # though nothing was closed


def test_samples_of_rollouts(tmp_path):
    second = Completion(
        2, "g", 1, np.array([8], np.int32), np.array([-0.25], np.float32), ((5, 0, 1),), (), "stop",
        prompt=np.array([9, 9], np.int32),
    )  # fmt: skip
    completion = Completion(
        2, "g", 1, np.array([5, 6, 7], np.int32), np.array([-0.5, 0.0, -1e-9], np.float32),
        ((4, 0, 2), (5, 2, 3)), ((1, 2),), "stop", replies=((1, 2),), others=(second,),
    )  # fmt: skip
    group = types.SimpleNamespace(
        number=3,
        row=types.SimpleNamespace(text="1+1=", answer="2", task="hard"),
        completions=(completion,),
        scores=(types.SimpleNamespace(correct=False), types.SimpleNamespace(correct=True)),
    )
    pieces = ["<think>", "é</think>", "2"]
    texts = dict(zip([5, 6, 7, 8, 9], [*pieces, "3", "say "], strict=True))
    tokenizer = types.SimpleNamespace(
        decode=lambda ids: "".join(texts[i] for i in ids), pieces=lambda ids: [texts[i] for i in ids]
    )
    with RunFolder(tmp_path, make_config(telemetry__samples=2, telemetry__samples_every=10)) as run:
        run.resume(0)
        assert [step for step in range(25) if run.wants_rollouts(step)] == [0, 10, 20]
        run.rollouts(10, samples_of([group] * 2, np.array([[-1.0, 1.0]] * 2), tokenizer))
    rows = read_rows(tmp_path / "rollouts" / "step-00000010.jsonl")
    assert len(rows) == 4 and rows[1]["branch"] == [2, 2] and rows[1]["token_ids"] == [8]
    assert (rows[1]["prompt"], rows[1]["completion"], rows[1]["verdict"]) == ("say say ", "3", True)
    assert rows[0] == {
        "step": 10,
        "group": 3,
        "index": 1,
        "branch": [1, 2],
        "prompt": "1+1=",
        "answer": "2",
        "completion": "<think>é</think>2",
        "token_ids": [5, 6, 7],
        "logprobs": [-0.5, 0.0, 0.0],
        "versions": [[4, 0, 2], [5, 2, 3]],
        "forced": [[1, 2]],
        "replies": [[1, 2]],
        "verdict": True,
        "reward": 1.0,
        "finish_reason": "stop",
        "task": "hard",
        "pieces": ["<think>", "é</think>", "2"],
    }


def test_what_is_of_no_run_stays(tmp_path):
    """A model's config.json, and folders of a warm start's names, are not written over."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"the config\.json there is not a run's"):
        RunFolder(str(tmp_path), make_config())
    assert (tmp_path / "config.json").read_text() == '{"model_type": "llama"}'
    (tmp_path / "config.json").unlink()
    (tmp_path / "traces").mkdir()
    with pytest.raises(ConfigError, match="holds traces, and no config"):
        RunFolder(str(tmp_path), make_config(), warm_start=True)
    assert not (tmp_path / "config.json").exists()
    RunFolder(str(tmp_path), make_config()).close()
    with pytest.raises(ConfigError, match=r"^--workdir: is empty$"):
        RunFolder("", make_config())
