"""No test file takes longer than its target allows, as tests/durations.json says: it is measured, then committed.

make durations                                                all of it
.venv/bin/python -m tests.runner test FILE --keep_durations   one file
"""

import pytest

from tests import runner
from tests.support.paths import ROOT

# CPU seconds: of one file, and of all files of the target (`make test` in six minutes on two cores).
BUDGETS = {"test": (20, 600), "test-vllm": (120, 600), "test-full": (150, 1_500), "test-full-vllm": (200, 300)}
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
    missing = [file for target in runner.TARGETS for file in runner.files_of(target, []) if file not in known]
    assert sorted(set(missing)) == [], MEASURE
