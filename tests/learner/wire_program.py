"""What test_weight_snapshots.py compares: versions taken on meshes of 8 virtual CPU devices. Writes OUT.npz.

    python -m tests.learner.wire_program OUT MESH...

A process of its own, because the number of virtual devices is fixed when JAX starts.
"""

import os
import sys

import jax
import numpy as np

from scalerl_jax.contract.weight_delta import Sparse, WeightDelta, decode
from scalerl_jax.learner.weight_snapshots import WeightSnapshots
from scalerl_jax.model.decoder import param_shardings
from scalerl_jax.model.sharding import make_mesh
from scalerl_jax.model.tensor_layout import hf_tensors
from tests.support.compiled import on_devices
from tests.support.models import toy_decoder

# The width divides over 8, the vocabulary over neither: embedding and head stay whole along it. `output` is square.
# Experts are cut along one, two or all of their dimensions.
DECODER = toy_decoder(vocab_size=41, layers=3, family="qwen3_moe")
MESHES = {
    "one": {"fsdp": 1},
    "fsdp8": {"fsdp": 8},
    "fsdp4-tensor2": {"fsdp": 4, "tensor": 2},
    "replica2-fsdp2-tensor2": {"replica": 2, "fsdp": 2, "tensor": 2},
    "fsdp2-expert2-tensor2": {"fsdp": 2, "expert": 2, "tensor": 2},
}
SHARE = 0.25
# 0.0, -0.0, two not-a-numbers, an infinity, a denormal, 1.0 and its neighbour in float32, which rounds to it.
SPECIAL = np.array(
    [0x00000000, 0x80000000, 0x7FC00000, 0xFFC10000, 0x7F800000, 0x00010000, 0x3F800000, 0x3F800001], np.uint32
)
# Share of the elements of each leaf that are drawn again for a version; 1.0 is over the cap.
VERSIONS = (0.0, 0.02, 0.2, 1.0, 0.0, 0.05)


def versions(seed: int = 0):
    """The parameter trees, on the host, one after another."""
    rng = np.random.default_rng(seed)
    shapes = jax.tree.map(lambda s: s.shape, param_shapes(), is_leaf=lambda s: hasattr(s, "dtype"))
    tree = jax.tree.map(lambda shape: random_floats(rng, shape), shapes, is_leaf=lambda s: isinstance(s, tuple))
    for share in VERSIONS:
        for leaf in jax.tree.leaves(tree):
            drawn = rng.random(leaf.shape) < share
            leaf[drawn] = random_floats(rng, leaf.shape)[drawn]
        yield jax.tree.map(np.array, tree)


def param_shapes():
    from scalerl_jax.model.decoder import abstract_params

    return abstract_params(DECODER)


def random_floats(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    bits = rng.integers(0, 2**32, shape, np.uint32)
    return np.where(rng.random(shape) < 0.5, rng.choice(SPECIAL, shape), bits & 0xBFFFFFFF).view(np.float32)


def main(out: str, *meshes: str) -> None:
    assert jax.device_count() == 8
    arrays: dict[str, np.ndarray] = {}
    for mesh_name in meshes:
        axes = MESHES[mesh_name]
        mesh = make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])
        copies, shardings = WeightSnapshots(DECODER, mesh, share=SHARE), param_shardings(DECODER, mesh)
        taken = [
            copies.snapshot(jax.device_put(tree, shardings), step) for step, tree in enumerate(versions(), start=7)
        ]
        for version in taken:
            key = f"{mesh_name}/{version.step}"
            for name, tensor in version.tensors().items():
                arrays[f"{key}/whole/{name}"] = tensor.view(np.uint16)
            keep(arrays, key, version.delta())
    np.savez(f"{out}.npz", **arrays)


def keep(arrays: dict[str, np.ndarray], key: str, delta: WeightDelta) -> None:
    shapes = hf_tensors(DECODER)
    arrays[f"{key}/base"] = np.array(-1 if delta.base is None else delta.base)
    for name, digest in delta.digests.items():
        arrays[f"{key}/digest/{name}"] = np.array(digest)
    for name, part in delta.tensors.items():
        if isinstance(part, Sparse):
            change = decode(part, int(np.prod(shapes[name])))
            arrays[f"{key}/positions/{name}"], arrays[f"{key}/values/{name}"] = change.positions, change.values
        else:
            arrays[f"{key}/dense/{name}"] = part


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = on_devices(8)  # read when the devices are first asked for
    main(*sys.argv[1:])
