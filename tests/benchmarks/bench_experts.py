"""The grouped product of experts here: in blocks, as jax.lax.ragged_dot, and beside a plain product of its size.

    python -m tests.benchmarks.bench_experts [--repeats=5]

Pairs are spread unevenly (Dirichlet, 3): the fullest expert has about twice the mean. Forward, the cotangent of the
rows (dx) and of the weights (dW), in GFlop/s of the pairs that there are; best of the repeats. `plain`: all rows times
one matrix.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from scalerl_jax.model import experts
from scalerl_jax.model.precision import Precision

FLAGS = flags.FLAGS
flags.DEFINE_integer("repeats", 5, "times that each is run", lower_bound=1)

# pairs, in, out, experts: of configs/quickstart_moe.py, and of a middle-sized model; on an accelerator of
# Qwen3-30B-A3B and Llama 4 Scout at 16,384 tokens
SHAPES = ((24_576, 96, 128, 8), (8_192, 512, 256, 16))
LARGE_SHAPES = ((131_072, 2048, 768, 128), (16_384, 5120, 8192, 16))


def best(function: Callable[..., Any], *arguments: Any) -> float:
    """Seconds."""
    jax.block_until_ready(function(*arguments))
    took = []
    for _ in range(FLAGS.repeats):
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        took.append(time.perf_counter() - began)
    return min(took)


def outer_ragged(g: jax.Array, x: jax.Array, sizes: jax.Array, *, dot: jax.lax.Precision) -> jax.Array:
    """[E, out, in] float32: of each expert's rows, g [M, out] transposed times x [M, in]."""
    rows = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return jax.lax.ragged_dot_general(g, x, sizes, rows, precision=dot, preferred_element_type=jnp.float32)


def measure(pairs: int, width: int, out: int, count: int, dtype: str) -> dict[str, float]:
    rng = np.random.default_rng(0)
    sizes = jnp.asarray(rng.multinomial(pairs, rng.dirichlet(np.full(count, 3.0))), jnp.int32)
    x, g = (jnp.asarray(rng.normal(size=(pairs, n)), dtype) for n in (width, out))
    weight = jnp.asarray(rng.normal(size=(count, out, width)), dtype)
    dot = Precision(dtype).dot

    def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.dot(x, weight[0].T, precision=dot, preferred_element_type=jnp.float32)

    seconds = {"plain": best(jax.jit(plain), x, weight)}
    on_cpu = jax.default_backend() == "cpu"
    most, result = (experts.BLOCK, jnp.float32) if on_cpu else (experts.LARGE_BLOCK, x.dtype)
    for name, times, outer in (
        (
            "blocks",
            functools.partial(experts._by_blocks, most=most, result=result),
            functools.partial(experts._outer_by_blocks, most=most),
        ),
        ("ragged_dot", experts._ragged, outer_ragged),
    ):
        seconds[f"{name} forward"] = best(jax.jit(functools.partial(times, over=2, dot=dot)), x, weight, sizes)
        seconds[f"{name} dx"] = best(jax.jit(functools.partial(times, over=1, dot=dot)), g, weight, sizes)
        seconds[f"{name} dW"] = best(jax.jit(functools.partial(outer, dot=dot)), g, x, sizes)
    return {name: 2e-9 * pairs * width * out / value for name, value in seconds.items()}


def main(_: list[str]) -> None:
    on_cpu = jax.default_backend() == "cpu"
    for shape in SHAPES if on_cpu else LARGE_SHAPES:
        for dtype in ("float32", "bfloat16") if on_cpu else ("bfloat16",):  # in float32 ragged_dot wants 128 GiB
            found = measure(*shape, dtype)
            pairs, width, out, count = shape
            print(f"{pairs:,} pairs, {count} experts {width} x {out}, {dtype}:")
            print("   " + ", ".join(f"{name} {rate:.1f}" for name, rate in found.items()))
            for part in ("forward", "dx", "dW"):
                print(f"   {part}: blocks / ragged_dot = {found[f'blocks {part}'] / found[f'ragged_dot {part}']:.1f}")


if __name__ == "__main__":
    app.run(main)
