"""Where the numbers of a run's rows go besides its own files: TensorBoard and W&B, as the config asks.

W&B drops rows whose step is older than its last one: those of evaluations beside training, and those repeated after
going back to a checkpoint. So W&B gets no step of its own: the step is logged as a value, the x axis.
"""

import importlib.util
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from scalerl_jax import config_check
from scalerl_jax.config import Config
from scalerl_jax.config_check import ConfigError
from scalerl_jax.system.files import write_whole


def check_installed(config: Config) -> None:
    """Raises ConfigError (one line) where a package that the config asks for is not installed."""
    for field, package in (("tensorboard", "tensorboard"), ("wandb_project", "wandb")):
        value = getattr(config.telemetry, field)
        if value and importlib.util.find_spec(package) is None:
            raise ConfigError(f"config.telemetry.{field}={value}: the package {package} is not installed")


class Trackers:
    """The trackers of one trainer process, for the rows after `step`."""

    def __init__(self, workdir: str, config: Config, *, step: int):
        self._events: Any = None
        self._wandb: Any = None
        self._drawn: set[str] = set()  # names whose x axis W&B knows
        if config.telemetry.tensorboard:
            from scalerl_jax.run.event_file import EventFile  # tensorboard is optional

            self._events = EventFile(os.path.join(workdir, "tensorboard"), first_step=step + 1)
        if config.telemetry.wandb_project:
            self._wandb = _start_wandb(workdir, config)

    def add(self, step: int, values: Mapping[str, Any], *, axis: str) -> None:
        """The numbers among `values`; nested ones as outer/inner. axis: the name of W&B's x."""
        scalars = dict(_flat(values))
        if self._events is not None:
            self._events.add(step, scalars)
        if self._wandb is not None:
            for name in scalars.keys() - self._drawn:
                self._wandb.define_metric(name, step_metric=axis)
            self._drawn |= scalars.keys()
            self._wandb.log({axis: step, **scalars})

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish()


def _start_wandb(run_folder: str, config: Config) -> Any:
    """The W&B run of this folder, new or resumed."""
    import wandb  # optional

    return wandb.init(
        project=config.telemetry.wandb_project,
        dir=run_folder,
        id=_run_id(os.path.join(run_folder, "wandb_id")),
        name=os.path.basename(run_folder),
        resume="allow",
        config=config_check.leaves(config),
        allow_val_change=True,  # the config may change at a restart
    )


def _run_id(path: str) -> str:
    """The W&B id of this run, made at its first start."""
    if not os.path.exists(path):
        write_whole(path, f"{time.time_ns():x}")
    with open(path, "rb") as file:
        name = file.read().strip().decode("ascii", errors="replace")
    if not re.fullmatch(r"[\w-]+", name, flags=re.ASCII):
        raise ConfigError(f"{path}: is no W&B id ({name[:32]!r}); without the file a new W&B run is begun")
    return name


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(joined name, leaf) of each leaf that is a number."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + key, value
