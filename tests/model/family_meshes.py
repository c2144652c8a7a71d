"""What test_family_meshes.py compares: a loss and its gradient on meshes of 8 virtual CPU devices, beside one device's.

    python -m tests.model.family_meshes FAMILY... [bitwise]

Prints a line of JSON for each family and mesh: how far the loss is from one device's, as a share of its
weights' sum (its terms have both signs), and the gradient, as a share of itself.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from scalerl_jax.model import DecoderConfig, Precision, forward, token_logprobs
from scalerl_jax.model.attention import TILES
from scalerl_jax.model.decoder import param_shardings
from scalerl_jax.model.sharding import make_mesh
from tests.support.models import toy_decoder
from tests.support.params import packed, params_of, relative

MESHES = (
    {"fsdp": 8},
    {"fsdp": 2, "context": 2, "tensor": 2},
    {"fsdp": 2, "expert": 2, "tensor": 2},
    {"replica": 2, "fsdp": 4},
)
LENGTHS = [[40, 20], [64], [30, 10, 24], [5]] * 2


def loss_of(config: DecoderConfig) -> tuple[Callable[[Any, Mesh | None], jax.Array], float]:
    """(a loss of parameters on a mesh, the sum of its weights' sizes)"""
    tokens, positions, segment_ids = packed(LENGTHS, 64, config.vocab_size)
    weights = np.random.default_rng(0).normal(size=tokens.shape).astype(np.float32) * (segment_ids > 0)

    def loss(params: Any, mesh: Mesh | None) -> jax.Array:
        hidden = forward(params, config, tokens, positions, segment_ids, mesh=mesh)
        return jnp.sum(weights * token_logprobs(params, config, hidden, np.roll(tokens, -1, axis=1), mesh=mesh))

    return loss, float(np.abs(weights).sum())


def compare(family: str) -> None:
    config = toy_decoder(family=family)
    loss, size = loss_of(config)
    rng = np.random.default_rng(1)
    # No bias is 0.
    host = jax.tree.map(lambda p: p + 0.1 * rng.normal(size=p.shape).astype(np.float32), params_of(config))

    def on(mesh: Mesh | None) -> tuple[jax.Array, Any]:
        params = host if mesh is None else jax.device_put(host, param_shardings(config, mesh))
        return jax.device_get(jax.jit(jax.value_and_grad(lambda p: loss(p, mesh)))(params))

    value, gradient = on(None)
    for axes in MESHES:
        got, cut = on(make_mesh(**axes))
        line = {"loss": float(abs(got - value)) / size, "gradient": relative(cut, gradient)}
        print(json.dumps({"family": family, "mesh": axes, **line}), flush=True)


def compare_bits() -> None:
    """Likewise, of numerics=bitwise: how many tokens' log-probs are not one device's to the bit."""
    config, precision = toy_decoder(family="qwen3"), Precision(numerics="bitwise")
    tokens, positions, segment_ids = packed([[32, 20], [64], [5], [32, 32]] * 2, 64, config.vocab_size)
    host = params_of(config)

    def on(mesh: Mesh | None) -> np.ndarray:
        def score(params: Any) -> jax.Array:
            hidden = forward(
                params, config, tokens, positions, segment_ids, mesh=mesh, precision=precision, attention=TILES
            )
            return token_logprobs(params, config, hidden, np.roll(tokens, -1, axis=1), mesh=mesh, precision=precision)

        params = host if mesh is None else jax.device_put(host, param_shardings(config, mesh))
        return np.asarray(jax.jit(score)(params)).view(np.int32)

    alone = on(None)
    for axes in ({"fsdp": 8}, {"replica": 2, "fsdp": 4}):
        print(json.dumps({"mesh": axes, "other_bits": int((on(make_mesh(**axes)) != alone).sum())}), flush=True)


if __name__ == "__main__":
    for family in sys.argv[1:]:
        if family == "bitwise":
            compare_bits()
        else:
            compare(family)
