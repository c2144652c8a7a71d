"""The balance of experts, by hand and from a real update."""

from typing import Any

import numpy as np
import pytest
from jax.sharding import AbstractMesh

from scalerl_jax.learner.batch import expert_load, per_token
from scalerl_jax.learner.trainer import Layout
from scalerl_jax.model.sharding import MESH_AXES
from tests.learner.segments import make_segments
from tests.support.models import toy_decoder
from tests.support.params import params_of
from tests.support.trainers import trainer_of, update


def test_by_hand() -> None:
    got = expert_load(np.array([[4.0, 4.0, 4.0, 4.0], [12.0, 4.0, 0.0, 0.0]]))
    assert got["expert_load"] == 2 and got["expert_load_max"] == 3 and got["experts_unused"] == 0.25
    assert got["expert_load_by_layer"] == [1, 3] and got["expert_tokens"] == [[4, 4, 4, 4], [12, 4, 0, 0]]
    assert expert_load(np.zeros((2, 4)))["expert_load"] == 0
    large = expert_load(np.ones((64, 128)))
    assert "expert_tokens" not in large and len(large["expert_load_by_layer"]) == 64


@pytest.mark.slow
def test_an_update_counts_what_came_to_each() -> None:
    """However the batch is packed, and without padding; a router that has one answer sends everything there."""
    decoder = toy_decoder(family="qwen3_moe")
    segments = make_segments((30, 17, 9, 9), vocabulary=decoder.vocab_size)
    params = params_of(decoder)
    found = []
    for rows, seq_len, remat in ((1, 32, "block"), (2, 64, "full")):
        trainer = trainer_of(decoder, Layout(seq_len=seq_len, rows=rows, logprob_chunk=16, remat=remat))
        trainer.start(params_of(decoder))
        found.append(per_token(update(trainer, segments)))
    tokens = np.array(found[0]["expert_tokens"])
    assert found[1]["expert_tokens"] == found[0]["expert_tokens"] and tokens.shape == (2, 4)
    assert (tokens.sum(axis=1) == decoder.experts_per_token * (30 + 17 + 9 + 9 - 4)).all()
    params["layers"]["router"] = params["layers"]["router"] * 0  # all alike: the first two are chosen
    trainer.start(params)
    assert per_token(update(trainer, segments))["expert_tokens"] == [[61, 61, 0, 0]] * 2


def test_dense_models_have_no_such_metric() -> None:
    decoder = toy_decoder()
    trainer = trainer_of(decoder, Layout(seq_len=32, rows=1, logprob_chunk=16))
    trainer.start(params_of(decoder))
    metrics = per_token(update(trainer, make_segments((20,), vocabulary=decoder.vocab_size)))
    assert not any("expert" in name for name in metrics)


def test_experts_that_do_not_divide_are_named() -> None:
    mesh: Any = AbstractMesh((1, 1, 1, 3, 1), MESH_AXES)
    with pytest.raises(ValueError, match=r"config\.learner\.expert=3: the model's 4 experts do not divide over it"):
        trainer_of(toy_decoder(family="qwen3_moe"), Layout(seq_len=32, rows=3), mesh=mesh)
