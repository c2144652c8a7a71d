"""The promises of pacing and buffer, driven by a simulated fleet that dies, hangs, crawls and comes back."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalerl_jax.rollouts.pacing import Phased, Pinned, Pipeline, pinned, suits
from tests.rollouts.simulator import Faults, Server, Simulation, completions

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def fleets(draw):
    """Arguments of a Simulation that say nothing about the pacing."""
    servers = draw(st.integers(1, 4))
    return {
        "seed": draw(st.integers(0, 2**32)),
        "slots": draw(st.lists(st.integers(1, 6), min_size=servers, max_size=servers)),
        # The slowest is a thousand times slower than the fastest.
        "chunk_seconds": [10.0**e for e in draw(st.lists(st.floats(-2, 1), min_size=servers, max_size=servers))],
        "update_seconds": 10.0 ** draw(st.floats(-2, 2)),
        "push_seconds": 10.0 ** draw(st.floats(-2, 1)),
        "group_size": draw(st.integers(2, 4)),
        "faults": Faults(
            draw(st.floats(0, 0.1)), draw(st.floats(0, 0.1)), draw(st.floats(0, 0.5)), draw(st.floats(0, 0.5))
        ),
    }


def check_order(simulation: Simulation, start: int) -> None:
    """Every number trained once, in order, filled by number, with every completion there under its own name."""
    pacing = simulation.pacing
    numbers = [group.number for groups in simulation.trained for group in groups]
    assert numbers == list(range(start * pacing.groups, pacing.batches * pacing.groups))
    assert simulation.drawn == numbers
    for groups in simulation.trained:
        for group in groups:
            assert sorted(group.trajectories) == list(range(simulation.group_size)) == sorted(group.scores)
            assert all(c.group_id == group.group_id and c.index == i for i, c in completions(group).items())
    assert not simulation.buffer.ready


@SETTINGS
@given(fleet=fleets(), k=st.integers(1, 9), groups=st.integers(1, 5), store=st.floats(0, 3), start=st.integers(0, 3))
def test_pipeline_bounds_the_lag_and_loses_nothing_whatever_happens(fleet, k, groups, store, start):
    pacing = Pipeline(k=k, groups=groups, batches=start + 12, max_buffered_batches=store, start=start)
    simulation = Simulation(pacing=pacing, start=start, **fleet)
    simulation.run()
    check_order(simulation, start)
    assert min(simulation.lags()) >= 0 and max(simulation.lags()) <= k


@SETTINGS
@given(fleet=fleets(), k=st.integers(1, 5), groups=st.integers(1, 4), start=st.integers(0, 6))
def test_phased_samples_a_whole_phase_from_one_frozen_version(fleet, k, groups, start):
    batches = start + 9
    simulation = Simulation(pacing=Phased(k=k, groups=groups, batches=batches, start=start), start=start, **fleet)
    simulation.run()
    check_order(simulation, start)
    assert max(simulation.lags()) <= k - 1
    for batch, trained in enumerate(simulation.trained, start=start):
        steps = {int(s) for g in trained for c in completions(g).values() for s in c.token_steps()}
        frozen = max(start, batch - batch % k)
        # What is taken back from a server that lied is sampled by whatever version is held by then.
        assert min(steps) >= frozen if fleet["faults"].lie else steps == {frozen}


@SETTINGS
@given(fleet=fleets(), k=st.integers(2, 5), groups=st.integers(1, 4), start=st.integers(0, 3), meetings=st.booleans())
def test_phased_goes_on_when_groups_are_taken_back_after_a_later_version_has_gone_out(
    fleet, k, groups, start, meetings
):
    """In mid-phase an evaluation brings every server past the phase's version; or the only one is sent away."""
    fleet["faults"] = dataclasses.replace(fleet["faults"], lie=0.5, evaluate=0.5)
    pacing = Phased(k=k, groups=groups, batches=start + 9, start=start)
    simulation = Simulation(pacing=pacing, start=start, meetings=meetings, **fleet)
    simulation.run()
    check_order(simulation, start)
    assert min(simulation.lags()) >= 0 and max(simulation.lags()) <= k - 1


def test_the_pin_holds_until_the_first_update_of_the_phase():
    pacing = Phased(k=4, groups=2, batches=12)
    number = 2 * 6  # of batch 6, in the phase of version 4
    assert pinned(pacing, number, trained=4) == 4 and not suits(pacing, number, 5, trained=4)
    assert pinned(pacing, number, trained=5) is None and suits(pacing, number, 5, trained=5)
    assert not suits(pacing, number, 3, trained=5)
    evaluation = Pinned(version=5, groups=3)
    assert pinned(evaluation, 1, trained=0) == 5 and not suits(evaluation, 1, 6, trained=0)


class Watched(Simulation):
    """With room for everything asked for, an empty slot needs a reason."""

    def slot_may_be_empty(self, server: Server, batch: int) -> None:
        pacing, buffer = self.pacing, self.buffer
        sampled = [n for n, g in (buffer.in_flight | buffer.ready).items() if g.delivered() == self.group_size]
        beyond = [n for n in sampled if n // pacing.groups > buffer.trained]
        over_k = batch > buffer.trained + pacing.k or batch > server.step + pacing.k
        store_full = len(beyond) >= pacing.groups  # max_buffered_batches = 1
        assert batch >= pacing.batches or over_k or store_full


@SETTINGS
@given(fleet=fleets(), k=st.integers(1, 9), groups=st.integers(1, 5))
def test_slots_are_busy_unless_k_or_the_store_bound_forbid_it(fleet, k, groups):
    # Chunks of one length, no refusals: what is claimed is about admission, not about the moment between two chunks.
    fleet["faults"].refuse = fleet["faults"].lie = 0.0
    simulation = Watched(pacing=Pipeline(k=k, groups=groups, batches=10), **fleet)
    simulation.run()
    check_order(simulation, 0)


GROUPS, SLOTS = 8, 8  # four groups of 2 in flight on one server: half a batch


def steady(*, update_seconds: float, max_buffered_batches: float, seed: int = 0) -> Simulation:
    """Two servers that need about 4 s for a batch of 8 groups, without faults; k = 8."""
    simulation = Simulation(
        pacing=Pipeline(k=8, groups=GROUPS, batches=40, max_buffered_batches=max_buffered_batches),
        seed=seed,
        slots=[SLOTS, SLOTS],
        chunk_seconds=[0.8, 0.8],
        update_seconds=update_seconds,
        push_seconds=0.05,
    )
    simulation.run()
    check_order(simulation, 0)
    return simulation


def late_mean(simulation: Simulation) -> float:
    """Mean lag once the start is over."""
    lags = simulation.lags()[len(simulation.lags()) // 2 :]
    return sum(lags) / len(lags)


@pytest.mark.parametrize("update_seconds", [0.1, 4.0, 40.0])
def test_k_is_a_bound_and_not_a_target(update_seconds):
    simulation = steady(update_seconds=update_seconds, max_buffered_batches=1.0)
    # 2 for the batch in training and the one stored, and what is in flight: (2 * 8 + 2 * 4) / 16 batches.
    assert max(simulation.lags()) <= 4
    assert late_mean(simulation) < 2.7


def test_without_the_store_bound_a_slow_trainer_trains_on_tokens_as_old_as_k():
    assert late_mean(steady(update_seconds=40.0, max_buffered_batches=100.0)) > 6
    assert late_mean(steady(update_seconds=40.0, max_buffered_batches=0.0)) < 1.7


@pytest.mark.parametrize(("max_buffered_batches", "idle_share"), [(1.0, 0.25), (4.0, 0.12)])
def test_a_fast_trainer_costs_the_servers_little(max_buffered_batches, idle_share):
    """While one long completion is waited for, the store fills: what is then idle is the price of a short store."""
    simulation = steady(update_seconds=0.1, max_buffered_batches=max_buffered_batches)
    assert sum(s.idle_slot_seconds for s in simulation.servers) < idle_share * 2 * SLOTS * simulation.now


def test_bad_values_are_named():
    with pytest.raises(ValueError, match=r"pacing\.max_off_policy_steps is 0"):
        Pipeline(k=0, groups=1, batches=1)
    with pytest.raises(ValueError, match=r"pacing\.max_buffered_batches is -1"):
        Pipeline(k=1, groups=1, batches=1, max_buffered_batches=-1.0)
