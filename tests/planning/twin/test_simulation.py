"""The simulated fleet where its rate can be said by hand, and what holds whatever it is like."""

import collections
import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.planning.twin.lengths import Quantiles
from scalerl_jax.planning.twin.simulation import Scenario, Simulation, simulate
from scalerl_jax.planning.twin.speeds import Machine, Recipe, ServerSpeed, TrainerSpeed
from scalerl_jax.rollouts.group_buffer import GroupBuffer
from scalerl_jax.rollouts.pacing import Phased, Pipeline

TOKENS, CHUNK, SLOTS = 64, 8, 32
RECIPE = Recipe(prompts_per_step=4, group_size=8)  # a batch fills the slots of a generator
SERVER = ServerSpeed(slots=SLOTS, queue=64, chunk=CHUNK, step_seconds=0.01, slot_seconds=0.001)
WAVE = TOKENS * (0.01 + SLOTS * 0.001)  # seconds that a generator takes for a batch


def scenario(**changes) -> Scenario:
    fields = {
        "recipe": RECIPE, "trainer": TrainerSpeed(update_seconds=0.5), "server": SERVER, "servers": 1,
        "lengths": Quantiles([(1, TOKENS)]),
    }  # fmt: skip
    return Scenario(**(fields | changes))


class TestByHand:
    def test_one_generator_that_is_the_slower_side(self):
        found = simulate(scenario(), steps=30, first=10)
        assert found.steps_per_hour == pytest.approx(3600 / WAVE)
        assert found.generator_busy == pytest.approx(1) and found.generator_idle == pytest.approx(0)
        assert found.trainer_busy == pytest.approx(0.5 / WAVE)
        assert found.trainer_idle == pytest.approx(1 - 0.5 / WAVE)
        assert found.tokens_per_step == 32 * TOKENS

    def test_generators_that_are_twice_as_many_are_twice_as_fast(self):
        slow = TrainerSpeed(update_seconds=0.01)
        rates = [simulate(scenario(servers=n, trainer=slow), steps=60, first=20).steps_per_hour for n in (1, 2, 4)]
        assert rates == pytest.approx([3600 / WAVE, 2 * 3600 / WAVE, 4 * 3600 / WAVE], rel=0.03)

    def test_a_trainer_that_is_the_slower_side(self):
        trainer = TrainerSpeed(update_seconds=5 * WAVE, between_seconds=0.25)
        found = simulate(scenario(trainer=trainer), steps=30, first=10)
        assert found.steps_per_hour == pytest.approx(3600 / (5 * WAVE + 0.25))
        assert found.trainer_busy == pytest.approx(5 * WAVE / (5 * WAVE + 0.25))
        assert found.trainer_idle == pytest.approx(0.25 / (5 * WAVE + 0.25))
        # Not every slot is taken all the time, and each decode step costs its fixed part.
        assert WAVE / (5 * WAVE + 0.25) <= found.generator_busy < 2 * WAVE / (5 * WAVE + 0.25)
        # The store holds one batch beyond the one in training; what fills the slots besides is younger than k allows.
        assert set(found.staleness) <= {1, 2, 3}

    def test_phases_take_turns(self):
        recipe = dataclasses.replace(RECIPE, kind="phased", max_off_policy_steps=4)
        found = simulate(scenario(recipe=recipe), steps=24, first=8)
        # 32 completions end at once, and half of the slots are taken again a chunk later: by what is asked for then.
        period = 3600 / found.steps_per_hour
        assert WAVE + 0.5 <= period <= WAVE + 0.5 + CHUNK * 0.026
        assert found.staleness == pytest.approx(dict.fromkeys(range(4), 0.25))
        assert found.generator_busy == pytest.approx((period - 0.5) / period)

    def test_an_evaluation_takes_its_waves_and_training_waits(self):
        recipe = dataclasses.replace(
            RECIPE, evaluation_every=5, evaluation_prompts=12, evaluation_samples=8, max_buffered_batches=0.0
        )
        trainer = TrainerSpeed(update_seconds=2 * WAVE)
        found = simulate(scenario(recipe=recipe, trainer=trainer), steps=30, first=10)
        # 96 completions in 32 slots; what was asked for in training is sampled by then.
        assert 3 * WAVE <= found.evaluation_seconds <= 3 * WAVE + CHUNK * 0.026
        assert found.trainer_evaluation + found.trainer_busy + found.trainer_idle == pytest.approx(1)
        assert found.generator_evaluation == pytest.approx(found.trainer_evaluation, rel=0.2)

    def test_a_chunk_costs_what_is_taken_and_a_completion_its_own(self):
        assert SERVER.chunk_seconds(5) == pytest.approx(CHUNK * (0.01 + 5 * 0.001))
        assert SERVER.tokens_per_second(40) == pytest.approx(SLOTS / (0.01 + SLOTS * 0.001))
        dear = dataclasses.replace(SERVER, completion_seconds=0.04)
        assert dear.tokens_per_second(40) == pytest.approx(1 / ((0.01 + SLOTS * 0.001) / SLOTS + 0.001))

    def test_a_prompt_is_computed_once_a_group(self):
        slow = dataclasses.replace(SERVER, prefill_seconds=0.1)
        found = simulate(scenario(server=slow), steps=30, first=10)
        assert found.steps_per_hour == pytest.approx(3600 / (WAVE + 4 * 0.1))

    def test_two_processes_on_one_core_take_the_sum_of_their_times(self):
        trainer = TrainerSpeed(update_seconds=WAVE)
        alone = simulate(scenario(trainer=trainer), steps=40, first=20)
        shared = simulate(scenario(trainer=trainer, machine=Machine(cores=1.0)), steps=40, first=20)
        pinned = simulate(
            scenario(trainer=trainer, machine=Machine(trainer_cores=1.0, generator_cores=1.0)), steps=40, first=20
        )
        assert shared.steps_per_hour == pytest.approx(3600 / (2 * WAVE), rel=0.02)
        assert pinned.steps_per_hour == pytest.approx(alone.steps_per_hour)
        # Generators that share a core are no faster for being two.
        both = simulate(
            scenario(servers=2, machine=Machine(trainer_cores=1.0, generator_cores=1.0)), steps=40, first=20
        )
        assert both.steps_per_hour == pytest.approx(3600 / WAVE, rel=0.02)

    def test_completions_are_taken_in_one_after_another(self):
        trainer = TrainerSpeed(update_seconds=0.01, completion_seconds=WAVE / 16)
        found = simulate(scenario(trainer=trainer), steps=30, first=10)
        assert found.steps_per_hour == pytest.approx(3600 / (2 * WAVE), rel=0.05)  # 32 completions a step


class Watched(Simulation):
    """Keeps every group that was trained on."""

    def __init__(self, *arguments, **named):
        self.trained = []
        super().__init__(*arguments, **named)

    def _count(self, number, groups):
        self.trained.append(groups)
        super()._count(number, groups)


SCENARIOS = st.builds(
    lambda kind, k, buffered, servers, slots, queue, chunk, update, push, cores, every, evaluating, intake: Scenario(
        recipe=Recipe(
            prompts_per_step=3, group_size=4, kind=kind, max_off_policy_steps=k, max_buffered_batches=buffered,
            evaluation_every=every, evaluation_prompts=5, evaluation_samples=3,
            evaluation_servers=min(evaluating, servers),
        ),
        trainer=TrainerSpeed(update_seconds=update, spread=(0.5, 1.5), completion_seconds=intake),
        server=ServerSpeed(
            slots=slots, queue=queue, chunk=chunk, step_seconds=0.01, slot_seconds=0.001, push_seconds=push
        ),
        servers=servers,
        lengths=Quantiles([(0, 1), (0.8, 40), (1, 200)]),
        machine=Machine(cores=cores),
    ),
    kind=st.sampled_from(["pipeline", "phased"]),
    k=st.integers(1, 4),
    buffered=st.sampled_from([0.0, 1.0, 2.5]),
    servers=st.integers(1, 3),
    slots=st.integers(1, 20),
    queue=st.integers(0, 20),
    chunk=st.sampled_from([1, 4, 16]),
    update=st.sampled_from([0.0, 0.3, 3.0]),
    push=st.sampled_from([0.0, 0.2, 5.0]),
    cores=st.sampled_from([1.0, 2.0, math.inf]),
    every=st.sampled_from([0, 2]),
    evaluating=st.integers(0, 2),
    intake=st.sampled_from([0.0, 0.01]),
)  # fmt: skip


@given(SCENARIOS)
def test_whatever_it_is_like(drawn):
    steps, k, size = 8, drawn.recipe.max_off_policy_steps, drawn.recipe.group_size
    simulation = Watched(drawn, steps=steps)
    found = simulation.run(2)
    # The admission is the run's own, not a likeness of it.
    assert type(simulation.buffer) is GroupBuffer
    assert type(simulation.pacing) is (Phased if drawn.recipe.kind == "phased" else Pipeline)
    # Every group once, whole, in its batch; every token of it by versions that follow each other, none too old.
    numbers = [group.number for groups in simulation.trained for group in groups]
    assert numbers == list(range(steps * drawn.recipe.prompts_per_step))
    ages: collections.Counter[int] = collections.Counter()
    for batch, groups in enumerate(simulation.trained):
        for group in groups:
            assert sorted(group.completions) == list(range(size))
            for completion in group.completions.values():
                spans = completion.versions
                assert spans[0][1] == 0 and spans[-1][2] == len(completion.token_ids)
                assert all(a[2] == b[1] and a[0] < b[0] for a, b in itertools.pairwise(spans))
                assert all(0 <= batch - step <= k for step, _, _ in spans)
                for step, start, end in spans if batch >= 2 else ():
                    ages[batch - step] += end - start
    assert found.staleness == pytest.approx({age: ages[age] / ages.total() for age in ages})
    # No time is lost, and none is counted twice.
    for side in ("trainer", "generator"):
        parts = [getattr(found, f"{side}_{part}") for part in ("busy", "idle", "evaluation")]
        assert sum(parts) == pytest.approx(1) and min(parts) >= -1e-9
    # What was asked for besides is there still, for the batches that would be next.
    left = sorted([*simulation.buffer.ready, *simulation.buffer.in_flight])
    assert left == list(range(len(numbers), simulation.buffer.next_number))


def test_the_same_seed_gives_the_same_outcome_and_another_one_another():
    varied = scenario(lengths=Quantiles([(0, 1), (1, 400)]), servers=2)
    outcomes = [simulate(varied, steps=20, first=5, seed=seed) for seed in (3, 3, 4)]
    assert outcomes[0] == outcomes[1] != outcomes[2]


def test_what_cannot_run_is_said():
    for wrong, message in (({"servers": 0}, "servers=0"), ({"recipe": dataclasses.replace(
        RECIPE, max_off_policy_steps=0)}, "max_off_policy_steps is 0")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            simulate(scenario(**wrong), steps=4, first=1)
    with pytest.raises(ValueError, match="steps 4 to 4"):
        simulate(scenario(), steps=4, first=4)
