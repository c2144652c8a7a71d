"""The verifier against answers whose worth is known, and against what may happen to its workers."""

import concurrent.futures
import contextlib
import errno
import itertools
import os
import signal
import subprocess
import sys

import pytest

from scalerl_jax.config import Config
from scalerl_jax.environments import Completion, Row, Score, scorer_pool
from scalerl_jax.environments.base import WRONG
from scalerl_jax.environments.load import make_environment
from scalerl_jax.environments.scorer_pool import ScorerError, ScorerPool
from scalerl_jax.environments.tokenizer import split_thinking
from scalerl_jax.environments.worker_process import WorkerProcess
from scalerl_jax.system import memory
from tests.environments import odd
from tests.support.processes import SECONDS
from tests.support.waiting import eventually


class Verifier(ScorerPool):
    """Asked in texts, of mathematics if no other is named, which takes seconds to import; scores are right or wrong."""

    def __init__(self, *, end_of_thinking="</think>", processes, seconds, name="math", **options):
        config = Config()
        config.environment.name = name
        config.environment.verifier_processes, config.environment.verifier_seconds = processes, seconds
        super().__init__(config, {"": make_environment(config)}, **options)
        self._end = end_of_thinking

    def submit(self, text, answer, *, prompt=""):
        _, said = split_thinking(text, self._end)
        if said is not None:
            return super().submit(Row(prompt, answer), Completion(said))
        known = concurrent.futures.Future()
        known.set_result(WRONG)
        return known

    def judge(self, text, answer, **options):
        score = self.submit(text, answer, **options).result()
        assert score.reward == (1 if score.correct else -1)
        return score.correct

    def __enter__(self):
        self.prepare()
        return self

    def __exit__(self, *_):
        self.close()


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
    """A right answer is found to be right, if not within the second that it is given, then when it is asked again: of
    another prompt, since what was found of this one is remembered."""
    prompts = itertools.count()
    return eventually(lambda: verifier.judge(text, answer, prompt=f"{next(prompts)}?"), seconds=SECONDS)


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


@pytest.mark.slow
def test_without_thinking_all_of_the_text_is_the_answer():
    with Verifier(processes=1, seconds=60.0, end_of_thinking="") as verifier:
        assert verifier.judge("It is 7.", "7")
        assert not verifier.judge("  ", "7")


def test_an_answer_that_never_ends_is_wrong_and_holds_up_nobody(hasty):
    hanging = hasty.submit("</think>$9^{9^{9^{9}}}$", "7")
    after = hasty.submit("</think>\\boxed{11}", "11")
    assert not hanging.result(600).correct and "CPU time" in hanging.result().why
    assert after.result(600).correct or at_last(hasty, "</think>\\boxed{11}", "11")


@pytest.mark.slow
def test_an_answer_that_never_ends_is_judged_once(hasty):
    assert hasty.judge("</think>$8^{9^{9^{9}}}$", "7") is False
    judged, given_up = hasty.scored, hasty.given_up
    assert given_up > 0
    assert hasty.judge("</think>$8^{9^{9^{9}}}$", "7") is False
    assert (hasty.scored, hasty.given_up) == (judged, given_up)


@pytest.mark.slow
def test_the_limit_counts_the_time_of_the_worker_and_not_the_clock(hasty):
    """A machine that stands still for longer than the limit does not make a right answer wrong."""
    process = hasty._workers[0]._running.process
    os.kill(process.pid, signal.SIGSTOP)
    asked = hasty.submit("</think>22", "22.0")
    with pytest.raises(concurrent.futures.TimeoutError):
        asked.result(2.5)  # the limit is one second
    os.kill(process.pid, signal.SIGCONT)
    assert asked.result(600).correct or at_last(hasty, "</think>22", "22.0")
    assert hasty._workers[0]._running.process is process


@pytest.mark.slow
def test_a_worker_that_stays_stuck_is_replaced_and_the_question_asked_again():
    with Verifier(processes=1, seconds=60.0, stuck_seconds=2.0, name="arithmetic") as verifier:
        assert at_last(verifier, "</think>1", "1")
        first = verifier._workers[0]._running.process.pid
        os.kill(first, signal.SIGSTOP)
        assert at_last(verifier, "</think>23", "23")
        assert verifier._workers[0]._running.process.pid != first and verifier.restarts
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)  # and not left behind


@pytest.mark.slow
def test_the_kernel_ends_a_worker_that_is_deaf_to_its_own_interruption(tmp_path, monkeypatch):
    """One step of a computation in C: no Python handler runs before it is over."""
    program = (
        "import sys; from scalerl_jax.environments import base, load, score_worker as w; "
        "score = lambda row, text: base.RIGHT if text == 'x' and len(str(9 ** 9 ** 9)) else base.WRONG; "
        "sys.set_int_max_str_digits(0); load.ENVIRONMENTS['math'] = lambda config: base.Environment(None, score); "
        "w.main()"
    )
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **rest: real([sys.executable, "-c", program], **rest))
    with Verifier(processes=1, seconds=1.0, end_of_thinking="") as verifier:
        assert verifier.judge("x", "7") is False
        assert verifier.given_up == 1 and verifier.restarts == 0
        assert verifier.judge("y", "7") is False and verifier.given_up == 1


def test_a_worker_that_cannot_be_started_is_said_in_one_line(monkeypatch):
    with contextlib.closing(Verifier(processes=1, seconds=60.0, name="arithmetic")) as verifier:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "executable", "/nowhere/python")
            with pytest.raises(ScorerError, match="the verifier's worker cannot be started") as caught:
                verifier.submit("</think>1", "1").result(600)
            assert "/nowhere/python" in str(caught.value) and "\n" not in str(caught.value)
            patched.setattr(sys, "executable", "/bin/false")
            with pytest.raises(ScorerError, match="it ended with code 1"):
                verifier.submit("</think>1", "1").result(600)
        assert verifier.submit("</think>1", "1").result(600).correct  # the thread lives


@pytest.mark.slow
def test_what_the_machine_is_short_of_for_a_moment_is_waited_for(monkeypatch):
    real, failures = subprocess.Popen, [errno.EAGAIN, errno.ENOMEM]

    def popen(*arguments, **options):
        if failures:
            raise OSError(failures[-1], os.strerror(failures.pop()))
        return real(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    with Verifier(processes=1, seconds=60.0, name="arithmetic") as verifier:
        assert verifier.submit("</think>1", "1").result(600).correct
        assert not failures


def test_any_fault_of_the_thread_reaches_whoever_waits(verifier, monkeypatch):
    def broken(self, line, seconds, part):
        raise MemoryError("no room\nat all")

    with monkeypatch.context() as patched:
        patched.setattr(scorer_pool._Worker, "ask", broken)
        with pytest.raises(ScorerError, match=r"^the verifier failed: MemoryError: no room at all$"):
            verifier.submit("</think>41", "41").result(600)
    assert verifier.submit("</think>41", "41").result(600).correct


def test_an_answer_larger_than_a_pipe_holds_is_judged_by_its_end(verifier):
    assert verifier.judge("</think>" + "So on. " * 1_500_000 + "\\boxed{7}", "7")
    assert not verifier.judge("</think>\\boxed{7}" + " So on." * 1_500_000, "7")


def test_the_same_question_is_asked_once_while_it_is_judged(verifier):
    judged = verifier.scored
    assert all(f.result(600).correct for f in [verifier.submit("</think>x+1", "1+x") for _ in range(50)])
    assert verifier.scored == judged + 1


def test_a_killed_worker_is_replaced_and_the_question_asked_again():
    with Verifier(processes=1, seconds=60.0, name="arithmetic") as verifier:
        assert verifier.judge("</think>31", "31")
        os.kill(verifier._workers[0]._running.process.pid, signal.SIGKILL)
        assert verifier.judge("</think>32", "32")
        assert verifier.restarts == 1


@pytest.mark.slow
def test_many_at_once_each_get_their_own_score():
    with Verifier(processes=2, seconds=60.0) as verifier:
        futures = [verifier.submit(f"</think>{i % 50}", str(i % 40)) for i in range(400)]
        assert [f.result(600).correct for f in futures] == [i % 50 == i % 40 for i in range(400)]
        assert verifier.scored == 200  # different ones


def test_closing_ends_the_workers_and_what_waits():
    # Were the one that is stopped waited for, the test would not end.
    verifier = Verifier(processes=1, seconds=30.0, stuck_seconds=1e6, name="arithmetic")
    assert verifier.judge("</think>1", "1")
    pid = verifier._workers[0]._running.process.pid
    os.kill(pid, signal.SIGSTOP)
    asked, waiting = verifier.submit("</think>2", "2"), verifier.submit("</think>3", "3")
    eventually(asked.running)
    verifier.close()
    assert waiting.cancelled()
    with pytest.raises(ScorerError, match="closed"):
        asked.result(1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def odd_pool(**options):
    config = odd.config(**options)
    return ScorerPool(config, {"": make_environment(config)})


def test_closing_does_not_wait_for_what_a_worker_has_started(tmp_path):
    pool, escaped = odd_pool(verifier_seconds=30.0), tmp_path / "escaped"
    row = Row("?", "1", extra={"bonus": 1.0})
    assert pool.submit(row, Completion("1")).result(600).correct
    asked = pool.submit(row, Completion(f"escapes to {escaped}"))
    eventually(escaped.exists, "a worker has started a process", seconds=SECONDS)
    pool.close()
    os.kill(int(escaped.read_text()), signal.SIGKILL)  # it is still there
    with pytest.raises(ScorerError, match="closed"):
        asked.result(1)


def test_a_score_is_what_the_environment_says_of_row_and_completion():
    rows = list(make_environment(odd.config()).rows("train"))
    with contextlib.closing(odd_pool(verifier_seconds=60.0)) as pool:
        assert pool.submit(rows[1], Completion("1")).result(600) == Score(0.25, True, {"length": 1.0})
        assert pool.submit(rows[2], Completion("ten")).result(600) == Score(0.5, False, {"length": 3.0})
        assert pool.submit(rows[2], Completion("1")).result(600) == Score(0.5, False, {"length": 1.0})  # another row


@pytest.mark.parametrize(
    ("completion", "said"),
    [
        ("not a number", "failed: ValueError: the reward is nan (odd.py line"),
        ("not a score", "returned what is no score: '1.0' (str), not a number"),
        ("fails", "failed: KeyError: 'fails' (odd.py line"),
        ("leaves", "failed: SystemExit: 3 (odd.py line"),
        ("eats", "failed: MemoryError (odd.py line"),
        ("reads and prints", "failed: EOFError"),
        ("sleeps", "took longer than config.environment.reward_seconds=1"),
        ("crashes", "ended, was stuck or was not alone in answering, twice"),
        ("answers twice", "was not alone in answering"),
        ("computes", "no score within 1 s of CPU time"),
    ],
)
def test_what_goes_wrong_in_a_score_costs_that_answer_only_and_is_said_once(completion, said, caplog):
    rows = (Row(f"{number}?", "1", extra={"bonus": 1.0}) for number in itertools.count())
    verifier_seconds, reward_seconds = (1.0 if completion == slow else 60.0 for slow in ("computes", "sleeps"))
    with contextlib.closing(odd_pool(verifier_seconds=verifier_seconds, reward_seconds=reward_seconds)) as pool:
        for _ in range(2):
            score = pool.submit(next(rows), Completion(completion)).result(600)
            assert (score.reward, score.correct) == (WRONG.reward, False)
            assert said in score.why
        right = Score(1.0, True, {"length": 1.0})
        assert eventually(lambda: pool.submit(next(rows), Completion("1")).result(600) == right, seconds=SECONDS)
        assert pool.restarts == 4 * (completion in ("crashes", "answers twice"))
    (logged,) = [record.getMessage() for record in caplog.records]
    assert said in logged and "counts as wrong" in logged and "\n" not in logged


def test_a_failure_is_not_remembered(tmp_path):
    with contextlib.closing(odd_pool()) as pool:
        pool.prepare()
        row, completion = Row("?", "1", extra={"bonus": 1.0}), Completion(f"fails once, see {tmp_path / 'seen'}")
        assert "ConnectionError: no judge there" in pool.submit(row, completion).result(600).why
        assert pool.submit(row, completion).result(600) == Score(0.75, False)
        assert pool.submit(row, completion).result(600) == Score(0.75, False) and pool.scored == 2


def test_what_does_not_say_that_it_is_deterministic_is_asked_each_time(tmp_path):
    (tmp_path / "dice.py").write_text(DICE)
    for name, times in (("rolls", 3), ("counts", 1), ("JudgeOfBoth", 3)):
        with contextlib.closing(rewarded_pool(f"{tmp_path}/dice.py:{name}")) as pool:
            pool.prepare()
            found = {pool.submit(Row("?", "1"), Completion("1")).result(600).reward for _ in range(3)}
            assert (len(found), pool.scored) == (times, times), name


DICE = """
calls = []

def rolls(completion):
    calls.append(completion)
    return len(calls)

def counts(completion):
    return rolls(completion)

counts.deterministic = True

class JudgeOfBoth:
    deterministic = False

    def __call__(self, completion):
        return rolls(completion)
"""


def rewarded_pool(reward):
    config = Config()
    config.environment.reward = reward
    config.environment.verifier_processes = 1
    return ScorerPool(config, {"": make_environment(config)})


def test_a_fork_that_returns_has_no_say():
    """Else its answer would be taken for that of the next completion, and so on for ever."""
    with contextlib.closing(odd_pool()) as pool:
        for number in range(3):
            row = Row(f"{number}?", "1", extra={"bonus": number / 4})
            assert pool.submit(row, Completion("forks")).result(600) == Score(number / 4, False, {"length": 5.0})
            assert pool.submit(row, Completion("1")).result(600) == Score(number / 4, True, {"length": 1.0})
        assert pool.restarts == 0


EATERS = (
    "$10^{10^{10}}$",
    r"\boxed{(10^{9})!}",
    r"\boxed{\binom{10^9}{5 \cdot 10^8}}",
    r"\boxed{9^{9^{9}} + 1}",
    "(1+x)^{100000000}",
    r"\boxed{2^{2^{40}}}",
    r"\boxed{\sqrt{10^{10^{9}}}}",
)


@pytest.mark.slow
def test_what_eats_memory_or_time_costs_its_worker_at_most():
    """The address space is bounded, so no machine pays for it; right answers after it are right."""
    with Verifier(processes=1, seconds=1.0) as verifier:
        for number, eater in enumerate(EATERS):
            assert not verifier.judge(f"</think>{eater}", "7"), eater
            assert at_last(verifier, f"</think>{number}.0", str(number))
            peak = memory.peak_resident(verifier._workers[0]._running.process.pid)
            assert 0 < peak < Config().environment.verifier_memory_bytes


@pytest.mark.slow
def test_a_worker_that_has_grown_is_replaced_before_its_next_question():
    row = Row("?", "1", extra={"bonus": 1.0})
    # A busy machine takes its time to zero 2 GiB.
    with contextlib.closing(odd_pool(verifier_seconds=300.0, reward_seconds=300.0)) as pool:
        assert pool.submit(row, Completion("1")).result(600).correct
        first = pool._workers[0]._running.process.pid
        assert pool.submit(row, Completion("two")).result(600).metrics == {"length": 3.0}
        assert pool._workers[0]._running.process.pid == first
        assert pool.submit(row, Completion("keeps")).result(600).metrics == {"length": 5.0}
        assert pool.submit(row, Completion("three")).result(600).metrics == {"length": 5.0}
        assert pool._workers[0]._running.process.pid != first and not pool.restarts
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)


@pytest.mark.slow
def test_a_worker_loads_no_more_than_it_needs():
    """It starts in the time that numpy takes; what environments need they import when they score."""
    program = (
        "import sys, scalerl_jax.environments.score_worker; "
        "print(*{'jax', 'transformers', 'datasets', 'pyarrow', 'sympy', 'openai', 'reasoning_gym'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_limit_of_a_line_is_not_left_on_the_socket():
    """Else what is sent after a slow start would have no time left."""
    worker = WorkerProcess(["cat"])
    try:
        assert worker.exchange("a line", SECONDS) == b"a line\n" and worker.socket.gettimeout() is None
    finally:
        worker.end()


@pytest.mark.slow
def test_the_config_is_not_on_the_command_line():
    with Verifier(processes=1, seconds=60.0, name="arithmetic") as verifier:
        assert at_last(verifier, "</think>1", "1")
        with open(f"/proc/{verifier._workers[0]._running.process.pid}/cmdline", "rb") as file:
            assert file.read().split(b"\0")[1:-1] == [b"-m", b"scalerl_jax.environments.score_worker"]
