"""Where a completion stands against the other writing of them: replay, which judges whole completions."""

import numpy as np
import pytest

from rollout_server.engines.thinking_budget import ThinkingBudget
from scalerl_jax.contract.codec import CompletionRequest, GroupRequest, Interruption, Sampling
from tests.rollout_server.jax_reference import replay

# The tokens that a request is about: the phrase ends with what ends thinking, and 7 stops.
PHRASE, END, STOP = (4, 5, 6), (5, 6), 7


def request(rng: np.random.Generator, *, phrase: tuple[int, ...], end: tuple[int, ...]) -> tuple[GroupRequest, int]:
    budget = int(rng.integers(0, 8))
    wanted = GroupRequest(
        incarnation=0,
        group_id="train/0",
        prompt=np.arange(int(rng.integers(1, 5)), dtype=np.int32),
        completions=(CompletionRequest(0, 0, budget),),
        sampling=Sampling(answer_budget=int(rng.integers(1, 7)), stop_token_ids=(STOP,) * int(rng.integers(0, 2))),
        interruption=Interruption(phrase, end),
    )
    return wanted, int(rng.integers(6, 24))


@pytest.mark.parametrize(
    ("phrase", "end"),
    [(PHRASE, END), (PHRASE, ()), ((4, STOP, 5, 6), END), ((), END), ((), ()), ((6,), (6,))],
)
def test_each_token_is_judged_as_the_whole_completion_is(phrase: tuple[int, ...], end: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(phrase) + 10 * len(end))
    reasons = set()
    for _ in range(300):
        wanted, maximum = request(rng, phrase=phrase, end=end)
        arguments = ThinkingBudget.arguments(wanted, wanted.completions[0], maximum_tokens=maximum)
        budget = ThinkingBudget(**arguments)
        tokens, forced, longest = [], [], []
        while not budget.finish:
            longest.append(len(tokens) + budget.longest)
            tokens.append(int(rng.integers(3, 9)) if budget.forced is None else budget.forced)
            forced.append(budget.advance(tokens[-1]))
        marks, reason = replay(wanted, wanted.completions[0].thinking_budget, tokens, maximum)
        assert forced == marks.tolist() and budget.finish == reason
        assert min(longest) >= len(tokens)
        reasons.add(reason)
    assert reasons == {"stop", "length"}
