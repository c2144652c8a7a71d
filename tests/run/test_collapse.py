"""The collapse alarm, on excerpts of real runs and on rows made from them."""

import math

import pytest

from scalerl_jax.run.collapse import CollapseWatch, first_collapse, follow
from tests.run.collapsed_runs import excerpt


@pytest.mark.parametrize(("every", "at"), [(5, 45), (20, 49), (1000, 49)])
def test_a_run_that_collapses_is_told_of_within_updates_however_rare_evaluations_are(every, at):
    """Its held-out pass rate was 0.906 at step 40 and 0.443 at step 45."""
    metrics, evals = excerpt("collapsed", every=every)
    found = first_collapse(metrics, evals)
    assert found.step == at and found.last_good < found.since <= 45
    said = str(found)
    assert said.startswith(f"the policy has collapsed since update {found.since}: ")
    assert ("held-out pass rate 0.443 at step 45, after 0.906 at step 40" in said) == (every == 5)
    assert ("pass rate of the last 5 batches 0.5" in said) == (every > 5)
    assert "sequence effective sample size down to" in said and "gradient norm up to 0." in said
    # The evaluation of step 40 is the best of all; without it the signs alone tell where it began.
    assert found.last_good == 40 if every < 1000 else 30 <= found.last_good < 40


@pytest.mark.parametrize("every", [10, 50, 1000])
def test_a_run_that_is_well_raises_nothing(every):
    """Its gradient norm doubles towards the end, where few prompts are left to learn from."""
    assert first_collapse(*excerpt("sound", every=every)) is None


def unlucky(evals, *steps, rate=0.5):
    """Of these steps each prompt was right less often."""
    return [
        {**row, "passes": [int(rate * n) for n in row["passes"]], "pass_rate": rate * row["pass_rate"]}
        if row["step"] in steps
        else row
        for row in evals
    ]


def test_one_unlucky_evaluation_is_no_collapse_and_two_are():
    metrics, evals = excerpt("sound")
    assert first_collapse(metrics, unlucky(evals, 80)) is None
    assert first_collapse(metrics, unlucky(evals, 80, 100)) is None  # it came back in between
    assert first_collapse(metrics, unlucky(evals, 80, 90, rate=0.9)) is None  # too little to matter
    found = first_collapse(metrics, unlucky(evals, 80, 90, 100))
    assert (found.step, found.since, found.last_good) == (90, 80, 70)
    assert found.signs == ("held-out pass rate 0.444 at step 90, after 0.786 at step 70",)


def test_a_few_prompts_are_no_proof():
    """Half of what four prompts had is within their scatter."""
    metrics, evals = excerpt("sound")
    few = [{**row, "passes": row["passes"][:4]} for row in unlucky(evals, 80, 90, 100)]
    assert first_collapse(metrics, few) is None


def test_batches_that_grow_hard_are_no_collapse():
    """The curriculum takes the easy prompts away: the pass rate falls, and nothing else tells of it."""
    metrics, evals = excerpt("sound")
    harder = [{**row, "pass_rate": row["pass_rate"] / (2 if row["step"] > 65 else 1)} for row in metrics]
    assert first_collapse(harder, []) is None
    steep = [{**row, "gradient_norm": row["gradient_norm"] * (9 if row["step"] > 68 else 1)} for row in harder]
    assert 68 < first_collapse(steep, []).step < 80  # without evaluations that is all there is to see
    after = [row for row in evals if row["step"] in (70, 80, 90, 100, 110, 120, 130)]
    assert first_collapse([row for row in steep if row["step"] <= 74], after[:1]) is None


def test_what_jumps_once_or_has_always_been_so_is_no_sign():
    metrics, _ = excerpt("sound")
    half = [{**row, "pass_rate": row["pass_rate"] / (3 if row["step"] > 100 else 1)} for row in metrics]
    jumps = [{**row, "gradient_norm": 50.0 if row["step"] % 10 == 0 else row["gradient_norm"]} for row in half]
    low = [{**row, "effective_sample_size_sequence": 0.02, "truncated": 0.6} for row in half]
    assert first_collapse(jumps, []) is None and first_collapse(low, []) is None


def test_a_policy_that_says_nothing_right_has_no_gradient_left():
    metrics, _ = excerpt("sound")
    columns = ("gradient_norm", "loss", "effective_sample_size_sequence")
    dead = [{k: v for k, v in row.items() if k not in columns} | {"pass_rate": 0.0, "prompts_surviving": 0.0}
            for row in metrics if row["step"] > 100]  # fmt: skip
    found = first_collapse([*metrics[:100], *dead], [])
    assert 104 <= found.step <= 106 and found.last_good >= 90
    assert "5 of the last 10 updates without a gradient" in found.signs


@pytest.mark.parametrize(("name", "value"), [("loss", math.nan), ("gradient_norm", math.inf), ("loss", None)])
def test_what_is_not_finite_counts_at_once(name, value):
    """In the files it is null."""
    metrics, evals = excerpt("sound")
    found = first_collapse([*metrics[:3], {**metrics[3], name: value}], evals[:1])
    assert (found.step, found.since, found.last_good) == (4, 4, 3)
    assert found.signs == (f"the {name.replace('_', ' ')} is not finite",)


def test_an_update_without_a_row_that_is_not_finite():
    watch = CollapseWatch()
    metrics, evals = excerpt("sound")
    follow(watch, metrics[:12], evals[:2])
    found = watch.not_finite(13, "the gradient norm is nan at step 13")
    assert (found.step, found.since, found.last_good) == (13, 13, 12) and watch.raised is found
    assert watch.not_finite(13, "the same again") is None


def test_a_pass_rate_below_the_forecast_needs_a_sign_beside_it():
    metrics, evals = excerpt("sound")
    metrics[95] = {**metrics[95], "forecast": {"step": 90, "next_low": 1.25}}  # nobody could keep that
    metrics[80] = {**metrics[80], "forecast": {"step": 80, "end_low": 0.9}}  # of an older release
    assert first_collapse(metrics, evals) is None
    steep = [{**row, "gradient_norm": row["gradient_norm"] * (9 if row["step"] > 88 else 1)} for row in metrics]
    found = first_collapse(steep, evals)
    assert found.step == 100 and found.last_good >= 90
    assert found.signs[0] == "held-out pass rate 0.917 at step 100, below the 1.250 that the forecast expects at least"
    assert found.signs[1].startswith("gradient norm up to ")


def test_one_alarm_and_no_more():
    metrics, evals = excerpt("collapsed")
    watch, raised = CollapseWatch(), []
    for row in metrics:
        raised += [watch.update(row)]
        raised += [watch.evaluation(there) for there in evals if there["step"] == row["step"]]
    assert [found.step for found in raised if found is not None] == [45]


def test_the_newest_evaluation_that_is_as_good_as_the_best():
    watch = CollapseWatch()
    assert watch.good_evaluation is None
    metrics, evals = excerpt("sound")
    follow(watch, metrics, evals)
    assert watch.good_evaluation == 130
    follow(watch, [], [{**evals[12], "step": 140}])  # a little below, as chance would have it
    assert watch.good_evaluation == 140
    follow(watch, [], [{**evals[6], "step": 150}])
    assert watch.good_evaluation == 140


def test_rows_that_lack_something_tell_nothing():
    metrics, evals = excerpt("collapsed")
    assert first_collapse([{"step": row["step"]} for row in metrics], [{"step": 0}, {"step": 5, "passes": []}]) is None
    assert first_collapse(metrics, [{"step": row["step"], "pass_rate": row["pass_rate"]} for row in evals]) is not None
