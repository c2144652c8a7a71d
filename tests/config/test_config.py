"""The config: what a user writes is what the run gets, and what cannot be is one line that names it."""

import dataclasses
import json
import typing

import pytest

from scalerl_jax.config import Config
from scalerl_jax.config_check import ConfigError, check, leaves
from scalerl_jax.config_io import from_json, load_file, override, parse_argv, to_json
from scalerl_jax.contract.limits import MAXIMUM_CHUNK_BYTES, TEMPERATURES
from tests.support.paths import ROOT
from tests.support.processes import run_python


def write(tmp_path, *lines: str) -> str:
    """A config file whose get_config() has these lines between making the config and returning it."""
    path = tmp_path / "config.py"
    body = "".join(f"    {line}\n" for line in lines)
    path.write_text(
        f"from scalerl_jax.config import *\ndef get_config():\n    config = Config()\n{body}    return config\n"
    )
    return str(path)


def refusal(call: typing.Callable[[], object]) -> str:
    """The message of the ConfigError that `call` raises; one line."""
    with pytest.raises(ConfigError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- Fields that do not exist --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.objectiv.cap=4", "--config.objectiv.cap: config has no field 'objectiv' (it has: seed, max_steps,"),
        ("--config.max_steps.cap=4", "--config.max_steps.cap: config.max_steps has no field 'cap' (it has: none)"),
        ("--config.objective=4", "--config.objective: is a group of fields, not a value"),
        ("--config.=4", "--config.: config has no field '' (it has: "),
    ],
)
def test_an_unknown_field_in_a_flag_is_named(tmp_path, flag, message):
    assert refusal(lambda: parse_argv([f"--config={write(tmp_path)}", flag])).startswith(message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config.objective.capp = 4.0", "config.objective has no field 'capp' (it has: loss, max_ratio, "),
        ("config.objectives = 4.0", "config has no field 'objectives' (it has: seed, max_steps, "),
        ("config.objective = OptimizerConfig()", "config.objective=OptimizerConfig("),
        ("config.objective = 4.0", "config.objective=4.0: is not of type ObjectiveConfig"),
        (
            "config.objective = ObjectiveConfig(capp=4.0)",
            "config.objective has no field 'capp' (it has: loss, max_ratio, ",
        ),
        ("config.pacing.k += 1", "config.pacing has no field 'k' (it has: kind, "),
        ("config = Config(updates=7)", "config has no field 'updates' (it has: seed, "),
        ("config.objektive.cap = 4.0", "config has no field 'objektive' (it has: seed, max_steps, "),
    ],
)
def test_an_unknown_field_in_a_file_is_named(tmp_path, line, message):
    """Assigning to it is no error to Python."""
    path = write(tmp_path, line)
    assert refusal(lambda: load_file(path)).startswith(f"--config={path}: {message}")


# ---- Values of the wrong type --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.objective.max_ratio=five", "--config.objective.max_ratio=five: is not a number of type float"),
        ("--config.rollout.prompts_per_step=4.5", "--config.rollout.prompts_per_step=4.5: is not a number of type int"),
        ("--config.rollout.prompts_per_step=", "--config.rollout.prompts_per_step=: is not a number of type int"),
        (
            "--config.objective.filter_zero_variance=yes",
            "--config.objective.filter_zero_variance=yes: is not true or false",
        ),
        ("--config.optimizer.learning_rate=nan", "config.optimizer.learning_rate=nan: is not a finite number"),
        ("--config.optimizer.weight_decay=inf", "config.optimizer.weight_decay=inf: is not a finite number"),
    ],
)
def test_an_ill_typed_flag_is_named(tmp_path, flag, message):
    assert refusal(lambda: parse_argv([f"--config={write(tmp_path)}", flag])) == message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config.objective.max_ratio = '5'", "config.objective.max_ratio='5': is not of type float"),
        ("config.rollout.prompts_per_step = 4.0", "config.rollout.prompts_per_step=4.0: is not of type int"),
        ("config.rollout.prompts_per_step = True", "config.rollout.prompts_per_step=True: is not of type int"),
        ("config.objective.max_ratio = True", "config.objective.max_ratio=True: is not of type float"),
        ("config.model.remat = 1", "config.model.remat=1: is not of type str"),
        ("config.telemetry.tensorboard = 1", "config.telemetry.tensorboard=1: is not of type bool"),
        ("config.model.path = None", "config.model.path=None: is not of type str"),
        ("config.objective.max_ratio = float('inf')", "config.objective.max_ratio=inf: is not a finite number"),
    ],
)
def test_an_ill_typed_value_in_a_file_is_named(tmp_path, line, message):
    path = write(tmp_path, line)
    assert refusal(lambda: load_file(path)) == f"--config={path}: {message}"


# ---- Values that cannot be, or do not go together ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("objective.loss=ppo", "config.objective.loss='ppo': is not one of cispo, clip, gspo"),
        ("model.remat=yes", "config.model.remat='yes': is not one of none, save_products, save_attention, block, full"),
        ("pacing.kind=lockstep", "config.pacing.kind='lockstep': is not one of pipeline, phased"),
        ("objective.max_ratio=0", "config.objective.max_ratio=0.0: must be above 0"),
        ("rollout.group_size=1", "config.rollout.group_size=1: must not be below 2"),
        (
            "rollout.thinking_budget_min=9 rollout.thinking_budget_max=8",
            "config.rollout.thinking_budget_min=9: must not be above",
        ),
        ("rollout.temperature=0", "config.rollout.temperature=0.0: must be between 0.01 and 100"),
        ("rollout.top_p=1.5", "config.rollout.top_p=1.5: must be above 0 and not above 1"),
        ("rollout.top_p=0", "config.rollout.top_p=0.0: must be above 0 and not above 1"),
        ("optimizer.beta1=1", "config.optimizer.beta1=1.0: must be from 0 to below 1"),
        ("optimizer.beta2=-0.1", "config.optimizer.beta2=-0.1: must be from 0 to below 1"),
        ("sft.error_rate=1.1", "config.sft.error_rate=1.1: must be between 0 and 1"),
        ("seed=-1", "config.seed=-1: must not be below 0"),
        ("objective.loss=gspo", "config.objective.loss=gspo: requires config.objective.aggregation=sample"),
        (
            "model.sync_dtype=float32 model.compute_dtype=bfloat16",
            "config.model.sync_dtype=float32: the trainer computes in bfloat16, so it would",
        ),
        ("objective.tis_cap=-2", "config.objective.tis_cap=-2.0: must not be below 0"),
        (
            "objective.tis_cap=2",
            "config.objective.tis_cap=2: config.objective.loss=cispo has a cap on the ratio already, "
            "config.objective.max_ratio=5: lower that",
        ),
        ("objective.loss=dro objective.tis_cap=2", "config.objective.tis_cap: config.objective.loss=dro has no ratio"),
        ('distill.teachers={"a":"b:1"}', "config.objective.distill=none: makes no use of config.distill.teachers"),
        ("objective.distill=sampled", "config.objective.distill=sampled: requires config.distill.teachers"),
        ('distill.teachers={"a":1}', "config.distill.teachers: 'a': 1 is not a name of letters, digits and _ with its"),
        (
            'objective.distill=sampled distill.teachers={"a":"b:1","c":"d:2"}',
            "config.distill.column: is empty; with several teachers it names the column that has a row's",
        ),
        ("objective.reward_weight=0", "config.objective.reward_weight=0: leaves nothing to learn from: set"),
        ("objective.distill_weight=0", "config.objective.distill_weight=0.0: must be above 0"),
        *(
            (f"numerics=bitwise {leaf}", f"config.{leaf}: not with config.numerics=bitwise: ")
            for leaf in (
                "learner.context=2",
                "learner.tensor=2",
                "learner.expert=2",
                "fleet.engine=vllm",
                "lora.rank=4",
                "model.attention=splash",
                "model.head_precision=bfloat16",
            )
        ),
        (
            "numerics=bitwise fleet.compute_dtype=bfloat16 model.compute_dtype=float32",
            "config.fleet.compute_dtype=bfloat16: config.numerics=bitwise requires that of the trainer, float32",
        ),
        (
            "max_steps=31 optimizer.warmup_steps=10 optimizer.decay_steps=20",
            "config.max_steps=31: from step 30 on the learning rate is 0, by config.optimizer.warmup_steps=10",
        ),
        ("objective.icepop_low=0.5", "config.objective.icepop_low=0.5: must not be above config.objective.icepop_high"),
    ],
)
def test_values_that_cannot_be_are_named(tmp_path, flags, message):
    given = [f"--config.{flag}" for flag in flags.split()]
    assert refusal(lambda: parse_argv([f"--config={write(tmp_path)}", *given])).startswith(message)


@pytest.mark.parametrize("name", [name for name, value in leaves(Config()).items() if type(value) in (int, float)])
def test_no_number_may_be_anything(name, tmp_path):
    """Far below zero there is no count, size, rate or time: a field that takes it is one that nobody looks at."""
    said = refusal(lambda: parse_argv([f"--config={write(tmp_path)}", f"--config.{name}=-1000000"]))
    assert f"config.{name}" in said and "-1000000" in said


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_every_temperature_that_servers_take_may_be_asked_for(temperature, tmp_path):
    parse_argv([f"--config={write(tmp_path)}", f"--config.rollout.temperature={temperature}"])


def test_every_chunk_that_servers_take_may_be_asked_for_and_no_longer_one(tmp_path):
    flags = [f"--config={write(tmp_path)}", "--config.fleet.chunk_bytes="]
    for size in (1, MAXIMUM_CHUNK_BYTES):
        parse_argv([flags[0], f"{flags[1]}{size}"])
    for size in (0, MAXIMUM_CHUNK_BYTES + 1):
        said = f"config.fleet.chunk_bytes={size}: must be between 1 and {MAXIMUM_CHUNK_BYTES}"
        with pytest.raises(ConfigError, match=said):
            parse_argv([flags[0], f"{flags[1]}{size}"])


def test_what_goes_together_is_let_through(tmp_path):
    given = "objective.loss=gspo objective.aggregation=sample objective.icepop_low=0.5 objective.icepop_high=2"
    flags = [f"--config.{flag}" for flag in given.split()]
    config, _ = parse_argv([f"--config={write(tmp_path)}", *flags])
    assert config.objective.loss == "gspo" and config.objective.icepop_low == 0.5
    float32 = ["--config.model.compute_dtype=float32", "--config.model.sync_dtype=bfloat16"]
    assert parse_argv([f"--config={write(tmp_path)}", *float32])[0].model.sync_dtype == "bfloat16"


# ---- Files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gone.py", None, "no such file"),
        ("config.yaml", "cap: 4", "not a Python file"),
        ("config.py", "def get_config(:", "SyntaxError: "),
        ("config.py", "import no_such_module_there", "ModuleNotFoundError: No module named 'no_such_module_there'"),
        ("config.py", "def get_config(): return int('a')", "ValueError: invalid literal for int()"),
        ("config.py", "def get_config(): return {}['a']", "KeyError: 'a'"),
        ("config.py", "open('/absent/file')", "FileNotFoundError: [Errno 2]"),
        ("config.py", "raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("config.py", "config = 4", "AttributeError: module 'scalerl_config_file' has no attribute 'get_config'"),
        ("config.py", "def get_config(): return {'cap': 4}", "get_config() returns dict, not a Config"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path, name, text, message):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    assert refusal(lambda: load_file(str(path))).startswith(f"--config={path}: {message}")


def test_no_file_is_given():
    assert refusal(lambda: parse_argv(["--config.objective.max_ratio=4"])).startswith("--config: no config file given")
    assert refusal(lambda: parse_argv(["--config"])) == "--config: no value given"


# ---- Overrides apply -----------------------------------------------------------------------------------------------


def test_overrides_apply_over_the_file_and_the_rest_is_left(tmp_path):
    path = write(tmp_path, "config.max_steps = 7", "config.objective.max_ratio = 4", "config.seed = 3")
    argv = ["--workdir=run", "--config", path, "--config.objective.max_ratio=2.5",
            "-config.telemetry.tensorboard=false", "--config.rollout.interruption_text", "a = b",
            "--config.rollout.prompts_per_step=1_000", "--servers=a:1", "--configs=no", "x",
            "--config.optimizer.epsilon=1e-8", "--config.optimizer.epsilon=1e-9"]  # fmt: skip
    config, rest = parse_argv(argv)
    assert rest == ["--workdir=run", "--servers=a:1", "--configs=no", "x"]
    expected = leaves(Config()) | {
        "max_steps": 7,
        "seed": 3,
        "objective.max_ratio": 2.5,
        "telemetry.tensorboard": False,
        "rollout.interruption_text": "a = b",
        "rollout.prompts_per_step": 1000,
        "optimizer.epsilon": 1e-9,
    }
    assert leaves(config) == expected


def changed(value: typing.Any) -> tuple[str, typing.Any]:
    """(a flag's text, the value it stands for), another than `value`."""
    if isinstance(value, bool):
        return str(not value).lower(), not value
    if isinstance(value, str):
        return f"{value}x", f"{value}x"
    if isinstance(value, dict):
        return json.dumps(value | {"x": 1.5}), value | {"x": 1.5}
    return str(value + 1), value + 1


def test_the_environments_of_a_mixture_are_groups_of_the_tree(tmp_path):
    path = write(
        tmp_path,
        "config.mixture = {'maths': EnvironmentConfig(name='math'), 'programs': EnvironmentConfig(weight=2)}",
    )
    flags = ["--config.mixture.programs.weight=0.5", "--config.mixture.maths.columns.prompt=problem"]
    config, _ = parse_argv([f"--config={path}", *flags])
    found = leaves(config)
    assert found["mixture.programs.weight"] == 0.5 and found["mixture.maths.columns.prompt"] == "problem"
    assert from_json(to_json(config)) == config
    for flag, said in (
        ("mixture.programs.weight=0", "config.mixture.programs.weight=0.0: must be above 0"),
        ("mixture.code.weight=1", "--config.mixture.code.weight: config.mixture has no field 'code' (it has: maths"),
        ("mixture=1", "--config.mixture: is a group of fields"),
        ("environment.filter=x", "config.environment.filter: is not read beside config.mixture, whose environments"),
        ("environment.template_arguments=1", "--config.environment.template_arguments=1: is not a JSON object"),
    ):
        assert refusal(lambda flag=flag: parse_argv([f"--config={path}", f"--config.{flag}"])).startswith(said)
    path = write(tmp_path, "config.mixture = {'all': config.environment}")
    assert "'all' is what all of its environments together are called" in refusal(lambda: load_file(path))
    path = write(tmp_path, "config.mixture = {'a b': config.environment}")
    assert "'a b' is not a name" in refusal(lambda: load_file(path))


@pytest.mark.parametrize("name", leaves(Config()))
def test_every_leaf_can_be_overridden_and_changes_nothing_else(name):
    config = Config()
    text, value = changed(leaves(config)[name])
    override(config, name, text)
    assert leaves(config) == leaves(Config()) | {name: value}
    assert type(leaves(config)[name]) is type(value)


def test_two_configs_share_nothing():
    one, other = Config(), Config()
    one.objective.max_ratio = 4.0
    assert other == Config() != one


# ---- config.json ---------------------------------------------------------------------------------------------------


def test_config_json_round_trips():
    config = Config(seed=2**62, max_steps=7)
    for name, value in leaves(config).items():
        override(config, name, changed(value)[0])
    again = from_json(to_json(config))
    assert again == config and leaves(again) == leaves(config)
    assert {type(value) for value in leaves(again).values()} == {int, float, str, bool, dict}
    assert to_json(again) == to_json(config)
    assert json.loads(to_json(config))["objective"]["max_ratio"] == 6.0
    assert from_json("{}") == Config()  # a field that is not there has its default


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"objective": {"capp": 4}}', "config.objective has no field 'capp' (it has: loss, max_ratio, "),
        ('{"objective": 4}', "config.objective=4: is not of type ObjectiveConfig"),
        ('{"objective": {"max_ratio": "4"}}', "config.objective.max_ratio='4': is not of type float"),
        ('{"seed": {"cap": 4}}', "config.seed={'cap': 4}: is not of type int"),
        ('{"seed": 4', "config.json: is not JSON ("),
        ("[4]", "config=[4]: is not of type Config"),
    ],
)
def test_a_config_json_that_cannot_be_is_named(text, message):
    assert refusal(lambda: from_json(text)).startswith(message)


def test_the_defaults_and_the_files_in_the_tree_are_allowed():
    check(Config())
    for path in (ROOT / "configs").rglob("*.py"):
        if path.name != "ablations.py":  # makes configs from others
            assert dataclasses.is_dataclass(load_file(str(path)))


# ---- The command ---------------------------------------------------------------------------------------------------

COMMAND = """
import os
from absl import flags
from scalerl_jax import config_io
from scalerl_jax.cli import entry

def main(values):
    os.mkdir(flags.FLAGS.workdir)
    with open(flags.FLAGS.workdir + "/config.json", "w") as file:
        file.write(config_io.to_json(values))

flags.DEFINE_string("workdir", None, "Folder.", required=True)
entry.run_with_config(main)
"""


def command(tmp_path, *argv: str) -> tuple[int, str]:
    """(exit code, stderr) of a command like scalerl-train, with a main that writes down what it was given."""
    done = run_python("-c", COMMAND, f"--workdir={tmp_path / 'run'}", *argv)
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("line", "flag", "message"),
    [
        ("pass", "--config.objective.capp=4", "--config.objective.capp: config.objective has no field 'capp'"),
        ("config.objective.capp = 4", "--config.seed=1", "--config={}: config.objective has no field 'capp'"),
        (
            "config.objective.max_ratio = 'high'",
            "--config.seed=1",
            "--config={}: config.objective.max_ratio='high': is not",
        ),
        ("pass", "--config.pacing.max_off_policy_steps=0", "config.pacing.max_off_policy_steps=0: must be above 0"),
    ],
)
def test_a_mistake_ends_the_command_with_one_line_and_nothing_is_written(tmp_path, line, flag, message):
    path = write(tmp_path, line)
    code, said = command(tmp_path, f"--config={path}", flag)
    assert code == 2
    assert said.startswith("error: " + message.format(path)) and said.count("\n") == 1, said
    assert not (tmp_path / "run").exists()


def test_an_unknown_flag_ends_the_command_and_nothing_is_written(tmp_path):
    code, said = command(tmp_path, f"--config={write(tmp_path)}", "--confg.objective.max_ratio=4")
    assert code != 0 and "confg.objective.max_ratio" in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_what_the_command_was_given_is_what_it_writes_down(tmp_path):
    path = write(tmp_path, "config.objective.max_ratio = 4")
    code, said = command(tmp_path, f"--config={path}", "--config.objective.max_ratio=4.5", "--config.max_steps=9")
    assert (code, said) == (0, "")
    written = from_json((tmp_path / "run" / "config.json").read_text())
    assert leaves(written) == leaves(Config()) | {"objective.max_ratio": 4.5, "max_steps": 9}
