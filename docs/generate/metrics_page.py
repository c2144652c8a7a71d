"""reference/metrics.md: every number that a run writes down or tells Prometheus, from the tables beside its writing."""

from collections.abc import Iterable
from typing import Any

from docs.generate import metric_names
from docs.generate.markdown import code, prose, sentence, table
from rollout_server import service
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.run import exporter
from scalerl_jax.system.metrics_endpoint import Family

INTRODUCTION = """# Metrics

Where a run's numbers are, and what each of them means. Shares are from 0 to 1. A key with `/` is nested in the file:
`servers/*/tokens` is `row["servers"][ADDRESS]["tokens"]`. `*` stands for a name that the run gives.

| place | what |
|---|---|
| `WORKDIR/metrics.jsonl` | a row for each step |
| `WORKDIR/evals.jsonl` | a row for each evaluation |
| `WORKDIR/ledger.json` | compute spent so far |
| `WORKDIR/tensorboard/` | the numbers of these rows, see below |
| Weights & Biases | the same, with `telemetry.wandb_project` |
| Prometheus | with `--metrics_port`, [below](#prometheus) |

TensorBoard and Weights & Biases have a step's numbers under the keys below, and an evaluation's under
`evaluation/KEY`, without its compute. Lists stay in the files.

The limits past which a number is a warning or an alarm are drawn in `report.html`, and
[troubleshooting](../troubleshooting.md) says what to do. Files appear as they are written: a run that goes on from
step s drops every row past s.
"""
_PROMETHEUS = """
## Prometheus

`GET /metrics` of `scalerl-train --metrics_port=PORT` and of `scalerl-serve --metrics_port=PORT`. Counters of the
ledger (`device_seconds`, `model_flops`, tokens) go on when a run goes on; all others begin at 0 with the process.
[launch/grafana](../../launch/grafana) has a dashboard.
"""


def page(links: dict[str, str]) -> str:
    """links: field of the config -> where it is on its page."""
    fields = {name: f"config.md{anchor}" for name, anchor in links.items()}
    parts = [INTRODUCTION, "\n## metrics.jsonl { #metrics-jsonl }\n"]
    for title, names in metric_names.METRICS.items():
        parts.append(f"\n### {title}\n\n{_names(names, fields)}")
    parts.append("\n### The warm start { #warm-start }\n\nA row of `scalerl-sft` has, beside those of *The row*:\n\n")
    parts.append(_names(metric_names.WARM_START, fields))
    parts.append("\n## evals.jsonl { #evals-jsonl }\n")
    for title, names in metric_names.EVALS.items():
        parts.append(f"\n### {title}\n\n{_names(names, fields)}")
    parts.append("\n## ledger.json { #ledger-json }\n\n")
    parts.append("Kept at most a second old. It is what the columns of compute above are made from; ")
    parts.append("[ledger.py](../../scalerl_jax/run/ledger.py) has the formulas.\n\n")
    parts.append(_names(metric_names.LEDGER_FILE, fields))
    parts.append(_PROMETHEUS)
    parts.append(f"\n### scalerl-train {{ #prometheus-trainer }}\n\n{_families(trainer_families())}")
    parts.append(f"\n### scalerl-serve {{ #prometheus-generator }}\n\n{_families(generator_families())}")
    return "".join(parts)


def _names(names: metric_names.Names, links: dict[str, str]) -> str:
    rows = [[code(key), unit, prose(sentence(said), links)] for key, (unit, said) in names.items()]
    return table(["Key", "Unit", "Meaning"], rows)


def _families(families: Iterable[Family]) -> str:
    rows = []
    for name, says, kind, labels, _ in families:
        full = name + {"counter": "_total", "info": "_info"}.get(kind, "")
        rows.append([code(full), kind, " ".join(map(code, labels)), prose(says)])
    return table(["Name", "Kind", "Labels", "Meaning"], rows)


def trainer_families() -> list[Family]:
    """As a run of one step and one evaluation tells them."""
    metrics = exporter.TrainerMetrics(max_steps=1)
    compute = dict.fromkeys(metric_names.LEDGER_COLUMNS, 0.0)
    metrics.row({"step": 1, **dict.fromkeys(exporter.STEP_GAUGES, 0.0), "compute": compute}, {})
    metrics.evaluated([{"step": 0, "pass_rate": 0.0}])
    status: dict[str, Any] = {"servers": {}, "waits_for": []}
    status |= dict.fromkeys(("in_flight", "pending", "unscored", "groups_in_flight", "groups_ready"), 0)
    metrics.fleet = lambda: status
    return list(metrics.collect())


def generator_families() -> list[Family]:
    return list(service.families(pb.StatusReply()))
