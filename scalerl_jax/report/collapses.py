"""The collapses of a run, for its last lines and its page."""

from collections.abc import Sequence
from typing import Any

from scalerl_jax.run import collapse_record
from scalerl_jax.run.alarms import Alarm
from scalerl_jax.run.collapse import first_collapse

_ADVICE = "go back to the checkpoint of update {good} or an earlier one, with a lower learning rate or fresher tokens"


def went_back(workdir: str) -> list[str]:
    """A sentence for each time. Raises ValueError where collapse.json is damaged."""
    return [one.sentence() for one in collapse_record.read(workdir) if one.then == collapse_record.WENT_BACK]


def collapse(metrics: Sequence[dict[str, Any]], evals: Sequence[dict[str, Any]]) -> Alarm | None:
    """That of which the rows tell that are in the run."""
    found = first_collapse(metrics, evals)
    if found is None:
        return None
    return Alarm("", f"{found} (raised at step {found.step})", _ADVICE.format(good=found.last_good), loud=True)
