"""The run folder: everything of a run, under one --workdir.

    config.json            the run's config; what may be changed, and how, see continuing.py
    config_history.jsonl   what was changed, and from which step on
    lock                   held by the running trainer
    incarnation            the number by which servers know that trainer; the next trainer's is larger
    metrics.jsonl          one row per update
    evals.jsonl            one row per evaluation
    rollouts/step-*.jsonl  some completions of some updates, to read
    events.out.tfevents.*  TensorBoard, in tensorboard/
    ledger.json            compute spent (ledger.py)
    checkpoints/           learner/checkpoint.py
    collapse.json          written when a collapse stops the run (collapse_guard.py)
    sessions/              requests and answers of agents (gateway/agents.py)

A row is one write of one line, so a killed run leaves at most one torn line, at the end, which the next start drops; a
full disk leaves none. A run that resumes from step s drops every row past s; the compute those rows cost stays in the
ledger.
"""

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from scalerl_jax import config_io
from scalerl_jax.cli.entry import UserError
from scalerl_jax.config import Config
from scalerl_jax.config_check import ConfigError
from scalerl_jax.learner.checkpoint import newest_step
from scalerl_jax.run import continuing, trackers
from scalerl_jax.run.jsonl import cut, line_of, read_rows
from scalerl_jax.system import files
from scalerl_jax.system.files import plain, read_object, write_whole

_OF_WARM_STARTS = ("model", "adapter", "tokenizer", "traces")  # folders that one writes, and may replace
LARGEST_INCARNATION = 2**63  # incarnations are nanoseconds since 1970: the year 2262


class RunFolder:
    """Opens a workdir for one trainer process: takes the lock, compares the config. `resume` then opens the logs.

    Raises ConfigError (one line) if the workdir belongs to another config or to a running trainer, or if a requested
    telemetry package is not installed. `incarnation` identifies this trainer process.
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
        trackers.check_installed(config)
        allow = continuing.allowed_fields(allow)  # a wrong name fails the first start, not the next one
        if not workdir:
            raise ConfigError("--workdir: is empty")
        self.workdir = os.path.abspath(workdir)
        self._config = config
        self._clock = clock
        self.changes: Sequence[continuing.FieldChange] = ()  # of the config, since the last start
        try:
            os.makedirs(self.workdir, exist_ok=True)
            self._lock = acquire_lock(self.path("lock"), f"--workdir={workdir}: a trainer")
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
        self._trackers: trackers.Trackers | None = None

    def path(self, *names: str) -> str:
        return os.path.join(self.workdir, *names)

    def outrank(self, other: int) -> None:
        """Makes our incarnation larger than that of another trainer, and saves it for the next trainer.

        No trainer's incarnation reaches LARGEST_INCARNATION: a server made such a value up, and it is ignored.
        """
        if self.incarnation <= other < LARGEST_INCARNATION:
            self.incarnation = other + 1
            write_whole(self.path("incarnation"), f"{self.incarnation}\n")

    def _last_incarnation(self) -> int:
        """The incarnation of the previous trainer process; 0 without a readable file."""
        try:
            with open(self.path("incarnation"), encoding="utf-8") as file:
                return int(file.read())
        except (FileNotFoundError, ValueError):
            return 0

    def resume(self, step: int) -> None:
        """Begins the run, or resumes after `step` updates: writes config.json, cuts rows past `step`, opens the logs.

        Called once, before the first row.
        """
        assert not self._files, "resume() comes before the first row"
        if self.changes:
            row = continuing.history_row(self.changes, step=step, time=self._clock())
            history = self.path("config_history.jsonl")
            with files.naming(history), open(history, "ab") as file:
                files.append(file.fileno(), row.encode(), history)
        write_whole(self.path("config.json"), config_io.to_json(self._config))
        for name in ("metrics.jsonl", "evals.jsonl"):
            path = self.path(name)
            if os.path.exists(path):
                cut(path, step)
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
        self._trackers = trackers.Trackers(self.workdir, self._config, step=step)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the row of update `step`: `values` (numbers, nested mappings and lists of them), step and time.

        Numbers also go to TensorBoard and W&B, nested ones as outer/inner; lists stay in the file.
        """
        values = plain(values)
        row = {"step": step, "time": self._clock(), "incarnation": self.incarnation, **values}
        self._record("metrics.jsonl", row, values, axis="step")

    def evaluation(
        self,
        *,
        step: int,
        found: Mapping[str, Any],
        seconds: float,
        compute: Mapping[str, float],
    ) -> dict[str, Any]:
        """Writes one evaluation of version `step`. Returns the row.

        found: its numbers, see pass_rates.py; the columns of `compute`, the ledger's snapshot, are added to them.
        """
        row = {
            "step": step,
            "version": step,
            "time": self._clock(),
            "incarnation": self.incarnation,
            "seconds": seconds,
            **compute,
            **found,
        }
        row = plain(row)
        shown = {"seconds": seconds, **plain(found)}
        self._record("evals.jsonl", row, {"evaluation": shown}, axis="evaluation/step")
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

    def rollouts(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Writes them, whole or not at all."""
        lines = [line_of(plain({"step": step, **sample})) for sample in samples]
        write_whole(self.path("rollouts", f"step-{step:08d}.jsonl"), "".join(lines))

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}
        if self._trackers is not None:
            self._trackers.close()
        os.close(self._lock)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compare_config(self, workdir: str, allow: Collection[str], warm_start: bool) -> None:
        """Refuses another config, unless a first start failed and left nothing behind."""
        path = self.path("config.json")
        if not os.path.exists(path):
            others = [name for name in _OF_WARM_STARTS if warm_start and os.path.exists(self.path(name))]
            if others:
                raise ConfigError(
                    f"--workdir={workdir}: holds {others[0]}, and no config.json of the warm start it is of"
                )
            write_whole(path, config_io.to_json(self._config))
            return
        try:
            old = read_object(path)
        except ValueError as error:
            raise ConfigError(f"{error}: what the run is cannot be told") from error
        if not continuing.has_begun(self.workdir):
            if not old.keys() >= {"learner", "rollout"}:
                raise ConfigError(
                    f"--workdir={workdir}: the config.json there is not a run's; begin in another workdir"
                )
            write_whole(path, config_io.to_json(self._config))
            return
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

    def _record(self, name: str, row: Mapping[str, Any], shown: Mapping[str, Any], *, axis: str) -> None:
        """Writes a row of a log, and `shown` to TensorBoard and W&B."""
        assert self._trackers is not None and name in self._files, "resume() comes before the first row"
        files.append(self._files[name], line_of(row).encode(), self.path(name))
        self._trackers.add(row["step"], shown, axis=axis)


def acquire_lock(path: str, running: str) -> int:
    """Takes the lock; returns its descriptor. The kernel releases it when the process ends, however it ends."""
    with files.naming(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise ConfigError(f"{running} (process {holder}) is running in it") from None
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def explain_write_errors(workdir: str) -> Iterator[None]:
    """Wraps a run: if the folder can no longer be written to, the run ends with one line (UserError)."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, files.WriteError) and error.filename is None:
            raise
        raise UserError(_resume_line(workdir, error)) from error


def _resume_line(workdir: str, error: OSError) -> str:
    folder, file = os.path.abspath(workdir), os.path.abspath(str(error.filename))
    inside = file.startswith(folder + os.sep)
    what = f"--workdir={workdir}" if inside or file == folder else file
    what = f"{what}: {files.reason(error)}" + (f" ({os.path.relpath(file, folder)})" if inside else "")
    if not os.path.isdir(folder):
        return f"--workdir={workdir}: the folder was deleted or moved while the run wrote to it"
    step = newest_step(os.path.join(folder, "checkpoints"))
    goes_on = f"the run goes on from step {step}" if step is not None else "the run begins again"
    when = "there is room" if error.errno in files.FULL else "that is fixed"
    return f"{what}; {goes_on} with the same command when {when}"
