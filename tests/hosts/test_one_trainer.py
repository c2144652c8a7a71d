"""Several hosts are one trainer: the same prompts, the same parameters, and checkpoints that any number goes on from.

Rollouts come from replay servers, which say the same to whoever asks. Each host is a process with its share of four
devices, over gloo; a run of one process with all four is what they are compared with.
"""

import pathlib
import re
import signal

import jax
import numpy as np
import pytest

from scalerl_jax.hosts.link import LOST, RESUMES, SILENCE_SECONDS
from tests.support.hosts import Hosts
from tests.support.runs import config_of, read
from tests.support.servers import serve
from tests.train.comparing import REPLAY, UNPROBED, check_rows, damage, groups, last_checkpoint, saved_steps
from tests.train.conftest import flags, model, rollouts, start, task  # noqa: F401  fixtures

pytestmark = pytest.mark.slow


@pytest.fixture
def hosts():
    """Makes hosts; none of them outlives the test."""
    every: list[Hosts] = []

    def make(*arguments, **options) -> Hosts:
        every.append(Hosts(*arguments, **options))
        return every[-1].start()

    yield make
    for one in every:
        one.close()


def differences(a, b) -> float:
    """The largest, of any parameter, as a share of the largest value of its tensor."""
    found = jax.tree.map(
        lambda x, y: float(np.abs(np.asarray(x) - np.asarray(y)).max() / np.abs(np.asarray(x)).max()), a, b
    )
    return max(jax.tree.leaves(found))


def test_however_many_they_are_and_whatever_ends_them(tmp_path: pathlib.Path, hosts, flags, model, rollouts):  # noqa: F811
    """Four hosts save because one of them is told to stop; two go on, until one of them is killed; one ends the run.

    With what all of them have to know: the policy that the run began with, and how far each step goes.
    """
    flags = [*flags, *UNPROBED, "--config.learner.micro_batch_rows=2", "--config.checkpoint.every=2",
             "--config.objective.reference_kl=0.05", "--config.optimizer.ess_reference=0.5"]  # fmt: skip
    config = config_of(flags)
    with serve(tmp_path, 2, *REPLAY, f"--model={model}", f"--replay_file={rollouts}") as addresses:
        flags.append(f"--servers={','.join(addresses)}")
        alone = hosts(tmp_path / "alone", 1, *flags).finish()

        run = hosts(tmp_path / "run", 4, *flags)
        run.until(lambda: len(run.first.metrics) >= 3, "3 steps of four hosts")
        run.signal(2, signal.SIGTERM)
        assert run.wait() == [143] * 4, run.outputs()
        step = run.first.metrics[-1]["step"]
        last = f"saved at step {step}; the same command goes on from there"
        assert all(last in one.output() for one in run.runs), run.outputs()
        assert step < 9, "nothing is left for the others"

        run.again(2)
        run.until(lambda: run.first.metrics[-1]["step"] >= step + 2, "2 steps of two hosts")
        run.signal(1, signal.SIGKILL)
        assert run.wait() == [LOST, -signal.SIGKILL], run.outputs()
        assert "host 1 (" in run.first.output() and RESUMES in run.first.output()

        run.again(1).finish()
    assert f"going on from step {step} of 12" in read(f"{run.workdir}-2-0.log")
    assert groups(alone.first) == groups(run.first)
    check_rows(run.first, config)
    ends = [last_checkpoint(one.first, flags) for one in (alone, run)]
    assert differences(*(end.state["params"] for end in ends)) < 1e-5
    for name, array in ends[0].arrays.items():
        np.testing.assert_array_equal(array, ends[1].arrays[name])


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_host_ends_all(tmp_path: pathlib.Path, hosts, flags, model, rollouts, frozen: int):  # noqa: F811
    flags = [*flags, *UNPROBED, "--config.max_steps=500", "--config.learner.micro_batch_rows=2"]
    with serve(tmp_path, 1, *REPLAY, f"--model={model}", f"--replay_file={rollouts}") as addresses:
        run = hosts(tmp_path / "run", 2, *flags, f"--servers={addresses[0]}")
        run.until(lambda: len(run.first.metrics) >= 2, "2 steps")
        run.signal(frozen, signal.SIGSTOP)
        other = run.runs[1 - frozen]
        assert other.wait() == LOST, run.outputs()
        silent = re.search(r"has not been heard of for (\d+) s", other.output())
        assert silent and int(silent[1]) >= SILENCE_SECONDS, run.outputs()
        run.signal(frozen, signal.SIGCONT)  # it finds that it is alone, or JAX does, which aborts
        assert run.runs[frozen].wait() in (LOST, -signal.SIGABRT), run.outputs()


def test_a_gradient_that_is_not_finite_ends_all_with_its_code(tmp_path, hosts, flags, model, rollouts):  # noqa: F811
    """All of them find it at the same time, and the first one still writes down why the run ends."""
    flags = [*flags, *UNPROBED, "--config.max_steps=8", "--config.learner.micro_batch_rows=2",
             "--config.optimizer.learning_rate=1e30", "--config.checkpoint.on_collapse=stop"]  # fmt: skip
    with serve(tmp_path, 1, *REPLAY, f"--model={model}", f"--replay_file={rollouts}") as addresses:
        run = hosts(tmp_path / "run", 2, *flags, f"--servers={addresses[0]}")
        assert run.wait() == [3, 3], run.outputs()
    assert "the gradient norm is nan" in run.first.output()
    assert (pathlib.Path(run.workdir) / "collapse.json").exists()


def test_a_killed_first_host_ends_all_and_the_same_command_goes_on(tmp_path, hosts, flags, model, rollouts):  # noqa: F811
    """From the checkpoint before the newest, which is damaged: all hosts pass over it."""
    flags = [*flags, *UNPROBED, "--config.max_steps=30", "--config.learner.micro_batch_rows=2"]
    flags.append("--config.checkpoint.every=2")
    with serve(tmp_path, 1, *REPLAY, f"--model={model}", f"--replay_file={rollouts}") as addresses:
        run = hosts(tmp_path / "run", 2, *flags, f"--servers={addresses[0]}")
        run.until(lambda: len(saved_steps(run.first)) >= 2, "2 checkpoints")
        run.signal(0, signal.SIGKILL)
        assert run.runs[1].wait() in (LOST, -signal.SIGABRT), run.outputs()  # the line is heard of, or JAX's own
        before, newest = saved_steps(run.first)[-2:]
        damage(run.first, newest)
        run.again(2, f"--config.max_steps={newest + 2}").finish()
    said = run.first.output()
    assert f"checkpoint {newest} cannot be read" in said and f"going on from checkpoint {before}, the one" in said, said
    assert f"going on from step {before} of {newest + 2}" in said
    check_rows(run.first, config_of([*flags, f"--config.max_steps={newest + 2}"]))


@pytest.mark.parametrize(
    ("count", "trained"),
    [(2, "--config.optimizer.learning_rate=1e-5"), pytest.param(4, "--config.lora.rank=2", marks=pytest.mark.long)],
    ids=["all parameters", "an adapter"],
)
def test_every_host_sends_its_part_of_each_delta(tmp_path, hosts, flags, model, rollouts, count, trained):  # noqa: F811
    """On a bfloat16 wire, all parameters or an adapter; the servers check the digests of every tensor."""
    flags = [
        *flags, *UNPROBED, "--config.max_steps=6", "--config.learner.micro_batch_rows=2",
        "--config.model.sync_dtype=bfloat16", trained,
    ]  # fmt: skip
    replay = (*REPLAY, f"--model={model}", f"--replay_file={rollouts}", "--sync_dtype=bfloat16", "--verbosity=0")
    with serve(tmp_path, 2, *replay) as addresses:
        run = hosts(tmp_path / "run", count, *flags, f"--servers={','.join(addresses)}").finish()
    pushes = [row["pushes"] for row in run.first.metrics]
    print(pushes[-1])
    assert sum(row["sparse"] for row in pushes) > 0
    for number in range(2):
        log = read(str(tmp_path / f"server-{number}.log"))
        assert "refused" not in log and "a dense version is needed" not in log, log


@pytest.mark.long
def test_bits_are_the_generators_on_several_hosts(tmp_path, hosts, flags, model):  # noqa: F811
    """config.numerics=bitwise: hosts agree where segments lie, and each computes the bits of one device."""
    flags = [
        *flags, "--config.max_steps=3", "--config.learner.micro_batch_rows=2", "--config.numerics=bitwise",
        "--config.pacing.kind=phased", "--config.pacing.max_off_policy_steps=1",
        "--config.objective.filter_zero_variance=false", "--config.objective.entropy_bonus=0.1",
    ]  # fmt: skip
    with serve(tmp_path, 1, "--engine=jax", f"--model={model}", "--numerics=bitwise") as addresses:
        run = hosts(tmp_path / "run", 2, *flags, f"--servers={addresses[0]}").finish()
    trained = [row for row in run.first.metrics if row["loss_tokens"]]
    assert trained and all(row["other_bits"] == row["mismatch_max"] == 0 for row in trained)
