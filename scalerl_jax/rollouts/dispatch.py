"""Who is asked for what next: one lease at a time to the server that is least loaded."""

import collections
import heapq
from collections.abc import Callable, Sequence

from scalerl_jax.rollouts.book import Book
from scalerl_jax.rollouts.connection import Connection


def dispatch(
    active: Sequence[Connection],
    book_of: Callable[[Connection], Book | None],
    *,
    typical_seconds: float,
    now: float,
) -> None:
    """Asks the servers that have room for as much more as they and the books allow.

    book_of: what a server works on; None: it is to be asked for nothing. typical_seconds: of a completion.
    """
    books = {c: book for c in active if (book := book_of(c)) is not None}
    sharing = collections.Counter(map(id, books.values()))
    # One lease at a time to whoever is least loaded, so that few groups are spread over all servers.
    heap = [(c.calls.load, i) for i, c in enumerate(active) if c in books and c.free_at <= now]
    heapq.heapify(heap)
    while heap:
        number = heapq.heappop(heap)[1]
        connection = active[number]
        book, step = books[connection], connection.step
        assert step is not None
        room, split = connection.calls.room(group_size=book.group_size, typical_seconds=typical_seconds, now=now)
        alone = sharing[id(book)] == 1
        process = {"server": connection.address, "server_id": connection.status.server_id}
        lease = book.lease(**process, step=step, room=room, split=split, alone=alone, now=now)
        if lease is not None:
            connection.calls.ask(book, lease)
            heapq.heappush(heap, (connection.calls.load, number))
