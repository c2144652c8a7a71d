"""The run folder: all that a run is, under one --workdir.

    config.json            what the run is; what may be changed, and how, see continuing.py
    config_history.jsonl   what was changed, and from which step on
    lock                   held by the trainer that runs
    incarnation            by which servers know that trainer; the next one's is above it
    metrics.jsonl          one row an update
    evals.jsonl            one row an evaluation
    rollouts/step-*.jsonl  some completions of some updates, to read
    events.out.tfevents.*  TensorBoard, in tensorboard/
    ledger.json            compute spent (ledger.py)
    checkpoints/           learner/checkpoint.py

A row is one write of one line, so a killed run leaves at most one torn line, at the end, which the next start drops; a
full disk leaves none. A run that goes on from step s drops every row past s; the compute those rows cost stays in the
ledger.
"""

import dataclasses
import fcntl
import importlib.util
import json
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from scalerl_jax import config_check, config_io
from scalerl_jax.config import Config
from scalerl_jax.config_names import ConfigError
from scalerl_jax.run import continuing
from scalerl_jax.system import files
from scalerl_jax.system.files import write_whole

# What depends on the config: where none of it is there, the folder may be given another one.
_MADE = ("metrics.jsonl", "evals.jsonl", "checkpoints", "tokenizer", "model")

LARGEST_INCARNATION = 2**63  # nanoseconds since 1970, as every trainer's: the year 2262

_MEND = "remove that row, or put the file back from a copy"


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
    correct: bool  # "verdict" in the file
    reward: float
    finish_reason: str
    task: str = ""  # of the prompt
    pieces: Sequence[str] = ()  # [tokens] the part of `completion` that each token adds; empty: it cannot be told


class RunFolder:
    """Opens a workdir for one trainer process: takes the lock, compares the config. `resume` then opens the logs.

    Raises ConfigError (one line) where the workdir belongs to another config or to a trainer that runs, or where a
    telemetry package asked for is not installed. `incarnation` names this trainer process.
    """

    def __init__(
        self,
        workdir: str,
        config: Config,
        *,
        allow: Collection[str] = (),
        warm_start: bool = False,
        clock: Callable[[], float] = time.time,
    ):
        for field, package in (("tensorboard", "tensorboard"), ("wandb_project", "wandb")):
            if getattr(config.telemetry, field) and importlib.util.find_spec(package) is None:
                value = getattr(config.telemetry, field)
                raise ConfigError(f"config.telemetry.{field}={value}: the package {package} is not installed")
        allow = continuing.allowed_fields(allow)  # a slip is told at the first start, not at the next one
        self.workdir = os.path.abspath(workdir)
        self._config = config
        self._clock = clock
        self.changes: Sequence[continuing.Change] = ()  # of the config, since the run was here last
        try:
            os.makedirs(self.workdir, exist_ok=True)
            self._lock = _take_lock(self.path("lock"), workdir)
            try:
                files.tidy(self.workdir)
                self._compare_config(workdir, allow, warm_start)
                self.incarnation = time.time_ns()
                self.outrank(self._last_incarnation())
                write_whole(self.path("incarnation"), f"{self.incarnation}\n")
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise ConfigError(f"--workdir={workdir}: {files.reason(error)}") from error
        self._files: dict[str, int] = {}
        self._events: Any = None
        self._wandb: Any = None
        self._drawn: set[str] = set()  # names whose x axis W&B has been told

    def path(self, *names: str) -> str:
        return os.path.join(self.workdir, *names)

    def outrank(self, told: int) -> None:
        """Makes our incarnation larger than that of another trainer, and remembers it for the one after us.

        No trainer's is above LARGEST_INCARNATION: such a value came from a server that made it up, and is ignored.
        """
        if self.incarnation <= told < LARGEST_INCARNATION:
            self.incarnation = told + 1
            write_whole(self.path("incarnation"), f"{self.incarnation}\n")

    def _last_incarnation(self) -> int:
        """Of the trainer process that was here before us; 0: none was, or it did not say."""
        try:
            with open(self.path("incarnation"), encoding="utf-8") as file:
                return int(file.read())
        except (FileNotFoundError, ValueError):
            return 0

    def resume(self, step: int) -> None:
        """The run begins, or goes on after `step` updates: writes config.json, cuts rows past `step`, opens the logs.

        Once, before the first row.
        """
        assert not self._files, "resume() comes before the first row"
        if self.changes:
            row = continuing.history_row(self.changes, step=step, time=self._clock())
            history = self.path("config_history.jsonl")
            with files.naming(history):
                descriptor = os.open(history, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                files.append(descriptor, row.encode(), history)
            finally:
                os.close(descriptor)
        write_whole(self.path("config.json"), config_io.to_json(self._config))
        for name in ("metrics.jsonl", "evals.jsonl"):
            path = self.path(name)
            if os.path.exists(path):
                _cut(path, step)
            with files.naming(path):
                self._files[name] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        samples = self.path("rollouts")
        with files.naming(samples):
            os.makedirs(samples, exist_ok=True)
            files.tidy(samples)
            for name in os.listdir(samples):
                found = re.fullmatch(r"step-(\d+)\.jsonl(\.tmp)?", name)
                if found and (int(found[1]) > step or found[2]):
                    os.remove(os.path.join(samples, name))
        if self._config.telemetry.tensorboard:
            from scalerl_jax.run.event_file import EventFile  # tensorboard is optional

            self._events = EventFile(self.path("tensorboard"), first_step=step + 1)
        if self._config.telemetry.wandb_project:
            self._wandb = _start_wandb(self.workdir, self._config)

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
        self._scalars(step, {"evaluation": shown}, axis="evaluation/step")
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
            fields = {"verdict" if name == "correct" else name: value for name, value in vars(sample).items()}
            row = {"step": step, **fields}
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

    def _compare_config(self, workdir: str, allow: Collection[str], warm_start: bool) -> None:
        """Refuses another config, except where a first start failed and left nothing behind."""
        path = self.path("config.json")
        made = [self.path(name) for name in _MADE]
        if not os.path.exists(path) or not any(os.path.exists(name) and os.path.getsize(name) for name in made):
            write_whole(path, config_io.to_json(self._config))
            return
        try:
            with open(path, encoding="utf-8") as file:
                old = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is not JSON ({error}): what the run is cannot be told") from error
        if not isinstance(old, dict):
            raise ConfigError(f"{path}: is not an object: what the run is cannot be told")
        another = f"--workdir={workdir}: holds a run of another config"
        try:
            self.changes = continuing.changes(old, self._config)
        except ConfigError as error:
            raise ConfigError(f"{another}: {error}") from None
        refused = continuing.refused(self.changes, allowed=allow, warm_start=warm_start)
        if refused:
            names = ",".join(change.name for change in refused)
            more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
            raise ConfigError(f"{another}: {refused[0]}{more}; --allow={names} goes on with what is given now")

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        assert self._files, "resume() comes before the first row"
        files.append(self._files[name], _line(row).encode(), self.path(name))

    def _scalars(self, step: int, values: Mapping[str, Any], *, axis: str = "step") -> None:
        """To TensorBoard and W&B.

        W&B drops what comes with an older step of its own than the last: evaluations beside training, and all that a
        run makes again after it has gone back to a checkpoint. So it is given none, and `axis` is logged as a value.
        """
        scalars = dict(_flat(values))
        if self._events is not None:
            self._events.add(step, scalars)
        if self._wandb is not None:
            for name in scalars.keys() - self._drawn:
                self._wandb.define_metric(name, step_metric=axis)
            self._drawn |= scalars.keys()
            self._wandb.log({axis: step, **scalars})


def _start_wandb(run_folder: str, config: Config) -> Any:
    """The W&B run of this folder, begun or gone on with."""
    import wandb  # optional

    return wandb.init(
        project=config.telemetry.wandb_project,
        dir=run_folder,
        id=_run_id(os.path.join(run_folder, "wandb_id")),
        name=os.path.basename(run_folder),
        resume="allow",
        config=config_check.leaves(config),
        allow_val_change=True,  # what may change at a restart
    )


def _cut(path: str, step: int) -> None:
    """Drops what is past `step`, and a torn last row; where only the end of the file goes, that needs no room."""
    rows = read_rows(path)
    kept = [row for row in rows if row["step"] <= step]
    if len(kept) == len(rows) and _ends_whole(path):
        return
    if rows[: len(kept)] == kept:
        with open(path, "rb") as file:
            end = sum(len(file.readline()) for _ in kept)
        with files.naming(path):
            os.truncate(path, end)
    else:
        write_whole(path, "".join(_line(row) for row in kept))


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
    """The rows of a JSONL file of a run; a torn last line (no newline) is left out.

    Raises ValueError (one line) naming file and row where one is not a row: no JSON, no object, no step.
    """
    with files.naming(path), open(path, "rb") as file:
        lines = file.read().split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            what = f"is not UTF-8 (byte {error.start + 1})" if isinstance(error, UnicodeDecodeError) else "is not JSON"
            why = f" ({error})" if isinstance(error, json.JSONDecodeError) else ""
            raise ValueError(f"{path}: row {number} {what}{why}; {_MEND}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {number} is not an object; {_MEND}")
        if not isinstance(row.get("step"), int) or isinstance(row["step"], bool):
            raise ValueError(f"{path}: row {number} has no step; {_MEND}")
        rows.append(row)
    return rows


def _take_lock(path: str, workdir: str) -> int:
    """The descriptor that holds the lock; the kernel lets go of it when the process ends, however it ends."""
    with files.naming(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise ConfigError(f"--workdir={workdir}: a trainer (process {holder}) is running in it") from None
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _run_id(path: str) -> str:
    """The W&B id of this run, made at its first start."""
    if not os.path.exists(path):
        write_whole(path, f"{time.time_ns():x}")
    with open(path, "rb") as file:
        name = file.read().strip().decode("ascii", errors="replace")
    if not re.fullmatch(r"[\w-]+", name, flags=re.ASCII):
        raise ConfigError(f"{path}: is no W&B id ({name[:32]!r}); without the file a new W&B run is begun")
    return name


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


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(joined name, leaf) of each leaf that is a number."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + key, value
