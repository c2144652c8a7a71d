"""What a study says of run folders: fits, comparisons, the margin; the three files that it writes."""

import csv
import json
import pathlib

import pytest

from scalerl_jax.cli.entry import UserError
from scalerl_jax.config_io import GivenConfig
from scalerl_jax.study import members, writing
from scalerl_jax.study.members import Study
from scalerl_jax.study.study_results import _noise, results
from tests.study.studies import TINY, study, write_run, write_studies

FINALS = {"plain": 0.9, "slow": 0.6, "seed_6": 0.9, "seed_7": 0.9}


def made(tmp_path: pathlib.Path, *names: str, left_out: tuple[str, ...] = (), seeds: int = 1) -> Study:
    given = GivenConfig("", (("max_steps", "130"),))
    one = members.read(given, base=TINY, studies=write_studies(tmp_path), names=names, seeds=seeds)
    for name, config in one.runs.items():
        if name not in left_out:
            final = FINALS[name.partition("-")[0]]
            write_run(str(tmp_path / "study" / "runs" / name), config, final=final, saved=130)
    return one


def test_members_are_fitted_and_compared(tmp_path: pathlib.Path) -> None:
    one = made(tmp_path, "two", "seeds", left_out=("seed_7",))
    found = results(one, str(tmp_path / "study" / "runs"), x="typical_hours")
    two, seeds = found.studies
    plain, slow = two.members
    assert plain.curve is not None and plain.curve.fit.asymptote == pytest.approx(0.9, abs=0.05)
    assert slow.curve is not None and slow.curve.fit.asymptote == pytest.approx(0.6, abs=0.05)
    assert plain.first == pytest.approx(0.3, abs=0.05)
    assert plain.device_hours == pytest.approx(1.3)
    (sentence,) = writing.sentences(two)
    assert sentence.startswith("plain ends higher than slow: A ")
    assert two.margin is None and seeds.margin is not None
    assert seeds.missing == ("seed_7",) and seeds.margin.seeds == 2
    assert seeds.margin.last_quarter < 0.03 and seeds.margin.last_quarter_noise is not None
    assert seeds.margin.last_quarter_noise == pytest.approx(0.005, abs=0.003)


def test_seeds_of_a_member_are_one_curve(tmp_path: pathlib.Path) -> None:
    one = made(tmp_path, "two", seeds=3, left_out=("slow-seed_7",))
    (two,) = results(one, str(tmp_path / "study" / "runs"), x="step").studies
    plain, slow = two.members
    assert plain.curve is not None and plain.curve.seeds == 3 and plain.curve.fit.points == 3 * 26
    assert writing.cells(slow)[1] == "2 of 3"
    assert plain.device_hours == pytest.approx(3 * 1.3)


def test_another_studys_member_is_the_baseline(tmp_path: pathlib.Path) -> None:
    one = made(tmp_path, "two", "seeds")
    _, seeds = results(one, str(tmp_path / "study" / "runs"), x="step", baseline="slow").studies
    assert [line.partition(":")[0] for line in writing.sentences(seeds)[:3]] == [
        f"seed_{n} ends higher than slow" for n in (5, 6, 7)
    ]
    # Where its runs are those of a member of the study, it is that member.
    _, seeds = results(one, str(tmp_path / "study" / "runs"), x="step", baseline="plain").studies
    assert seeds.baseline == "seed_5"


def test_a_column_that_is_not_there_is_one_line(tmp_path: pathlib.Path) -> None:
    one = made(tmp_path, "two")
    with pytest.raises(UserError, match="no column 'flops'"):
        results(one, str(tmp_path / "study" / "runs"), x="flops")


def test_noise_alone() -> None:
    """Of two normal numbers the mean distance is 2 / sqrt(pi) standard deviations; of three, 1.693."""
    assert _noise([1.0, 1.0]) == pytest.approx(1.1284, abs=1e-3)
    assert _noise([0.1, 0.1, 0.1]) == pytest.approx(0.16926, abs=1e-4)
    assert _noise([0.1]) is None
    assert _noise([0.1, float("inf")]) is None


def test_the_files(tmp_path: pathlib.Path) -> None:
    made(tmp_path, "two", "seeds", left_out=("seed_7",))
    model = tmp_path / "model"
    model.mkdir()
    flags = [
        f"--base={TINY}", f"--studies={tmp_path}/studies.py", f"--workdir={tmp_path}/study", "--results_only",
        "--config.max_steps=130", "--study=two,seeds",
    ]  # fmt: skip
    told = study(*flags, f"--config.model.path={model}", folder=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "plain ends higher than slow" in told.stdout and "not evaluated yet: seed_7." in told.stdout
    folder = tmp_path / "study"
    assert {path.name for path in folder.iterdir()} == {"runs", "study.json", "evaluations.csv", "study.html"}

    with open(folder / "evaluations.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 27
    assert list(rows[0]) == [
        "run", "recipe", "task", "members", "seed", "config", "step", "device_hours", "flops", "passes", "trials",
        "pass_rate",
    ]  # fmt: skip
    assert {row["task"] for row in rows} == {"math"}
    assert {row["run"]: row["recipe"] for row in rows} == {"plain": "plain", "slow": "slow", "seed_6": "plain"}
    last = next(row for row in rows if row["run"] == "plain" and row["step"] == "130")
    assert last["members"] == "two/plain seeds/seed_5" and last["seed"] == "5" and last["trials"] == "800"
    assert float(last["flops"]) == pytest.approx(3e13 * float(last["device_hours"]))
    assert "config.max_steps=130" in last["config"].split()

    document = json.loads((folder / "study.json").read_text())
    assert document["runs"]["plain"]["finished"] and not document["runs"]["seed_7"]["finished"]
    assert document["studies"]["two"]["comparison"]["table"][1]["verdict"] == "lower"
    assert document["studies"]["seeds"]["margin"]["seeds"] == 2
    page = (folder / "study.html").read_text()
    assert "plain ends higher than slow" in page and "scalerl-train --config=" in page
