"""What a user may get wrong: one line on stderr names it, exit code 2, and the next try can have the workdir."""

import json
import os
import pathlib
import shutil
import socket

import pytest

from scalerl_jax.environments.base import Row, Rows
from scalerl_jax.learner.checkpoint import newest_step
from scalerl_jax.run import setup
from scalerl_jax.run.folder import RunFolder
from tests.support.runs import config_of
from tests.support.servers import serve
from tests.support.tiny_task import smaller, write_model
from tests.train.comparing import damage


@pytest.fixture
def refused(start):
    """refused(workdir, *flags): the line that scalerl-train ends with. It must be the only one, apart from progress and
    what is said of the machine and how many prompts there are."""

    def started(workdir: pathlib.Path, *flags: str) -> str:
        run = start(workdir, *flags)
        assert run.wait() == 2, run.output()
        said = run.output()
        beside = ("train 0/", "14 training prompts, 6 held", "attention: ", "memory: ")
        lines = [line for line in said.splitlines() if not line.startswith(beside)]
        assert len(lines) == 1 and lines[0].startswith("error: "), said
        return lines[0].removeprefix("error: ")

    return started


def check_usable(workdir: pathlib.Path) -> None:
    """Nothing was half-written, and a run of another config may have the folder."""
    if not workdir.exists():
        return
    left = [path for path in workdir.rglob("*") if path.is_file() and path.stat().st_size]
    kept = {"config.json", "incarnation", "lock", "ledger.json", "inputs.json"}
    assert {path.name for path in left} <= kept | {f"server-{i}.log" for i in range(9)}
    other = config_of([])
    other.seed = 77
    RunFolder(str(workdir), other).close()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            "--config.objective.capp=4",
            "--config.objective.capp: config.objective has no field 'capp' (it has: loss, max_ratio,",
        ),
        ("--config.max_steps=many", "--config.max_steps=many: is not a number of type int"),
        ("--config.model.path={}/nowhere", "{}/nowhere"),
        (
            "--config.model.path=Qwen/Qwen3-0.6B",
            "config.model.path=Qwen/Qwen3-0.6B: no such folder; if it is a model of the hub: "
            "hf download Qwen/Qwen3-0.6B --local-dir=Qwen/Qwen3-0.6B",
        ),
        ("--config.model.path=", "config.model.path: no model folder is given"),
        ("--config.model.path={}/weightless", "{}/weightless: "),
        (
            "--config.model.path={}/short",
            "config.model.path={}/short: its config.json has max_position_embeddings=20, and",
        ),
        ("--config.model.path={}/smaller", "{}/smaller/tokenizer.json: token "),
        ("--config.rollout.temperature=0", "config.rollout.temperature=0.0: must be between 0.01 and 100"),
        ("--config.learner.seq_len=16", "config.learner.seq_len=16: "),
        ("--config.rollout.router_replay=true", "config.rollout.router_replay: the model has no experts"),
        ("--config.fleet.token_file={}/nowhere", "config.fleet.token_file={}/nowhere: no such file"),
    ],
)
def test_a_config_that_cannot_be(tmp_path, flags, model, refused, flag, message):
    weightless = tmp_path / "weightless"
    weightless.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (weightless / name).write_bytes((pathlib.Path(model) / name).read_bytes())
    smaller(model, tmp_path / "smaller")
    shutil.copytree(model, tmp_path / "short")
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 20}))
    line = refused(tmp_path / "run", *flags, flag.format(tmp_path), "--servers=127.0.0.1:1")
    assert line.startswith(message.format(tmp_path)), line
    check_usable(tmp_path / "run")


def test_fewer_prompts_than_asked_for_are_enough_and_that_is_said():
    config = config_of([])
    config.rollout.prompts_per_step, config.evaluation.prompts = 15, 7

    def rows(*, training, held_out, environment=""):
        def some(count):
            return [Row("?", environment=environment) for _ in range(count)]

        return Rows(some(training), some(held_out), [], [])

    assert setup.remarks_on(config, rows(training=15, held_out=7)) == []
    assert setup.remarks_on(config, rows(training=14, held_out=6)) == [
        "config.evaluation.prompts=7: there are 6 held-out prompts, and all of them are used",
        "config.rollout.prompts_per_step=15: there are 14 training prompts, so a batch has some of them more than once",
    ]
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        setup.remarks_on(config, rows(training=14, held_out=0))
    config.mixture = {"sums": config.environment, "words": config.environment}
    sums, words = rows(training=9, held_out=7, environment="sums"), rows(training=9, held_out=6, environment="words")
    both = Rows([*sums.train, *words.train], [*sums.held_out, *words.held_out], [], [])
    assert setup.remarks_on(config, both) == [
        "config.evaluation.prompts=7: there are 6 held-out prompts of words, and all of them are used"
    ]
    with pytest.raises(ValueError, match="there is no held-out prompt of words"):
        setup.remarks_on(config, sums)


@pytest.mark.slow
def test_nobody_listens(tmp_path, flags, refused):
    with socket.socket() as taken:  # bound, but it does not listen
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = refused(tmp_path / "run", *flags, f"--servers={address}", "--config.fleet.connect_seconds=1")
    assert line == f"no rollout server answers at {address} (tried for 1 s): is scalerl-serve running there?"
    check_usable(tmp_path / "run")


def test_another_tokenizer(tmp_path, flags, refused):
    """The same decoder, the same ids: only the text they stand for differs."""
    other = write_model(str(tmp_path / "other"), words=("what else",))
    with serve(tmp_path, 1, "--engine=replay", f"--model={other}") as addresses:
        line = refused(tmp_path / "run", *flags, f"--servers={addresses[0]}")
    assert line.startswith(f"server {addresses[0]}: its tokenizer (")
    assert not (tmp_path / "run" / "ledger.json").exists()  # told before anything is computed
    check_usable(tmp_path / "run")


def test_a_token_that_is_not_the_servers(tmp_path, flags, model, refused):
    for name in ("theirs", "ours"):
        (tmp_path / name).write_text(f"the-token-that-is-{name}")
        (tmp_path / name).chmod(0o600)
    with serve(tmp_path, 1, "--engine=replay", f"--model={model}", f"--token_file={tmp_path}/theirs") as addresses:
        flags = [*flags, f"--servers={addresses[0]}", f"--config.fleet.token_file={tmp_path}/ours"]
        line = refused(tmp_path / "run", *flags)
    assert line == f"rollout server {addresses[0]}: it does not take the token"
    assert not (tmp_path / "run" / "ledger.json").exists()  # told before anything is computed
    check_usable(tmp_path / "run")


def test_a_workdir_of_another_config(tmp_path, flags, refused):
    config = config_of(flags)
    config.objective.max_ratio = 4.0
    with RunFolder(str(tmp_path / "run"), config) as folder:
        folder.resume(0)
        folder.metrics(1, {"loss": 0.0})
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    assert refused(tmp_path / "run", *flags) == (
        f"--workdir={tmp_path / 'run'}: holds a run of another config: config.objective.max_ratio is 4.0 there and "
        "5.0 now; --allow=objective.max_ratio goes on with what is given now"
    )
    changed = {path.name for path, data in before.items() if path.read_bytes() != data}
    assert changed <= {"lock"}


@pytest.mark.slow
def test_a_corrupt_checkpoint_is_passed_over(tmp_path, flags, replayed, start):
    """One flipped bit in the newest: the run goes on from the one before, and says so."""
    flags = [*flags, *replayed(), "--config.checkpoint.every=2"]
    run = start(tmp_path / "run", *flags, "--config.max_steps=4").finish()
    damage(run, 4)
    again = start(run.workdir, *flags, "--config.max_steps=6").finish()
    said = again.output()
    assert "checkpoint 4 cannot be read" in said and "going on from checkpoint 2, the one before" in said
    assert "going on from step 2 of 6" in said
    assert [row["step"] for row in again.metrics] == [1, 2, 3, 4, 5, 6]
    assert {row["incarnation"] == again.metrics[-1]["incarnation"] for row in again.metrics[2:]} == {True}
    assert again.metrics[1]["incarnation"] < again.metrics[2]["incarnation"]


@pytest.mark.slow
def test_every_prompt_is_retired(tmp_path, flags, replayed, start):
    """The task is solved before the run is over: it ends whole, and the same command says the same once more."""
    flags = [*flags, *replayed(), "--config.curriculum.no_positive_resampling_at=0"]
    for _ in range(2):
        run = start(tmp_path / "run", *flags)
        assert run.wait() == 0, run.output()
        assert "the run ends after step 7 of 12: every prompt is retired: all 14 have" in run.output()
        # The 14 prompts are all seen in batches 0 to 3; a draw for batch 7 is the first that knows it (k = 3).
        assert [row["step"] for row in run.metrics] == [*range(1, 8)]
        assert [row["step"] for row in run.rows("evals.jsonl")] == [0, 4, 7]
        assert newest_step(run.path("checkpoints")) == 7


@pytest.mark.slow
def test_the_data_have_changed_since_the_checkpoint(tmp_path, flags, replayed, start):
    """The history of each prompt is by its place in the data: with others it would be taken for theirs."""
    train = next(flag for flag in flags if flag.startswith("--config.environment.train=")).partition("=")[2]
    copy = tmp_path / "train.jsonl"
    copy.write_text(pathlib.Path(train).read_text())
    flags = [*flags, *replayed(), f"--config.environment.train={copy}", "--config.max_steps=3"]
    run = start(tmp_path / "run", *flags).finish()
    copy.write_text(copy.read_text().replace('"a0="', '"z0="'))
    again = start(run.workdir, *flags, "--config.max_steps=4")
    assert again.wait() == 2
    *_, last = again.output().splitlines()
    assert last.startswith(f"error: config.environment.train={copy} or config.environment.validation=")
    assert [row["step"] for row in run.metrics] == [1, 2, 3]


@pytest.mark.slow
def test_every_prompt_is_retired_and_all_come_back(tmp_path, flags, replayed, start):
    flags = [*flags, *replayed(), "--config.curriculum.no_positive_resampling_at=0"]
    run = start(tmp_path / "run", *flags, "--config.curriculum.when_empty=restart").finish()
    retired = [row["prompts_retired"] for row in run.metrics]
    assert retired[6] == 14 and retired[7] < 14 and len(retired) == 12


@pytest.mark.slow
def test_no_verifier_can_be_started(tmp_path, flags, replayed, start):
    """It is first started in the middle of the run, by a thread that nobody looks at."""
    hindered = tmp_path / "hindered"
    hindered.mkdir()
    (hindered / "sitecustomize.py").write_text(
        "import subprocess\n"
        "real = subprocess.Popen.__init__\n"
        "def init(self, command, *arguments, **options):\n"
        "    if 'scalerl_jax.environments.score_worker' in command:\n"
        "        raise PermissionError(13, 'Permission denied')\n"
        "    real(self, command, *arguments, **options)\n"
        "subprocess.Popen.__init__ = init\n"
    )
    flags = [*flags, *replayed()]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join([str(hindered), os.environ.get("PYTHONPATH", "")]))
        run = start(tmp_path / "run", *flags)
    assert run.wait() == 2, run.output()
    *_, last = run.output().splitlines()
    assert last.startswith("error: the verifier's worker cannot be started ([Errno 13] Permission denied): ")
    assert "Traceback" not in run.output()
