"""The page's health section in headless Chromium: what stands under each chart, the histogram, runs of before."""

import json
import pathlib

import pytest

from scalerl_jax.report.page import write_report
from tests.report import run_folders
from tests.report.screens import DESK, SECONDS, drawn

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["one", "two"])
def test_every_chart_of_health_says_what_it_means_and_what_to_do(open_page, name):
    page = open_page(name)
    cards = page.locator("#health article")
    for card in cards.all():
        meaning = card.locator(".means")
        assert meaning.count() == 1 and len(meaning.inner_text().split()) > 8
        assert "When it goes wrong: " in meaning.inner_text()
    titles = cards.locator("h3").all_inner_texts()
    assert titles.index("Staleness, histogram") == titles.index("Staleness") + 1
    histogram = cards.nth(titles.index("Staleness, histogram"))
    histogram.locator("summary").click()
    histogram.locator("tbody tr").nth(4).wait_for()  # it is made as it opens
    rows = [row.split("\t") for row in histogram.locator("tbody tr").all_inner_texts()]
    shares = run_folders.STALENESS.values()
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4"]
    shown = [float(row[1].split()[0]) for row in rows]
    wanted = [100 * run_folders.STALENESS.get(str(lag), 0) / sum(shares) for lag in range(5)]
    assert shown == pytest.approx(wanted, abs=0.5)
    assert drawn(page, f"#health article:nth-child({titles.index('Staleness, histogram') + 1})") > 2


def test_the_bar_under_the_pointer_is_told(open_page):
    page = open_page("one")
    histogram = page.locator("#health article", has_text="Staleness, histogram")
    histogram.locator(".plot").focus()
    said = []
    for _ in range(5):
        page.keyboard.press("ArrowRight")
        said.append(histogram.locator(".readout").inner_text())
    assert [text.partition(":")[0] for text in said] == [f"staleness {lag}" for lag in range(5)]
    assert said[3].endswith(" 0 %") and said[2].endswith("48 %")


def test_a_run_of_before_says_what_it_did_not_record(browser, tmp_path):
    """Rows without the later columns: their charts are there, without a curve; warnings are told from alarms."""
    folder = pathlib.Path(run_folders.write_run(tmp_path / "old"))
    new = ("mismatch_p99", "kl", "repetition", "repetitive", "lags")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {name: value for name, value in row.items() if name not in new and "size_" not in name}
        | {"truncated": 0.02, "interrupted": 0.07}
        for row in rows
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    page = browser.new_page(viewport=DESK)
    page.set_default_timeout(1000 * SECONDS)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(pathlib.Path(write_report([str(folder)])).as_uri())
    page.wait_for_selector("html[data-ready=yes]")
    silent = page.locator("#health article", has_text="Not recorded").locator("h3").all_inner_texts()
    assert silent == [
        "Staleness, histogram", "Mismatch, p99", "Mismatch KL", "ESS, completions", "ESS, sequences", "Loops",
        "Repetition",
    ]  # fmt: skip
    assert page.locator(".alarms li.warning").inner_text().startswith("old, warning: 7% of the completions have their")
    assert wrong == []
    page.close()
