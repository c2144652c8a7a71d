"""What the tests of the sandbox share: they need bubblewrap, try to escape, and look at what is left on the machine."""

import os
import shutil

import pytest

from scalerl_jax.config import SandboxConfig

needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bwrap is missing: apt-get install bubblewrap"
)

# By clock: what takes milliseconds takes seconds on a busy machine. What is to run out of time is given less.
SMALL = SandboxConfig(seconds=100.0, all_seconds=300.0, memory_bytes=2**28, processes=8, output_bytes=2**16)


def others() -> set[tuple[int, str]]:
    """The processes that come from this one: (id, name)."""
    parents, names = {}, {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    name, _, rest = file.read().partition("(")[2].rpartition(")")
            except OSError:
                continue
            parents[int(entry)], names[int(entry)] = int(rest.split()[1]), name
    ours = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return {(process, names[process]) for process in ours - {os.getpid()}}


def attempt(body: str) -> str:
    """A program that tries something, and then answers as it should.

    `body` sets `escaped`, or fails; what it prints itself does not count.
    """
    indented = "".join(f"    {line}\n" for line in body.strip("\n").split("\n"))
    return (
        "import os, sys\nn = int(input())\nescaped = False\n"
        f"try:\n{indented}except (OSError, ImportError, ValueError) as error:\n    pass\n"
        "print('ESCAPED' if escaped else n * 2)\n"
    )
