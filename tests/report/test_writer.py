"""A page that cannot be made costs the page: the thread lives, one line says so, and the run is not held up."""

import logging
import pathlib
import threading

from scalerl_jax.report import page
from scalerl_jax.report.page import ReportWriter
from tests.report.run_folders import embedded, write_run
from tests.support.processes import SECONDS
from tests.support.waiting import eventually


def test_a_fault_is_said_once_and_the_next_page_is_made(tmp_path, monkeypatch, caplog):
    made = [threading.Event() for _ in range(3)]
    faults = [ZeroDivisionError("division\nby zero"), OSError(28, "No space left on device"), None]

    def write(workdirs):
        number = next(i for i, event in enumerate(made) if not event.is_set())
        made[number].set()
        if faults[number] is not None:
            raise faults[number]

    monkeypatch.setattr(page, "write_report", write)
    with caplog.at_level(logging.WARNING), ReportWriter(str(tmp_path)) as report:
        for event in made:
            report.request()
            assert event.wait(600)
    said = [record.getMessage() for record in caplog.records if "report.html" in record.getMessage()]
    assert said == ["no report.html: ZeroDivisionError: division by zero; the training goes on"]


def test_no_room_for_a_thread(tmp_path, monkeypatch, caplog):
    def start(self):
        raise RuntimeError("can't start new thread")

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with ReportWriter(str(tmp_path)) as report:
            report.request()
    assert "no report.html: can't start new thread; the training goes on" in caplog.text


def test_the_writer_puts_requests_together_and_outlives_what_may_fail(monkeypatch, tmp_path):
    calls: list[list[str]] = []
    warned: list[str] = []
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def write(workdirs):
        calls.append(workdirs)
        begun.release()
        assert go_on.acquire(timeout=SECONDS)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(page, "write_report", write)
    monkeypatch.setattr(page.logging, "warning", lambda form, *values: warned.append(form % values))
    with ReportWriter(str(tmp_path)) as reports:
        reports.request()
        assert begun.acquire(timeout=SECONDS)
        for _ in range(5):
            reports.request()  # while a page is being made: one more, not five
        go_on.release()
        assert begun.acquire(timeout=SECONDS)
        go_on.release()
    assert calls == [[str(tmp_path)]] * 2
    assert warned == ["no report.html: [Errno 5] Input/output error; the training goes on"]


def test_a_page_is_written_in_the_trainers_process(tmp_path):
    workdir = write_run(tmp_path / "run", updates=4)
    with ReportWriter(workdir) as reports:
        reports.request()
        eventually(pathlib.Path(workdir, page.FILE).exists, "the page is written", seconds=SECONDS)
    assert embedded(pathlib.Path(workdir, page.FILE).read_text())["runs"][0]["updates"] == 4
