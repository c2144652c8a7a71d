"""What a study makes of a folder that is there: which runs are finished, and whether it is the same study."""

import json
import os
import pathlib

import pytest

from scalerl_jax.cli.entry import UserError
from scalerl_jax.config_io import GivenConfig, load_file
from scalerl_jax.run.folder import RunFolder
from scalerl_jax.study import members
from scalerl_jax.study.members import Starts
from scalerl_jax.study.plan_file import PlanFile, is_held, standing
from tests.study.studies import TINY, write_run, write_studies


def folder_with(tmp_path: pathlib.Path, **more) -> str:
    folder = str(tmp_path / "run")
    write_run(folder, load_file(TINY), **more)
    return folder


def test_a_run_is_finished_with_its_last_checkpoint_and_its_last_evaluation(tmp_path: pathlib.Path) -> None:
    config = load_file(TINY)
    folder = folder_with(tmp_path, steps=[0, 5, 12], saved=12)
    assert standing(folder, config).finished
    config.max_steps = 20
    assert not standing(folder, config).finished


@pytest.mark.parametrize(("steps", "saved"), [([0, 5], 12), ([0, 12], 9), ([0, 12], None)])
def test_without_one_of_them_it_goes_on(steps: list[int], saved: int | None, tmp_path: pathlib.Path) -> None:
    assert not standing(folder_with(tmp_path, steps=steps, saved=saved), load_file(TINY)).finished


def test_a_run_that_a_trainer_has_ended_is_finished(tmp_path: pathlib.Path) -> None:
    folder = folder_with(tmp_path, steps=[0, 7], saved=7)
    assert standing(folder, load_file(TINY), ended=7).finished
    assert not standing(folder, load_file(TINY), ended=6).finished
    assert not standing(folder, load_file(TINY)).finished


def test_no_run_is_there_yet(tmp_path: pathlib.Path) -> None:
    assert not standing(str(tmp_path / "run"), load_file(TINY)).finished


def test_a_run_of_another_config_is_refused(tmp_path: pathlib.Path) -> None:
    folder = folder_with(tmp_path, steps=[0, 12], saved=12)
    config = load_file(TINY)
    config.fleet.slots += 1  # where it runs is nobody's business
    assert standing(folder, config).finished
    config.objective.max_ratio = 4.0
    with pytest.raises(UserError, match=r"another config: config\.objective\.max_ratio is 5\.0 there and 4\.0 now"):
        standing(folder, config)


def test_a_study_may_have_moved(tmp_path: pathlib.Path) -> None:
    config = load_file(TINY)
    config.model.path = "/before/warm-start/model"
    folder = str(tmp_path / "run")
    write_run(folder, config, steps=[0, 5], saved=5)
    config.model.path = "/now/warm-start/model"
    assert standing(folder, config).moved
    config.model.path = "/now/another/model"
    assert not standing(folder, config).moved


def test_a_trainer_in_the_folder_is_seen(tmp_path: pathlib.Path) -> None:
    folder = str(tmp_path / "run")
    assert not is_held(folder)
    with RunFolder(folder, load_file(TINY)):
        assert is_held(folder)
    assert not is_held(folder)


def plan(tmp_path: pathlib.Path, *names: str, seeds: int = 1, model: str = "", **overrides: str) -> PlanFile:
    given = GivenConfig("", tuple((name.replace("__", "."), value) for name, value in overrides.items()))
    study = members.read(given, base=TINY, studies=write_studies(tmp_path), names=names, seeds=seeds)
    model = model or str(tmp_path / "warm-start" / "model")
    return PlanFile(str(tmp_path), study, Starts(dict.fromkeys(study.runs, model), {}, ()))


def test_the_same_study_goes_on_with_more_seeds(tmp_path: pathlib.Path) -> None:
    first = plan(tmp_path, "two")
    first.ended["slow"] = 7
    first.save()
    assert plan(tmp_path, "two").ended == {"slow": 7}
    plan(tmp_path, "two", seeds=3).save()
    assert plan(tmp_path, "two").ended == {"slow": 7}
    with open(tmp_path / "plan.json") as file:
        assert "slow-seed_7" in json.load(file)["runs"]


def test_what_differs_is_named(tmp_path: pathlib.Path) -> None:
    plan(tmp_path, "two").save()
    where = f"--workdir={tmp_path}: holds another study: "
    for said, make in {
        "--study=two there": lambda: plan(tmp_path, "seeds"),
        "config.max_steps is 12 there and 13 now": lambda: plan(tmp_path, "two", max_steps="13"),
        "plain starts from warm-start/model there": lambda: plan(tmp_path, "two", model="elsewhere"),
    }.items():
        with pytest.raises(UserError) as error:
            make()
        assert str(error.value) == where + said


def test_a_field_that_the_plan_is_older_than_was_its_default(tmp_path: pathlib.Path) -> None:
    plan(tmp_path, "two").save()
    there = json.loads((tmp_path / "plan.json").read_text())
    assert there["config"].pop("objective.max_ratio") == 5
    (tmp_path / "plan.json").write_text(json.dumps(there))
    plan(tmp_path, "two")
    with pytest.raises(UserError, match=r"config\.objective\.max_ratio is 5\.0 there and 4\.0 now"):
        plan(tmp_path, "two", objective__max_ratio="4")


def test_a_member_that_became_another_is_named(tmp_path: pathlib.Path) -> None:
    plan(tmp_path, "two").save()
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace("0.00075", "0.5"))
    with pytest.raises(UserError, match=r"slow: config\.optimizer\.learning_rate is 0\.5 there and 0\.00075 now"):
        plan(tmp_path, "two")


def test_a_damaged_plan_is_one_line(tmp_path: pathlib.Path) -> None:
    os.makedirs(tmp_path, exist_ok=True)
    for text in ("{", "[]", "{}"):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(UserError, match=r"plan\.json") as error:
            plan(tmp_path, "two")
        assert "\n" not in str(error.value)
