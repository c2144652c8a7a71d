"""Every field of the config is in one class: what a run may be continued with, and what not.

compute_dtype=auto is chosen once a run, and is the same on both sides.
"""

import dataclasses

import pytest

from scalerl_jax import config_check
from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.config_check import ConfigError
from scalerl_jax.run.continuing import (
    BOUND,
    FIELDS,
    FREE,
    GROUPS,
    NOTED,
    WARM,
    changes,
    kind_of,
    refused,
    settle_dtypes,
)
from scalerl_jax.run.folder import RunFolder
from scalerl_jax.system import platforms

LEAVES = config_check.leaves(Config())


@pytest.mark.parametrize("name", LEAVES)
def test_every_field_is_in_a_class(name):
    assert kind_of(name) in (FREE, NOTED, BOUND, WARM), f"config.{name}: say in continuing.py whether it may change"


def test_nothing_is_listed_that_is_no_field():
    groups = {name for name in vars(Config()) if dataclasses.is_dataclass(getattr(Config(), name))}
    assert FIELDS.keys() <= LEAVES.keys()
    assert GROUPS.keys() <= groups
    assert groups - GROUPS.keys() == {name.partition(".")[0] for name in FIELDS if "." in name} - GROUPS.keys()


@pytest.mark.parametrize("name", LEAVES)
def test_each_is_let_through_or_refused_by_name(name):
    node = config = Config()
    *parents, leaf = name.split(".")
    for parent in parents:
        node = getattr(node, parent)
    value = getattr(node, leaf)
    others = {bool: lambda: not value, str: lambda: "other", dict: lambda: {"other": 1}}
    setattr(node, leaf, others.get(type(value), lambda: value + 1)())
    found = changes(dataclasses.asdict(Config()), config)
    assert [(change.name, change.before) for change in found] == [(name, value)]
    bound = kind_of(name) == BOUND
    assert [change.name for change in refused(found, allowed=[], warm_start=False)] == ([name] if bound else [])
    assert refused(found, allowed=[name], warm_start=True) == []
    warm = refused(found, allowed=[], warm_start=True)
    assert [change.name for change in warm] == ([name] if kind_of(name) in (BOUND, WARM) else [])


def test_files_that_lack_or_have_other_fields():
    assert changes({"seed": 0}, Config()) == []  # fields that are not there count as their defaults
    assert [str(c) for c in changes({"objective": {"max_ratio": 4.0}, "optimizer": {"warmup_steps": 1}}, Config())] == [
        "config.objective.max_ratio is 4.0 there and 5.0 now",
        "config.optimizer.warmup_steps is 1 there and 100 now",
    ]
    with pytest.raises(ConfigError, match=r"config\.gone is 1 there and is not a field any more"):
        changes({"gone": 1}, Config())
    assert changes({"fleet": {"gone": 1}}, Config()) == []  # it never mattered


def test_an_environment_of_a_mixture_that_is_older_than_a_field():
    config = Config(mixture={"maths": EnvironmentConfig(name="math")})
    saved = dataclasses.asdict(config)
    del saved["mixture"]["maths"]["prompt_suffix"]
    assert changes(saved, config) == []
    config.mixture["code"] = EnvironmentConfig()
    found = changes(saved, config)
    assert {change.name.split(".")[1] for change in found} == {"code"}  # another environment is another run
    assert next(change.name for change in refused(found, allowed=[], warm_start=False)) == "mixture.code.name"
    assert kind_of("mixture.maths.verifier_processes") == FREE


# ---- the compute dtype ---------------------------------------------------------------------------------------------


def config_of(**model):
    config = Config()
    for name, value in model.items():
        setattr(config.model, name, value)
    return config


@pytest.fixture
def machine(monkeypatch):
    def be(dtype):
        monkeypatch.setattr(platforms, "fastest_dtype", lambda: (dtype, "this machine"))

    return be


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_auto_is_the_machines_on_both_sides(machine, dtype):
    machine(dtype)
    config = Config()
    assert settle_dtypes(config) == [f"config.model.compute_dtype=auto: {dtype} (this machine)"]
    assert config.model.compute_dtype == config.fleet.compute_dtype == dtype
    assert settle_dtypes(config) == []


def test_beside_float32_weights_it_is_float32(machine):
    machine("bfloat16")
    config = config_of(sync_dtype="float32")
    settle_dtypes(config)
    assert config.model.compute_dtype == config.fleet.compute_dtype == "float32"


def test_what_was_said_stays(machine):
    machine("bfloat16")
    config = config_of(compute_dtype="float32")
    assert settle_dtypes(config) == []
    assert config.fleet.compute_dtype == "float32"
    config.fleet.compute_dtype = "bfloat16"
    settle_dtypes(config)
    assert (config.model.compute_dtype, config.fleet.compute_dtype) == ("float32", "bfloat16")


def test_a_run_goes_on_in_what_it_was_begun_in(machine, tmp_path):
    """Another machine would choose otherwise; who says so himself is refused, as for any field that is learned by."""
    workdir = str(tmp_path / "run")

    def begin(config):
        settle_dtypes(config, workdir)
        with RunFolder(workdir, config) as folder:
            folder.resume(0)
            return folder.changes

    machine("bfloat16")
    begin(Config())
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "1").mkdir()
    machine("float32")
    config = Config()
    assert settle_dtypes(config, workdir) == ["config.model.compute_dtype=auto: bfloat16 (as the run was begun)"]
    assert begin(Config()) == []
    with pytest.raises(ConfigError, match=r"config\.model\.compute_dtype is 'bfloat16' there and 'float32' now"):
        begin(config_of(compute_dtype="float32"))


def test_a_first_start_that_failed_chooses_nothing_for_the_next(machine, tmp_path):
    workdir = str(tmp_path / "run")
    with RunFolder(workdir, config_of(compute_dtype="float32")) as folder:
        folder.resume(0)
    machine("bfloat16")
    config = Config()
    assert settle_dtypes(config, workdir) == ["config.model.compute_dtype=auto: bfloat16 (this machine)"]


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"model": 4}', '{"model": {"compute_dtype": "float64"}}'])
def test_a_config_that_tells_nothing_is_passed_by(machine, tmp_path, text):
    """Whether the folder can be gone on with is not said here."""
    machine("bfloat16")
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    config = Config()
    settle_dtypes(config, str(tmp_path))
    assert config.model.compute_dtype == "bfloat16"
