"""FLOPs that the hardware spends on one micro-batch, by formula, since a compiler counts a loop's body only once.

With T the tokens of the micro-batch, N the weights of the layers' matrix products (of the experts a token's own), V the
vocabulary, D the width, and A = 4 L H h (pairs of query and key) the two products of attention's forward pass:

    layers      2 N T forward, 4 N T backward, and what remat.py recomputes, less each block's last product
    attention   A forward, 2.5 A backward (splash: 3.5, its two kernels compute the scores twice), A recomputed
    head        2 V D T forward, 4 backward, 2 recomputed
    reference   one more forward pass of all these, if the loss has a KL to a reference policy
    adapter     2 N T and 2 V D T less: no weight has a gradient. Its own products are left out

Splash and blocks skip later keys, a block at a time, and keys further back than the longest segment; shorter segments
are masked, not skipped, so the number of pairs depends on the row and not on its segments. Unlike cuDNN, they do not
skip keys outside of the chunks of Llama 4's local layers.

Left out: norms, softmax, rotations, the loss and the optimizer.
"""

import dataclasses
import math

from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.remat import ATTENTION_AGAIN, FULL, PRODUCTS_AGAIN, group_size
from scalerl_jax.model.tensor_layout import layout

_LAST = ("down", "shared_down", "expert_down")  # weights of products whose results no other product reads


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of one micro-batch, on all devices together."""

    layers: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return self.layers + self.attention + self.head


def of_micro_batch(
    decoder: DecoderConfig,
    *,
    rows: int,
    seq_len: int,
    longest: int,
    remat: str,
    backend: str,
    block: int,
    reference: bool = False,
    adapted: bool = False,
) -> Flops:
    """rows: on the whole mesh. longest: tokens of the longest segment. backend, block: attention's, see `pairs`."""
    tokens = rows * seq_len
    weights = dict.fromkeys(("all", "last"), 0.0)
    for tensor in layout(decoder).values():
        if tensor.row.layered and len(tensor.shape) > 1:
            named = zip(tensor.row.dimensions, tensor.shape)
            size = math.prod(decoder.experts_per_token if name == "experts" else n for name, n in named)
            weights["all"] += size
            weights["last"] += size * (tensor.row.leaf in _LAST)
    again, attention_again = 1.0 * (remat in PRODUCTS_AGAIN), 1.0 * (remat in ATTENTION_AGAIN)
    twice = 0.0
    if remat == FULL:
        twice = 1.0 * (group_size(decoder.layers) > 1)  # recomputing a group includes its last block
    forward = 2 * weights["all"] * tokens
    not_again = 2 * weights["last"] * tokens * again
    every = pairs(seq_len, longest, backend, block)
    local = sum(decoder.local_layers())
    inside = pairs(seq_len, longest, backend, block, chunk=decoder.attention_chunk) if local else 0.0
    attended = (decoder.layers - local) * every + local * inside
    scores = 4.0 * decoder.heads * decoder.head_dim * rows * attended
    backward = 3.5 if backend == "splash" else 2.5
    return Flops(
        layers=forward * (3 - adapted + again + twice + reference) - not_again,
        attention=scores * (1 + backward + attention_again + twice + reference),
        head=(8.0 - 2.0 * adapted + 2.0 * reference) * decoder.vocab_size * decoder.hidden_size * tokens,
    )


def pairs(seq_len: int, longest: int, backend: str, block: int, chunk: int = 0) -> float:
    """Pairs of query and key computed in one row: all blocks of `block` x `block` that the mask does not fully exclude.

    cudnn skips by segments; their number is not known here, so a row counts as one. chunk: the attention chunk of a
    local layer, in positions; 0 for other layers.
    """
    longest = min(seq_len, longest)
    if backend == "cudnn" and 0 < chunk < longest:
        chunks, rest = divmod(seq_len, chunk)
        return chunks * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2
    if backend == "cudnn":
        return longest * (longest + 1) / 2 + (seq_len - longest) * longest
    blocks = math.ceil(seq_len / block)
    back = math.ceil((longest - 1) / block)  # earlier blocks of keys that a block of queries attends to
    return float(block * block * sum(min(i, back) + 1 for i in range(blocks)))
