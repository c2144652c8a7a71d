"""Alternative layouts of a config: mesh, rows of a micro-batch and remat, and the distance of each from the config.

A distance of one is a factor of two of an axis, half the rows, or the next stage of remat. Only layouts that the model
allows are listed: heads divide over `tensor`, experts over `expert`, whole blocks of a row over `context`.
"""

import copy
import dataclasses
import itertools
import math

from scalerl_jax.config import Config
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.remat import REMATS
from scalerl_jax.model.sharding import MESH_AXES, mesh_sizes

_LANES = 128  # tokens of a block; a row's part has at least one


@dataclasses.dataclass(frozen=True)
class Choice:
    """A layout that replaces the config's own."""

    mesh: tuple[tuple[str, int], ...]  # axis, devices
    rows: int  # config.learner.micro_batch_rows
    remat: str
    away: int  # distance from the config

    def __str__(self) -> str:
        axes = [f"--config.learner.{axis}={size}" for axis, size in self.mesh if size > 1 or axis == "fsdp"]
        return " ".join([*axes, f"--config.learner.micro_batch_rows={self.rows}", f"--config.model.remat={self.remat}"])

    def put_into(self, config: Config) -> Config:
        config = copy.deepcopy(config)
        for axis, size in self.mesh:
            setattr(config.learner, axis, size)
        config.learner.micro_batch_rows, config.model.remat = self.rows, self.remat  # type: ignore[assignment]
        return config


def own(config: Config, devices: int) -> Choice:
    """The config's own layout. Raises ValueError where its mesh does not fit the number of devices."""
    sizes = mesh_sizes(devices, **{axis: getattr(config.learner, axis) for axis in MESH_AXES})
    return Choice(tuple(sizes.items()), config.learner.micro_batch_rows, config.model.remat, 0)


def others(config: Config, decoder: DecoderConfig, devices: int) -> list[Choice]:
    """The layouts that use less memory in some way, nearest first; `replica` does not change."""
    now = own(config, devices)
    before = dict(now.mesh)
    left = devices // before["replica"]
    parts = [n for n in (2**i for i in range(11)) if left % n == 0]
    tensors = [n for n in {*parts, before["tensor"]} if decoder.heads % n == 0 and decoder.vocab_size % n == 0]
    contexts = [n for n in {*parts, before["context"]} if config.learner.seq_len % (_LANES * n) == 0]
    experts = [n for n in {*parts, before["expert"]} if n == 1 or (decoder.experts and decoder.experts % n == 0)]
    rows = [now.rows] + [now.rows >> i for i in range(1, now.rows.bit_length())]
    remats = REMATS[REMATS.index(now.remat) :]
    found = []
    for tensor, context, expert, row, remat in itertools.product(tensors, contexts, experts, rows, remats):
        rest, odd = divmod(left, tensor * context * expert)
        if odd or rest == 0:
            continue
        sizes = {"replica": before["replica"], "fsdp": rest, "context": context, "expert": expert, "tensor": tensor}
        away = sum(abs(math.log2(sizes[axis] / before[axis])) for axis in ("context", "expert", "tensor"))
        away += math.log2(now.rows / row) + REMATS.index(remat) - REMATS.index(now.remat)
        if away:
            found.append(Choice(tuple(sizes.items()), row, remat, math.ceil(away)))
    return sorted(found, key=lambda choice: (choice.away, choice.mesh))
