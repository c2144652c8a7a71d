"""A shell and files: tools whose calls run in a sandbox (sandbox.py), with one folder per episode.

    shell = Shell(files=lambda row: {"main.py": row.extra["program"]})

    class Repair:
        tools = [shell]
        def rows(self, split): ...
        def score(self, row, completion):
            done = completion.opened(shell).run("python hidden.py", files={"hidden.py": row.extra["tests"]})
            return done.exit_code == 0

Files persist from call to call, and so do the working directory and exported variables, which each command saves when
it exits. Processes do not: those that a command started are killed when it ends, so no code of the policy runs while
its files are scored, and no command can break the shell of the next one.

The folder is memory of the sandbox (a tmpfs in its own mount namespace). The kernel kills the sandbox with the process
that started it, however that ends (PR_SET_PDEATHSIG), and the folder vanishes with it: no cleanup is needed.

Limits are those of config.environment.sandbox: `seconds` is the default for one command, `all_seconds` the limit of all
calls of an episode together (at most half of turn_seconds, so that no policy can make its episode fail), `output_bytes`
that of the files. A command's output is read to its end; the middle beyond environment.tool_characters is left out.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scalerl_jax.config import EnvironmentConfig
from scalerl_jax.environments import code, sandbox
from scalerl_jax.environments.base import Row
from scalerl_jax.environments.sandbox_command import COMMAND_FOLDERS, PYTHON_FOLDER
from scalerl_jax.environments.tools import schema_of

_STATUS_CHARACTERS = 200  # of a result, besides the command's output
_PATH = "/usr/bin:/bin"


class Shell:
    """The toolset: shell, read_file, write_file, edit_file.

    Args:
        files: {path: text} that an episode begins with, or a function of its row that returns them.
        folders: absolute paths of folders of this machine that commands may read: packages, compilers, data.
    """

    def __init__(
        self, files: Mapping[str, str] | Callable[[Row], Mapping[str, str]] | None = None, *,
        folders: Sequence[str] = (),
    ):  # fmt: skip
        self._files, self._folders = files or {}, tuple(folders)
        self._config = EnvironmentConfig()

    def prepare(self, config: EnvironmentConfig) -> None:
        """Raises ValueError, one line, if such a sandbox cannot be made on this machine."""
        code.prepare(config)
        for folder in self._folders:
            if not os.path.isabs(folder) or not os.path.isdir(folder):
                raise ValueError(f"Shell: folders: {folder} is not the absolute path of a folder that is there")
        if shutil.which("sh", path=_PATH) is None:
            raise ValueError(f"Shell: there is no sh in {_PATH}")
        self._config = config
        with contextlib.closing(OpenShell(config, self._folders)) as opened:
            try:
                done = opened.run("true", seconds=_longest(config))
            except sandbox.SandboxLost as lost:
                raise ValueError(str(lost)) from None
        if done.kind != "ended":
            raise ValueError(f"Shell: the sandbox does not work here: {done.why}")

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        opened = OpenShell(self._config, self._folders)
        return [schema_of(tool) for tool in (opened.shell, opened.read_file, opened.write_file, opened.edit_file)]

    def open(self, row: Row) -> "OpenShell":
        """Opens the tools. Raises ValueError if the files cannot be written, SandboxLost if no sandbox can start."""
        files = self._files(row) if callable(self._files) else self._files
        opened = OpenShell(self._config, self._folders)
        done = opened.run("true", files=files, seconds=_longest(self._config))
        if done.kind != "ended":
            opened.close()
            raise ValueError(f"its files cannot be written: {done.why}")
        return opened


class OpenShell:
    """The tools of one episode; their docstrings are shown to the policy."""

    def __init__(self, config: EnvironmentConfig, folders: Sequence[str]):
        limits = config.sandbox
        self._seconds, self._left = limits.seconds, min(limits.all_seconds, config.turn_seconds / 2)
        self._shown = max(1, config.tool_characters // 2, config.tool_characters - _STATUS_CHARACTERS)
        self._sandbox = sandbox.Sandbox(
            _INSIDE,
            dataclasses.replace(sandbox.Limits.of(limits), seconds=_longest(config)),
            function="call",
            names="import itertools, os, sys",
            keeps_files=True,
            folders=[folder for folder in (*COMMAND_FOLDERS, *folders) if os.path.isdir(folder)],
        )
        self._lost = ""  # why the files are gone

    def run(
        self, command: str, *, files: Mapping[str, str] | None = None, seconds: float | None = None
    ) -> sandbox.ProgramResult:
        """Runs a command of the environment, for a score: in the folder, with the initial variables and a HOME that
        cannot be written.

        Args:
            files: {path: text} to write first.
            seconds: wall-clock limit of each of the two; at most the larger of the sandbox's seconds and all_seconds.

        If the command executes files of the policy, its output and exit code are as untrusted as they are.
        """
        seconds = self._seconds if seconds is None else seconds
        if files:
            written = self._run(["write", files], seconds=seconds, shown=sandbox.SHOWN_BYTES)
            if written.kind != "ended":
                return written
        return self._run(["shell", _shell(), command, False], seconds=seconds, shown=sandbox.SHOWN_BYTES)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return getattr(self, name)(**arguments)

    def close(self) -> None:
        self._sandbox.close()

    def shell(self, command: str, seconds: float | None = None) -> str:
        """Runs a command in a shell and returns its exit status and output. There is no network.
        Files, the working directory and exported variables stay; processes that it leaves are killed.

        Args:
            command: The command, several lines if need be.
            seconds: Time after which it is killed.
        """
        done = self._spend(["shell", _shell(), command, True], seconds)
        if done.exit_code is None:
            status = f"killed: {done.why}{' (and the files are gone)' if self._lost else ''}"
        else:
            status = f"exit status {done.exit_code}" if done.exit_code >= 0 else done.why
        return f"{status}\n{_text(done)}"

    def read_file(self, path: str, first_line: int = 1, last_line: int | None = None) -> str:
        """Reads a text file.

        Args:
            path: Path of the file.
            first_line: Number of the first line to read, from 1.
            last_line: Number of the last line to read; the last one of the file if it is left out.
        """
        return self._file(["read", path, first_line, last_line])

    def write_file(self, path: str, content: str) -> str:
        """Writes a text file, with the folders above it. What it held before is replaced.

        Args:
            path: Path of the file.
            content: All that it is to hold.
        """
        self._file(["write", {path: content}])
        return f"{path} is written"

    def edit_file(self, path: str, old: str, new: str) -> str:
        """Replaces a text that is in a file exactly once.

        Args:
            path: Path of the file.
            old: The text to replace.
            new: The text that replaces it.
        """
        self._file(["edit", path, old, new])
        return f"{path} is changed"

    def _file(self, question: list[Any]) -> str:
        done = self._spend(question)
        if done.kind != "ended":
            raise ValueError(done.why.removesuffix(" (exit code 1)"))
        return _text(done)

    def _spend(self, question: list[Any], seconds: float | None = None) -> sandbox.ProgramResult:
        """Runs a call of the policy, within the episode's remaining time."""
        seconds = self._seconds if seconds is None else seconds
        if not seconds > 0:
            raise ValueError(f"seconds is {seconds}, not above 0")
        if self._lost:
            raise ValueError(f"the files are gone: {self._lost}")
        if self._left <= 0:
            raise ValueError("the calls of this episode have used up their time")
        began = time.monotonic()
        done = self._run(question, seconds=min(seconds, self._left), shown=self._shown)
        self._left -= time.monotonic() - began
        return done

    def _run(self, question: list[Any], *, seconds: float, shown: int) -> sandbox.ProgramResult:
        if self._lost:
            return sandbox.ProgramResult("crashed", b"", b"", f"the files are gone: {self._lost}")
        done = self._sandbox.run(json.dumps(question).encode(), seconds=seconds, shown=shown)
        if not self._sandbox.running:
            self._lost = done.why
        return done


def _longest(config: EnvironmentConfig) -> float:
    """Limit of a call that is not the policy's: a sandbox starts slowly on a busy machine."""
    return max(config.sandbox.seconds, config.sandbox.all_seconds)


def _shell() -> str:
    return shutil.which("bash", path=_PATH) or shutil.which("sh", path=_PATH) or "/bin/sh"


def _text(done: sandbox.ProgramResult) -> str:
    return done.output.decode(errors="replace")


# Runs in the sandbox, as its user. The policy may change EXPORTED, so it is only read for the policy's own commands.
_INSIDE = f"""
FOLDER, EXPORTED = "/tmp/work", "/tmp/.exported"
# On one line, for the line numbers of errors.
KEPT = (
    f'[ -f {{EXPORTED}} ] && . {{EXPORTED}} && {{{{ cd -- "$PWD" 2>/dev/null || cd {{FOLDER}}; }}}}; '
    f"trap 'export -p > {{EXPORTED}}' EXIT; "
    'eval "$1"'
)

def call(kind, *arguments):
    os.makedirs(FOLDER, exist_ok=True)
    os.chdir(FOLDER)
    try:
        globals()[kind](*arguments)
    except OSError as error:
        sys.exit(f"{{error.strerror}}: {{error.filename}}")

def shell(program, command, is_kept):
    os.dup2(1, 2)
    variables = {{**os.environ, "PATH": "{PYTHON_FOLDER}:{_PATH}", "PYTHONDONTWRITEBYTECODE": "1"}}
    if not is_kept:  # programs read settings from HOME, Python even code, and the policy may write in its own
        variables |= {{"HOME": "/", "PYTHONNOUSERSITE": "1"}}
    name = os.path.basename(program)
    os.execve(program, [name, "-c", KEPT if is_kept else 'eval "$1"', name, command], variables)

def inside(path):
    found = os.path.realpath(path)
    if not found.startswith(FOLDER + "/"):
        sys.exit(f"{{path}} is not below {{FOLDER}}")
    return found

def read(path, first, last):
    with open(inside(path), "rb") as file:
        left = memoryview(b"".join(itertools.islice(file, first - 1, last)))
    while left:
        left = left[os.write(1, left):]

def write(files):
    for path, content in files.items():
        path = inside(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", errors="surrogateescape", newline="") as file:
            file.write(content)

def edit(path, old, new):
    with open(inside(path), errors="surrogateescape", newline="") as file:
        content = file.read()
    if content.count(old) != 1:
        sys.exit(f"{{path}} has the old text {{content.count(old)}} times, not once")
    write({{path: content.replace(old, new)}})
"""
