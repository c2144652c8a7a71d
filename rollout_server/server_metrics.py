"""Prometheus metrics of a generator: its status (StatusReply of rollout.proto), under names that begin with PREFIX.

Each request asks the event loop, so a server whose loop is stuck answers 503, and one that has ended does not answer.
"""

import asyncio
from collections.abc import Iterable

from rollout_server.service import RolloutService
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.system.metrics_endpoint import Family, MetricsEndpoint

PREFIX = "scalerl_generator_"
ANSWER_SECONDS = 5.0  # for the event loop to return its status

# Field of StatusReply -> (name, description). Counters run from the start of the process.
GAUGES = {
    "slots": ("slots", "Completions sampled at once."),
    "busy_slots": ("busy_slots", "Completions being sampled."),
    "queue_capacity": ("queue_capacity", "Completions that may wait for a slot."),
    "queued": ("queued", "Completions that wait for a slot."),
    "devices": ("devices", "Devices of the engine."),
    "up_seconds": ("up_seconds", "Since the start of the process."),
}
COUNTERS = {
    "sampled_tokens": ("sampled_tokens", "Tokens sampled."),
    "forced_tokens": ("forced_tokens", "Tokens of interruptions, fed and not sampled."),
    "prefill_tokens": ("prefill_tokens", "Tokens of prompts fed."),
    "reused_tokens": ("reused_tokens", "Tokens of prompts not fed again, since the turn before had."),
    "busy_seconds": ("busy_seconds", "Time in which at least one slot was decoding."),
    "pause_seconds": ("pause_seconds", "Time in which decoding stood still for new weights."),
    "versions_applied": ("versions_applied", "Versions of the weights taken."),
    "chunks_refused": ("chunks_refused", "Chunks of weights with a wrong checksum."),
}
INFO = ("engine", "server_id", "compute_dtype", "sync_dtype", "head_precision")


def families(status: pb.StatusReply) -> Iterable[Family]:
    for kind, fields in (("gauge", GAUGES), ("counter", COUNTERS)):
        for field, (name, says) in fields.items():
            yield PREFIX + name, says, kind, (), {(): float(getattr(status, field))}
    yield PREFIX + "step", "Step of the weights held.", "gauge", (), {(): float(status.version.step)}
    values = tuple(str(getattr(status, name)) for name in INFO)
    yield PREFIX.removesuffix("_"), "What the generator is.", "info", INFO, {values: 1.0}


def tell(service: RolloutService, host: str, port: int) -> MetricsEndpoint:
    """Serves metrics until the process ends. Call it on the event loop. Raises ValueError as MetricsEndpoint does."""
    loop = asyncio.get_running_loop()

    async def status() -> pb.StatusReply:
        return service.status()

    def collect() -> Iterable[Family]:
        return list(families(asyncio.run_coroutine_threadsafe(status(), loop).result(ANSWER_SECONDS)))

    return MetricsEndpoint(collect, host=host, port=port)
