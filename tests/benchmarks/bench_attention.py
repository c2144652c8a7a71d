"""Attention in blocks, forward and backward: seconds to compile and to run, of CPU time, which load disturbs less.

JAX_PLATFORMS=cpu python -m tests.benchmarks.bench_attention [--lengths=4096,16384] [--segment=0] [--rows=1]
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from scalerl_jax.model import Precision
from scalerl_jax.model.attention import packed_attention

_LENGTHS = flags.DEFINE_list("lengths", ["512", "4096", "16384", "34816"], "tokens of a row")
_SEGMENT = flags.DEFINE_integer("segment", 0, "tokens of each segment; 0: the row's")
_ROWS = flags.DEFINE_integer("rows", 1, "rows at once")
_RUNS = flags.DEFINE_integer("runs", 1, "after the first; 0: only compile")
HEADS, KV_HEADS, SIZE = 8, 2, 64


def main(_: list[str]) -> None:
    for length in map(int, _LENGTHS.value):
        segment = _SEGMENT.value or length
        ids = np.broadcast_to(np.arange(length) // segment + 1, (_ROWS.value, length)).astype(np.int32)
        rng = np.random.default_rng(0)
        arrays = [
            jnp.asarray(rng.normal(size=(_ROWS.value, length, heads, SIZE)), jnp.float32)
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        ]

        def run(q, k, v, g, ids, segment=segment):
            def attend(q, k, v):
                return packed_attention(q, k, v, ids, max_segment=segment, precision=Precision().dot)

            out, back = jax.vjp(attend, q, k, v)
            return (out, *back(g))

        start = time.process_time()
        compiled = jax.jit(run).lower(*arrays, ids).compile()
        seconds = time.process_time() - start
        memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
        times = []
        for _ in range(_RUNS.value + 1 if _RUNS.value else 0):
            start = time.process_time()
            jax.block_until_ready(compiled(*arrays, ids))
            times.append(time.process_time() - start)
        ran = f", run {1e3 * min(times[1:]):.0f} ms" if times else ""
        print(f"{length} tokens: compile {seconds:.1f} s{ran}, temporaries {memory:.0f} MiB", flush=True)


if __name__ == "__main__":
    app.run(main)
