"""docs/run_page.py: what it takes a page to say, and when it says that the page holds."""

import io
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

from docs import run_page
from docs.run_page import Command, File, PageError, missing, parse
from tests.support.paths import ROOT
from tests.support.processes import SECONDS
from tests.support.waiting import eventually

VENV = pathlib.Path(sys.prefix)
RUNNER = str(pathlib.Path(ROOT) / "docs" / "run_page.py")


def page(tmp_path: pathlib.Path, text: str) -> pathlib.Path:
    path = tmp_path / "page.md"
    path.write_text(textwrap.dedent(text))
    return path


def ran(tmp_path: pathlib.Path, text: str, **options) -> tuple[int, str]:
    terminal = io.StringIO()
    count = run_page.run_page(page(tmp_path, text), tmp_path / "run", venv=VENV, terminal=terminal, **options)
    return count, terminal.getvalue()


def test_the_steps_of_a_page() -> None:
    text = """\
# Page

```python title="deep/my_rewards.py" linenums="1"
    x = 1
```

```python
illustration
```

## Now

```sh
echo '# no heading' && echo \\
    1
```

```text
# no heading
```

```sh
echo 2
```

More words.

```text
not what that prints
```

* In a list:

    <!-- not run: no such machine here -->
    ```sh
    reboot
    ```

    ```text
    gone
    ```

````md title="own.md"
```sh
inside
```
````
"""
    assert parse(text) == [
        File(3, "deep/my_rewards.py", "    x = 1\n"),
        Command(13, "Now", "echo '# no heading' && echo \\\n    1\n", "# no heading\n", None),
        Command(22, "Now", "echo 2\n", None, None),
        Command(35, "Now", "reboot\n", "gone\n", "no such machine here"),
        File(43, "own.md", "```sh\ninside\n```\n"),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!-- not run -->\n```sh\nx\n```\n", "line 1: a command that is not run needs a reason"),
        ("<!-- not run:   -->\n```sh\nx\n```\n", "line 1: a command that is not run needs a reason"),
        ("<!-- not run: far away -->\n\n```sh\nx\n```\n", 'line 1: "not run" stands on the line before a command'),
        ("```bash\nx\n```\n", "line 1: ```bash is not run; a command is ```sh"),
        ("\n```sh\nx\n", "line 2: the block that begins here has no end"),
        ('```text title="/etc/x"\n```\n', 'line 1: title="/etc/x" is no file in the folder'),
        ('```text title="a/../../x"\n```\n', "is no file in the folder"),
        ('```text title="configs/x.py"\n```\n', "is no file in the folder"),  # a link into the clone
    ],
)
def test_what_is_no_page(text: str, says: str) -> None:
    with pytest.raises(PageError) as error:
        parse(text)
    assert says in str(error.value)


def test_what_counts_as_printed() -> None:
    shown = "setup: installing 77 packages\n...\nstep 6: rate 0.152 (32 prompts)\nstaleness   mean 1.48, ...\n"
    same = "setup: installing 9 packages\nx\nstep 6: rate 0.9 (1 prompts)\nstaleness  mean 2, most 3"
    assert not missing(same, shown)
    assert missing("setup: installing 9 packages\nstep 6: rate 0.9", shown)
    assert missing("2 rows: 2 correct (100.0%)", "2 rows: 1 correct (50.0%)", (0.9, 0.0))
    assert missing("A 0.630", "A 0.606", (0.003, 0.02)) == ["A 0.606"]
    assert not missing("A 0.607", "A 0.606", (0.003, 0.02))
    assert not missing("train 853 tok/s", "train 9.5k tok/s")
    assert not missing("9,480 tok/s", "9.5k tok/s", (0.0, 0.01))
    assert missing("9.5M tok/s", "9.5k tok/s", (0.0, 0.01))
    assert missing("b\na", "a\nb") == ["b"]
    assert missing("one\n", "one\none\n") == ["one"]
    assert not missing("│ rate   │ 0.5 │\n", "│ rate │ 0.75 │\n")


def test_a_page_is_run_in_its_order(tmp_path: pathlib.Path) -> None:
    text = """\
    ```json title="rows/a.json"
    {"port": 8500}
    ```

    ```sh
    cat rows/a.json; ls -A; python -c 'import sys, docs.run_page; print(sys.prefix)'
    ls configs/quickstart.py
    echo 1 >kept
    ```

    ```text
    {"port": 1}
    configs
    ...
    configs/quickstart.py
    ```

    <!-- not run: it would fail -->
    ```sh
    false
    ```

    ```text title="rows/a.json"
    other
    ```

    ```sh
    cat kept rows/a.json >&2
    ```

    ```text
    1
    other
    ```
    """
    count, printed = ran(tmp_path, text, replace={"8500": "86"})
    assert count == 2
    assert '{"port": 86}' in printed and f"{tmp_path}/run/.venv\n" in printed
    assert ": wrote rows/a.json\n" in printed and ": not run: it would fail\n" in printed
    assert sorted(os.listdir(tmp_path / "run")) == [".venv", "configs", "kept", "rows"]


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ("echo a\nfalse\necho b", ":3: exit code 1"),
        ("echo a | grep b | cat", ":3: exit code 1"),  # pipefail
        ("echo $NOBODY_SET_THIS", ":3: exit code 1"),
        ("kill -9 $$", ":3: exit code -9"),
        ("echo b", ":3: did not print, or not in this order: a"),
        ("echo a; sleep 600", ":3: not over after 0.5 s"),
    ],
)
def test_a_page_that_does_not_hold(tmp_path: pathlib.Path, block: str, says: str) -> None:
    text = f"# Page\n\n```sh\n{block}\n```\n\n```text\na\n```\n\n```sh\necho >later\n```\n"
    with pytest.raises(PageError) as error:
        ran(tmp_path, text, block_seconds=0.5 if "not over" in says else SECONDS)
    assert says in str(error.value)
    assert not (tmp_path / "run" / "later").exists()


def test_numbers_are_compared_where_they_are_to_be_near(tmp_path: pathlib.Path) -> None:
    text = "## 1. Page\n\n```sh\necho pass 0.5\n```\n\n```text\npass 0.9\n```\n"
    assert ran(tmp_path, text)[0] == 1
    (tmp_path / "near").mkdir()
    with pytest.raises(PageError, match=r"pass 0\.9"):
        ran(tmp_path / "near", text, near=lambda command: (0.1, 0.0) if command.heading == "1. Page" else None)


def test_what_a_command_leaves_behind_is_ended_at_the_end(tmp_path: pathlib.Path) -> None:
    """And neither keeps its command from ending nor the commands after it from finding it there."""
    text = """\
    ```sh
    sleep 600 & echo $! >background
    (trap '' TERM; echo $BASHPID >stubborn; exec sleep 600) &
    echo begun
    ```

    ```text
    begun
    ```

    ```sh
    while ! [ -s stubborn ]; do sleep 0.1; done
    kill -0 $(cat background) && echo still there
    ```

    ```text
    still there
    ```
    """
    seconds, run_page._LEFT_SECONDS = run_page._LEFT_SECONDS, 0.3
    try:
        ran(tmp_path, text)
    finally:
        run_page._LEFT_SECONDS = seconds
    for name in ("background", "stubborn"):
        number = int((tmp_path / "run" / name).read_text())
        eventually(lambda number=number: not alive(number), f"{name} to end")


def alive(number: int) -> bool:
    try:
        stat = pathlib.Path(f"/proc/{number}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


# ---- the command


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, RUNNER, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_the_command_says_how_it_went(tmp_path: pathlib.Path) -> None:
    path = page(tmp_path, "```sh\necho said\n```\n\n```text\nsaid\n```\n")
    done = command(str(path), f"--workdir={tmp_path}/run", f"--venv={VENV}")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.splitlines()[:-1] == [f"=== {path}:1", "echo said", "---", "said"]
    assert done.stdout.splitlines()[-1].startswith(f"=== {path}: 1 command ran and printed what the page shows (")
    again = command(str(path), f"--workdir={tmp_path}/other", f"--venv={VENV}", "--replace=echo said=echo sad")
    assert (again.returncode, again.stderr) == (1, f"error: {path}:1: did not print, or not in this order: said\n")


def test_mistakes_are_one_line(tmp_path: pathlib.Path) -> None:
    path = page(tmp_path, "```sh\ntrue\n```\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "words.md").write_text("No command.\n")
    for arguments, says in [
        ([f"{tmp_path}/none.md", f"--workdir={tmp_path}/run"], "none.md: no such page"),
        ([f"{tmp_path}/words.md", f"--workdir={tmp_path}/run"], "words.md: no command to be run"),
        ([str(path), f"--workdir={tmp_path}/full"], "full: not an empty folder"),
        ([str(path), f"--workdir={path}"], "page.md: not an empty folder"),
        ([str(path), f"--workdir={tmp_path}/run", f"--venv={tmp_path}/venv"], "no environment; `make setup` makes one"),
    ]:
        done = command(f"--venv={VENV}", *arguments)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and says in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_runner_that_is_stopped_ends_its_commands(tmp_path: pathlib.Path, number: signal.Signals) -> None:
    path = page(tmp_path, "```sh\nsleep 1d &\necho $! >background.new; mv background.new background\nsleep 1d\n```\n")
    runner = subprocess.Popen(
        [sys.executable, RUNNER, str(path), f"--workdir={tmp_path}/run", f"--venv={VENV}"], stdout=subprocess.DEVNULL
    )
    background = tmp_path / "run" / "background"
    eventually(background.exists, "the command to begin", seconds=SECONDS)
    runner.send_signal(number)
    assert runner.wait() == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]  # long before the commands would end
    eventually(lambda: not alive(int(background.read_text())), "what it had started to end")


def test_a_signal_while_a_command_starts_comes_after_it_is_known() -> None:
    """Between the start of a process and the list that it is ended by, nothing may end the runner."""
    known = []

    def start() -> None:
        with run_page._signals_later():
            signal.raise_signal(signal.SIGINT)
            known.append("process")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert known == ["process"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
