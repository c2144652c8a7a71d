"""Every program of a run can be lowered for CUDA and for TPU, which needs neither: nothing in them is a CPU's alone."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from rollout_server.engines.jax import decode, prompts
from rollout_server.engines.jax.weights import decode_precision, decode_weights
from scalerl_jax.config import ObjectiveConfig, OptimizerConfig
from scalerl_jax.learner.optimizer import numbers_of as adamw_numbers
from scalerl_jax.learner.packing import pack, plain
from scalerl_jax.learner.weight_snapshots import WeightSnapshots
from scalerl_jax.model import Precision
from scalerl_jax.objective.losses import form_of, numbers_of
from tests.accelerator.test_numerics import make_trainer
from tests.support.params import DECODER

PRECISION = Precision("bfloat16", "bfloat16")
LENGTH, SLOTS = 256, 4


def lowered(function, platform: str, *arguments, **settings) -> str:
    return export.export(function, platforms=[platform])(*arguments, **settings).mlir_module()


def foreign(module: str) -> set[str]:
    """Calls of code that another library must have, besides those that only say how arrays are laid out."""
    called = set(re.findall(r'stablehlo\.custom_call @"?([\w.$]+)', module))
    return called - {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_update(platform):
    trainer = make_trainer(jax.devices("cpu")[0], DECODER, PRECISION, seq_len=LENGTH)
    batch = trainer._put(pack([plain(np.zeros(20))], length=LENGTH, rows=2)[0][0])
    params = trainer.state["params"]
    objective, optimizer = ObjectiveConfig(), OptimizerConfig()
    program = trainer._program(form_of(objective))
    carry = (trainer._zeros(params), {name: jnp.float32(0) for name in program.sums})
    copies = WeightSnapshots(DECODER, trainer.mesh, share=1 / 16)
    for name, function, arguments in (
        ("accumulate", program.run, (params, {}, carry, batch, trainer._numbers(numbers_of(objective)))),
        ("apply", trainer._apply, (trainer.state, carry[0], trainer._numbers(adamw_numbers(optimizer, 1.0)))),
        ("score", trainer._score, (params, {}, batch)),
        ("compare", copies._compare, (params, copies._nothing())),
    ):
        assert foreign(lowered(function, platform, *arguments)) == set(), name


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_engine(platform):
    trainer = make_trainer(jax.devices("cpu")[0], DECODER, PRECISION, seq_len=LENGTH)
    precision = decode_precision(PRECISION, platform)
    tensors = {name: np.asarray(value) for name, value in trainer.sync_weights().items()}
    weights = decode_weights(tensors, DECODER, PRECISION)
    state = decode.empty_state(DECODER, precision, slots=SLOTS, length=64)
    assert state.keys[0].dtype == "bfloat16"  # and not what a CPU wants
    slots = np.zeros(SLOTS, np.int32)
    both = {"config": DECODER, "precision": precision}
    prefix = decode.prefill(weights, np.zeros(64, np.int32), **both)[:2]
    settings = decode.empty_settings(SLOTS)
    shared = prompts.empty(DECODER, precision, rows=2, length=64)
    numbers = np.zeros(3, np.int32)
    chunk = {**both, "steps": 4, "maximum": 64}
    # Threefry is a kernel of JAX's own on GPUs.
    known = {"cu_threefry2x32_ffi"}
    for name, function, arguments, named in (
        ("prefill", decode.prefill, (weights, np.zeros(64, np.int32)), both),
        ("insert", decode.insert, (state, prefix, slots, slots, numbers, settings), {}),
        ("put", prompts.put, (shared, prefix, np.int32(0), np.int32(9)), {}),
        ("move", decode.move, (state, slots, slots, np.int32(0)), {}),
        ("decode", decode.decode_chunk, (weights, state), {**chunk, "width": SLOTS}),
        ("decode, shared prompts", decode.decode_chunk, (weights, state, shared), {**chunk, "width": SLOTS}),
        ("decode, half of the slots", decode.decode_chunk, (weights, state), {**chunk, "width": SLOTS // 2}),
    ):
        assert foreign(lowered(function, platform, *arguments, **named)) <= known, name
