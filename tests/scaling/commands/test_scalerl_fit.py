"""scalerl-fit as a user runs it."""

import functools
import json
import os
import re

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from scalerl_jax.cli.entry import UserError
from scalerl_jax.scaling import readers
from scalerl_jax.scaling.commands import scalerl_fit
from tests.scaling.simulated import TABLE_1, curve, sampled_passes
from tests.support.processes import run_command

COMPUTE = np.concatenate([[0.0], np.linspace(250, 16_000, 64)])
command = functools.partial(run_command, "scalerl_jax.scaling.commands.scalerl_fit")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """table.csv: rows of Table 1 as runs without noise; rewards.tsv: one of them in [-1, 1], in seconds."""
    path = tmp_path_factory.mktemp("fit")
    lines = ["recipe,gpu_hours,accuracy"]
    for name in ("ScaleRL", "8gen", "bs2048"):
        scores = curve(COMPUTE, *TABLE_1[name])
        lines += [f"{name},{c:.6f},{s:.9f}" for c, s in zip(COMPUTE, scores)]
    (path / "table.csv").write_text("\n".join(lines) + "\n")
    scores = 2 * curve(COMPUTE, *TABLE_1["ScaleRL"]) - 1
    rows = [f"{c * 3600:.3f}\t{s:.9f}" for c, s in zip(COMPUTE, scores)]
    (path / "counts.csv").write_text("x,y,p,n\n0,.5,1,2\n1,.5,3,2\n2,.5,1,2\n3,.5,1,2\n")
    (path / "rewards.tsv").write_text("seconds\treward\n" + "\n".join(rows) + "\n")
    return path


@pytest.mark.slow
def test_half_of_published_runs_tells_their_end(folder):
    done = command(
        "table.csv", "--x=gpu_hours", "--y=accuracy", "--run_column=recipe", "--burn_in=1500", "--fit_until=half",
        "--target=0.6", "--out=out/table", folder=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = json.loads((folder / "out/table/fit.json").read_text())
    fits = {entry["run"]: entry for entry in written["fits"]}
    assert list(fits) == ["ScaleRL", "8gen", "bs2048"]
    for name, found in fits.items():
        midpoint, exponent, asymptote, initial = TABLE_1[name]
        assert found["asymptote"] == pytest.approx(asymptote, abs=5e-4)
        assert found["exponent"] == pytest.approx(exponent, abs=5e-3)
        assert found["midpoint"] == pytest.approx(midpoint, rel=1e-3)
        assert found["initial_reward"] == pytest.approx(initial)
        assert abs(found["held_out_error"]) < 1e-4
        assert found["held_out"] == 32
    reached = fits["ScaleRL"]["compute_to_target"]
    assert curve(reached, *TABLE_1["ScaleRL"]) == pytest.approx(0.6, abs=1e-4)
    assert fits["8gen"]["compute_to_target"] is None
    assert "8gen: the fitted curve never reaches 0.6" in done.stdout
    assert fits["ScaleRL"]["identified"] and not fits["bs2048"]["identified"]
    assert re.search(r"ScaleRL +0\.610 \[0\.610, 0\.610\] +±0\.02 ", done.stdout)
    assert "ScaleRL: A is identified: 0.610 to 0.610 (95 %), and 0.02 either way between seeds.\n" in done.stdout
    assert re.search(
        r"\nbs2048: A is not identified yet: .* fit as well; evaluations up to about 1\d000 would identify it",
        done.stdout,
    )
    assert (folder / "out/table/fit.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (folder / "out/table/fit.svg").read_text()
    assert sorted(os.listdir(folder / "out/table")) == ["fit.json", "fit.png", "fit.svg"]


@pytest.mark.slow
def test_rewards_units_and_bootstrap(folder):
    done = command(
        "rewards.tsv", "--x=seconds", "--x_unit=s:h", "--y=reward", "--burn_in=1500", "--bootstrap=20",
        "--out=out/rewards", folder=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rewards in [-1, 1] are read as accuracy" in done.stdout
    (found,) = json.loads((folder / "out/rewards/fit.json").read_text())["fits"]
    assert found["midpoint"] == pytest.approx(2542, rel=1e-3)
    assert found["asymptote"] == pytest.approx(0.610, abs=5e-4)
    assert found["bootstrap_95"]["asymptote"] == pytest.approx([0.61, 0.61], abs=1e-3)


def run_here(monkeypatch, folder, paths, **given):
    """The command in this process; what it wrote to scalerl_fit.json."""
    monkeypatch.chdir(folder)
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(**given):
        scalerl_fit.main(paths)
    return {one["run"]: one for one in json.loads((folder / given["out"] / "fit.json").read_text())["fits"]}


@pytest.mark.slow
def test_seeds_are_those_of_one_folder(tmp_path, monkeypatch):
    """Folders of one name in two places are two runs, and a seed's label does not make two runs one."""
    for sweep, row in (("old", "ScaleRL"), ("new", "8gen")):
        for seed in range(2):
            path = tmp_path / sweep / "base" / f"seed{seed}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            scores = curve(COMPUTE[::2], *TABLE_1[row])
            path.write_text("x,y\n" + "".join(f"{c},{s:.6f}\n" for c, s in zip(COMPUTE[::2], scores)))
    paths = [f"{sweep}/base/seed{seed}.csv" for sweep in ("old", "new") for seed in range(2)]
    fits = run_here(monkeypatch, tmp_path, paths, x="x", y="y", seeds="folder", bootstrap=20, out="out")
    assert list(fits) == ["base (old/base/seed0.csv)", "base (new/base/seed0.csv)"]
    for entry, row in zip(fits.values(), ("ScaleRL", "8gen")):
        assert entry["seeds"] == 2
        assert entry["points"] == 64
        assert entry["asymptote"] == pytest.approx(TABLE_1[row][2], abs=1e-3)


def test_checkpoints_of_transformers_are_by_their_steps(tmp_path, monkeypatch, capsys):
    log = [{"step": c, "eval_acc": s} for c, s in zip(COMPUTE[::2], curve(COMPUTE[::2], *TABLE_1["8gen"]).tolist())]
    paths = [f"base/seed{seed}/checkpoint-16000/trainer_state.json" for seed in range(2)]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(json.dumps({"log_history": log}))
    fits = run_here(monkeypatch, tmp_path, paths, y="eval_acc", seeds="folder", target=0.5, out="out")
    assert list(fits) == ["base"] and fits["base"]["seeds"] == 2
    assert fits["base"]["asymptote"] == pytest.approx(TABLE_1["8gen"][2], abs=1e-3)
    assert json.loads((tmp_path / "out/fit.json").read_text())["x"] == "step"
    told = capsys.readouterr().out
    assert "C is step;" in told and re.search(r"reaches 0.5 at \S+ step", told) and "hours" not in told


def test_seeds_by_column_are_those_of_one_run(tmp_path, monkeypatch):
    """Files without a column that names their run are runs of their own, whatever their seeds are called."""
    monkeypatch.chdir(tmp_path)
    for name, seeds in (("plain", "01"), ("new", "01"), ("more", "2")):
        rows = [f"base,{seed},{c},{c / 10}" for seed in seeds for c in range(4)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["r,s,x,y", *rows]) + "\n")

    def together(*paths, **columns):
        flags.FLAGS.mark_as_parsed()
        with flagsaver.flagsaver(seed_column="s", **columns):
            groups = scalerl_fit._seeds_together(readers.read_runs(paths, x="x", y="y", seed_column="s", **columns))
        return {name: [(one.source, one.seed) for one in members] for name, members in groups.items()}

    both = [("plain.csv", "0"), ("plain.csv", "1")]
    assert together("plain.csv", "new.csv") == {"plain": both, "new": [("new.csv", "0"), ("new.csv", "1")]}
    assert together("plain.csv", "more.csv", run_column="r") == {"base": [*both, ("more.csv", "2")]}
    for paths in (("plain.csv", "new.csv"), ("plain.csv", "plain.csv")):
        with pytest.raises(UserError, match=f"{paths[1]}: seed '0' of 'base' is in plain.csv too"):
            together(*paths, run_column="r")


@pytest.mark.slow
def test_one_scale_for_all_runs_of_a_call(tmp_path, monkeypatch):
    """A run whose rewards all lie above 0 is still on the scale of the one beside it."""
    for name, asymptote, initial in (("low", 0.6, 0.4), ("high", 0.9, 0.55)):
        scores = 2 * curve(COMPUTE, 2542, 1.92, asymptote, initial) - 1
        (tmp_path / f"{name}.csv").write_text("x,y\n" + "".join(f"{c},{s:.6f}\n" for c, s in zip(COMPUTE, scores)))
    fits = run_here(monkeypatch, tmp_path, ["low.csv", "high.csv"], x="x", y="y", out="out")
    assert fits["low"]["asymptote"] == pytest.approx(0.6, abs=1e-3)
    assert fits["high"]["asymptote"] == pytest.approx(0.9, abs=1e-3)


@pytest.mark.slow
def test_bootstrap_over_the_prompts_too(tmp_path, monkeypatch):
    passes = sampled_passes(np.random.default_rng(0), curve(COMPUTE, *TABLE_1["ScaleRL"]), runs=1, prompts=100)[0]
    rows = [{"x": c, "y": p.mean() / 16, "passes": p.tolist(), "samples": 16} for c, p in zip(COMPUTE, passes)]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"x": "x", "y": "y", "passes": "passes", "trials": "samples", "bootstrap": 20}
    width = {}
    for prompts in ("fixed", "population"):
        fits = run_here(monkeypatch, tmp_path, ["run.jsonl"], **given, bootstrap_prompts=prompts, out=prompts)
        low, high = fits["run"]["bootstrap_95"]["asymptote"]
        width[prompts] = high - low
    assert width["population"] > 3 * width["fixed"]


def test_a_folder_that_cannot_be_written_is_said(folder, monkeypatch):
    (folder / "file").write_text("")
    with pytest.raises(UserError, match=r"--out=file/below: .*file is not a folder"):
        run_here(monkeypatch, folder, ["rewards.tsv"], x="seconds", y="reward", out="file/below")


def test_a_mistake_ends_with_code_2_one_line_and_no_file(folder):
    done = command("table.csv", "--x=gpu_hour", "--y=accuracy", "--out=out/never", folder=folder)
    assert done.returncode == 2
    assert done.stderr == "error: table.csv: no column 'gpu_hour' (--x); did you mean 'gpu_hours'?\n"
    assert not (folder / "out/never").exists()


@pytest.mark.parametrize(
    ("paths", "given", "said"),
    [
        (
            ["table.csv"],
            {"x": "gpu_hours", "y": "accuracy"},
            r"table.csv: line 67: .* several runs in one file: .*--run_column",
        ),
        (["rewards.tsv"], {"y_scale": "accuracy"}, r"rewards.tsv: line 2: accuracy -0.2 is outside its range, 0 to 1"),
        (["rewards.tsv"], {"burn_in": 1e9}, r"rewards.tsv: 0 points of different compute"),
        (["rewards.tsv"], {"x_unit": "s:FLOP"}, "no conversion"),
        (["rewards.tsv"], {"r0": "low"}, "--r0=low: must be a number or 'fit'"),
        (["rewards.tsv"], {"r0": "1.4"}, "--r0=1.4: is outside"),
        (["rewards.tsv"], {"fit_until": "nan"}, "--fit_until=nan: must be finite"),
        (["rewards.tsv"], {"passes": "n"}, "--passes and --trials go together"),
        (["none.csv"], {}, "none.csv: no such file"),
        ([], {}, "no files given"),
        (["rewards.tsv"], {"grid": "paper", "r0": "fit"}, "--r0='fit': the paper's grid holds R0 fixed"),
        (
            ["counts.csv"],
            {"x": "x", "y": "y", "passes": "p", "trials": "n"},
            "counts.csv: line 3: counts: passes must be",
        ),
        (["rewards.tsv"], {"bootstrap": 5, "bootstrap_prompts": "population"}, "need the passes of every prompt"),
        (["rewards.tsv"], {"out": None}, "--out: no folder"),
        (["rewards.tsv"], {"out": "table.csv"}, "--out=table.csv: is a file"),
    ],
)
def test_every_mistake_is_named(folder, monkeypatch, paths, given, said):
    with pytest.raises(UserError, match=said) as caught:
        run_here(monkeypatch, folder, paths, **{"x": "seconds", "y": "reward", "out": "out/never", **given})
    assert "\n" not in str(caught.value)
    assert not (folder / "out/never").exists()


@pytest.mark.slow
def test_a_run_that_does_not_rise_is_named_as_what_it_is(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    noise = 0.004 * rng.standard_normal(len(COMPUTE))
    for name, scores in {
        "rising": curve(COMPUTE, *TABLE_1["ScaleRL"]) + noise,
        "flat": 0.4 + noise,
        "falling": 1 - curve(COMPUTE, *TABLE_1["ScaleRL"]) + noise,
    }.items():
        (tmp_path / f"{name}.csv").write_text("x,y\n" + "".join(f"{c},{s:.6f}\n" for c, s in zip(COMPUTE, scores)))
    fits = run_here(
        monkeypatch, tmp_path, ["rising.csv", "flat.csv", "falling.csv"], x="x", y="y", r0="fit", target=0.6, out="out"
    )
    assert [one["trend"] for one in fits.values()] == ["rising", "flat", "falling"]
    assert fits["rising"]["asymptote"] == pytest.approx(0.61, abs=0.01)
    for name in ("flat", "falling"):
        one = fits[name]
        assert one["asymptote"] is one["exponent"] is one["midpoint"] is one["held_out_error"] is None
        assert not one["identified"] and "compute_to_target" not in one
    said = capsys.readouterr().out
    assert re.search(r"\nflat: flat: the reward stays near 0\.40\d \(0\.3\d+ to 0\.4\d+\), no rise shows above", said)
    assert re.search(r"\nfalling: the reward falls from 0\.\d+ to 0\.\d+: no rising sigmoid fits\.\n", said)


def test_what_was_done_to_the_rows_is_said(tmp_path, monkeypatch, capsys):
    scores = curve(COMPUTE, *TABLE_1["ScaleRL"])
    rows = [f"{c};{s:.6f}".replace(".", ",") for c, s in zip(COMPUTE, scores)]
    rows = ["compute;score", *rows[10:30], *rows[20:], *rows[:10], "17000,5;NaN"]
    (tmp_path / "run.csv").write_text("\r\n".join(rows) + "\r\n")
    fits = run_here(monkeypatch, tmp_path, ["run.csv"], x="compute", y="score", duplicates="last", out="out")
    assert fits["run"]["points"] == 64 and fits["run"]["asymptote"] == pytest.approx(0.61, abs=1e-3)
    said = capsys.readouterr().out
    assert "run.csv: 1 of 76 rows are left out: NaN in 'score'\n" in said
    assert "run.csv: 10 rows repeat a value of 'compute'; the last of each is kept (--duplicates=last)\n" in said


@pytest.mark.slow
def test_more_rows_held_out_than_can_be_told_apart_are_judged_in_bins(tmp_path, monkeypatch, capsys):
    compute = np.linspace(0, 16_000, 20_001)
    passes = np.random.default_rng(0).binomial(8, curve(compute, *TABLE_1["ScaleRL"]))
    rows = "".join(f"{c:.2f},{p / 8},{p},8\n" for c, p in zip(compute, passes))
    (tmp_path / "run.csv").write_text("x,y,p,n\n" + rows)
    fits = run_here(
        monkeypatch, tmp_path, ["run.csv"], x="x", y="y", passes="p", trials="n", r0=0.4, fit_until="half", out="out"
    )
    (found,) = (part for part in fits["run"].values() if isinstance(part, dict) and "interval_90" in part)
    assert found["held_out_points"] <= 1024 and found["held_out_within_90"] > 0.85 * found["held_out_points"]
    low, high = found["interval_90"]
    assert high - low > 2 * 1.6 * np.sqrt(0.25 / 8) - 0.05  # of one evaluation of 8 trials
    within = f"{found['held_out_within_90']} of {found['held_out_points']} bins of later evaluations within."
    assert within in capsys.readouterr().out
