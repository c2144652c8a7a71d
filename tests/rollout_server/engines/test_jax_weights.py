"""The decode weights made from those held and a change equal, to the bit, those made from whole tensors."""

import jax
import ml_dtypes
import numpy as np
import pytest

from rollout_server.engines.jax.weights import decode_weights, model_params
from scalerl_jax.contract.weight_delta import Change
from scalerl_jax.model import Precision
from scalerl_jax.model.tensor_layout import hf_tensors
from tests.support.models import toy_decoder
from tests.support.params import from_hf

# Query heads fill the width, so that `output` is square: its transposition shows in nothing but the values.
CONFIG = toy_decoder(vocab_size=40, family="qwen3_moe")
# Of the other families what is theirs alone, biases and experts with a shared one, in one dtype each.
CASES = [("qwen3_moe", compute, head) for compute in ("float32", "bfloat16") for head in ("default", "highest")]
CASES += [("qwen2", "float32", "default"), ("llama4_text", "bfloat16", "default")]


def same_bits(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize(("family", "compute", "head"), CASES)
def test_changes_are_scattered_to_where_they_belong(family: str, compute: str, head: str) -> None:
    config = toy_decoder(vocab_size=40, family=family)
    rng, precision = np.random.default_rng(0), Precision(compute=compute, sync="bfloat16", head=head)
    tensors = {name: rng.normal(size=shape).astype(ml_dtypes.bfloat16) for name, shape in hf_tensors(config).items()}
    held = decode_weights(tensors, config, precision)
    first = jax.tree.map(np.array, held)
    new, changes = {name: tensor.copy() for name, tensor in tensors.items()}, {}
    for number, (name, tensor) in enumerate(new.items()):
        if number % 5 == 0:
            continue  # as it was
        if number % 7 == 0:
            tensor[...] = rng.normal(size=tensor.shape)
            changes[name] = None
            continue
        positions = np.sort(rng.choice(tensor.size, rng.integers(0, tensor.size + 1), replace=False))
        tensor.reshape(-1)[positions] = rng.choice(
            np.array([-0.0, 1.5, -3e-39, 7e8], ml_dtypes.bfloat16), len(positions)
        )
        changes[name] = Change(positions, tensor.reshape(-1)[positions])
    made = decode_weights(new, config, precision, held=held, changes=changes)
    same_bits(made, decode_weights(new, config, precision))
    same_bits(held, first)  # a chunk that was started with it goes on with it
    # What is kept has nothing to do with the host copy, which the next version overwrites.
    kept = jax.tree.map(np.array, made)
    for tensor in new.values():
        tensor[...] = 0
    same_bits(made, kept)


def test_nothing_changed_is_the_same_arrays() -> None:
    rng, precision = np.random.default_rng(0), Precision(sync="bfloat16")
    tensors = {name: rng.normal(size=shape).astype(ml_dtypes.bfloat16) for name, shape in hf_tensors(CONFIG).items()}
    held = decode_weights(tensors, CONFIG, precision)
    made = decode_weights(tensors, CONFIG, precision, held=held, changes={})
    assert all(x is y for x, y in zip(jax.tree.leaves(held), jax.tree.leaves(made)))


def test_the_trainers_tree_of_decode_weights() -> None:
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in hf_tensors(CONFIG).items()}
    same_bits(model_params(decode_weights(tensors, CONFIG, Precision()), CONFIG), from_hf(tensors, CONFIG))
