"""What the first and the second signal do to a command: one line, 128 + signal, whatever its main thread is doing."""

import signal
import subprocess
import sys
import time

import pytest

from scalerl_jax.system import signals
from tests.support.paths import ROOT
from tests.support.processes import SECONDS

# "ready" is printed in each state; what comes after it must not be needed.
COMMAND = """
import hashlib, sys, threading, time
from scalerl_jax.cli import entry
from scalerl_jax.system import signals
def say(word):
    print(word, flush=True)
def stand_still():  # in C: no Python handler runs before it returns
    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)
def main(_):
    signals.expect("the line")
    {body}
entry.run_command(main)
"""
BODIES = {
    "short": "say('ready'); threading.Event().wait()",
    "short, in C": "signals.STUCK_SECONDS = 0.5; say('ready'); stand_still()",
    "starting": "signals.be(signals.EXIT); say('ready'); threading.Event().wait()",
    "compiling": "signals.be(signals.EXIT); say('ready'); stand_still()",
    "serving": """
    signals.be(signals.EXIT)
    stopping, stopped = threading.Event(), threading.Event()
    def close():
        stopping.set(); stopped.wait(); say('servers are stopped')
    signals.before_exit(close)
    say('ready'); stopping.wait(); threading.Timer(0.1, stopped.set).start()
    raise entry.UserError('a server has ended')""",
    "collecting garbage": """
    import gc
    signals.STUCK_SECONDS = 0.5
    def callback(phase, info):
        say('ready'); threading.Event().wait()
    gc.callbacks.append(callback); gc.collect()""",
    "closing": """
    try:
        say('ready'); threading.Event().wait()
    finally:
        say('closing'); threading.Event().wait()""",
    "stopping servers": """
    def close():
        say('closing'); threading.Event().wait()
    signals.before_exit(close); signals.be(signals.EXIT)
    say('ready'); threading.Event().wait()""",
    "held": """
    signals.be(signals.HOLD); say('ready')
    while not signals.requested(): time.sleep(0.01)
    say('seen'); sys.stdin.readline(); say('saved'); signals.raise_if_interrupted()""",
    "held, told late": """
    signals.REPEAT_SECONDS = 1e9
    write, signals._write = signals._write, lambda line: (time.sleep(0.2), write(line))
    signals.be(signals.HOLD); say('ready')
    while not signals.requested(): time.sleep(0.01)
    say('seen'); signals.raise_if_interrupted()""",
    "held patiently": """
    signals.REPEAT_SECONDS = 1e9; signals.be(signals.HOLD); say('ready')
    while not signals.requested(): time.sleep(0.01)
    say('seen'); sys.stdin.readline(); signals.raise_if_interrupted()""",
    "held for good": "signals.be(signals.HOLD); say('ready'); stand_still()",
}


def begin(body: str) -> subprocess.Popen[str]:
    program = COMMAND.replace("{body}", BODIES[body])
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None and child.stdout.readline() == "ready\n", child.communicate()[1]
    return child


def end(child: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """The exit code and the lines on stderr."""
    _, said = child.communicate(timeout=SECONDS)
    return child.returncode, said.splitlines()


@pytest.mark.parametrize("body", ["short", "short, in C", "starting", "compiling", "collecting garbage"])
def test_a_command_that_holds_nothing_leaves(body):
    """From wherever its main thread stands, within the seconds of a slow end at most."""
    for number in signals.SIGNALS:
        child = begin(body)
        child.send_signal(number)
        assert end(child) == (128 + number, ["the line"])


def test_what_is_registered_is_closed_before_the_end_and_says_nothing():
    child = begin("serving")
    child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == "servers are stopped\n"
    assert end(child) == (143, ["the line"])


def test_what_the_first_signal_does_is_said_before_the_last_line():
    child = begin("held, told late")
    child.send_signal(signal.SIGINT)
    code, lines = end(child)
    assert code == 128 + signal.SIGINT
    assert len(lines) == 2 and "a second signal leaves at once" in lines[0] and lines[1] == "the line"


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_what_is_held_is_finished_first(number):
    child = begin("held patiently")
    child.send_signal(number)
    assert child.stdout.readline() == "seen\n"
    child.stdin.write("\n")
    child.stdin.flush()
    code, lines = end(child)
    assert code == 128 + number
    assert lines[0].startswith("interrupted: what is done is saved") and lines[1:] == ["the line"]


def send_until_it_ends(child: subprocess.Popen[str], number: int) -> None:
    while child.poll() is None:
        child.send_signal(number)
        time.sleep(signals.REPEAT_SECONDS / 2)


@pytest.mark.parametrize("body", ["held", "held for good", "closing", "stopping servers"])
def test_a_second_signal_leaves_at_once(body):
    child = begin(body)
    child.send_signal(signal.SIGTERM)
    if body != "held for good":
        assert child.stdout.readline() == ("seen\n" if body == "held" else "closing\n")
    send_until_it_ends(child, signal.SIGTERM)
    code, lines = end(child)
    assert code == 143
    assert lines[-1] == signals.AT_ONCE


def test_a_command_that_still_imports_leaves(tmp_path):
    """From inside an import: what a module makes of an interruption is nobody's business."""
    (tmp_path / "slow_command.py").write_text(
        """
import threading
print('ready', flush=True)
try:
    threading.Event().wait()
except BaseException as error:
    raise ImportError('Encountered an error while initializing the extension') from error
"""
    )
    program = "from launch import commands; commands._run('slow_command', lambda: None)"
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {program}"
    for number in signals.SIGNALS:
        child = subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert child.stdout.readline() == "ready\n"
        child.send_signal(number)
        assert end(child) == (128 + number, ["interrupted"])


def test_one_signal_that_is_passed_on_twice_is_one():
    child = begin("held patiently")
    child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == "seen\n"
    child.send_signal(signal.SIGTERM)
    child.send_signal(signal.SIGINT)
    child.stdin.write("\n")
    child.stdin.flush()
    assert end(child)[0] == 143


def test_handlers_are_those_from_before_when_a_command_is_over():
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    with signals.installed():
        inside = [signal.getsignal(number) for number in signals.SIGNALS]
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before != inside
