"""Runs the tests of one target: forks of one process that has the imports, each with a pytest of a few files.

    python -m tests.runner TARGET [FILES...] [--workers=4] [--order=SEED] [--keep_durations]

TARGET is a row of TARGETS, which says what its tests are marked. Files of a folder share a fork, and what takes longest
comes first; how long they took is in durations.json, and --keep_durations rewrites what it has of them. --order
shuffles files, and the tests of each. A progress line tells how far it is; a failure is shown when its fork ends. The
last lines say what was left out and which command runs it, and how many tests passed.
"""

import argparse
import dataclasses
import gc
import json
import os
import pathlib
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support import compiled, fork_server
from tests.support.paths import ROOT

TARGETS = {
    # what of the marks, and where the target's files are
    "test": ("not slow and not long", ["tests"]),
    "test-full": ("slow and not long", ["tests"]),
    "test-long": ("long", ["tests"]),
}
VLLM = ["tests/vllm", "tests/rollout_server/test_conformance.py", "tests/rollout_server/test_conformance_weights.py"]
TARGETS |= {f"{name}-vllm": (marks, VLLM) for name, (marks, _) in TARGETS.items()}
TARGETS["test-adapters"] = ("slow", ["tests/environments/test_real_adapters.py", "tests/gateway/test_other_clients.py"])
TARGETS["test-tinker"] = ("slow", ["tests/tinker/test_cookbook.py"])

FITS = ("tests/report", "tests/run", "tests/scaling", "tests/study")  # folders whose computing is fits
DURATIONS = ROOT / "tests" / "durations.json"
FORK_SECONDS = 80.0  # files of a folder share a fork up to so many: what one has traced, another need not trace again
UNKNOWN_SECONDS = 2.0  # that a file which is not in durations.json is taken to need
LINE_EVERY = 30.0  # seconds between progress lines where they do not replace each other
_CLOCK = time.monotonic


@dataclasses.dataclass
class Outcome:
    """What a fork has written of its tests."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)  # passed, failed, skipped
    left_out: Counter[str] = dataclasses.field(default_factory=Counter)  # of the files that were collected, by mark
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)  # by reason
    failures: list[str] = dataclasses.field(default_factory=list)
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # file: CPU, wall
    tests: dict[str, float] = dataclasses.field(default_factory=dict)  # CPU seconds
    running: str = ""

    def read(self, path: pathlib.Path) -> None:
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            if not line.endswith("\n"):  # still being written
                break
            row = json.loads(line)
            if "begins" in row:
                self.running = row["begins"]
            elif "left_out" in row:
                self.left_out.update(row["left_out"])
            else:
                self.running = ""
                self.counts[row["outcome"]] += 1
                if row["outcome"] == "skipped":
                    self.skipped[row["reason"]] += 1
                if row["outcome"] == "failed":
                    self.failures.append(row["test"])
                spent = self.seconds.setdefault(row["test"].partition("::")[0], [0.0, 0.0])
                self.tests[row["test"]] = row["cpu"]
                spent[0] += row["cpu"]
                spent[1] += row["wall"]


class Recorder:
    """A plug-in of pytest, in a fork: a JSON line for each test, when it begins and when it has ended."""

    def __init__(self, path: pathlib.Path, order: int | None):
        self._path = path
        self._order = order
        self._outcome, self._reason = "passed", ""

    def _write(self, **row: Any) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(row) + "\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._order is not None:
            files = list(dict.fromkeys(item.path for item in items))
            rng = random.Random(f"{self._order} {files[:1]}")
            rng.shuffle(files)
            place = {path: number for number, path in enumerate(files)}
            rng.shuffle(items)
            items.sort(key=lambda item: place[item.path])

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        marks = [next((m for m in ("long", "slow") if item.get_closest_marker(m)), "quick") for item in items]
        self._write(left_out=Counter(marks))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        name = f"{os.path.relpath(item.path, ROOT)}::{item.nodeid.partition('::')[2]}"
        self._write(begins=name)
        self._outcome, self._reason = "passed", ""
        cpu, wall = _cpu_seconds(), _CLOCK()
        result = yield
        self._write(
            test=name, outcome=self._outcome, reason=self._reason,
            cpu=round(_cpu_seconds() - cpu, 3), wall=round(_CLOCK() - wall, 3),
        )  # fmt: skip
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._outcome = "failed"
        elif report.skipped and self._outcome != "failed":
            self._outcome = "skipped"
            self._reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _cpu_seconds() -> float:
    """Of this process, of those that it started and waited for, and of those that the fork server started for it."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + fork_server.cpu_seconds()


def _expected(files: Sequence[str], known: dict[str, list[float]]) -> float:
    """Seconds that the files take together, as durations.json has it."""
    return sum(known.get(file, [0, UNKNOWN_SECONDS])[1] for file in files)


class Run:
    """The forks of one target, at most `workers` at a time."""

    def __init__(self, target: str, batches: list[list[str]], known: dict[str, list[float]], arguments: Any):
        self.outcome, self.died = Outcome(), list[str]()
        self._target, self._waiting, self._known, self._arguments = target, batches, known, arguments
        self._expected = sum(_expected(files, known) for files in batches)
        self._done = 0.0
        self._running: dict[pathlib.Path, list[str]] = {}  # folder of a fork: its files
        self._begun = self._shown = _CLOCK()
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="scalerl-tests-"))
        self._server = fork_server.ForkServer(str(self._folder / "socket"))
        os.environ[fork_server.ADDRESS] = str(self._folder / "socket")

    def run(self) -> bool:
        """Whether all tests passed."""
        try:
            while self._waiting or self._running:
                while self._waiting and len(self._running) < self._arguments.workers:
                    self._begin(self._waiting.pop(0))
                self._server.poll(1.0)
                self._show()
        except KeyboardInterrupt:  # the forks have it too, and tidy up
            self._waiting.clear()
            while self._running:
                self._server.poll(None)
            raise
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        return not (self.outcome.failures or self.died)

    def _begin(self, files: list[str]) -> None:
        folder = self._folder / files[0].replace(os.sep, "-").removesuffix(".py")
        folder.mkdir()
        self._running[folder] = files
        self._server.fork(
            lambda: _test(self._target, files, folder, self._arguments.order),
            lambda code, _: self._ended(files, folder, code),
        )

    def _ended(self, files: list[str], folder: pathlib.Path, code: int) -> None:
        del self._running[folder]
        self._done += _expected(files, self._known)
        before = len(self.outcome.failures)
        self.outcome.read(folder / "record.jsonl")
        if code not in (0, 1, pytest.ExitCode.NO_TESTS_COLLECTED) or (
            code == 1 and before == len(self.outcome.failures)
        ):
            self.died.append(f"{self.outcome.running or ' '.join(files)}: ended with code {code}")
        if code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            self._clear_line()
            print((folder / "output").read_text(errors="replace"), flush=True)
        self.outcome.running = ""
        shutil.rmtree(folder, ignore_errors=True)

    def _show(self) -> None:
        now = _CLOCK()
        if now - self._shown < (1.0 if sys.stdout.isatty() else LINE_EVERY):
            return
        self._shown = now
        so_far = Outcome(counts=Counter(self.outcome.counts))
        done = self._done
        for folder, files in self._running.items():
            before = Outcome()
            before.read(folder / "record.jsonl")
            so_far.counts += before.counts
            done += min(sum(wall for _, wall in before.seconds.values()), _expected(files, self._known))
        line = f"{self._target}: {done / max(self._expected, 1e-9):4.0%} in {_minutes(now - self._begun)}"
        line += f", {so_far.counts['passed']:,} passed" + f", {so_far.counts['failed']} failed" * bool(
            so_far.counts["failed"]
        )
        print(f"\r{line:<100}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)

    def _clear_line(self) -> None:
        if sys.stdout.isatty():
            print("\r" + " " * 100, end="\r")

    def tell(self) -> None:
        self._clear_line()
        outcome = self.outcome
        for reason, count in outcome.skipped.most_common():
            print(f"skipped: {count} ({reason.removeprefix('Skipped: ')})")
        others = {"quick": "make test", "slow": "make test-full", "long": "make test-long"}
        left_out = [f"{outcome.left_out[m]} ({command})" for m, command in others.items() if outcome.left_out[m]]
        if left_out:
            print(f"left out of these files: {', '.join(left_out)}")
        for line in (*outcome.failures, *self.died):
            print(f"FAILED {line}")
        longest = sorted(outcome.tests.items(), key=lambda row: -row[1])[: 100 if self._arguments.keep_durations else 5]
        print("most CPU: " + ",\n          ".join(f"{seconds:.0f} s {test}" for test, seconds in longest))
        counts = outcome.counts
        print(f"in {_minutes(_CLOCK() - self._begun)} with {self._arguments.workers} workers")
        print(
            f"{self._target}: {counts['passed']} passed, {counts['failed'] + len(self.died)} failed, "
            f"{counts['skipped']} skipped",
            flush=True,
        )


def _test(target: str, files: list[str], folder: pathlib.Path, order: int | None) -> None:
    """In a fork: pytest of these files."""
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    gc.set_threshold(500_000, 50, 100)  # tracing makes many objects that stay
    if files[0].startswith(FITS):
        os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(compiled.XLA_FLAGS, compiled.FITS_XLA_FLAGS)
    options = ["-q", "-rfE", "--no-header", "--disable-warnings"]
    options += [f"-pno:{name}" for name in ("cacheprovider", "anyio", "platformdirs")]  # unused, and long to import
    options += [f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}", f"--basetemp={folder / 'tmp'}"]
    options += ["-m", TARGETS[target][0]]
    sys.argv = ["pytest", *options, *files]
    code = pytest.main([*options, *files], plugins=[Recorder(folder / "record.jsonl", order)])
    fork_server.end(int(code), join_threads=False)  # a test that failed may have left one that waits for ever


def files_of(target: str, wanted: Sequence[str]) -> list[str]:
    """Test files, as paths from the root. A target of slow tests needs only files with such a mark in them."""
    marks, places = TARGETS[target]
    found, other = list[str](), "tests/vllm/" if places == ["tests"] and not wanted else "-"
    for place in wanted or places:
        path = ROOT / place
        found += [os.path.relpath(p, ROOT) for p in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))]
    found = [file for file in found if not file.startswith(other)]
    if marks == TARGETS["test"][0]:
        return found

    def marks_some(path: pathlib.Path) -> bool:
        return path.exists() and re.search(r"\bmark\.(slow|long)\b", path.read_text(encoding="utf-8")) is not None

    return [file for file in found if marks_some(ROOT / file) or marks_some((ROOT / file).with_name("conftest.py"))]


def batches_of(files: list[str], known: dict[str, list[float]], order: int | None) -> list[list[str]]:
    """Files of one folder that share a fork; what takes longest comes first."""
    batches = list[list[str]]()
    for file in sorted(files, key=lambda file: (os.path.dirname(file), -_expected([file], known))):
        last = batches[-1] if batches else [""]
        full = _expected([*last, file], known) > FORK_SECONDS
        if full or os.path.dirname(last[0]) != os.path.dirname(file):
            batches.append([])
        batches[-1].append(file)
    if order is None:
        return sorted(batches, key=lambda batch: -_expected(batch, known))
    random.Random(order).shuffle(batches)
    return batches


def durations() -> dict[str, dict[str, list[float]]]:
    """target: file: [CPU seconds, seconds], as they were measured last."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def keep(target: str, seconds: dict[str, list[float]], *, all_of_it: bool) -> None:
    """Rewrites the target's part of durations.json, whole or not at all. all_of_it: other files of it are gone."""
    rows = durations()
    found = {file: [round(cpu, 1), round(wall, 1)] for file, (cpu, wall) in seconds.items()}
    rows[target] = found if all_of_it else rows.get(target, {}) | found
    lines = []
    for name in sorted(rows):
        files = ",\n".join(f"    {json.dumps(file)}: {json.dumps(spent)}" for file, spent in sorted(rows[name].items()))
        lines.append(f'  "{name}": {{\n{files}\n  }}')
    part = DURATIONS.with_suffix(".part")
    part.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    os.replace(part, DURATIONS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.runner", description=__doc__.partition("\n")[0])
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("files", nargs="*", help="files or folders instead of the target's")
    parser.add_argument("--workers", type=int, default=4, help="forks at a time")
    parser.add_argument("--order", type=int, help="a seed: files and tests in a random order")
    parser.add_argument("--keep_durations", action="store_true", help="rewrite durations.json")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != fork_server.HASH_SEED:
        os.environ["PYTHONHASHSEED"] = fork_server.HASH_SEED
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        for name in ("NPROC", "OMP_NUM_THREADS"):  # JAX's threads; torch's and numpy's, which spin while they wait
            os.environ.setdefault(name, str(max(1, cores // arguments.workers)))
        os.execv(sys.executable, [sys.executable, "-m", "tests.runner", *sys.argv[1:]])
    known = durations().get(arguments.target, {})
    folder = compiled.begin()
    os.environ["XLA_FLAGS"] = f"{compiled.XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()
    try:
        fork_server.import_all(*fork_server.OF_TRANSFORMERS)
        files = files_of(arguments.target, arguments.files)
        run = Run(arguments.target, batches_of(files, known, arguments.order), known, arguments)
        passed = run.run()
        run.tell()
        if arguments.keep_durations:
            keep(arguments.target, run.outcome.seconds, all_of_it=not arguments.files)
    finally:
        compiled.end(folder)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
