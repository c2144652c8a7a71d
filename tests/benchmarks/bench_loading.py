"""What loading a model folder costs: the host's peak memory over the bytes that it then holds, and seconds.

    python -m tests.benchmarks.bench_loading [--model=qwen3-0.6b] [--devices=8] [--folder=DIR] [--check=1.2]

The folder (random bfloat16 in files of 1 GB with an index; made where --folder has none) is loaded into float32 by a
process of its own, once on one device and once cut over virtual devices, after a toy model has been loaded there. Its
peak resident memory is reset before and read after; what it held before is subtracted. With --check it exits with 1
where the share is above that.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time

from absl import app, flags

from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.system import memory

MODELS = {
    "qwen3-0.6b": DecoderConfig(
        vocab_size=151_936, hidden_size=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate_size=3072,
        tied_embeddings=True,
    ),
    "llama-3.2-1b": DecoderConfig(
        vocab_size=128_256, hidden_size=2048, layers=16, heads=32, kv_heads=8, head_dim=64, intermediate_size=8192,
        tied_embeddings=True, family="llama",
    ),
    "qwen2.5-0.5b": DecoderConfig(
        vocab_size=151_936, hidden_size=896, layers=24, heads=14, kv_heads=2, head_dim=64, intermediate_size=4864,
        tied_embeddings=True, family="qwen2",
    ),
}  # fmt: skip
FILE_BYTES = 10**9
FLAGS = flags.FLAGS
flags.DEFINE_enum("model", "qwen3-0.6b", list(MODELS), "Whose shape.")
flags.DEFINE_integer("devices", 8, "Virtual devices of the second run.")
flags.DEFINE_string("folder", "", "Where the model folder is, or is made; empty: a temporary one.")
flags.DEFINE_float("check", 0.0, "The largest share that is no failure; 0: any.")


def write(folder: str, config: DecoderConfig) -> None:
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from scalerl_jax.model.tensor_layout import hf_tensors

    rng, files, filled = np.random.default_rng(0), [dict[str, tuple[int, ...]]()], 0
    for name, shape in hf_tensors(config).items():
        filled += 2 * math.prod(shape)
        if files[-1] and filled > FILE_BYTES:
            files.append({})
            filled = 2 * math.prod(shape)
        files[-1][name] = shape
    where = {}
    for number, shapes in enumerate(files, 1):
        where |= dict.fromkeys(shapes, f"model-{number:05d}-of-{len(files):05d}.safetensors")
        # Positive numbers around 0.01.
        values = {n: rng.integers(0x3C00, 0x3D00, s, np.uint16).view(ml_dtypes.bfloat16) for n, s in shapes.items()}
        save_file(values, f"{folder}/{where[next(iter(shapes))]}")
    with open(f"{folder}/model.safetensors.index.json", "w") as file:
        json.dump({"metadata": {}, "weight_map": where}, file)
    with open(f"{folder}/config.json", "w") as file:
        json.dump(config.to_hf("bfloat16"), file)


def measure(toy: str, folder: str, devices: int) -> None:
    """In a process of its own: prints one line of JSON."""
    import jax

    from scalerl_jax.model import load_hf
    from scalerl_jax.model.sharding import make_mesh

    mesh = None if devices == 1 else make_mesh(fsdp=devices)
    jax.block_until_ready(load_hf(toy, mesh)[1])
    before = memory.resident()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forgets the peak
    began = time.perf_counter()
    params = jax.block_until_ready(load_hf(folder, mesh)[1])
    seconds, peak = time.perf_counter() - began, memory.peak_resident() - before
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
    print(json.dumps({"held": held, "peak": peak, "share": peak / held, "seconds": seconds}))


def main(_: list[str]) -> int:
    from tests.support.models import toy_decoder

    with tempfile.TemporaryDirectory() as scratch:
        folder, toy = FLAGS.folder or f"{scratch}/model", f"{scratch}/toy"
        for path, config in ((toy, toy_decoder()), (folder, MODELS[FLAGS.model])):
            os.makedirs(path, exist_ok=True)
            if not os.path.isfile(f"{path}/config.json"):
                write(path, config)
        worst = 0.0
        for devices in (1, FLAGS.devices):
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
            code = f"from tests.benchmarks.bench_loading import measure; measure({toy!r}, {folder!r}, {devices})"
            done = subprocess.run(
                [sys.executable, "-c", code],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                timeout=540,
            )
            got = json.loads(done.stdout.splitlines()[-1])
            worst = max(worst, got["share"])
            print(
                f"{FLAGS.model}, {devices} device{'s' if devices > 1 else ''}: holds {got['held'] / 1e9:.2f} GB, peak "
                f"{got['peak'] / 1e9:.2f} GB, {got['share']:.3f} of it, {got['seconds']:.1f} s"
            )
    return int(bool(FLAGS.check) and worst > FLAGS.check)


if __name__ == "__main__":
    app.run(main)
