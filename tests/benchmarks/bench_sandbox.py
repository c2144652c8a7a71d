"""Programs run in the sandbox: how many a second, and what the time is spent on.

    python -m tests.benchmarks.bench_sandbox [--processes=2] [--programs=200] [--tests=3]

Through the real pool of processes, as a run's scores go: each program is another one, so none is remembered, and all
are right, which takes all their tests. In one process beside that, by clock: bubblewrap alone, Python alone, a sandbox
from start to end, and a further run in it. And the CPU time of a program, which other work changes little.
"""

import contextlib
import dataclasses
import resource
import shutil
import statistics
import subprocess
import sys
import time

from absl import app, flags

from scalerl_jax.config import Config
from scalerl_jax.environments import Completion, Row
from scalerl_jax.environments.load import make_environment
from scalerl_jax.environments.sandbox import Limits, Sandbox
from scalerl_jax.environments.scorer_pool import ScorerPool

FLAGS = flags.FLAGS
flags.DEFINE_integer("processes", 2, "of the pool")
flags.DEFINE_integer("programs", 200, "judged")
flags.DEFINE_integer("tests", 3, "of each program")


def pool_rate(functions: bool) -> float:
    """Programs a second."""
    config = Config()
    config.environment = dataclasses.replace(
        config.environment, name="code", verifier_processes=FLAGS.processes, verifier_seconds=60.0
    )
    if functions:
        tests = {"function": "f", "cases": [[[n], [n * n]] for n in range(FLAGS.tests)]}
        program = "def f(n):\n    return n * n"
    else:
        tests = {"function": "", "cases": [[f"{n}\n", [f"{n * n}"]] for n in range(FLAGS.tests)]}
        program = "n = int(input())\nprint(n * n)"
    row = Row("square", extra={"unit_tests": tests})
    with contextlib.closing(ScorerPool(config, {"": make_environment(config)})) as pool:
        # The first ones start the workers.
        for future in [pool.submit(row, block(f"{program}  # first {n}")) for n in range(4 * FLAGS.processes)]:
            assert future.result().correct
        began = time.perf_counter()
        asked = [pool.submit(row, block(f"{program}  # {n}")) for n in range(FLAGS.programs)]
        assert all(future.result().correct for future in asked)
        return FLAGS.programs / (time.perf_counter() - began)


def block(program: str) -> Completion:
    return Completion(f"```python\n{program}\n```")


def cpu_ms(function, repeats: int = 40) -> float:
    """Of this process and of all that it starts and waits for."""

    def used() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    before = used()
    for _ in range(repeats):
        function()
    return 1000 * (used() - before) / repeats


def median_ms(function, repeats: int = 40) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


def main(_) -> None:
    bwrap = [shutil.which("bwrap") or "bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--ro-bind", "/", "/"]
    python = [getattr(sys, "_base_executable", sys.executable), "-s", "-S", "-P", "-c", "pass"]
    limits = Limits.of(Config().environment.sandbox)

    def once() -> None:
        with Sandbox("print(1)", limits) as sandbox:
            assert sandbox.run(b"").output == b"1\n"

    print(f"bubblewrap alone            {median_ms(lambda: subprocess.run([*bwrap, 'true'], check=True)):6.1f} ms")
    print(f"Python alone                {median_ms(lambda: subprocess.run(python, check=True)):6.1f} ms")
    print(f"a sandbox, one run, its end {median_ms(once):6.1f} ms")
    with Sandbox("print(1)", limits) as sandbox:
        print(f"a further run               {median_ms(lambda: sandbox.run(b'')):6.1f} ms")

    def whole() -> None:
        with Sandbox("print(int(input()) ** 2)", limits) as sandbox:
            for n in range(FLAGS.tests):
                assert sandbox.run(b"%d" % n).output == b"%d\n" % n**2

    cpu = cpu_ms(whole)
    print(f"CPU time of {FLAGS.tests} tests          {cpu:6.1f} ms, {1000 / cpu:.0f} programs a second and core")
    for functions, name in ((False, "scripts"), (True, "functions")):
        rate = pool_rate(functions)
        print(f"{name} of {FLAGS.tests} tests, {FLAGS.processes} processes: {rate:6.1f} programs a second")


if __name__ == "__main__":
    app.run(main)
