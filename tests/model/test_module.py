"""The policy as a Flax module: the page's lines, and that it is the functions underneath. About 15 CPU seconds."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from scalerl_jax.environments.tokenizer import make_tokenizer
from scalerl_jax.model import Decoder, forward, init_params, load_hf, logits, token_logprobs
from scalerl_jax.model.sharding import make_mesh
from tests.support.models import random_tensors, toy_decoder, write_folder
from tests.support.paths import ROOT

TOKENS = jnp.array([[5, 7, 11, 13, 2], [3, 1, 4, 1, 5]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    config = toy_decoder()
    return str(write_folder(tmp_path_factory.mktemp("module") / "policy", config, random_tensors(config, 0)))


def test_the_lines_of_the_page(folder: str, tmp_path, monkeypatch) -> None:
    text = (ROOT / "docs" / "how_to" / "models.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in code.splitlines() if line and "import" not in line]) <= 10
    monkeypatch.chdir(tmp_path)
    os.symlink(folder, "policy")
    found: dict = {}
    exec(code, found)
    assert found["logits"].shape == (1, 4, found["decoder"].config.vocab_size)
    saved = ocp.StandardCheckpointer().restore(str(tmp_path / "policy-state"))
    jax.tree.map(np.testing.assert_array_equal, saved, nnx.to_pure_dict(nnx.state(found["decoder"], nnx.Param)))
    norms = [float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(found["gradient"])]
    assert len(norms) == len(jax.tree.leaves(saved)) and all(np.isfinite(norms)) and sum(n > 0 for n in norms) > 5


def test_it_is_the_functions_underneath(folder: str) -> None:
    decoder, (config, params) = Decoder.from_pretrained(folder), load_hf(folder)
    positions = jnp.broadcast_to(jnp.arange(5), TOKENS.shape)
    hidden = forward(params, config, TOKENS, positions, jnp.ones_like(TOKENS))
    np.testing.assert_array_equal(decoder(TOKENS), logits(params, config, hidden))
    np.testing.assert_array_equal(decoder.logprobs(TOKENS, TOKENS), token_logprobs(params, config, hidden, TOKENS))

    def loss(params):
        hidden = forward(params, config, TOKENS, positions, jnp.ones_like(TOKENS))
        return token_logprobs(params, config, hidden, TOKENS).sum()

    mine = nnx.to_pure_dict(nnx.grad(lambda model: model.logprobs(TOKENS, TOKENS).sum())(decoder))
    jax.tree.map(np.testing.assert_array_equal, mine, jax.grad(loss)(params))


def test_segments_of_a_row_do_not_see_each_other(folder: str) -> None:
    """Positions start at 0 in each of them; padding belongs to none."""
    decoder = Decoder.from_pretrained(folder)
    row = jnp.concatenate([TOKENS[:1, :3], TOKENS[1:, :4], jnp.zeros((1, 2), jnp.int32)], axis=1)
    packed = decoder(row, segment_ids=jnp.array([[1, 1, 1, 2, 2, 2, 2, 0, 0]]))
    np.testing.assert_allclose(packed[0, :3], decoder(TOKENS[:1, :3])[0], atol=1e-5)
    np.testing.assert_allclose(packed[0, 3:7], decoder(TOKENS[1:, :4])[0], atol=1e-5)


def test_a_step_of_optax_moves_it_and_a_folder_keeps_it(folder: str, tmp_path) -> None:
    """On a mesh as without one."""
    mesh = make_mesh(fsdp=1, devices=jax.devices()[:1])
    decoder = Decoder.from_pretrained(folder, mesh=mesh)
    before = decoder.params
    gradient = nnx.to_pure_dict(nnx.grad(lambda model: -model.logprobs(TOKENS, TOKENS).mean())(decoder))
    updates, _ = optax.sgd(0.1).update(gradient, optax.sgd(0.1).init(before))
    moved = Decoder(decoder.config, optax.apply_updates(before, updates), mesh=mesh)
    assert float(moved.logprobs(TOKENS, TOKENS).mean()) > float(decoder.logprobs(TOKENS, TOKENS).mean())
    graph, state = nnx.split(moved)
    again = nnx.merge(graph, state)
    np.testing.assert_array_equal(again(TOKENS), moved(TOKENS))
    make_tokenizer(corpus=["some words"] * 9, path=str(tmp_path / "tokenizer"), vocabulary=300)
    moved.save_pretrained(str(tmp_path / "saved"), tokenizer=str(tmp_path / "tokenizer"))
    np.testing.assert_array_equal(Decoder.from_pretrained(str(tmp_path / "saved"))(TOKENS), moved(TOKENS))


def test_a_fresh_one_has_the_parameters_of_init_params() -> None:
    config = toy_decoder()
    mine = Decoder.initialized(config, jax.random.key(3)).params
    jax.tree.map(np.testing.assert_array_equal, mine, init_params(config, jax.random.key(3)))
