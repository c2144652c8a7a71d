"""The rows of every family agree with each other and with what reads them."""

import dataclasses
import math
from fractions import Fraction

import jax
import numpy as np
import pytest

from scalerl_jax.learner.optimizer import decayed
from scalerl_jax.model import DecoderConfig, abstract_params
from scalerl_jax.model.families import FAMILIES
from scalerl_jax.model.families.dense import WeightRow
from scalerl_jax.model.hf import to_hf
from scalerl_jax.model.sharding import RULES
from scalerl_jax.model.tensor_layout import CUT, Tensor, hf_tensors, layout, sizes
from scalerl_jax.run.ledger import ModelShape
from tests.support.models import toy_decoder


def config(family: str, *, tied: bool = False) -> DecoderConfig:
    return toy_decoder(vocab_size=61, family=family, tied_embeddings=tied)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_say_what_everything_else_can_read(family: str) -> None:
    rows, known = FAMILIES[family].ROWS, sizes(config(family))
    assert set(RULES) | set(CUT) <= set(known)
    assert len({row.leaf for row in rows}) == len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert set(row.dimensions) <= set(known) and row.initial in ("normal", "residual", "ones", "zeros"), row.leaf
        assert sum(dimension in CUT for dimension in row.dimensions) <= 1, row.leaf
        # Two dimensions of a weight cannot lie along one mesh axis.
        axes = [RULES[dimension] for dimension in row.dimensions if dimension in RULES]
        assert len(axes) == len(set(axes)), row.leaf
    # Layers are one stretch of the rows, and what is fused stands together.
    for key in ([row.layered for row in rows], [row.fused or row.name for row in rows]):
        stretches = [value for i, value in enumerate(key) if not i or key[i - 1] != value]
        assert stretches in ([False, True, False], list(dict.fromkeys(key)))


def test_a_leaf_is_the_same_weight_in_every_family() -> None:
    """Whatever the files and vLLM call it."""

    def weight(row: WeightRow) -> WeightRow:
        return dataclasses.replace(row, name="", stored="", fused="", columns=None)

    rows = {row.leaf: weight(row) for family in FAMILIES.values() for row in family.ROWS}
    assert all(weight(row) == rows[row.leaf] for family in FAMILIES.values() for row in family.ROWS)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tree_has_the_tensors_of_the_files(family: str, tied: bool) -> None:
    model = config(family, tied=tied)
    tree = abstract_params(model)
    tensors = jax.eval_shape(lambda params: to_hf(params, model, "bfloat16"), tree)
    assert {name: tensor.shape for name, tensor in tensors.items()} == hf_tensors(model)

    def used(tensor: Tensor) -> Fraction:
        """Of the experts, a token meets its own only."""
        return Fraction(*((model.experts_per_token, model.experts) if "experts" in tensor.row.dimensions else (1,)))

    # Norms do not decay, and all but the lookup in an embedding of its own is a product.
    matrices = {tensor.row.leaf for tensor in layout(model).values() if len(tensor.shape) > 1}
    flags = {path[-1].key: flag for path, flag in jax.tree_util.tree_leaves_with_path(decayed(tree))}
    assert {leaf for leaf, flag in flags.items() if flag} == matrices
    weights = sum(math.prod(tensor.shape) * used(tensor) for tensor in layout(model).values() if len(tensor.shape) > 1)
    lookup = 0 if tied else model.vocab_size * model.hidden_size
    assert ModelShape.of(model).matrix_parameters == weights - lookup


def test_dense_products_by_hand() -> None:
    c = config("llama")
    block = 2 * 32 * 4 * 8 + 2 * 32 * 2 * 8 + 3 * 32 * 48
    assert ModelShape.of(c) == ModelShape(c.layers * block + 61 * 32, 2, 4, 8)
    assert np.prod(hf_tensors(c)["model.layers.1.mlp.down_proj.weight"]) == 32 * 48
