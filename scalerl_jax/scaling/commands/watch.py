"""scalerl-fit --watch: fits and draws again whenever the evaluations of a run have changed.

    scalerl-fit runs/a --watch --out=fits/a        beside a trainer; ends with the run, or with Ctrl-C

The files are looked at every --watch_every seconds and read only when their size or time has changed. A run folder of
ours has ended when the evaluation of its last update is there, or when the trainer that held its lock lives no more (on
this machine: run it beside the trainer); other files end with Ctrl-C only. A row that is just being written is read
again a moment later. Nothing is ever locked or written in the folder watched.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence

from rich.console import Console

from scalerl_jax.cli.entry import UserError
from scalerl_jax.config_check import saved_leaves
from scalerl_jax.scaling import tables, tfevents
from scalerl_jax.scaling.points import TooFewPoints
from scalerl_jax.system import files
from scalerl_jax.system.files import read_object

_SETTLE_SECONDS = 0.3  # time for an incomplete row to be finished
_ATTEMPTS = 3
_LONGEST_ROW = 16_000_000  # bytes; a row has a number for each held-out prompt
_Signature = tuple[tuple[str, int, int], ...]  # path, bytes, time of each file


def watch(paths: Sequence[str], draw: Callable[[Sequence[str]], None], *, every: float, console: Console) -> None:
    """Calls draw(paths) at once and after each change, until every run has ended or Ctrl-C.

    draw raises UserError where it cannot draw. If there are too few points, or a file that was readable before is not,
    watching continues; any other mistake is raised.
    """
    seen: _Signature | None = None
    drawn = 0
    printed: set[str] = set()
    folders = {path for path in paths if os.path.isdir(path)}  # a file may be missing briefly while it is rewritten

    def report(message: str) -> None:
        if message not in printed:
            printed.add(message)
            console.print(message, markup=False, soft_wrap=True)

    try:
        while True:
            gone = [path for path in paths if path in folders and not os.path.exists(path)]
            if gone:
                raise UserError(f"{gone[0]}: is gone; it was there when the watching began")
            ended = [_ended(path) for path in paths]  # checked before reading, so that the last row is not missed
            empty = [path for path in paths if _begun_without_evaluations(path)]
            now = _signature(paths)
            if empty:
                report(f"{empty[0]}: waiting for its first evaluation")
            elif now != seen:
                try:
                    now = _draw_settled(paths, draw)
                    drawn += 1
                except UserError as error:
                    if isinstance(error.__cause__, TooFewPoints):
                        report(f"waiting for more evaluations: {error}")
                    elif drawn and isinstance(error.__cause__, tables.InputError):
                        report(f"waiting: {error}")
                    else:
                        raise
                seen = now
            if paths and all(ended):
                break
            time.sleep(every)
    except KeyboardInterrupt:
        console.print(f"stopped watching; drawn {drawn} times", markup=False)
        return
    if not drawn:
        raise UserError(f"{', '.join(paths)}: ended with too few evaluations to fit")
    report("; ".join(dict.fromkeys(reason for reason in ended if reason)))


def _draw_settled(paths: Sequence[str], draw: Callable[[Sequence[str]], None]) -> _Signature:
    """Draws once no file ends in an incomplete row; returns the signature taken just before."""
    for attempt in range(_ATTEMPTS):
        if any(_unfinished(path) for path, *_ in _signature(paths)):
            time.sleep(_SETTLE_SECONDS)
        drawn = _signature(paths)
        try:
            draw(paths)
        except UserError as error:
            if attempt == _ATTEMPTS - 1 or not isinstance(error.__cause__, tables.InputError):
                raise
            time.sleep(_SETTLE_SECONDS)
        else:
            return drawn
    raise AssertionError("the last attempt draws or raises")


def _signature(paths: Sequence[str]) -> _Signature:
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # replaced between the two calls; the reader reports missing files
            for file in tables.files_of(path):
                status = os.stat(file)
                found.append((file, status.st_size, status.st_mtime_ns))
    return tuple(found)


def _unfinished(path: str) -> bool:
    """Whether a file of lines ends in an incomplete line."""
    return os.path.isfile(path) and not tfevents.is_event_file(path) and not files.ends_whole(path)


def _ours(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "config.json")) and os.path.isfile(os.path.join(path, "lock"))


def _begun_without_evaluations(path: str) -> bool:
    rows = os.path.join(path, tables.RUN_FOLDER_FILE)
    return _ours(path) and not (os.path.isfile(rows) and os.path.getsize(rows))


def _ended(path: str) -> str:
    """The reason why no more evaluations will come, or "" while they may."""
    if not _ours(path):
        return ""
    config = os.path.join(path, "config.json")
    try:
        with open(os.path.join(path, "lock"), encoding="utf-8", errors="replace") as file:
            holder = file.read().strip()
        steps = saved_leaves(read_object(config)).get("max_steps")
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from error
    except ValueError:
        steps = None
    if not isinstance(steps, int):
        raise UserError(f"{config}: is not the config of a run")
    if _last_step(os.path.join(path, tables.RUN_FOLDER_FILE)) >= steps:
        return f"{path}: has ended, with update {steps}"
    if holder.isdigit() and files.lives(int(holder)):
        return ""
    return f"{path}: no trainer is running in it on this machine"


def _last_step(path: str) -> int:
    """The step of the last complete row; -1 without one."""
    if not os.path.isfile(path):
        return -1
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - _LONGEST_ROW))
        rows = file.read().split(b"\n")[:-1]
    try:
        row = json.loads(rows[-1]) if rows else {}
    except (ValueError, RecursionError):  # draw reads the same row, and reports its fault
        return -1
    step = row.get("step", -1) if isinstance(row, dict) else -1
    return step if isinstance(step, int) else -1
