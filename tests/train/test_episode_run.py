"""A run on episodes of several turns, with its own servers, killed and gone on with."""

import contextlib
import json
import pathlib
import random
from collections.abc import Callable

import numpy as np
import psutil
import pytest

from tests.support.runs import Run, config_of, read
from tests.train.chaos import check_rows, role_of

GAME = """
class Talk:
    def __init__(self, row):
        self.left, self.ones = int(row.answer), 0
    def step(self, turn):
        self.ones += turn.count("1")
        self.left -= 1
        if self.left < 0:
            return {"done": True, "reward": float(self.ones % 2), "metrics": {"ones": self.ones}}
        return f" {self.left}="

class Talks:
    def rows(self, split):
        for n in range(24):
            yield {"prompt": f"{split[0]}{n}=", "answer": n % 3}
    def episode(self, row):
        return Talk(row)
"""


def with_environment(flags: list[str], file: pathlib.Path, text: str, name: str) -> list[str]:
    """The flags with the class `name` of this text, which is written to the file, as the environment."""
    file.write_text(text)
    return [
        *(flag for flag in flags if not flag.startswith("--config.environment.")),
        f"--config.environment.name={file}:{name}",
        "--config.rollout.max_turns=4",
        "--config.rollout.max_episode_tokens=56",
    ]


@pytest.mark.slow
def test_episodes_are_trained_on_as_they_were_sampled(tmp_path, flags, start):
    """Costs a minute: two starts of a trainer and its servers."""
    flags = [
        *with_environment(flags, tmp_path / "game.py", GAME, "Talks"),
        "--config.max_steps=6",
        "--config.objective.filter_zero_variance=false",
    ]
    run = start(tmp_path / "run", *flags)
    run.until(lambda: len(run.metrics) >= 4, "four steps")
    run.kill()
    run.start().finish()

    rows, config = run.metrics, config_of(flags)
    assert len(rows) == 6
    check_rows(rows, config)
    assert rows[0]["lag_max"] == 0 and rows[0]["mismatch"] < 1e-4  # a path fed otherwise would have other log-probs
    assert max(row["lag_max"] for row in rows) <= config.pacing.max_off_policy_steps
    assert sum(row["score/ended/failed"] for row in rows) == 0
    assert 1 < np.mean([row["score/turns"] for row in rows]) < 3

    turns = set[int]()
    for step in range(1, 7):
        for sample in map(json.loads, read(run.path("rollouts", f"step-{step:08}.jsonl")).splitlines()):
            ends = [sample["token_ids"][end - 1] for end, _ in sample["replies"]]
            assert all(start < end for start, end in sample["replies"])
            if sample["finish_reason"] == "stop":
                assert len(sample["replies"]) == int(sample["answer"])
                assert len({*ends, sample["token_ids"][-1]}) == 1  # each turn ends with the stop token
            turns.add(1 + len(sample["replies"]))
    assert len(turns) > 1
    evaluation = run.rows("evals.jsonl")[-1]
    assert evaluation["step"] == 6 and evaluation["prompts"] == 6


@pytest.mark.slow
def test_a_run_whose_episodes_all_fail_ends_and_says_why(tmp_path, flags, start):
    game = GAME.replace("self.left -= 1", "open('/no/such/board')")
    run = start(tmp_path / "run", *with_environment(flags, tmp_path / "game.py", game, "Talks"))
    assert run.wait() == 2
    *_, last = run.output().splitlines()
    assert last.startswith("error: config.environment.name=") and "/game.py:Talks: the last " in last
    assert "episodes all failed, the first of them: FileNotFoundError: " in last and "'/no/such/board'" in last
    assert "Traceback" not in run.output() and run.metrics == []


KILLS = 50


def victims(run: Run, kind: str) -> list[psutil.Process]:
    """Processes of a run: its servers, the one that plays episodes, or those of single episodes."""
    assert run.process is not None
    found = []
    for process in psutil.Process(run.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "scalerl_jax.environments.episode_worker" in process.cmdline():
                role = "player" if process.ppid() == run.process.pid else "episode"
            else:
                role = role_of(process, run.process.pid).partition(" ")[0]
            if role == kind:
                found.append(process)
    return found


def kill_one(run: Run, rng: random.Random, number: int) -> str:
    """Behind the next step; of each ten the last one is the trainer. Returns what it was."""
    reached = len(run.metrics)
    run.until(lambda: len(run.metrics) > reached, "another step")
    kind = "trainer" if number % 10 == 9 else rng.choice(["server", "player", "episode"])
    if kind == "trainer":
        run.kill()
        run.start()
        return kind
    killed = False
    while not killed:
        assert run.process is not None and run.process.poll() is None, run.output()
        with contextlib.suppress(psutil.Error, IndexError):  # none is there, or it has just ended
            rng.choice(victims(run, kind)).kill()
            killed = True
    return kind


def killed_fifty_times(start: Callable[..., Run], folder: pathlib.Path, flags: list[str], *, seed: int) -> None:
    """A run with these flags: every step is there, once, with as many groups as any."""
    flags = [
        *flags,
        f"--config.max_steps={2 * KILLS}",
        "--config.checkpoint.every=2",
        "--config.evaluation.every=25",
        "--config.curriculum.no_positive_resampling_at=1.1",
        "--config.fleet.servers=3",
        "--config.fleet.silence_seconds=4",
    ]
    rng, run = random.Random(seed), start(folder, *flags)
    kills = [kill_one(run, rng, number) for number in range(KILLS)]
    run.finish()

    assert min(map(kills.count, ("server", "player", "episode", "trainer"))) >= 5, kills
    rows, config = run.metrics, config_of(flags)
    assert len(rows) == 2 * KILLS
    check_rows(rows, config)
    assert sum(row["score/ended/failed"] for row in rows) > 0
    assert "Traceback" not in run.output()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_whatever_is_killed_nothing_is_lost_and_nothing_twice(tmp_path, flags, start):
    """A server, an episode, the process that plays all of them, or the trainer with everything: fifty times."""
    flags = with_environment(flags, tmp_path / "game.py", GAME, "Talks")
    killed_fifty_times(start, tmp_path / "run", flags, seed=7)
