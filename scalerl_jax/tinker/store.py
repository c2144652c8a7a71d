"""Requests to a server and its answers: one SQLite file, from which a server continues after a kill.

    sessions      of clients
    models        training runs: what they started from, and the newest weights that samplers in flight follow
    samplers      sampling sessions: the weights that each samples with
    futures       each call that is answered later, under (owner, seq): the owner is a model or a sampling session
    checkpoints   what is saved, and where; their id is the tinker:// path

A call is stored once it is accepted, and a second one under its (owner, seq) is the same call or a Conflict; an answer
is permanent. What was committed survives a kill of the process. `sync` is for what must survive the machine, too.

Each thread opens its own Store.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from typing import Any

_TABLES = """
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, number INTEGER, created REAL, ended INTEGER, body TEXT);
CREATE TABLE IF NOT EXISTS models (
  id TEXT PRIMARY KEY, session TEXT, created REAL, rank INTEGER, body TEXT, seed INTEGER, inflight TEXT);
CREATE TABLE IF NOT EXISTS samplers (id TEXT PRIMARY KEY, session TEXT, model TEXT, folder TEXT, path TEXT);
CREATE TABLE IF NOT EXISTS futures (
  id TEXT PRIMARY KEY, owner TEXT, seq INTEGER, kind TEXT, digest BLOB, body BLOB, answer BLOB, proto INTEGER,
  failed INTEGER, versions TEXT, UNIQUE (owner, seq));
CREATE INDEX IF NOT EXISTS unanswered ON futures (owner, seq) WHERE answer IS NULL;
CREATE TABLE IF NOT EXISTS checkpoints (
  id TEXT PRIMARY KEY, model TEXT, kind TEXT, folder TEXT, created REAL, bytes INTEGER, body TEXT, expires REAL);
"""
_WAIT_SECONDS = 60.0  # for another thread's transaction


class Conflict(Exception):
    """Another call has this name already."""


@dataclasses.dataclass(frozen=True)
class Future:
    """A call that is answered later."""

    id: str
    owner: str
    seq: int
    kind: str
    body: bytes  # as received
    answer: bytes | None = None  # None: not yet
    proto: bool = False  # the answer is protobuf, not JSON
    failed: bool = False  # the answer is an error
    versions: str = ""  # JSON, of what was sampled

    @property
    def fields(self) -> dict[str, Any]:
        """The body, if it is JSON."""
        return json.loads(self.body)


class Store:
    """The file in `folder`. Raises ValueError if it is not a usable database."""

    def __init__(self, folder: str):
        self.path = os.path.join(folder, "tinker.db")
        try:
            self._db = sqlite3.connect(self.path, timeout=_WAIT_SECONDS, isolation_level=None)
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_TABLES)
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{self.path}: {error}") from None

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Commits all that is written in the block, or nothing."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def sync(self) -> None:
        """Flushes what was committed to the disk."""
        self._db.execute("PRAGMA wal_checkpoint(FULL)").fetchall()

    def row(self, table: str, key: str) -> dict[str, Any] | None:
        found = self._db.execute(f"SELECT * FROM {table} WHERE id = ?", (key,)).fetchone()
        return None if found is None else dict(found)

    def rows(self, table: str, **equal: Any) -> list[dict[str, Any]]:
        """The rows with these values, in order of insertion."""
        where = " AND ".join(f"{name} = ?" for name in equal) or "1"
        found = self._db.execute(f"SELECT * FROM {table} WHERE {where} ORDER BY rowid", tuple(equal.values()))
        return [dict(row) for row in found]

    def put(self, table: str, **values: Any) -> None:
        """Inserts a row, or replaces the one with its key."""
        marks = ", ".join("?" * len(values))
        self._db.execute(
            f"INSERT OR REPLACE INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values())
        )

    def set(self, table: str, key: str, **values: Any) -> None:
        names = ", ".join(f"{name} = ?" for name in values)
        self._db.execute(f"UPDATE {table} SET {names} WHERE id = ?", (*values.values(), key))

    def delete(self, table: str, key: str) -> None:
        self._db.execute(f"DELETE FROM {table} WHERE id = ?", (key,))

    def expired(self) -> list[dict[str, Any]]:
        """The checkpoints that have expired."""
        found = self._db.execute("SELECT * FROM checkpoints WHERE expires < ?", (time.time(),))
        return [dict(row) for row in found]

    def new_session(self, body: Mapping[str, Any]) -> str:
        """The new session's name: numbered, so that the same calls after the same start have the same names."""
        with self.writing():
            number = self._db.execute("SELECT COALESCE(MAX(number), -1) + 1 FROM sessions").fetchone()[0]
            name = f"session-{number}"
            self.put("sessions", id=name, number=number, created=time.time(), ended=0, body=json.dumps(body))
        return name

    # ---- futures

    def accept(self, owner: str, seq: int, kind: str, body: bytes, *, same: bytes | None = None) -> tuple[Future, bool]:
        """The call, and whether it is a new one. same: what is equal when it comes again; by default the body.

        Raises Conflict.
        """
        digest = hashlib.sha256(kind.encode() + b"\0" + (body if same is None else same)).digest()
        if there := self.rows("futures", owner=owner, seq=seq):
            if there[0]["digest"] != digest:
                raise Conflict(f"{owner} has another call {seq}, {there[0]['kind']}")
            return _future(there[0]), False
        name = f"{owner}:{seq}"
        self.put("futures", id=name, owner=owner, seq=seq, kind=kind, digest=digest, body=body, proto=0, failed=0)
        return Future(name, owner, seq, kind, body), True

    def future(self, name: str) -> Future | None:
        found = self.row("futures", name)
        return None if found is None else _future(found)

    def answer(
        self, future: Future, answer: bytes, *, proto: bool = False, failed: bool = False, versions: str = ""
    ) -> None:
        done = {"body": b""} if future.kind == "asample" else {}  # a run's calls may have to be repeated
        self.set("futures", future.id, answer=answer, proto=proto, failed=failed, versions=versions, **done)

    def refuse(self, future: Future, message: str, *, category: str) -> None:
        """Answers with an error. category: "user" | "server", whose it is."""
        failure = {"error": " ".join(message.split()), "category": category}
        self.answer(future, json.dumps(failure).encode(), failed=True)

    def unanswered(self, kind: str) -> list[Future]:
        return self._futures("answer IS NULL AND kind = ? ORDER BY rowid", kind)

    def done(self, owner: str) -> int:
        """The number of the last answered call of a model; -1 if none is."""
        found = self._db.execute("SELECT MAX(seq) FROM futures WHERE owner = ? AND answer IS NOT NULL", (owner,))
        last = found.fetchone()[0]
        return -1 if last is None else last

    def next_call(self, owner: str) -> Future | None:
        """The first unanswered call of a model, if every call before it has arrived and is answered."""
        found = self._futures("owner = ? AND seq = ? AND answer IS NULL", owner, self.done(owner) + 1)
        return found[0] if found else None

    def waiting(self) -> list[str]:
        """The models that have unanswered calls, ordered by the oldest one."""
        found = self._db.execute(
            "SELECT owner FROM futures JOIN models ON models.id = owner WHERE answer IS NULL "
            "GROUP BY owner ORDER BY MIN(futures.rowid)"
        )
        return [row["owner"] for row in found]

    def answered_after(self, owner: str, seq: int) -> list[Future]:
        """The answered calls of a model after call `seq`, in order."""
        return self._futures("owner = ? AND seq > ? AND answer IS NOT NULL ORDER BY seq", owner, seq)

    def forget_bodies(self, owner: str, through: int) -> None:
        """Drops the bodies of a model's calls up to `through`, which a checkpoint contains."""
        where = "owner = ? AND seq BETWEEN 1 AND ? AND length(body) > 0"
        self._db.execute(f"UPDATE futures SET body = x'' WHERE {where}", (owner, through))

    def _futures(self, where: str, *values: Any) -> list[Future]:
        return [_future(row) for row in self._db.execute(f"SELECT * FROM futures WHERE {where}", values)]


def _future(row: Mapping[str, Any] | sqlite3.Row) -> Future:
    return Future(
        row["id"], row["owner"], row["seq"], row["kind"], row["body"], row["answer"], bool(row["proto"]),
        bool(row["failed"]), row["versions"] or "",
    )  # fmt: skip
