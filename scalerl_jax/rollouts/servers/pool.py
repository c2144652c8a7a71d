"""Who belongs to the fleet now: a client for each address listed, made when it appears and ended when it is gone.

The list is looked at again every fleet.discovery_seconds where it may change (a watched file, a DNS name). A server
that is no longer listed is asked for nothing more, delivers what it was asked for, and is released. A list that cannot
be read (a file being replaced, a name server away) leaves the fleet as it is; that is said once.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from scalerl_jax.contract.peer_text import LogLimit
from scalerl_jax.rollouts.loop_thread import watched
from scalerl_jax.rollouts.servers import server_state
from scalerl_jax.rollouts.servers.client import SURE_AFTER, ServerClient

_log = logging.getLogger(__name__)


class ServerPool:
    """Lives on the fleet's event loop.

    Args:
        make: a client of an address, not yet running.
        resolve: the addresses listed now; may block, and raise ValueError. Without it the list never changes.
        fail: told of a fault of ours in one of them.
        changed: a server came or went.
    """

    def __init__(
        self,
        *,
        make: Callable[[str], ServerClient],
        resolve: Callable[[], Sequence[str]] | None,
        fail: Callable[[BaseException], None],
        changed: Callable[[], None],
    ):
        self.clients: list[ServerClient] = []
        self._make, self._resolve, self._fail, self._changed = make, resolve, fail, changed
        self._tasks: dict[ServerClient, asyncio.Task[None]] = {}
        self._all_lost = True
        self._complaint = ""  # of the last look at the list
        self._log_limit = LogLimit()
        self._warned: dict[ServerClient, str] = {}  # who is left out for want of trust, and why

    @property
    def fixed(self) -> bool:
        """Whether no other server can come."""
        return self._resolve is None

    def in_state(self, *states: str) -> list[ServerClient]:
        return [c for c in self.clients if c.state in states]

    @property
    def all_tried(self) -> bool:
        """Whether each has answered once, or not."""
        return all(c.tried for c in self.clients)

    def why_nobody(self, seconds: float, late: bool) -> str:
        """Why no server can be used, in one line; empty: one may still come. late: `seconds` were waited for one."""
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
        where = f"{', '.join(silent)} (tried for {seconds:g} s)"
        return f"no rollout server answers at {where}: is scalerl-serve running there?"

    def named(self, address: str) -> ServerClient | None:
        return next((c for c in self.clients if c.address == address), None)

    def update(self, addresses: Sequence[str]) -> None:
        """Makes this the list."""
        for client in self.clients:
            if client.address not in addresses:
                client.leave()
        for address in addresses:
            # One that leaves and is listed again gets a new client, once it is gone.
            if self.named(address) is None:
                client = self._make(address)
                self.clients.append(client)
                self._tasks[client] = watched(client.run(), self._fail)
        self._changed()

    async def discover(self, seconds: float) -> None:
        """Until cancelled."""
        while self._resolve is not None:
            await asyncio.sleep(seconds)
            try:
                addresses = await asyncio.get_running_loop().run_in_executor(None, self._resolve)
            except ValueError as error:
                if str(error) != self._complaint:
                    _log.warning("%s; the servers stay as they are", error)
                self._complaint = str(error)
                continue
            self._complaint = ""
            self.update(addresses)

    def release_departed(self) -> None:
        """Releases who has left, and says when all servers are lost or one is back."""
        for client in [c for c in self.clients if c.unlisted and not c.calls.in_flight]:
            _log.warning("server %s has left: it is no longer listed", client.address)
            self.clients.remove(client)
            self._warned.pop(client, None)
            self._tasks.pop(client).cancel()
        for client in [c for c in self.clients if c.auth_failures >= SURE_AFTER]:
            # Where none is trusted the run does not begin, and says so itself.
            if not self._all_lost and self._warned.get(client) != client.reason:
                if not self._log_limit.happened(client.address, now=time.monotonic()):
                    continue  # its reason may hold words of its own, other ones each time
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
    """Where the reason alone does not tell."""
    return f"{client.state}, " if client.state == server_state.SUPERSEDED else ""
