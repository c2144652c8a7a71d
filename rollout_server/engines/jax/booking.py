"""What the embedded generator books (engines/booking.py).

Its working memory is what the largest compiled programs need beside their arguments, by XLA's own account of them; a
chunk of fewer slots than there are, which copies their part of the cache; and one layer's cache twice, while it grows.
"""

import math

import jax

from rollout_server.engines.booking import Booking
from scalerl_jax.model.decoder import Precision
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.tensor_layout import hf_tensors
from scalerl_jax.system import memory


def of_model(
    config: DecoderConfig,
    precision: Precision,
    *,
    cache_dtype: str,
    weights: object,
    slots: int,
    longest: int,
    copies_are_cheap: bool,
) -> Booking:
    """What is known before anything is compiled. weights: ShapeDtypeStructs of the decode weights. copies_are_cheap: as
    in programs.widths."""
    itemsize = {"float32": 4, "bfloat16": 2}
    return Booking(
        slots=slots,
        maximum_tokens=longest,
        token=2 * config.layers * config.kv_heads * config.head_dim * itemsize[cache_dtype],
        weights=sum(struct.size * struct.dtype.itemsize for struct in jax.tree.leaves(weights)),
        host_copy=sum(map(math.prod, hf_tensors(config).values())) * itemsize[precision.sync],
        # A chunk of fewer slots: half of them at most on a CPU, a quarter elsewhere (programs.widths). A cache grows
        # layer by layer, keys and then values.
        copies=max(0.5 if copies_are_cheap else 0.25, 1 / config.layers / 2),
    )


def there_is() -> tuple[int | None, int, int]:
    """(bytes of the device; None: the CPU is the device, bytes of the host, bytes that this process takes already)."""
    stats = jax.local_devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    process = memory.resident()
    device = stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else None
    return device, memory.available() + process, process
