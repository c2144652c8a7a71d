"""scalerl-fit as a user runs it."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from scalerl_jax import fit
from scalerl_jax.entry import UserError
from tests.scaling.runs import TABLE_1, curve

COMPUTE = np.concatenate([[0.0], np.linspace(250, 16_000, 64)])


def command(*arguments: str, folder) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "scalerl_jax.fit", *arguments],
        capture_output=True, text=True, timeout=170, cwd=folder, env=environment,
    )  # fmt: skip


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
    (path / "rewards.tsv").write_text("seconds\treward\n" + "\n".join(rows) + "\n")
    return path


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
    assert (folder / "out/table/fit.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (folder / "out/table/fit.svg").read_text()
    assert sorted(os.listdir(folder / "out/table")) == ["fit.json", "fit.png", "fit.svg"]


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


def test_a_mistake_ends_with_code_2_one_line_and_no_file(folder):
    done = command("table.csv", "--x=gpu_hour", "--y=accuracy", "--out=out/never", folder=folder)
    assert done.returncode == 2
    assert done.stderr == "error: table.csv: no column 'gpu_hour' (--x); did you mean 'gpu_hours'?\n"
    assert not (folder / "out/never").exists()


@pytest.mark.parametrize(
    ("paths", "given", "said"),
    [
        (["table.csv"], {"x": "gpu_hours", "y": "accuracy"}, r"table.csv: line 67: .* does not increase"),
        (["rewards.tsv"], {"y_scale": "accuracy"}, r"rewards.tsv: line 2: score -0.2 is outside"),
        (["rewards.tsv"], {"burn_in": 1e9}, r"rewards.tsv: 0 points of different compute"),
        (["rewards.tsv"], {"x_unit": "s:FLOP"}, "no conversion"),
        (["rewards.tsv"], {"r0": "low"}, "--r0=low: must be a number or 'fit'"),
        (["rewards.tsv"], {"r0": "1.4"}, "--r0=1.4: is outside"),
        (["rewards.tsv"], {"fit_until": "nan"}, "--fit_until=nan: must be finite"),
        (["rewards.tsv"], {"passes": "n"}, "--passes and --trials go together"),
        (["none.csv"], {}, "none.csv: no such file"),
        ([], {}, "no files given"),
        (["rewards.tsv"], {"out": None}, "--out: no folder"),
        (["rewards.tsv"], {"out": "table.csv"}, "--out=table.csv: is a file"),
    ],
)
def test_every_mistake_is_named(folder, monkeypatch, paths, given, said):
    monkeypatch.chdir(folder)
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(**{"x": "seconds", "y": "reward", "out": "out/never", **given}):
        with pytest.raises(UserError, match=said) as caught:
            fit.main(paths)
    assert "\n" not in str(caught.value)
    assert not (folder / "out/never").exists()
