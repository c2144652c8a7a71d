"""A run folder with garbage in any of its files: scalerl-report names file and row in one line."""

import json

import pytest

from scalerl_jax.cli.entry import UserError
from scalerl_jax.report.command import report
from tests.report import run_folders


def failure(folder, out):
    """The one line with which no page is made."""
    with pytest.raises(UserError) as caught:
        report([str(folder)], str(out))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert not out.exists()
    return str(caught.value)


@pytest.mark.parametrize("garbage", [b"garbage", b"\xff\xfe\0", b"[1]", b"[" * 100_000])
@pytest.mark.parametrize("name", ["metrics.jsonl", "evals.jsonl", "config.json", "rollouts"])
def test_one_line_names_it(tmp_path, name, garbage):
    folder = tmp_path / "run"
    run_folders.write_run(folder)
    file = min((folder / "rollouts").iterdir()) if name == "rollouts" else folder / name
    file.write_bytes(garbage + b"\n" + file.read_bytes())
    message = failure(folder, tmp_path / "report.html")
    assert message.startswith(f"{file}: ")
    assert ("row 1 " in message) == (name != "config.json")


@pytest.mark.parametrize(
    ("name", "line", "told"),
    [
        ("metrics.jsonl", b"garbage", "is not JSON"),
        ("metrics.jsonl", b"[1, 2]", "is not an object"),
        ("metrics.jsonl", b"null", "is not an object"),
        ("metrics.jsonl", b"{}", "has no step"),
        ("metrics.jsonl", b'{"step": 4}', "has no 'time'"),
        ("metrics.jsonl", b'{"step": 4, "time": 1, "reward": "\xff"}', "is not UTF-8"),
        ("evals.jsonl", b'{"step": 4, "time": 1}', "has no 'pass_rate'"),
        ("rollouts/step-00000005.jsonl", b"[]", "is not an object"),
        ("rollouts/step-00000005.jsonl", b'{"step": 5}', "has no 'group'"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path, name, line, told):
    folder = tmp_path / "run"
    run_folders.write_run(folder, updates=8)
    lines = (folder / name).read_bytes().split(b"\n")
    (folder / name).write_bytes(b"\n".join([*lines[:3], line, *lines[3:]]))
    assert failure(folder, folder / "report.html").startswith(f"{folder / name}: row 4 {told}")


@pytest.mark.parametrize(
    ("name", "column", "value", "told"),
    [
        ("metrics.jsonl", "time", "a", "'time' that is not a number: a"),
        ("metrics.jsonl", "reward", "high", "'reward' that is not a number"),
        ("metrics.jsonl", "compute", 3, "'compute' that is not an object"),
        ("metrics.jsonl", "compute", {"a": []}, "'compute' whose 'a' is not a number"),
        ("metrics.jsonl", "waited_for", [3], "'waited_for' that is not a list of pairs"),
        ("metrics.jsonl", "compute", None, "'compute' that is null"),
        ("metrics.jsonl", "waited_for", [["a", "b"]], "'waited_for' that is not a list of pairs"),
        ("metrics.jsonl", "waited_for", [[1, 2]], "'waited_for' that is not a list of pairs"),
        ("metrics.jsonl", "lags", {"1": "a"}, "'lags' that are not counts by whole numbers"),
        ("metrics.jsonl", "lags", {"1": -3}, "'lags' that are not counts"),
        ("metrics.jsonl", "lags", {"1": None}, "'lags' that are not counts"),
        ("metrics.jsonl", "lags", {"-1": 3}, "'lags' that are not counts"),
        ("metrics.jsonl", "lags", {"9" * 4000: 3}, "'lags' that are not counts"),
        ("metrics.jsonl", "pass_rate", 10**400, "'pass_rate' that is not finite"),
        ("metrics.jsonl", "time", 10**400, "'time' that is not a number"),
        ("evals.jsonl", "passes", [None], "'passes' that are not numbers"),
        ("evals.jsonl", "tasks", {"a": {"prompts": None, "pass_rate": 0.5}}, "'tasks' that do not say their prompts"),
        ("evals.jsonl", "tasks", {"a": {"prompts": 3, "pass_rate": "x"}}, "'tasks' that do not say their prompts"),
        ("evals.jsonl", "environments", {"a": {"prompts": 3}}, "'environments' whose 'a' does not say its prompts"),
        ("evals.jsonl", "environments", {"a": 3}, "'environments' whose 'a' does not say its prompts"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_row(tmp_path, name, column, value, told):
    folder = tmp_path / "run"
    run_folders.write_run(folder)
    rows = (folder / name).read_text().splitlines()
    rows[1] = json.dumps({**json.loads(rows[1]), column: value})
    (folder / name).write_text("".join(f"{row}\n" for row in rows))
    message = failure(folder, tmp_path / "report.html")
    assert message.startswith(f"{folder / name}: row 2 has") and told in message


@pytest.mark.parametrize(
    ("group", "field", "value"), [("model", "compute_dtype", "float16"), ("parity", "p99_limit", "x")]
)
def test_a_config_that_cannot_be_is_named(tmp_path, group, field, value):
    folder = tmp_path / "run"
    run_folders.write_run(folder)
    written = json.loads((folder / "config.json").read_text())
    written[group][field] = value
    (folder / "config.json").write_text(json.dumps(written))
    message = failure(folder, tmp_path / "report.html")
    assert message.startswith(f"{folder / 'config.json'}: config.{group}.{field}='{value}': is not")


def test_the_folder_of_the_page_is_made(tmp_path):
    run_folders.write_run(tmp_path / "run")
    page = tmp_path / "new" / "folder" / "page.html"
    assert report([str(tmp_path / "run")], str(page)) == str(page) and page.stat().st_size > 1000
