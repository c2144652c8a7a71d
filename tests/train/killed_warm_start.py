"""A warm start that is killed when its first checkpoint is whole."""

import os
import pathlib
import signal
import subprocess
import sys

from tests.support.paths import ROOT
from tests.support.processes import SECONDS
from tests.support.waiting import eventually

# However late the kill comes, the last step is still ahead: the model is not written before it.
PROGRAM = """
import threading
from scalerl_jax import sft
sft.write_model_folder = lambda *_, **__: threading.Event().wait()
sft.run()
"""


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
