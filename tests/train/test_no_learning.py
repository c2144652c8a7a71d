"""A whole run whose answers are all wrong says so on its console, in the words of its report."""

import json
import re

import pytest

from tests.support.servers import serve
from tests.support.tiny_task import prompts

# A replay server's log-probs are nobody's: the probe must let them pass.
UNPROBED = ("--config.parity.mean_limit=100", "--config.parity.p99_limit=100")
pytestmark = pytest.mark.timeout(1800)  # processes start slowly on a busy machine


def test_a_run_without_a_right_answer_says_what_is_wrong(tmp_path, flags, model, rollouts, start):
    for name, rows in zip(("train", "validation"), prompts()):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({**row, "answer": "777"}) + "\n" for row in rows))
        flags = [*flags, f"--config.environment.{name}_file={path}"]
    with serve(tmp_path, 1, "--engine=replay", f"--model={model}", f"--replay_file={rollouts}") as addresses:
        run = start(tmp_path / "run", *flags, *UNPROBED, "--config.max_steps=7", f"--servers={addresses[0]}").finish()
    assert all(row["prompts_surviving"] == 0 and row["no_end_of_thinking"] == 0 for row in run.metrics)
    console = " ".join(run.output().split())
    assert console.count("nothing is learned, all completions are wrong: 5 updates without a gradient (1 to 5;") == 1
    (alarm,) = json.loads(re.search(r'"alarms":(\[.*?\])', (tmp_path / "run/report.html").read_text())[1])
    assert alarm["says"].startswith("nothing is learned, all completions are wrong: 7 updates without a gradient")
    assert alarm["advice"] in console
