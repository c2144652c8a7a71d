"""A run to which everything happens ends where an undisturbed one does: the same parameters, each group trained once.

Rollouts come from replay servers, genuine and faulty ones: what they say depends on a completion's name alone, so
whatever differs is the trainer's doing. Which faults, when and to whom is drawn from the seed in the test's name.
"""

import pathlib
import random
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from scalerl_jax.learner.checkpoint import Checkpoint, Checkpoints
from scalerl_jax.learner.make_trainer import make_trainer
from scalerl_jax.model.decoder_config import read_config
from tests.hostile import random_faults
from tests.hostile.liars import Liars
from tests.hostile.random_faults import PipedRun
from tests.support.runs import config_of
from tests.support.servers import ServerProcess, tiny_server

pytestmark = pytest.mark.slow

SEEDS = (1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3)))
UPDATES, LAST_EVENT, EVENTS = 30, 18, 5  # it must not be over before all has happened
LIARS = 3

# Lies that leave the completions that are delivered what they are: the rollouts are the recording's, and so are their
# log-probs, which no policy has.
LIES = (
    "busy seconds NaN",
    "busy for ages",
    "a billion devices",
    "counters fall",
    "step of the future",
    "no room",
    "hoards",
    "silent status",
    "status garbage",
    "wrong group",
    "version of the past",
    "empty",
    "too long",
    "odd bytes",
    "no finish reason",
    "always full",
    "wrong version always",
    "unknown with many words",
    "aborted completions",
    "repeats for ever",
    "repeats the first",
    "never ends",
    "swallows",
    "ends at once",
    "leaves one out",
    "garbage",
    "refuses versions",
    "resend out of range",
    "another version",
    "applied unread",
    "push ended",
    "says nothing",
    "closes",
    "bytes that mean nothing",
)
FLAGS = {
    "max_steps": UPDATES,
    "parity.mean_limit": 100,
    "parity.p99_limit": 100,
    "fleet.status_seconds": 2,
    "fleet.silence_seconds": 5,
    "fleet.stall_seconds": 5,
    "fleet.push_seconds": 10,
    "fleet.slowest_tokens_per_second": 10,
}


@pytest.fixture(scope="module")
def replay(model: str, rollouts: str) -> list[str]:
    # Decoding takes longer than an update, so that groups are in flight whatever happens.
    return ["--engine=replay", f"--model={model}", f"--replay_file={rollouts}", "--replay_token_seconds=0.004"]


@pytest.fixture
def servers(tmp_path: pathlib.Path, replay: list[str]) -> Iterator[list[ServerProcess]]:
    made = [tiny_server(tmp_path, f"server-{n}", *replay) for n in range(2)]
    try:
        yield [server.wait() for server in made]
    finally:
        for server in made:
            server.close()


@pytest.fixture(scope="module")
def command(flags: list[str]) -> list[str]:
    return [*flags, *(f"--config.{name}={value}" for name, value in FLAGS.items())]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, command: list[str], replay: list[str]) -> PipedRun:
    folder = tmp_path_factory.mktemp("undisturbed")
    replaying = tiny_server(folder, "server", *replay).wait()
    run = PipedRun(folder / "run", *command, f"--servers={replaying.address}").start()
    try:
        run.finish()
    finally:
        run.close()
        replaying.close()
    return run


def last_checkpoint(run: PipedRun, command: list[str]) -> Checkpoint:
    config = config_of(command)
    trainer = make_trainer(config, read_config(config.model.path), max_segment=64)
    found = Checkpoints(run.path("checkpoints"), keep=2).restore(trainer.abstract_state)
    assert found is not None
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_ends_where_an_undisturbed_run_does(
    seed: int,
    tmp_path: pathlib.Path,
    model: str,
    rollouts: str,
    command: list[str],
    servers: list[ServerProcess],
    undisturbed: PipedRun,
) -> None:
    rng = random.Random(seed)
    lies, events = rng.sample(LIES, LIARS), random_faults.draw(seed, events=EVENTS, last=LAST_EVENT)
    story = f"seed {seed}: {events}, beside servers that lie: {lies}"
    print(f"\n{story}")
    with Liars(tmp_path, model, lies, rollouts=rollouts) as liars:
        addresses = ",".join([*(server.address for server in servers), *liars.addresses.values()])
        run = PipedRun(tmp_path / "run", *command, f"--servers={addresses}").start()
        try:
            for step, kind in events:
                run.until(lambda step=step: len(run.metrics) >= step, f"{step} updates, then {kind}; {story}")
                random_faults.happen(kind, run, servers, rng)
            run.finish()
            for server in servers:
                server.wait()  # one that had died is there again
        finally:
            run.close()

    # 1. The same parameters, optimizer and curriculum, bit by bit.
    mine, theirs = last_checkpoint(run, command), last_checkpoint(undisturbed, command)
    assert mine.step == theirs.step == UPDATES, story
    pairs = zip(jax.tree_util.tree_leaves_with_path(mine.state), jax.tree.leaves(theirs.state), strict=True)
    differ = [
        jax.tree_util.keystr(path)
        for (path, one), other in pairs
        if np.asarray(one).tobytes() != np.asarray(other).tobytes()
    ]
    assert not differ, f"{story}\n{differ}\n{run.output()[-3_000:]}"
    for name, value in mine.arrays.items():
        np.testing.assert_array_equal(value, theirs.arrays[name], err_msg=f"{name}; {story}")

    # 2. Every group once, in its place, with the prompt that it has in the other run.
    rows, size = run.metrics, config_of(command).rollout.prompts_per_step
    assert [row["step"] for row in rows] == list(range(1, UPDATES + 1)), story
    trained = [pair for row in rows for pair in row["groups"]]
    assert [number for number, _ in trained] == list(range(UPDATES * size)), story
    assert trained == [pair for row in undisturbed.metrics for pair in row["groups"]], story
    assert [row["pass_rate"] for row in rows] == [row["pass_rate"] for row in undisturbed.metrics], story
    assert rows[-1]["optimizer_step"] >= UPDATES - 6, "most updates had something to learn from"

    # 3. What happened is said in lines, and what was spent stays booked.
    assert "Traceback" not in run.output(), f"{story}\n{run.output()[-6_000:]}"
    for name in rows[0]["compute"]:
        values = [row["compute"][name] for row in rows]
        assert values == sorted(values), (name, story)
    assert rows[-1]["compute"]["device_hours"] < 1, story
