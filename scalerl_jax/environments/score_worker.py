"""A scoring process: reads {"row": {...}, "completion"} lines, writes {"reward", "correct", "metrics"} or null lines.

null: its CPU time ran out. Where it cannot even interrupt itself (a computation in C), the kernel ends it with SIGXCPU
GRACE_SECONDS later. The first line it writes says that it is ready. It ends at the end of its input, that is with the
process that started it.
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import os
import pkgutil
import resource
import signal
import sys
from collections.abc import Callable

from scalerl_jax.environments.base import WRONG, Row, Score

MEMORY_BYTES = 3 * 2**30  # address space: a number with 10^9 digits ends in MemoryError, not in the machine's memory
GRACE_SECONDS = 1.0  # CPU time over the limit at which the kernel ends it; the kernel counts whole seconds
AGAIN_SECONDS = 0.1  # CPU time between two interruptions: a bare `except:` or a callback may swallow one


class OutOfTime(BaseException):
    """Not an Exception: math-verify and sympy catch those and go on."""


class Limit:
    """Raises OutOfTime in `with limit:` once this process has spent `seconds` of CPU time in it."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._armed = False
        signal.signal(signal.SIGPROF, self._interrupt)

    def __enter__(self) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        limit = math.ceil(used.ru_utime + used.ru_stime + self._seconds + GRACE_SECONDS)
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))
        self._armed = True
        signal.setitimer(signal.ITIMER_PROF, self._seconds, AGAIN_SECONDS)

    def __exit__(self, *_: object) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _interrupt(self, *_: object) -> None:
        if self._armed:
            raise OutOfTime


def reply_to(question: str, score: Callable[[Row, str], Score], limit: Limit) -> str:
    """Raises nothing for any text."""
    asked = json.loads(question)
    try:
        with limit:
            return json.dumps(dataclasses.asdict(score(Row(**asked["row"]), asked["completion"])))
    except OutOfTime:
        limit.__exit__()  # it may have been interrupted itself
        return "null"
    except Exception:  # noqa: BLE001 (whatever parsers of arbitrary text may raise, the text is not the answer)
        return json.dumps(dataclasses.asdict(WRONG))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--score", type=pkgutil.resolve_name, required=True)
    parser.add_argument("--prepare", type=pkgutil.resolve_name, default=lambda: None)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    limit = Limit(options.seconds)
    logging.disable(logging.CRITICAL)  # math-verify logs every text it cannot read
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    # A size that the machine does not know, and no core file of a worker that the kernel ends.
    for kind, size in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (size, size))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    options.prepare()
    replies.write("ready\n")
    with open(os.devnull, "wb") as nowhere:  # what a library prints is not a reply, and nobody reads it
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    for line in sys.stdin:
        replies.write(reply_to(line, options.score, limit) + "\n")


if __name__ == "__main__":
    main()
