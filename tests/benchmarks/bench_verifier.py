"""The pool of processes that score, against one that scores the same answers with nothing in between.

    python -m tests.benchmarks.bench_verifier [--answers=2000] [--processes=1,2] [--repeats=3] [--thinking=0]

Mathematics: answers of every form, no two alike, so that none is remembered. Directly: a process of its own calls
math.score in a loop. The pool: as in a run, asked for all of them at once. Both are warm. In turns, medians.

Printed: answers a second, by N x the rate of one directly; and the CPU time of an answer, which a busy machine leaves
as it is, in the processes that judge and in the one that asks, which is the trainer. --thinking=N gives each completion
so many characters of thinking beside it.
"""

import json
import statistics
import subprocess
import sys
import time

import psutil
from absl import app, flags

from scalerl_jax.config import Config
from scalerl_jax.environments import Completion, Row
from scalerl_jax.environments.load import make_environment
from scalerl_jax.environments.scorer_pool import ScorerPool

FLAGS = flags.FLAGS
flags.DEFINE_integer("answers", 2000, "that are judged", lower_bound=1)
flags.DEFINE_list("processes", ["1", "2"], "N of the pool")
flags.DEFINE_integer("repeats", 3, "of each, in turns", lower_bound=1)
flags.DEFINE_integer("thinking", 0, "characters beside each answer", lower_bound=0)
_DIRECTLY = """
import json, sys, time
from scalerl_jax.environments import Row, math
questions = json.load(sys.stdin)
math.prepare()
math.score(Row("", "x+1"), "\\\\boxed{1+x}")
began, used = time.monotonic(), time.process_time()
right = sum(math.score(Row("", gold), said).correct for said, gold in questions)
print(time.monotonic() - began, right, time.process_time() - used)
"""
_FORMS = (
    (r"So it is \boxed{{{n}}}.", "{n}"),
    (r"The answer is $\frac{{{n}}}{{7}}$.", "{n}/7"),
    (r"\boxed{{x^2 + {n}x + 1}}", "1 + {n}x + x^2"),
    (r"Thus \boxed{{(x+{n})^2}}", "x^2 + 2*{n}*x + {n}^2"),
    (r"\boxed{{\sqrt{{{n}}}}}", r"\sqrt{{{n}}}"),
    (r"Well, 3 + 4 = 7, so the answer is {n}.", "{m}"),
    (r"\boxed{{[{n}, {m})}}", "[{n},{m})"),
    (r"\boxed{{{n}\%}}", "{n}"),
)


def questions(count: int, start: int) -> list[tuple[str, str]]:
    """(completion, right answer), all different."""
    made = []
    for n in range(start, start + count):
        said, gold = _FORMS[n % len(_FORMS)]
        made.append((said.format(n=n + 2, m=n + 3), gold.format(n=n + 2, m=n + 3)))
    return made


def directly(asked: list[tuple[str, str]]) -> tuple[float, int, float]:
    """(seconds, how many are right, seconds of CPU time)."""
    done = subprocess.run([sys.executable, "-c", _DIRECTLY], input=json.dumps(asked), capture_output=True, text=True)
    seconds, right, used = done.stdout.split()
    return float(seconds), int(right), float(used)


def pooled(asked: list[tuple[str, str]], processes: int) -> tuple[float, int, float, float]:
    """(seconds, how many are right, seconds of CPU time of the workers, and of this process)."""
    config = Config()
    config.environment.name, config.environment.verifier_processes = "math", processes
    pool = ScorerPool(config, {"": make_environment(config)})
    try:
        pool.prepare(everywhere=True)
        for _ in range(3):  # as warm as the other
            for future in [pool.submit(Row("", "x+1"), Completion(f"\\boxed{{1+x+{n}}}")) for n in range(processes)]:
                future.result()
        rows = [(Row("", gold), Completion(said, thinking="t" * FLAGS.thinking)) for said, gold in asked]
        workers = [psutil.Process(worker._running.process.pid) for worker in pool._workers if worker._running]
        before = sum(sum(worker.cpu_times()[:2]) for worker in workers)
        began, used = time.monotonic(), time.process_time()
        right = sum(future.result().correct for future in [pool.submit(*of) for of in rows])
        seconds, used = time.monotonic() - began, time.process_time() - used
        return seconds, right, sum(sum(worker.cpu_times()[:2]) for worker in workers) - before, used
    finally:
        pool.close()


def main(_: list[str]) -> None:
    counts = [int(text) for text in FLAGS.processes]
    rates: dict[int, list[float]] = {n: [] for n in (0, *counts)}
    theirs: dict[int, list[float]] = {n: [] for n in (0, *counts)}  # CPU time of an answer, where it is judged
    own: dict[int, list[float]] = {n: [] for n in counts}  # where it is asked
    for repeat in range(FLAGS.repeats):
        asked = questions(FLAGS.answers, start=repeat * FLAGS.answers)
        seconds, right, used = directly(asked)
        theirs[0].append(used / len(asked))
        rates[0].append(len(asked) / seconds)
        for n in counts:
            seconds, found, judging, used = pooled(asked, n)
            theirs[n].append(judging / len(asked))
            assert found == right, (found, right)
            rates[n].append(len(asked) / seconds)
            own[n].append(used / len(asked))
    one = statistics.median(rates[0])
    each = ", ".join(f"{rate:.0f}" for rate in rates[0])
    print(
        f"directly: {one:.0f} answers a second ({each}); {statistics.median(theirs[0]) * 1e6:.0f} us of CPU time each"
    )
    for n in counts:
        rate = statistics.median(rates[n])
        each = ", ".join(f"{found:.0f}" for found in rates[n])
        print(
            f"a pool of {n}: {rate:.0f} a second ({each}), {rate / (n * one):.1%} of {n} x one directly; "
            f"CPU time of an answer: {statistics.median(theirs[n]) * 1e6:.0f} us where it is judged, "
            f"{statistics.median(own[n]) * 1e6:.0f} us where it is asked"
        )


if __name__ == "__main__":
    app.run(main)
