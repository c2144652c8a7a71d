"""The choice of the attention backend: made once, at the start, by the platform and the shapes.

TPU     splash, for bfloat16 and rows whose parts are multiples of 128 tokens
NVIDIA  cudnn, for bfloat16: packed rows on Hopper or later with a known version of jax, else with a mask
other   blocks, which works everywhere and is never refused
"""

import dataclasses
import re

import jax

from scalerl_jax.model.attention import cudnn, splash
from scalerl_jax.model.attention.backend import BLOCKS, TILES, Backend

_MOST_MASK = 2**29  # the largest mask of a row in bfloat16, in bytes, that `auto` accepts: 16k tokens


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The requirements for a backend."""

    seq_len: int  # of a row, all its parts together
    head_dim: int
    compute_dtype: str
    context: int = 1  # parts that a row is cut into
    longest: int | None = None  # positions of a segment; None: seq_len
    bitwise: bool = False  # config.numerics


class CannotHere(ValueError):
    """A backend is not available on this device, or for these shapes."""


def choose(wanted: str, device: jax.Device, shapes: Shapes) -> tuple[Backend, str]:
    """The backend for config.model.attention, and a line on it. Raises ValueError if it is not available here."""
    if shapes.bitwise:
        return TILES, "attention: tiles, in plain XLA (config.numerics=bitwise)"
    if wanted == "blocks":
        return BLOCKS, "attention: blocks, in plain XLA"
    choices = {"splash": _splash, "cudnn": _cudnn}
    own = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}.get(device.platform)
    name = own if wanted == "auto" else wanted
    if name is None:
        return BLOCKS, f"attention: blocks, in plain XLA ({device.platform})"
    try:
        return choices[name](device, shapes, any_size=wanted != "auto")
    except CannotHere as error:
        if wanted != "auto":
            raise ValueError(f"config.model.attention={wanted}: {error}") from error
        return BLOCKS, f"attention: blocks, in plain XLA; not {name}: {error}"


def _splash(device: jax.Device, shapes: Shapes, *, any_size: bool) -> tuple[Backend, str]:
    if device.platform != "tpu":
        raise CannotHere(f"needs a TPU, and this is {device.device_kind} ({device.platform})")
    _only_bfloat16(shapes)
    if shapes.seq_len % (splash.LANES * shapes.context):
        raise CannotHere(
            f"needs rows of a multiple of {splash.LANES * shapes.context} tokens, and they have {shapes.seq_len}"
        )
    part = shapes.seq_len // shapes.context
    sizes = splash.block_sizes(device.device_kind, shapes.head_dim, part, shapes.seq_len)
    note = f"attention: splash on {device.device_kind}, blocks of {sizes[0]} queries and {sizes[1]} keys"
    return Backend("splash", chip=device.device_kind), note


def _cudnn(device: jax.Device, shapes: Shapes, *, any_size: bool) -> tuple[Backend, str]:
    capability = _compute_capability(device)
    if capability < (8, 0):
        raise CannotHere(f"needs an NVIDIA GPU from Ampere on, and this is {device.device_kind} ({device.platform})")
    _only_bfloat16(shapes)
    most = 256 if capability >= (9, 0) else 128
    if shapes.head_dim % 8 or shapes.head_dim > most:
        raise CannotHere(f"needs heads of a multiple of 8 up to {most}, and they are of {shapes.head_dim}")
    lacks = []
    if capability < (9, 0):
        lacks.append("older than Hopper")
    if shapes.context > 1:
        lacks.append(f"config.learner.context={shapes.context}")
    if not cudnn.has_packed_call():
        lacks.append(f"jax {jax.__version__}, whose cuDNN call was not read")
    if not lacks:
        segments = cudnn.most_segments(shapes.seq_len, shapes.longest or shapes.seq_len)
        note = f"attention: cuDNN on {device.device_kind}, packed rows of up to {segments} segments"
        return Backend("cudnn", segments=segments), note
    size = 2 * shapes.seq_len**2 // shapes.context
    if size > _MOST_MASK and not any_size:
        raise CannotHere(f"it would take a mask of {size / 2**30:.1f} GiB a row ({', '.join(lacks)})")
    return Backend("cudnn_mask"), f"attention: cuDNN on {device.device_kind} with a mask ({', '.join(lacks)})"


def _only_bfloat16(shapes: Shapes) -> None:
    if shapes.compute_dtype != "bfloat16":
        raise CannotHere(f"needs config.model.compute_dtype=bfloat16, and it is {shapes.compute_dtype}")


def _compute_capability(device: jax.Device) -> tuple[int, ...]:
    """The compute capability of an NVIDIA GPU; (0,) for any other device."""
    found = str(getattr(device, "compute_capability", ""))
    return tuple(map(int, found.split("."))) if re.fullmatch(r"\d+\.\d+", found) else (0,)
