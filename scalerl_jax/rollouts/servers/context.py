"""What all server clients of one fleet share."""

import dataclasses
import functools

from scalerl_jax.config import FleetConfig
from scalerl_jax.contract import codec, security
from scalerl_jax.environments import Row
from scalerl_jax.rollouts.incarnation import Incarnation
from scalerl_jax.rollouts.requests import Requests
from scalerl_jax.rollouts.servers.events import ServerEvents
from scalerl_jax.rollouts.servers.offences import Records
from scalerl_jax.rollouts.servers.validate import validate
from scalerl_jax.rollouts.weights.publisher import Publisher


@dataclasses.dataclass(frozen=True)
class ClientContext:
    """vocabulary: token ids are below it; 0: not known. probe_prompts: (row, completions)."""

    config: FleetConfig
    requests: Requests
    publisher: Publisher
    events: ServerEvents
    incarnation: Incarnation
    probe_prompts: tuple[tuple[Row, int], ...]
    credentials: security.Credentials = security.PLAIN
    vocabulary: int = 0
    records: Records = dataclasses.field(default_factory=Records)

    def probe_requests(self, address: str, step: int, *, pinned: bool) -> list[tuple[Row, codec.GroupRequest]]:
        """What the server there is asked for to be compared, with version `step`, or a later one if not pinned."""
        incarnation = self.incarnation.value
        probe = functools.partial(self.requests.probe, address, incarnation=incarnation, version=step, pinned=pinned)
        return [(row, probe(row, samples=samples)) for row, samples in self.probe_prompts]

    def validate(self, completion: codec.Completion, request: codec.GroupRequest) -> None:
        """Raises ValueError on a completion that breaks the contract."""
        newest = self.publisher.latest
        assert newest is not None  # nothing is asked of a server before it holds a version
        validate(completion, request, newest=newest, vocabulary=self.vocabulary)
