"""The versions of a run of the trainer, through its publisher and real gRPC into vLLM: bit for bit, one by one."""

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rollout_server import test_weight_stream as stream
from tests.rollout_server.record_run import Recorded
from tests.vllm.models import SLOTS, config, started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def shared(folder: pathlib.Path) -> Iterator[Any]:
    yield from started(folder, config("qwen3"), sync_dtype="bfloat16")


@pytest.fixture(scope="module")
def recorded(shared: Any, folder: pathlib.Path) -> Recorded:
    return stream.recorded_run(folder, folder / "run.npz")


def test_every_version_of_a_run_arrives_bit_for_bit(shared: Any, recorded: Recorded) -> None:
    def make_engine(**options: Any) -> Any:
        assert options == {"sync_dtype": shared.vllm.options.sync_dtype}
        return shared.engine(slots=SLOTS, queue=8)

    shared.run(stream.test_every_version_of_a_run_arrives_bit_for_bit(make_engine, recorded))
