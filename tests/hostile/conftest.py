"""The tiny policy, its task and the runs of tests/train, for the tests here."""

from tests.train.conftest import flags, model, rollouts, start, task

__all__ = ["flags", "model", "rollouts", "start", "task"]
