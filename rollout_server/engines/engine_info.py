"""What an engine says of itself: what it was told, and of the model in its folder."""

import dataclasses

from rollout_server.engines.engine import EngineInfo, EngineOptions
from scalerl_jax.contract.fingerprint import tokenizer_fingerprint
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.tensor_layout import hf_tensors


def engine_info(
    name: str, options: EngineOptions, config: DecoderConfig | None = None, *, devices: int = 1
) -> EngineInfo:
    """config: of the model in the folder; None: there is none. Raises ValueError naming a tokenizer that is broken."""
    info = EngineInfo(
        name=name,
        slots=options.slots,
        queue_capacity=options.queue,
        maximum_tokens=options.maximum_tokens,
        compute_dtype=options.compute_dtype,
        head_precision=options.head_precision,
        sync_dtype=options.sync_dtype,
        devices=devices,
    )
    if config is None:
        return info
    return dataclasses.replace(
        info,
        maximum_tokens=min(options.maximum_tokens, config.max_positions),
        tensors=hf_tensors(config),
        vocabulary=config.vocab_size,
        model_config=config.canonical_json(),
        tokenizer_fingerprint=tokenizer_fingerprint(options.model),
    )
