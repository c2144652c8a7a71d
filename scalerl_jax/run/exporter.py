"""The trainer's metrics for Prometheus: its latest step, the cost of the run so far, its fleet, its alarms.

    of a step           gauges, as in metrics.jsonl
    since the process   counters: seconds waited, by what was waited for, and weights sent
    of the whole run    counters from the ledger, which continue over restarts
    of the fleet        read at each request, so that a wait is visible while it lasts

Names begin with PREFIX. With a trainer on several hosts, only the one that keeps the run folder has metrics.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from scalerl_jax.rollouts.servers.validate_status import FleetError
from scalerl_jax.run.alarms import SIGNS
from scalerl_jax.run.collapse import COLLAPSE
from scalerl_jax.run.ledger_file import CLASSES
from scalerl_jax.system.metrics_endpoint import Family, Samples

PREFIX = "scalerl_trainer_"
WAITED_FOR = 16  # names that seconds are counted under; a fleet of thousands would make as many time series

# Column of metrics.jsonl -> (name, what it is).
STEP_GAUGES = {
    "pass_rate": ("pass_rate", "Share of correct completions in the latest batch."),
    "reward": ("reward", "Mean reward of the latest batch."),
    "lag_mean": ("staleness_mean", "Mean staleness of the tokens trained on, in steps."),
    "lag_max": ("staleness_max", "Largest staleness of a token trained on, in steps."),
    "prompts_surviving": ("prompts_surviving", "Prompts of the batch with both right and wrong completions."),
    "prompts_retired": ("prompts_retired", "Prompts that are not drawn again."),
    "truncated": ("truncated", "Share of completions cut by the token budget."),
    "interrupted": ("interrupted", "Share of completions whose thinking was cut short."),
    "repetitive": ("repetitive", "Share of completions that end in a loop."),
    "length_mean": ("completion_tokens_mean", "Mean length of a completion."),
    "entropy": ("entropy_nats", "Mean entropy of the tokens trained on."),
    "mismatch": ("mismatch_nats", "Mean difference of log-probs between trainer and generators."),
    "kl": ("mismatch_kl_nats", "KL between generators and trainer."),
    "effective_sample_size": ("effective_sample_size", "Of the importance ratios, as a share of the tokens."),
    "gradient_norm": ("gradient_norm", "Norm of the latest gradient."),
    "group_seconds": ("group_seconds", "From asking for a group to its last completion, mean of the batch."),
}
ROLES, STATES = ("trainer", "generator"), CLASSES


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """Immutable: replaced by the trainer's thread alone, read by the endpoint's threads."""

    step: int = 0
    row: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    alarms: Mapping[str, bool] = dataclasses.field(default_factory=dict)  # sign -> whether it is loud
    waited: Mapping[str, float] = dataclasses.field(default_factory=dict)  # seconds since the process started, by name
    updated: float = 0.0  # seconds since the process started
    pushes: int = 0
    push_bytes: float = 0.0
    pause_seconds: float = 0.0
    evaluation: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the latest row of evals.jsonl


class TrainerMetrics:
    """The metrics of one trainer. `fleet` returns its status (rollouts/status.py) at each request; None before it
    exists."""

    def __init__(self, *, max_steps: int, step: int = 0):
        self.fleet: Callable[[], Mapping[str, Any]] | None = None
        self._max_steps = max_steps
        self._latest = _Snapshot(step=step)

    def row(self, row: Mapping[str, Any], alarms: Mapping[str, bool]) -> None:
        """Takes the row of a step, and the signs past a limit: True for an alarm."""
        pushes = row.get("pushes", {})
        snapshot = self._latest
        self._latest = dataclasses.replace(
            snapshot,
            step=row["step"],
            row=dict(row),
            alarms=dict(alarms),
            waited=_waited(snapshot.waited, row),
            updated=snapshot.updated + row.get("update_seconds", 0.0),
            pushes=snapshot.pushes + pushes.get("applied", 0),
            push_bytes=snapshot.push_bytes + pushes.get("payload_bytes", 0),
            pause_seconds=snapshot.pause_seconds + pushes.get("pause_seconds", 0.0),
        )

    def evaluated(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes the rows of evals.jsonl so far."""
        if rows:
            self._latest = dataclasses.replace(self._latest, evaluation=dict(rows[-1]))

    def collect(self) -> Iterable[Family]:
        """The metrics. Raises RuntimeError if the fleet does not answer."""
        yield from (_named(*family) for family in _of_the_run(self._latest, self._max_steps))
        if self.fleet is not None:
            try:
                status = self.fleet()
            except (FleetError, OSError) as error:
                raise RuntimeError(f"the fleet has failed: {error}") from error
            yield from (_named(*family) for family in _of_the_fleet(status))


def _named(name: str, text: str, kind: str, labels: tuple[str, ...], samples: Samples) -> Family:
    return PREFIX + name, text, kind, labels, samples


def _waited(before: Mapping[str, float], row: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by name, for at most WAITED_FOR names; the rest are "others"."""
    seconds = collections.Counter(before)
    named = row.get("waited_for", [])
    for name, value in named:
        seconds[name if name in seconds or len(seconds) < WAITED_FOR else "others"] += value
    seconds["others"] += max(0.0, row.get("waited_seconds", 0.0) - sum(value for _, value in named))
    return dict(seconds)


def _of_the_run(snapshot: _Snapshot, max_steps: int) -> Iterable[Family]:
    yield "step", "Optimizer steps made.", "gauge", (), {(): snapshot.step}
    yield "max_steps", "Optimizer steps of the whole run.", "gauge", (), {(): max_steps}
    for column, (name, text) in STEP_GAUGES.items():
        if isinstance(snapshot.row.get(column), int | float):
            yield name, text, "gauge", (), {(): snapshot.row[column]}
    alarms = {(sign,): 1.0 + snapshot.alarms[sign] if sign in snapshot.alarms else 0.0 for sign in (*SIGNS, COLLAPSE)}
    yield "alarm", "Signs past their limits: 1 a warning, 2 an alarm.", "gauge", ("sign",), alarms
    yield "waited_seconds", "Waited for the fleet, by who held it up.", "counter", ("name",), {
        (name,): seconds for name, seconds in snapshot.waited.items()
    }  # fmt: skip
    yield "update_seconds", "Spent on updates.", "counter", (), {(): snapshot.updated}
    yield "pushes", "Versions of the weights applied by a server.", "counter", (), {(): snapshot.pushes}
    yield "push_bytes", "Bytes of weights sent.", "counter", (), {(): snapshot.push_bytes}
    yield "pause_seconds", "Decoding stood still for new weights, of all servers.", "counter", (), {
        (): snapshot.pause_seconds
    }  # fmt: skip
    yield from _of_the_ledger(snapshot.row.get("compute", {}))
    if snapshot.evaluation:
        rates = {("all",): snapshot.evaluation["pass_rate"]}
        rates |= {(name,): part["pass_rate"] for name, part in snapshot.evaluation.get("environments", {}).items()}
        yield "evaluation_pass_rate", "Of the latest evaluation.", "gauge", ("environment",), rates
        yield "evaluation_step", "Step that was evaluated.", "gauge", (), {(): snapshot.evaluation["step"]}


def _of_the_ledger(compute: Mapping[str, float]) -> Iterable[Family]:
    """compute: Ledger.snapshot()."""
    if not compute:
        return
    seconds = {(role, state): 3600 * compute[f"{role}_{state}_hours"] for role in ROLES for state in STATES}
    seconds[("teacher", "up")] = 3600 * compute.get("teacher_hours", 0.0)
    yield "device_seconds", "Device-seconds of the run.", "counter", ("role", "state"), seconds
    flops = {(role,): compute[f"{role}_flops"] for role in (*ROLES, "evaluation", "setup")}
    yield "model_flops", "Model FLOPs of the run, by formula.", "counter", ("role",), flops
    yield "trained_tokens", "Tokens trained on, prompts included.", "counter", (), {(): compute["trained_tokens"]}
    sampled = {("training",): compute["sampled_tokens"], ("evaluation",): compute["evaluation_tokens"]}
    yield "sampled_tokens", "Tokens sampled by the fleet.", "counter", ("purpose",), sampled


def _of_the_fleet(status: Mapping[str, Any]) -> Iterable[Family]:
    """status: Fleet.status()."""
    states = collections.Counter(server["state"] for server in status["servers"].values())
    yield "servers", "Servers by what they are to the trainer.", "gauge", ("state",), {
        (state,): float(count) for state, count in states.items()
    }  # fmt: skip
    yield "completions", "Completions on their way, by where they are.", "gauge", ("where",), {
        ("in_flight",): status["in_flight"], ("pending",): status["pending"], ("unscored",): status["unscored"]
    }  # fmt: skip
    yield "groups", "Groups on their way, and finished ones that wait for their batch.", "gauge", ("where",), {
        ("in_flight",): status["groups_in_flight"], ("ready",): status["groups_ready"]
    }  # fmt: skip
    waiting = {(name,): 1.0 for name in sorted(status["waits_for"])[:WAITED_FOR]}
    yield "waiting", "What the trainer waits for now; none: it does not wait.", "gauge", ("name",), waiting
