"""The weights that an engine decodes with, bit by bit, for tests."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def _replay(engine: Any) -> Mapping[str, np.ndarray]:
    return engine.weights


def _jax(engine: Any) -> Mapping[str, np.ndarray]:
    import jax

    from rollout_server.engines.jax_weights import model_params
    from scalerl_jax.model.hf import to_hf

    # From the dtype that they are computed in back to the wire's: exact, since they were rounded to it.
    return jax.device_get(to_hf(model_params(engine._weights, engine._config), engine._config, "bfloat16"))


# By the engine's name; bfloat16, or its bits.
DUMPS: dict[str, Callable[[Any], Mapping[str, np.ndarray]]] = {"replay": _replay, "jax": _jax}


def held_bits(engine: Any) -> dict[str, np.ndarray]:
    """Hugging Face name -> uint16."""
    return {name: np.ascontiguousarray(t).view(np.uint16) for name, t in DUMPS[engine.info.name](engine).items()}
