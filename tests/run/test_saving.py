"""Evaluations beside training, and checkpoints: none is past a row that is not written."""

import io
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from scalerl_jax.config import Config
from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments import Row
from scalerl_jax.environments.base import RIGHT
from scalerl_jax.rollouts.group_buffer import FinishedGroup
from scalerl_jax.run.evaluations import Evaluations
from scalerl_jax.run.folder import RunFolder
from scalerl_jax.run.ledger import Ledger, ModelShape
from scalerl_jax.run.progress import ProgressLine
from scalerl_jax.run.saving import Saving

COMPLETION = Completion(1, "eval/0/0", 0, np.ones(1, np.int32), np.zeros(1, np.float32), ((0, 0, 1),), (), "stop")
FOUND = [FinishedGroup(0, Row("1+1="), (COMPLETION,), (RIGHT,), asked_at=0.0, finished_at=1.0)]


class Fleet:
    """Evaluates only while it is waited for."""

    def __init__(self) -> None:
        self.asked: list[Future] = []

    @property
    def unfinished(self) -> list[Future]:
        return [future for future in self.asked if not future.done()]

    def evaluate(self, version, rows, samples) -> Future:
        self.asked.append(Future())
        return self.asked[-1]

    def result(self, future, wait):
        while not future.done():
            wait()
        return future.result()

    def wait(self) -> None:
        self.unfinished[0].set_result(FOUND)


class Run:
    """Steps that take a second each, of a trainer that only counts; `saved` has the rows of each checkpoint."""

    def __init__(self, folder: RunFolder, config: Config):
        self.folder, self.config, self.fleet = folder, config, Fleet()
        self.now, self.saved = 0.0, dict[int, list[int]]()
        self.ledger = Ledger(
            folder.path("ledger.json"), trainer_devices=1, shape=ModelShape(1, 1, 1, 1), clock=lambda: self.now
        )
        self.evaluations = Evaluations(
            config, folder=folder, ledger=self.ledger, fleet=self.fleet, rows=[Row("1+1=")],
            line=ProgressLine("train", updates=config.max_steps, stream=io.StringIO()), written=lambda: None,
        )  # fmt: skip
        self.saving = Saving(
            config, folder=folder, checkpoints=None, trainer=SimpleNamespace(save=self.save), arrays=dict,
            evaluations=self.evaluations, ledger=self.ledger, step=0,
        )  # fmt: skip
        folder.resume(0)
        self.ledger.begin()

    @property
    def rows(self) -> list[int]:
        return [row["step"] for row in self.folder.evaluations()]

    def save(self, checkpoints, step, *, manifest, arrays) -> None:
        self.saved[step] = self.rows

    def evaluate(self) -> None:
        self.evaluations.ask(self.saving.step, wait=self.fleet.wait)

    def step(self) -> None:
        self.now += 1
        self.ledger.trained([10])
        self.saving.step += 1
        if self.evaluations.due(self.saving.step):
            self.evaluate()
        self.saving.wait_if_late(self.fleet.wait)
        self.saving.save_if_due()


@pytest.fixture
def run(tmp_path):
    config = Config(max_steps=100)
    config.telemetry.tensorboard = False
    config.checkpoint.every, config.evaluation.every, config.evaluation.servers = 2, 10, 1
    with RunFolder(str(tmp_path), config) as folder:
        yield Run(folder, config)


def test_a_checkpoint_has_the_rows_of_all_evaluations_before_it(run):
    run.evaluate()
    for _ in range(11):
        run.step()
    # An evaluation delays a save by as many steps as are between two; without one they come in time.
    assert run.saved == {4: [0], 6: [0], 8: [0], 10: [0]}
    for _ in range(4):
        run.step()
    assert list(run.saved)[-1] == 14 and run.saved[14] == [0, 10]


def test_evaluations_that_are_slower_than_training_do_not_pile_up(run):
    run.config.checkpoint.every = 1000
    for _ in range(35):
        run.step()
        assert len(run.fleet.unfinished) <= 1
    assert len(run.fleet.asked) == 3 and run.rows == [10, 20]


def test_the_row_of_step_0_is_at_no_compute_though_an_earlier_start_has_trained(run):
    run.step()
    run.saving.step = 0  # killed, and begun again
    run.evaluate()
    run.step()
    run.fleet.wait()
    run.evaluations.collect()
    (row,) = run.folder.evaluations()
    assert row["device_hours"] == row["model_flops"] == row["trained_tokens"] == 0
    assert run.ledger.snapshot()["device_hours"] > 0 < run.ledger.snapshot()["model_flops"]
