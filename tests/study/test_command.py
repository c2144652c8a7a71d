"""scalerl-study as a user starts it: members side by side, killed, interrupted, started again with the same command."""

import os
import pathlib
import signal

import pytest

from scalerl_jax.run.folder import acquire_lock
from scalerl_jax.run.jsonl import read_rows
from scalerl_jax.study.plan_file import is_held
from tests.study.studies import TINY, command, environment, study, write_studies
from tests.support import fork_server
from tests.support.processes import run_python
from tests.support.runs import read
from tests.support.waiting import eventually
from tests.train.conftest import model, task  # noqa: F401  fixtures

STEPS = 40


@pytest.fixture
def flags(tmp_path: pathlib.Path, model: str, task: list[str]) -> list[str]:  # noqa: F811
    # So that some prompts teach, and a step takes long enough to be killed in.
    return [
        f"--base={TINY}", f"--studies={write_studies(tmp_path)}", f"--workdir={tmp_path}/study",
        f"--config.model.path={model}", *task, "--config.rollout.prompts_per_step=6", "--config.rollout.group_size=8",
        "--config.objective.truncated=penalize", f"--config.max_steps={STEPS}",
    ]  # fmt: skip


def rows(tmp_path: pathlib.Path, run: str, name: str = "metrics.jsonl") -> list[dict]:
    path = tmp_path / "study" / "runs" / run / name
    return read_rows(str(path)) if path.exists() else []


class Started:
    """The command in the background; none outlives the test."""

    def __init__(self, tmp_path: pathlib.Path, *flags: str):
        self.log = str(tmp_path / "study.log")
        with open(self.log, "ab") as log:
            self.process = fork_server.start(
                *command(*flags), folder=tmp_path, environment=environment(), stdout=log, stderr=log, new_session=True
            )

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def until(self, condition, what: str) -> None:
        def look() -> bool:
            assert self.process.poll() is None, read(self.log)
            return condition()

        eventually(look, what, seconds=600)


def assert_trained_once(tmp_path: pathlib.Path, run: str) -> None:
    assert [row["step"] for row in rows(tmp_path, run)] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows(tmp_path, run, "evals.jsonl")] == list(range(0, STEPS + 1, 4))


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two members at a time need two cores")
def test_a_study_that_is_killed_goes_on(tmp_path: pathlib.Path, flags: list[str]) -> None:
    flags = [*flags, "--study=two", "--parallel=2"]
    stopped: dict[str, int] = {}

    def have_trained() -> bool:
        """Whoever has stands still, or one could be over before the other one begins."""
        for run in ("plain", "slow"):
            if run not in stopped and len(rows(tmp_path, run)) >= 7:
                stopped[run] = int(read(str(tmp_path / f"study/runs/{run}/lock")))
                os.kill(stopped[run], signal.SIGSTOP)
        return len(stopped) == 2

    with Started(tmp_path, *flags) as first:
        try:
            first.until(have_trained, "both have trained")
            shares = [os.sched_getaffinity(child) for child in stopped.values()]
            assert all(shares) and not shares[0] & shares[1]
            first.process.kill()  # SIGKILL
            first.process.wait()
        finally:
            for child in stopped.values():
                os.kill(child, signal.SIGCONT)
    folders = [str(tmp_path / "study" / "runs" / run) for run in ("plain", "slow")]
    again = study(*flags, folder=tmp_path, seconds=900)  # at once: they may still be saving
    assert again.returncode == 0, again.stderr
    assert not any(map(is_held, folders))
    for run in ("plain", "slow"):
        assert_trained_once(tmp_path, run)
        assert len({row["incarnation"] for row in rows(tmp_path, run)}) == 2
        log = read(str(tmp_path / "study" / "logs" / f"{run}.log"))
        assert "interrupted" in log and f"of {STEPS}" in log.partition("going on from step")[2]
        assert f"{run}: goes on from step" in again.stderr and f"{run}: finished at step {STEPS}" in again.stderr
    assert (tmp_path / "study" / "study.html").exists()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "study" / "runs").rglob("*") if path.is_file()}
    third = study(*flags, folder=tmp_path)
    assert third.returncode == 0 and "2 of 2 runs are finished already" in third.stderr, third.stderr
    assert third.stdout == again.stdout
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "study" / "runs").rglob("*") if path.is_file()}
    # A look at a lock opens it; nothing is written.
    assert after == before


@pytest.mark.slow
def test_ctrl_c_is_passed_on_once(tmp_path: pathlib.Path, flags: list[str]) -> None:
    with Started(tmp_path, *flags, "--study=two") as started:
        started.until(lambda: len(rows(tmp_path, "plain")) >= 4, "it trains")
        started.process.send_signal(signal.SIGINT)
        assert started.process.wait(600) == 128 + signal.SIGINT
    said = read(started.log)
    assert "interrupted: what ran has been saved; the same command goes on" in said
    assert "Traceback" not in said
    log = read(str(tmp_path / "study" / "logs" / "plain.log"))
    assert "a second signal leaves at once" in log and "left at once" not in log
    assert not is_held(str(tmp_path / "study" / "runs" / "plain"))
    saved = {int(path.name) for path in (tmp_path / "study" / "runs" / "plain" / "checkpoints").iterdir()}
    assert max(saved) == rows(tmp_path, "plain")[-1]["step"]


@pytest.mark.slow
def test_one_that_fails_holds_up_no_other(tmp_path: pathlib.Path, flags: list[str]) -> None:
    # The member that lacks its file comes first.
    path = tmp_path / "studies.py"
    write_studies(tmp_path)
    path.write_text(
        path.read_text().replace(
            '{"plain": copy.deepcopy(base), "broken": config}', '{"broken": config, "plain": base}'
        )
    )
    flags = [*flags, "--study=broken", "--config.max_steps=3"]
    said = study(*flags, folder=tmp_path)
    assert said.returncode == 1, said.stderr
    assert "broken: failed: error: " in said.stderr and "no-such-file.jsonl" in said.stderr
    assert "plain: finished at step 3" in said.stderr
    assert said.stderr.strip().splitlines()[-1] == "error: 1 of 2 failed; the same command tries them again"
    again = study(*flags, folder=tmp_path)
    assert again.returncode == 1 and "broken: starts" in again.stderr and "plain: starts" not in again.stderr


def test_two_studies_in_one_folder(tmp_path: pathlib.Path, flags: list[str]) -> None:
    (tmp_path / "study").mkdir()
    lock = acquire_lock(str(tmp_path / "study" / "lock"), "")
    try:
        said = study(*flags, "--study=two", folder=tmp_path)
    finally:
        os.close(lock)
    assert said.returncode == 2 and said.stdout == ""
    assert f"a study (process {os.getpid()}) is running in it" in said.stderr
    assert [path.name for path in (tmp_path / "study").iterdir()] == ["lock"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--study=two", "--parallel=9999"], "--parallel=9999: this process has "),
        (["--study=nine"], "--study=nine: no such study; there are two, seeds, other, broken"),
        (["--study=two", "--members=x"], "--members=x: no such member; there are plain, slow"),
        (["--study=two", "--baseline=x"], "--baseline=x: no such member; there are plain, slow"),
        (["--study=two", "--config.optimizer.rate=1"], "config.optimizer has no field 'rate'"),
        (["--study=two", "--results_only"], "no run in it has an evaluation yet"),
        (["--study=two", "--config=other.py"], "--config=other.py is given too"),
        (["--study=two", "--studies=no.py"], "--studies=no.py: no such file"),
        (["--study=two", "--trainer=cpu"], "Unknown command line flag 'trainer'"),
    ],
)
def test_a_mistake_is_one_line(more: list[str], said: str, tmp_path: pathlib.Path, flags: list[str]) -> None:
    found = study(*flags, *more, folder=tmp_path)
    assert found.returncode == 2 and found.stdout == "", found.stderr
    (line,) = [line for line in found.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ") and said in line
    assert not (tmp_path / "study").exists()


SLURM = ("--render=slurm", "--trainer=cpu", "--generator", "cpu", "--insecure")
KUBERNETES = (
    "--render=kubernetes", "--trainer=cpu", "--generator=cpu", "--insecure", "--trainer_image=trainer:1",
    "--generator_image=generator:1",
)  # fmt: skip


@pytest.mark.parametrize(("target", "script"), [(SLURM, "submit.sh"), (KUBERNETES, "apply.sh")])
def test_launch_files_in_the_place_of_runs(
    target: tuple[str, ...], script: str, tmp_path: pathlib.Path, flags: list[str]
) -> None:
    found = study(*flags, "--study=two,seeds", *target, folder=tmp_path)
    assert found.returncode == 0, found.stderr
    launch = tmp_path / "study" / "launch"
    assert found.stdout.split() == [str(launch / run) for run in ("plain", "slow", "seed_6", "seed_7")]
    assert [path.name for path in (tmp_path / "study").iterdir()] == ["launch"]
    for run in ("plain", "slow", "seed_6", "seed_7"):
        assert (launch / run / script).exists()
    text = "".join(path.read_text() for path in (launch / "slow").iterdir())
    assert "0.00075" in text and "slow-study" in text  # objects of two studies in one namespace have two names
    assert "0.00075" not in "".join(path.read_text() for path in (launch / "plain").iterdir())
    # Again, with less: they are made anew.
    assert study(*flags, "--study=two,seeds", *target, folder=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--generator=h100:2x8"], "the devices of an engine are on one host"),
        (["--name=mine"], "--name: is every run's own in a study"),
        (["--no_such_flag=1"], "no_such_flag"),
        (["--namespace=x"], "--namespace: requires --target=kubernetes"),
    ],
)
def test_launch_files_or_none(more: list[str], said: str, tmp_path: pathlib.Path, flags: list[str]) -> None:
    found = study(*flags, "--study=two", *SLURM, *more, folder=tmp_path)
    assert found.returncode == 2 and found.stdout == "", found.stderr
    (line,) = found.stderr.splitlines()
    assert line.startswith("error: ") and said in line
    assert not (tmp_path / "study").exists()


def test_help_tells_the_flags() -> None:
    found = run_python("-c", "from launch.commands import study; study()", "--help", environment=environment())
    assert found.returncode == 0, found.stderr
    for flag in ("study", "base", "studies", "workdir", "seeds", "members", "parallel", "render", "baseline", "x"):
        assert f"--{flag}: " in found.stdout
    assert "--[no]results_only: " in found.stdout and "--config.max_steps=" in found.stdout
