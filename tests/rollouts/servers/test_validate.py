"""A completion held against its request: what was asked passes, each way of not being it is named."""

import dataclasses

import numpy as np
import pytest

from scalerl_jax.contract.codec import Completion, CompletionRequest, GroupRequest, Interruption, Sampling
from scalerl_jax.rollouts.servers.validate import Routed, validate

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
