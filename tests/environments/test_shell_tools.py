"""A shell and files: what stays from call to call, what is held, and what is left when an episode has ended."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tracemalloc
from contextlib import closing

import pytest

from scalerl_jax.config import EnvironmentConfig
from scalerl_jax.environments import Completion, Row, Score
from scalerl_jax.environments.base import ScorerError
from scalerl_jax.environments.load import make_environment
from scalerl_jax.environments.sandbox import ENTRIES, check
from scalerl_jax.environments.shell_tools import Shell
from scalerl_jax.environments.tools import ToolEpisode, Tools
from tests.environments.sandboxes import SMALL, needs_bubblewrap, others
from tests.environments.test_episodes import Player, config_of, pool_of
from tests.support.episodes import call, with_calls
from tests.support.paths import ROOT
from tests.support.waiting import eventually

pytest.importorskip("transformers")
FILES = {"main.py": "def double(n):\n    return n + n + 1\n"}
HIDDEN = "import main\nprint([main.double(n) for n in range(3)])\n"
AGENT = """
from scalerl_jax.environments.shell_tools import Shell

shell = Shell(files=lambda row: {"question.txt": row.text})

class Agent:
    tools = [shell]
    def rows(self, split):
        raise AssertionError("the rows are read")
    def score(self, row, completion):
        return completion.opened(shell).run("grep -q 42 answer.txt").exit_code == 0
"""


def config(**limits) -> EnvironmentConfig:
    return EnvironmentConfig(sandbox=dataclasses.replace(SMALL, **limits), turn_seconds=1000.0, tool_characters=1000)


class Agent:
    """Calls the tools of an episode as a policy would."""

    def __init__(self, shell: Shell, settings: EnvironmentConfig | None = None):
        settings = settings or config()

        def score(row: Row, completion: Completion) -> Score:
            done = completion.opened(shell).run("python hidden.py", files={"hidden.py": HIDDEN})
            return Score(0.0, (done.exit_code, done.output) == (0, b"[0, 2, 4]\n"), why=done.output.decode())

        tools = Tools([shell], settings)
        self.episode = ToolEpisode(Row("q", extra={"n": 7}), tools, score=score, characters=settings.tool_characters)

    def __call__(self, name: str, /, **arguments) -> str:
        step = self.episode.step(with_calls(call(name, **arguments)))
        assert not step.done
        return step.messages[0]["content"]

    def sh(self, command: str, **arguments) -> str:
        return self("shell", command=command, **arguments)

    def answers(self) -> bool | None:
        return self.episode.step(Completion("done")).correct


@pytest.fixture
def begin():
    with contextlib.ExitStack() as ends:

        def begin(*arguments) -> Agent:
            agent = Agent(*arguments)
            ends.callback(agent.episode.close)
            return agent

        yield begin


@needs_bubblewrap
class TestCalls:
    def test_files_folder_and_variables_stay(self, begin):
        agent = begin(Shell(FILES))
        assert agent.sh("pwd; ls; echo wrong >&2; (exit 3)") == "exit status 3\n/tmp/work\nmain.py\nwrong\n"
        assert agent.sh("mkdir 'a b'; cd 'a b'; export X=$'1 \"\n2'; Y=3; exit 4") == "exit status 4\n"
        assert agent.sh('pwd; echo "$X$Y"') == 'exit status 0\n/tmp/work/a b\n1 "\n2\n'
        assert agent.sh("rmdir '../a b'; cd ..") == "exit status 0\n"
        assert agent.sh("echo $(pwd) $0; kill -9 $$") == "ended by SIGKILL\n/tmp/work bash\n"
        assert agent.sh("echo 'no end").startswith("exit status 2\n")
        assert agent.sh("python -c 'import sys; print(sys.stdin.read())'") == "exit status 0\n\n"

    def test_a_sandbox_may_begin_more_slowly_than_a_call_may_take(self, begin):
        agent = begin(Shell(FILES), config(seconds=1e-3))
        assert agent.sh("ls", seconds=100) == "exit status 0\nmain.py\n"

    def test_files_are_read_written_and_edited(self, begin):
        agent = begin(Shell(lambda row: {"deep/n.txt": f"{row.extra['n']}\n"}))
        assert agent("read_file", path="deep/n.txt") == "7\n"
        assert agent("write_file", path="a/b.txt", content="é\r\nb\nc") == "a/b.txt is written"
        assert agent("read_file", path="/tmp/work/a/b.txt", first_line=2, last_line=2) == "b\n"
        assert agent("edit_file", path="a/b.txt", old="b\nc", new="$&\n") == "a/b.txt is changed"
        assert agent.sh("cat a/b.txt") == "exit status 0\né\r\n$&\n"
        assert "has the old text 0 times, not once" in agent("edit_file", path="a/b.txt", old="c", new="d")
        assert "has the old text 2 times, not once" in agent("edit_file", path="a/b.txt", old="\n", new="d")
        assert agent("read_file", path="none").startswith("error: ValueError: No such file or directory")
        assert agent("read_file", path="a").startswith("error: ValueError: Is a directory")
        assert agent("read_file", path=5).startswith("error: ValueError: TypeError")
        assert agent("write_file", path="x").startswith("error: TypeError")
        agent.sh("printf 'a\\377b' > bytes")
        agent("edit_file", path="bytes", old="b", new="c")
        assert agent("read_file", path="bytes") == "a\N{REPLACEMENT CHARACTER}c"
        assert agent.sh("od -An -c bytes") == "exit status 0\n   a 377   c\n"

    def test_paths_stay_in_the_folder(self, begin, tmp_path):
        (tmp_path / "secret").write_text("hunter2")
        agent = begin(Shell())
        agent.sh(f"ln -s /etc/passwd p; ln -s / root; ln -s {tmp_path} s; ln -s /tmp/out out")
        paths = ("../out", "/etc/passwd", "p", "root/etc/passwd", f"{tmp_path}/secret", "s/secret", "out")
        for path in paths:
            assert "is not below /tmp/work" in agent("read_file", path=path)
            assert "is not below /tmp/work" in agent("write_file", path=path, content="x")
        assert agent.sh(f"ls /tmp; cat /etc/passwd {tmp_path}/secret 2>/dev/null") == "exit status 1\nwork\n"
        assert os.listdir(tmp_path) == ["secret"] and (tmp_path / "secret").read_text() == "hunter2"

    def test_episodes_are_apart_and_leave_nothing(self, begin):
        before, shell = others(), Shell()
        first, second = begin(shell), begin(shell)
        first.sh("echo 1 > a; export A=1")
        assert second.sh("ls; echo $A") == "exit status 0\n\n"
        assert first.sh("ls; echo $A") == "exit status 0\na\n1\n"
        first.episode.close()
        second.episode.close()
        assert others() == before

    def test_what_a_command_leaves_running_is_killed(self, begin):
        agent = begin(Shell())
        assert agent.sh("setsid sleep 1000 & (sleep 1000 &) ; echo started") == "exit status 0\nstarted\n"
        assert not [name for _, name in others() if name == "sleep"]
        assert agent.sh("echo 1 > a; sleep 1000", seconds=5) == "killed: no end after 5 s\n"
        assert not [name for _, name in others() if name == "sleep"]
        assert agent.sh("cat a; mkfifo f") == "exit status 0\n1\n"
        assert agent.sh("", seconds=0).startswith("error: ValueError: seconds is 0, not above 0")

    def test_of_a_long_output_both_ends_are_read(self, begin):
        agent = begin(Shell())
        tracemalloc.start()
        try:
            text = agent.sh("echo first; head -c 30000000 /dev/zero | tr '\\0' x; echo; echo last")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(text) < 1000 and text.startswith("exit status 0\nfirst\nxx") and text.endswith("xx\nlast\n")
        assert "\n... (29999212 bytes are left out) ...\n" in text and peak < 2**20
        assert agent.sh("printf '\\200\\000a'") == "exit status 0\n\N{REPLACEMENT CHARACTER}\0a"
        agent.sh("for i in $(seq 5000); do echo $i; done > long")
        assert agent("read_file", path="long").endswith("4999\n5000\n")


@needs_bubblewrap
class TestScores:
    def test_hidden_tests_run_in_the_folder(self, begin):
        assert begin(Shell(FILES)).answers() is False  # opened by its score
        agent = begin(Shell(FILES))
        agent("edit_file", path="main.py", old=" + 1", new="")
        assert agent.answers() is True

    def test_hidden_tests_do_not_get_the_variables_of_the_policy(self, begin):
        agent = begin(Shell(FILES))
        agent.sh("mkdir bin; printf '#!/bin/sh\\necho [0, 2, 4]\\n' > bin/python; chmod +x bin/python")
        agent.sh("export PATH=$PWD/bin:$PATH PYTHONPATH=$PWD/bin; cd bin")
        assert agent.sh("python") == "exit status 0\n[0, 2, 4]\n"
        assert agent.answers() is False

    def test_hidden_tests_do_not_run_what_the_policy_left_at_home(self, begin):
        agent = begin(Shell(FILES))
        agent.sh("mkdir -p $(python -m site --user-site)")
        agent.sh("echo \"import os; os.write(1, b'[0, 2, 4]\\n'); os._exit(0)\" > $(python -m site --user-site)/a.pth")
        assert agent.sh("python hidden.py") == "exit status 0\n[0, 2, 4]\n"
        assert agent.answers() is False

    def test_files_that_cannot_be_written_fail_the_episode(self, begin):
        for files, line in (
            ({"../a": ""}, r"\.\./a is not below /tmp/work"),
            ({"a": "x" * 2**17}, "No space left"),
            (lambda row: {"a": row.extra["none"]}, "KeyError"),
        ):
            with pytest.raises(ScorerError, match=f"Shell cannot be opened: .*{line}"):
                begin(Shell(files)).sh("ls")

    def test_an_answer_alone_has_no_files(self):
        with pytest.raises(LookupError, match="Shell is opened by an episode"):
            Completion("done").opened(Shell())


class TestStart:
    @pytest.fixture(autouse=True)
    def _fresh(self):
        check.cache_clear()
        yield
        check.cache_clear()

    def test_without_bubblewrap_no_row_is_read(self, monkeypatch, tmp_path):
        settings = agent_config(tmp_path)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ValueError, match=r"Agent: .*no bwrap on PATH: apt-get install bubblewrap$"):
            list(make_environment(settings).rows("train"))

    @needs_bubblewrap
    def test_folders(self, tmp_path, begin):
        (tmp_path / "data").mkdir()
        (tmp_path / "data/a").write_text("1")
        agent = begin(Shell(folders=[f"{tmp_path}/data"]))
        assert agent.sh(f"cat {tmp_path}/data/a; ls {tmp_path}") == "exit status 0\n1data\n"
        assert "Read-only file system" in agent.sh(f"echo > {tmp_path}/data/b")
        for folder in (f"{tmp_path}/none", "data"):
            with pytest.raises(ValueError, match=f"Shell: folders: {folder} is not the absolute path"):
                Shell(folders=[folder]).prepare(config())


def agent_config(path, **environment):
    (path / "agent.py").write_text(AGENT)
    settings = config_of(path, "Echoes")
    settings.environment.name = f"{path}/agent.py:Agent"
    settings.environment.sandbox = SMALL
    for field, value in environment.items():
        setattr(settings.environment, field, value)
    return settings


@pytest.mark.slow
@needs_bubblewrap
class TestHostile:
    def test_a_fork_bomb(self, begin):
        agent = begin(Shell(FILES))
        assert "killed: no end after 1 s\n" in agent.sh("b() { b | b & }; b; sleep 1000", seconds=1)
        assert agent.sh("ls") == "exit status 0\nmain.py\n"

    def test_memory_of_all_processes(self, begin):
        agent = begin(Shell(FILES))
        assert "MemoryError" in agent.sh("python -c \"x = b'x' * 10**9\"")
        eaters = (
            "for i in 1 2 3 4 5; do python -c \"import time; x = b'x' * (80 * 2**20); time.sleep(1000)\" & done; wait"
        )
        assert agent.sh(eaters) == f"killed: more than {SMALL.memory_bytes} bytes of memory\n"
        assert agent.sh("ls") == "exit status 0\nmain.py\n"

    def test_large_files(self, begin):
        agent = begin(Shell(FILES))
        assert "No space left on device" in agent.sh("dd if=/dev/zero of=a bs=1M count=10000; ls /tmp")
        assert "No space left on device" in agent("write_file", path="b", content="x" * 100_000)
        assert agent.sh("rm a b; truncate -s 10G a").startswith("exit status 1\n")
        assert agent("read_file", path="main.py") == FILES["main.py"]

    def test_floods(self, begin):
        agent = begin(Shell())
        text = agent.sh("yes", seconds=5)
        assert text.startswith("killed: no end after 5 s\ny\ny\n") and len(text) <= 1000
        assert len(agent.sh("yes >&2 & yes | head -c 10000000; wait", seconds=1)) <= 1000

    def test_a_file_that_never_ends_costs_its_call(self, begin):
        agent = begin(Shell(), config(seconds=10.0))
        agent.sh("mkfifo f; ln -s /dev/zero z")
        assert "no end after 10 s" in agent("read_file", path="f")
        assert "is not below" in agent("read_file", path="z")
        assert agent.sh("ls") == "exit status 0\nf\nz\n"

    def test_too_many_files_are_gone(self, begin):
        agent = begin(Shell(FILES))
        many = f"for i in $(seq {ENTRIES}); do > $i; done; sleep 1000"
        assert agent.sh(many) == f"killed: more than {ENTRIES} files (and the files are gone)\n"
        assert f"the files are gone: more than {ENTRIES} files" in agent.sh("ls")
        assert agent.answers() is False

    def test_the_time_of_an_episode(self, begin):
        agent = begin(Shell(FILES), config(all_seconds=2.0))
        assert agent.sh("sleep 1000", seconds=1e9).startswith("killed: no end after ")
        assert "the calls of this episode have used up their time" in agent("read_file", path="main.py")
        assert agent.answers() is False  # its tests have time of their own
        tight = config()
        tight.turn_seconds = 2.0
        assert begin(Shell(), tight).sh("sleep 1000").startswith("killed: no end after ")

    def test_no_network_and_nothing_of_this_process(self, begin, monkeypatch):
        monkeypatch.setenv("SECRET_TOKEN", "hunter2")
        agent = begin(Shell())
        assert "Operation not permitted" in agent.sh("exec 3<>/dev/tcp/127.0.0.1/80")
        assert "Operation not permitted" in agent.sh("python -c 'import socket; socket.socket()'")
        assert "hunter2" not in agent.sh("export -p; ls -R /proc /dev /etc")
        assert agent.sh(f"ls {ROOT}").startswith("exit status 2\n")
        assert agent.sh("kill -9 -1; kill -9 1; echo there").endswith("\nthere\n")
        assert agent.sh("sleep 1 && mkdir /tmp/work/x && rm -rf /tmp/work; pwd").startswith("exit status 0\n")
        assert agent.sh("ls") == "exit status 0\n"


@pytest.mark.slow
@needs_bubblewrap
class TestProcesses:
    def test_a_whole_episode(self, tmp_path):
        before = others()
        with closing(pool_of(agent_config(tmp_path))) as pool:
            player, other = Player(pool, tmp_path), Player(pool, tmp_path)
            assert player.say(call("shell", command="cat question.txt")) == "exit status 0\nhello"
            player.say(call("write_file", path="answer.txt", content="42"))
            assert "No such file" in other.say(call("read_file", path="answer.txt"))
            sandboxes = inside(before) - {pool._worker.process.pid}
            assert player.say("done").correct and not other.say("done").correct
            eventually(lambda: are_gone(sandboxes), "both sandboxes are gone")

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGALRM, signal.SIGTERM])
    def test_an_episode_that_is_killed_takes_its_sandbox_along(self, tmp_path, number):
        before = others()
        with closing(pool_of(agent_config(tmp_path))) as pool:
            player = Player(pool, tmp_path)
            player.say(call("shell", command="echo 1 > a"))
            episode = pool._connections[player.trajectory].pid
            sandbox = inside(before) - {pool._worker.process.pid, episode}
            assert len(sandbox) >= 2  # bubblewrap, and the first process in what it has made
            os.kill(episode, number)
            eventually(lambda: are_gone(sandbox), "the sandbox is gone")
            assert player.say(call("shell", command="cat a")).excluded

    def test_a_turn_that_takes_too_long(self, tmp_path):
        """Beyond what the tools' own limits hold: the environment's score."""
        before, settings = others(), agent_config(tmp_path, turn_seconds=10.0)  # for the first turn too
        slow = AGENT.replace('run("grep', 'run("sleep 1000; grep')
        (tmp_path / "agent.py").write_text(slow)
        with closing(pool_of(settings)) as pool:
            player = Player(pool, tmp_path)
            player.say(call("shell", command="echo 42 > answer.txt"))
            sandbox = inside(before) - {pool._worker.process.pid}
            assert "a step took 10 s (turn_seconds)" in player.say("done").why
            eventually(lambda: are_gone(sandbox), "the sandbox is gone")

    def test_a_trainer_that_is_killed(self, tmp_path):
        agent_config(tmp_path)  # writes the file
        script = (
            "import pathlib, signal\nfrom tests.environments.test_episodes import Player, pool_of\n"
            "from tests.environments.test_shell_tools import agent_config\nfrom tests.support.episodes import call\n"
            f"path = pathlib.Path({str(tmp_path)!r})\nplayer = Player(pool_of(agent_config(path)), path)\n"
            "player.say(call('shell', command='echo 1 > a'))\nprint('begun', flush=True)\nsignal.pause()"
        )
        before = others()
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT) as trainer:
            assert trainer.stdout.readline() == b"begun\n"
            assert "bwrap" in {name for _, name in others() - before}
            started = inside(before)
            trainer.kill()
        eventually(lambda: are_gone(started), "the sandbox is gone")


def inside(before: set[tuple[int, str]]) -> set[int]:
    """Processes below this one that were not there before."""
    return {process for process, _ in others() - before}


def are_gone(processes: set[int]) -> bool:
    """Also those that have another parent by now."""
    return not any(os.path.exists(f"/proc/{process}") for process in processes)
