"""collapse.json in a run folder: the collapses at which it stopped or went back, and going back.

A run that goes back only writes down that it does, and leaves; the start after that carries it out before anything is
read of the folder:

    1. the checkpoint it goes back to is written down: the newest one at or before the last good step
    2. the rows of metrics.jsonl and evals.jsonl after it are copied into collapsed/, samples of rollouts moved there
    3. the newer checkpoints are renamed, to collapsed-STEP-0
    4. that it is done is written down

Killed between any two of them it is carried out by the next start. Then the run goes on from its newest checkpoint, as
ever, and cuts the rows past it. What was spent stays in the ledger, which no step touches.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from scalerl_jax.cli.entry import UserError
from scalerl_jax.learner.checkpoint import set_aside, steps_there
from scalerl_jax.run.collapse import Collapse
from scalerl_jax.run.jsonl import line_of, read_rows
from scalerl_jax.system.files import write_whole
from scalerl_jax.system.json_values import read_object

FILE, ASIDE = "collapse.json", "collapsed"
_FIELD = "--config.checkpoint.on_collapse"

# What became of a collapse. OVERRULED: it had stopped the run, which went on all the same.
STOPPED, GOING_BACK, WENT_BACK, OVERRULED = "stopped", "going back", "went back", "overruled"
_KINDS = {"step": int, "since": int, "last_good": int, "says": str, "then": str, "to": int, "device_hours": float | int}


class Collapsed(SystemExit):
    """Ends a run whose policy has collapsed; `again`: the same command is to be started once more, and goes back."""

    EXIT_CODE = 3

    def __init__(self, line: str, *, again: bool = False):
        super().__init__(self.EXIT_CODE)
        self.line, self.again = line, again

    def __str__(self) -> str:
        return self.line


@dataclasses.dataclass(frozen=True)
class Entry:
    """A collapse, and what became of it."""

    step: int  # as of Collapse
    since: int
    last_good: int
    says: str
    then: str
    to: int = -1  # the checkpoint it goes back to, 0: the start; -1: not known yet
    device_hours: float = 0.0  # of the updates set aside, which stay booked

    def sentence(self) -> str:
        """Of one that went back."""
        return (
            f"went back from step {self.step} to step {self.to}: {self.says}; updates {self.to + 1} to {self.step} "
            f"({self.device_hours:.4g} device-hours, which stay booked) are set aside in {ASIDE}/"
        )


def read(workdir: str) -> list[Entry]:
    """Raises ValueError (one line) where the file is damaged."""
    path = os.path.join(workdir, FILE)
    if not os.path.exists(path):
        return []
    found = read_object(path).get("collapses")
    try:
        return [Entry(**{name: _checked(entry, name, kind) for name, kind in _KINDS.items()}) for entry in found or ()]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: is no list of collapses ({error}); put it back from a copy, or remove it") from None


def _checked(entry: Mapping[str, Any], name: str, kind: Any) -> Any:
    if not isinstance(entry, Mapping) or not isinstance(entry.get(name), kind):
        raise ValueError(f"{name} is missing or broken")
    return entry[name]


def _write(workdir: str, entries: list[Entry]) -> None:
    text = json.dumps({"collapses": [dataclasses.asdict(entry) for entry in entries]}, indent=1)
    write_whole(os.path.join(workdir, FILE), text + "\n")


def leave(workdir: str, found: Collapse, *, on_collapse: str) -> Collapsed:
    """Writes down that the run stops, or goes back, and gives what it ends with.

    All of its checkpoints are on disk.
    """
    entries = read(workdir)
    again = on_collapse == "rollback" and not any(entry.then == WENT_BACK for entry in entries)
    then = GOING_BACK if again else STOPPED
    entry = Entry(found.step, found.since, found.last_good, str(found), then)
    _write(workdir, [*entries, entry])
    if again:
        return Collapsed(f"goes back from step {found.step}: {found}", again=True)
    return Collapsed(f"stopped at step {found.step}: {_how_to_go_on(workdir, entries, entry)}")


def carry_out(workdir: str, *, on_collapse: str) -> str:
    """At a start, before the folder's checkpoints and rows are read: what the last collapse asks for; a line on it.

    Raises Collapsed where the run has stopped and is to go on neither way, and UserError where the file is damaged.
    """
    try:
        entries = read(workdir)
    except ValueError as error:
        raise UserError(str(error)) from None
    if not entries:
        return ""
    *before, last = entries
    if last.then == STOPPED:
        if on_collapse == "alarm":
            _write(workdir, [*before, dataclasses.replace(last, then=OVERRULED)])
            newest = max(steps_there(os.path.join(workdir, "checkpoints")), default=0)
            return f"going on from step {newest} as {_FIELD}=alarm asks: {last.says} (stopped at step {last.step})"
        if on_collapse == "stop" or any(entry.then == WENT_BACK for entry in before):
            raise Collapsed(f"stopped at step {last.step}: {_how_to_go_on(workdir, before, last)}")
        last = dataclasses.replace(last, then=GOING_BACK)
    if last.then != GOING_BACK:
        return ""
    return _go_back(workdir, before, last)


def _how_to_go_on(workdir: str, before: list[Entry], last: Entry) -> str:
    steps = steps_there(os.path.join(workdir, "checkpoints"))
    good = max((step for step in steps if step <= last.last_good), default=0)
    kept = f"the last good checkpoint is that of step {good}" if good else "no checkpoint of before is kept"
    if any(entry.then == WENT_BACK for entry in before):
        back = "the run has gone back once, and goes back no more"
    else:
        back = f"{_FIELD}=rollback goes back to {'it' if good else 'the start'}"
    return f"{last.says}; {kept}; {back}; {_FIELD}=alarm goes on from step {max(steps, default=0)}"


def _go_back(workdir: str, before: list[Entry], entry: Entry) -> str:
    """The steps that the module's docstring numbers."""
    checkpoints, aside = os.path.join(workdir, "checkpoints"), os.path.join(workdir, ASIDE)
    if entry.to < 0:
        to = max((step for step in steps_there(checkpoints) if step <= entry.last_good), default=0)
        entry = dataclasses.replace(entry, to=to, device_hours=_spent_after(workdir, to))
        _write(workdir, [*before, entry])
    os.makedirs(os.path.join(aside, "rollouts"), exist_ok=True)
    for name in ("metrics.jsonl", "evals.jsonl"):
        path = os.path.join(workdir, name)
        rows = [row for row in read_rows(path) if row["step"] > entry.to] if os.path.exists(path) else []
        write_whole(os.path.join(aside, name), "".join(map(line_of, rows)))
    samples = os.path.join(workdir, "rollouts")
    for name in os.listdir(samples) if os.path.isdir(samples) else ():
        found = re.fullmatch(r"step-(\d+)\.jsonl", name)
        if found and int(found[1]) > entry.to:
            os.rename(os.path.join(samples, name), os.path.join(aside, "rollouts", name))
    for step in steps_there(checkpoints):
        if step > entry.to:
            set_aside(checkpoints, step, ASIDE)
    entry = dataclasses.replace(entry, then=WENT_BACK)
    _write(workdir, [*before, entry])
    return entry.sentence()


def _spent_after(workdir: str, step: int) -> float:
    """Device-hours of the updates after `step`, as the rows have them."""
    path = os.path.join(workdir, "metrics.jsonl")
    rows = read_rows(path) if os.path.exists(path) else []
    hours = [(row["step"], row.get("compute", {}).get("device_hours", 0.0)) for row in rows]
    at = max((spent for made, spent in hours if made <= step), default=0.0)
    return max(0.0, max((spent for _, spent in hours), default=0.0) - at)
