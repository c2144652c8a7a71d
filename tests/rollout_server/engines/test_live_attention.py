"""The TPU's kernel for attention over the live part of a cache, interpreted. About 6 CPU seconds, half of
them in `make test`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout_server.engines.jax import caches, live_attention
from rollout_server.engines.jax.slots import SlotPool
from rollout_server.engines.jax.weights import decode_precision
from scalerl_jax.model.decoder import Precision
from tests.support.models import toy_decoder

START = [0, 1, 511, 512, 513, 1024]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_attention, "attend", functools.partial(live_attention.attend, interpret=True))


@jax.jit
def attend_live(*given: Any) -> jax.Array:
    return caches._attend_held(*given, live=True)


def arrays(*shapes: tuple[int, ...], dtype: str) -> list[Any]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize("local", [None, 64, 3000], ids=["all", "local", "before the cache"])
@pytest.mark.parametrize(
    ("heads", "group", "dtype"), [(2, 4, "float32"), pytest.param(8, 1, "bfloat16", marks=pytest.mark.slow)]
)
def test_it_is_attention_over_the_whole_cache(heads: int, group: int, dtype: str, local: int | None) -> None:
    slots, length, size, steps = len(START), 1024, 128, 4
    rows = (slots, heads, length, size)
    q, *pairs = arrays((slots, heads * group, size), rows, rows, *[(slots, heads, steps, size)] * 2, dtype=dtype)
    held, new, start = tuple(pairs[:2]), tuple(pairs[2:]), jnp.asarray(START, jnp.int32)
    assert live_attention.tile_of(held[0]) == 512
    first = None if local is None else start - local
    top, total, mixed = arrays(*[(slots, heads, group, 1)] * 2, (slots, heads, group, size), dtype="float32")
    for prompt in (None, caches.Partial(top, jnp.abs(total), mixed)):
        given = q, held, new, start, jnp.int32(1), first, prompt
        both = attend_live(*given), caches._attend_held(*given, live=False)
        live, whole = (np.asarray(one, np.float32) for one in both)
        np.testing.assert_allclose(live, whole, atol=2e-6 if dtype == "float32" else 0.02)


def test_tiles_that_no_slot_has_are_not_read() -> None:
    """They may be anything, even no number."""
    (q, k, v) = arrays((2, 1, 1, 128), (2, 1, 1024, 128), (2, 1, 1024, 128), dtype="float32")
    end = jnp.asarray([300, 512], jnp.int32)
    dead = jnp.arange(1024)[None, None, :, None] >= 512
    parts = [
        live_attention.attend(q, *cut, jnp.zeros_like(end), end, precision=None)
        for cut in ((k, v), (jnp.where(dead, jnp.nan, k), jnp.where(dead, jnp.nan, v)))
    ]
    for one, other in zip(*parts, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("shape", "dtype", "tile"),
    [
        ((4, 8, 4096, 128), "bfloat16", 512),
        ((4, 32, 4096, 128), "bfloat16", 256),
        ((4, 64, 4096, 128), "bfloat16", 0),  # a tile would be too short
        ((4, 8, 512, 128), "bfloat16", 0),
        ((4, 8, 4064, 128), "bfloat16", 0),
        ((4, 8, 4096, 64), "bfloat16", 0),
    ],
)
def test_tiles(shape: tuple[int, ...], dtype: str, tile: int) -> None:
    assert live_attention.tile_of(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))) == tile


@pytest.mark.parametrize(("platform", "longest"), [("tpu", 5120), ("gpu", 5024), ("cpu", 5024)])
def test_long_caches_on_a_tpu_have_whole_tiles(platform: str, longest: int) -> None:
    precision = decode_precision(Precision("bfloat16", "bfloat16"), platform)
    pool = SlotPool(toy_decoder(), precision, slots=2, maximum=5000, steps=4, allocated=False)
    assert pool.longest == longest and (platform != "tpu" or all(length % 512 == 0 for length in pool._lengths))
    pool.close()
