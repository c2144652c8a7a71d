"""After warm-up nothing is compiled or traced again, whatever a batch looks like; what is carried is overwritten."""

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from scalerl_jax.learner.packing import pack, plain
from scalerl_jax.learner.trainer import Layout, Trainer
from scalerl_jax.model import init_params
from scalerl_jax.model.sharding import MESH_AXES
from tests.learner.segments import make_segments
from tests.support.params import DECODER, relative
from tests.support.trainers import trainer_of, update

LENGTH, ROWS = 32, 2


def segments(lengths, seed: int = 0):
    return make_segments(lengths, vocabulary=DECODER.vocab_size, seed=seed)


@dataclasses.dataclass
class Work:
    """Traces, lowerings and compilations since they were last collected."""

    events: list[str] = dataclasses.field(default_factory=list)

    def collect(self) -> list[str]:
        found, self.events[:] = list(self.events), []
        return found


@contextlib.contextmanager
def counted() -> Iterator[Work]:
    work = Work()

    def listen(event: str, seconds: float, **_) -> None:
        if event.startswith("/jax/core/compile/"):
            work.events.append(event.removeprefix("/jax/core/compile/"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield work
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@dataclasses.dataclass
class Warm:
    """A trainer after its warm-up, with what that did."""

    trainer: Trainer
    events: list[str]
    before: dict  # the state, on the host
    after: dict


def on_host(state: dict) -> dict:
    """Copies: what is only looked at cannot be overwritten, and whoever has it keeps the next update from doing so."""
    return jax.tree.map(np.array, state)


@pytest.fixture(scope="module")
def warm() -> Warm:
    trainer = trainer_of(DECODER, Layout(seq_len=LENGTH, rows=ROWS, logprob_chunk=16), warmup_steps=2)
    trainer.start(init_params(DECODER, jax.random.key(0), trainer.mesh))
    before = on_host(trainer.state)
    with counted() as work:
        trainer.compile()
        trainer.rehearse()
        return Warm(trainer, work.collect(), before, on_host(trainer.state))


@pytest.fixture
def trainer(warm) -> Trainer:
    return warm.trainer


# ---- Compilations --------------------------------------------------------------------------------------------------


def test_the_warm_up_compiles_and_changes_nothing(warm):
    """Accumulate, apply, score and wire: so the count below is not of a listener that hears nothing."""
    assert warm.events.count("backend_compile_duration") >= 4
    assert warm.events.count("jaxpr_trace_duration") >= 4
    jax.tree.map(np.testing.assert_array_equal, warm.after, warm.before)


def test_nothing_compiles_after_the_warm_up(trainer):
    """Few and many segments, short and long ones, one micro-batch and several: nor is anything traced again."""
    first, micro_batches = int(trainer.state["step"]), set()
    with counted() as work:
        for seed, lengths in enumerate(([5], [33, 33], [9] * 3, [17, 20, 33, 4, 4], [2, 3, 4] * 9, [33] * 7)):
            sums = update(trainer, segments(lengths, seed))
            micro_batches.add(sums["micro_batches"])
            scored = trainer.score([plain(s.tokens) for s in segments(lengths, seed)])
            beside = [plain(s.tokens) for s in segments([9] * (2 * seed), seed)]
            looked_at = trainer.forward_backward(segments(lengths, seed), beside=beside).logprobs()
            assert len(scored) == len(lengths) == len(looked_at) - len(beside)
            jax.block_until_ready(trainer.sync_weights())
            assert int(trainer.state["step"]) == first + seed + 1
            assert work.collect() == [], lengths
        jax.jit(lambda x: x + first)(np.float32(1))
        assert "backend_compile_duration" in work.collect()  # the listener still hears
    assert micro_batches >= {1, 2, 4}


def test_nothing_compiles_where_a_run_goes_on(trainer):
    """The state comes from a checkpoint then: other arrays, laid out as abstract_state says."""
    trainer.state = restored(trainer, jax.device_get(trainer.state))
    with counted() as work:
        for seed in range(2):
            update(trainer, segments([33, 33, 33, 12], seed))
            trainer.score([plain(np.arange(5))])
            trainer.sync_weights()
        assert work.collect() == []


def restored(trainer: Trainer, saved: dict) -> dict:
    return jax.tree.map(
        lambda value, abstract: jax.device_put(value, abstract.sharding), saved, trainer.abstract_state
    )  # fmt: skip


# ---- Donation ------------------------------------------------------------------------------------------------------


def test_the_old_state_is_overwritten(trainer):
    """Parameters and moments of before the update are gone: never two of them in memory."""
    old = jax.tree.leaves(trainer.state)
    update(trainer, segments([20, 33, 5]))
    assert old and all(leaf.is_deleted() for leaf in old)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(trainer.state))


def test_the_sum_of_gradients_is_overwritten(trainer):
    """One gradient's worth of memory however many micro-batches, and the parameters stay."""
    batch = pack(segments([20, 33]), length=LENGTH, rows=ROWS)[0]
    grads = trainer.gradient(batch)[0]
    after = trainer.gradient(batch, grads=grads)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(grads))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((after, trainer.state)))


def test_weights_on_the_wire_are_their_own(trainer):
    """They are read on another thread while the next update overwrites the parameters they were made from."""
    weights = trainer.sync_weights()
    before = {name: np.array(value) for name, value in weights.items()}
    update(trainer, segments([20, 33, 5]))
    for name, value in weights.items():
        assert not value.is_deleted(), name
        np.testing.assert_array_equal(np.asarray(value), before[name])
    for name, value in trainer.sync_weights().items():
        assert not np.array_equal(np.asarray(value), before[name]), name


# ---- What an update and a score are --------------------------------------------------------------------------------


def test_a_batch_of_several_micro_batches_is_the_sum_of_them(trainer):
    """`update` packs, accumulates and applies what `gradient` computes; and says how full its rows were."""
    many = segments([33, 33, 17, 17, 9, 9, 9], seed=4)
    grads, _, _ = trainer.gradient(pack(many, length=LENGTH, rows=ROWS)[0])
    alone = [trainer.gradient(pack([segment], length=LENGTH, rows=ROWS)[0])[0] for segment in many]
    assert relative(grads, jax.tree.map(lambda *parts: sum(np.asarray(p) for p in parts), *alone)) < 1e-5
    norm = np.sqrt(sum(float((np.asarray(leaf, np.float64) ** 2).sum()) for leaf in jax.tree.leaves(grads)))
    sums = update(trainer, many)
    assert sums["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert sums["micro_batches"] == 2
    assert sums["row_use"] == pytest.approx((32 * 2 + 16 * 2 + 8 * 3) / (2 * ROWS * LENGTH))
    assert sums["tokens"] == sum((segment.weights > 0).sum() for segment in many)


def test_an_applied_gradient_is_let_go_of(trainer):
    pending = trainer.forward_backward(segments([20, 9], seed=8))
    alive = [weakref.ref(leaf) for leaf in jax.tree.leaves(pending.grads)]
    assert all(leaf() is not None for leaf in alive)
    trainer.optim_step(pending)
    assert pending.grads is None
    assert all(leaf() is None for leaf in alive)


@pytest.mark.parametrize("beside", [[], [3, 5], [9, 33, 33, 33, 20]], ids=["none", "in the room left", "in rows more"])
def test_what_is_looked_at_changes_nothing(trainer, beside):
    """The log-probs are there before anything is applied; segments beside those trained on change no bit of it."""
    trained = segments([20, 33, 9, 5, 5], seed=6)
    looked_at = [plain(s.tokens) for s in segments(beside, seed=7)]
    before = jax.device_get(trainer.state)
    alone, pending = trainer.forward_backward(trained), trainer.forward_backward(trained, beside=looked_at)
    assert pending.batches == (2 if len(beside) < 3 else 3)
    for mine, theirs in zip(jax.tree.leaves(pending.grads), jax.tree.leaves(alone.grads), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))
    assert jax.device_get(pending.sums) == jax.device_get(alone.sums)
    assert pending.filled == alone.filled
    logprobs = pending.logprobs()
    for segment, mine, theirs in zip(
        [*trained, *looked_at],
        logprobs,
        trainer.score([plain(s.tokens) for s in (*trained, *looked_at)]),
        strict=True,
    ):
        assert mine.shape == segment.tokens.shape and mine[0] == 0
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state), before)
    trainer.optim_step(pending)
    assert int(trainer.state["step"]) == int(before["step"]) + 1


def test_nothing_is_computed_where_nothing_is_to_be_scored(trainer, monkeypatch):
    """As of a batch in which no prompt survives."""
    monkeypatch.setattr(trainer, "_score", lambda *arguments: pytest.fail("it computes"))
    assert trainer.score([]) == []


def test_scores_come_back_in_the_order_asked_for(trainer):
    sequences = [segment.tokens for segment in segments([5, 33, 9, 33, 20, 2, 33], seed=2)]
    together = trainer.score([plain(tokens) for tokens in sequences])
    for tokens, scored in zip(sequences, together, strict=True):
        assert scored.shape == tokens.shape and scored.dtype == np.float32 and scored[0] == 0
        np.testing.assert_allclose(scored, trainer.score([plain(tokens)])[0], atol=1e-5)


def test_a_gradient_that_is_not_finite_stops_the_run(trainer):
    broken = [dataclasses.replace(s, advantages=s.advantages * np.float32(np.inf)) for s in segments([20, 9])]
    saved = jax.device_get(trainer.state)
    with pytest.raises(FloatingPointError, match=f"the gradient norm is nan at step {int(saved['step']) + 1}"):
        update(trainer, broken)
    trainer.state = restored(trainer, saved)  # as the docstring says: from a checkpoint


def test_rows_that_do_not_divide_over_the_mesh_are_named():
    mesh = jax.sharding.AbstractMesh((2, 1, 1, 2, 1), MESH_AXES)
    refused = r"6 rows of a micro-batch do not divide over 4 shards \(replica x fsdp x expert\)"
    with pytest.raises(ValueError, match=refused):
        trainer_of(DECODER, Layout(seq_len=LENGTH, rows=6), mesh=mesh)
