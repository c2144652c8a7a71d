import contextlib

import pytest

from scalerl_jax.environments.tokenizer import Tokenizer
from tests.support.runs import CONFIG, Run, config_of
from tests.support.servers import serve
from tests.support.tiny_task import write_model, write_rollouts, write_task
from tests.train.comparing import UNPROBED


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """A tiny policy, as a Hugging Face folder."""
    return write_model(str(tmp_path_factory.mktemp("policy") / "model"))


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> list[str]:
    """The flags that name the task's files."""
    return write_task(str(tmp_path_factory.mktemp("task")))


@pytest.fixture(scope="session")
def flags(model, task) -> list[str]:
    """What every run of these tests has on its command line."""
    return [f"--config={CONFIG}", f"--config.model.path={model}", *task]


@pytest.fixture(scope="session")
def rollouts(tmp_path_factory, model) -> str:
    """Completions for replay servers, as a JSONL file."""
    path = str(tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl")
    return write_rollouts(path, Tokenizer(model), config_of([]))


@pytest.fixture
def replayed(tmp_path, model, rollouts):
    """Starts replay servers with these flags more, until the test ends; returns what a run on them has on its command
    line."""
    with contextlib.ExitStack() as stack:

        def begin(*more: str, count: int = 1) -> list[str]:
            (tmp_path / "servers").mkdir()
            given = ("--engine=replay", f"--model={model}", f"--replay_file={rollouts}", *more)
            addresses = stack.enter_context(serve(tmp_path / "servers", count, *given))
            return [*UNPROBED, f"--servers={','.join(addresses)}"]

        yield begin


@pytest.fixture
def start():
    """Starts runs; none of them outlives the test."""
    runs: list[Run] = []

    def begin(*arguments, **options) -> Run:
        runs.append(Run(*arguments, **options))
        return runs[-1].start()

    yield begin
    for run in runs:
        run.close()
