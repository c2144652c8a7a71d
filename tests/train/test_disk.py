"""A workdir that fills up, is read-only or vanishes: one line, nothing half-written, and the run goes on later."""

import contextlib
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from tests.support.processes import run_command, single_threaded
from tests.support.runs import CONFIG, Run, read
from tests.train.comparing import PACED, compare, saved

pytestmark = pytest.mark.slow

UPDATES = 8
SLOWLY = "--replay_token_seconds=0.03"  # so that the disk is full seconds before the run could end


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own; mounted(size) makes it that large, or read-only. Where that cannot be: skipped."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mounted(options: str) -> pathlib.Path:
        remount = ["-o", f"remount,{options}"] if os.path.ismount(folder) else ["-o", options]
        done = subprocess.run(["mount", "-t", "tmpfs", *remount, "tmpfs", str(folder)], capture_output=True)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
        return folder

    yield mounted
    if os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def failed(run: Run) -> str:
    """The one line that a run ends with that cannot write."""
    code, said = run.wait(), run.output()
    assert code == 2, said
    assert "Traceback" not in said
    # What a run says of itself on the way; the rest must be one line.
    usual = re.compile(
        r"\d+ training prompts|attention: |memory: |train \d+/|127\.0\.0\.1:\d+ joined|step \d+: held-out|"
        r"going on from step|from step \d+ on|$"
    )
    lines = [line for line in said.splitlines() if not usual.match(line)]
    assert len(lines) == 1, said
    return lines[0].removeprefix("error: ")


def check_whole(run: Run) -> None:
    """Nothing is half-written: every file is rows that end, or JSON, and no temporary one stays beside them."""
    for name in ("metrics.jsonl", "evals.jsonl"):
        text = read(run.path(name))
        assert not text or text.endswith("\n")
    run.ledger()
    assert [name for name in os.listdir(run.workdir) if "tmp" in name] == []


def fill(folder: pathlib.Path, spare: int) -> None:
    """Leaves about `spare` bytes of room; others may write meanwhile."""
    room = os.statvfs(folder)
    with contextlib.suppress(OSError), open(folder / "filling", "ab", buffering=0) as file:
        file.write(b"\0" * max(0, room.f_bavail * room.f_frsize - spare))
        while not spare:
            file.write(b"\0" * 4096)


# A checkpoint of this policy is about 0.5 MiB in 60 files: room for none of the next, or for a row or two.
@pytest.mark.parametrize("spare", [0, 300_000], ids=["no room at all", "room for rows, not for a checkpoint"])
def test_a_full_disk_ends_a_run_with_one_line_and_it_goes_on_when_there_is_room(
    tmp_path, flags, replayed, start, small_disk, spare
):
    flags = [*flags, *replayed(SLOWLY), f"--config.max_steps={UPDATES}", "--config.checkpoint.every=2"]
    flags += ["--config.telemetry.tensorboard=true"]
    whole = start(tmp_path / "whole", *flags).finish()
    disk = small_disk("size=40m")
    run = start(disk / "run", *flags, log=tmp_path / "run.log")
    run.until(lambda: "2" in saved(run), "a checkpoint is written")
    fill(disk, spare)
    line = failed(run)
    found = re.fullmatch(
        rf"--workdir={disk}/run: no space left on device \(.*\); "
        r"the run goes on from step (\d+) with the same command when there is room",
        line,
    )
    assert found and found[1] in saved(run), line
    check_whole(run)

    # Still full: the same again, at once.
    os.remove(f"{tmp_path}/run.log")
    fill(disk, 0)
    assert "no space left on device" in failed(run.start())
    os.remove(f"{tmp_path}/run.log")
    os.remove(disk / "filling")
    run.start().finish()
    assert f"going on from step {found[1]} of {UPDATES}" in run.output()
    compare(whole, run, flags)


def test_a_workdir_that_is_read_only_or_deleted(tmp_path, flags, replayed, start, small_disk):
    flags = [*flags, *replayed(PACED), "--config.max_steps=500", "--config.checkpoint.every=2"]
    disk = small_disk("size=40m")
    small_disk("ro")
    assert failed(start(disk / "run", *flags, log=tmp_path / "read-only.log")) == (
        f"--workdir={disk}/run: read-only file system"
    )
    small_disk("rw")
    run = start(disk / "run", *flags, log=tmp_path / "run.log")
    run.until(lambda: "2" in saved(run), "a checkpoint is written")
    shutil.rmtree(disk / "run", ignore_errors=True)  # files may come while it goes
    shutil.rmtree(disk / "run", ignore_errors=True)
    line = failed(run)
    assert line.startswith(f"--workdir={disk}/run: ") and re.search("deleted|no such file", line), line


@pytest.mark.parametrize("how", ["read-only", "a file"])
def test_a_folder_of_checkpoints_that_cannot_be_written_to_any_more(tmp_path, flags, replayed, start, small_disk, how):
    """Orbax then has threads that never end: the run does all the same, and goes on when that is fixed."""
    flags = [*flags, *replayed(SLOWLY), f"--config.max_steps={UPDATES}", "--config.checkpoint.every=2"]
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.parent.mkdir()
    checkpoints.symlink_to(small_disk("size=40m"))
    run = start(tmp_path / "run", *flags, log=tmp_path / "run.log")
    run.until(lambda: "2" in saved(run), "a checkpoint is written")
    if how == "read-only":
        small_disk("ro")
    else:
        checkpoints.unlink()
        checkpoints.write_text("")
    line = failed(run)
    assert line.startswith(f"--workdir={tmp_path}/run: ") and line.endswith("when that is fixed"), line
    check_whole(run)

    os.remove(f"{tmp_path}/run.log")
    if how == "read-only":
        small_disk("rw")
    else:
        checkpoints.unlink()
        checkpoints.symlink_to(tmp_path / "disk")
    run.start().finish()
    assert "going on from step" in run.output()


def test_a_warm_start_on_a_full_disk(tmp_path, small_disk):
    flags = [f"--config={CONFIG}", "--config.environment.name=arithmetic"]
    flags += ["--config.sft.max_steps=3", "--config.sft.checkpoint_every=1", "--config.sft.rows_per_step=2"]
    flags += ["--config.rollout.interruption_text= </think>", "--config.sft.layers=1"]
    disk = small_disk("size=600k")
    flags.append(f"--workdir={disk}/warm")
    done = run_command("scalerl_jax.sft", *flags, environment=single_threaded())
    lines = [line for line in done.stderr.splitlines() if not line.startswith("warm start")]
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert lines[0].startswith(f"error: --workdir={disk}/warm: no space left on device")
    assert not (disk / "warm" / "model").exists()
    small_disk("size=40m")
    done = run_command("scalerl_jax.sft", *flags, environment=single_threaded())
    assert done.returncode == 0, done.stderr
    assert (disk / "warm" / "model" / "model.safetensors").exists()
