"""One of two hosts that load a model between them. Prints what it has read and what its devices hold, in bytes.

    python -m tests.model.loading_program ADDRESS RANK FOLDER

Exits with an error where one of its devices holds other numbers than those of the folder.
"""

import os
import sys
from typing import Any

import jax
import numpy as np

from scalerl_jax.model import load_hf, safetensors_folder
from scalerl_jax.model.sharding import make_mesh
from tests.support.models import random_tensors, toy_decoder
from tests.support.params import from_hf

# A quarter of the width is a page: less would be read with what lies beside it.
DECODER = toy_decoder(hidden_size=4096, family="qwen2")


def main() -> None:
    address, rank, folder = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, int(rank), initialization_timeout=600)
    assert (len(jax.devices()), len(jax.local_devices())) == (4, 2)
    read, counted = os.preadv, 0

    def counting(file: int, into: Any, offset: int) -> int:
        nonlocal counted
        count = read(file, into, offset)
        counted += count
        return count

    safetensors_folder.os.preadv = counting
    config, params = load_hf(folder, make_mesh(fsdp=4))
    assert config == DECODER
    held = 0
    for leaf, whole in zip(jax.tree.leaves(params), jax.tree.leaves(from_hf(random_tensors(config, 0), config))):
        # What two devices hold alike is read once.
        parts = {str(shard.index): shard for shard in leaf.addressable_shards}
        held += sum(shard.data.nbytes for shard in parts.values())
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])
    print(counted, held, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))


if __name__ == "__main__":
    main()
