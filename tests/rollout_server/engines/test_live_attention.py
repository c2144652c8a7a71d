"""Attention over the live part of a cache: the TPU's kernel, interpreted, and what goes into cuDNN's and comes out of
it, with the formula in its place. About 7 CPU seconds, half of them in `make test`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout_server.engines.jax import caches, live_attention
from rollout_server.engines.jax.slots import SlotPool
from rollout_server.engines.jax.weights import DecodePrecision, decode_precision
from scalerl_jax.model.attention import cudnn
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
    ("heads", "group", "joined", "dtype"),
    [(2, 4, 1, "float32"), (1, 3, 2, "float32"), pytest.param(8, 1, 1, "bfloat16", marks=pytest.mark.slow)],
)
def test_it_is_attention_over_the_whole_cache(
    heads: int, group: int, joined: int, dtype: str, local: int | None
) -> None:
    """joined: model's heads in one of the caches; beside each alone in a cache of its own."""
    slots, length, size, steps = len(START), 1024, 128, 4
    rows = (slots, heads, length, size)
    q = (slots, heads * joined * group, size // joined)
    q, *pairs = arrays(q, rows, rows, *[(slots, heads, steps, size)] * 2, dtype=dtype)
    held, new, start = tuple(pairs[:2]), tuple(pairs[2:]), jnp.asarray(START, jnp.int32)
    assert live_attention.tile_of(held[0]) == 512
    first = None if local is None else start - local
    top, total, mixed = arrays(
        *[(slots, heads, joined * group, 1)] * 2, (slots, heads, joined * group, size), dtype="float32"
    )

    def alone(cache: jax.Array) -> jax.Array:
        parts = cache.reshape(slots, heads, -1, joined, size // joined)
        return jnp.moveaxis(parts, 3, 2).reshape(slots, heads * joined, -1, size // joined)

    for prompt in (None, caches.Partial(top, jnp.abs(total), mixed)) if joined == 1 else (None,):
        rest = start, jnp.int32(1), first, prompt
        both = (
            attend_live(q, held, new, *rest),
            caches._attend_held(q, tuple(map(alone, held)), tuple(map(alone, new)), *rest, live=False),
        )
        live, whole = (np.asarray(one, np.float32) for one in both)
        np.testing.assert_allclose(live, whole, atol=2e-6 if dtype == "float32" else 0.02)


def test_tiles_that_no_slot_has_are_not_read() -> None:
    """They may be anything, even no number."""
    (q, k, v) = arrays((2, 1, 1, 128), (2, 1, 1024, 128), (2, 1, 1024, 128), dtype="float32")
    end = jnp.asarray([300, 512], jnp.int32)
    dead = jnp.arange(1024)[None, None, :, None] >= 512
    parts = [
        live_attention.attend(q, *cut, jnp.zeros_like(end), end, scale=0.1, precision=None)
        for cut in ((k, v), (jnp.where(dead, jnp.nan, k), jnp.where(dead, jnp.nan, v)))
    ]
    for one, other in zip(*parts, strict=True):
        np.testing.assert_array_equal(one, other)


def formula(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Stands for cudnn.attend_prefixes."""
    assert lengths.dtype == jnp.int32 and int(lengths.min()) >= 1 and int(lengths.max()) <= k.shape[2]
    scores = jnp.einsum("bkgh,bksh->bkgs", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(jnp.arange(k.shape[2]) < lengths[:, None, None, None], scores, -jnp.inf)
    return jnp.einsum("bkgs,bksh->bkgh", jax.nn.softmax(scores), v), jax.nn.logsumexp(scores, axis=-1)


def test_cudnn_is_given_the_live_part_and_merged_with_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "attend_prefixes", formula)
    slots, heads, group, length, size = 6, 2, 3, 32, 8
    q, k, v = arrays((slots, heads * group, size), *[(slots, heads, length, size)] * 2, dtype="float32")
    top, total, mixed = arrays(*[(slots, heads, group, 1)] * 2, (slots, heads, group, size), dtype="float32")
    # One whose sequence has left stays live, and may be past the end of a cache that was cut since.
    position, live = jnp.asarray([0, 7, 31, 40, 40, -2], jnp.int32), jnp.arange(slots) != 3
    precision = DecodePrecision(platform="gpu")
    for prompt in (None, caches.Partial(top, jnp.abs(total), mixed)):
        found = []
        for has in (True, False):
            monkeypatch.setattr(live_attention, "has_cudnn", lambda *_, has=has: has)
            found.append(caches.attend(q, k, v, position, live=live, precision=precision, prompt=prompt)[:3])
        np.testing.assert_allclose(*found, atol=2e-6, rtol=0)


HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.mark.parametrize(
    ("shape", "dtype", "capability", "numerics", "wanted"),
    [
        ((16, 8, 2048, 128), "bfloat16", HOPPER, "fast", True),
        ((16, 8, 2048, 256), "bfloat16", HOPPER, "fast", True),
        ((16, 8, 2048, 256), "bfloat16", AMPERE, "fast", False),
        ((16, 8, 2048, 100), "bfloat16", HOPPER, "fast", False),
        ((8, 8, 2048, 128), "bfloat16", HOPPER, "fast", False),  # too few to keep a GPU's memory busy
        ((16, 8, 1024, 128), "bfloat16", HOPPER, "fast", False),
        ((16, 8, 2048, 128), "float32", HOPPER, "fast", False),
        ((16, 8, 2048, 128), "bfloat16", (7, 5), "fast", False),
        ((16, 8, 2048, 128), "bfloat16", HOPPER, "bitwise", False),
    ],
)
def test_caches_of_which_cudnn_reads_the_live_part(
    shape: tuple[int, ...], dtype: str, capability: tuple[int, ...], numerics: str, wanted: bool
) -> None:
    precision = DecodePrecision("bfloat16", numerics=numerics, platform="gpu", capability=capability)
    assert live_attention.has_cudnn(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), precision) == wanted


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
