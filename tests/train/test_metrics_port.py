"""--metrics_port of scalerl-train: a run as Prometheus sees it, beside its own metrics.jsonl."""

import contextlib
import re
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scalerl_jax.run.alarms import SIGNS
from scalerl_jax.run.collapse import COLLAPSE
from scalerl_jax.run.exporter import ROLES, STATES, STEP_GAUGES, TrainerMetrics
from tests.support.processes import SECONDS
from tests.support.runs import Run
from tests.support.waiting import eventually


def scraped(run: Run) -> dict[tuple[str, ...], float]:
    """(name, label values...) -> value."""
    (url,) = re.findall(r"metrics at (http://\S+)", run.output())
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


@pytest.mark.slow
def test_a_run_tells_its_steps_its_fleet_and_its_costs(tmp_path, flags, start) -> None:
    run = start(
        tmp_path / "run", *flags, "--metrics_port=0", "--config.max_steps=100000", "--config.evaluation.every=3"
    )
    run.until(lambda: len(run.metrics) > 6 and len(run.rows("evals.jsonl")) > 2, "some steps are made")

    def of_both_servers() -> dict[tuple[str, ...], float] | None:
        with contextlib.suppress(urllib.error.HTTPError):  # 503: the fleet is too busy to say
            found = scraped(run)
            return found if found.get(("scalerl_trainer_servers", "active")) == 2 else None
        return None

    found = eventually(of_both_servers, "both servers are active", seconds=SECONDS)
    step = int(found[("scalerl_trainer_step",)])
    row = eventually(
        lambda: next((row for row in run.metrics if row["step"] == step), None), "the row is written", seconds=SECONDS
    )
    for column, (name, _) in STEP_GAUGES.items():
        if isinstance(row.get(column), int | float):
            assert found[(f"scalerl_trainer_{name}",)] == pytest.approx(row[column]), column
    seconds = {key[1:]: value for key, value in found.items() if key[0] == "scalerl_trainer_device_seconds_total"}
    assert seconds.pop(("teacher", "up")) == 0  # there is none
    assert len(seconds) == len(ROLES) * len(STATES)
    assert seconds["trainer", "stalled"] > 0  # every third step is saved
    for (role, state), value in seconds.items():
        assert value == pytest.approx(3600 * row["compute"][f"{role}_{state}_hours"])
    assert found[("scalerl_trainer_max_steps",)] == 100_000
    assert {key[1] for key in found if key[0] == "scalerl_trainer_alarm"} == {*SIGNS, COLLAPSE}
    evaluated = [row for row in run.rows("evals.jsonl") if row["step"] == found[("scalerl_trainer_evaluation_step",)]]
    assert found[("scalerl_trainer_evaluation_pass_rate", "all")] == evaluated[0]["pass_rate"]
    rows = [row for row in run.metrics if row["step"] <= step]
    waited = sum(value for key, value in found.items() if key[0] == "scalerl_trainer_waited_seconds_total")
    assert waited == pytest.approx(sum(row["waited_seconds"] for row in rows), rel=1e-6, abs=1e-6)
    assert found[("scalerl_trainer_pushes_total",)] == sum(row["pushes"]["applied"] for row in rows)


def test_a_port_that_is_taken_ends_the_start(tmp_path, flags, start) -> None:
    first = start(tmp_path / "first", *flags, "--metrics_port=0", "--config.max_steps=100000")
    first.until(lambda: "metrics at" in first.output(), "the first listens")
    (port,) = re.findall(r"metrics at http://127.0.0.1:(\d+)/", first.output())
    second = start(tmp_path / "second", *flags, f"--metrics_port={port}")
    assert second.wait() == 2
    assert f"error: --metrics_port={port} --metrics_host=127.0.0.1: cannot listen there" in second.output()


def test_waits_are_counted_under_few_names() -> None:
    metrics = TrainerMetrics(max_steps=9)
    for step in range(30):
        metrics.row({"step": step, "waited_seconds": 3.0, "waited_for": [(f"server-{step}", 2.0)]}, {"entropy": True})
    families = {name: samples for name, _, _, _, samples in metrics.collect()}
    waited = families["scalerl_trainer_waited_seconds"]
    assert len(waited) <= 17
    assert sum(waited.values()) == pytest.approx(90.0)
    assert waited[("others",)] > 30.0
    alarms = families["scalerl_trainer_alarm"]
    assert alarms[("entropy",)] == 2.0 and sum(alarms.values()) == 2.0


def test_a_fleet_that_has_failed_is_a_503() -> None:
    from scalerl_jax.rollouts.servers.validate_status import FleetError

    def status():
        raise FleetError("no server is left")

    metrics = TrainerMetrics(max_steps=9)
    metrics.fleet = status
    with pytest.raises(RuntimeError, match="the fleet has failed: no server is left"):
        list(metrics.collect())
