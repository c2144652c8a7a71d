"""What computes attention, by name, so that it can be a static argument."""

import dataclasses

SAVED = "attention"  # the name of what the backward pass keeps (jax.ad_checkpoint), for a remat policy by names


@dataclasses.dataclass(frozen=True)
class Backend:
    """Made by `choose`, which knows what goes where."""

    name: str = "blocks"  # blocks | splash | cudnn | cudnn_mask | tiles
    segments: int = 0  # cudnn: of a row, at most
    chip: str = ""  # splash: device kind, which the sizes of its blocks go by
    interpret: bool = False  # splash: its kernels step by step in XLA, for tests where there is no TPU


BLOCKS, TILES = Backend(), Backend("tiles")
