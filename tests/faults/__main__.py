"""Shows that the tests find mistakes: puts those of faults.py into a copy of the tree, one at a time.

    python -m tests.faults [NAME ...] [--tree=DIR]

The tests chosen must pass without a fault, and fail with it. Printed: a table of what found each. The exit code is 1
where one was not found. NAME: a part of a fault's name; without any, all. --tree: another checkout, as an older one,
whose own tests are asked; a fault whose text that one lacks is told apart.
"""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence

from absl import app, flags
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from tests.faults.faults import FAULTS, Fault
from tests.runner import TARGETS
from tests.support import compiled
from tests.support.paths import ROOT

FLAGS = flags.FLAGS
flags.DEFINE_string("tree", str(ROOT), "the checkout whose tests are asked")

SECONDS = 900.0  # of one fault: what hangs is ended then
IMPORTED = "import launch as a, rollout_server as b, scalerl_jax as c; print(a.__file__, b.__file__, c.__file__)"


def copy(tree: pathlib.Path, to: pathlib.Path) -> None:
    """Of what git tracks, and what is new and not ignored."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=tree, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (tree / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, to / name)


class Copy:
    """A copy of a tree, whose tests run with this interpreter and import the copy alone."""

    def __init__(self, root: pathlib.Path, tree: pathlib.Path):
        copy(tree, root)
        self.root = root
        self._environment = {**os.environ, "PYTHONPATH": str(root), "XLA_FLAGS": compiled.XLA_FLAGS}
        said = self._run([sys.executable, "-c", IMPORTED], "/")[1]
        assert all(path.startswith(f"{root}{os.sep}") for path in said.split()), said

    def _run(self, command: Sequence[str], folder: str) -> tuple[int | None, str]:
        """The exit code, None where it hangs, and what it printed. Nothing that it started stays."""
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command, cwd=folder, env=self._environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code: int | None = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return code, output.read()

    def named(self, test: str) -> str:
        """The test as pytest is asked for it: the whole file where this tree lacks one of that name."""
        file, _, name = test.partition("::")
        path = self.root / file
        return test if path.is_file() and f"def {name}(" in path.read_text() else file

    def test(self, tests: Iterable[str], target: str) -> tuple[int | None, str]:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", TARGETS[target][0]]
        return self._run([*command, *sorted(set(map(self.named, tests)))], str(self.root))

    def find(self, fault: Fault) -> str:
        """The test that finds it, or why there is none; the copy is as before."""
        path = self.root / fault.file
        text = path.read_text() if path.is_file() else ""
        if text.count(fault.old) != 1:
            return "no such text"
        times = path.stat()
        path.write_text(text.replace(fault.old, fault.new))
        try:
            code, said = self.test([fault.test], fault.target)
        finally:
            path.write_text(text)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as old as what was compiled of it
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
        if code == 1 and failed:
            return failed[1]
        return "NOT FOUND" if code == 0 else "it hangs" if code is None else f"pytest ends with {code}"


def chosen(names: Sequence[str]) -> list[Fault]:
    unknown = [name for name in names if not any(name in fault.name for fault in FAULTS)]
    if unknown:
        raise app.UsageError(f"no fault is called {unknown[0]!r}")
    return [fault for fault in FAULTS if not names or any(name in fault.name for name in names)]


def main(argv: Sequence[str]) -> None:
    faults, console, cache = chosen(argv[1:]), Console(), compiled.begin()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through what cleans up
    try:
        with tempfile.TemporaryDirectory(prefix="scalerl-faults-") as folder:
            missed = run(faults, Copy(pathlib.Path(folder), pathlib.Path(FLAGS.tree).resolve()), console)
    finally:
        compiled.end(cache)
    found = f"found: {len(faults) - len(missed)} of {len(faults)}"
    sys.exit(f"{found}; not found: {', '.join(missed)}" if missed else print(found))


def run(faults: Sequence[Fault], tree: Copy, console: Console) -> list[str]:
    """The names of those that are not found; prints the table."""
    table, missed = Table("fault", "found by", "seconds", title=f"{len(faults)} faults in {FLAGS.tree}"), []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("the tests without a fault", total=len(faults) + 1)
        for target in sorted({fault.target for fault in faults}):
            tests = [fault.test for fault in faults if fault.target == target]
            code, said = tree.test(tests, target) if tests else (0, "")
            if code != 0:
                sys.exit(f"{said}\nthe tests do not pass without a fault")
        for fault in faults:
            progress.update(task, advance=1, description=fault.name)
            began = time.monotonic()
            found = tree.find(fault)
            table.add_row(fault.name, escape(found), f"{time.monotonic() - began:.0f}")
            if "::" not in found:
                missed.append(fault.name)
                console.print(f"{fault.name}: {found}")
    console.print(table)
    return missed


if __name__ == "__main__":
    app.run(main)
