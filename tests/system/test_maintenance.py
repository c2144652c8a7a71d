"""An announced end of the machine is taken as a signal, once; what is not announced changes nothing."""

import pathlib
import subprocess
import sys

import pytest

from scalerl_jax.system import maintenance
from tests.hosts.test_rank import metadata
from tests.support.paths import ROOT
from tests.support.ports import nowhere
from tests.support.processes import SECONDS
from tests.support.waiting import eventually

PROGRAM = """
import sys, time
from scalerl_jax.system import maintenance, signals

with signals.installed(), maintenance.watched(sys.argv[1], every=0.05):
    signals.be(signals.HOLD)
    print("begun", flush=True)
    try:
        while True:
            signals.raise_if_interrupted()
            time.sleep(0.01)
    except signals.Interrupted as stop:
        sys.exit(128 + stop.number)
"""


class Program:
    def __init__(self, where: str, **environment: str):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, where], cwd=ROOT, env={"PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None and self.process.stdout.readline() == "begun\n"

    def end(self) -> tuple[int, str]:
        said = self.process.communicate(timeout=SECONDS)[1]
        return self.process.returncode, said


def test_a_file_that_appears(tmp_path: pathlib.Path) -> None:
    notice = tmp_path / "notice"
    program = Program(f"file:{notice}")
    assert program.process.poll() is None
    notice.touch()
    code, said = program.end()
    assert code == 143
    assert said.splitlines()[0] == f"maintenance is announced: {notice} is there"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", "maintenance-event is TERMINATE_ON_HOST_MAINTENANCE"),
        ("preempted", "TRUE", "the instance is preempted"),
    ],
)
def test_the_metadata_of_an_instance(name: str, value: str, told: str) -> None:
    values = {"maintenance-event": "NONE", "preempted": "FALSE"}
    with metadata(values) as host:
        program = Program("gce", GCE_METADATA_HOST=host)
        assert program.process.poll() is None
        values[name] = value
        code, said = program.end()
    assert (code, said.splitlines()[0]) == (143, f"maintenance is announced: {told}")


def test_metadata_that_do_not_answer_are_told_once(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    source, calls = maintenance.source, []

    def counted(where: str):
        look = source(where)
        return lambda: calls.append(1) or look()

    monkeypatch.setattr(maintenance, "source", counted)
    with nowhere() as address:
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        with maintenance.watched("gce", every=0.001):
            eventually(lambda: len(calls) >= 3, "it is looked at again and again")
    assert [record.message.split(":")[0] for record in caplog.records] == ["maintenance is not heard of"]


@pytest.mark.parametrize("where", ["aws", "file:", "file"])
def test_a_source_that_is_none(where: str) -> None:
    with pytest.raises(ValueError, match=f"--maintenance={where}: gce, or file:PATH"):
        maintenance.source(where)


def test_nothing_to_look_at() -> None:
    with maintenance.watched(""):
        pass
