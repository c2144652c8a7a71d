"""scalerl-launch --target=slurm: the batch scripts, run by bash between a stand-in for Slurm's own commands."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from launch import settings
from scalerl_jax.config_io import load_file, parse_argv
from scalerl_jax.run.collapse_guard import Collapsed
from tests.launch.launched import SCALERL_8B, SLURM, launch
from tests.support.paths import ROOT
from tests.support.processes import SECONDS
from tests.support.waiting import eventually

FULL = (
    "--target=slurm", f"--config={SCALERL_8B}", "--trainer=h200:2x8", "--generator=h100:2", "--generators=16",
    "--partition=big", "--generator_partition=small", "--account=lab", "--time=12:00:00", "--grace_seconds=240",
    "--setup=source ~/it/bin/activate", "--generator_setup=module load cuda", "--trainer_env=A=b c",
    "--trainer_cpus=96", "--generator_cpus=12", "--generator_memory=128G", "--trainer_sbatch=--qos=long",
    "--trainer_sbatch=--constraint=nvlink&ib", "--generator_sbatch=--reservation=us",
)  # fmt: skip


def made(where: pathlib.Path, *flags: str) -> pathlib.Path:
    result = launch(*flags, "--dry_run", "--out=made", f"--workdir={where}/run", where=where)
    assert result.returncode == 0, result.stderr
    return where / "made"


@pytest.fixture
def full(tmp_path: pathlib.Path) -> pathlib.Path:
    files = {}
    for flag in ("token_file", "tls_authority", "tls_certificate", "tls_key"):
        files[flag] = tmp_path / flag
        files[flag].write_text("x")
    return made(tmp_path, *FULL, *(f"--{flag}={path}" for flag, path in files.items()))


def options(script: pathlib.Path) -> dict[str, str]:
    """What #SBATCH lines say; they count only above the first command."""
    found = {}
    for line in script.read_text().splitlines()[1:]:
        if not line.startswith("#"):
            break
        if line.startswith("#SBATCH --"):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            found[name] = value
    return found


def test_the_scripts_ask_for_what_was_given(full: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    common = {"account": "lab", "time": "12:00:00", "open-mode": "append", "requeue": ""}
    assert options(full / "trainer.sbatch") == {
        **common, "job-name": "scalerl-8b-trainer", "output": f"{run}-launch/logs/trainer-%j.log", "nodes": "2",
        "ntasks-per-node": "1", "gpus-per-node": "8", "exclusive": "", "signal": "TERM@240", "partition": "big",
        "cpus-per-task": "96", "mem": "0", "qos": "long", "constraint": "nvlink&ib",
    }  # fmt: skip
    assert options(full / "generators.sbatch") == {
        **common, "job-name": "scalerl-8b-generator", "output": f"{run}-launch/logs/generator-%A-%a.log",
        "array": "0-15", "nodes": "1", "ntasks": "1", "gpus-per-node": "2", "signal": "B:TERM@60",
        "partition": "small", "cpus-per-task": "12", "mem": "128G", "reservation": "us",
    }  # fmt: skip
    trainer = (full / "trainer.sbatch").read_text()
    assert "export A='b c'\n" in trainer
    assert "source ~/it/bin/activate\n" in trainer
    assert "srun --wait=240 --cpus-per-task=96 scalerl-train" in trainer
    assert f"\ncd {tmp_path}\n" in trainer  # where relative paths of the config begin
    assert "--config.fleet.connect_seconds=7200" in trainer
    assert "module load cuda\n" in (full / "generators.sbatch").read_text()
    assert load_file(str(full / "config.py")) == load_file(SCALERL_8B)


def test_generators_alone_need_no_authority_and_bits_need_jax(tmp_path: pathlib.Path) -> None:
    files = {flag: tmp_path / flag for flag in ("token_file", "tls_certificate", "tls_key")}
    for path in files.values():
        path.write_text("x")
    given = [f"--{flag}={path}" for flag, path in files.items()]
    alone = ("--target=slurm", f"--config={SCALERL_8B}", "--part=generators", "--generator=h100")
    script = (made(tmp_path, *alone, "--config.numerics=bitwise", *given) / "generators.sbatch").read_text()
    assert "--numerics=bitwise" in script and "--engine=jax" in script


def test_generators_compute_as_the_trainer_does(tmp_path: pathlib.Path) -> None:
    given = ("--config.model.compute_dtype=float32", "--config.fleet.compute_dtype=auto")
    script = (made(tmp_path, *SLURM, *given) / "generators.sbatch").read_text()
    assert "--compute_dtype=float32" in script


def test_a_setup_line_may_read_variables_that_are_not_set(tmp_path: pathlib.Path) -> None:
    made(tmp_path, *SLURM, "--setup=echo $NOT_SET")
    environment = stand_in(tmp_path, srun="echo ran; exit 0", scontrol="true")
    (tmp_path / "run-launch").mkdir()
    (tmp_path / "run-launch" / "servers").write_text("a:1\n")
    script = ["bash", tmp_path / "made" / "trainer.sbatch"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (0, "\nran\n"), done.stderr


def test_the_scripts_are_sound(full: pathlib.Path) -> None:
    scripts = [full / name for name in ("trainer.sbatch", "generators.sbatch", "submit.sh")]
    for script in scripts:
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        # SC1090, SC1091: a file of the user's, which is not followed.
        subprocess.run(["shellcheck", "--exclude=SC1090,SC1091", *scripts], check=True)


def stand_in(folder: pathlib.Path, **programs: str) -> dict[str, str]:
    """The environment of a batch script in which these programs are bash scripts."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in programs.items():
        program = folder / "bin" / name
        program.write_text(f"#!/usr/bin/env bash\n{text}\n")
        program.chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return {
        "PATH": path,
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "3",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


def scontrol(folder: pathlib.Path, state: str = "RUNNING") -> str:
    """Says that the job is in this state, and writes down what it is asked beside that."""
    return (
        f'[[ "$*" == *"show job 7"* ]] && echo "JobId=7 JobState={state} Reason=None" || echo "$*" >>{folder}/scontrol'
    )


@pytest.mark.parametrize(
    ("code", "failures", "again"),
    [(0, 0, False), (143, 0, True), (143, 20, True), (2, 0, False), (3, 0, False), (1, 0, True), (1, 20, False)],
)
def test_the_trainer_is_queued_again_where_that_helps(
    code: int, failures: int, again: bool, tmp_path: pathlib.Path
) -> None:
    folder = made(tmp_path, *SLURM, "--trainer=cpu:2")
    (tmp_path / "run-launch").mkdir()
    (tmp_path / "run-launch" / "servers").write_text("node1:8500\n")
    environment = stand_in(
        tmp_path,
        srun=f'printf "%s\\n" "$@" >{tmp_path}/srun; exit {code}',
        scontrol=scontrol(tmp_path),
    )
    environment["SLURM_RESTART_COUNT"] = "99"  # preemptions and time limits are in it
    if failures:
        (tmp_path / "run-launch" / "failures-7").write_text(f"{failures}\n")
    result = subprocess.run(["bash", folder / "trainer.sbatch"], env=environment, check=False, timeout=SECONDS)
    assert result.returncode == code
    assert (tmp_path / "scontrol").exists() == again
    if again:
        assert (tmp_path / "scontrol").read_text() == "requeue 7\n"
    wait, program, *flags = (tmp_path / "srun").read_text().splitlines()
    assert (wait, program) == ("--wait=300", "scalerl-train")
    config, rest = parse_argv(flags)
    assert config.model.path == f"{tmp_path}/models/tiny"
    assert f"--servers=file:{tmp_path}/run-launch/servers" in rest and "--hosts=slurm" in rest


def test_failures_are_counted_and_preemptions_are_not(tmp_path: pathlib.Path) -> None:
    folder = made(tmp_path, *SLURM, "--max_restarts=2")
    (tmp_path / "run-launch").mkdir()
    (tmp_path / "run-launch" / "servers").write_text("node1:8500\n")
    asked = []
    for code in (1, 143, 1, 143, 1):
        environment = stand_in(tmp_path, srun=f"exit {code}", scontrol=scontrol(tmp_path))
        subprocess.run(["bash", folder / "trainer.sbatch"], env=environment, check=False, timeout=SECONDS)
        asked.append(len((tmp_path / "scontrol").read_text().splitlines()))
    assert asked == [1, 2, 3, 4, 4]


def test_codes_are_those_of_the_trainer() -> None:
    codes = settings.EXIT_CODES
    assert (codes["LEFT_ON_SIGTERM"], codes["COLLAPSED"]) == (128 + signal.SIGTERM, Collapsed.EXIT_CODE)


def test_what_is_cancelled_is_not_queued_again(tmp_path: pathlib.Path) -> None:
    folder = made(tmp_path, *SLURM)
    (tmp_path / "run-launch").mkdir()
    (tmp_path / "run-launch" / "servers").write_text("node1:8500\n")
    environment = stand_in(tmp_path, srun="exit 143", scontrol=scontrol(tmp_path, "CANCELLED"))
    result = subprocess.run(["bash", folder / "trainer.sbatch"], env=environment, check=False, timeout=SECONDS)
    assert result.returncode == 143
    assert not (tmp_path / "scontrol").exists()


def test_a_generator_says_where_it_is_and_leaves_when_told(tmp_path: pathlib.Path) -> None:
    """A real server (of scripted rollouts, which needs no model), told to stop as Slurm does before the time limit."""
    folder = made(tmp_path, *SLURM)
    environment = stand_in(
        tmp_path,
        **{"scalerl-serve": f"""
for flag in "$@"; do case $flag in --port=*|--port_file=*|--insecure|--host=*) kept+=("$flag") ;; esac; done
cd {ROOT} && exec {sys.executable} -m tests.support.replay.serve --engine=replay "${{kept[@]}}\""""},
        scontrol=scontrol(tmp_path),
    )  # fmt: skip
    state = tmp_path / "run-launch"
    (state / "addresses").mkdir(parents=True)
    (state / "addresses" / "1").write_text("elsewhere:8500\n")
    script = subprocess.Popen(["bash", folder / "generators.sbatch"], env=environment, start_new_session=True)
    try:
        servers = state / "servers"
        eventually(
            lambda: servers.exists() or script.poll() is not None, "the generator says where it is", seconds=SECONDS
        )
        assert script.poll() is None
        lines = servers.read_text().splitlines()
        assert lines[0] == "elsewhere:8500"
        assert len(lines) == 2 and lines[1].rpartition(":")[2].isdigit()
        script.send_signal(signal.SIGTERM)
        assert script.wait(SECONDS) == 143
        assert servers.read_text() == "elsewhere:8500\n"
        assert [path.name for path in (state / "addresses").iterdir()] == ["1"]
        assert (tmp_path / "scontrol").read_text() == "requeue 7_3\n"
    finally:
        if script.poll() is None:
            os.killpg(script.pid, signal.SIGKILL)
            script.wait()


def test_a_generator_that_cannot_begin_is_not_queued_again(tmp_path: pathlib.Path) -> None:
    folder = made(tmp_path, *SLURM)
    (tmp_path / "run-launch").mkdir()
    serve = f"cd {ROOT} && exec {sys.executable} -m rollout_server.serve --engine=jax --port=0 --model=no"
    environment = stand_in(tmp_path, **{"scalerl-serve": serve}, scontrol=scontrol(tmp_path))
    result = subprocess.run(
        ["bash", folder / "generators.sbatch"],
        env=environment,
        check=False,
        timeout=SECONDS,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2, result.stderr
    assert "scalerl-serve: --model=no" in result.stderr
    assert not (tmp_path / "scontrol").exists()


def test_both_sides_are_given_what_keeps_others_out(full: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for script, prefix, flags in (
        ("generators.sbatch", "--", ("tls_certificate", "tls_key", "token_file")),
        ("trainer.sbatch", "--config.fleet.", ("tls_authority", "token_file")),
    ):
        given = (full / script).read_text().split()
        assert [flag for flag in flags if f"{prefix}{flag}={tmp_path / flag}" not in given] == []
        assert "--insecure" not in given
