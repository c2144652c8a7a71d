"""The verifier against answers whose worth is known, and against what may happen to its workers."""

import os
import signal
import time

import pytest

from scalerl_jax.tasks.verifiers import Verifier


@pytest.fixture(scope="module")
def verifier():
    with Verifier(processes=1, seconds=60.0) as made:  # a busy machine takes seconds for what takes milliseconds
        yield made


@pytest.fixture
def hasty():
    with Verifier(processes=1, seconds=1.0) as made:
        assert at_last(made, "</think>1", "1")
        yield made


def at_last(verifier: Verifier, text: str, answer: str) -> bool:
    """A right answer is found to be right, if not within the second that it is given, then when it is asked again."""
    end = time.monotonic() + 60
    while not verifier.judge(text, answer):
        assert time.monotonic() < end
    return True


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("<think>3+4=7</think>7", "7", True),
        ("<think>3+4=7</think>8", "7", False),
        ("<think>a</think> The answer is -12.", "-12", True),
        ("<think>a</think> The answer is -12.", "12", False),
        (r"<think>a</think> So it is \boxed{42}.", "42", True),
        (r"<think>a</think> \boxed{\frac{1}{2}}", "0.5", True),
        (r"<think>a</think> $\frac{2}{4}$", r"\frac{1}{2}", True),
        (r"<think>a</think> 1/3", r"\frac{1}{2}", False),
        (r"<think>a</think> $x^2 + 2x + 1$", "(x+1)^2", True),
        ("<think>a</think> 1,000", "1000", True),
        ("<think>7</think>", "7", False),  # nothing after the thinking
        ("<think>3+4=7", "7", False),  # the thinking never ends
        ("7", "7", False),
        ("<think>7</think>8</think>7", "7", True),  # what follows the last one
        ("<think>a</think> )(*&^ \\frac{{{", "7", False),
        ("<think>a</think>" + "(" * 3000, "7", False),
        ("<think>a</think> ∞ \x00 \ud83d", "7", False),
        ("<think>a</think>7", "no number", False),  # a reference that is no mathematics: the texts must be equal
    ],
)
def test_known_answers(verifier, text, answer, right):
    assert verifier.judge(text, answer) is right


def test_without_thinking_all_of_the_text_is_the_answer():
    with Verifier(processes=1, seconds=60.0, end_of_thinking="") as verifier:
        assert verifier.judge("It is 7.", "7")
        assert not verifier.judge("  ", "7")


def test_an_answer_that_never_ends_is_wrong_and_holds_up_nobody(hasty):
    hanging = hasty.submit("</think>$9^{9^{9^{9}}}$", "7")
    after = hasty.submit("</think>\\boxed{11}", "11")
    assert hanging.result(60) is False
    assert after.result(60) or at_last(hasty, "</think>\\boxed{11}", "11")


def test_a_worker_that_hangs_beyond_interruption_is_replaced(hasty):
    worker = hasty._workers[0]
    first = worker._running.process.pid
    os.kill(first, signal.SIGSTOP)  # as a computation in C: deaf to its own alarm
    assert hasty.judge("</think>22", "22") is False
    assert at_last(hasty, "</think>23", "23")
    assert worker._running.process.pid != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)  # and not left behind


def test_a_killed_worker_is_replaced_and_the_question_asked_again(verifier):
    assert verifier.judge("</think>31", "31")
    restarts = verifier.restarts
    os.kill(verifier._workers[0]._running.process.pid, signal.SIGKILL)
    assert verifier.judge("</think>32", "32")
    assert verifier.restarts == restarts + 1


def test_many_at_once_each_get_their_own_verdict():
    with Verifier(processes=2, seconds=60.0, capacity=8) as verifier:
        futures = [verifier.submit(f"</think>{i % 50}", str(i % 40)) for i in range(400)]
        assert [f.result(60) for f in futures] == [i % 50 == i % 40 for i in range(400)]
        assert verifier.judged <= 220  # 200 different ones; a few may be under way at both workers


def test_closing_ends_the_workers_and_what_waits():
    verifier = Verifier(processes=1, seconds=30.0)
    assert verifier.judge("</think>1", "1")
    pid = verifier._workers[0]._running.process.pid
    os.kill(pid, signal.SIGSTOP)
    asked, waiting = verifier.submit("</think>2", "2"), verifier.submit("</think>3", "3")
    while not asked.running():
        time.sleep(0.01)
    began = time.monotonic()
    verifier.close()
    assert time.monotonic() - began < 8
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        asked.result(1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
