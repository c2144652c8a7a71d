"""Turns of a session: a later one goes on from what the one before has left, and samples as if it had begun anew."""

import dataclasses

import numpy as np
import pytest

from rollout_server.engines.jax.caches import KeptTurn, SessionCaches
from rollout_server.engines.sequence import Counters, Sequence
from scalerl_jax.contract.codec import Version
from tests.rollout_server.conftest import opened_jax
from tests.rollout_server.jax_reference import Reference, ask, reference_logprobs, tiny
from tests.support.models import random_tensors, write_folder
from tests.support.waiting import eventually_async

LENGTH = 192
CONFIG = tiny()
PROMPT, REPLY = np.array([5, 11, 2, 40, 7]), np.array([9, 8, 3])
EVERY_TOKEN = tuple(range(1, 16))  # a stop token is drawn soon


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {"": CONFIG, "moe": tiny(kind="qwen3_moe")}
    path = tmp_path_factory.mktemp("models")
    return {name: write_folder(path / f"m{name}", config, random_tensors(config, 0)) for name, config in made.items()}


def opened(folder, **changes):
    return opened_jax(folder, **{"maximum_tokens": LENGTH, **changes})


async def turn(engine, prompt, *, session="a", replay=False, **changes):
    """A turn that ends with a stop token."""
    asked = ask(prompt, name=f"{session}/{len(prompt)}", answer_budget=60, stop_token_ids=EVERY_TOKEN, **changes)
    request = dataclasses.replace(asked, session=session, router_replay=replay)
    (completion,) = [one async for one in engine.generate(request)]
    assert completion.finish_reason == "stop"
    return completion


async def compiled(engine) -> None:
    """What the next turn wants is there; else it is prefilled."""
    await eventually_async(lambda: all(one.done() for one in engine._pool._extensions.values()))


async def episode(engine, turns, *, reply=REPLY, **options):
    """[(prompt, completion)] of each turn, after one that has the programs compiled."""
    for _ in range(2):
        prompt, said = PROMPT, []
        before = engine.status()
        for _ in range(turns):
            completion = await turn(engine, prompt, **options)
            said.append((prompt, completion))
            prompt = np.concatenate([prompt, completion.token_ids, reply])
            await compiled(engine)
    after = engine.status()
    return said, after.reused_tokens - before.reused_tokens, after.prefill_tokens - before.prefill_tokens


@pytest.mark.parametrize("kind", ["", pytest.param("moe", marks=pytest.mark.slow)])
async def test_each_turn_samples_the_policy_and_feeds_only_what_is_new(folders, kind):
    config = tiny(kind="qwen3_moe") if kind else CONFIG

    async with opened(folders[kind], router_replay=bool(kind)) as engine:
        said, reused, prefilled = await episode(engine, 5, replay=bool(kind))
        for prompt, completion in said:
            expected = reference_logprobs(config, prompt, completion.token_ids, lambda t: random_tensors(config, 0))
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        last = said[-1][0]
        sampled = sum(len(one.token_ids) for _, one in said[:-1])
        # Of each turn but the first: the last two tokens of the turn before, and the reply without its last one.
        assert prefilled == len(PROMPT) - 1 + 4 * (len(REPLY) + 1)
        assert reused == sum(len(prompt) - 2 - len(REPLY) for prompt, _ in said[1:])
        assert len(last) == len(PROMPT) + sampled + 4 * len(REPLY)
        if kind:  # the experts of the whole path, those of earlier turns too
            anew = await turn(engine, last, session="b", replay=True)
            np.testing.assert_array_equal(said[-1][1].experts[: len(last) - 1], anew.experts[: len(last) - 1])


@pytest.mark.slow
async def test_a_long_reply_is_fed_in_several_parts(folders):
    async with opened(folders[""], maximum_tokens=640) as engine:
        reply = np.arange(1, 201) % CONFIG.vocab_size
        said, _, prefilled = await episode(engine, 2, reply=reply)
        assert prefilled == len(PROMPT) - 1 + len(reply) + 1
        prompt, completion = said[1]
        expected = reference_logprobs(CONFIG, prompt, completion.token_ids, lambda t: random_tensors(CONFIG, 0))
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


async def test_after_a_swap_the_keys_and_values_of_before_stay(folders):
    named = [random_tensors(CONFIG, seed) for seed in (0, 1)]

    async with opened(folders[""]) as engine:
        await episode(engine, 2)
        first = await turn(engine, PROMPT)
        await engine.load(Version(0, 1), named[1], dict.fromkeys(named[1]))
        prompt = np.concatenate([PROMPT, first.token_ids, REPLY])
        before = engine.status().reused_tokens
        second = await turn(engine, prompt, minimum_step=1)
        known = len(PROMPT) + len(first.token_ids) - 2
        assert engine.status().reused_tokens - before == known
        reference, fed, expected = Reference(CONFIG), [*prompt, *second.token_ids], []
        for position, token in enumerate(fed[:-1]):
            logprobs = reference.feed(named[int(position >= known)], int(token))
            if position >= len(prompt) - 1:
                expected.append(logprobs[fed[position + 1]])
        np.testing.assert_allclose(second.logprobs, expected, atol=1e-4)
        # Pinned, they would have to be that version's: the next turn begins anew.
        third = np.concatenate([prompt, second.token_ids, REPLY])
        pinned = await turn(engine, third, pinned_step=1)
        expected = reference_logprobs(CONFIG, third, pinned.token_ids, lambda t: named[1])
        np.testing.assert_allclose(pinned.logprobs, expected, atol=1e-4)
        # From there on they are.
        before = engine.status().reused_tokens
        await turn(engine, np.concatenate([third, pinned.token_ids, REPLY]), pinned_step=1)
        assert engine.status().reused_tokens > before


@pytest.mark.parametrize("kind", ["", pytest.param("moe", marks=[pytest.mark.slow, pytest.mark.long])])
async def test_a_history_that_is_rewritten_late_goes_on_from_what_is_the_same(folders, kind):
    """And so does the same turn, asked once more, and a much shorter prompt. What is kept is cut there."""
    config = tiny(kind="qwen3_moe") if kind else CONFIG
    long = np.arange(100) * 7 % CONFIG.vocab_size
    async with opened(folders[kind], maximum_tokens=640, router_replay=bool(kind)) as engine:
        for attempt in range(2):  # the second time all programs are there
            first = await turn(engine, long, replay=bool(kind))
            fed = np.concatenate([long, first.token_ids])
            for known in (len(fed) - 2, len(long) - 1, 70, 20):
                prompt = np.concatenate([fed[:known], [fed[known] ^ 1], REPLY])
                if known == len(long) - 1:
                    prompt = long
                before = engine.status().reused_tokens
                found = await turn(engine, prompt, replay=bool(kind))
                await compiled(engine)
                if attempt:
                    assert engine.status().reused_tokens - before == known
                expected = reference_logprobs(config, prompt, found.token_ids, lambda t: random_tensors(config, 0))
                np.testing.assert_allclose(found.logprobs, expected, atol=1e-4)
                if kind:
                    anew = await turn(engine, prompt, session="b", replay=True)
                    np.testing.assert_array_equal(found.experts[: len(prompt) - 1], anew.experts[: len(prompt) - 1])
                fed = np.concatenate([prompt, found.token_ids])


async def test_what_does_not_go_on_begins_anew(folders):
    """Another session, a history rewritten at its beginning, another incarnation."""

    async with opened(folders[""]) as engine:
        await episode(engine, 2)
        first = await turn(engine, PROMPT)
        prompt = np.concatenate([PROMPT, first.token_ids, REPLY])
        rewritten = prompt.copy()
        rewritten[2] += 1
        reused = engine.status().reused_tokens
        for other in (
            {"session": "b"},
            {"prompt": rewritten},
        ):
            asked = {"prompt": prompt, **other}
            completion = await turn(engine, **asked)
            expected = reference_logprobs(
                CONFIG, asked["prompt"], completion.token_ids, lambda t: random_tensors(CONFIG, 0)
            )
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert engine.status().reused_tokens == reused
        first = await turn(engine, PROMPT)
        named = random_tensors(CONFIG, 1)
        await engine.load(Version(7, 0), named, dict.fromkeys(named))
        await turn(engine, np.concatenate([PROMPT, first.token_ids, REPLY]), incarnation=7)
        assert engine.status().reused_tokens == reused


def test_memory_is_bounded_and_the_longest_unused_goes_first():
    def sequence(session: str) -> Sequence:
        request = dataclasses.replace(ask([1, 2, 3, 4]), session=session)
        return Sequence(request, request.completions[0], counters=Counters(), maximum_tokens=99)

    kept = KeptTurn(np.array([1, 2]), ([np.zeros(25, np.float32)], [np.zeros(25, np.float32)], None), None, 0)
    sessions = SessionCaches(limit=kept.bytes * 2)
    assert kept.bytes == 200
    for name in ("a", "b", "a", "c"):
        sessions.store(sequence(name), kept)
    assert sessions.pop(sequence("b")) is None and sessions.pop(sequence("a")).prefix is kept.prefix
    assert sessions.pop(sequence("a")) is None, "it is kept no more"
    sessions.store(sequence("d"), kept)
    assert sessions.pop(sequence("c")).prefix is kept.prefix and sessions.pop(sequence("d")).prefix is kept.prefix
    sessions.limit = 199
    sessions.store(sequence("e"), kept)
    assert sessions.pop(sequence("e")) is None
