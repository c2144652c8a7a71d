"""What may happen to a run, drawn from a seed: each event comes when the run has reached a step, never by the clock.

kill          SIGKILL to the trainer and all it started; the same command again
stop          SIGTERM to the trainer; the same command again
full disk     the trainer can write nothing more; when it has ended, or said so, there is room again
server dies   SIGKILL to a genuine server, which is started again on its port; the run goes on meanwhile
freeze        SIGSTOP to a genuine server until the run has gone on without it, or has noticed
"""

import errno
import math
import os
import random
import resource
import signal
import subprocess
import time
from typing import IO

from tests.support.runs import Run
from tests.support.servers import ServerProcess

KINDS = ("kill", "stop", "full disk", "server dies", "freeze")
FULL_SECONDS, LEAVING_SECONDS = 600.0, 60.0  # until a run that can write nothing has noticed; and then, until it ends
FROZEN_UPDATES, FROZEN_SECONDS = 2, 6.0  # whichever is reached first


class PipedRun(Run):
    """A run whose output goes through a pipe, so that it can be heard while it can write no file."""

    def _spawn(self, output: IO[bytes]) -> None:
        pipe = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=output, start_new_session=True)
        assert pipe.stdin is not None
        super()._spawn(pipe.stdin)
        pipe.stdin.close()

    @property
    def ended(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None


def draw(seed: int, *, events: int, last: int) -> list[tuple[int, str]]:
    """(step, event), in order of step; a kill and a full disk are always among them."""
    rng = random.Random(seed)
    kinds = ["kill", "full disk", *rng.choices(KINDS, k=events - 2)]
    rng.shuffle(kinds)
    return list(zip(sorted(rng.sample(range(1, last), events)), kinds, strict=True))


def happen(kind: str, run: PipedRun, servers: list[ServerProcess], rng: random.Random) -> None:
    """Returns when it is over; the run may be starting anew then."""
    assert run.process is not None
    if kind == "kill":
        time.sleep(rng.uniform(0, 0.2))
        run.kill()
        run.start()
    elif kind == "stop":
        run.process.send_signal(signal.SIGTERM)
        run.wait()
        run.start()
    elif kind == "full disk":
        _fill(run)
    elif kind == "server dies":
        server = rng.choice(servers)
        server.kill()
        server.start()  # the run goes on meanwhile, however long that takes
    else:
        server, steps, until = rng.choice(servers), len(run.metrics), time.monotonic() + FROZEN_SECONDS
        server.freeze()
        try:
            while time.monotonic() < until and len(run.metrics) < steps + FROZEN_UPDATES:
                time.sleep(0.05)
        finally:
            server.thaw()


def _fill(run: PipedRun) -> None:
    """No file of the trainer's may grow: each write fails as on a full disk."""
    assert run.process is not None
    before, said = resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE), len(run.output())
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (0, before[1]))
    deadline = time.monotonic() + FULL_SECONDS
    noticed = math.inf
    while time.monotonic() < min(deadline, noticed + LEAVING_SECONDS) and not run.ended:
        if noticed == math.inf and _complains(run.output()[said:]):
            noticed = time.monotonic()
        time.sleep(0.05)
    if run.ended:
        run.start()
        return
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, before)
    assert noticed < math.inf, f"it has not noticed that it can write nothing\n{run.output()[-3_000:]}"


def _complains(output: str) -> bool:
    return any(os.strerror(number) in output for number in (errno.EFBIG, errno.ENOSPC))
