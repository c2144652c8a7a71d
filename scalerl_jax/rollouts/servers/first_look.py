"""One status of each server before anything is computed: what can never become a fleet is said at once.

Compiling an update takes minutes, and the fleet is met after it. A server that is not there yet, or fails in a way that
may pass, is left to that meeting (candidates.py), which asks again; here a run ends only where every address answers,
and none could ever be used.
"""

import concurrent.futures
import time
from collections.abc import Callable, Sequence

import grpc

from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract import security
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.rollouts.errors import FleetError, ProbeError
from scalerl_jax.rollouts.servers.client import SURE_AFTER

_AT_ONCE = 32
_PAUSE_SECONDS = 0.25


def look(
    addresses: Sequence[str],
    credentials: security.Credentials,
    check: Callable[[str, pb.StatusReply], None],
    *,
    seconds: float,
) -> None:
    """check: raises ProbeError where a server with that status is none for this run. seconds: for a status.

    Raises FleetError, one line, where none of the servers can be used, whatever happens.
    """

    def why_not(address: str) -> str:
        with security.connect_here(address, credentials) as channel:
            return _why_not(address, Stub(channel), credentials, check, seconds)

    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="first-look") as pool:
        found = list(pool.map(why_not, addresses))
    if all(found):
        more = {1: "", 2: "; nor can the other one be used"}
        raise FleetError(found[0] + more.get(len(found), f"; nor can one of the {len(found) - 1} others be used"))


def _why_not(
    address: str,
    stub: Stub,
    credentials: security.Credentials,
    check: Callable[[str, pb.StatusReply], None],
    seconds: float,
) -> str:
    """Why the server can never be used; empty: it may be."""
    why = ""
    for _ in range(SURE_AFTER):  # a process that ends closes the connections half made to it, too
        try:
            status = stub.Status(pb.StatusRequest(), timeout=seconds)
        except grpc.RpcError as error:
            why = security.refusal(error, credentials)
            if not why:
                return ""
            time.sleep(_PAUSE_SECONDS)
            continue
        if status is None:
            return ""
        try:
            check(address, status)
        except ProbeError as error:
            return str(error)
        return ""
    return f"rollout server {address}: {why}"
