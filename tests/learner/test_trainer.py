"""Several calls before a step, a loss and an optimizer of a call's own, versions, checkpoints. About 25 CPU seconds."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest

from scalerl_jax.config import ObjectiveConfig, OptimizerConfig
from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments.base import RIGHT, WRONG, Row
from scalerl_jax.learner.batch import build
from scalerl_jax.learner.checkpoint import Checkpoints
from scalerl_jax.learner.trainer import Layout, Trainer
from scalerl_jax.model import Precision, init_params
from scalerl_jax.objective.losses import THRESHOLDS
from scalerl_jax.rollouts.group_buffer import FinishedGroup
from tests.learner.segments import make_segments
from tests.support.params import DECODER, relative
from tests.support.trainers import trainer_of, update

LAYOUT = Layout(seq_len=32, rows=2, logprob_chunk=16)
LENGTHS = (33, 20, 17, 9, 9, 5, 33, 33)


MADE: dict[str, Trainer] = {}  # each is compiled once


def started(layout: Layout = LAYOUT, **arguments: Any) -> Trainer:
    """From the same parameters; one of the same arguments begins again."""
    name = repr((layout, arguments))
    if name not in MADE:
        MADE[name] = trainer_of(DECODER, layout, **arguments)
    trainer = MADE[name]
    trainer.start(init_params(DECODER, jax.random.key(0), trainer.mesh))
    return trainer


def segments(seed: int = 0) -> list:
    return make_segments(LENGTHS, vocabulary=DECODER.vocab_size, seed=seed)


def on_host(tree: Any) -> Any:
    return jax.tree.map(np.array, tree)


def test_where_an_agent_is_cut_into_branches_changes_no_gradient() -> None:
    """An episode as one branch, and cut at every turn with the same tokens: equal to 1e-6, in three ways to weigh."""
    rng = np.random.default_rng(5)

    def turns_of(index: int) -> list[tuple[list[int], list[int]]]:
        """(what is fed, what is sampled) of each turn, the first one's prompt left out."""
        fed = [[] if not n else rng.integers(1, 60, rng.integers(1, 4)).tolist() for n in range(1 + index % 3)]
        return [(reply, rng.integers(1, 60, rng.integers(1, 6)).tolist()) for reply in fed]

    def completion(prompt: list[int], turns: list[tuple[list[int], list[int]]], logprobs: np.ndarray) -> Completion:
        ids, replies = list[int](), list[tuple[int, int]]()
        for reply, sampled in turns:
            replies += [(len(ids), len(ids) + len(reply))] if reply else []
            ids += [*reply, *sampled]
        spans = tuple(replies)
        whole = ((3, 0, len(ids)),)
        return Completion(
            1, "g", 0, np.array(ids, np.int32), logprobs[: len(ids)], whole, spans, "stop", replies=spans,
            prompt=np.array(prompt, np.int32),
        )  # fmt: skip

    whole, cut = list[FinishedGroup](), list[FinishedGroup]()
    for number in range(2):
        prompt = rng.integers(1, 60, 4).tolist()
        scores = (RIGHT, WRONG, dataclasses.replace(RIGHT, reward=0.3))
        of_whole, of_cut = list[Completion](), list[Completion]()
        for index in range(3):
            turns, logprobs, at = turns_of(index + number), rng.normal(-4, 0.3, 40).astype(np.float32), 0
            of_whole.append(completion(prompt, turns, logprobs))
            branches = []
            for n, (reply, sampled) in enumerate(turns):
                path = [token for before in turns[:n] for part in before for token in part]
                at = len(path) + len(reply)
                branches.append(completion([*prompt, *path, *reply], [([], sampled)], logprobs[at:]))
            of_cut.append(dataclasses.replace(branches[0], others=tuple(branches[1:])))
        row = Row("", token_ids=np.array(prompt, np.int32))
        for groups, completions in ((whole, of_whole), (cut, of_cut)):
            groups.append(FinishedGroup(number, row, tuple(completions), scores, 0.0, 0.0))

    trainer = started()
    for aggregation in ("prompt", "sample", "token"):
        objective = ObjectiveConfig(aggregation=aggregation)
        one, several = (build(groups, objective, number=3) for groups in (whole, cut))
        assert len(several.segments) > len(one.segments) == 6
        assert several.metrics == one.metrics and several.lags == one.lags
        weights = [sum(float(segment.weights.sum()) for segment in batch.segments) for batch in (one, several)]
        assert weights == pytest.approx([1.0, 1.0], abs=1e-6)
        expected = on_host(trainer.forward_backward(one.segments).grads)
        assert relative(trainer.forward_backward(several.segments).grads, expected) < 1e-6


def test_several_calls_add_up() -> None:
    """To the gradient and the sums of all their segments; each call has its own log-probs. A gradient is used once."""
    trainer, every = started(), segments()
    whole = trainer.forward_backward(every)
    first = trainer.forward_backward(every[:3])
    both = trainer.forward_backward(every[3:], add_to=first)
    assert first.grads is None and len(both.logprobs()) == len(every) - 3 and len(first.logprobs()) == 3
    assert relative(both.grads, on_host(whole.grads)) < 1e-5
    assert (both.filled, both.batches) == (whole.filled, first.batches + (both.batches - first.batches))
    for name, value in whole.sums.items():
        np.testing.assert_allclose(both.sums[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    with pytest.raises(AssertionError, match="used before"):
        trainer.optim_step(first)
    trainer.optim_step(both)
    assert trainer.steps == 1


def test_calls_of_two_losses_add_up() -> None:
    """As for a batch of which some segments are sampled and others are learned by heart."""
    trainer, every = started(), segments()
    by_heart = ObjectiveConfig(loss="cross_entropy")  # type: ignore[arg-type]
    alone = [on_host(trainer.forward_backward(every[:4]).grads)]
    alone.append(on_host(trainer.forward_backward(every[4:], objective=by_heart).grads))
    both = trainer.forward_backward(every[4:], objective=by_heart, add_to=trainer.forward_backward(every[:4]))
    assert relative(both.grads, jax.tree.map(np.add, *alone)) < 1e-5


@pytest.mark.parametrize(
    "objective",
    [
        {"max_ratio": 1.01},
        {"loss": "clip", "clip_low": 0.01, "clip_high": 0.02},
        {"loss": "reinforce", "tis_cap": 1.01},
        {"loss": "gspo", "clip_low": 1e-3, "clip_high": 1e-3, "icepop_low": 0.9, "icepop_high": 1.05},
    ],
)
def test_the_objective_of_a_call_is_that_of_a_trainer_made_for_it(objective: dict[str, Any]) -> None:
    mine = started().forward_backward(segments(), objective=ObjectiveConfig(**objective))
    theirs = started(**objective).forward_backward(segments())
    jax.tree.map(np.testing.assert_array_equal, on_host(mine.grads), on_host(theirs.grads))
    own = started().forward_backward(segments())
    assert relative(mine.grads, on_host(own.grads)) > 1e-3  # the number is read


def test_thresholds_of_tokens_are_those_of_their_own_objective() -> None:
    trainer, every, names = started(), segments(), THRESHOLDS["cispo"]
    bounds = [(0.99, 1 + 1e-3 * i) for i in range(len(every))]
    alone = [
        trainer.forward_backward([one], objective=ObjectiveConfig(**dict(zip(names, pair, strict=True))))
        for one, pair in zip(every, bounds, strict=True)
    ]
    own = [
        dataclasses.replace(one, thresholds=np.tile(np.float32(pair), (len(one.tokens), 1)))
        for one, pair in zip(every, bounds, strict=True)
    ]
    both = trainer.forward_backward(own, objective=ObjectiveConfig(**dict.fromkeys(names, 1.0)))
    assert relative(both.grads, jax.tree.map(lambda *parts: sum(parts), *(on_host(one.grads) for one in alone))) < 1e-5
    assert both.sums["clipped"] == sum(one.sums["clipped"] for one in alone) > 0


def test_another_number_compiles_nothing() -> None:
    trainer = trainer_of(DECODER, LAYOUT)
    trainer.start(init_params(DECODER, jax.random.key(0), trainer.mesh))
    trainer.compile()
    update(trainer, segments())
    programs = dict(trainer._programs)
    for cap in (1.0, 2.0, 8.0):
        pending = trainer.forward_backward(segments(), objective=ObjectiveConfig(max_ratio=cap))
        trainer.optim_step(pending, learning_rate=cap * 1e-4, optimizer=OptimizerConfig(beta1=0.5, max_grad_norm=cap))
    assert trainer._programs == programs  # compiled for one signature, so another would have raised
    trainer.forward_backward(segments(), objective=ObjectiveConfig(loss="clip"))
    assert len(trainer._programs) == len(programs) + 1


def test_the_optimizer_of_a_step_is_that_of_a_trainer_made_for_it() -> None:
    other = OptimizerConfig(
        learning_rate=3e-3, warmup_steps=2, beta1=0.7, beta2=0.8, epsilon=1e-3, weight_decay=0.3, max_grad_norm=0.05
    )
    mine, theirs = started(), started(optimizer=other)
    for step in range(3):
        mine.optim_step(mine.forward_backward(segments(step)), optimizer=other)
        update(theirs, segments(step))
    after = on_host(mine.state)
    jax.tree.map(np.testing.assert_array_equal, after, on_host(theirs.state))
    own = started()
    for step in range(3):
        update(own, segments(step))
    assert relative(own.state["params"], after["params"]) > 1e-3


def test_no_limit_on_the_gradient_is_a_limit_that_is_never_reached() -> None:
    # 1e-2 from the first step on, as `trainer_of` has it.
    one, other = started(), started(optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0, max_grad_norm=1e9))
    assert math.isfinite(update(one, segments())["gradient_norm"])
    update(other, segments())
    jax.tree.map(np.testing.assert_array_equal, on_host(one.state), on_host(other.state))


@pytest.mark.parametrize("sync", ["float32", "bfloat16"])
def test_a_version_is_the_policy_at_its_step(sync: str) -> None:
    """Also when it is read later; as a change where the layout asks for changes."""
    layout = dataclasses.replace(LAYOUT, delta_share=0.5 if sync == "bfloat16" else 0.0)
    trainer = started(layout=layout, precision=Precision(sync=sync), learning_rate=1e-6)
    versions, policies = [], []
    for step in range(3):
        if step:
            update(trainer, segments(step))
        versions.append(trainer.version(step))
        policies.append({name: np.array(value) for name, value in trainer.sync_weights().items()})
    for step, (version, policy) in enumerate(zip(versions, policies)):
        assert version.step == step
        tensors = version.tensors()
        assert tensors.keys() == policy.keys()
        for name, value in policy.items():
            np.testing.assert_array_equal(np.asarray(tensors[name]), value)
        assert (version.changes is None) == (sync == "float32")
        if version.changes is not None:
            assert version.changes().base == (step - 1 if step else None)


def test_a_trainer_goes_on_from_a_checkpoint(tmp_path) -> None:
    begun, checkpoints = started(), Checkpoints(str(tmp_path), keep=1)
    update(begun, segments())
    begun.save(checkpoints, 1, manifest={}, arrays={})
    checkpoints.wait()
    saved = on_host(begun.state["params"])
    update(begun, segments(1))
    after = on_host(begun.state)
    other = trainer_of(DECODER, LAYOUT, reference_kl=0.1)
    dtypes = []

    def begin(dtype: Any) -> Any:
        dtypes.append(dtype)
        return init_params(DECODER, jax.random.key(5), other.mesh)

    found = other.restore(checkpoints, begin)
    assert found is not None and found.step == 1 and other.steps == 1
    assert dtypes == ["float32"]  # only the reference policy is that of the beginning
    other._objective = ObjectiveConfig()
    update(other, segments(1))
    jax.tree.map(np.testing.assert_array_equal, on_host(other.state), after)
    checkpoints.close()
    fresh = started()
    fresh.state = {}
    empty = Checkpoints(str(tmp_path / "none"), keep=1)
    assert fresh.restore(empty, lambda dtype: init_params(DECODER, jax.random.key(0), fresh.mesh)) is None
    empty.close()
    update(fresh, segments())
    assert relative(fresh.state["params"], saved) == 0
