"""The draw order is a function of the seed and the scores alone: not of timing, not of where a run was resumed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.config import CurriculumConfig
from scalerl_jax.environments.base import Stratum
from scalerl_jax.environments.curriculum import Curriculum, NoPromptLeft, OtherPrompts


def one_stratum(prompts, *, k=1, groups=2, seed=0, digest=0, **fields):
    return mixture([(prompts, 1.0)], k=k, groups=groups, seed=seed, digest=digest, **fields)


def mixture(sizes, *, k=1, groups=2, seed=0, digest=0, **fields):
    """Of strata with (prompts, weight)."""
    ends = np.cumsum([0, *(count for count, _ in sizes)]).tolist()
    strata = [Stratum(str(s), weight, range(ends[s], ends[s + 1])) for s, (_, weight) in enumerate(sizes)]
    config = CurriculumConfig(**fields)
    return Curriculum(strata, config, k=k, groups_per_batch=groups, seed=seed, digest=digest)


def retired_by(history, config):
    """The prompts that these (prompt, correct, total), in order, retire."""
    retired, seen = set(), {}
    for prompt, correct, total in history:
        seen.setdefault(prompt, []).append((correct, total))
        last = seen[prompt][-config.window :]
        rate = sum(c for c, _ in last) / sum(t for _, t in last)
        if len(seen[prompt]) >= config.minimum_groups and rate >= config.no_positive_resampling_at:
            retired.add(prompt)
    return retired


def reference(sizes, config, *, k, groups, seed, batches, rate):
    """The rule written down directly: for every draw, look through the whole history it may see."""
    drawn: list[list[int]] = []
    ends = np.cumsum([0, *(count for count, _ in sizes)]).tolist()
    weights = np.array([weight for _, weight in sizes])
    orders, epochs, credit, since = [[] for _ in sizes], [0] * len(sizes), np.zeros(len(sizes)), 0
    for batch in range(batches):
        for again in (False, True):
            if again:
                since = batch  # everything was retired: a new history
            seen = [row for b in range(since, batch - k) for row in scored(drawn[b], b, rate)]
            retired = retired_by(seen, config)
            left = [[p for p in range(ends[s], ends[s + 1]) if p not in retired] for s in range(len(sizes))]
            if any(left):
                break
        row = []
        while len(row) < groups:
            share = np.array([weights[s] if left[s] else 0.0 for s in range(len(sizes))])
            credit += share / share.sum()
            s = max((s for s in range(len(sizes)) if left[s]), key=lambda s: (credit[s], -s))
            credit[s] -= 1
            if config.sampling == "uniform":
                rng = np.random.default_rng([seed, 5, batch * groups + len(row)])
                row.append(left[s][rng.integers(len(left[s]))])
                continue
            while True:
                if not orders[s]:
                    key = [seed, epochs[s]] + ([s] if s else [])
                    orders[s] = np.random.default_rng(key).permutation(sizes[s][0]).tolist()
                    epochs[s] += 1
                prompt = ends[s] + orders[s].pop(0)
                if prompt not in retired:
                    row.append(prompt)
                    break
        drawn.append(row)
    return drawn


def scored(row, batch, rate, total=4):
    return [(prompt, round(rate(prompt, batch) * total), total) for prompt in row]


def played(curriculum, batches, *, groups=2, correct=lambda prompt: 4):
    """The prompts of each batch, where `correct` of four completions of a prompt are."""
    rows = []
    for batch in range(batches):
        rows.append([curriculum.draw(n) for n in range(groups * batch, groups * (batch + 1))])
        curriculum.record(batch, [(prompt, correct(prompt), 4) for prompt in rows[-1]])
    return rows


def lively(prompt, batch):
    """Pass rates that rise with the batches, and never reach 1 for every fifth prompt."""
    return 0.0 if prompt % 5 == 0 else min(4, (prompt % 3) + batch // 3) / 4


def easy(prompt, batch):
    """All prompts are solved after a while."""
    return 1.0 if batch % 7 > 1 else 0.5


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.sampled_from([0.5, 1.0, 3.0])), min_size=1, max_size=3),
    k=st.integers(1, 4),
    groups=st.integers(1, 12),
    seed=st.integers(0, 3),
    window=st.integers(1, 3),
    minimum_groups=st.integers(1, 3),
    sampling=st.sampled_from(["epochs", "uniform"]),
    rate=st.sampled_from([lively, easy]),
    data=st.data(),
)
def test_draws_do_not_depend_on_timing_or_on_restarts(
    sizes, k, groups, seed, window, minimum_groups, sampling, rate, data
):
    batches = 12
    fields = {"window": window, "minimum_groups": minimum_groups, "sampling": sampling, "when_empty": "restart"}
    config = CurriculumConfig(**fields)
    expected = reference(sizes, config, k=k, groups=groups, seed=seed, batches=batches, rate=rate)

    def fresh():
        return mixture(sizes, k=k, groups=groups, seed=seed, **fields)

    curriculum, drawn, recorded = fresh(), [], 0
    while recorded < batches:
        # Draws may run ahead of the last recorded batch by k batches, or wait until they are needed.
        most = min(batches, recorded + k + 1) * groups
        need = (recorded + 1) * groups
        upto = data.draw(st.integers(max(need, len(drawn)), max(need, most, len(drawn))))
        drawn += [curriculum.draw(n) for n in range(len(drawn), upto)]
        row = drawn[recorded * groups : (recorded + 1) * groups]
        assert row == expected[recorded]
        curriculum.record(recorded, scored(row, recorded, rate))
        recorded += 1
        if data.draw(st.booleans()):  # killed: what was drawn ahead is forgotten
            state = {name: np.array(value) for name, value in curriculum.state().items()}
            curriculum = fresh()
            curriculum.restore(state)
            drawn = drawn[: recorded * groups]


def test_strata_are_drawn_from_by_their_weights_and_each_by_epochs_of_its_own():
    rows = played(mixture([(7, 2.0), (50, 1.0)], groups=6), 35, groups=6, correct=lambda prompt: 0)
    assert all(sum(prompt < 7 for prompt in row) == 4 for row in rows)  # two thirds of every batch, exactly
    counts = np.bincount(np.concatenate(rows), minlength=57)
    assert set(counts[:7]) == {20} and np.ptp(counts[7:]) <= 1


def test_a_stratum_that_is_solved_leaves_its_share_to_the_others():
    curriculum = mixture([(4, 1.0), (20, 1.0), (20, 3.0)], groups=10)
    for row in played(curriculum, 8, groups=10, correct=lambda prompt: 4 if prompt < 4 else 0)[4:]:
        shares = np.histogram(row, bins=[0, 4, 24, 44])[0]
        assert shares[0] == 0 and abs(shares[1] - 2.5) <= 1
    assert curriculum.retired() == 4


def test_all_come_back_where_the_config_says_so():
    rows = played(one_stratum(4, groups=2, when_empty="restart"), 12)
    assert set(np.bincount(np.concatenate(rows))) <= {
        5,
        6,
        7,
    }  # not 6 alone: a draw does not know of the batch before it yet


def test_a_solved_prompt_is_never_drawn_again_and_the_others_all_are():
    curriculum = one_stratum(8, groups=4)
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


@pytest.mark.parametrize(("at", "total"), [(0.55, 100), (0.57, 100), (0.07, 100), (0.7, 10)])
def test_as_many_as_the_limit_says_are_enough(at, total):
    """In floats 0.55 * 100 is more than 55."""
    for short in (0, 1):
        curriculum = one_stratum(2, no_positive_resampling_at=at)
        curriculum.draw(0), curriculum.draw(1)
        curriculum.record(0, [(0, round(at * total) - short, total)])
        assert curriculum.retired() == 1 - short


def test_above_one_nothing_is_retired():
    curriculum = one_stratum(2, no_positive_resampling_at=1.1)
    played(curriculum, 5)
    assert curriculum.retired() == 0


def test_when_every_prompt_is_retired_the_message_says_so():
    curriculum = one_stratum(2)
    played(curriculum, 2)
    with pytest.raises(NoPromptLeft, match="every prompt is retired: all 2"):
        curriculum.draw(4)


def test_a_run_may_go_on_with_another_k_seed_or_size_of_batches():
    """Whether it may is for the config to say; what is known of each prompt stays."""
    first = one_stratum(6, k=2)
    drawn = [first.draw(n) for n in range(2)]
    first.record(0, [(drawn[0], 4, 4), (drawn[1], 0, 4)])
    again = one_stratum(6, k=0, seed=3, groups=5)
    again.restore(first.state())
    assert again.retired() == 1
    seen = [again.draw(n) for n in range(5, 10)]  # batch 1, of 5 groups
    assert drawn[0] not in seen


def test_a_state_with_a_history_of_other_prompts_or_sources_is_refused():
    state = one_stratum(5, digest=3).state()
    with pytest.raises(OtherPrompts, match=r"training rows are not those .* \(5 prompts then, 5 now\)"):
        one_stratum(5, digest=4).restore(state)
    with pytest.raises(OtherPrompts, match=r"\(5 prompts then, 6 now\)"):
        one_stratum(6, digest=3).restore(state)
    with pytest.raises(ValueError, match="have 2 sources with a weight, and had 1 when the checkpoint was made"):
        mixture([(3, 1.0), (2, 1.0)], digest=3).restore(state)


def test_a_history_goes_on_with_another_window():
    """As if that had been the window all along, as far as it is known."""

    def curriculum(window):
        return one_stratum(2, groups=1, k=20, window=window, no_positive_resampling_at=1.1)

    def after(window):
        made = curriculum(window)
        for batch in range(9):
            made.draw(batch)
            made.record(batch, [(batch % 2, batch % 4, 4)])
        return made.state()

    for window in (1, 2, 3, 5):
        again = curriculum(window)
        again.restore(after(3))
        for name in ("history_correct", "history_total"):
            found, wanted = again.state()[name], after(min(window, 3))[name]
            assert found.sum(axis=1).tolist() == wanted.sum(axis=1).tolist()
            assert window > 3 or found.tolist() == wanted.tolist()
        again.draw(9)
        again.record(9, [(0, 4, 4)])  # the sixth of prompt 0, whose five before had 0, 2, 0, 2 and 0
        wanted = {1: 4, 2: 4, 3: 6, 5: 6}[window]
        assert again.state()["history_correct"][0].sum() == wanted


def test_a_state_of_a_release_before_there_were_strata_goes_on():
    curriculum = one_stratum(5)
    rows = [[curriculum.draw(n) for n in (2 * b, 2 * b + 1)] for b in range(2)]
    curriculum.record(0, [(prompt, 4, 4) for prompt in rows[0]])
    state = curriculum.state()
    epoch, at = state["epochs"][0]
    older = {
        "retired_in": state["retired_in"],
        "cursor": np.asarray([1, epoch, at]),
        "identity": state["identity"][:4],
    }
    again = one_stratum(5, digest=9)
    again.restore(older)
    assert [again.draw(n) for n in (2, 3)] == rows[1] and again.retired() == 2


def test_a_draw_before_its_history_is_there_is_a_bug_of_ours():
    curriculum = one_stratum(5, groups=1)
    curriculum.draw(0)
    curriculum.draw(1)
    with pytest.raises(AssertionError, match="before batch 0 was recorded"):
        curriculum.draw(2)
