"""scalerl-compare as a user runs it."""

import functools
import json
import os

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from scalerl_jax.cli.entry import UserError
from scalerl_jax.scaling import decide
from scalerl_jax.scaling.commands import scalerl_compare
from tests.scaling.simulated import FIGURE_2, LEAVE_ONE_OUT, TABLE_1, curve, sampled_passes
from tests.support.processes import run_command

COMPUTE = np.concatenate([[0.0], np.arange(256, 16_001, 256.0)])
LOO = {"ScaleRL": TABLE_1["ScaleRL"], **LEAVE_ONE_OUT}
command = functools.partial(run_command, "scalerl_jax.scaling.commands.scalerl_compare")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """loo.csv: the leave-one-out runs without noise; a, b: run folders with counts; one.csv: a single run."""
    path = tmp_path_factory.mktemp("compare")
    lines = ["recipe,gpu_hours,accuracy"]
    for name, triple in LOO.items():
        lines += [f"{name},{c:.6f},{s:.9f}" for c, s in zip(COMPUTE, curve(COMPUTE, *triple))]
    (path / "loo.csv").write_text("\n".join(lines) + "\n")
    (path / "one.csv").write_text("\n".join(["gpu_hours,accuracy", *(line[8:] for line in lines[1:64])]) + "\n")
    compute = COMPUTE[COMPUTE <= 4096]
    for seed, (name, triple) in enumerate((("a", TABLE_1["ScaleRL"]), ("b", FIGURE_2["DAPO"]))):
        (path / name).mkdir()
        passes = sampled_passes(np.random.default_rng(seed), curve(compute, *triple), runs=1, prompts=300)[0]
        rows = [
            {
                "step": round(c), "device_hours": c, "pass_rate": p.sum() / 4800, "samples": 16, "passes": p.tolist(),
            }
            for c, p in zip(compute, passes)
        ]  # fmt: skip
        (path / name / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def in_process(*paths, **given):
    """The command without the start of a process."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(**{"x": "gpu_hours", "y": "accuracy", **given}):
        scalerl_compare.main(list(paths))


@pytest.mark.slow
def test_the_leave_one_out_table_in_one_command(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    in_process(
        "loo.csv", run_column="recipe", burn_in=1500.0, fit_until="8000", common_asymptote=0.605, baseline="8op",
        out="out/loo",
    )  # fmt: skip
    told = capsys.readouterr().out
    assert sorted(os.listdir(folder / "out/loo")) == ["compare.json", "compare.png", "compare.svg"]
    written = json.loads((folder / "out/loo/compare.json").read_text())
    assert written["baseline"] == "8op" and written["common_asymptote"] == 0.605
    assert [row["run"] for row in written["table"]] == list(LOO)
    table = {row["run"]: row for row in written["table"]}
    assert table["8op"]["asymptote_difference"] is None
    assert table["fp32"]["with_common_asymptote"]["exponent"] == pytest.approx(1.97, abs=0.01)
    assert table["npr"]["with_common_asymptote"]["exponent"] == pytest.approx(1.62, abs=0.01)
    assert len(written["pairs"]) == 36
    for pair in written["pairs"]:
        assert f"{pair['sentence']}." in told
    assert "against 8op; C is gpu_hours" in told
    assert "</svg>" in (folder / "out/loo/compare.svg").read_text()
    assert (folder / "out/loo/compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_two_run_folders_with_forecast_and_plan(folder):
    done = command(
        "a", "b", "--forecast", "--target=0.6", "--budget=16000", "--plan_budget=8000", "--out=out/both", folder=folder
    )
    assert done.returncode == 0, done.stderr
    written = json.loads((folder / "out/both/compare.json").read_text())
    by_name = {one["run"]: one for one in written["forecasts"]}
    assert by_name["a"]["budget"] == 16_000
    true = float(curve(16_000, *TABLE_1["ScaleRL"]))
    assert by_name["a"]["score_at_budget"]["low"] <= true <= by_name["a"]["score_at_budget"]["high"]
    for name, one in by_name.items():
        assert f"{name}: {one['advice']}: {one['reason']}." in done.stdout
        assert f"{name}: to 16k; up to there about 16k device-hours at this run's rate." in done.stdout
    plan = written["plan"]
    assert plan["by"] == "score" and plan["at"] == 16_000
    assert plan["best_now"] == "a" and sum(plan["chance_to_be_best"].values()) == pytest.approx(1)
    assert all(one["compute"] <= 8000 for one in plan["extensions"])
    assert f"{plan['reason']}." in done.stdout
    assert "C is typical device-hours" in done.stdout
    (pair,) = written["pairs"]
    assert pair["first"] == "a"


def test_an_extension_is_shared_by_the_seeds_of_a_run(folder, monkeypatch, capsys):
    for name in "ab":
        for seed in range(2):
            (folder / f"runs/{name}/{seed}").mkdir(parents=True)
            (folder / f"runs/{name}/{seed}/evals.jsonl").write_bytes((folder / name / "evals.jsonl").read_bytes())
    extension = decide.Extension({"b": 8000.0}, wrong=0.1, regret=0.01)
    plan = decide.Plan(None, 0.02, "a", 0.3, 0.02, {"a": 0.7, "b": 0.3}, [extension], extension, "extend b by 8000")
    monkeypatch.setattr(scalerl_compare, "_plan", lambda *_: plan)
    monkeypatch.setattr(scalerl_compare, "compare", lambda *_, **__: None)
    monkeypatch.chdir(folder)
    paths = [f"runs/{name}/{seed}" for name in "ab" for seed in range(2)]
    in_process(*paths, x=None, y=None, seeds="folder", plan_budget=8000.0, out="out/seeds")
    told = capsys.readouterr().out
    assert "\nb: each of 2 seeds to 8.096k; up to there about 8.1k device-hours at this run's rate.\n" in told


def test_one_run_can_be_forecast(folder, monkeypatch):
    monkeypatch.chdir(folder)
    in_process("one.csv", fit_until="half", forecast=True, out="out/one")
    (found,) = json.loads((folder / "out/one/compare.json").read_text())["forecasts"]
    assert found["reached"] == 7936
    assert found["gain_of_a_doubling"]["value"] == pytest.approx(
        float(curve(15_872, *TABLE_1["ScaleRL"]) - curve(7936, *TABLE_1["ScaleRL"])), abs=1e-5
    )
    assert os.listdir(folder / "out/one") == ["compare.json"]


@pytest.mark.parametrize(
    ("paths", "given", "said"),
    [
        (["loo.csv"], {"run_column": None}, "loo.csv: line 65: .* several runs in one file: .*--run_column"),
        (["one.csv"], {"run_column": None}, "one.csv: holds one run, 'one'; a comparison needs two"),
        (["loo.csv"], {"baseline": "none"}, "--baseline=none: no such run; there are ScaleRL, plan"),
        (["loo.csv"], {"target": 0.6}, "--target: .* add --forecast"),
        (["loo.csv"], {"budget": 9000.0}, "--budget: .* add --forecast or --plan_budget"),
        (["loo.csv"], {"forecast": True, "budget": 9000.0}, "ScaleRL: --budget=9000: these points reach 15872 already"),
        (["loo.csv"], {"calibration": "none.json"}, "--calibration: is for scalerl-fit alone"),
        (["loo.csv"], {"common_asymptote": 0.1}, r"--common_asymptote=0.1: is not above the 0\.\d+ that"),
        (["loo.csv"], {"plan_budget": -1.0}, "--plan_budget=-1: must be a compute above 0"),
        (["loo.csv"], {"x": "hours"}, "loo.csv: no column 'hours'"),
        (["loo.csv"], {"r0": "high"}, "--r0=high: must be a number or 'fit'"),
        (["none.csv"], {}, "none.csv: no such file"),
        ([], {}, "no files given, for example: scalerl-compare"),
        (["loo.csv"], {"out": None}, "--out: no folder given for compare.json"),
        (["loo.csv"], {"out": "loo.csv"}, "--out=loo.csv: is a file"),
    ],
)
def test_every_mistake_is_named(folder, monkeypatch, paths, given, said):
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=said) as caught:
        in_process(*paths, **{"run_column": "recipe", "out": "out/never", **given})
    assert "\n" not in str(caught.value)
    assert not (folder / "out/never").exists()


def test_a_mistake_ends_with_code_2_and_one_line(folder):
    done = command("one.csv", "--x=gpu_hours", "--y=accuracy", "--out=out/never", folder=folder)
    assert done.returncode == 2
    assert done.stderr.startswith("error: one.csv: holds one run, 'one'")
    assert done.stderr.count("\n") == 1
    assert not (folder / "out/never").exists()
