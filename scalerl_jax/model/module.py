"""The policy as a Flax module, for use without a trainer.

    decoder = Decoder.from_pretrained("policy")                 a Hugging Face folder
    logits = decoder(tokens)                                    [rows, length, vocabulary] float32
    logp = decoder.logprobs(tokens[:, :-1], tokens[:, 1:])      without [rows, length, vocabulary] in memory

Parameters are `nnx.Param`s under the names of the tree in decoder.py, so `nnx.split`, `nnx.state`, Optax and Orbax work
as with any module. The functions underneath are those that the trainer compiles (decoder.py, head.py).

Left out on purpose: sampling, which the engines do, and a cache of keys and values.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from scalerl_jax.model.attention.blocks import segment_starts
from scalerl_jax.model.decoder import Params, Precision, forward, init_params
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.head import logits, token_logprobs
from scalerl_jax.model.hf import load_hf
from scalerl_jax.model.hf_folder import write_model_folder


class Decoder(nnx.Module):
    """A decoder and its parameters.

    Shapes: tokens, positions and segment_ids are [rows, length] int32. Without segment_ids a row is one sequence; with
    them it holds several, a token attends only to its own segment, and 0 is padding. Without positions they count
    from 0 in each segment.
    """

    def __init__(
        self, config: DecoderConfig, params: Params, *, mesh: Mesh | None = None, precision: Precision = Precision()
    ):
        """params: as from `init_params`. precision: of the computation; its default is float32 throughout."""
        self.config, self.mesh, self.precision = config, mesh, precision
        _fill(self, params)

    @classmethod
    def from_pretrained(
        cls, path: str, *, mesh: Mesh | None = None, dtype: Any = jnp.float32, precision: Precision = Precision()
    ) -> "Decoder":
        """Loads a Hugging Face folder; on a mesh each device reads only its own part. Raises ValueError as load_hf."""
        config, params = load_hf(path, mesh, dtype)
        return cls(config, params, mesh=mesh, precision=precision)

    @classmethod
    def initialized(cls, config: DecoderConfig, key: jax.Array, *, mesh: Mesh | None = None) -> "Decoder":
        """A decoder with newly initialized parameters."""
        return cls(config, init_params(config, key, mesh), mesh=mesh)

    @property
    def params(self) -> Params:
        """The tree that the functions of scalerl_jax.model use."""
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))

    def __call__(
        self, tokens: jax.Array, positions: jax.Array | None = None, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """Logits [rows, length, vocabulary] float32 of the next token after each position."""
        params = self.params
        hidden = self._hidden(params, tokens, positions, segment_ids)
        return logits(params, self.config, hidden, precision=self.precision)

    def logprobs(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """log p [rows, length] float32 of targets [rows, length], each given the token at its position and all
        before."""
        params = self.params
        hidden = self._hidden(params, tokens, positions, segment_ids)
        return token_logprobs(params, self.config, hidden, targets, precision=self.precision, mesh=self.mesh)

    def save_pretrained(self, path: str, *, tokenizer: str, dtype: str = "float32") -> None:
        """Writes a Hugging Face folder that transformers and vLLM load, whole or not at all.

        tokenizer: the folder whose tokenizer is copied.
        """
        write_model_folder(path, params=self.params, decoder=self.config, tokenizer_dir=tokenizer, dtype=dtype)

    def _hidden(
        self, params: Params, tokens: jax.Array, positions: jax.Array | None, segment_ids: jax.Array | None
    ) -> jax.Array:
        if segment_ids is None:
            segment_ids = jnp.ones(tokens.shape, jnp.int32)
        if positions is None:
            positions = jnp.arange(segment_ids.shape[1], dtype=jnp.int32) - segment_starts(segment_ids)
        return forward(params, self.config, tokens, positions, segment_ids, precision=self.precision, mesh=self.mesh)


def _fill(module: nnx.Module, tree: Mapping[str, Any]) -> nnx.Module:
    for name, value in tree.items():
        setattr(module, name, _fill(nnx.Module(), value) if isinstance(value, Mapping) else nnx.Param(value))
    return module
