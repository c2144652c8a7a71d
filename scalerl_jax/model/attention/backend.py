"""The attention backend, by name, so that it can be a static argument."""

import dataclasses

SAVED = "attention"  # name of the arrays kept for the backward pass (jax.ad_checkpoint), for a remat policy by names


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend and its parameters; made by `choose`."""

    name: str = "blocks"  # blocks | splash | cudnn | cudnn_mask | tiles
    segments: int = 0  # cudnn: the most segments in a row
    chip: str = ""  # splash: device kind, which decides the sizes of its blocks
    interpret: bool = False  # splash: run its kernels step by step in XLA, for tests without a TPU


BLOCKS, TILES = Backend(), Backend("tiles")
