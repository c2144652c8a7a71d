"""The draw order is a function of the seed and the verdicts alone: not of timing, not of where a run was resumed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.environments.curriculum import Curriculum


def reference(*, prompts, no_positive_resampling_at, k, groups, seed, batches, rate):
    """The rule written down directly: for every draw, look through the whole history it may see."""
    drawn: list[list[int]] = []
    epoch, order = 0, []
    for batch in range(batches):
        history = [
            (prompt, rate(prompt, b))
            for b in range(max(0, batch - k))  # batches 0 .. batch - k - 1
            for prompt in drawn[b]
        ]
        retired = {prompt for prompt, share in history if share >= no_positive_resampling_at}
        row = []
        while len(row) < groups:
            if not order:
                order = np.random.default_rng([seed, epoch]).permutation(prompts).tolist()
                epoch += 1
            prompt = order.pop(0)
            if prompt not in retired:
                row.append(prompt)
        drawn.append(row)
    return drawn


def verdicts(row, batch, rate, total=4):
    return [(prompt, round(rate(prompt, batch) * total), total) for prompt in row]


def lively(prompt, batch):
    """Pass rates that rise with the batches, and never reach 1 for every fifth prompt."""
    return 0.0 if prompt % 5 == 0 else min(4, (prompt % 3) + batch // 3) / 4


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.integers(5, 40),
    k=st.integers(1, 4),
    groups=st.integers(1, 12),
    seed=st.integers(0, 3),
    data=st.data(),
)
def test_draws_do_not_depend_on_timing_or_on_restarts(prompts, k, groups, seed, data):
    batches = 12
    shape = {"prompts": prompts, "no_positive_resampling_at": 0.9, "k": k, "seed": seed}
    expected = reference(**shape, groups=groups, batches=batches, rate=lively)

    def fresh():
        return Curriculum(**shape, groups_per_batch=groups)

    curriculum, drawn, recorded = fresh(), [], 0
    while recorded < batches:
        # Draws may run ahead of the last recorded batch by k batches, or wait until they are needed.
        most = min(batches, recorded + k + 1) * groups
        need = (recorded + 1) * groups
        upto = data.draw(st.integers(max(need, len(drawn)), max(need, most, len(drawn))))
        drawn += [curriculum.draw(n) for n in range(len(drawn), upto)]
        row = drawn[recorded * groups : (recorded + 1) * groups]
        assert row == expected[recorded]
        curriculum.record(recorded, verdicts(row, recorded, lively))
        recorded += 1
        if data.draw(st.booleans()):  # killed: what was drawn ahead is forgotten
            state = {name: np.array(value) for name, value in curriculum.state().items()}
            curriculum = fresh()
            curriculum.restore(state)
            drawn = drawn[: recorded * groups]


def test_a_solved_prompt_is_never_drawn_again_and_the_others_all_are():
    curriculum = Curriculum(prompts=8, no_positive_resampling_at=0.9, k=1, groups_per_batch=4, seed=0)
    drawn = []
    for batch in range(20):
        row = [curriculum.draw(n) for n in range(batch * 4, batch * 4 + 4)]
        drawn.append(row)
        # Prompt 3 is solved in its first group only: retired for good, though a later group may already be under way.
        first = not any(3 in earlier for earlier in drawn[:-1])
        curriculum.record(batch, [(p, 9 if p == 3 and first else 8, 10) for p in row])
    solved_in = next(b for b, row in enumerate(drawn) if 3 in row)
    assert not any(3 in row for row in drawn[solved_in + 2 :])
    assert curriculum.retired() == 1
    counts = np.bincount(np.concatenate(drawn[solved_in + 2 :]), minlength=8)
    assert counts[3] == 0 and np.ptp(np.delete(counts, 3)) <= 1  # epochs: nobody is drawn twice before all are once


def test_above_one_nothing_is_retired():
    curriculum = Curriculum(prompts=2, no_positive_resampling_at=1.1, k=1, groups_per_batch=2, seed=0)
    for batch in range(5):
        curriculum.record(batch, [(curriculum.draw(n), 4, 4) for n in (2 * batch, 2 * batch + 1)])
    assert curriculum.retired() == 0


def test_when_every_prompt_is_retired_the_message_says_so():
    curriculum = Curriculum(prompts=2, no_positive_resampling_at=0.9, k=1, groups_per_batch=2, seed=0)
    for batch in range(2):
        curriculum.record(batch, [(curriculum.draw(n), 4, 4) for n in (2 * batch, 2 * batch + 1)])
    with pytest.raises(ValueError, match="every prompt is retired: all 2"):
        curriculum.draw(4)


def test_a_state_of_another_run_is_refused():
    state = Curriculum(prompts=5, no_positive_resampling_at=0.9, k=1, groups_per_batch=2, seed=0).state()
    with pytest.raises(ValueError, match="the config says \\[5, 1, 2, 1\\]"):
        Curriculum(prompts=5, no_positive_resampling_at=0.9, k=1, groups_per_batch=2, seed=1).restore(state)


def test_a_draw_before_its_history_is_there_is_a_bug_of_ours():
    curriculum = Curriculum(prompts=5, no_positive_resampling_at=0.9, k=1, groups_per_batch=1, seed=0)
    curriculum.draw(0)
    curriculum.draw(1)
    with pytest.raises(AssertionError, match="before batch 0 was recorded"):
        curriculum.draw(2)
