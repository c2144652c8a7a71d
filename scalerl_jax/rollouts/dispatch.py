"""Who is asked for what next: one lease at a time to the server that is least loaded."""

import heapq
from collections.abc import Callable, Sequence

from scalerl_jax.rollouts import pacing as pacing_lib
from scalerl_jax.rollouts.group_buffer import GroupBuffer
from scalerl_jax.rollouts.servers.client import ServerClient


def dispatch(
    active: Sequence[ServerClient],
    book_of: Callable[[ServerClient], GroupBuffer | None],
    *,
    typical_seconds: float,
    now: float,
) -> None:
    """Asks the servers that have room for as much more as they and the books allow.

    book_of: what a server works on; None: it is to be asked for nothing. typical_seconds: of a completion.
    """
    # One that may not be asked now is nobody to leave a group to, either: it may be minutes until then.
    books = {c: book for c in active if c.free_at <= now and (book := book_of(c)) is not None}
    # One lease at a time to whoever is least loaded, so that few groups are spread over all servers.
    heap = [(c.calls.load, i) for i, c in enumerate(active) if c in books]
    heapq.heapify(heap)
    while heap:
        number = heapq.heappop(heap)[1]
        connection = active[number]
        book, step = books[connection], connection.step
        assert step is not None
        room, split = connection.calls.room(group_size=book.group_size, typical_seconds=typical_seconds, now=now)
        process = {"server": connection.address, "server_id": connection.status.server_id}
        alone = _alone(connection, books)
        lease = book.lease(**process, step=step, room=room, split=split, alone=alone, now=now)
        if lease is not None:
            connection.calls.ask(book, lease)
            heapq.heappush(heap, (connection.calls.load, number))


def _alone(connection: ServerClient, books: dict[ServerClient, GroupBuffer]) -> bool:
    """Whether nobody else of those that may be asked now could have the group that is next for this one."""
    book = books[connection]

    def may_have(c: ServerClient, number: int) -> bool:
        assert c.step is not None
        return books[c] is book and pacing_lib.suits(book.pacing, number, c.step, trained=book.trained)

    waiting = (group.number for group in book.open.values() if group.unasked)
    number = next((number for number in waiting if may_have(connection, number)), None)
    return number is None or not any(may_have(c, number) for c in books if c is not connection)
