"""Eight virtual devices, fsdp 2 x context 2 x tensor 2, and collectives along each axis, some of them in a loop; prints
what planning.collectives reads from the compiled program: {axes joined by +: bytes}."""

import json

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from scalerl_jax.model.sharding import make_mesh
from scalerl_jax.planning.collectives import by_axes

ROUNDS = 5
WIDTH = 256  # of what a device holds, float32


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
    print(json.dumps({"+".join(axes): size for axes, size in by_axes(compiled.as_text(), dict(mesh.shape)).items()}))


if __name__ == "__main__":
    main()
