"""Who belongs to the fleet now: a connection for each address listed, made when it appears and ended when it is gone.

The list is looked at again every fleet.discovery_seconds where it may change (a watched file, a DNS name). A server
that is no longer listed is asked for nothing more, delivers what it was asked for, and is forgotten. A list that cannot
be read (a file being replaced, a name server away) leaves the fleet as it is; that is said once.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from scalerl_jax.rollouts.servers import client as connection_lib
from scalerl_jax.rollouts.servers import states
from scalerl_jax.rollouts.servers.client import ServerClient
from scalerl_jax.rollouts.servers.offences import Telling

_log = logging.getLogger(__name__)


class ServerPool:
    """Lives on the fleet's event loop.

    Args:
        make: a connection to an address, not yet running.
        look: the addresses listed now; may block, and raise ValueError. None: the list never changes.
        watch: told of every task that ends.
        changed: somebody came or went.
    """

    def __init__(
        self,
        *,
        make: Callable[[str], ServerClient],
        look: Callable[[], Sequence[str]] | None,
        watch: Callable[["asyncio.Task[None]"], None],
        changed: Callable[[], None],
    ):
        self.connections: list[ServerClient] = []
        self._make, self._look, self._watch, self._changed = make, look, watch, changed
        self._tasks: dict[ServerClient, asyncio.Task[None]] = {}
        self._all_lost = True
        self._complaint = ""  # of the last look at the list
        self._telling = Telling()
        self._said: dict[ServerClient, str] = {}  # who is left out for want of trust, and why

    @property
    def fixed(self) -> bool:
        """Whether nobody else can come."""
        return self._look is None

    def in_state(self, *states: str) -> list[ServerClient]:
        return [c for c in self.connections if c.state in states]

    @property
    def all_tried(self) -> bool:
        """Whether each has answered once, or not."""
        return all(c.tried for c in self.connections)

    def why_nobody(self, seconds: float, late: bool) -> str:
        """Why no server can be used, in one line; empty: one may still come. late: `seconds` were waited for one."""
        superseded = [c for c in self.connections if c.state == states.SUPERSEDED]
        times = 1 if late else connection_lib.SURE_AFTER
        mistrusted = [c for c in self.connections if c.mistrusted >= times]
        silent = [c.address for c in self.connections if c not in (*mistrusted, *superseded)]
        if silent and not late:
            return ""
        why = [f"rollout server {c.address}: {c.reason}" for c in mistrusted]
        why += [f"rollout server {c.address} is superseded: {c.reason}" for c in superseded]
        if why:
            return "; ".join(why) + (f"; nobody answers at {', '.join(silent)}" if silent else "")
        where = f"{', '.join(silent)} (tried for {seconds:g} s)"
        return f"no rollout server answers at {where}: is scalerl-serve running there?"

    def named(self, address: str) -> ServerClient | None:
        return next((c for c in self.connections if c.address == address), None)

    def update(self, addresses: Sequence[str]) -> None:
        """Makes this the list."""
        for connection in self.connections:
            if connection.address not in addresses:
                connection.leave()
        for address in addresses:
            # One that leaves and is listed again is met anew, once it is gone.
            if self.named(address) is None:
                connection = self._make(address)
                self.connections.append(connection)
                self._tasks[connection] = task = asyncio.create_task(connection.run())
                task.add_done_callback(self._watch)
        self._changed()

    async def discover(self, seconds: float) -> None:
        """Until cancelled."""
        while self._look is not None:
            await asyncio.sleep(seconds)
            try:
                addresses = await asyncio.get_running_loop().run_in_executor(None, self._look)
            except ValueError as error:
                if str(error) != self._complaint:
                    _log.warning("%s; the servers stay as they are", error)
                self._complaint = str(error)
                continue
            self._complaint = ""
            self.update(addresses)

    def sweep(self) -> None:
        """Forgets who has left, and says when all servers are lost or one is back."""
        for connection in [c for c in self.connections if c.leaving and not c.in_flight]:
            _log.warning("server %s has left: it is no longer listed", connection.address)
            self.connections.remove(connection)
            self._said.pop(connection, None)
            self._tasks.pop(connection).cancel()
        for connection in [c for c in self.connections if c.mistrusted >= connection_lib.SURE_AFTER]:
            # Where none is trusted the run does not begin, and says so itself.
            if not self._all_lost and self._said.get(connection) != connection.reason:
                if not self._telling.happened(connection.address, now=time.monotonic()):
                    continue  # its reason may hold words of its own, other ones each time
                self._said[connection] = connection.reason
                _log.warning("server %s is left out: %s", connection.address, connection.reason)
        lost = not self.in_state(*states.ANSWERING)
        if lost != self._all_lost:
            self._all_lost = lost
            if lost:
                why = "; ".join(f"{c.address}: {_state(c)}{c.reason}" for c in self.connections)
                _log.warning("every rollout server is lost (%s); waiting until one answers", why)
            else:
                _log.info("a rollout server answers")


def _state(connection: ServerClient) -> str:
    """Where the reason alone does not tell."""
    return f"{connection.state}, " if connection.state == states.SUPERSEDED else ""
