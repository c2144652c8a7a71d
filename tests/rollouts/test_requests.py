"""Ids, seeds and budgets: functions of names alone."""

import numpy as np
import pytest

from scalerl_jax.contract.codec import request_from_proto, request_to_proto
from scalerl_jax.rollouts.group_buffer import Process, RolloutRequest
from scalerl_jax.rollouts.requests import Requests, stable_hash
from tests.rollouts.small_trainer import ByteTokenizer, config, row


def make(**changes) -> Requests:
    return Requests(config(**changes), ByteTokenizer())


def test_the_hash_does_not_depend_on_process_or_machine():
    assert stable_hash("seed", 3, "train/5", 0) == 6993987469532788911
    assert stable_hash("a", "bc") != stable_hash("ab", "c")


def test_a_group_is_the_same_whenever_it_is_made():
    assert make().train(5, row(1)).requests == make().train(5, row(2)).requests
    assert make().train(5, row(1)).requests != make(seed=4).train(5, row(1)).requests
    requests = [r for n in range(200) for r in make().train(n, row(n)).requests]
    assert len({r.seed for r in requests}) == len(requests)
    budgets = np.bincount([r.thinking_budget for r in requests], minlength=25)
    assert budgets[:4].sum() == 0 == budgets[25:].sum()
    # Uniform over 21 values: 800 draws, five sigma.
    assert np.abs(budgets[4:25] - 800 / 21).max() < 5 * np.sqrt(800 / 21)


def test_evaluations_differ_in_their_names_only():
    first = make().evaluation(0, row(9), version=10, samples=4)
    later = make().evaluation(3, row(9), version=20, samples=4)
    assert (first.group_id, later.group_id) == ("eval/10/9", "eval/20/9")
    assert first.requests == later.requests
    assert later.number == 3


def test_without_thinking():
    requests = make(rollout_thinking_budget_min=0, rollout_thinking_budget_max=0)
    group = requests.train(0, row(0))
    assert {r.thinking_budget for r in group.requests} == {0}
    rollout = RolloutRequest(None, group, Process("server", ""), 3, None, {0, 2})
    sent = request_from_proto(request_to_proto(requests.of(rollout, incarnation=7)))
    assert sent.interruption.text_token_ids == ()
    assert [c.index for c in sent.completions] == [0, 2]
    assert (sent.incarnation, sent.minimum_step, sent.pinned_step) == (7, 3, None)
    assert requests.maximum_tokens == 16


def test_a_budget_of_nothing_is_not_the_absence_of_thinking():
    group = make(rollout_thinking_budget_min=0, rollout_thinking_budget_max=1).train(0, row(0))
    assert {r.thinking_budget for r in group.requests} == {1}


@pytest.mark.parametrize("control", ["penalty", "none"])
def test_without_interruptions_a_completion_has_both_budgets_as_one(control):
    requests = make(rollout_length_control=control, rollout_interruption_text="never fed")
    group = requests.train(0, row(0))
    assert {r.thinking_budget for r in group.requests} == {0}
    sent = requests.of(RolloutRequest(None, group, Process("server", ""), 0, None, {0}), incarnation=1)
    assert sent.sampling.answer_budget == requests.maximum_tokens == 24 + 16
    assert sent.interruption.text_token_ids == ()


def test_a_phrase_that_does_not_end_thinking_is_named():
    with pytest.raises(ValueError, match=r"config\.rollout\.interruption_text='time is up'"):
        make(rollout_interruption_text="time is up")


def test_what_is_asked_for_again_has_the_names_that_it_had():
    requests, group = make(), make().train(5, row(1))

    def sent(server: str, left: set[int]):
        return requests.of(RolloutRequest(None, group, Process(server, ""), 3, None, left), incarnation=7)

    first = sent("a:1", {0, 1, 2, 3})
    group.trajectories[1], group.failed_at = "the only one that came", "a:1"
    group.pending = {0, 2, 3}
    again = sent("b:2", {0, 2, 3})
    assert again.group_id == first.group_id == "train/5"
    assert again.completions == tuple(first.completions[i] for i in (0, 2, 3))
