"""A run folder with garbage in any of its files: scalerl-report names file and row in one line."""

import pytest

from scalerl_jax.entry import UserError
from scalerl_jax.report import report
from tests.report import runs


@pytest.mark.parametrize("garbage", [b"garbage", b"\xff\xfe\0", b"[1]", b"[" * 100_000])
@pytest.mark.parametrize("name", ["metrics.jsonl", "evals.jsonl", "config.json", "rollouts"])
def test_one_line_names_it(tmp_path, name, garbage):
    folder = tmp_path / "run"
    runs.write_run(folder)
    file = min((folder / "rollouts").iterdir()) if name == "rollouts" else folder / name
    file.write_bytes(garbage + b"\n" + file.read_bytes())
    with pytest.raises(UserError) as caught:
        report([str(folder)], str(tmp_path / "report.html"))
    message = str(caught.value)
    assert message.startswith(f"{file}: ") and "\n" not in message
    assert ("row 1 " in message) == (name != "config.json")
    assert not (tmp_path / "report.html").exists()
