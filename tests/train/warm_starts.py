"""What the tests of warm starts share: what they leave behind, and one that is killed on its way."""

import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

from scalerl_jax.run.jsonl import read_rows
from tests.support.paths import ROOT
from tests.support.processes import SECONDS, run_command
from tests.support.waiting import eventually

# However late the kill comes, the last step is still ahead: the model is not written before it.
PROGRAM = """
import threading
from scalerl_jax import sft
sft.write_model_folder = lambda *_, **__: threading.Event().wait()
sft.run()
"""


def weights(workdir: pathlib.Path) -> bytes:
    return (workdir / "model" / "model.safetensors").read_bytes()


def rows_of(workdir: pathlib.Path) -> list[dict[str, Any]]:
    return read_rows(str(workdir / "metrics.jsonl"))


def killed_and_finished(workdir: pathlib.Path, config_file: pathlib.Path) -> str:
    """A warm start that is killed when its first checkpoint is whole, and started again; what it says then."""
    kill_at_a_checkpoint(workdir, f"--config={config_file}")
    done = run_command("scalerl_jax.sft", f"--config={config_file}", f"--workdir={workdir}")
    assert done.returncode == 0, done.stderr
    assert "from update 0" not in done.stderr
    return done.stderr


def kill_at_a_checkpoint(workdir: pathlib.Path, *flags: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, f"--workdir={workdir}", *flags],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip

    def saved() -> bool:
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        return any(path.name.isdigit() for path in workdir.glob("checkpoints/*"))

    try:
        eventually(saved, "a checkpoint is whole", seconds=SECONDS)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert not (workdir / "model").exists()
