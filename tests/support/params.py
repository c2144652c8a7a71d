"""Small decoders, packed rows and reference values that the model and trainer tests share."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax.model import DecoderConfig, init_params
from scalerl_jax.model.tensor_layout import layout, rows
from tests.support.models import toy_decoder

DECODER = toy_decoder(vocab_size=61)


def params_of(config: DecoderConfig = DECODER, *, spread: float = 0.2, seed: int = 0):
    """Parameters whose norms' scales are not 1, so that a test sees them."""
    params = init_params(config, jax.random.key(seed))
    rng = np.random.default_rng(seed)
    return jax.tree_util.tree_map_with_path(
        lambda path, p: p * (1 + spread * rng.normal(size=p.shape).astype(np.float32)) if "norm" in str(path) else p,
        params,
    )


def leaning_params(
    config: DecoderConfig, lean: Callable[[np.ndarray, np.ndarray], None], *, spread: float, head: float
):
    """Parameters of a policy that leans to some tokens, as host arrays; the rest of it is random.

    Every embedding is one common direction and noise of size `spread`, and so is what reaches the head, whose rows
    are noise of size `head`. lean(head [vocabulary, width], common [width]): turns some rows along it, in place.
    """
    params = jax.device_get(init_params(config, jax.random.key(0)))
    rng = np.random.default_rng(0)
    common = rng.normal(size=config.hidden_size)
    params["embed"] = (common + spread * rng.normal(size=params["embed"].shape)).astype(np.float32)
    leaning = head * rng.normal(size=params["head"].shape)
    lean(leaning, common)
    params["head"] = leaning.astype(np.float32)
    return params


def from_hf(tensors, config: DecoderConfig, dtype=np.float32):
    """Host arrays under their Hugging Face names -> the parameter tree, as host arrays."""
    leaves: dict[str, list[np.ndarray]] = {}
    for name, tensor in layout(config).items():
        value = np.asarray(tensors[name])
        leaves.setdefault(tensor.row.leaf, []).append((value.T if tensor.row.transposed else value).astype(dtype))
    own = rows(config)
    tree = {leaf: values[0] for leaf, values in leaves.items() if not own[leaf].layered}
    return {**tree, "layers": {leaf: np.stack(values) for leaf, values in leaves.items() if own[leaf].layered}}


def packed(lengths: list[list[int]], seq_len: int, vocabulary: int = DECODER.vocab_size, seed: int = 0):
    """(tokens, positions, segment_ids) [rows, seq_len]: each row's segments from the left, the rest padding."""
    rng = np.random.default_rng(seed)
    tokens, positions, segment_ids = (np.zeros((len(lengths), seq_len), np.int32) for _ in range(3))
    for row, row_lengths in enumerate(lengths):
        start = 0
        for number, length in enumerate(row_lengths, 1):
            at = (row, slice(start, start + length))
            tokens[at] = rng.integers(0, vocabulary, length)
            positions[at] = np.arange(length)
            segment_ids[at] = number
            start += length
    return tokens, positions, segment_ids


def log_softmax64(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def every_variable(jaxpr):
    """The variables of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield from equation.outvars
        for value in equation.params.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from every_variable(inner)


def relative(got, wanted) -> float:
    """Norm of the difference over all leaves, as a share of the norm of `wanted`."""
    return float(np.linalg.norm(flat(got) - flat(wanted)) / np.linalg.norm(flat(wanted)))


def flat(tree) -> np.ndarray:
    """All leaves in one, float64."""
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def rounded(params):
    """Every weight as bf16 sees it, in float32."""
    return jax.tree.map(lambda p: np.asarray(p).astype(jnp.bfloat16).astype(np.float32), params)
