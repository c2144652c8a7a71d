"""A whole run whose answers are all wrong says so on its console, in the words of its report."""

import json
import re

import numpy as np
import pytest

from tests.support.tiny_task import prompts


@pytest.mark.slow
def test_a_run_without_a_right_answer_says_what_is_wrong(tmp_path, flags, replayed, start):
    for name, rows in zip(("train", "validation"), prompts()):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({**row, "answer": "777"}) + "\n" for row in rows))
        flags = [*flags, f"--config.environment.{name}={path}"]
    run = start(tmp_path / "run", *flags, *replayed(), "--config.max_steps=12").finish()
    assert all(row["prompts_surviving"] == 0 and row["no_end_of_thinking"] == 0 for row in run.metrics)
    console = " ".join(run.output().split())
    assert console.count("nothing is learned, all completions are wrong: 5 updates without a gradient (1 to 5;") == 1
    assert np.mean([row["interrupted"] for row in run.metrics]) > 0.1  # by design of this task, and said beside
    alarm, beside = json.loads(re.search(r'"alarms":(\[.*?\])', (tmp_path / "run/report.html").read_text())[1])
    assert alarm["message"].startswith("nothing is learned, all completions are wrong: 12 updates without a gradient")
    assert console.count("update 10: ALARM: ") == console.count(": ALARM: ") == 1  # of the interruptions
    assert console.count("ALARM: ") == 1 + 2  # both stand at the run's end, too
    assert "of the completions have their thinking cut short (mean of the last 10 updates; the limit is 10%)" in console
    assert alarm["advice"] in console and alarm["loud"] and beside["chart"] == "interrupted"
