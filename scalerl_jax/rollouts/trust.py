"""What the trainer's thread says to the fleet of servers that have groups: who is sent away, what is asked again.

    dismiss     a process delivered what does not count: it is asked for again elsewhere, under the same names
    probe       servers that have groups sample the probe's prompts once more, beside their work, with the version
                they hold; `probed` gives what came of it
    evaluation  what an evaluation has sampled counts when the trainer has approved of it

Its methods are called by the trainer's thread and run on the fleet's event loop.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

from scalerl_jax.contract import codec
from scalerl_jax.environments import Row
from scalerl_jax.rollouts.evaluation import Evaluations
from scalerl_jax.rollouts.group_buffer import FinishedGroup, GroupBuffer, Process, finished
from scalerl_jax.rollouts.servers import states
from scalerl_jax.rollouts.servers.pool import ServerPool

T = TypeVar("T")


class Probed(NamedTuple):
    """What a server that has groups has sampled for the probe."""

    process: Process
    samples: tuple[tuple[Row, codec.Completion], ...]


class Trust:
    """Args:
    call: runs a function on the loop and returns what it returns.
    book: of the groups to be trained on.
    changed: there may be something to ask for.
    event: as Fleet's on_event: ("parity", {server, found, completions, sent_away}).
    """

    def __init__(
        self,
        *,
        call: Callable[[Callable[[], Any]], Any],
        members: ServerPool,
        evaluations: Evaluations,
        book: Callable[[], GroupBuffer],
        changed: Callable[[], None],
        event: Callable[[str, dict[str, Any]], None],
    ):
        self._call, self._pool, self._evaluations, self._book = call, members, evaluations, book
        self._changed, self._event = changed, event

    def dismiss(self, process: Process, why: str, numbers: Collection[int] | None = None) -> int:
        """Takes back what the process delivered to training groups `numbers`; None: everything, and it is sent away.

        Returns how many completions are asked for again.
        """

        def dismiss() -> int:
            books = [self._book()]
            if numbers is None and self._evaluations.current is not None:
                books.append(self._evaluations.current.book)
            back = sum(book.take_back(process, numbers) for book in books)
            connection = self._pool.named(process.address)
            # Another process may have come to its address since.
            if connection is not None and connection.status.server_id == process.server_id:
                if numbers is None:
                    connection.reject(f"server {process.address}: {why}")
                else:
                    connection.offend("its log-probs are not the policy's", why)
            fields = {"server": process.address, "found": why, "completions": back, "sent_away": numbers is None}
            self._event("parity", fields)
            self._changed()
            return back

        return self._call(dismiss)

    def working(self) -> list[Process]:
        """The servers that have groups."""

        def working() -> list[Process]:
            return [Process(c.address, c.status.server_id) for c in self._pool.in_state(states.ACTIVE)]

        return self._call(working)

    def probe(self, processes: Collection[Process]) -> None:
        """Those of these that have groups are to sample once more for the probe."""

        def probe() -> None:
            for connection in self._pool.in_state(states.ACTIVE):
                if Process(connection.address, connection.status.server_id) in processes:
                    connection.probe_again()

        self._call(probe)

    def probed(self) -> list[Probed]:
        """What has come of that since the last call."""

        def probed() -> list[Probed]:
            out = []
            for connection in self._pool.in_state(states.ACTIVE):
                if connection.samples:
                    process = Process(connection.address, connection.status.server_id)
                    out.append(Probed(process, connection.take_samples()))
            return out

        return self._call(probed)

    def evaluation(self) -> list[FinishedGroup] | None:
        """The groups of an evaluation that is sampled whole and waits to be approved of; None: there is none."""

        def evaluation() -> list[FinishedGroup] | None:
            current = self._evaluations.current
            if current is None or current.approved or not current.book.ready(0):
                return None
            return [finished(group) for _, group in sorted(current.book.finished.items())]

        return self._call(evaluation)

    def approve_evaluation(self) -> None:
        def approve() -> None:
            if self._evaluations.current is not None:
                self._evaluations.current.approved = True
                self._changed()

        self._call(approve)
