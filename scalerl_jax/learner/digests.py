"""Digests of the arrays of a checkpoint, which detect a flipped bit.

Orbax notices files that are missing or cut short, but not a flipped bit in the data. So every checkpoint also carries
a digest of each array, of its bytes in row-major order, however it is sharded, and reading compares:

    digest(x) = SHA-256(SHA-256(block 0) SHA-256(block 1) ...)        blocks of _BLOCK bytes, hashed in parallel

An array on several hosts is whole on none of them. Its digest is computed where its shards are, and does not depend on
the sharding: for two salts the sum over elements of

    f(bits ^ k_n)    k_0 = salt, k_d = f(k_{d-1} ^ f(i_d + 1)), i_d its place in dimension d    mod 2^32

with f the last steps of MurmurHash3. It is written "elements:...", and can be read on any number of hosts; a digest of
the first kind is compared on several hosts by gathering the arrays, one after the other.
"""

import concurrent.futures
import hashlib
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from scalerl_jax.contract.weight_delta import final

Tree = Any

ELEMENTS = "elements:"
_BLOCK = 1 << 24  # bytes
_SALTS = (0x9E3779B9, 0x7F4A7C15)


def described(tree: Tree) -> dict[str, list[Any]]:
    """Shape, dtype and digest of each leaf, by its name. One leaf at a time is in host memory."""
    return {name: [list(leaf.shape), str(leaf.dtype), digest(leaf)] for name, leaf in named(tree)}


def compare(tree: Tree, recorded: Mapping[str, Any]) -> None:
    """Raises OSError naming an array that differs from the saved one."""
    for name, leaf in named(tree):
        wanted = str(recorded[name][2])
        if wanted != (_of_elements(leaf) if wanted.startswith(ELEMENTS) else _sha256(_whole(leaf))):
            raise OSError(f"the data of {name} is damaged")


def digest(leaf: Any) -> str:
    """Of one array, however it is sharded."""
    return _of_elements(leaf) if _on_several_hosts(leaf) else _sha256(leaf)


def fingerprint(tree: Tree) -> str:
    """One digest of all leaves and their names, independent of the sharding; computed on their devices."""
    return hashlib.sha256("".join(f"{name} {_of_elements(leaf)}\n" for name, leaf in named(tree)).encode()).hexdigest()


def _on_several_hosts(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated


def _whole(x: Any) -> Any:
    return multihost_utils.process_allgather(x, tiled=True) if _on_several_hosts(x) else x


def _sha256(x: Any) -> str:
    data = memoryview(np.ascontiguousarray(x).reshape(-1).view(np.uint8))

    def of_block(start: int) -> bytes:
        return hashlib.sha256(data[start : start + _BLOCK]).digest()

    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return hashlib.sha256(b"".join(pool.map(of_block, range(0, len(data), _BLOCK)))).hexdigest()


def _of_elements(x: Any) -> str:
    sharding = getattr(x, "sharding", None)
    out = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    return ELEMENTS + "".join(f"{int(total):08x}" for total in np.asarray(jax.jit(_totals, out_shardings=out)(x)))


def _totals(x: jax.Array) -> jax.Array:
    """[salts] uint32."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    totals = []
    for salt in _SALTS:
        key = jnp.uint32(salt)
        for size in x.shape:
            key = final(key[..., None] ^ final(jnp.arange(1, size + 1, dtype=jnp.uint32)))
        totals.append(jnp.sum(final(bits ^ key), dtype=jnp.uint32))
    return jnp.stack(totals)


def named(tree: Tree) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
