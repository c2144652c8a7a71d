"""Who passes a version on to whom, so that one stream out of the trainer feeds a fleet.

    trainer -> s0 -> s1 -> s3 ...      servers that need the same version from the same base at about the same time
                  -> s2 -> s5 ...      make one tree; each sends on to at most FAN_OUT others

    lead     the root: the trainer streams to it, and hears through it what became of the others
    follow   waits for that. Lost, or nothing has moved for PATIENCE_SECONDS: it is served by the trainer directly, and
             is left out of trees for AVOID_SECONDS, since one of the links to it may be broken. Where only the leader
             went away, the others make another tree
    directly     by the trainer: also whoever is dialled by what no header may name (contract/addresses.py)

A server is named in the tree by its address and by the server_id that its Status tells: those that pass a version on
send it to that process alone, and `applied` counts from that process alone. What another one says, or an older server
that does not say who it is, is as good as nothing: the version is sent directly.

Left out on purpose: knowledge of racks and regions. Addresses are those that the trainer dials; a server that cannot
reach another one costs that one PATIENCE_SECONDS once in AVOID_SECONDS.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable

import grpc

from scalerl_jax.contract import addresses, peer_text
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.weight_stream import refusal
from scalerl_jax.rollouts.group_buffer import Process
from scalerl_jax.rollouts.loop_thread import log_fault, watched

_log = logging.getLogger(__name__)

FAN_OUT = 2
GATHER_SECONDS = 0.02  # how long the first waits for others
PATIENCE_SECONDS = 3.0
AVOID_SECONDS = 20.0
LEADER_OVER = "the stream that it was to come by is over"

Key = tuple[int | None, int]  # base, step


class Tree:
    """What the leader is asked to pass on, and what became of it."""

    def __init__(self, members: "list[Member]"):
        """The first of them leads."""
        self.processes = [member.process for member in members]
        self._waiting = {member.process.address: member for member in members[1:]}
        self.relays = [_relay(members, child) for child in _children(0, len(members))]
        self._moved_at = time.monotonic()
        self._streamed = False

    def begin(self) -> None:
        """The version is streamed to the leader; whoever does that ends it."""
        self._streamed = True

    def moved(self) -> None:
        """Something went out, or came back."""
        self._moved_at = time.monotonic()

    @property
    def over(self) -> bool:
        """Nobody waits for the leader's stream any more."""
        return not self._waiting

    def relayed(self, relayed: pb.WeightReply.Relayed) -> None:
        self.moved()
        member, kind = self._waiting.get(relayed.address), relayed.WhichOneof("kind")
        if member is None or kind is None:
            return
        if kind == "staged":
            member.staged = True
            return
        del self._waiting[relayed.address]
        member.outcome.set_result(relayed)

    def leave(self, member: "Member") -> None:
        """It is gone; where it leads, and nobody streams to it, all is over."""
        self._waiting.pop(member.process.address, None)
        if member.leads and not self._streamed:
            self.end()

    def end(self) -> None:
        """The leader's stream is over: whoever still waits is served in another way."""
        for member in list(self._waiting.values()):
            self.relayed(pb.WeightReply.Relayed(address=member.process.address, lost=LEADER_OVER))

    @property
    def still_for(self) -> float:
        """Seconds since something moved."""
        return time.monotonic() - self._moved_at


@dataclasses.dataclass(eq=False)
class Member:
    """One server's place in a tree."""

    process: Process  # server_id: as its Status tells; empty: not known, and not looked at
    ready: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    tree: Tree | None = None  # once it is ready
    leads: bool = False
    staged: bool = False  # all of it has been sent to the server
    outcome: "asyncio.Future[pb.WeightReply.Relayed]" = dataclasses.field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    avoid: bool = False
    began: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    async def wait(self, timeout: float) -> pb.WeightReply.Applied | None:
        """What a follower hears of itself; None: it did not come this way (avoid: nor will it the next time).

        Raises PushRefused, TimeoutError.
        """
        tree = self.tree
        assert tree is not None and not self.leads
        while not self.outcome.done():
            await asyncio.wait({self.outcome}, timeout=min(timeout, PATIENCE_SECONDS) / 10)
            if not self.staged and tree.still_for > PATIENCE_SECONDS:
                break
            if tree.still_for > timeout and not self.outcome.done():
                raise TimeoutError
        tree.leave(self)
        if not self.outcome.done():
            self._not_this_way(f"nothing moved for {PATIENCE_SECONDS:g} s")
            return None
        relayed = self.outcome.result()
        kind = relayed.WhichOneof("kind")
        if kind == "applied":
            if self.process.server_id and relayed.applied.server_id != self.process.server_id:
                self._not_this_way("it was not this server that took it")
                return None
            return relayed.applied
        if kind != "lost":
            raise refusal(kind, relayed)
        if relayed.lost != LEADER_OVER:
            self._not_this_way(relayed.lost)
        return None

    def _not_this_way(self, why: str) -> None:
        _log.info(
            "server %s: a version did not come by other servers (%s), it is sent directly",
            self.process.address,
            peer_text.said(why),
        )
        self.avoid = True


class Trees:
    """Gathers the pushes that are alike. Lives on one event loop."""

    def __init__(self, *, fail: Callable[[BaseException], None] = log_fault) -> None:
        """fail: told of a fault of ours that nobody waits for."""
        self._fail = fail
        self._gathering: dict[Key, list[Member]] = {}
        self._avoided: dict[str, float] = {}  # address -> until when
        self._seen: set[str] = set()

    @contextlib.asynccontextmanager
    async def join(self, key: Key, process: Process) -> AsyncIterator[Member]:
        """The server's place in a tree (of nobody else, perhaps); where it leads it is to be sent to from here."""
        member, address = Member(process), process.address
        self._seen.add(address)
        avoided = self._avoided.get(address, 0.0) > time.monotonic()
        if len(self._seen) == 1 or avoided or not _may_be_named(member):
            _plant([member])
        elif key in self._gathering:
            self._gathering[key].append(member)
        else:
            self._gathering[key] = [member]
            watched(self._gather(key), self._fail)
        try:
            await member.ready.wait()
            yield member
        except (grpc.RpcError, asyncio.CancelledError):
            member.avoid = member.avoid or member.leads  # whoever fails as a leader does not lead again at once
            raise
        finally:
            if member.tree is not None:
                member.tree.leave(member)
            else:
                self._gathering[key].remove(member)
            if member.avoid:
                self._avoided[address] = time.monotonic() + AVOID_SECONDS

    async def _gather(self, key: Key) -> None:
        """Makes a tree of those that came in time."""
        await asyncio.sleep(GATHER_SECONDS)
        if members := self._gathering.pop(key):
            _plant(members)


def _plant(members: list[Member]) -> None:
    tree, members[0].leads = Tree(members), True
    for member in members:
        member.tree = tree
        member.ready.set()


def _may_be_named(member: Member) -> bool:
    """One name that is none (dns:..., ipv4:..., an interface behind a %) would have the leader refuse the version."""
    try:
        addresses.check(pb.Relay(**member.process._asdict()))
    except ValueError:
        return False
    return True


def _children(index: int, count: int) -> range:
    return range(FAN_OUT * index + 1, min(count, FAN_OUT * index + FAN_OUT + 1))


def _relay(members: list[Member], index: int) -> pb.Relay:
    further = [_relay(members, child) for child in _children(index, len(members))]
    return pb.Relay(**members[index].process._asdict(), relays=further)


NO_TREE = Tree([])  # of a stream that nobody passes on
