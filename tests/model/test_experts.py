"""Routing and the grouped product: against NumPy in float64, and the two ways of computing it against each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.model import experts
from scalerl_jax.model.precision import Precision

FLOAT32, BFLOAT16 = Precision(), Precision(compute="bfloat16", sync="bfloat16")
# Rows of each expert, and rows of nobody: none at all, less than a block, several blocks, exactly one, an expert alone.
SIZES = [
    ((7, 0, 20, 1), 0),
    ((0, 0, 0, 0), 5),
    ((130, 16, 0, 300), 9),
    ((32, 32, 32, 32), 0),
    ((0, 257, 0, 0), 1),
    ((1,), 0),
]


def drawn(sizes: tuple[int, ...], nobodys: int, width: int = 12, out: int = 20, seed: int = 0):
    rng = np.random.default_rng(seed)
    rows = sum(sizes) + nobodys
    x, weight = rng.normal(size=(rows, width)), rng.normal(size=(len(sizes), out, width))
    return x, weight, np.array(sizes, np.int32), rng.normal(size=(rows, out))


def plain(x, weight, sizes, g):
    """(product, dx, dw) in float64."""
    y, dx, dw = np.zeros_like(g), np.zeros_like(x), np.zeros_like(weight)
    start = 0
    for expert, size in enumerate(sizes):
        own = slice(start, start := start + size)
        y[own], dx[own] = x[own] @ weight[expert].T, g[own] @ weight[expert]
        dw[expert] = g[own].T @ x[own]
    return y, dx, dw


def computed(x, weight, sizes, g, precision: Precision):
    def product(x, weight):
        return experts.grouped_product(x, (weight, None), sizes, precision)

    y, pull = jax.vjp(jax.jit(product), jnp.asarray(x, precision.compute), jnp.asarray(weight, jnp.float32))
    return y, *pull(jnp.asarray(g, precision.compute))


@pytest.mark.parametrize(("sizes", "nobodys"), SIZES)
def test_the_grouped_product_and_its_gradients(sizes, nobodys) -> None:
    inputs = drawn(sizes, nobodys)
    for got, wanted in zip(computed(*inputs, FLOAT32), plain(*inputs), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)


@pytest.mark.parametrize(("sizes", "nobodys"), SIZES[2:3])
def test_in_bfloat16_weights_have_float32_cotangents(sizes, nobodys) -> None:
    rounded = [np.asarray(jnp.asarray(part, "bfloat16"), np.float64) for part in drawn(sizes, nobodys)]
    x, weight, _, g = rounded
    y, dx, dw = computed(x, weight, np.array(sizes, np.int32), g, BFLOAT16)
    wanted = plain(x, weight, sizes, g)
    assert y.dtype == dx.dtype == jnp.bfloat16 and dw.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(y, np.float32), wanted[0], rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(np.asarray(dx, np.float32), wanted[1], rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(dw, wanted[2], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("sizes", "nobodys"), SIZES)
def test_accelerators_way_is_the_same(sizes, nobodys) -> None:
    x, weight, sizes, g = (jnp.asarray(part, "float32" if part.ndim > 1 else None) for part in drawn(sizes, nobodys))
    dot = FLOAT32.dot
    for over, rows in ((2, x), (1, g)):
        of_tpus, *others = (
            jax.jit(functools.partial(way, over=over, dot=dot))(rows, weight, sizes)
            for way in (
                experts._ragged,
                functools.partial(experts._by_blocks, most=experts.BLOCK, result=jnp.float32),
                functools.partial(experts._by_blocks, most=experts.LARGE_BLOCK, result=rows.dtype),
            )
        )
        for other in others:
            np.testing.assert_allclose(other, of_tpus, atol=1e-4)
    on_cpu, elsewhere = (
        jax.jit(functools.partial(experts._outer_by_blocks, dot=dot, most=most))(g, x, sizes)
        for most in (experts.BLOCK, experts.LARGE_BLOCK)
    )
    np.testing.assert_allclose(elsewhere, on_cpu, atol=1e-4)


def reference_mlp(x, routing, gate, up, down):
    """Token by token, expert by expert, in float64."""
    out = np.zeros_like(x)
    for token, (chosen, weights) in enumerate(zip(*(np.asarray(part) for part in routing[:2]), strict=True)):
        for expert, weight in zip(chosen, weights, strict=True):
            if expert == len(gate):
                continue
            read = x[token] * weight if routing.on_input else x[token]
            a = gate[expert] @ read
            y = down[expert] @ (a / (1 + np.exp(-a)) * (up[expert] @ read))
            out[token] += y if routing.on_input else weight * y
    return out


@pytest.mark.parametrize(("how", "count"), [("softmax", 2), ("softmax", 4), ("sigmoid", 1)])
@pytest.mark.parametrize("joined", [False, True])
def test_what_experts_make_of_tokens(how: str, count: int, joined: bool) -> None:
    """Also with gate and up in one array, as generators hold them; some tokens go to nobody."""
    rng = np.random.default_rng(1)
    x, logits = rng.normal(size=(3, 11, 8)), rng.normal(size=(3, 11, 4)) * 2
    gate, up, down = (rng.normal(size=(4, *shape)) for shape in ((6, 8), (6, 8), (8, 6)))
    routing = experts.ROUTERS[how](jnp.asarray(logits, jnp.float32), count, normalize=how == "softmax")
    routing = routing._replace(experts=routing.experts.at[1, 4:].set(4))
    flat = routing._replace(experts=routing.experts.reshape(33, -1), weights=routing.weights.reshape(33, -1))
    wanted = reference_mlp(x.reshape(33, 8), flat, gate, up, down).reshape(x.shape)
    f32 = [jnp.asarray(part, jnp.float32) for part in (x, gate, up, down)]
    into = (jnp.concatenate(f32[1:3], axis=1),) if joined else (f32[1], f32[2])
    got = experts.expert_mlp(f32[0], routing, [(w, None) for w in (*into, f32[3])], precision=FLOAT32)
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert (np.asarray(got)[1, 4:] == 0).all() and (wanted[0] != 0).all()


def test_gradients_of_the_whole() -> None:
    """Into tokens, router and experts: against finite differences in the direction of the gradient."""
    rng = np.random.default_rng(2)
    shapes = {"x": (9, 8), "router": (4, 8), "gate": (4, 6, 8), "up": (4, 6, 8), "down": (4, 8, 6)}
    args = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    at = jnp.asarray(rng.normal(size=(9, 8)), jnp.float32)
    chosen = jax.lax.top_k(args["x"] @ args["router"].T, 2)[1]

    @jax.jit
    def loss(args):
        routing = experts.softmax_router(args["x"] @ args["router"].T, 2, normalize=True, given=chosen)
        y = experts.expert_mlp(args["x"], routing, [(args[w], None) for w in ("gate", "up", "down")], precision=FLOAT32)
        return jnp.sum(y * at)

    grads = jax.grad(loss)(args)
    for name, grad in grads.items():
        norm = float(jnp.linalg.norm(grad))
        assert norm > 0.1, name
        step = 1e-2 * grad / norm
        ends = [float(loss({**args, name: args[name] + sign * step})) for sign in (1, -1)]
        assert (ends[0] - ends[1]) / 2e-2 == pytest.approx(norm, rel=2e-2), name


def test_given_experts_have_the_live_routers_weights() -> None:
    logits = jnp.asarray([[3.0, 2.0, 1.0, 0.0]])
    live = experts.softmax_router(logits, 2, normalize=True)
    given = experts.softmax_router(logits, 2, normalize=True, given=jnp.asarray([[3, 0]]))
    np.testing.assert_array_equal(live.experts, [[0, 1]])
    np.testing.assert_allclose(live.weights, [[1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))]], rtol=1e-6)
    np.testing.assert_array_equal(given.experts, [[3, 0]])
    np.testing.assert_allclose(given.weights, [[1 / (1 + np.exp(3)), 1 / (1 + np.exp(-3))]], rtol=1e-6)
