"""Honest servers are left alone at any staleness; each lie is found within few groups, and before it is trained on.

The honest tokens here are drawn from one distribution and scored by another, as a policy does that has moved on since.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.config import Config, ParityConfig
from scalerl_jax.contract.codec import Completion
from scalerl_jax.learner.batch import RATIO_CAP, Sums, sums_of
from scalerl_jax.rollouts.group_buffer import Process
from scalerl_jax.rollouts.parity import LogprobJudge, Parity, Scored, comparable
from scalerl_jax.rollouts.servers.validate_status import Expected

EXPECTED = Expected(tokenizer_fingerprint="a", model_config="{}", sync_dtype="float32")
LIAR, HONEST = Process("liar:1", "1"), Process("honest:2", "2")
VOCABULARY, GROUP, TOKENS = 24, 8, 40


def draws(rng: np.random.Generator, tokens: int, drift: float) -> tuple[np.ndarray, np.ndarray]:
    """(log mu, log pi) of tokens drawn from mu, whose logits are `drift` away from pi's: [tokens] each."""
    logits = rng.normal(size=(tokens, VOCABULARY)) * rng.choice([0.5, 2.0, 4.0], size=(tokens, 1))
    mu, pi = (
        x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (logits, logits + drift * rng.normal(size=logits.shape))
    )
    chosen = (rng.random((tokens, 1)) > np.exp(mu).cumsum(-1)).sum(-1).clip(0, VOCABULARY - 1)
    at = np.arange(tokens), chosen
    return mu[at].astype(np.float32), pi[at].astype(np.float32)


def honest(rng, theirs, ours):
    return theirs, ours


LIES = {
    "shifted by -0.5": lambda rng, theirs, ours: (theirs - 0.5, ours),
    "shifted by 0.5": lambda rng, theirs, ours: (np.minimum(theirs + 0.5, 0), ours),
    "-30 on all": lambda rng, theirs, ours: (np.full_like(theirs, -30), ours),
    "0 on all": lambda rng, theirs, ours: (np.zeros_like(theirs), ours),
    "noise of 0.5": lambda rng, theirs, ours: (np.minimum(theirs + 0.5 * rng.normal(size=len(theirs)), 0), ours),
    "another's": lambda rng, theirs, ours: (rng.permutation(theirs), ours),
    # Tokens that were not drawn at all, under log-probs as they usually are.
    "random tokens": lambda rng, theirs, ours: (theirs, ours - rng.exponential(4, size=len(ours)).astype(np.float32)),
}


def group(rng, process: Process, number: int, *, drift: float, lie=honest, tokens: int = TOKENS) -> list[Scored]:
    theirs, ours = draws(rng, GROUP * tokens, drift)
    out = []
    for at in range(0, GROUP * tokens, tokens):
        claimed, scored = lie(rng, theirs[at : at + tokens], ours[at : at + tokens])
        difference = scored.astype(float) - claimed
        ratio = np.minimum(np.exp(difference), RATIO_CAP)
        sums = Sums(tokens, np.abs(difference).sum(), ratio.sum(), (ratio**2).sum())
        out.append(Scored(process, number, sums))
    return out


def make(**fields) -> LogprobJudge:
    return LogprobJudge(ParityConfig(**fields), mean_limit=1e-3)


@pytest.mark.parametrize("drift", [0.0, 0.03, 0.1, 0.3])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "two"])
@pytest.mark.parametrize("tokens", [TOKENS, 3])
def test_honest_servers_are_left_alone(drift, alone, tokens):
    """400 groups at each drift; 0.03 is what the quickstart has at a lag of 8."""
    rng = np.random.default_rng(0)
    judge = make()
    for start in range(0, 400, 20):
        batch = [
            s
            for n in range(start, start + 20)
            for s in group(rng, LIAR if alone or n % 2 else HONEST, n, drift=drift, tokens=tokens)
        ]
        assert judge.judge(batch) == []
        judge.accept(batch)


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "two"])
@pytest.mark.parametrize("far", [1.5, 3.0])
def test_an_honest_server_is_kept_however_stale_its_tokens_are(alone, far):
    """A policy that learns fast comes to differ by nats on average; where no other server shows that it is the policy
    that moved there is an alarm."""
    rng = np.random.default_rng(0)
    judge, alarmed = make(), []
    for start in range(0, 200, 8):
        drift = far * min(1.0, start / 120)
        batch = [
            s for n in range(start, start + 8) for s in group(rng, LIAR if alone or n % 2 else HONEST, n, drift=drift)
        ]
        assert judge.judge(batch) == []
        alarmed.append(judge.alarms)
        judge.accept(batch)
    assert np.mean([scored.sums.mean_difference for scored in batch]) > 1.05
    assert alarmed[0] == {}
    if alone:
        assert alarmed[-1].keys() == {LIAR} and "differ from the trainer's by" in alarmed[-1][LIAR]
    else:
        assert not any(alarmed)


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
@pytest.mark.parametrize("per_batch", [2, 8], ids=["two groups a batch", "eight groups a batch"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "two"])
def test_each_lie_is_found(lie, per_batch, alone):
    rng = np.random.default_rng(1)
    judge, number, trained = make(), 0, 0
    for batch in range(40):
        lies = batch >= 10
        scored = []
        for _ in range(per_batch):
            number += 2
            scored += group(rng, LIAR, number, drift=0.03, lie=lie if lies else honest)
            if not alone:
                scored += group(rng, HONEST, number + 1, drift=0.03)
        found = judge.judge(scored)
        assert {finding.process for finding in found} <= {LIAR}
        if any(finding.numbers is None for finding in found):
            assert lies and trained <= 4, trained
            return
        dropped = {n for finding in found for n in finding.numbers}
        kept = [s for s in scored if s.process != LIAR or s.number not in dropped]
        trained += lies * len({s.number for s in kept if s.process == LIAR})
        judge.accept(kept)
    raise AssertionError("not found")


def test_noise_is_found_in_groups_of_few_tokens_and_nothing_else():
    """Of which six groups together have too few tokens to be certain of anything."""
    rng = np.random.default_rng(2)
    judge = make()

    def noise(rng, theirs, ours):
        return theirs + rng.normal(size=len(theirs)).astype(np.float32), ours

    for number in range(60):
        batch = group(rng, LIAR, 2 * number, drift=0.03, lie=noise if number >= 10 else honest, tokens=3)
        batch += group(rng, HONEST, 2 * number + 1, drift=0.03, tokens=3)
        if found := judge.judge(batch):
            assert [(finding.process, finding.numbers) for finding in found] == [(LIAR, None)]
            assert 15 < number < 45, number
            break
        judge.accept(batch)
    else:
        pytest.fail("the liar is not found")


def test_one_bad_group_is_dropped_and_the_second_one_sends_the_server_away():
    rng = np.random.default_rng(2)
    judge, flat = make(), LIES["-30 on all"]
    good = [s for n in range(20) for s in group(rng, LIAR, n, drift=0.03)]
    judge.accept(good)
    (finding,) = judge.judge([*group(rng, LIAR, 20, drift=0.03), *group(rng, LIAR, 21, drift=0.03, lie=flat)])
    assert (finding.process, finding.numbers) == (LIAR, {21})
    assert judge.judge(group(rng, LIAR, 22, drift=0.03)) == []
    (finding,) = judge.judge(group(rng, LIAR, 23, drift=0.03, lie=flat))
    assert finding.numbers is None and "not the first" in finding.what and "\n" not in finding.what


def test_a_process_is_judged_by_what_it_did_itself():
    """Another one on the same address begins anew."""
    rng = np.random.default_rng(3)
    judge, flat = make(), LIES["-30 on all"]
    again = Process(LIAR.address, "another")
    assert judge.judge(group(rng, LIAR, 0, drift=0.0, lie=flat))[0].numbers == {0}
    assert judge.judge(group(rng, again, 1, drift=0.0, lie=flat))[0].numbers == {1}


def test_a_single_completion_of_random_tokens_is_enough():
    """Of a prompt that is dropped only a share is scored."""
    rng = np.random.default_rng(4)
    (scored, *_) = group(rng, LIAR, 0, drift=0.03, lie=LIES["random tokens"])
    assert make().judge([scored])


def test_who_allows_more_at_the_meeting_allows_it_here():
    """The limits of tests whose servers sample from nothing."""
    rng = np.random.default_rng(5)
    for lie in LIES.values():
        judge = LogprobJudge(ParityConfig(), mean_limit=100.0)
        assert judge.judge([s for n in range(20) for s in group(rng, LIAR, n, drift=0.0, lie=lie)]) == []


@settings(max_examples=20, deadline=None)
@given(share=st.floats(0, 1), number=st.integers(0, 10**6))
def test_the_share_is_the_same_whoever_delivers(share, number):
    judge = make(share=share)
    chosen = [judge.chosen(f"train/{number + n}", i) for n in range(40) for i in range(50)]
    assert chosen == [make(share=share).chosen(f"train/{number + n}", i) for n in range(40) for i in range(50)]
    assert abs(np.mean(chosen) - share) < 0.08
    assert all(chosen) or share < 1


def test_sums_are_of_sampled_tokens_and_capped():
    completion = Completion(
        incarnation=1, group_id="train/0", index=0, token_ids=np.arange(6, dtype=np.int32),
        logprobs=np.array([-1, -2, 0, 0, -30, -1], np.float32), versions=((0, 0, 6),), forced=((2, 4),),
        finish_reason="stop",
    )  # fmt: skip
    found = sums_of(completion, np.array([-1, -3, -9, -9, -1, -1], np.float32))
    expected = np.array([1, np.exp(-1), RATIO_CAP, 1])
    assert found.tokens == 4
    assert found.mean_ratio == pytest.approx(expected.mean())
    assert found.mean_difference == pytest.approx((0 + 1 + 29 + 0) / 4)
    assert found.effective == pytest.approx(expected.sum() ** 2 / (4 * (expected**2).sum()))


def at_temperature(temperature: float) -> list[Scored]:
    """An honest server's, of 20 groups: drawn, and told of, at this temperature; scored at 1."""
    rng = np.random.default_rng(6)
    out = []
    for number in range(20):
        policy = rng.normal(size=(TOKENS, VOCABULARY))
        mu, pi = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (policy / temperature, policy))
        chosen = (rng.random((TOKENS, 1)) > np.exp(mu).cumsum(-1)).sum(-1).clip(0, VOCABULARY - 1)
        ratio = np.minimum(np.exp((pi - mu)[np.arange(TOKENS), chosen]), RATIO_CAP)
        sums = Sums(TOKENS, np.abs(np.log(ratio)).sum(), ratio.sum(), (ratio**2).sum())
        out.append(Scored(LIAR, number, sums))
    return out


def test_where_sampling_is_not_from_the_policy_itself_nothing_is_judged():
    rollout = Config().rollout
    assert comparable(rollout) and make().judge(at_temperature(1.0)) == []
    assert make().judge(at_temperature(0.2))  # it would be sent away
    for changes in ({"temperature": 0.2}, {"top_p": 0.9}, {"top_k": 1}):
        other = dataclasses.replace(rollout, **changes)
        assert not comparable(other)
        judge = LogprobJudge(ParityConfig(), mean_limit=1e-3, judges=comparable(other))
        assert judge.judge(at_temperature(0.2)) == []
        assert not any(judge.chosen(f"train/{number}", 0) for number in range(400))  # nor is anything scored for it


@pytest.mark.parametrize(("temperature", "lines"), [(1.0, 0), (0.2, 1)])
def test_a_run_says_that_nothing_is_judged(temperature, lines):
    config, said = Config(), []
    config.rollout.temperature = temperature
    parity = Parity(config, score=None, expected=EXPECTED, fleet=None, log=said.append)
    batch = at_temperature(0.2)
    assert parity._judge.judge(batch) == [] if lines else parity._judge.judge(batch)
    assert len(said) == lines and all("\n" not in line and "not judged" in line for line in said)


def test_the_alarm_is_one_line_until_it_is_over():
    config, said = Config(), []
    parity = Parity(config, score=None, expected=EXPECTED, fleet=None, log=said.append)
    rng, drifts = np.random.default_rng(0), [*np.linspace(0.0, 1.8, 14), 1.8, *[0.0] * 6, *np.linspace(0.0, 1.8, 14)]
    for start, drift in enumerate(drifts):
        batch = [scored for n in range(8 * start, 8 * start + 8) for scored in group(rng, LIAR, n, drift=drift)]
        assert parity._counts(batch)
    assert len(said) == 2, said
    for line in said:
        assert line.startswith(f"warning: {LIAR.address}: kept, with no other server to hold it against: its log-probs")
        assert "\n" not in line and "config.pacing.max_off_policy_steps" in line
