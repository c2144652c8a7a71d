"""The glossary of a run's numbers, against the rows that are written and the code that writes them."""

import ast
import json
import pathlib

import pytest

from docs.generate import metric_names
from docs.generate.metric_names import EVALS, LEDGER_FILE, METRICS, ROW, WARM_START, unexplained
from scalerl_jax.learner.batch import per_token
from scalerl_jax.rollouts.status import WaitTimes
from scalerl_jax.rollouts.weights.publisher import SyncStats
from scalerl_jax.run import ledger_file
from scalerl_jax.run.jsonl import read_rows
from tests.support.paths import ROOT
from tests.support.processes import run_command, single_threaded
from tests.support.runs import CONFIG, Run
from tests.support.tiny_task import EXPERTS, write_model, write_task


def written() -> set[str]:
    """Every name in the code that may write a row: its texts, names of keywords and fields."""
    found: set[str] = set()
    for path in pathlib.Path(ROOT, "scalerl_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.arg | ast.keyword) and node.arg:
                found.add(node.arg)
    return found


def test_every_key_is_written_somewhere() -> None:
    names = written()
    made = {f"{side}_{kind}_hours" for side in ("trainer", "generator") for kind in ledger_file.CLASSES}
    for table in [*METRICS.values(), *EVALS.values(), LEDGER_FILE, WARM_START]:
        for key in table:
            for part in key.split("/"):
                if part not in ("*", "weight_*", "score") and part not in made:
                    assert part in names, f"{key}: nothing writes {part!r}"


def test_no_key_is_explained_twice() -> None:
    for tables in (METRICS, EVALS):
        keys = [key for table in tables.values() for key in table]
        assert len(keys) == len(set(keys))


def test_what_parts_of_a_row_say_is_explained() -> None:
    sums = dict.fromkeys(
        ("tokens", "loss", "gradient_norm", "micro_batches", "row_use", "entropy", "mismatch", "other_bits", "kl",
         "ratio", "ratio_squared", "clipped", "masked", "max_mismatch", "max_ratio", "reference_kl", "compared",
         "teacher_divergence", "teacher_tail"), 1.0
    )  # fmt: skip
    for part in (per_token(sums), WaitTimes().drain(), {"pushes": SyncStats().drain()}):
        assert part and unexplained(part, *METRICS.values()) == []
    assert unexplained(ledger_file.nothing_spent(), LEDGER_FILE) == []


def test_a_key_without_a_meaning_is_found() -> None:
    row = {"step": 1, "surprise": 2, "servers": {"a:1": {"tokens": 3, "new": 4}}, "lags": {}}
    assert unexplained(row, *METRICS.values()) == ["surprise", "servers/a:1/new"]
    assert list(metric_names.flat({"a": {"b": [1], "c": {}}})) == ["a/b"]


@pytest.mark.slow
def test_the_rows_of_a_run_are_explained(tmp_path) -> None:
    """With experts, router replay, a KL to the start, two rewards: the keys that most runs have not."""
    model = write_model(str(tmp_path / "model"), **EXPERTS)
    (tmp_path / "task").mkdir()
    (tmp_path / "brief.py").write_text("def brief(completion, **row):\n    return float(len(completion) < 3)\n")
    rewards = json.dumps({"environment": 1, f"{tmp_path}/brief.py:brief": 0.1})
    flags = ["rollout.router_replay=true", f"environment.rewards={rewards}", "objective.reference_kl=0.1"]
    flags += ["objective.filter_zero_variance=false", "evaluation.every=2"]  # each batch has a gradient
    run = Run(
        tmp_path / "run", f"--config={CONFIG}", f"--config.model.path={model}", *write_task(str(tmp_path / "task")),
        *(f"--config.{flag}" for flag in flags),
    ).start()  # fmt: skip
    try:
        run.finish()
    finally:
        run.close()
    rows, evaluations = run.metrics, run.rows("evals.jsonl")
    assert len(rows) == 12 and len(evaluations) == 7
    assert {key for row in rows for key in unexplained(row, *METRICS.values())} == set()
    assert {key for row in evaluations for key in unexplained(row, *EVALS.values())} == set()
    seen = {key for row in rows for key in metric_names.flat(row)}
    assert {"experts_moved", "reference_kl", "score/rewards/brief", "score/rewards/brief/errors"} <= seen
    # And the other way round: a run has all of these.
    for title in ("The batch", "The update", "Trainer against generators", "Where the time went", "Compute so far"):
        assert {key for key in METRICS[title] if "*" not in key} <= seen
    with open(tmp_path / "run" / "ledger.json", encoding="utf-8") as file:
        assert unexplained(json.load(file), LEDGER_FILE) == []


@pytest.mark.slow
def test_the_rows_of_a_warm_start_are_explained(tmp_path) -> None:
    flags = ["--config=configs/quickstart.py", f"--workdir={tmp_path / 'warm-start'}"]
    flags += ["--config.sft.max_steps=2", "--config.sft.log_every=1"]
    run_command("scalerl_jax.sft", *flags, environment=single_threaded()).check_returncode()
    rows = read_rows(str(tmp_path / "warm-start" / "metrics.jsonl"))
    assert rows and {key for row in rows for key in unexplained(row, ROW, WARM_START)} == set()
