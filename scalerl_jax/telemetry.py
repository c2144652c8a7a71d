"""The run folder: all that a run is, under one --workdir.

    config.json            what the run is; another config is refused
    lock                   held by the trainer that runs
    metrics.jsonl          one row an update
    evals.jsonl            one row an evaluation
    rollouts/step-*.jsonl  some completions of some updates, to read
    events.out.tfevents.*  TensorBoard, in tensorboard/
    ledger.json            compute spent (ledger.py)
    checkpoints/           learner/checkpoint.py

A row is one write of one line, so a killed run leaves at most one torn line, at the end, which the next start drops. A
run that goes on from step s drops every row past s; the compute those rows cost stays in the ledger.
"""

import dataclasses
import fcntl
import importlib.util
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from scalerl_jax import config as config_lib
from scalerl_jax.config import Config, ConfigError

# Fields a run may be continued with other values of: they change where and how it runs, not what it is.
_FREE = ("telemetry.", "fleet.", "checkpoint.")
# What depends on the config: where none of it is there, the folder may be given another one.
_MADE = ("metrics.jsonl", "evals.jsonl", "checkpoints", "tokenizer", "model")


@dataclasses.dataclass(frozen=True)
class RolloutSample:
    """A completion as it was trained on."""

    group: int
    index: int  # in its group
    prompt: str
    answer: str  # the right one
    completion: str
    token_ids: Sequence[int]  # [tokens]
    logprobs: Sequence[float]  # [tokens], the generator's own; 0 at forced tokens
    versions: Sequence[tuple[int, int, int]]  # (step, start, end), covering [0, tokens)
    forced: Sequence[tuple[int, int]]  # (start, end)
    verdict: bool
    reward: float
    finish_reason: str
    task: str = ""  # of the prompt
    pieces: Sequence[str] = ()  # [tokens] the part of `completion` that each token adds; empty: it cannot be told


class RunFolder:
    """Opens a workdir for one trainer process: takes the lock, compares the config. `resume` then opens the logs.

    Raises ConfigError (one line) where the workdir belongs to another config or to a trainer that runs, or where a
    telemetry package asked for is not installed. `incarnation` names this trainer process.
    """

    def __init__(self, workdir: str, config: Config, *, clock: Callable[[], float] = time.time):
        for field, package in (("tensorboard", "tensorboard"), ("wandb_project", "wandb")):
            if getattr(config.telemetry, field) and importlib.util.find_spec(package) is None:
                value = getattr(config.telemetry, field)
                raise ConfigError(f"config.telemetry.{field}={value}: the package {package} is not installed")
        self.workdir = os.path.abspath(workdir)
        self.incarnation = time.time_ns()
        self._config = config
        self._clock = clock
        try:
            os.makedirs(self.workdir, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--workdir={workdir}: {error.strerror}") from error
        self._lock = _take_lock(self.path("lock"), workdir)
        self._compare_config(workdir)
        self._files: dict[str, int] = {}
        self._events: Any = None
        self._wandb: Any = None

    def path(self, *names: str) -> str:
        return os.path.join(self.workdir, *names)

    def resume(self, step: int) -> None:
        """The run begins, or goes on after `step` updates: writes config.json, cuts rows past `step`, opens the logs.

        Once, before the first row.
        """
        assert not self._files, "resume() comes before the first row"
        write_whole(self.path("config.json"), config_lib.to_json(self._config))
        for name in ("metrics.jsonl", "evals.jsonl"):
            path = self.path(name)
            if os.path.exists(path):
                rows = read_rows(path)
                kept = [row for row in rows if row["step"] <= step]
                if len(kept) < len(rows) or not _ends_whole(path):
                    write_whole(path, "".join(_line(row) for row in kept))
            self._files[name] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.makedirs(self.path("rollouts"), exist_ok=True)
        for name in os.listdir(self.path("rollouts")):
            found = re.fullmatch(r"step-(\d+)\.jsonl(\.tmp)?", name)
            if found and (int(found[1]) > step or found[2]):
                os.remove(self.path("rollouts", name))
        if self._config.telemetry.tensorboard:
            from scalerl_jax.eventfile import EventFile  # tensorboard is optional

            self._events = EventFile(self.path("tensorboard"), first_step=step + 1)
        if self._config.telemetry.wandb_project:
            import wandb  # optional

            self._wandb = wandb.init(
                project=self._config.telemetry.wandb_project,
                dir=self.workdir,
                id=_run_id(self.path("wandb_id")),
                name=os.path.basename(self.workdir),
                resume="allow",
                config=config_lib.leaves(self._config),
            )

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """The row of update `step`: `values` (numbers, nested mappings and lists of them) beside step and time.

        Numbers also go to TensorBoard and W&B, nested ones as outer/inner; lists stay in the file.
        """
        row = {"step": step, "time": self._clock(), "incarnation": self.incarnation, **_plain(values)}
        self._append("metrics.jsonl", row)
        self._scalars(step, _plain(values))

    def evaluation(
        self,
        *,
        step: int,
        version: int,
        passes: Sequence[int],
        samples: int,
        seconds: float,
        compute: Mapping[str, float],
        values: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One evaluation: how many of `samples` completions are right, prompt by prompt; returns the row.

        `version` sampled every token; `compute` is the ledger's snapshot, whose columns join the row.
        """
        assert all(0 <= count <= samples for count in passes) and passes
        row = {
            "step": step,
            "version": version,
            "time": self._clock(),
            "incarnation": self.incarnation,
            "pass_rate": sum(passes) / (len(passes) * samples),
            "prompts": len(passes),
            "samples": samples,
            "seconds": seconds,
            **compute,
            **(values or {}),
            "passes": list(passes),
        }
        row = _plain(row)
        self._append("evals.jsonl", row)
        shown = {"pass_rate": row["pass_rate"], "seconds": seconds, **_plain(values or {})}
        self._scalars(step, {"evaluation": shown})
        return row

    def evaluations(self) -> list[dict[str, Any]]:
        """The rows of evals.jsonl, in order."""
        return read_rows(self.path("evals.jsonl")) if os.path.exists(self.path("evals.jsonl")) else []

    def last_evaluation(self) -> int:
        """The step of the latest row of evals.jsonl; -1 without one."""
        return max((row["step"] for row in self.evaluations()), default=-1)

    def wants_rollouts(self, step: int) -> bool:
        telemetry = self._config.telemetry
        return telemetry.samples > 0 and telemetry.samples_every > 0 and step % telemetry.samples_every == 0

    def rollouts(self, step: int, samples: Iterable[RolloutSample]) -> None:
        """Writes down the first config.telemetry.samples of them, whole or not at all."""
        lines = []
        for sample, _ in zip(samples, range(self._config.telemetry.samples), strict=False):
            row = {"step": step, **dataclasses.asdict(sample)}
            row["logprobs"] = [round(float(value), 6) for value in sample.logprobs]
            lines.append(_line(_plain(row)))
        write_whole(self.path("rollouts", f"step-{step:08d}.jsonl"), "".join(lines))

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish()
        os.close(self._lock)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compare_config(self, workdir: str) -> None:
        """Refuses another config, except where a first start failed and left nothing behind."""
        path = self.path("config.json")
        made = [self.path(name) for name in _MADE]
        if not os.path.exists(path) or not any(os.path.exists(name) and os.path.getsize(name) for name in made):
            write_whole(path, config_lib.to_json(self._config))
            return
        try:
            with open(path) as file:
                old = json.load(file)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}: is not JSON ({error})") from error
        difference = first_difference(old, self._config)
        if difference:
            raise ConfigError(f"--workdir={workdir}: holds a run of another config: {difference}")

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        assert self._files, "resume() comes before the first row"
        data = _line(row).encode()
        written = os.write(self._files[name], data)
        if written != len(data):
            raise OSError(f"{self.path(name)}: only {written} of {len(data)} bytes of a row could be written")

    def _scalars(self, step: int, values: Mapping[str, Any]) -> None:
        scalars = dict(_flat(values))
        if self._events is not None:
            self._events.add(step, scalars)
        if self._wandb is not None:
            self._wandb.log({"step": step, **scalars}, step=step)


def evaluation_counts(evals: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """(passes, trials) of N rows of evals.jsonl, as fit_sigmoid takes them.

    By prompt [N, prompts], or totals [N] where the prompts changed and only totals can be compared.
    """
    if len({len(row["passes"]) for row in evals}) == 1:
        passes = np.array([row["passes"] for row in evals], np.float64)
        return passes, np.broadcast_to(np.array([[row["samples"]] for row in evals], np.float64), passes.shape)
    totals = np.array([sum(row["passes"]) for row in evals], np.float64)
    return totals, np.array([len(row["passes"]) * row["samples"] for row in evals], np.float64)


def read_rows(path: str) -> list[dict[str, Any]]:
    """The rows of a JSONL file; a torn last line (no newline) is left out. Raises ValueError naming file and row."""
    with open(path) as file:
        lines = file.read().split("\n")
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: row {number} is not JSON ({error})") from error
    return rows


def write_whole(path: str, text: str) -> None:
    """Writes a file so that it is there whole or, after a crash, as it was before."""
    temporary = f"{path}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def first_difference(old: Mapping[str, Any], new: Config) -> str | None:
    """The first field in which a run may not differ from `old` (a config.json's contents), as a line; None: it goes on.

    A field that `old` lacks, because it was written before the field existed, counts as the default.
    """
    before = {**config_lib.leaves(Config()), **dict(_flat(old, separator=".", keep=True))}
    after = config_lib.leaves(new)
    for name in [*after, *(name for name in before if name not in after)]:
        if name.startswith(_FREE) or before[name] == after.get(name):
            continue
        if name not in after:
            return f"config.{name} is {before[name]!r} there and is not a field any more"
        if name == "updates" and after[name] > before[name]:
            continue
        return f"config.{name} is {before[name]!r} there and {after[name]!r} now"
    return None


def _take_lock(path: str, workdir: str) -> int:
    """The descriptor that holds the lock; the kernel lets go of it when the process ends, however it ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise ConfigError(f"--workdir={workdir}: a trainer (process {holder}) is running in it") from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _run_id(path: str) -> str:
    """The W&B id of this run, made at its first start."""
    if not os.path.exists(path):
        write_whole(path, f"{time.time_ns():x}")
    with open(path) as file:
        return file.read().strip()


def _ends_whole(path: str) -> bool:
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        if file.tell() == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """As JSON can hold it: arrays as lists, NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):  # numpy and jax, scalars and arrays
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _flat(values: Mapping[str, Any], prefix: str = "", *, separator: str = "/", keep: bool = False) -> Iterator[Any]:
    """(joined name, leaf) of each leaf; only numbers, unless `keep`."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}{separator}", separator=separator, keep=keep)
        elif keep or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield prefix + key, value
