"""Ids, seeds and budgets: functions of names alone; a completion held against its request."""

import dataclasses

import numpy as np
import pytest

from scalerl_jax.contract.codec import (
    Completion,
    CompletionRequest,
    GroupRequest,
    Interruption,
    Sampling,
    request_from_proto,
    request_to_proto,
)
from scalerl_jax.environments.episode import Reply, Trajectory
from scalerl_jax.rollouts.group_buffer import Process, RolloutRequest
from scalerl_jax.rollouts.requests import Requests, Routed, stable_hash, validate
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


def test_each_turn_draws_a_seed_and_a_thinking_budget_of_its_own():
    requests = make()
    group = requests.train(5, row(1))
    first, other = group.requests[:2]
    turns = [requests.turn(of, turn) for of in (first, other) for turn in range(400)]
    assert turns == [make().turn(of, turn) for of in (first, other) for turn in range(400)]
    assert {r.index for r in turns[:400]} == {first.index} and len({r.seed for r in turns}) == len(turns)
    budgets = np.bincount([r.thinking_budget for r in turns], minlength=25)
    assert budgets[:4].sum() == 0 == budgets[25:].sum()
    assert np.abs(budgets[4:25] - 800 / 21).max() < 5 * np.sqrt(800 / 21)
    # They are those of the turn that is sent, behind what it follows.
    ids = np.array([7, 8], np.int32)
    turn = Completion(1, group.group_id, 1, ids, np.zeros(2, np.float32), ((0, 0, 2),), (), "stop")
    trajectory = Trajectory(turn, Process("a:1", "x"))
    for reply, prompt in ((Reply(ids + 2), [*row(1).token_ids, 7, 8, 9, 10]), (Reply(ids, True), [7, 8])):
        trajectory.add_reply(reply)
        rollout = RolloutRequest(None, group, Process("a:1", "x"), 3, None, {1}, trajectory)
        sent = requests.of(rollout, incarnation=7)
        assert sent.completions == (requests.turn(other, trajectory.turns),) and sent.prompt.tolist() == prompt
        trajectory.add_turn(turn, Process("a:1", "x"))


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


def test_an_episode_without_room_for_two_turns_is_named():
    turn = make().turn_tokens
    assert make(rollout_max_turns=2, rollout_max_episode_tokens=turn + 1).maximum_tokens == turn + 1
    assert make(rollout_max_turns=1, rollout_max_episode_tokens=turn).maximum_tokens == turn
    with pytest.raises(ValueError, match=rf"config\.rollout\.max_episode_tokens={turn}: .* may have {turn} tokens"):
        make(rollout_max_turns=2, rollout_max_episode_tokens=turn)


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


# ---- A completion held against its request: what was asked passes, each way of not being it is named ---------------

REQUEST = GroupRequest(
    incarnation=5,
    group_id="train/3",
    prompt=np.array([1, 2], np.int32),
    completions=(CompletionRequest(1, seed=9, thinking_budget=3),),
    sampling=Sampling(answer_budget=4, stop_token_ids=(7,)),
    interruption=Interruption((20, 21), (21,)),
    minimum_step=2,
)
GOOD = Completion(
    incarnation=5,
    group_id="train/3",
    index=1,
    token_ids=np.array([11, 12, 13, 20, 21, 14, 7], np.int32),
    logprobs=np.zeros(7, np.float32),
    versions=((2, 0, 4), (4, 4, 7)),
    forced=((3, 5),),
    finish_reason="stop",
)


def check(completion: Completion, request: GroupRequest = REQUEST) -> None:
    validate(completion, request, newest=4, vocabulary=30)


def test_what_was_asked_passes():
    check(GOOD)
    # The end of the cache may cut the phrase; a completion that was cut need not stop.
    tokens = GOOD.token_ids[:4]
    cut = dataclasses.replace(GOOD, token_ids=tokens, versions=((3, 0, 4),), forced=((3, 4),), finish_reason="length")
    check(cut)
    check(dataclasses.replace(cut, versions=((4, 0, 4),)), dataclasses.replace(REQUEST, pinned_step=4))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"incarnation": 6}, "of trainer 6 came for 'train/3'"),
        ({"group_id": "train/4"}, "came for 'train/3'"),
        ({"index": 0}, "was not asked for"),
        ({"versions": ((1, 0, 7),)}, "by version 1, older than 2"),
        ({"versions": ((2, 0, 3), (5, 3, 7))}, "by version 5, and the newest there is is 4"),
        ({"token_ids": np.array([11, 12, 13, 20, 21, -1, 7], np.int32)}, "tokens from -1 to 21, of a vocabulary of 30"),
        ({"token_ids": np.array([11, 12, 13, 20, 21, 30, 7], np.int32)}, "tokens from 7 to 30, of a vocabulary of 30"),
        ({"token_ids": np.array([11, 12, 13, 21, 20, 14, 7], np.int32)}, "not the interruption phrase"),
        ({"token_ids": np.array([11, 12, 13, 20, 21, 14, 8], np.int32)}, "its last token 8 is not one to stop at"),
        ({"token_ids": np.array([*[11] * 3, 20, 21, *[14] * 4, 7], np.int32)}, "has 10 tokens, its budgets and the"),
        ({"forced": ((0, 1), (3, 5))}, "was interrupted 2 times"),
        ({"queued_seconds": float("nan")}, "says that its waiting took nan s"),
        ({"sampling_seconds": -1.0}, "says that its sampling took -1.0 s"),
        ({"sampling_seconds": float("inf")}, "says that its sampling took inf s"),
    ],
)
def test_each_way_of_not_being_it(changes, told):
    with pytest.raises(ValueError, match="completion 'train/") as error:
        check(dataclasses.replace(GOOD, **changes))
    assert told in str(error.value)


def test_experts_are_those_of_the_tokens_fed():
    request, routed = dataclasses.replace(REQUEST, router_replay=True), Routed(layers=3, experts_per_token=2, experts=5)
    experts = np.tile(np.array([4, 0], np.uint8), (8, 3, 1))  # 2 + 7 tokens, of which the last is not fed

    def told(experts: np.ndarray | None) -> None:
        completion = dataclasses.replace(GOOD, experts=experts)
        validate(completion, request, newest=4, vocabulary=30, routed=routed)

    told(experts)
    check(dataclasses.replace(GOOD, experts=experts[:3]))  # nobody has asked for them
    twice, unknown = experts.copy(), experts.copy()
    twice[5, 1] = 3
    unknown[7, 2, 1] = 5
    for bad, why in (
        (None, "does not tell its experts"),
        (experts[1:], r"tells experts \[7, 3, 2\], and not \[8, 3, 2\]"),
        (experts[:, :2], r"tells experts \[8, 2, 2\]"),
        (twice, "sends a token to one expert twice"),
        (unknown, "has expert 5, of 5"),
    ):
        with pytest.raises(ValueError, match=why):
            told(bad)


def test_a_pinned_request_takes_one_version_only():
    with pytest.raises(ValueError, match=r"sampled by versions \[2, 4\], pinned to 2"):
        check(GOOD, dataclasses.replace(REQUEST, pinned_step=2))
