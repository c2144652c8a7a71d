"""Makes the jax engine for scalerl-serve; this engine adds no flags."""

import logging
from typing import TYPE_CHECKING

from rollout_server.engines import model_folder

if TYPE_CHECKING:
    from rollout_server.engines.engine import Engine, EngineOptions


async def make(options: "EngineOptions") -> "Engine":
    """Raises UsageError or ValueError in one line."""
    model_folder.check(options.model, weights=True)
    logging.getLogger("jax._src.xla_bridge").addFilter(_is_found)
    from rollout_server.engines.jax.engine import JaxEngine

    return JaxEngine(options)


def _is_found(record: logging.LogRecord) -> bool:
    """Filters jax's log lines about backends that it did not find; the engine logs its own device."""
    return not record.getMessage().startswith("Unable to initialize backend")
