"""What the page carries of a run's health: every sign with its limits, its words and the histogram of staleness."""

import pytest

from scalerl_jax import config_check
from scalerl_jax.config import Config
from scalerl_jax.report.health import CHARTS, health, staleness
from scalerl_jax.run.alarms import SIGNS
from tests.report import run_folders

SETTINGS = config_check.leaves(Config())


def test_the_histogram_of_staleness_is_of_the_last_updates():
    total = sum(run_folders.STALENESS.values())
    found = health([{"step": step, **run_folders.metrics(step)} for step in range(1, 31)], SETTINGS)["staleness"]
    assert found["lag"] == [0, 1, 2, 3, 4]
    assert found["share"] == pytest.approx(
        [run_folders.STALENESS.get(str(lag), 0) / total for lag in range(5)], rel=1e-4
    )
    rows = [{"lags": {"1": 1}}, {}, {"lags": None}, {"lags": {"3": 2, "100000": 1}}]
    found = staleness(rows)
    assert len(found["lag"]) == 65 and (found["share"][1], found["share"][3], found["share"][64]) == (0.25, 0.5, 0.25)
    assert staleness([]) == staleness([{"lags": {}}]) == {"lag": [], "share": []}


def test_every_sign_is_a_chart_and_says_what_to_do():
    rows = [{"step": step, "score/ended/failed": 0.0, **run_folders.metrics(step)} for step in range(1, 31)]
    charts = {chart["key"]: chart for chart in health(rows, SETTINGS)["charts"]}
    assert SIGNS.keys() | {"lag", "effective_sample_size_sequence", "repetition", "retired"} <= charts.keys()
    for key, chart in charts.items():
        assert chart["series"] and chart["means"].endswith(".") and chart["wrong"] and chart["wrong"][-1] != ".", key
    for key, sign in SIGNS.items():
        (chart,) = [chart for chart in CHARTS if chart.key == key]
        assert next(iter(chart.columns)) == sign.column  # what is drawn is what is held against the limit


def test_a_sign_that_no_update_has_recorded_is_named():
    rows = [{"step": step, "prompts": 24.0, "truncated": 0.01} for step in range(1, 5)]
    charts = {chart["key"]: chart for chart in health(rows, SETTINGS)["charts"]}
    assert SIGNS.keys() - {"failed"} <= charts.keys() and charts["truncated"]["series"]
    assert "failed" not in charts  # only runs with episodes have it
    assert {chart["latest"] for key, chart in charts.items() if not chart["series"]} == {None}
    assert charts["repetitive"]["series"] == [] and "no_end_of_thinking" not in charts and "loss" not in charts
    # A run without an update has no charts, and a warm start those of its own.
    assert health([], SETTINGS)["charts"] == []
    assert [c["key"] for c in health([{"step": 1, "nll": 2.0, "gradient_norm": 1.0}], SETTINGS)["charts"]] == [
        "loss", "gradient",
    ]  # fmt: skip
