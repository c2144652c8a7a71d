"""AdamW as in the paper: constant rate after a linear warm-up, epsilon 1e-15, float32 masters and moments.

With decay_steps the rate falls linearly to 0 after the warm-up, as other trainers have it.

The rate, the decays and the other numbers of a step are arguments of the compiled step, so another rate compiles
nothing. Weight decay excludes biases and the norms' scales (the paper does not specify it). The warm-up counts
optimizer steps, so a batch with no surviving prompt does not advance it.

At a rate of 5e-7 a float32 weight of 8, whose last bit is 9.5e-7, receives .3 % of the sum of 1,000 updates, and one of
5 receives 63 %; norms' scales of published models are that large. So vectors (norms' scales and biases) have a
compensation: the rounding error so far, which is added to their next update:

    y = update + c;  p' = p + y;  c' = what of y is not in p'        exactly, by Knuth's two-sum

Matrices have none: it would be a third moment, and their weights are small.

Off by default, VCPO's step (arXiv 2602.17616): the learning rate of a step, weight decay included, is multiplied by

    sqrt(min(1, ess / ess_reference))       ess = (sum s)^2 / (n sum s^2)

over the n completions that are trained on, s their importance ratios, each the product of its tokens' (batch.py),
whatever the loss caps. The moments use the unscaled gradient. Its other half, a baseline of least variance, is left
out.
"""

import math
from collections.abc import Mapping
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
    """True at the weights that decay, by their rows: all but biases and the norms' scales."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in _KEPT, params)


def vectors(params: Params) -> Params:
    """The leaves that have a compensation, biases and the norms' scales, of a tree like the parameters."""
    return {
        name: vectors(leaf) if name == "layers" else leaf
        for name, leaf in params.items()
        if name == "layers" or name in _KEPT
    }


def apply_updates(params: Params, updates: Params, compensation: Params) -> tuple[Params, Params]:
    """(parameters, compensation) after the updates. compensation: like `vectors`, float32, zeros at the start."""
    before, moved = vectors(params), optax.apply_updates(params, updates)
    wanted = jax.tree.map(jax.numpy.add, vectors(updates), compensation)
    after = jax.tree.map(jax.numpy.add, before, wanted)

    def left(p: jax.Array, y: jax.Array, total: jax.Array) -> jax.Array:
        added = total - p
        return (p - (total - added)) + (y - added)

    whole = {**moved, **after, "layers": {**moved["layers"], **after["layers"]}}
    return whole, jax.tree.map(left, before, wanted, after)


Numbers = Mapping[str, Any]  # of one step, by their names in OptimizerConfig; floats or traced


def numbers_of(config: OptimizerConfig, learning_rate: float) -> dict[str, float]:
    """The numbers of a step at this learning rate."""
    names = ("beta1", "beta2", "epsilon", "weight_decay")
    return {
        **{name: float(getattr(config, name)) for name in names},
        "max_grad_norm": config.max_grad_norm or math.inf,
        "learning_rate": learning_rate,
    }


def adamw(numbers: Numbers) -> optax.GradientTransformation:
    """AdamW with these numbers; its state has the same form for all of them."""
    return optax.chain(
        optax.clip_by_global_norm(numbers["max_grad_norm"]),
        optax.adamw(
            numbers["learning_rate"],
            b1=numbers["beta1"],
            b2=numbers["beta2"],
            eps=numbers["epsilon"],
            weight_decay=numbers["weight_decay"],
            mask=decayed,
        ),
    )


def init(params: Params) -> optax.OptState:
    """The state before the first step."""
    return adamw(numbers_of(OptimizerConfig(), 0.0)).init(params)


def learning_rate(config: OptimizerConfig, steps: int) -> float:
    """The learning rate of the step after `steps`: constant after a linear warm-up, or falling linearly to 0 over
    decay_steps."""
    rate = config.learning_rate * min(1.0, (steps + 1) / max(1, config.warmup_steps))
    if not config.decay_steps:
        return rate
    return rate * min(1.0, max(0.0, 1 - (steps - config.warmup_steps) / config.decay_steps))


def step_scale(config: OptimizerConfig, effective_sample_size: float) -> float:
    """The factor of a step's learning rate. effective_sample_size: of its completions, as a share of them."""
    if config.ess_reference == 0:
        return 1.0
    return math.sqrt(min(1.0, effective_sample_size / config.ess_reference))


def abstract_state(params: Params, mesh: Mesh) -> optax.OptState:
    """The optimizer's state for `params` (as abstract_params): ShapeDtypeStructs.

    Moments are sharded as their parameters; counters are replicated.
    """
    whole = NamedSharding(mesh, PartitionSpec())

    def placed(struct: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding = whole) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)

    state: Any = jax.eval_shape(init, params)
    return optax.tree_map_params(
        init, lambda own, of: placed(own, of.sharding), state, params, transform_non_params=placed
    )
