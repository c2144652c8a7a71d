"""Every family against transformers: one random model of each shape, saved by transformers and loaded by us."""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.model import DecoderConfig, forward, load_hf, logits, token_logprobs
from tests.support.families import CASES, QUICK, decoder
from tests.support.params import from_hf, packed

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LENGTHS = [[40, 23, 9], [70, 2]]
ROW = 80  # with padding in both rows
LATE = 20_000  # where one of the segments begins: an angle that is off by little a position shows there
CLOSE = 1e-4
MARKED = [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


def model_of(config: DecoderConfig, seed: int = 0) -> Any:
    """Of transformers, float32, whose vectors are not all ones or zeros: that would hide one that is misplaced."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config.to_hf()))
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale, middle = (0.2, float(parameter.flatten()[0])) if parameter.ndim == 1 else (0.15, 0.0)
            parameter.copy_(torch.from_numpy(middle + scale * rng.normal(size=tuple(parameter.shape))))
    return model.float().eval()


@functools.cache
def loaded(case: str, folder: pathlib.Path) -> tuple[Any, DecoderConfig, Any]:
    """(transformers' model, our config and parameters), read from what transformers has saved."""
    model = model_of(decoder(case))
    model.save_pretrained(folder / case)
    config, params = load_hf(str(folder / case))
    return model, config, params


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("models")


def rows(config: DecoderConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens, positions, segment_ids = packed(LENGTHS, ROW, config.vocab_size)
    if not config.nope_interval:  # transformers counts tokens, and no positions, for Llama 4's chunks and temperatures
        positions[(segment_ids == 1) & (np.arange(2) == 1)[:, None]] += LATE
    return tokens, positions, segment_ids


def segments(config: DecoderConfig) -> list[tuple[int, slice]]:
    return [(r, slice(sum(row[:i]), sum(row[: i + 1]))) for r, row in enumerate(LENGTHS) for i in range(len(row))]


@pytest.mark.parametrize("case", CASES)
def test_the_config_that_transformers_writes_is_ours(case: str, folder: pathlib.Path) -> None:
    config = loaded(case, folder)[1]
    assert config.canonical_json() == decoder(case).canonical_json()


@pytest.mark.parametrize("case", MARKED)
def test_packed_rows_have_the_logits_and_gradients_of_separate_sequences(case: str, folder: pathlib.Path) -> None:
    model, config, params = loaded(case, folder)
    tokens, positions, segment_ids = rows(config)
    targets = np.roll(tokens, -1, axis=1)
    # Of a segment's tokens all but the last predict one; no two count the same.
    weights = np.random.default_rng(1).normal(size=tokens.shape).astype(np.float32)
    weights[(segment_ids == 0) | (segment_ids != np.roll(segment_ids, -1, axis=1))] = 0
    weights[:, -1] = 0

    @jax.jit
    def ours(params: Any) -> Any:
        def loss(params: Any) -> Any:
            hidden = forward(params, config, tokens, positions, segment_ids)
            logp = token_logprobs(params, config, hidden, targets)
            return jnp.sum(weights * logp), logits(params, config, hidden)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, got), grads = ours(params)
    model.zero_grad()
    for row, part in segments(config):
        ids = torch.from_numpy(tokens[row, part].astype(np.int64))[None]
        theirs = model(input_ids=ids, position_ids=torch.from_numpy(positions[row, part].astype(np.int64))[None]).logits
        wanted = theirs[0].detach().numpy()
        assert np.abs(np.asarray(got)[row, part] - wanted).max() < CLOSE * np.abs(wanted).max()
        logp = theirs[0].log_softmax(-1).gather(1, torch.from_numpy(targets[row, part].astype(np.int64))[:, None])[:, 0]
        (logp * torch.from_numpy(weights[row, part])).sum().backward()
    named = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    for name in [name for name in named if "feed_forward.experts." in name]:
        named[name] = named[name].swapaxes(1, 2)
    for name in [name for name in named if name.endswith("experts.gate_up_proj")]:
        stem = name.removesuffix("gate_up_proj")
        named[stem + "gate_proj"], named[stem + "up_proj"] = np.split(named.pop(name), 2, axis=1)
    expected = jax.tree_util.tree_leaves_with_path(from_hf(named, config))
    for (path, wanted), value in zip(expected, jax.tree.leaves(grads), strict=True):
        off = np.linalg.norm(np.asarray(value) - wanted) / np.linalg.norm(wanted)
        assert off < CLOSE, f"{jax.tree_util.keystr(path)}: {off}"
