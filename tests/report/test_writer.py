"""A page that cannot be made costs the page: the thread lives, one line says so, and the run is not held up."""

import logging
import threading

from scalerl_jax.report import writer
from scalerl_jax.report.writer import ReportWriter


def test_a_fault_is_said_once_and_the_next_page_is_made(tmp_path, monkeypatch, caplog):
    made = [threading.Event() for _ in range(3)]
    faults = [ZeroDivisionError("division\nby zero"), OSError(28, "No space left on device"), None]

    def write(workdirs):
        number = next(i for i, event in enumerate(made) if not event.is_set())
        made[number].set()
        if faults[number] is not None:
            raise faults[number]

    monkeypatch.setattr(writer, "write_report", write)
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
