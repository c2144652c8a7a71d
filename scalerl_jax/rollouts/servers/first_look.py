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
        asked = [pool.submit(why_not, address) for address in addresses]
        for one in concurrent.futures.as_completed(asked):
            if not one.result():  # one is enough
                pool.shutdown(wait=False, cancel_futures=True)
                return
    more = {1: "", 2: "; nor can the other one be used"}
    rest = more.get(len(asked), f"; nor can one of the {len(asked) - 1} others be used")
    raise FleetError(asked[0].result() + rest)


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
            if status is not None:
                check(address, status)
            return ""
        except ProbeError as error:
            return str(error)
        except grpc.RpcError as error:
            if not (why := security.refusal(error, credentials)):
                return ""
        time.sleep(_PAUSE_SECONDS)
    return f"rollout server {address}: {why}"
