"""Files on a disk that is full, read-only or gone: whole or as they were, no temporary file, one line."""

import errno
import os
import resource
import signal
import subprocess
import sys

import pytest

from scalerl_jax.system import files
from tests.support.paths import ROOT


@pytest.fixture
def limited():
    """No file may become longer than 4096 bytes: EFBIG, for root too."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_file_that_has_no_room_is_as_it_was(tmp_path, limited):
    path = str(tmp_path / "config.json")
    files.write_whole(path, "before")
    with pytest.raises(files.WriteError) as caught:
        files.write_whole(path, "x" * 5000)
    assert str(caught.value) == f"{path}: file too large"
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, path)
    assert os.listdir(tmp_path) == ["config.json"]
    assert (tmp_path / "config.json").read_text() == "before"


def test_a_row_that_has_no_room_leaves_no_part_of_it(tmp_path, limited):
    path = str(tmp_path / "metrics.jsonl")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    row = b'{"step": 1}' + b" " * 1500 + b"\n"
    files.append(descriptor, row, path)
    files.append(descriptor, row, path)
    with pytest.raises(files.WriteError, match=r"metrics\.jsonl: file too large"):
        files.append(descriptor, row, path)  # 1072 bytes of it would fit
    os.close(descriptor)
    assert (tmp_path / "metrics.jsonl").read_bytes() == 2 * row


def test_a_full_device():
    descriptor = os.open("/dev/full", os.O_WRONLY | os.O_APPEND)
    with pytest.raises(files.WriteError, match="/dev/full: no space left on device"):
        files.append(descriptor, b"row\n", "/dev/full")
    os.close(descriptor)


def test_a_row_of_a_file_that_was_deleted_is_not_lost_in_silence(tmp_path):
    path = str(tmp_path / "metrics.jsonl")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.remove(path)
    with pytest.raises(files.WriteError, match=r"metrics\.jsonl: no such file or directory"):
        files.append(descriptor, b"row\n", path)
    os.close(descriptor)


def test_a_folder_that_is_gone_is_one_line(tmp_path):
    with pytest.raises(files.WriteError, match=r"ledger\.json: no such file or directory"):
        files.write_whole(str(tmp_path / "gone" / "ledger.json"), "{}")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("RESOURCE_EXHAUSTED: Failed to write 5 bytes: No space left on device [os_error_code='28']", errno.ENOSPC),
        ("Error while serializing: I/O error: Disk quota exceeded (os error 122)", errno.EDQUOT),
        ("[Errno 30] Read-only file system: '/x'", errno.EROFS),
    ],
)
def test_what_libraries_say_of_a_disk_is_understood(text, number):
    fault = files.write_error(ValueError(text), "/run")
    assert fault is not None and fault.errno == number
    assert files.write_error(ValueError("the shapes differ"), "/run") is None


def test_two_processes_that_write_the_same_file_do_not_mix(tmp_path):
    path = tmp_path / "report.html"
    program = (
        "import select, sys; from scalerl_jax.system.files import write_whole\n"
        "while not select.select([sys.stdin], [], [], 0)[0]:\n"
        "    write_whole(sys.argv[1], sys.argv[2] * 20000, durable=False)"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program, path, letter], cwd=ROOT, stdin=subprocess.PIPE)
        for letter in "ab"
    ]
    seen = ""
    while seen.count("ab") + seen.count("ba") < 20:  # both write all the while
        assert all(writer.poll() is None for writer in writers)
        if path.exists():
            text = path.read_text()
            assert len(text) == 20_000 and len(set(text)) == 1
            seen += text[0]
    for writer in writers:
        writer.communicate()
    assert [writer.returncode for writer in writers] == [0, 0]
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    files.write_whole(str(tmp_path / "link"), "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    files.write_whole(str(tmp_path / "pipe"), "new")
    assert os.read(reader, 99) == b"new" and (tmp_path / "pipe").is_fifo()
    os.close(reader)


def test_a_folder_that_only_has_a_like_name_stays(tmp_path):
    for name in ("out.tmp", "out.old"):
        (tmp_path / name).mkdir()
    for replace in (False, True):
        with files.whole_folder(str(tmp_path / "out"), replace=replace) as folder:
            assert os.listdir(folder) == []
    assert sorted(os.listdir(tmp_path)) == ["out", "out.old", "out.tmp"]


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    living = os.getppid()
    for name in (f"config.json.{ended.pid}-0.tmp", f"report.html.{living}-7.tmp", "mine.tmp", "config.json"):
        (tmp_path / name).write_text("")
    files.tidy(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["config.json", "mine.tmp", f"report.html.{living}-7.tmp"]
