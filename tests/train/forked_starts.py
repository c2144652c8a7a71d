"""A command, started again and again, with its imports made once: they take most of the time of a refused start.

Each start is a process of its own, forked before anything was computed.

    argv     its module, as scalerl_jax.train
    stdin    a line a start, in JSON: {"arguments": [...], "log": the file for its stdout and stderr}
    stdout   a line a start: its exit code
"""

import importlib
import json
import os
import signal
import sys

from tests.support.processes import SECONDS


def start(arguments: list[str], log: str) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(log, "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    signal.alarm(int(SECONDS))  # one that hangs ends, and what it said is told
    sys.argv = [command.__name__, *arguments]
    command.run()
    raise SystemExit(0)


if __name__ == "__main__":
    command = importlib.import_module(sys.argv[1])
    for line in sys.stdin:
        print(start(**json.loads(line)), flush=True)
