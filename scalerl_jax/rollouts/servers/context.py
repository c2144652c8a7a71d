"""What all server clients of one fleet share: their callbacks to the fleet, and what servers are checked against."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from scalerl_jax.config import FleetConfig
from scalerl_jax.contract import codec, security
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.environments import Row
from scalerl_jax.rollouts.incarnation import Incarnation
from scalerl_jax.rollouts.requests import Requests, spread_probes
from scalerl_jax.rollouts.servers.offences import Records
from scalerl_jax.rollouts.servers.validate import Routed, validate
from scalerl_jax.rollouts.weights.publisher import Publisher


@dataclasses.dataclass(frozen=True)
class Servers:
    """Where servers are, what credentials they are shown, and what they are checked against when they are met."""

    addresses: Sequence[str]  # host:port of each at the start
    probe_prompts: Sequence[Row]  # that candidates sample for the probe
    # Returns those listed now; called every fleet.discovery_seconds on a separate thread. None: they never change.
    resolve: Callable[[], Sequence[str]] | None = None
    credentials: security.Credentials = security.PLAIN
    vocabulary: int = 0  # of the policy; token ids are below it. 0: not known
    routed: Routed | None = None  # of the policy; None: it has no experts
    # Raises ProbeError on the status of a server that cannot serve this run.
    check: Callable[[str, pb.StatusReply], None] = lambda server, status: None


@dataclasses.dataclass(frozen=True)
class ServerEvents:
    """Callbacks from the parts of one client to the fleet."""

    changed: Callable[[], None]  # there may be something to do
    rejected: Callable[[str], None]  # the reason
    event: Callable[[str, dict[str, Any]], None]
    # A status; whether the time since the previous one was an evaluation's; whether usage before it is not known.
    observe: Callable[[pb.StatusReply, bool, bool], None]
    fail: Callable[[BaseException], None]  # an error of our own


@dataclasses.dataclass(frozen=True)
class ClientContext:
    config: FleetConfig
    requests: Requests
    publisher: Publisher
    events: ServerEvents
    incarnation: Incarnation
    servers: Servers
    probe_completions: int  # that a candidate samples for the probe
    records: Records = dataclasses.field(default_factory=Records)

    def probe_requests(self, address: str, step: int, *, pinned: bool) -> list[tuple[Row, codec.GroupRequest]]:
        """The probe's requests to the server at `address`, for version `step`, or a later one if not pinned."""
        incarnation = self.incarnation.value
        probe = functools.partial(self.requests.probe, address, incarnation=incarnation, version=step, pinned=pinned)
        spread = spread_probes(self.servers.probe_prompts, self.probe_completions)
        return [(row, probe(row, samples=samples)) for row, samples in spread]

    def received(self, message: pb.Completion | None, request: codec.GroupRequest) -> codec.Completion:
        """Decodes and validates a completion. Raises ValueError if it breaks the contract."""
        if message is None:
            raise ValueError("a completion that cannot be decoded")
        completion = codec.completion_from_proto(message)
        newest = self.publisher.latest
        assert newest is not None  # a server gets no requests before it holds a version
        of_policy = self.servers
        validate(completion, request, newest=newest, vocabulary=of_policy.vocabulary, routed=of_policy.routed)
        return completion
