"""What test_lora_meshes.py compares: the gradient of an adapter on meshes of 8 virtual CPU devices with the gradient of
the merged weights on one device, projected by hand.

    python -m tests.model.lora_meshes CASE...

Prints a line of JSON for each family and mesh: how far the loss is from one device's, as a share of its weights' sum,
and the gradient, as a share of itself.
"""

import dataclasses
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax.model.decoder import param_shardings
from scalerl_jax.model.lora import Lora, in_dtype
from scalerl_jax.model.sharding import make_mesh
from tests.learner import mesh_program
from tests.model import family_meshes
from tests.model.family_meshes import loss_of
from tests.support.families import decoder
from tests.support.models import toy_decoder
from tests.support.params import params_of, relative

MESHES: list[dict[str, int] | None] = [None, *mesh_program.MESHES.values()]  # and those of the families
MESHES += [mesh for mesh in family_meshes.MESHES if mesh not in MESHES]
MESHES.remove({"fsdp": 1})


def lora_of(config: Any, targets: str) -> Lora:
    return Lora.of(config, rank=3, alpha=6.0, targets=targets, folder="", seed=0)


def nowhere_zero(adapter: Any, seed: int = 1) -> Any:
    """On the host, so that both factors have a gradient."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: np.asarray(p) + 0.1 * rng.normal(size=p.shape).astype(np.float32), adapter)


def projected(lora: Lora, adapter: Any, dense: Any) -> Any:
    """From the gradient of each merged weight, in float64: dA = s B^T dW, dB = s dW A^T."""
    out: Any = jax.tree.map(np.zeros_like, adapter)
    for row in lora._rows():
        own = (adapter["layers"] if row.layered else adapter)[row.leaf]
        dw = np.asarray((dense["layers"] if row.layered else dense)[row.leaf], np.float64)
        a, b, scale = np.float64(own["a"]), np.float64(own["b"]), lora.alpha / lora.rank
        place = (out["layers"] if row.layered else out)[row.leaf]
        if row.side == -1:  # W = a b
            place["a"], place["b"] = scale * dw @ b.swapaxes(-1, -2), scale * a.swapaxes(-1, -2) @ dw
        else:  # W = b a
            place["a"], place["b"] = scale * b.swapaxes(-1, -2) @ dw, scale * dw @ a.swapaxes(-1, -2)
    return out


def compare(case: str) -> None:
    config = decoder(case) if "-" in case else toy_decoder(family=case)
    if config.nope_interval:  # as few layers as the others: float32's error grows with the depth
        config = dataclasses.replace(config, layers=2, nope_interval=2)
    lora = lora_of(config, "all-linear" if config.tied_embeddings else "all-linear,lm_head,embed_tokens")
    frozen, adapter = jax.device_get(params_of(config)), nowhere_zero(lora.new())
    loss, size = loss_of(config)
    whole = in_dtype(lora.join(adapter, frozen), jnp.float32)
    value, dense = jax.device_get(jax.jit(jax.value_and_grad(lambda p: loss(p, None)))(whole))
    wanted = projected(lora, adapter, dense)
    for axes in MESHES:
        mesh = None if axes is None else make_mesh(**axes)
        own, kept = adapter, frozen
        if mesh is not None:
            own = jax.tree.map(lambda p, like: jax.device_put(p, like.sharding), adapter, lora.adapter(mesh))
            kept = jax.device_put(frozen, param_shardings(config, mesh))
        got, gradient = jax.device_get(
            jax.jit(jax.value_and_grad(lambda a, f, mesh=mesh: loss(lora.join(a, f), mesh)))(own, kept)
        )
        line = {"loss": float(abs(got - value)) / size, "gradient": relative(gradient, wanted)}
        print(json.dumps({"case": case, "mesh": axes, **line}), flush=True)


if __name__ == "__main__":
    for case in sys.argv[1:]:
        compare(case)
