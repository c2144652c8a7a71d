"""The fleet's current servers: a client for each address listed, made when it appears and ended when it is gone.

The list is read again every fleet.discovery_seconds if it may change (a watched file, a DNS name). A server that is no
longer listed gets no more requests, delivers what it was asked for, and is released. A list that cannot be read (a file
being replaced, a name server unreachable) leaves the fleet as it is; that is logged once.

`dispatch` decides which of them is asked for what next.
"""

import asyncio
import heapq
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from scalerl_jax.contract.peer_text import LogLimit
from scalerl_jax.rollouts import pacing as pacing_lib
from scalerl_jax.rollouts.group_buffer import GroupBuffer, Process, RolloutRequest
from scalerl_jax.rollouts.loop_thread import watched
from scalerl_jax.rollouts.servers import server_state
from scalerl_jax.rollouts.servers.client import SURE_AFTER, ServerClient
from scalerl_jax.rollouts.servers.discovery import Plaintext, relist
from scalerl_jax.rollouts.servers.server_state import ClientContext

_log = logging.getLogger(__name__)


class ServerPool:
    """Lives on the fleet's event loop."""

    def __init__(self, context: ClientContext):
        self.clients: list[ServerClient] = []
        self._context = context
        self._plaintext = Plaintext(context.servers.credentials)
        self._tasks: dict[ServerClient, asyncio.Task[None]] = {}
        self._all_lost = True
        self._log_limit = LogLimit()
        self._warned: dict[ServerClient, str] = {}  # servers left out because authentication fails, and why

    @property
    def fixed(self) -> bool:
        """Whether no other server can come."""
        return self._context.servers.resolve is None

    def in_state(self, *states: str) -> list[ServerClient]:
        return [c for c in self.clients if c.state in states]

    @property
    def all_tried(self) -> bool:
        """Whether a status call to each has ended, with or without an answer."""
        return all(c.tried for c in self.clients)

    def why_unusable(self, *, late: bool) -> str:
        """Why no server can be used, in one line; empty if one may still answer. late: connect_seconds have passed."""
        superseded = [c for c in self.clients if c.state == server_state.SUPERSEDED]
        times = 1 if late else SURE_AFTER
        unauthenticated = [c for c in self.clients if c.auth_failures >= times]
        silent = [c.address for c in self.clients if c not in (*unauthenticated, *superseded)]
        if silent and not late:
            return ""
        why = [f"rollout server {c.address}: {c.reason}" for c in unauthenticated]
        why += [f"rollout server {c.address} is superseded: {c.reason}" for c in superseded]
        if why:
            return "; ".join(why) + (f"; no server answers at {', '.join(silent)}" if silent else "")
        where = f"{', '.join(silent)} (tried for {self._context.config.fleet.connect_seconds:g} s)"
        return f"no rollout server answers at {where}: is scalerl-serve running there?"

    def named(self, address: str) -> ServerClient | None:
        return next((c for c in self.clients if c.address == address), None)

    def update(self, addresses: Sequence[str]) -> None:
        """Replaces the list of addresses."""
        for client in self.clients:
            if client.address not in addresses:
                client.leave()
        for address in addresses:
            # A server that leaves and is listed again gets a new client once it is gone.
            if self.named(address) is None:
                self._plaintext.dial(address)
                client = ServerClient(address, self._context)
                self.clients.append(client)
                self._tasks[client] = watched(client.run(), self._context.fail)
        self._context.changed()

    async def discover(self) -> None:
        """Until cancelled: reads the list again every fleet.discovery_seconds, if it may change."""
        seconds, resolve = self._context.config.fleet.discovery_seconds, self._context.servers.resolve
        await relist(resolve, self.update, seconds=seconds, warning="%s; the servers stay as they are")

    def release_departed(self) -> None:
        """Releases servers that have left, and logs when all servers are lost or one is back."""
        for client in [c for c in self.clients if c.unlisted and not c.in_flight]:
            _log.warning("server %s has left: it is no longer listed", client.address)
            self.clients.remove(client)
            self._warned.pop(client, None)
            self._tasks.pop(client).cancel()
        for client in [c for c in self.clients if c.auth_failures >= SURE_AFTER]:
            # If no server authenticates, the run does not begin, and reports that itself.
            if not self._all_lost and self._warned.get(client) != client.reason:
                if not self._log_limit.happened(client.address, now=time.monotonic()):
                    continue  # its reason may contain the server's own text, different each time
                self._warned[client] = client.reason
                _log.warning("server %s is left out: %s", client.address, client.reason)
        lost = not self.in_state(*server_state.ANSWERING)
        if lost != self._all_lost:
            self._all_lost = lost
            if lost:
                why = "; ".join(f"{c.address}: {_state(c)}{c.reason}" for c in self.clients)
                _log.warning("every rollout server is lost (%s); waiting until one answers", why)
            else:
                _log.info("a rollout server answers")


def _state(client: ServerClient) -> str:
    """The state, if the reason alone does not show it."""
    return f"{client.state}, " if client.state == server_state.SUPERSEDED else ""


def dispatch(
    active: Sequence[ServerClient],
    buffer_of: Callable[[ServerClient], GroupBuffer | None],
    *,
    typical_seconds: float,
    now: float,
) -> Iterator[tuple[ServerClient, RolloutRequest]]:
    """Requests for the servers with capacity, as many as they and the buffers allow; each must be sent at once.

    buffer_of: the buffer that a server works on; None: it gets no requests. typical_seconds: of a completion.
    """
    # No group is reserved for a server that may not be asked now: that may last minutes.
    buffers = {c: buffer for c in active if c.free_at <= now and (buffer := buffer_of(c)) is not None}
    # One request at a time to the least loaded server, so that few groups are spread over all servers.
    heap = [(c.load, i) for i, c in enumerate(active) if c in buffers]
    heapq.heapify(heap)

    def capacity_of(client: ServerClient) -> tuple[int, bool]:
        group_size = buffers[client].group_size
        return client.capacity(group_size=group_size, typical_seconds=typical_seconds, now=now)

    with_capacity: dict[GroupBuffer, dict[Process, int]] = {}  # of those that work on it: the version that each holds
    for c, buffer in buffers.items():
        if c.step is not None and capacity_of(c)[0] > 0:
            with_capacity.setdefault(buffer, {})[c.process] = c.step
    while heap:
        number = heapq.heappop(heap)[1]
        client = active[number]
        buffer, step = buffers[client], client.step
        assert step is not None
        capacity, split = capacity_of(client)
        request = buffer.request(
            client.process, step=step, capacity=capacity, split=split, alone=_alone(client, buffers), now=now,
            with_capacity=with_capacity.get(buffer, {}),
        )  # fmt: skip
        if request is not None:
            yield client, request
            heapq.heappush(heap, (client.load, number))


def _alone(client: ServerClient, buffers: dict[ServerClient, GroupBuffer]) -> bool:
    """Whether no other server that may be asked now could have the group that is next for this one."""
    buffer = buffers[client]

    def may_have(c: ServerClient, number: int) -> bool:
        assert c.step is not None
        return buffers[c] is buffer and pacing_lib.suits(buffer.pacing, number, c.step, trained=buffer.trained)

    waiting = (group.number for group in buffer.waiting())
    number = next((number for number in waiting if may_have(client, number)), None)
    return number is None or not any(may_have(c, number) for c in buffers if c is not client)
