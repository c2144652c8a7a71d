"""Eight virtual devices, fsdp 2 x context 2 x tensor 2, and collectives along each axis, some of them in a loop; prints
what planning.collectives reads from the compiled program: {axes joined by +: bytes}."""

import collections
import json
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from scalerl_jax.model.sharding import make_mesh
from scalerl_jax.planning.collectives import axes_of, found_in
from scalerl_jax.planning.hlo import Program

ROUNDS = 5
WIDTH = 256  # of what a device holds, float32


def received(text: str, mesh: Mapping[str, int]) -> dict[str, int]:
    """Bytes that a device receives in one call of a program, by the axes, joined by +, along which they travel."""
    total = collections.Counter[str]()
    for one in found_in(Program(text)):
        total["+".join(axes_of(one.pairs, mesh))] += one.received
    return {axes: size for axes, size in sorted(total.items()) if size}


def main() -> None:
    mesh = make_mesh(fsdp=2, context=2, tensor=2)

    def local(x: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            x = jnp.sin(jax.lax.psum(x, "tensor"))
            return jnp.cos(jax.lax.ppermute(x, "context", [(0, 1), (1, 0)])), None

        x, _ = jax.lax.scan(body, x, None, length=ROUNDS)
        return jnp.tanh(jax.lax.all_gather(x, ("fsdp", "tensor"), axis=0, tiled=True))

    whole = P(("fsdp", "context", "tensor"))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=whole, out_specs=P("context"), check_vma=False)
    compiled = jax.jit(mapped).lower(jax.ShapeDtypeStruct((8 * WIDTH,), jnp.float32)).compile()
    print(json.dumps(received(compiled.as_text(), dict(mesh.shape))))


if __name__ == "__main__":
    main()
