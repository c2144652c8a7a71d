"""--help of every command, and flags, configs and places to write that cannot be."""

import dataclasses
import json
import subprocess
import sys

import pytest

from scalerl_jax import config as config_lib
from scalerl_jax import config_check
from scalerl_jax.cli import command_help, compare_flags, entry
from scalerl_jax.scaling.fit import SEED_MARGIN
from tests.support.paths import ROOT
from tests.support.processes import run_command
from tests.support.tiny_task import write_model

COMMANDS = {
    "train": "--workdir",
    "sft": "--workdir",
    "serve": "--slots",
    "fit": "--burn_in",
    "compare": "--baseline",
    "export": "--dtype",
    "gateway": "--journal",
    "report": "--out",
}
# What it takes long to import, or an install for one command does not have.
LARGE = "jax numpy scipy flax grpc rich matplotlib orbax"


def run(name: str, *arguments: str, without: str = LARGE) -> subprocess.CompletedProcess[str]:
    """The command as its script starts it; `without` these: the last line of stdout says which it had imported."""
    start = (
        f"import atexit, json, sys; sys.argv[0] = '/bin/scalerl-{name}'\n"
        f"there = lambda: json.dumps([name for name in {without.split()!r} if name in sys.modules])\n"
        f"atexit.register(lambda: print(there(), flush=True))\n"
        f"from launch.commands import {name}\n"
        f"{name}()"
    )
    done = subprocess.run([sys.executable, "-c", start, *arguments], capture_output=True, text=True, timeout=600)
    assert json.loads(done.stdout.splitlines()[-1]) == [], done.stderr
    return done


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_the_command_is_and_lists_its_flags(name):
    done = run(name, "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith(f"scalerl-{name}: ")
    assert f"\n  {COMMANDS[name]}: " in done.stdout
    assert "--only_check_args" not in done.stdout  # absl's own stay under --helpfull
    assert max(map(len, done.stdout.splitlines()[:-1])) <= command_help.WIDTH


@pytest.mark.parametrize("name", ["train", "sft"])
def test_help_lists_every_field_of_the_config(name):
    text = run(name, "--help").stdout
    for field in config_check.leaves(config_lib.Config()):
        assert f"  --config.{field}=" in text


def test_every_field_of_the_config_says_what_it_is():
    said = command_help.comments(config_lib.__name__)
    for made in vars(config_lib).values():
        if dataclasses.is_dataclass(made) and made.__module__ == config_lib.__name__:
            for field in dataclasses.fields(made):
                if not dataclasses.is_dataclass(field.default_factory):
                    assert said[made.__name__, field.name], f"{made.__name__}.{field.name} has no comment"


def test_a_module_that_is_started_as_a_script_helps_as_well():
    done = run_command("scalerl_jax.export", "--help")
    assert done.returncode == 0 and done.stdout.startswith("scalerl-export: ") and "\n  --dtype: " in done.stdout


@pytest.mark.parametrize(
    ("name", "flag", "said"),
    [
        ("fit", "--bootstrp=3", "bootstrp"),
        ("fit", "--bootstrap=many", "bootstrap"),
        ("train", "--workdri=runs", "--config"),
        ("train", "--config=nowhere.py", "--config=nowhere.py: no such file"),
        ("sft", "--config=nowhere.py", "--config=nowhere.py: no such file"),
        ("serve", "--port=many", "port"),
        ("export", "--dtype=float8", "dtype"),
        ("fit", "--seed=-1", "seed"),
        ("compare", "--margin=nan", "--margin=nan: is not a number"),
    ],
)
def test_a_flag_that_cannot_be_is_one_line(name, flag, said):
    done = run(name, flag)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and said in line


QUICKSTART = f"--config={ROOT / 'configs' / 'quickstart.py'}"
MATH = (QUICKSTART, "--workdir={}/run", "--config.model.path={}/model", "--config.environment.name=math")
CURVES = ("--x=x", "--y=y", "--out={}/out")


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder with a model, and with rows and evaluations that are wrong."""
    folder = tmp_path_factory.mktemp("given")
    write_model(str(folder / "model"))
    (folder / "bad.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2="}\n')
    (folder / "bad.csv").write_text("x,y\n1,0.5\n2,many\n")
    return folder


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        (
            "train",
            (*MATH, "--config.environment.train={}/no.jsonl"),
            "config.environment.train={}/no.jsonl: No such file",
        ),
        ("train", (*MATH, "--config.environment.train={}/bad.jsonl"), "{}/bad.jsonl row 2: "),
        ("train", (*MATH, "--config.model.path={}/none"), "{}/none: no config.json there"),
        ("sft", (*MATH, "--config.sft.traces={}/no.jsonl"), "config.sft.traces={}/no.jsonl: No such file"),
        ("evaluate", ("--workdir={}/none",), "--workdir={}/none: no config.json there"),
        ("evaluate", ("--model={}/none", "--environment=arithmetic"), "{}/none: no config.json there"),
        ("evaluate", ("--model={}/model", "--environment={}/bad.jsonl"), "{}/bad.jsonl row 2: "),
        ("fit", ("{}/no.csv", *CURVES), "{}/no.csv: no such file"),
        ("fit", ("{}/bad.csv", *CURVES), "{}/bad.csv: line 3: column 'y': 'many' is not a number"),
        ("compare", ("{}/bad.csv", *CURVES), "{}/bad.csv: line 3: column 'y': 'many' is not a number"),
        ("calibrate", ("{}/bad.csv", *CURVES), "{}/bad.csv: line 3: column 'y': 'many' is not a number"),
        ("plan", (QUICKSTART, "--topology=v9:2"), "--topology=v9:2: 'v9' is not one of"),
        (
            "plan",
            (QUICKSTART, "--topology=v5p:2x2x1", "--model_config={}/none"),
            "--model_config={}/none: no such file",
        ),
        ("export", ("--workdir={}/none", "--out={}/out"), "--workdir={}/none: no config.json there"),
        ("gateway", ("--model={}/none",), "{}/none/tokenizer.json: no such file"),
        ("report", ("{}/none",), "{}/none: no such folder"),
    ],
)
def test_what_is_given_is_looked_at_before_what_takes_long_is_imported(given, name, flags, said):
    without = LARGE.replace("numpy ", "")
    done = run(name, *(flag.replace("{}", str(given)) for flag in flags), without=f"{without} datasets")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {said.replace('{}', str(given))}"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (given / "run").exists() and not (given / "out").exists()


@pytest.mark.parametrize(
    ("name", "flags"),
    [("sft", (QUICKSTART, "--workdir={}/run")), ("export", ("--workdir={}/none", "--out={}/out"))],
)
def test_an_override_without_its_hyphens_is_no_argument(given, name, flags):
    done = run(name, *(flag.replace("{}", str(given)) for flag in flags), "config.seed=3", without="")
    assert (done.returncode, done.stderr.splitlines()[0][:30]) == (2, "error: config.seed=3: is no fl"), done.stderr
    assert not (given / "run").exists() and not (given / "out").exists()


def test_a_constant_that_a_flag_needs_is_the_one_that_the_fit_uses():
    assert compare_flags.SEED_MARGIN == SEED_MARGIN


def test_a_place_that_cannot_be_written_to_is_known_before_the_work_is_done(tmp_path):
    (tmp_path / "file").write_text("")
    entry.check_out("--out", str(tmp_path / "a" / "b"))
    entry.check_out("--out", str(tmp_path / "file"))  # it is written anew
    assert not (tmp_path / "a").exists()
    for out in ("file/a", "file/a/b"):
        with pytest.raises(entry.UserError, match=f"^--out={tmp_path / out}: {tmp_path / 'file'} is not a folder$"):
            entry.check_out("--out", str(tmp_path / out))


def test_a_place_where_nobody_may_write(tmp_path, monkeypatch):
    """As root everything may be written to, so the system's answer is given here."""
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(tmp_path))
    with pytest.raises(entry.UserError, match=f"^--out={tmp_path}/a: {tmp_path} cannot be written to$"):
        entry.check_out("--out", f"{tmp_path}/a")
