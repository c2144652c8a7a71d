"""Programs of tinker-cookbook, as they are, on scalerl-tinker: `make test-tinker`.

They run in an environment of their own, which VENV_TINKER names; the server runs in this one. About 20 minutes.
"""

import os
import pathlib
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT
from tests.support.processes import run_command, single_threaded
from tests.support.servers import ServerProcess
from tests.tinker import acceptance

VENV = os.environ.get("VENV_TINKER", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not VENV, reason="tinker-cookbook is not installed: make test-tinker"),
]
LONGEST = 768  # tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The quickstart's decoder, on the programs' tasks."""
    folder = tmp_path_factory.mktemp("warm-start")
    acceptance.write_traces(folder / "traces.jsonl")
    done = run_command(
        "scalerl_jax.sft", "--config=configs/quickstart.py", f"--workdir={folder}",
        f"--config.sft.traces={folder / 'traces.jsonl'}", "--config.sft.vocab_size=1024", "--config.sft.seq_len=512",
        "--config.sft.rows_per_step=8", "--config.sft.max_steps=1200",
        seconds=3000,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "model"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, model: pathlib.Path) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    flags = (
        f"--model={model}", f"--workdir={folder / 'workdir'}", f"--names={acceptance.MODEL}",
        f"--maximum_tokens={LONGEST}", "--config.learner.seq_len=1024", "--config.learner.micro_batch_rows=2",
        "--config.fleet.servers=1", "--config.fleet.slots=32", "--config.fleet.queue=512",
    )  # fmt: skip
    program = ("-m", "scalerl_jax.tinker.command")
    server = ServerProcess(folder, *flags, name="tinker", program=program, environment=single_threaded())
    try:
        yield f"http://{server.wait().address}"
    finally:
        server.close()


def test_the_cookbooks_programs_run(tmp_path: pathlib.Path, model: pathlib.Path, url: str) -> None:
    acceptance.write_folder(tmp_path, model)
    python = str(ROOT / VENV / "bin" / "python")
    for name in acceptance.PROGRAMS:  # in this order: some start from what the first has saved
        acceptance.run(name, url=url, folder=tmp_path, python=python)
