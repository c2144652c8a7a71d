"""Teacher-forced log-probabilities of given tokens: the trainer's own forward pass on the generator's weights."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollout_server.engines.jax.programs import Program, buckets
from rollout_server.engines.jax.weights import DecodeWeights, model_params
from scalerl_jax.model.decoder import Precision, forward
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.head import token_logprobs
from scalerl_jax.system import memory

SMALLEST = 256


@functools.partial(jax.jit, static_argnames=("config", "precision"))
def _score(weights: DecodeWeights, tokens: jax.Array, *, config: DecoderConfig, precision: Precision) -> jax.Array:
    """tokens [length] int32 -> [length] float32: entry t is token t + 1's; the last means nothing."""
    params, row = model_params(weights, config), tokens[None]
    positions = jnp.arange(len(tokens))[None]
    hidden = forward(params, config, row, positions, jnp.ones_like(row), precision=precision, remat="none")
    return token_logprobs(params, config, hidden, jnp.roll(row, -1, axis=1), precision=precision)[0]


class Scorer:
    def __init__(self, config: DecoderConfig, precision: Precision, *, longest: int):
        self._config, self._precision = config, precision
        self._buckets = buckets(SMALLEST, longest)
        self._programs: dict[int, Program] = {}  # by bucket

    def compile(self, weights_like: Any) -> int:
        """For weights of these shapes and dtypes: the bytes that the largest takes beside its arguments."""
        for size in self._buckets:
            tokens = jax.ShapeDtypeStruct((size,), np.int32)
            lowered = _score.lower(weights_like, tokens, config=self._config, precision=self._precision)
            self._programs[size] = lowered.compile()
        return max(map(memory.working_bytes, self._programs.values()))

    def score(self, weights: DecodeWeights, token_ids: np.ndarray) -> np.ndarray:
        """[tokens] float32, for 1 to `longest` tokens; the first, which nothing predicts, is 0."""
        length = len(token_ids)
        padded = np.zeros(next(size for size in self._buckets if size >= length), np.int32)
        padded[:length] = token_ids
        logprobs = np.asarray(self._programs[len(padded)](weights, padded))
        return np.concatenate([np.zeros(1, np.float32), logprobs[: length - 1]])
