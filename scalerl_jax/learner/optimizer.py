"""AdamW as the paper runs it: constant rate after a linear warm-up, epsilon 1e-15, float32 masters and moments.

Weight decay leaves the norms' scales alone (the paper does not say). The warm-up counts optimizer steps, so a batch
with no surviving prompt does not advance it.
"""

from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalerl_jax.config import OptimizerConfig
from scalerl_jax.model.decoder import Params
from scalerl_jax.model.families import FAMILIES

# A leaf's name means the same weight in every family that has it.
_KEPT = {row.leaf for family in FAMILIES.values() for row in family.ROWS if not row.decays}


def decayed(params: Params) -> Params:
    """True at the weights that decay, as their rows say: all but the norms' scales."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in _KEPT, params)


def adamw(
    schedule: optax.Schedule, *, beta1: float, beta2: float, epsilon: float, weight_decay: float, clip: float = 0.0
) -> optax.GradientTransformation:
    adam = optax.adamw(schedule, b1=beta1, b2=beta2, eps=epsilon, weight_decay=weight_decay, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(clip), adam) if clip > 0 else adam


def from_config(config: OptimizerConfig) -> optax.GradientTransformation:
    def schedule(count: jax.Array) -> jax.Array:
        return config.learning_rate * jax.numpy.minimum(1.0, (count + 1) / max(1, config.warmup_steps))

    return adamw(
        schedule,
        beta1=config.beta1,
        beta2=config.beta2,
        epsilon=config.epsilon,
        weight_decay=config.weight_decay,
        clip=config.max_grad_norm,
    )


def state_shardings(
    optimizer: optax.GradientTransformation, params: Params, shardings: Params, mesh: Mesh
) -> optax.OptState:
    """Moments lie where their parameters lie; counters are whole everywhere. `params` may be abstract."""
    whole = NamedSharding(mesh, PartitionSpec())
    state: Any = jax.eval_shape(optimizer.init, params)
    return optax.tree_map_params(
        optimizer, lambda _, sharding: sharding, state, shardings, transform_non_params=lambda _: whole
    )
