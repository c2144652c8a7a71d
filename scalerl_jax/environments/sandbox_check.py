"""Checks at the start of a run that sandboxes work on this machine and that they confine programs."""

import dataclasses
import functools
import json
import os
import resource
import shutil
import sys

from scalerl_jax.environments import sandbox_command
from scalerl_jax.environments.sandbox import START_SECONDS, Limits, Sandbox, SandboxLost
from scalerl_jax.environments.system_calls import filter_program


@functools.cache
def check(limits: Limits) -> None:
    """Raises ValueError, one line, if no sandbox can be made on this machine, or it does not confine programs."""
    if sys.platform != "linux":
        raise ValueError(f"programs are run in a sandbox that needs Linux, this is {sys.platform}")
    filter_program()
    if shutil.which("bwrap") is None:
        raise ValueError(
            "programs are run in a sandbox of bubblewrap, and there is no bwrap on PATH: apt-get install bubblewrap"
        )
    version = sandbox_command.version()
    if version < sandbox_command.OLDEST:
        needed, there = (".".join(map(str, numbers)) for numbers in (sandbox_command.OLDEST, version))
        raise ValueError(f"programs are run in a sandbox of bubblewrap {needed} or newer, this is {there}")
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        raise ValueError("the sandbox needs /proc/PID/task/TID/children: a kernel with CONFIG_PROC_CHILDREN")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY and limits.memory_bytes > hard:
        raise ValueError(
            f"config.environment.sandbox.memory_bytes={limits.memory_bytes}: this process itself is limited to {hard} "
            "bytes of address space (ulimit -v): lower the first or raise the second"
        )
    patient = dataclasses.replace(limits, seconds=START_SECONDS)
    with Sandbox(_PROBE, patient, function="probe") as sandbox:
        try:
            outcome = sandbox.run(json.dumps([limits.processes]).encode())
        except SandboxLost as lost:
            raise ValueError(str(lost)) from None
    if outcome.kind != "ended":
        raise ValueError(f"the sandbox does not work here: {outcome.why}")
    found = json.loads(outcome.reply)
    if found:
        raise ValueError(f"the sandbox does not hold here: {found}")


# Tries forbidden operations; returns the first that succeeds, or "".
_PROBE = """
import errno, os, socket, time
def probe(processes):
    try:
        socket.socket()
        return "a program may open sockets"
    except PermissionError:
        pass
    if os.path.exists("/etc") or os.path.exists("/proc"):
        return "a program sees the machine's files"
    for started in range(processes + 1):
        try:
            if os.fork() == 0:
                time.sleep(60)
        except BlockingIOError:
            return "" if started or processes == 1 else "a program cannot start processes"
    return "a program may start any number of processes: a user who is not root needs Linux 5.14 or newer"
"""
