"""What is known of an engine before it serves: its EngineInfo, and an estimate of the server's memory."""

import dataclasses

from rollout_server.engines.engine import EngineInfo, EngineOptions
from scalerl_jax.contract.codec import expert_dtype
from scalerl_jax.contract.fingerprint import tokenizer_fingerprint
from scalerl_jax.contract.limits import MAXIMUM_MESSAGE_BYTES, MAXIMUM_SCORE_IDS, MAXIMUM_TOP_K
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.tensor_layout import hf_tensors
from scalerl_jax.system.memory import gib

ITEMSIZE = {"float32": 4, "bfloat16": 2}  # bytes of a number
MARGIN = 0.95  # share of the free memory that the advice fills, since the working memory depends on the slots a little


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


@dataclasses.dataclass(frozen=True)
class EngineMemory:
    """The estimate, in bytes.

        weights      of the version that it samples with
        swap         a second version, where an engine holds both while one replaces the other
        cache        keys and values of all slots at their longest
        working      other memory that the engine needs while it computes
        host copy    the version as it was received, in the sync dtype (weight_store.py)
        process      memory that the process uses already: Python, its libraries, compiled programs

    On an accelerator the first four are on the device and the others on the host; on a CPU all are on the host. Sizes
    are for the worst case that the flags allow, so a server that starts does not run out of memory at its thousandth
    request.
    """

    slots: int
    maximum_tokens: int
    token: int  # keys and values of one token of one slot, all layers
    weights: int
    host_copy: int
    working: int = 0  # unknown until the programs are compiled
    copies: float = 0.0  # temporary copies of the cache, as a share of it
    versions: int = 2  # of the weights on the device; 1 where they are written in place

    @property
    def cache(self) -> int:
        return self.slots * self.maximum_tokens * self.token

    @property
    def on_device(self) -> int:
        return self.fixed + round(self.cache * (1 + self.copies))

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the slots and their length."""
        return self.versions * self.weights + self.working

    def spare(self, *, device: int | None, host: int, process: int) -> int:
        """Bytes left on the device that holds the caches; see `check` for the arguments."""
        return host - self.on_device - self.host_copy - process if device is None else device - self.on_device

    def check(self, *, device: int | None, host: int | None, process: int) -> str:
        """The log line with the estimate and the memory available.

        Args:
          device: bytes that the accelerator has for this process; None: it computes on the CPU.
          host: bytes that the host has for this process, those that it uses already included; None: not known, and left
            out of the line.
          process: bytes that it uses already.

        Raises ValueError where it does not fit, in one line that says what would.
        """
        on_host = self.host_copy + process
        need, there, where = self.on_device, device, "the device"
        if there is None:
            assert host is not None
            need, there, where = need + on_host, host, "this machine"
        again = ", as much again for a version on its way in" * (self.versions > 1)
        parts = [
            f"{gib(self.weights)} weights{again}",
            f"{gib(self.cache)} keys and values of {self.slots} sequences of {self.maximum_tokens} tokens",
            f"{gib(self.working + round(self.cache * self.copies))} working memory",
        ]
        if device is None:
            parts.append(f"{gib(on_host)} the process and the host's copy of the weights")
        line = f"memory: {gib(need)} GiB ({', '.join(parts)}) of the {gib(there)} GiB that {where} has"
        if device is not None and host is not None:
            line += f"; on the host {gib(on_host)} of {gib(host)} GiB"
        if need > there:
            raise ValueError(f"{line}; {self._remedy(there - (need - round(self.cache * (1 + self.copies))))}")
        if host is not None and on_host > host:
            raise ValueError(f"{line}: the host has too little, and no flag makes it less")
        return line

    def _remedy(self, free: int) -> str:
        """The flag values with which the cache and its copies fit into `free` bytes."""
        tokens = max(0, int(MARGIN * free / (1 + self.copies) / self.token))
        slots, length = tokens // self.maximum_tokens, tokens // self.slots // 32 * 32
        choices = [f"--slots={slots}"] * (slots > 0) + [f"--maximum_tokens={length}"] * (length > 0)
        return f"{' or '.join(choices)} would fit" if choices else "not even one slot of 32 tokens would fit"
