"""The progress line, on a terminal and off one."""

import io
import os
import pty
import subprocess
import sys

from scalerl_jax.run.progress import ProgressLine
from tests.support.paths import ROOT


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_plain_lines_every_few_seconds():
    clock, stream = Clock(), io.StringIO()
    with ProgressLine("train", updates=60, step=2, stream=stream, clock=clock) as line:
        for tick in range(100):
            clock.now = tick * 0.2
            line.update(step=2 + tick // 25, waiting=f"waiting {tick * 0.2:.1f} s for 10.0.0.1:50051")
        line.update(
            step=6, pass_rate=0.5, reward=-0.125, staleness=1.25, trained_per_second=5234.0, sampled_per_second=2.5e6
        )
        line.log("step 6: pass rate 0.612")
    lines = stream.getvalue().splitlines()
    assert lines == [
        "train 2/60  waiting 0.0 s for 10.0.0.1:50051",
        "train 3/60  waiting 5.0 s for 10.0.0.1:50051",
        "train 4/60  waiting 10.0 s for 10.0.0.1:50051",
        "train 5/60  waiting 15.0 s for 10.0.0.1:50051",
        "step 6: pass rate 0.612",
        "train 6/60  pass 0.500  reward -0.125  staleness 1.2  train 5.2k tok/s  sample 2.5M tok/s",
    ]


def test_long_lines_and_brackets_stay_as_they_are():
    stream = io.StringIO()
    with ProgressLine("train", updates=9, stream=stream) as line:
        text = "waiting for [red]dns:///a[0] :ok: " + "x" * 300
        line.update(waiting=text)
        line.log(text)
    assert stream.getvalue() == f"train 0/9  {text}\n{text}\n"


def test_a_reward_of_any_size_is_short():
    stream = io.StringIO()
    with ProgressLine("train", updates=9, stream=stream) as line:
        line.update(reward=-1e300)
    assert stream.getvalue() == "train 0/9  reward -1e+300\n"


SHOWS = """
from scalerl_jax.run.progress import ProgressLine
with ProgressLine("train", updates=9) as line:
    line.update(step=4, pass_rate=.25, waiting="waiting 1 s for [b]server")
    line.log("a line that stays")
"""


def test_a_bar_on_a_terminal():
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "140", "TERM": "xterm"}
    child = subprocess.Popen([sys.executable, "-c", SHOWS], stderr=theirs, cwd=ROOT, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert child.wait() == 0
    text = shown.decode()
    assert "train 4/9" in text and "pass 0.250  waiting 1 s for [b]server" in text and "a line that stays" in text
