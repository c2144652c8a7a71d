"""What holds for every test: computation shares the cores with the other test processes, and property tests repeat."""

import os

from hypothesis import settings

# Read by XLA when it first computes, so set before any test imports jax. A parallel run has one pytest per core; left
# alone each would start a thread per core as well, and they would wait for each other.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("NPROC", str(max(1, cores // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))))

# The same examples at every run, and no limit on one: a loaded machine is not a bug.
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repeatable")
