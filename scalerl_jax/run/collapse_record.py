"""collapse.json in a run folder: the collapses at which it stopped or went back (going_back.py)."""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from scalerl_jax.system.files import write_whole
from scalerl_jax.system.json_values import read_object

FILE, ASIDE = "collapse.json", "collapsed"

# What became of a collapse. OVERRULED: it had stopped the run, which went on all the same.
STOPPED, GOING_BACK, WENT_BACK, OVERRULED = "stopped", "going back", "went back", "overruled"
_KINDS = {"step": int, "since": int, "last_good": int, "says": str, "then": str, "to": int, "device_hours": float | int}


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


def write(workdir: str, entries: list[Entry]) -> None:
    text = json.dumps({"collapses": [dataclasses.asdict(entry) for entry in entries]}, indent=1)
    write_whole(os.path.join(workdir, FILE), text + "\n")
