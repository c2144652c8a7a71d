"""The policy: parameters, forward pass, log-probabilities, Hugging Face names."""

from scalerl_jax.contract.decoder_config import DecoderConfig
from scalerl_jax.model.decoder import Decoder, Precision, abstract_params, forward, init_params, param_shardings
from scalerl_jax.model.head import logits, token_logprobs
from scalerl_jax.model.hf import load_hf

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Precision",
    "abstract_params",
    "forward",
    "init_params",
    "load_hf",
    "logits",
    "param_shardings",
    "token_logprobs",
]
