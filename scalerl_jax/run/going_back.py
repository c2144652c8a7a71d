"""What a run does at a collapse: it stops, or goes back to the last good checkpoint.

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
import os
import re

from scalerl_jax.cli.entry import UserError
from scalerl_jax.learner.checkpoint import set_aside, steps_there
from scalerl_jax.run.collapse import Collapse
from scalerl_jax.run.collapse_record import ASIDE, GOING_BACK, OVERRULED, STOPPED, WENT_BACK, Entry, read, write
from scalerl_jax.run.jsonl import line_of, read_rows
from scalerl_jax.system.files import write_whole

_FIELD = "--config.checkpoint.on_collapse"


class Collapsed(SystemExit):
    """Ends a run whose policy has collapsed; `again`: the same command is to be started once more, and goes back."""

    EXIT_CODE = 3

    def __init__(self, line: str, *, again: bool = False):
        super().__init__(self.EXIT_CODE)
        self.line, self.again = line, again

    def __str__(self) -> str:
        return self.line


def leave(workdir: str, found: Collapse, *, on_collapse: str) -> Collapsed:
    """Writes down that the run stops, or goes back, and gives what it ends with.

    All of its checkpoints are on disk.
    """
    entries = read(workdir)
    again = on_collapse == "rollback" and not any(entry.then == WENT_BACK for entry in entries)
    then = GOING_BACK if again else STOPPED
    entry = Entry(found.step, found.since, found.last_good, str(found), then)
    write(workdir, [*entries, entry])
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
            write(workdir, [*before, dataclasses.replace(last, then=OVERRULED)])
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
        write(workdir, [*before, entry])
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
    write(workdir, [*before, entry])
    return entry.sentence()


def _spent_after(workdir: str, step: int) -> float:
    """Device-hours of the updates after `step`, as the rows have them."""
    path = os.path.join(workdir, "metrics.jsonl")
    rows = read_rows(path) if os.path.exists(path) else []
    hours = [(row["step"], row.get("compute", {}).get("device_hours", 0.0)) for row in rows]
    at = max((spent for made, spent in hours if made <= step), default=0.0)
    return max(0.0, max((spent for _, spent in hours), default=0.0) - at)
