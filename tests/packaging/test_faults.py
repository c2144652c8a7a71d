"""The faults of tests/faults can still be put in, and the tests that find them are there and quick."""

import re

import pytest

from tests.faults.faults import FAULTS, Fault
from tests.packaging.sources import ROOT


def test_faults_have_names_of_their_own_and_quick_tests() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) == 41
    assert {fault.target for fault in FAULTS} <= {"test", "test-full"}
    assert sum(fault.target != "test" for fault in FAULTS) <= 4


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_put_in(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    assert fault.new != fault.old
    path, _, name = fault.test.partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    wholly_slow = re.search(r"^pytestmark = .*mark\.slow", text, re.MULTILINE) is not None
    assert wholly_slow == (fault.target != "test")
    if name:
        marks = re.search(rf"^((?:@.*\n|    .*\n|\)\n)*)(?:async )?def {name}\(", text, re.MULTILINE)
        assert marks is not None
        assert "mark.slow" not in marks[1]
