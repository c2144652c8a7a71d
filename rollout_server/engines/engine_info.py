"""Makes an EngineInfo from the engine's options and the model in its folder."""

from rollout_server.engines.engine import EngineInfo, EngineOptions
from scalerl_jax.contract.codec import expert_dtype
from scalerl_jax.contract.fingerprint import tokenizer_fingerprint
from scalerl_jax.contract.limits import MAXIMUM_MESSAGE_BYTES, MAXIMUM_SCORE_IDS, MAXIMUM_TOP_K
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.tensor_layout import hf_tensors


def engine_info(
    name: str, options: EngineOptions, config: DecoderConfig | None = None, *, devices: int = 1
) -> EngineInfo:
    """config: the config of the model in the folder; None without a model.

    Raises ValueError naming a broken tokenizer, or where router replay is asked of a model that cannot do it.
    """
    # Fields of the same name mean the same in both classes.
    fields = {name: value for name, value in vars(options).items() if name in EngineInfo.__dataclass_fields__}
    if config is not None:
        longest = min(options.maximum_tokens, config.max_positions)
        targets = MAXIMUM_SCORE_IDS // longest - 1  # target ids a token, in a request that also holds the tokens
        fields |= {
            "maximum_tokens": longest,
            "maximum_top_k": max(0, min(config.vocab_size, MAXIMUM_TOP_K, targets)),
            "tensors": hf_tensors(config),
            "vocabulary": config.vocab_size,
            "model_config": config.canonical_json(),
            "tokenizer_fingerprint": tokenizer_fingerprint(options.model),
        }
    fields["head_dtype"] = "bfloat16" if options.head_precision == "bfloat16" else "float32"
    info = EngineInfo(name=name, queue_capacity=options.queue, devices=devices, **fields)
    if options.router_replay:
        _check_experts(info, config)
    return info


def _check_experts(info: EngineInfo, config: DecoderConfig | None) -> None:
    if config is None or not config.experts:
        raise ValueError("--router_replay: the model has no experts")
    a_token = config.layers * config.experts_per_token * expert_dtype(config.experts).itemsize
    longest = (MAXIMUM_MESSAGE_BYTES - 2**16) // (a_token + 12)
    if info.maximum_tokens > longest:
        raise ValueError(
            f"--router_replay: with {a_token} bytes of experts a token a message holds a completion of {longest} "
            f"tokens, prompt included: --maximum_tokens={info.maximum_tokens} is too much"
        )
