"""Decisions of the trainer's thread about admitted servers: which are dismissed, which completions are requested again.

    dismiss     a process delivered completions that do not count: they are requested again elsewhere, with the same ids
    probe       servers that have groups sample the probe's prompts again during their work, with the version they
                hold; `probed` returns the samples
    evaluation  an evaluation's completions count once the trainer has approved them

Its methods are called by the trainer's thread and run on the fleet's event loop.
"""

from collections.abc import Callable, Collection
from typing import Any

from scalerl_jax.rollouts.evaluation import Evaluations
from scalerl_jax.rollouts.group_buffer import FinishedGroup, GroupBuffer, Process, finished
from scalerl_jax.rollouts.loop_thread import LoopThread, on_loop
from scalerl_jax.rollouts.servers import server_state
from scalerl_jax.rollouts.servers.pool import ServerPool
from scalerl_jax.rollouts.servers.server_state import Probed


class Trust:
    """Args:
    buffer: the groups to train on.
    changed: called when there may be something to request.
    event: as Fleet's on_event: ("parity", {server, found, completions, sent_away}).
    """

    def __init__(
        self,
        thread: LoopThread,
        pool: ServerPool,
        buffer: GroupBuffer,
        evaluations: Evaluations,
        *,
        changed: Callable[[], None],
        event: Callable[[str, dict[str, Any]], None],
    ):
        self._thread, self._pool, self._buffer, self._evaluations = thread, pool, buffer, evaluations
        self._changed, self._event = changed, event

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
        self._event("parity", fields)
        self._changed()
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
            self._changed()
