"""A learner around a small decoder, for tests."""

import dataclasses
import functools
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from scalerl_jax.config import ObjectiveConfig, OptimizerConfig
from scalerl_jax.learner import optimizer as optimizer_lib
from scalerl_jax.learner.step import Layout, Learner
from scalerl_jax.model import Precision
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.sharding import make_mesh
from scalerl_jax.objective import policy_loss


def learner_of(
    decoder: DecoderConfig,
    layout: Layout,
    *,
    mesh: Mesh | None = None,
    precision: Precision | None = None,
    optimizer: optax.GradientTransformation | None = None,
    learning_rate: float = 1e-2,
    warmup_steps: int = 0,
    **objective: Any,
) -> Learner:
    """Not started. On the first device; with the defaults of the config, where nothing else is said.

    objective: fields of ObjectiveConfig.
    """
    rates = OptimizerConfig(learning_rate=learning_rate, warmup_steps=warmup_steps)
    return Learner(
        decoder=decoder,
        optimizer=optimizer or optimizer_lib.from_config(rates),
        mesh=mesh if mesh is not None else make_mesh(fsdp=1, devices=jax.devices()[:1]),
        precision=precision or Precision(),
        loss=functools.partial(policy_loss, objective=ObjectiveConfig(**objective)),
        layout=dataclasses.replace(
            layout, reference="reference_kl" in objective, entropy_gradient="entropy_bonus" in objective
        ),
    )
