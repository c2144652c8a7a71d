"""The last page of a run, from run folders written the way the trainer writes them."""

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from scalerl_jax.config import Config
from scalerl_jax.report import summary
from scalerl_jax.run.folder import RunFolder
from scalerl_jax.run.jsonl import read_rows
from tests.report import run_folders
from tests.support.evaluations import counted

HOURS = ("trainer_busy", "trainer_idle", "generator_busy", "generator_idle")


def compute(step):
    """The ledger's columns after `step` updates: a quarter of device_hours each, and what is outside of it."""
    hours = 0.01 * step
    row = {"device_hours": hours, "model_flops": 1e13 * hours, **{f"{name}_hours": hours / 4 for name in HOURS}}
    for side in ("trainer", "generator"):
        row |= {f"{side}_evaluation_hours": 0.003 * step, f"{side}_setup_hours": 0.02}
    return row | {"sampled_tokens": 2000 * step, "trained_tokens": 1500 * step, "evaluation_tokens": 1234}


def sample(step, group):
    """One whose texts look like markup."""
    said = {"completion": f"[/x]say {step}", "prompt": f"[bold]{group}+1=\n", "finish_reason": "stop"}
    return run_folders.sample(step, group, **said)


def make_run(path, *, updates, every, pass_rate, prompts=100, samples=4) -> str:
    config = Config()
    config.telemetry.tensorboard, config.telemetry.samples_every = False, 4
    with RunFolder(str(path), config) as run:
        run.resume(0)
        for step in range(updates + 1):
            if step:
                values = {
                    "lags": {"0": 60, "2": 40} if step % 2 else {"1": 100},
                    "optimizer_step": step - step // 5,
                    "prompts_retired": step // 3,
                    "interrupted": 0.25,
                    "truncated": 0.01 * (step % 2),
                    "compute": compute(step),
                }
                run.metrics(step, values)
            if step and run.wants_rollouts(step):
                run.rollouts(step, [sample(step, group) for group in range(5)])
            if step % every == 0 or step == updates:
                right = round(pass_rate(step) * prompts * samples)
                passes = [right // prompts + (i < right % prompts) for i in range(prompts)]
                run.evaluation(step=step, found=counted(passes, samples), seconds=1.0, compute=compute(step))
    return str(path)


def shown(workdir) -> str:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    summary.show(workdir, console)
    return console.file.getvalue()


def row_of(text: str, name: str) -> str:
    """The table's second column where the first is `name`."""
    cells = [line.split("│")[1:3] for line in text.splitlines() if line.count("│") == 3]
    return next(value.strip() for key, value in cells if key.strip() == name)


def sigmoid(step):
    """0.3 to 0.9, half of it at 0.2 device-hours."""
    hours = 0.01 * step
    return 0.3 + 0.6 / (1 + (0.2 / hours) ** 1.5) if step else 0.3


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = make_run(tmp_path_factory.mktemp("runs") / "a run", updates=60, every=3, pass_rate=sigmoid)
    return workdir, shown(workdir)


def test_evaluations_of_other_sizes_are_each_told_of():
    """config.evaluation may be another one after a restart."""
    before = {"step": 0, "pass_rate": 0.3, "prompts": 100, "samples": 4}
    after = {"step": 6, "pass_rate": 0.5, "prompts": 50, "samples": 8}
    console = Console(file=io.StringIO(), width=200, highlight=False)
    console.print(summary.table([before, after], [], None))
    text = console.file.getvalue()
    assert row_of(text, "pass rate before") == "0.300   (100 held-out prompts x 4)"
    assert row_of(text, "pass rate after") == "0.500   (step 6, 2 evaluations, 50 held-out prompts x 8)"


def test_stalls_are_told_of_where_they_count(run):
    workdir, _ = run
    row = read_rows(f"{workdir}/metrics.jsonl")[-1]
    row["compute"] |= {"trainer_stalled_hours": 0.01, "generator_stalled_hours": 0.0321}
    console = Console(file=io.StringIO(), width=200, highlight=False)
    console.print(summary.table([], [row], None))
    text = console.file.getvalue()
    assert "stalled" not in row_of(text, "trainer device-hours")
    assert row_of(text, "generator device-hours").endswith("(evaluation 0.1800, set-up 0.0200, stalled 0.0321)")


def test_the_table(run):
    _, text = run
    assert row_of(text, "pass rate before") == "0.300   (100 held-out prompts x 4)"
    assert row_of(text, "pass rate after").startswith(f"{sigmoid(60):.2f}")
    assert row_of(text, "pass rate after").endswith("(step 60, 21 evaluations)")
    assert row_of(text, "updates") == "60, of them 48 with a gradient"
    assert row_of(text, "tokens") == "120,000 sampled, 90,000 trained on, 1,234 for evaluations"
    for side in ("trainer", "generator"):
        expected = "busy 0.1500, idle 0.1500 (evaluation 0.1800, set-up 0.0200)"
        assert row_of(text, f"{side} device-hours") == expected
    # Half of the updates 0 and 2 (60 and 40 tokens), half of them 1.
    assert row_of(text, "staleness in updates") == "mean 0.90, most 2   (0: 30%, 1: 50%, 2: 20%)"
    assert row_of(text, "prompts retired") == "20"
    assert row_of(text, "interrupted, truncated") == "25.0%, 0.5%"
    assert "ended in a loop" not in text  # rows of before


def test_the_forecast_and_its_picture(run):
    workdir, text = run
    last = np.mean([sigmoid(step) for step in range(48, 61, 3)])
    said = float(row_of(text, "forecast at half of the compute (typical device-hours)").split()[0])
    assert abs(said - last) < 0.03
    ahead = (sigmoid(60) - sigmoid(30)) / (sigmoid(60) - 0.3)
    assert float(row_of(text, "still to gain at half").split("%")[0]) == pytest.approx(100 * ahead, abs=1.5)
    with open(f"{workdir}/curve.png", "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"
    assert f"curve: {workdir}/curve.png" in text.replace("\n", "")


def test_it_ends_with_the_forecast_beside_the_outcome_and_the_report(run):
    workdir, text = run
    alarm, sentence, verdict, report = text.strip().splitlines()[-4:]
    assert alarm.startswith("ALARM: 25% of the completions have their thinking cut short (mean of the last 10 updates")
    assert "What to do: " in alarm
    made = re.fullmatch(
        r"(forecast at half of the compute \(typical device-hours\)): "
        r"(0\.\d{3} at the end \(90 %: 0\.\d{3} to 0\.\d{3}\)); "
        r"measured (0\.\d{3}); (\d+ of 10 later evaluations within)",
        sentence,
    )
    assert made is not None and row_of(text, made[1]) == made[2] and row_of(text, "measured") == f"{made[3]}; {made[4]}"
    assert float(made[3]) == pytest.approx(np.mean([sigmoid(step) for step in range(48, 61, 3)]), abs=0.005)
    assert verdict.startswith("A is ")
    assert report == f"report: {workdir}/report.html"
    with open(f"{workdir}/report.html", encoding="utf-8") as file:
        assert file.read().startswith("<!doctype html>")


def test_three_completions_of_the_latest_sample(run):
    """Whatever they say, brackets included, stands there as it is."""
    _, text = run
    assert text.count("step 60, ") == 3 + 1  # and the table's
    assert "step 60, right (answer 1, stop)\n[bold]0+1=\n[/x]say 60" in text
    assert "step 60, wrong (answer 2, stop)\n[bold]1+1=\n[/x]say 60" in text


def test_a_short_run_has_no_forecast(tmp_path):
    text = shown(make_run(tmp_path / "run", updates=2, every=1, pass_rate=sigmoid))
    assert row_of(text, "pass rate before").startswith("0.300")
    assert "forecast" not in text and not (tmp_path / "run" / "curve.png").exists()
    assert "curve" not in text


def test_a_run_that_cannot_be_forecast_still_ends_well(tmp_path):
    """All of the first half of the compute went before the first evaluation but one."""
    workdir = make_run(tmp_path / "run", updates=40, every=2, pass_rate=sigmoid)
    path = tmp_path / "run" / "evals.jsonl"
    first, *rows = path.read_text().splitlines(keepends=True)
    path.write_text(first + "".join(row for row in rows if json.loads(row)["step"] > 20))
    text = shown(workdir)
    assert row_of(text, "pass rate after").endswith("(step 40, 11 evaluations)")
    assert "no forecast: " in text
    assert not (tmp_path / "run" / "curve.png").exists()


def test_rows_without_the_axis_are_named(tmp_path):
    workdir = make_run(tmp_path / "run", updates=20, every=2, pass_rate=sigmoid)
    path = tmp_path / "run" / "evals.jsonl"
    path.write_text(path.read_text().replace("device_hours", "hours"))
    assert "\nno forecast: evals.jsonl: the row of step 0 has no 'device_hours'\n" in shown(workdir)


def test_a_workdir_whose_name_looks_like_markup(tmp_path):
    workdir = make_run(tmp_path / "a[/b]", updates=30, every=3, pass_rate=sigmoid)
    assert "a[/b]/curve.png" in shown(workdir).replace("\n", "")


def test_no_evaluation_came_home(tmp_path):
    workdir = make_run(tmp_path / "run", updates=4, every=1, pass_rate=sigmoid)
    (tmp_path / "run" / "evals.jsonl").write_text("")
    text = shown(workdir)
    assert row_of(text, "updates") == "4, of them 4 with a gradient"
    assert "pass rate before" not in text and "pass rate after" not in text


def test_a_damaged_config_is_told_where_the_report_would_be(tmp_path):
    workdir = make_run(tmp_path / "run", updates=4, every=1, pass_rate=sigmoid)
    (tmp_path / "run" / "config.json").write_text("{")
    *_, last = shown(workdir).strip().splitlines()
    assert last.startswith(f"no report.html: {workdir}/config.json: is not JSON")


@pytest.mark.slow
def test_each_environment_of_a_mixture_is_told_and_drawn(tmp_path):
    path = run_folders.write_run(tmp_path / "run", parts=("math", "code"))
    said = shown(path)
    assert row_of(said, "of math").endswith("(50 held-out prompts)")
    assert row_of(said, "ended in a loop") == "0.0%"
    for name in ("math", "code"):
        assert f"curve: {path}/curve-{name}.png" in said
        assert (tmp_path / "run" / f"curve-{name}.png").read_bytes()[1:4] == b"PNG"
