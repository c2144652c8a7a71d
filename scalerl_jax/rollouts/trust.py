"""Which servers the trainer trusts: admission of new ones, dismissal of admitted ones, approval of evaluations.

    admission   a new server is a candidate, and gets no group before the trainer's thread has admitted it. It has
                sampled with the version that the trainer has reached; the trainer compares its log-probs with the
                policy's, and admits or rejects it. A run ends if no server is left that could be admitted
    dismiss     a process delivered completions that do not count: they are requested again elsewhere, with the same ids
    probe       servers that have groups sample the probe's prompts again during their work, with the version they
                hold; `probed` returns the samples
    evaluation  an evaluation's completions count once the trainer has approved them

`check_servers` asks each server for one status before anything is computed, to fail at once if no fleet is possible.
Compiling an update takes minutes, and the fleet connects only after it. A server that does not answer yet, or fails in
a way that may pass, is left for then; `check_servers` ends a run only if every address answers and none could ever be
used.
"""

import concurrent.futures
import logging
import time
from collections.abc import Callable, Collection, Sequence

import grpc

from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract import security
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.rollouts.evaluation import EvaluationQueue
from scalerl_jax.rollouts.group_buffer import FinishedGroup, GroupBuffer, Process, finished
from scalerl_jax.rollouts.loop_thread import LoopThread, on_loop
from scalerl_jax.rollouts.servers import server_state
from scalerl_jax.rollouts.servers.client import SURE_AFTER
from scalerl_jax.rollouts.servers.pool import ServerPool
from scalerl_jax.rollouts.servers.server_state import ClientContext, Probed
from scalerl_jax.rollouts.servers.validate_status import FleetError, ProbeError

_log = logging.getLogger(__name__)


class Trust:
    """See the module. All of it runs on the fleet's event loop but `wait_for_the_first`, which blocks its caller.

    buffer: the groups to train on. context: `fail` ends the run, `event` gets ("parity", {server, found, completions,
    sent_away}) at each dismissal.
    """

    def __init__(
        self,
        thread: LoopThread,
        pool: ServerPool,
        buffer: GroupBuffer,
        evaluations: EvaluationQueue,
        context: ClientContext,
    ):
        self._thread, self._pool, self._buffer, self._evaluations = thread, pool, buffer, evaluations
        self._context = context
        self._ever_admitted = False
        self._patient_until = 0.0  # from wait_for_the_first() on
        self._held_at: float | None = None  # when a ready batch was last held back for a candidate

    # ---- the trainer's thread: candidates

    def wait_for_the_first(self) -> None:
        """Blocks until one server has answered and the others had time to: our incarnation must exceed
        theirs when the first version is published.

        Raises FleetError if none answers within fleet.connect_seconds, or if authentication fails with each.
        """
        began, fleet = time.monotonic(), self._context.config.fleet
        self._patient_until = began + fleet.connect_seconds
        while True:
            elapsed = time.monotonic() - began
            if self._thread.call(lambda: self._pool.in_state(*server_state.ANSWERING)):
                if elapsed > fleet.status_seconds or self._thread.call(lambda: self._pool.all_tried):
                    return
            elif error := self._thread.call(self._pool.why_unusable, late=elapsed > fleet.connect_seconds):
                raise FleetError(error)
            time.sleep(0.05)

    @on_loop
    def due(self) -> list[Probed]:
        """Candidates to compare now: each has sampled with the version that the trainer has reached."""
        found = self._pool.in_state(server_state.CANDIDATE)
        return [Probed(c.process, c.samples) for c in found if c.samples_step == c.step == self._buffer.trained]

    @on_loop
    def admit(self, server: str) -> None:
        """Lets a candidate have groups. Does nothing if it was lost meanwhile."""
        client = self._pool.named(server)
        if client is not None and client.state == server_state.CANDIDATE:
            self._ever_admitted = True
            client.admit()

    @on_loop
    def reject(self, server: str, why: str) -> None:
        """Rejects a candidate; a new process on the same address may become a candidate again."""
        client = self._pool.named(server)
        if client is not None:
            client.reject(why)

    # ---- the trainer's thread: admitted servers, and evaluations

    @on_loop
    def dismiss(self, process: Process, why: str, numbers: Collection[int] | None = None) -> int:
        """Takes back what the process delivered to training groups `numbers`; None: everything, and it is rejected.

        Returns the number of completions to request again.
        """
        buffers = [self._buffer]
        if numbers is None and self._evaluations.current is not None:
            buffers.append(self._evaluations.current.buffer)
        back = sum(buffer.retract(process, numbers) for buffer in buffers)
        client = self._pool.named(process.address)
        # Another process may have come to its address since.
        if client is not None and client.process == process:
            if numbers is None:
                client.reject(f"server {process.address}: {why}")
            else:
                client.offend("its log-probs are not the policy's", why)
        fields = {"server": process.address, "found": why, "completions": back, "sent_away": numbers is None}
        self._context.event("parity", fields)
        self._context.changed()
        return back

    @on_loop
    def working(self) -> list[Process]:
        """The servers that have groups."""
        return [c.process for c in self._pool.in_state(server_state.ACTIVE)]

    @on_loop
    def probe(self, processes: Collection[Process]) -> None:
        """Asks those of `processes` that have groups to sample for the probe again."""
        for client in self._pool.in_state(server_state.ACTIVE):
            if client.process in processes:
                client.probe_again()

    @on_loop
    def probed(self) -> list[Probed]:
        """The samples from `probe` that arrived since the last call."""
        found = [client for client in self._pool.in_state(server_state.ACTIVE) if client.samples]
        return [Probed(client.process, client.pop_samples()) for client in found]

    @on_loop
    def evaluation(self) -> list[FinishedGroup] | None:
        """The groups of an evaluation that is complete and waits for approval; None if there is none."""
        current = self._evaluations.current
        if current is None or current.approved or not current.buffer.is_ready(0):
            return None
        return [finished(group) for _, group in sorted(current.buffer.ready.items())]

    @on_loop
    def approve_evaluation(self) -> None:
        if self._evaluations.current is not None:
            self._evaluations.current.approved = True
            self._context.changed()

    # ---- the loop

    def begin_wait(self) -> None:
        """The trainer begins to wait for a batch."""
        self._held_at = None

    def holds_batch(self) -> bool:
        """Whether a ready batch waits for a server that is about to be ready. A trainer that is the slower side never
        waits for a batch: without this a candidate would always be one version behind it, and never be admitted."""
        soon = (server_state.UPDATING, server_state.PROBING, server_state.CANDIDATE)
        expected = [c for c in self._pool.in_state(*soon) if c.patience > 0 and not c.unlisted]
        now = time.monotonic()
        for c in expected:
            c.spend_patience(now - (self._held_at or now))
        self._held_at = now if expected else None
        return bool(expected)

    def rejected(self, reason: str) -> None:
        """Ends the run if no server is left. Before the first was admitted it is most likely the user's mistake."""
        if any(c.state != server_state.REJECTED for c in self._pool.clients):
            _log.warning("turned away: %s", reason)
        elif not self._ever_admitted:
            self._context.fail(ProbeError(reason))
        elif self._pool.fixed:
            self._context.fail(FleetError(f"every rollout server was turned away; the last one: {reason}"))
        else:
            _log.warning("turned away: %s; no other one is left", reason)

    def expire(self) -> None:
        """No server was admitted, at least one was rejected, the others do not answer: the run fails."""
        if (
            self._ever_admitted
            or self._pool.in_state(*server_state.ANSWERING)
            or time.monotonic() < self._patient_until
        ):
            return
        for client in self._pool.in_state(server_state.REJECTED):
            others = ", ".join(c.address for c in self._pool.clients if c.state != server_state.REJECTED)
            self._context.fail(ProbeError(f"{client.reason}; and no server answers at {others}"))


_AT_ONCE = 32
_PAUSE_SECONDS = 0.25


def check_servers(
    addresses: Sequence[str],
    credentials: security.Credentials,
    check: Callable[[str, pb.StatusReply], None],
    *,
    seconds: float,
) -> None:
    """check: raises ProbeError if a server with that status cannot serve this run. seconds: timeout of a status.

    Raises FleetError, one line, if none of the servers can ever be used.
    """

    def why_not(address: str) -> str:
        """Why the server can never be used; empty if it may be."""
        why = ""
        with security.connect_here(address, credentials) as channel:
            stub = Stub(channel)
            for _ in range(SURE_AFTER):  # a process that exits closes half-open connections, too
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

    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="first-look") as pool:
        asked = [pool.submit(why_not, address) for address in addresses]
        for one in concurrent.futures.as_completed(asked):
            if not one.result():  # one is enough
                pool.shutdown(wait=False, cancel_futures=True)
                return
    more = {1: "", 2: "; nor can the other one be used"}
    rest = more.get(len(asked), f"; nor can one of the {len(asked) - 1} others be used")
    raise FleetError(asked[0].result() + rest)
