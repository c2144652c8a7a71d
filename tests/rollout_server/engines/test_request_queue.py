"""The queue that all engines share: who comes first, who loses slots and places, and what each caller hears."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rollout_server.engines.engine import AskedAgain, EngineInfo, QueueFull, WrongVersion
from rollout_server.engines.request_queue import RequestQueue
from rollout_server.engines.sequence import Sequence
from scalerl_jax.contract.codec import GroupRequest, Version
from tests.rollout_server.jax_reference import ask

INFO = EngineInfo("test", slots=3, queue_capacity=5, maximum_tokens=32)


def request(name: str, completions: int, **options: Any) -> GroupRequest:
    return ask([1, 2], name=name, seeds=range(completions), **options)


def queue(changed: Callable[[], object] = lambda: None) -> RequestQueue:
    return RequestQueue(INFO, changed)


def names(sequences: Any) -> list[tuple[str, int]]:
    return [(sequence.request.group_id, sequence.wanted.index) for sequence in sequences]


def end(held: RequestQueue, sequence: Sequence, tokens: int = 2) -> None:
    sequence.extend([7] * tokens, [-1.0] * tokens, [False] * tokens, held.version.step)
    sequence.finish_reason = "length"
    held.finish(sequence)


async def heard(held: RequestQueue, caller: Any) -> list[int]:
    """The indices of the completions that came; raises what the caller hears."""
    return [completion.index async for completion in caller.completions()]


async def test_slots_go_to_whoever_came_first() -> None:
    held = queue()
    first, second = held.submit(request("a", 4)), held.submit(request("b", 3))
    assert names(held.admit()) == [("a", 0), ("a", 1), ("a", 2)] and held.admit() == []
    assert (held.status().busy_slots, held.status().queued) == (3, 4)
    for sequence in list(held.running)[:2]:
        end(held, sequence)
    assert names(held.admit()) == [("a", 3), ("b", 0)]
    while held.running:
        end(held, next(iter(held.running)))
        held.admit()
    assert await heard(held, first) == [0, 1, 2, 3] and await heard(held, second) == [0, 1, 2]
    assert held.status().sampled_tokens == 2 * 7 and not held.waiting


async def test_no_more_than_slots_and_places_and_a_request_is_taken_whole() -> None:
    held = queue()
    held.submit(request("a", 6))
    with pytest.raises(QueueFull, match="6 of 5 places in the queue and 0 of 3 slots are taken, 3 completions"):
        held.submit(request("b", 3))
    held.submit(request("b", 2))
    assert len(held.waiting) == 8


async def test_asking_again_takes_the_places_over_also_where_it_is_refused() -> None:
    held = queue()
    older, other = held.submit(request("a", 6)), held.submit(request("b", 2))
    held.admit()
    newer = held.submit(request("a", 4))
    with pytest.raises(AskedAgain, match="'a' was asked for again"):
        await heard(held, older)
    assert not held.running and names(held.waiting) == [("b", 0), ("b", 1), *(("a", index) for index in range(4))]
    with pytest.raises(WrongVersion):
        held.submit(request("a", 1, minimum_step=9))
    with pytest.raises(AskedAgain):
        await heard(held, newer)
    held.admit()
    for sequence in list(held.running):
        end(held, sequence)
    assert await heard(held, other) == [0, 1]


async def test_a_cancelled_request_is_nowhere_and_the_others_hear_nothing() -> None:
    changes = []
    held = queue(lambda: changes.append(len(held.running)))
    gone, stays = held.submit(request("a", 4)), held.submit(request("b", 2))
    held.admit()
    lost = list(held.running)
    held.cancel(gone)
    assert changes[-1] == 0 and names(held.waiting) == [("b", 0), ("b", 1)]
    end(held, lost[0])  # its engine did not know yet
    held.admit()
    for sequence in list(held.running):
        end(held, sequence)
    assert await heard(held, stays) == [0, 1] and await heard(held, gone) == []


async def test_pinned_requests_hold_a_version_back_but_not_another_incarnation() -> None:
    held = queue()
    caller = held.submit(request("a", 1, pinned_step=0))
    assert not held.may_swap(Version(0, 1)) and held.may_swap(Version(5, 0))
    held.admit()
    end(held, next(iter(held.running)))
    assert held.may_swap(Version(0, 1)) and await heard(held, caller) == [0]
    old = held.submit(request("b", 2))
    held.set_version(Version(5, 2))
    with pytest.raises(WrongVersion, match="weights of incarnation 5 have arrived"):
        await heard(held, old)
    with pytest.raises(WrongVersion, match="incarnation 5 is held, 0 is wanted"):
        held.submit(request("c", 1))
    with pytest.raises(WrongVersion, match="step 2 is held, exactly 1 is wanted"):
        held.submit(request("c", 1, incarnation=5, pinned_step=1))
    held.submit(request("c", 1, incarnation=5, pinned_step=2, minimum_step=2))


async def test_what_has_no_token_is_put_back_before_all_others() -> None:
    held = queue()
    held.submit(request("a", 5))
    held.admit()
    begun = list(held.running)[1]
    begun.extend([7], [-1.0], [False], 0)
    held.put_back()
    assert list(held.running) == [begun]
    assert names(held.waiting) == [("a", 0), ("a", 2), ("a", 3), ("a", 4)]


async def test_admission_passes_over_what_is_not_ready() -> None:
    held = queue()
    held.submit(request("a", 2))
    held.submit(request("b", 1))
    assert names(held.admit(lambda sequence: sequence.wanted.index != 1)) == [("a", 0), ("b", 0)]
    assert names(held.waiting) == [("a", 1)]
    assert names(held.admit()) == [("a", 1)]


@pytest.mark.parametrize("failure", [None, RuntimeError("the device is gone")])
async def test_at_the_end_everybody_hears_of_it(failure: RuntimeError | None) -> None:
    held = queue()
    callers = [held.submit(request(name, 2)) for name in "ab"]
    held.admit()
    held.close(failure)
    held.close()
    for caller in callers:
        if failure is None:
            assert await heard(held, caller) == []
        else:
            with pytest.raises(RuntimeError, match="the device is gone"):
                await heard(held, caller)
    assert not held.running and not held.waiting
    with pytest.raises(RuntimeError, match="the engine is closed" if failure is None else "the device is gone"):
        held.submit(request("c", 1))
    if failure is not None:
        with pytest.raises(RuntimeError, match="the device is gone"):
            held.status()


async def test_a_closed_generator_gives_everything_back() -> None:
    held = queue()
    stream = held.generate(request("a", 5))
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    held.admit()
    end(held, next(iter(held.running)))
    assert (await waiting).index == 0
    await stream.aclose()
    assert not held.running and not held.waiting


async def test_asking_again_for_what_is_finished_ends_the_rest_too() -> None:
    held = queue()
    older = held.submit(request("a", 3))
    held.admit()
    end(held, next(iter(held.running)))
    newer = held.submit(request("a", 1))
    assert names(held.waiting) == [("a", 0)] and not held.running
    with pytest.raises(AskedAgain):
        await heard(held, older)
    held.cancel(older)  # late: the name is the newer one's by now
    held.end_older(request("a", 1))
    assert not held.waiting
    with pytest.raises(AskedAgain):
        await heard(held, newer)


async def test_a_name_is_forgotten_with_its_caller() -> None:
    held = queue()
    caller = held.submit(request("a", 2))
    held.cancel(caller)
    assert not held._open and not held._callers
