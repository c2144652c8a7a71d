"""What holds for every test: computation shares the cores with the other test processes, what one of them has compiled
none compiles again, and property tests repeat."""

import os
import signal

import pytest
from hypothesis import settings

from tests.support import compiled

# Read by XLA when it first computes, so set before any test imports jax. A parallel run has one pytest per core; left
# alone each would start a thread per core as well, and they would wait for each other.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("NPROC", str(max(1, cores // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))))

# A shell that runs the tests in the background has them ignore Ctrl-C, and with them every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# In one process of the run alone: its workers inherit the folder.
_COMPILED = None if "JAX_COMPILATION_CACHE_DIR" in os.environ else compiled.begin()

# The same examples at every run, and no limit on one: a loaded machine is not a bug.
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repeatable")

# The files that take longest go to the parallel workers first, else one worker ends alone with one of them.
LONGEST = (
    "tests/docs/test_tutorials.py",
    "tests/hosts/test_one_trainer.py",
    "tests/train/test_evaluate.py",
    "tests/train/test_resume.py",
    "tests/train/test_mistakes.py",
    "tests/scaling/commands/test_scalerl_fit.py",
    "tests/learner/test_mesh.py",
    "tests/train/test_sft.py",
    "tests/train/test_lying_server.py",
    "tests/scaling/commands/test_scalerl_compare.py",
    "tests/rollout_server/engines/test_jax_engine.py",
    "tests/train/test_live.py",
    "tests/train/test_router_replay.py",
    "tests/train/test_metrics_port.py",
    "tests/run/test_live_forecast.py",
    "tests/scaling/test_average.py",
    "tests/scaling/test_calibrate.py",
    "tests/learner/test_expert_mesh.py",
    "tests/learner/test_weight_snapshots.py",
    "tests/train/test_interruption.py",
    "tests/train/test_continued.py",
    "tests/train/test_disk.py",
    "tests/train/test_no_learning.py",
    "tests/train/test_export.py",
    "tests/rollouts/test_liars.py",
    "tests/rollout_server/test_conformance.py",
    "tests/report/test_browser.py",
    "tests/report/test_page.py",
)


def pytest_unconfigure() -> None:
    if _COMPILED:
        compiled.end(_COMPILED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        file = item.nodeid.partition("::")[0]
        return LONGEST.index(file) if file in LONGEST else len(LONGEST)

    items.sort(key=place)
