"""No test file takes longer than its target allows, as tests/durations.json says: it is measured, then committed.

make durations                                                all of it
.venv/bin/python -m tests.runner test FILE --keep_durations   one file
"""

import pytest

from tests import runner
from tests.support.paths import ROOT

# CPU seconds: of one file, and of all files of the target.
BUDGETS = {
    "test": (40, 620),
    "test-full": (150, 1_720),
    "test-vllm": (100, 300),
    "test-full-vllm": (100, 120),
    "test-adapters": (60, 60),
}
MEASURE = "measure it: python -m tests.runner TARGET FILE --keep_durations"


@pytest.mark.parametrize("target", BUDGETS)
def test_every_file_is_within_its_budget(target: str) -> None:
    each, together = BUDGETS[target]
    spent = {file: cpu for file, (cpu, _) in runner.durations()[target].items()}
    assert {file: cpu for file, cpu in spent.items() if cpu > each} == {}, f"a part of it is slow or long: {MEASURE}"
    assert sum(spent.values()) <= together
    assert [file for file in spent if not (ROOT / file).exists()] == []


def test_every_file_was_measured() -> None:
    known = set[str]().union(*runner.durations().values())
    missing = [file for file in runner.files_of("test", ["tests"]) if file not in known]
    assert [file for file in missing if "mark.long" not in (ROOT / file).read_text(encoding="utf-8")] == [], MEASURE
