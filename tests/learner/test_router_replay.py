"""Router replay in the update: tokens go where their segment says, with weights of the live router."""

import dataclasses

import jax
import numpy as np
import pytest

from scalerl_jax.config import Config
from scalerl_jax.learner.batch import per_token
from scalerl_jax.learner.make_trainer import make_trainer
from scalerl_jax.learner.packing import Segment, pack, plain
from scalerl_jax.learner.trainer import Layout, Trainer
from scalerl_jax.model.experts import OWN
from tests.learner.segments import make_segments, with_experts
from tests.support.models import toy_decoder
from tests.support.params import params_of
from tests.support.trainers import trainer_of, update

DECODER = toy_decoder(family="qwen3_moe")
SHAPE = (DECODER.layers, DECODER.experts_per_token)


def started(*, seq_len: int = 32, rows: int = 2, router_replay: bool = True) -> Trainer:
    trainer = trainer_of(DECODER, Layout(seq_len=seq_len, rows=rows, logprob_chunk=16, router_replay=router_replay))
    trainer.start(params_of(DECODER))
    return trainer


def segments(seed: int | None = None) -> list[Segment]:
    """seed: of the experts that they are sent to; None: their routers' own."""
    made = make_segments((30, 17, 9, 9, 21), vocabulary=DECODER.vocab_size)
    return made if seed is None else with_experts(made, DECODER, seed=seed)


def gradient(trainer: Trainer, given: list[Segment]) -> tuple[dict[str, np.ndarray], np.ndarray, list[np.ndarray]]:
    pending = trainer.forward_backward(given)
    grads = {jax.tree_util.keystr(path): np.asarray(g) for path, g in jax.tree.leaves_with_path(pending.grads)}
    return grads, np.asarray(pending.sums["expert_tokens"]), pending.logprobs()


def pending_sums(trainer: Trainer, given: list[Segment]) -> dict[str, np.ndarray]:
    return jax.device_get(trainer.forward_backward(given).sums)


def test_they_lie_at_the_positions_of_their_tokens() -> None:
    given = segments(seed=1)
    given[2] = dataclasses.replace(given[2], experts=None)
    batches, places = pack(given, length=32, rows=2, routed=SHAPE)
    for segment, place in zip(given, places, strict=True):
        experts = batches[place.batch].experts
        assert experts is not None and experts.shape == (2, 32, *SHAPE)
        found = experts[place.row, place.start : place.start + place.positions]
        wanted = np.full(found.shape, OWN) if segment.experts is None else segment.experts
        np.testing.assert_array_equal(found, wanted)
    padding = np.concatenate([batch.experts[batch.segment_ids == 0] for batch in batches])
    assert len(padding) and (padding == OWN).all()


@pytest.mark.slow
def test_a_segment_without_them_is_routed_as_ever() -> None:
    """To the bit: also where the others of its batch are sent elsewhere."""
    for one, other in zip(gradient(started(), segments())[2], gradient(started(router_replay=False), segments())[2]):
        np.testing.assert_array_equal(one, other)
    mixed = [segments()[0], *segments(seed=1)[1:]]
    np.testing.assert_array_equal(gradient(started(), mixed)[2][0], gradient(started(), segments())[2][0])


def test_tokens_go_where_they_are_sent() -> None:
    given = segments(seed=1)
    _, tokens, logprobs = gradient(started(), given)
    every = np.concatenate([segment.experts for segment in given])  # type: ignore[misc]
    for layer in range(DECODER.layers):
        np.testing.assert_array_equal(tokens[layer], np.bincount(every[:, layer].ravel(), minlength=DECODER.experts))
    moved = pending_sums(started(), given)["moved_pairs"]
    assert moved.shape == (DECODER.layers,) and (moved > 0.2 * tokens.sum(axis=1)).all()
    assert not pending_sums(started(), segments())["moved_pairs"].any()
    assert per_token(update(started(), given))["experts_moved"] == pytest.approx(moved.sum() / tokens.sum())
    own = gradient(started(), segments())[2]
    assert np.mean([np.abs(a - b).mean() for a, b in zip(logprobs, own, strict=True)]) > 0.01


def test_the_gradient_does_not_depend_on_the_packing() -> None:
    given = segments(seed=2)
    one, _, of_one = gradient(started(seq_len=32, rows=2), given)
    other, _, of_other = gradient(started(seq_len=96, rows=1), given)
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, atol=1e-6 + 1e-5 * np.abs(value).max(), err_msg=name)
    for a, b in zip(of_one, of_other, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert np.abs(one["['layers']['router']"]).max() > 0  # weights come from the live router: it learns


def test_what_is_only_scored_is_sent_there_too() -> None:
    given = segments(seed=3)
    trainer = started()
    scored = trainer.score([plain(segment.tokens, segment.experts) for segment in given])
    for one, other in zip(scored, gradient(trainer, given)[2], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    trainer.compile()
    trainer.rehearse()


def test_a_model_without_experts_is_named() -> None:
    config = Config()
    config.learner.fsdp, config.rollout.router_replay = 1, True
    with pytest.raises(ValueError, match=r"config\.rollout\.router_replay: the model has no experts"):
        make_trainer(config, toy_decoder(), max_segment=32, seq_len=32)
