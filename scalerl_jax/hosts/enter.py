"""How scalerl-train finds out whether it is one host of several, and joins them."""

import contextlib
import sys
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.hosts import rank as ranks
from scalerl_jax.hosts.follow import follow
from scalerl_jax.hosts.join import joined, leave_alone
from scalerl_jax.hosts.lead import Lead
from scalerl_jax.hosts.link import FirstHost, OtherHost
from scalerl_jax.rollouts.servers import credentials as credentials_lib
from scalerl_jax.rollouts.servers.discovery import Discovery
from scalerl_jax.system import signals


def enter(config: Config, flags: Any, stack: contextlib.ExitStack) -> Lead | None:
    """None if there is one host. On the first of several: its Lead of the others, until the stack is closed.

    Another host follows the first one's commands and exits with its exit code (SystemExit). To be called before
    anything queries JAX's devices. Raises ValueError, one line, if the hosts cannot join.

    flags: those of scalerl-train.
    """
    rank = ranks.find(flags.hosts, coordinator=flags.coordinator, count=flags.host_count, index=flags.host_index)
    if rank is None:
        return None
    print(rank, file=sys.stderr, flush=True)
    if not flags.servers:
        raise ValueError("--servers: needed with several hosts, each of which sends its part of the weights to them")
    if rank.first:
        first = stack.enter_context(joined(rank, config, flags.workdir))
        assert isinstance(first, FirstHost)
        return Lead(first)
    credentials = credentials_lib.read(config.fleet, name=Discovery(flags.servers).name)
    with joined(rank, config, flags.workdir) as other:
        assert isinstance(other, OtherHost)
        signals.be(signals.HOLD)
        code = follow(rank=rank, other=other, workdir=flags.workdir, credentials=credentials)
    if code:
        leave_alone(code)
    raise SystemExit(code)
