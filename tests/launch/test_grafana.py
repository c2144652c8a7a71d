"""The dashboard asks for metrics that are told, in queries that Prometheus takes."""

import json
import pathlib
import re
from typing import Any

import promql_parser
import pytest

from launch.kubernetes import BUSY_METRIC
from rollout_server import service
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.run.exporter import ROLES, STATES, STEP_GAUGES, TrainerMetrics
from tests.support.paths import ROOT

DASHBOARD = json.loads((pathlib.Path(ROOT) / "launch" / "grafana" / "scalerl.json").read_text())
PANELS = DASHBOARD["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


def told() -> dict[str, set[str]]:
    """Name, as Prometheus has it -> its labels, of everything that the two tell."""
    compute = {f"{role}_{state}_hours": 1.0 for role in ROLES for state in STATES}
    compute |= dict.fromkeys([*(f"{name}_flops" for name in (*ROLES, "evaluation", "setup")), "trained_tokens"], 1.0)
    compute |= {"sampled_tokens": 1.0, "evaluation_tokens": 1.0}
    trainer = TrainerMetrics(max_steps=9)
    trainer.row({"step": 1, "compute": compute, "waited_for": [("a", 1.0)], **dict.fromkeys(STEP_GAUGES, 0.5)}, {})
    trainer.evaluated([{"step": 1, "pass_rate": 0.5}])
    counts = dict.fromkeys(["in_flight", "pending", "unscored", "groups_in_flight", "groups_ready"], 1)
    trainer.fleet = lambda: {"servers": {"a": {"state": "active"}}, "waits_for": ["a"], **counts}
    found = {}
    for family in [*trainer.collect(), *service.families(pb.StatusReply())]:
        name, _, kind, labels, samples = family
        assert samples, f"{name}: nothing is told of it here"
        ending = {"counter": "_total", "info": "_info", "gauge": ""}[kind]
        found[name + ending] = set(labels)
    return found


def test_every_metric_and_label_asked_for_is_told() -> None:
    known = told()
    for query in QUERIES:
        plain = re.sub(r"\[.*?\]", "", query)
        for name, chosen in re.findall(r"(scalerl_\w+)(?:\{(.*?)\})?", plain):
            assert name in known, query
            assert {label.strip() for label in re.findall(r"(\w+)=", chosen)} <= known[name], query
        for grouped in re.findall(r"by \((.*?)\)", query):
            assert any(
                {label.strip() for label in grouped.split(",")} <= known[name] for name in known if name in query
            )


def test_legends_name_labels_that_are_told() -> None:
    known = told()
    for target in [target for panel in PANELS for target in panel["targets"]]:
        names = re.findall(r"scalerl_\w+", target["expr"])
        labels = {"instance"}.union(*(known[name] for name in names))
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, target


def test_counters_are_asked_for_rates_and_gauges_are_not() -> None:
    for query in QUERIES:
        for rated in re.findall(r"rate\((scalerl_\w+)", query):
            assert rated.endswith("_total"), query
        if "_total" in query:
            assert "rate(" in query or "/ 3600" in query, query


@pytest.mark.parametrize("query", QUERIES)
def test_prometheus_takes_the_query(query: str) -> None:
    promql_parser.parse(query.replace("$__rate_interval", "1m"))


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        assert panel["description"].endswith(".")
    ids: list[Any] = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)


def test_what_scales_the_fleet_is_told() -> None:
    """The metric of --autoscale."""
    assert BUSY_METRIC in told()
