"""Runs of a policy with experts, whose update sends tokens where the generator sent them."""

import signal

import pytest

from tests.support.tiny_task import EXPERTS, write_model


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> str:
    return write_model(str(tmp_path_factory.mktemp("policy") / "model"), **EXPERTS)


@pytest.mark.slow
def test_a_run_with_its_own_servers(tmp_path, flags, mixture, start):
    """Tokens sampled by an older version were routed by its router: some of its choices are no longer the trainer's."""
    options = [f"--config.model.path={mixture}", "--config.optimizer.learning_rate=2e-3", "--config.max_steps=100000"]
    run = start(tmp_path / "run", *flags, *options, "--config.rollout.router_replay=true")

    def moved() -> list[float]:
        return [row["experts_moved"] for row in run.metrics if row["prompts_surviving"]]

    run.until(lambda: len(moved()) > 2 and max(moved()) > 0.001, "a router chooses otherwise")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.output()
    assert all(0 <= share < 0.9 for share in moved())
