"""Who is asked for what next: one request at a time to the server that is least loaded."""

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from scalerl_jax.rollouts import pacing as pacing_lib
from scalerl_jax.rollouts.group_buffer import GroupBuffer, Process, RolloutRequest


class AskedCalls(Protocol):
    """What a server is asked for; see servers/calls.py."""

    @property
    def load(self) -> float: ...

    def room(self, *, group_size: int, typical_seconds: float, now: float) -> tuple[int, bool]: ...

    def ask(self, buffer: GroupBuffer, rollout: RolloutRequest) -> None: ...


class Asked(Protocol):
    """A server, as far as it is asked for something: a real one, or a simulated one."""

    @property
    def process(self) -> Process: ...

    @property
    def step(self) -> int | None: ...

    @property
    def free_at(self) -> float: ...

    @property
    def calls(self) -> AskedCalls: ...


S = TypeVar("S", bound=Asked)


def dispatch(
    active: Sequence[S],
    buffer_of: Callable[[S], GroupBuffer | None],
    *,
    typical_seconds: float,
    now: float,
) -> None:
    """Asks the servers that have room for as much more as they and the buffers allow.

    buffer_of: what a server works on; None: it is to be asked for nothing. typical_seconds: of a completion.
    """
    # One that may not be asked now is nobody to leave a group to, either: it may be minutes until then.
    buffers = {c: buffer for c in active if c.free_at <= now and (buffer := buffer_of(c)) is not None}
    # One request at a time to whoever is least loaded, so that few groups are spread over all servers.
    heap = [(c.calls.load, i) for i, c in enumerate(active) if c in buffers]
    heapq.heapify(heap)
    while heap:
        number = heapq.heappop(heap)[1]
        client = active[number]
        buffer, step = buffers[client], client.step
        assert step is not None
        room, split = client.calls.room(group_size=buffer.group_size, typical_seconds=typical_seconds, now=now)
        alone = _alone(client, buffers)
        request = buffer.request(client.process, step=step, room=room, split=split, alone=alone, now=now)
        if request is not None:
            client.calls.ask(buffer, request)
            heapq.heappush(heap, (client.calls.load, number))


def _alone(client: S, buffers: dict[S, GroupBuffer]) -> bool:
    """Whether nobody else of those that may be asked now could have the group that is next for this one."""
    buffer = buffers[client]

    def may_have(c: S, number: int) -> bool:
        assert c.step is not None
        return buffers[c] is buffer and pacing_lib.suits(buffer.pacing, number, c.step, trained=buffer.trained)

    waiting = (group.number for group in buffer.in_flight.values() if group.pending)
    number = next((number for number in waiting if may_have(client, number)), None)
    return number is None or not any(may_have(c, number) for c in buffers if c is not client)
