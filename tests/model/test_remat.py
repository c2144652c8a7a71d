"""What is kept for the backward pass changes neither loss nor gradient, and costs the memory that its name says."""

import collections
import dataclasses
import re

import jax
import numpy as np
import pytest

from scalerl_jax.model import Precision, forward
from scalerl_jax.model.attention import Backend
from scalerl_jax.model.remat import REMATS, group_size
from tests.support.params import DECODER, packed, params_of, relative

LAYERS = 6
MOE = dataclasses.replace(DECODER, family="qwen3_moe", experts=4, experts_per_token=2, moe_intermediate_size=8)


def loss_of(decoder, length, **options):
    inputs = packed([[length // 3, length // 2], [length]], length)
    at = np.random.default_rng(0).normal(size=(2, length, decoder.hidden_size)).astype(np.float32)
    return lambda params: (forward(params, decoder, *inputs, **options) * at).sum()


def test_loss_and_gradients_are_the_same():
    decoder = dataclasses.replace(DECODER, layers=LAYERS)
    params = params_of(decoder)
    found = {name: jax.jit(jax.value_and_grad(loss_of(decoder, 64, remat=name)))(params) for name in REMATS}
    for name in REMATS[1:]:
        np.testing.assert_allclose(found[name][0], found["none"][0], rtol=1e-5)
        assert relative(found[name][1], found["none"][1]) < 2e-6, name


@pytest.mark.slow
def test_each_takes_less_memory_than_the_one_before():
    """Of many blocks on short segments, where what is kept is most of it."""
    decoder = dataclasses.replace(DECODER, layers=36, hidden_size=64, intermediate_size=64, head_dim=16)
    params = jax.eval_shape(lambda: params_of(decoder))
    inputs = packed([[32] * 16] * 2, 512)
    sizes = []
    for name in REMATS:

        def loss(params, name=name):
            return forward(params, decoder, *inputs, remat=name, max_segment=32).sum()

        compiled = jax.jit(jax.grad(loss)).lower(params).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    none, save_products, save_attention, block, full = sizes
    assert none > 4 * save_attention and save_attention > 1.3 * block and block > 1.3 * full, sizes
    assert none > 1.5 * save_products and save_products > 1.5 * save_attention, sizes


def computed(function, *arguments):
    """How often each operation stands in what is computed, those in loops once."""
    counts = collections.Counter()

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            counts[equation.primitive.name] += 1
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(function)(*arguments).jaxpr)
    return counts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_kept_is_not_computed_again(dtype):
    """Scores, by their exponentials, and products; bfloat16 is kept as bits, by the same names."""
    params, precision = params_of(), Precision(dtype, dtype)
    found = {name: computed(jax.grad(loss_of(DECODER, 64, remat=name, precision=precision)), params) for name in REMATS}
    scores, products = ({name: counts[kind] for name, counts in found.items()} for kind in ("exp", "dot_general"))
    assert scores["save_products"] == scores["save_attention"] == scores["none"] < scores["block"]
    assert products["save_products"] == products["none"] < products["save_attention"] < products["block"]


def test_a_stack_of_bfloat16_is_no_stack_of_float32():
    """Where XLA for CPUs would write to a stack of bfloat16 by way of float32, several times as large a one."""
    decoder = dataclasses.replace(DECODER, layers=LAYERS)
    params, precision = params_of(decoder), Precision("bfloat16", "bfloat16")
    for name in ("save_products", "save_attention", "block"):
        loss = loss_of(decoder, 64, remat=name, precision=precision)
        text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
        kept = re.findall(r"= (\w+\[6,2,64,\d+\])", text)
        assert any(shape.startswith("u16") for shape in kept) and not any(shape.startswith("bf16") for shape in kept), (
            name
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("decoder", [DECODER, MOE], ids=["dense", "experts"])
def test_with_products_kept_none_is_computed_again(decoder, dtype):
    params, precision = params_of(decoder), Precision(dtype, dtype)
    counts = {
        name: [
            computed(jax.grad(loss_of(decoder, 64, remat=name, precision=precision)), params)[kind]
            for kind in ("dot_general", "while")
        ]
        for name in ("none", "save_products", "save_attention")
    }
    assert counts["save_products"] == counts["none"] != counts["save_attention"]


def test_of_cudnn_the_call_is_kept(monkeypatch):
    """Only traced: it runs on GPUs."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_compute_capability", lambda _: True)
    decoder = dataclasses.replace(DECODER, head_dim=64)
    params, precision = params_of(decoder), Precision("bfloat16", "bfloat16")

    def count(name):
        loss = loss_of(decoder, 64, remat=name, precision=precision, attention=Backend("cudnn_mask"))
        return computed(jax.grad(loss), params)["dot_product_attention_fwd_wrapper"]

    assert [count(name) for name in ("none", "save_products", "save_attention", "block")] == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("count", "several"), [(1, 1), (2, 1), (6, 2), (16, 4), (28, 4), (32, 4), (36, 6), (13, 1), (64, 8)]
)
def test_groups_are_near_the_root_and_divide(count, several):
    assert count % several == 0 and group_size(count) == several
