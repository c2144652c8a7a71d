"""A simulated generator against one that is played turn by turn."""

import itertools

import numpy as np
import pytest

from scalerl_jax.contract.codec import CompletionRequest
from scalerl_jax.environments.base import Row
from scalerl_jax.planning.twin.clock import Clock, Cores
from scalerl_jax.planning.twin.server import SimulatedServer
from scalerl_jax.planning.twin.speeds import ServerSpeed
from scalerl_jax.rollouts.group_buffer import GroupBuffer, GroupInFlight, Process, RolloutRequest
from scalerl_jax.rollouts.pacing import Pipeline

SPEED = ServerSpeed(
    slots=6, queue=100, chunk=4, step_seconds=0.01, slot_seconds=0.002, prefill_seconds=0.03,
    completion_seconds=0.007,
)  # fmt: skip
Arrivals = list[tuple[float, list[int]]]  # (when, tokens of each completion of the group)


def group(number: int, size: int) -> GroupInFlight:
    requests = tuple(CompletionRequest(i, seed=0) for i in range(size))
    return GroupInFlight(number, f"train/{number}", Row("", index=number), requests)


def simulated(arrivals: Arrivals, swaps: list[float], cores: float = 1.0) -> dict[tuple[int, int], tuple]:
    """(group, index) -> (when it ended, its versions). swaps: when versions 1, 2, .. come."""
    clock, found, lengths = Clock(), {}, {}
    buffer = GroupBuffer(
        pacing=Pipeline(k=1, groups=1, batches=1), open_group=lambda n: group(n, 1), group_size=1, trained=0
    )

    def deliver(server, sequence, completion):
        found[sequence.request.group.number, sequence.index] = (clock.now, completion.versions)

    server = SimulatedServer(
        "server", SPEED, clock=clock, cores=Cores(clock, cores), lengths=lambda buffer, count: lengths["next"],
        deliver=deliver, changed=lambda: None, retarget=lambda server: None,
    )  # fmt: skip
    server.stage(0, lambda: None)

    def ask(number: int, tokens: list[int]) -> None:
        lengths["next"] = np.array(tokens)
        request = RolloutRequest(group(number, len(tokens)), Process("t", "t"), 0, None, set(range(len(tokens))))
        server.calls.ask(buffer, request)

    for number, (at, tokens) in enumerate(arrivals):
        clock.at(at, lambda number=number, tokens=tokens: ask(number, tokens))
    for step, at in enumerate(swaps, 1):
        clock.at(at, lambda step=step: server.stage(step, lambda: None))
    while clock.step():
        pass
    return found


def turn_by_turn(arrivals: Arrivals, swaps: list[float]) -> dict[tuple[int, int], tuple]:
    """The same, a chunk at a time."""
    now, version, prefix = 0.0, 0, None
    coming, waiting, running, found = list(enumerate(arrivals)), [], [], {}
    versions = list(enumerate(swaps, 1))
    while coming or waiting or running:
        if not waiting and not running:
            now = max(now, coming[0][1][0])
        while versions and versions[0][1] <= now:
            version = versions.pop(0)[0]
        while coming and coming[0][1][0] <= now:
            number, (_, tokens) = coming.pop(0)
            waiting += [(number, i, count) for i, count in enumerate(tokens)]
        seconds = 0.0
        while waiting and len(running) < SPEED.slots:
            number, index, tokens = waiting.pop(0)
            if prefix != (number, version):
                prefix, seconds = (number, version), seconds + SPEED.prefill_seconds
            seconds += SPEED.completion_seconds
            running.append([number, index, tokens, []])
        now += seconds + SPEED.chunk * (SPEED.step_seconds + len(running) * SPEED.slot_seconds)
        for one in running:
            one[3] += [version] * min(SPEED.chunk, one[2] - len(one[3]))
        for number, index, tokens, steps in [one for one in running if len(one[3]) == one[2]]:
            edges = [0, *(i for i in range(1, tokens) if steps[i] != steps[i - 1]), tokens]
            found[number, index] = (now, tuple((steps[a], a, b) for a, b in itertools.pairwise(edges)))
        running = [one for one in running if len(one[3]) < one[2]]
    return found


@pytest.mark.parametrize("seed", range(8))
def test_it_ends_every_completion_when_one_played_chunk_by_chunk_does(seed):
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(0.4, 30))
    arrivals = [(float(at), random.integers(1, 60, random.integers(1, 5)).tolist()) for at in times]
    swaps = np.cumsum(0.5 + random.exponential(0.4, 12)).tolist()  # each is held before the next one comes
    found, expected = simulated(arrivals, swaps), turn_by_turn(arrivals, swaps)
    assert found.keys() == expected.keys()
    for name, (at, versions) in expected.items():
        assert found[name][0] == pytest.approx(at)
        assert found[name][1] == versions


def test_on_half_a_core_it_takes_twice_as_long():
    arrivals = [(0.0, [40, 8]), (0.0, [16])]
    whole, half = simulated(arrivals, []), simulated(arrivals, [], cores=0.5)
    assert {name: at for name, (at, _) in half.items()} == pytest.approx(
        {name: at for name, (at, _) in whole.items()}
    )  # a pool of half a core: its job keeps that half busy, and is alone there
