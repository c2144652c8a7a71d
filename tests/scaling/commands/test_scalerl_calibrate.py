"""scalerl-calibrate as a user runs it, and what scalerl-fit makes of its file."""

import functools
import json
import os
import re

import numpy as np
import pytest

from scalerl_jax.scaling.average import read_calibration
from scalerl_jax.scaling.law import LAWS
from tests.scaling.simulated import TABLE_1, curve
from tests.support.processes import run_command

COMPUTE = np.linspace(0, 16_000, 17)
TRIALS = 4000
calibrate = functools.partial(run_command, "scalerl_jax.scaling.commands.scalerl_calibrate")
fit = functools.partial(run_command, "scalerl_jax.scaling.commands.scalerl_fit")
READ = ["--x=hours", "--y=rate", "--run_column=recipe", "--seed_column=seed", "--passes=passes", "--trials=trials"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """bank.csv: two recipes, one of them with two seeds; one.csv: one recipe; begun.csv: a run that has just begun."""
    path = tmp_path_factory.mktemp("calibrate")
    rng = np.random.default_rng(0)
    head, lines = "recipe,seed,hours,rate,passes,trials", []
    for recipe, seed in (("ScaleRL", 0), ("ScaleRL", 1), ("8gen", 0)):
        passes = rng.binomial(TRIALS, curve(COMPUTE, *TABLE_1[recipe]))
        lines += [f"{recipe},{seed},{c:g},{p / TRIALS:.6f},{p},{TRIALS}" for c, p in zip(COMPUTE, passes)]
    begun = ["32k,0,0,0.4,1600,4000", "32k,0,100,0.4,1600,4000"]
    (path / "bank.csv").write_text("\n".join([head, *lines]) + "\n")
    (path / "begun.csv").write_text("\n".join([head, *begun]) + "\n")
    (path / "late.csv").write_text("\n".join([head, *lines[1:17]]) + "\n")
    (path / "chart.csv").write_text("Step,a - acc,b - acc\n0,.2,.2\n1,.3,.3\n2,.4,.4\n")
    (path / "one.csv").write_text("\n".join([head, *lines[:34]]) + "\n")
    return path


@pytest.fixture(scope="module")
def calibrated(folder):
    done = calibrate("bank.csv", "begun.csv", *READ, "--out=out", folder=folder)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_every_law_is_judged_on_runs_of_other_recipes(calibrated, folder):
    assert "begun.csv: 32k 0 is left out: 1 points of different compute above 0" in calibrated.stdout
    assert "later evaluations of 3 runs of 2 recipes, foretold by those of other recipes" in calibrated.stdout
    assert sorted(os.listdir(folder / "out")) == [
        "calibrate.json",
        "calibrate.png",
        "calibrate.svg",
        "calibration.json",
    ]
    written = json.loads((folder / "out/calibrate.json").read_text())
    assert {(case["run"], case["fraction"]) for case in written["cases"]} == {
        (run, fraction) for run in ("ScaleRL 0", "ScaleRL 1", "8gen 0") for fraction in (0.3, 0.5, 0.7)
    }
    rows = {(row["fraction"], row["forecast"]): row for row in written["summaries"]}
    for name in ("average", *LAWS):
        cases = [case["forecasts"][name] for case in written["cases"] if case["fraction"] == 0.5]
        row = rows[0.5, name]
        assert row["mean_error"] == pytest.approx(np.mean([abs(case["error"]) for case in cases]))
        assert row["covered"] == pytest.approx(np.mean([case["covered"] for case in cases], axis=0))
        told = f"{row['covered'][2]:.0%} +{row['crps']:.4f} +{row['mean_error']:.3f}"
        assert re.search(rf"{name} .*{told}", calibrated.stdout), told
    assert "from 50%: A is called identified in " in calibrated.stdout


@pytest.mark.slow
def test_given_numbers_are_judged_and_nothing_is_fitted(calibrated, folder, tmp_path):
    file = folder / "out" / "calibration.json"
    done = calibrate(folder / "bank.csv", *READ, f"--calibration={file}", f"--out={tmp_path}/checked")
    assert done.returncode == 0, done.stderr
    assert "calibration.json" not in done.stdout.rpartition("written: ")[2]
    assert sorted(os.listdir(tmp_path / "checked")) == ["calibrate.json", "calibrate.png", "calibrate.svg"]
    numbers = read_calibration(str(file))
    cases = json.loads((tmp_path / "checked" / "calibrate.json").read_text())["cases"]
    runs = {f"{recipe} {seed}" for recipe, seed in (("ScaleRL", 0), ("ScaleRL", 1), ("8gen", 0))}
    assert {case["run"] for case in cases} == runs and numbers.runs == 3
    own = json.loads((folder / "out" / "calibrate.json").read_text())["cases"]
    # What a law says of a run is the same; what is believed of it is not.
    assert [case["sigmoid"] for case in cases] == [case["sigmoid"] for case in own]
    assert [case["forecasts"]["average"] for case in cases] != [case["forecasts"]["average"] for case in own]


@pytest.mark.slow
def test_the_file_is_what_scalerl_fit_takes(calibrated, folder):
    made = read_calibration(str(folder / "out/calibration.json"))
    assert made.runs == 3 and sum(map(sum, made.prior.values())) == pytest.approx(1, abs=0.01)
    flags = [*READ, "--fit_until=half", "--out=fit"]
    said = {}
    for name, flag in (("own", ["--calibration=out/calibration.json"]), ("default", [])):
        done = fit("bank.csv", *flags, *flag, folder=folder)
        assert done.returncode == 0, done.stderr
        (said[name],) = re.findall(r"8gen: forecast .*", done.stdout)
        entries = {entry["run"]: entry for entry in json.loads((folder / "fit/fit.json").read_text())["fits"]}
        (found,) = [value for value in entries["8gen"].values() if isinstance(value, dict) and "interval_90" in value]
        low, high = found["interval_90"]
        assert said[name] == (
            f"8gen: forecast at half of the compute (hours): {found['score']:.3f} at the end "
            f"(90 %: {low:.3f} to {high:.3f}); measured {found['measured']:.3f}; "
            f"{found['held_out_within_90']} of 8 later evaluations within."
        )
    assert said["own"] != said["default"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bank.csv", *READ[:-1]], "--trials: no column given; without counts the noise of an evaluation is not known"),
        (["one.csv", *READ], "all runs are of one recipe, 'ScaleRL': none is left to judge it by"),
        (["begun.csv", *READ], "no run has points enough"),
        (["none.csv", *READ], "none.csv"),
        (
            ["late.csv", *READ],
            "late.csv: ScaleRL 0: no row at compute 0 to take R0 from: evaluate before the first step",
        ),
        (
            ["bank.csv", *READ, "--r0=fit"],
            "--r0: is not for scalerl-calibrate, which takes R0 and all evaluations from the rows",
        ),
        (
            ["chart.csv", "--x=Step", "--y=acc", "--passes=p", "--trials=n"],
            "chart.csv: --passes=p: the export of a chart has no",
        ),
    ],
)
def test_a_mistake_ends_with_code_2_one_line_and_no_file(arguments, said, folder):
    done = calibrate(*arguments, "--out=wrong", folder=folder)
    assert done.returncode == 2
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ") and said in line
    assert not os.path.exists(folder / "wrong") or not os.listdir(folder / "wrong")


@pytest.mark.slow
def test_a_file_that_is_no_calibration_is_named(calibrated, folder):
    (folder / "broken.json").write_text(json.dumps({"scales": [1], "prior": {}}))
    done = fit("bank.csv", *READ, "--calibration=broken.json", "--out=wrong", folder=folder)
    assert done.returncode == 2
    assert "broken.json: is not a calibration as scalerl-calibrate writes it" in done.stderr
