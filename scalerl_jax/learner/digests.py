"""Digests of the arrays of a checkpoint, which tell a flipped bit.

Orbax notices files that are missing or cut short, but not a flipped bit in the data. So every checkpoint also carries
a digest of each array, of its bytes in row-major order, however it is sharded, and reading compares:

    digest(x) = SHA-256(SHA-256(block 0) SHA-256(block 1) ...)        blocks of _BLOCK bytes, hashed side by side

Checkpoints of format 1 carry sum_i bits(x_i) * (2 i + 1) mod 2^32 instead, which misses some pairs of flipped bits (two
sign bits). They are still read, compared with that, and said to be so.
"""

import concurrent.futures
import hashlib
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any

_BLOCK = 1 << 24  # bytes


def described(tree: Tree) -> dict[str, list[Any]]:
    """Shape, dtype and digest of each leaf, by its name."""
    return {
        name: [list(leaf.shape), str(leaf.dtype), digest]
        for (name, leaf), digest in zip(named(tree), digests(tree), strict=True)
    }


def compare(tree: Tree, recorded: Mapping[str, Any]) -> None:
    """Raises OSError naming an array that is not the one that was saved."""
    leaves = named(tree)
    found: Sequence[Any]
    if any(isinstance(recorded[name][2], int) for name, _ in leaves):
        found = [zlib.crc32(_bytes(x)) if isinstance(x, np.ndarray) else int(_old_digest(x)) for _, x in leaves]
    else:
        found = digests(tree)
    for (name, _), digest in zip(leaves, found, strict=True):
        if digest != recorded[name][2]:
            raise OSError(f"the data of {name} is damaged")


def digests(tree: Tree) -> list[str]:
    """Of each leaf, in the order of jax.tree.leaves. One leaf at a time is in host memory."""
    out = []
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for leaf in jax.tree.leaves(tree):
            data = _bytes(np.asarray(leaf))
            blocks = pool.map(
                lambda start, data=data: hashlib.sha256(data[start : start + _BLOCK]).digest(),
                range(0, len(data), _BLOCK),
            )
            out.append(hashlib.sha256(b"".join(blocks)).hexdigest())
    return out


def _bytes(x: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(x).reshape(-1).view(np.uint8))


@jax.jit
def _old_digest(x: jax.Array) -> jax.Array:
    """Of format 1."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    position = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(bits.astype(jnp.uint32) * (2 * position + 1), dtype=jnp.uint32)


def named(tree: Tree) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
