"""What the client of one server asks of the fleet and tells it; all of it on the fleet's event loop."""

import dataclasses
from collections.abc import Callable
from typing import Any

from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.rollouts.group_buffer import GroupBuffer, RolloutRequest


@dataclasses.dataclass(frozen=True)
class ServerEvents:
    """What the parts of one client ask of the fleet and tell it."""

    arrived: Callable[[GroupBuffer, RolloutRequest, codec.Completion, float], None]  # seconds since it was asked for
    returned: Callable[[GroupBuffer, RolloutRequest, bool], None]
    changed: Callable[[], None]  # look whether there is something to do
    rejected: Callable[[str], None]  # the reason
    event: Callable[[str, dict[str, Any]], None]
    # A status; whether the time since the one before was evaluation's; whether what lies before it is not known.
    observe: Callable[[pb.StatusReply, bool, bool], None]
    fail: Callable[[BaseException], None]  # a fault of ours
