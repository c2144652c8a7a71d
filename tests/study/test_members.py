"""Which runs a study is made of, what they are called, and that their flags make them."""

import pathlib

import pytest

from scalerl_jax.cli.entry import UserError
from scalerl_jax.config_check import ConfigError, leaves
from scalerl_jax.config_io import GivenConfig, as_flags, load_file, load_module, read_argv
from scalerl_jax.study import members
from scalerl_jax.study.members import Study, starts
from tests.study.studies import QUICKSTART, TINY, write_studies
from tests.support.paths import ROOT

ABLATIONS = str(ROOT / "configs" / "ablations.py")
ALL = tuple(load_module(ABLATIONS, "ablations").STUDIES)


def read(base: str, *names: str, studies: str = "", seeds: int = 1, overrides=()) -> Study:
    return members.read(GivenConfig("", tuple(overrides)), base=base, studies=studies, names=names, seeds=seeds)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("base", [TINY, QUICKSTART, str(ROOT / "configs" / "scalerl_8b.py")])
def test_the_flags_of_every_run_make_it(name: str, base: str) -> None:
    study = read(base, name, studies=ABLATIONS, overrides=[("max_steps", "77"), ("rollout.interruption_text", "a b")])
    for config in study.runs.values():
        given, rest = read_argv([f"--config={base}", *study.flags(config)])
        assert not rest
        assert leaves(given.config()) == leaves(config)
        assert config.max_steps == 77


def test_flags_of_every_kind_of_value() -> None:
    base = load_file(TINY)
    config = load_file(TINY)
    config.optimizer.learning_rate = 0.1 + 0.2
    config.environment.template_arguments = {"enable_thinking": False, "a": ["b", 1.5]}
    config.telemetry.tensorboard = True
    config.rollout.interruption_text = "Ünterbrochen, \"so\" = 'da'\n</think>"
    config.seed = 12
    flags = as_flags(config, base)
    assert len(flags) == 5
    assert leaves(read_argv([f"--config={TINY}", *flags])[0].config()) == leaves(config)
    assert as_flags(base, base) == []


def test_an_environment_more_is_no_flag() -> None:
    base, config = load_file(TINY), load_file(TINY)
    config.mixture = {"mine": config.environment}
    with pytest.raises(ConfigError, match=r"config\.mixture\.mine\."):
        as_flags(config, base)


def test_what_studies_have_in_common_runs_once() -> None:
    study = read(QUICKSTART, "leave_one_out", "margin", "recipes", "staleness")
    assert study.members["margin"] == {"seed_0": ("scalerl",), "seed_1": ("seed_1",), "seed_2": ("seed_2",)}
    assert study.members["staleness"]["cispo_k8"] == ("scalerl",)
    assert study.members["recipes"]["scalerl"] == ("scalerl",)
    assert len(study.runs) == 9 + 2 + 4 + 17 - 1  # dapo_loss is clip_k8
    assert study.members["staleness"]["clip_k8"] == ("dapo_loss",)


def test_seeds_rename_nothing(tmp_path: pathlib.Path) -> None:
    path = write_studies(tmp_path)
    one, three = (read(TINY, "two", "seeds", studies=path, seeds=seeds) for seeds in (1, 3))
    assert list(one.runs) == ["plain", "slow", "seed_6", "seed_7"]
    assert list(three.runs)[:4] == list(one.runs)
    assert three.members["two"]["plain"] == ("plain", "seed_6", "seed_7")
    assert three.members["two"]["slow"] == ("slow", "slow-seed_6", "slow-seed_7")
    assert three.runs["slow-seed_7"].seed == 7
    # Its members are seeds themselves: more of each would be the others' runs.
    assert three.members["seeds"] == one.members["seeds"]


def test_another_study_may_have_a_member_of_that_name(tmp_path: pathlib.Path) -> None:
    study = read(TINY, "two", "other", studies=write_studies(tmp_path))
    assert list(study.runs) == ["plain", "slow", "other-slow"]
    assert study.members["other"] == {"slow": ("other-slow",)}
    assert study.chosen(["slow"]) == ["slow", "other-slow"]
    assert study.chosen(["other-slow", "plain"]) == ["plain", "other-slow"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "--study: none is given; there are two, seeds, other, broken"),
        (("two", "three"), "--study=three: no such study; there are two, seeds, other, broken"),
    ],
)
def test_a_wrong_study_is_one_line(names: tuple[str, ...], said: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="--study") as error:
        read(TINY, *names, studies=write_studies(tmp_path))
    assert str(error.value) == said


def test_a_wrong_member_is_one_line(tmp_path: pathlib.Path) -> None:
    study = read(TINY, "two", studies=write_studies(tmp_path))
    with pytest.raises(UserError) as error:
        study.chosen(["plan"])
    assert str(error.value) == "--members=plan: no such member; there are plain, slow"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "has no STUDIES"),
        ("STUDIES = {'two': lambda base: 1 / 0}", "two: ZeroDivisionError"),
        ("STUDIES = {'two': lambda base: {'a/b': base}}", "'a/b' names no folder"),
        ("import no_such_module", "ModuleNotFoundError"),
    ],
)
def test_a_file_of_studies_that_cannot_be(text: str, said: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "studies.py"
    path.write_text(text)
    with pytest.raises((UserError, ConfigError)) as error:
        read(TINY, "two", studies=str(path))
    assert str(error.value).startswith(f"--studies={path}: ") and said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_member_that_cannot_be_is_told_before_anything_starts(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "studies.py"
    path.write_text(
        "def two(base):\n    base.objective.loss = 'gspo'\n    return {'plain': base}\nSTUDIES = {'two': two}\n"
    )
    with pytest.raises(ConfigError, match=r"--study=two: plain: config\.objective\.loss=gspo"):
        read(TINY, "two", studies=str(path))


def test_models_are_made_for_what_differs_in_them(tmp_path: pathlib.Path) -> None:
    study = read(QUICKSTART, "leave_one_out", "relatives", overrides=[("model.path", str(tmp_path / "none"))])
    found = starts(study, str(tmp_path / "study"))
    folders = {name: one.name for name, one in found.made.items()}
    assert set(folders) == set(study.runs)
    assert folders["scalerl"] == folders["phased_8"] == folders["learning_rate_4x"] == "warm-start"
    assert folders["few_prompts"] == "warm-start"  # other prompts, and the same traces
    assert folders["slips_2x"] == "warm-start-error_rate_0.4"
    assert folders["easier"] == "warm-start-minimum_terms_4-maximum_terms_8"
    assert found.models["easier"] == str(tmp_path / "study" / folders["easier"] / "model")
    assert found.made["slips_2x"].config.sft.error_rate == 0.4
    assert found.made["slips_2x"].config.rollout == study.base.rollout


def test_a_model_that_is_there_is_what_all_start_from(tmp_path: pathlib.Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    study = read(QUICKSTART, "relatives", overrides=[("model.path", str(model))])
    found = starts(study, str(tmp_path / "study"))
    assert found.models["easier"] == found.models["few_prompts"] == str(model)
    # One that asks for another model by config.sft gets it.
    assert set(found.made) == {"small_model", "large_model", "slips_2x", "slips_half"}
    assert f"13 of 17 runs start from {model}, which is there" in found.notes


def test_where_no_model_can_be_made_that_is_told(tmp_path: pathlib.Path) -> None:
    study = read(TINY, "two", studies=write_studies(tmp_path), overrides=[("model.path", "no/such")])
    with pytest.raises(UserError, match=r"config\.model\.path=no/such: no such folder, and no warm start can be made"):
        starts(study, str(tmp_path))


def test_warm_starts_that_differ_have_folders_of_their_own() -> None:
    base = load_file(QUICKSTART)

    def name(**changes: object) -> str:
        config = load_file(QUICKSTART)
        for field, value in changes.items():
            setattr(config.environment, field, value)
        return members._warm_start(base, config, members._differences(base, config)).name

    names = [name(system_prompt=text) for text in ("Think!", "Think?", "想", "考", "a" * 300, "a" * 301)]
    assert len(set(names)) == 6 and max(map(len, names)) < 120
    assert name(minimum_terms=4) == "warm-start-minimum_terms_4"
    one, both = load_file(QUICKSTART), load_file(QUICKSTART)
    one.mixture = {"a": one.environment}
    both.mixture = {"a": one.environment, "b": one.environment}
    assert set(members._differences(both, one).values()) == {"none"}
