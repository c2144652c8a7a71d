"""The tests' own runner: what fails or dies in a fork is named and counted, and what was left out is said.

Costs two seconds: a runner with forks of its own, started as a fork.
"""

import pathlib

import pytest

from tests import runner
from tests.support.processes import run_command

FILES = {
    "test_good.py": """
        import pytest
        def test_one(): pass
        def test_other(tmp_path): tmp_path.joinpath("x").write_text("")
        def test_skipped(): pytest.skip("for a reason")
        @pytest.mark.slow
        def test_slow(): raise AssertionError
    """,
    "test_bad.py": """
        def test_right(): pass
        def test_wrong(): assert 1 == 2, "so it is"
    """,
    "dies/test_dies.py": """
        import os
        def test_right(): pass
        def test_end(): os._exit(3)
        def test_never_reached(): pass
    """,
    "broken/test_broken.py": "import no_such_module\n",
    "stays/test_stays.py": """
        import threading
        def test_thread():
            threading.Thread(target=threading.Event().wait).start()
            assert not "left running"
    """,
}


def write(folder: pathlib.Path, names: list[str]) -> pathlib.Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        lines = FILES[name].splitlines()
        path.write_text("\n".join(line.removeprefix("        ") for line in lines) + "\n")
    return folder


def test_what_fails_and_what_dies_is_named(tmp_path: pathlib.Path) -> None:
    done = run_command("tests.runner", "test", write(tmp_path, list(FILES)), "--workers=2")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[-1] == "test: 4 passed, 4 failed, 1 skipped", done.stdout + done.stderr
    assert "so it is" in done.stdout and "No module named 'no_such_module'" in done.stdout
    told = [line for line in lines if line.startswith("FAILED")]
    assert any("test_bad.py::test_wrong" in line for line in told)
    assert any("test_stays.py::test_thread" in line for line in told)  # and its fork has ended
    assert any("test_dies.py::test_end: ended with code 3" in line for line in told)
    assert any("test_broken.py: ended with code 2" in line for line in told)
    assert "skipped: 1 (for a reason)" in lines
    assert "left out of these files: 1 (make test-full)" in lines


def test_where_all_passes_so_does_the_run(tmp_path: pathlib.Path) -> None:
    done = run_command("tests.runner", "test", write(tmp_path, ["test_good.py"]), "--order=5")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "test: 2 passed, 0 failed, 1 skipped"), done.stderr


def test_files_of_a_folder_share_a_fork_and_the_longest_come_first() -> None:
    known = {"a/test_1.py": [0, 60.0], "a/test_2.py": [0, 40.0], "a/test_3.py": [0, 5.0], "b/test_4.py": [0, 90.0]}
    batches = runner.batches_of(list(known), known, None)
    assert batches == [["b/test_4.py"], ["a/test_1.py"], ["a/test_2.py", "a/test_3.py"]]
    shuffled = [runner.batches_of(list(known), known, order) for order in range(9)]
    assert all(sorted(file for batch in one for file in batch) == list(known) for one in shuffled)
    assert shuffled != [shuffled[0]] * 9


@pytest.mark.parametrize("target", ["test-full", "test-long"])
def test_a_target_of_slow_tests_takes_the_files_that_have_some(target: str) -> None:
    files = runner.files_of(target, [])
    assert "tests/train/test_disk.py" in files and "tests/accelerator/test_parity.py" in files
    assert "tests/objective/test_losses.py" not in files
    assert not any(file.startswith("tests/vllm") for file in files)
