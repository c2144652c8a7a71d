"""What an engine says of itself: what it was told, and of the model in its folder."""

from rollout_server.engines.engine import EngineInfo, EngineOptions
from scalerl_jax.contract.fingerprint import tokenizer_fingerprint
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.tensor_layout import hf_tensors


def engine_info(
    name: str, options: EngineOptions, config: DecoderConfig | None = None, *, devices: int = 1
) -> EngineInfo:
    """config: of the model in the folder; None: there is none. Raises ValueError naming a tokenizer that is broken."""
    # What has one name in both means the same.
    told = {name: value for name, value in vars(options).items() if name in EngineInfo.__dataclass_fields__}
    if config is not None:
        told |= {
            "maximum_tokens": min(options.maximum_tokens, config.max_positions),
            "tensors": hf_tensors(config),
            "vocabulary": config.vocab_size,
            "model_config": config.canonical_json(),
            "tokenizer_fingerprint": tokenizer_fingerprint(options.model),
        }
    return EngineInfo(name=name, queue_capacity=options.queue, devices=devices, **told)
