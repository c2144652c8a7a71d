"""The rollout contract (contract/rollout.proto) over an engine, on grpc.aio.

    RolloutServer    a port with RolloutService, health and reflection behind it, from start to stop
    serve_metrics    Status for Prometheus, over HTTP
    RolloutService   the five calls (behind guard.py, which every call of every service passes):

        Status        counters of the engine and of this file
        Generate      one pump task per call moves completions from the engine to the call's outbox; ending the pump
                      frees the slots, whatever the client does or does not read
        PushWeights   weight_push.py
        Score, ScoreMany   a bounded number at a time, see `bounds`; a ScoreMany call scores its sequences one by one

Everything runs on one event loop, so the state below needs no locks; what matters is that nothing is awaited between a
check and the act that relies on it. A client's sizes are checked before any work in proportion to them. An error that
is not in the contract is a bug: it is logged, and the client gets UNKNOWN.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rollout_server.activity import Activity
from rollout_server.connections import Connections
from rollout_server.engines.engine import (
    AskedAgain,
    Engine,
    EngineInfo,
    QueueFull,
    WrongVersion,
    check_places,
    check_score,
)
from rollout_server.guard import OTHERS, Bound, CallContext, Guard, QuietLog
from rollout_server.weight_push import WeightReceiver
from scalerl_jax.contract import codec, limits, rollout_pb2_grpc, rpc
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.limits import SERVER_OPTIONS
from scalerl_jax.contract.security import OPEN, Access

if TYPE_CHECKING:
    from scalerl_jax.system.metrics_endpoint import Family, MetricsEndpoint

# Score calls that may wait for the engine at once, and ScoreMany calls likewise: each holds one sequence in memory.
MAXIMUM_SCORES = 8

# A ScoreMany call that sends nothing for so long ends, to free its place.
SCORE_STALL_SECONDS = 60.0

# Parts of versions that may be received at once: those of the trainer's version, and as many that are about to end.
MAXIMUM_PUSHES = 2 * limits.MAXIMUM_PARTS

# Status calls, which are quick, and Generate calls beyond those that can get a slot or a place: these are refused.
SPARE_CALLS = 64

# How often the engine's state is checked.
WATCH_SECONDS = 1.0

# How long pending writes to clients may still take when the server stops.
STOP_GRACE_SECONDS = 0.5

# Fields of a status reply that have the same name in EngineInfo or EngineStatus.
_SAME = {field.name for field in pb.StatusReply.DESCRIPTOR.fields} - {"version"}

# An engine's exception -> the status code that Generate answers with.
REFUSALS: dict[type[BaseException], grpc.StatusCode] = {
    AskedAgain: grpc.StatusCode.ABORTED,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    WrongVersion: grpc.StatusCode.FAILED_PRECONDITION,
    ValueError: grpc.StatusCode.INVALID_ARGUMENT,
}

log = logging.getLogger(__name__)


class RolloutService(rollout_pb2_grpc.RolloutServicer):
    def __init__(self, engine: Engine):
        self.server_id = uuid.uuid4().hex
        self._engine = engine
        self.activity = Activity()
        self._weights = WeightReceiver(engine, server_id=self.server_id, activity=self.activity)
        self._calls: set[asyncio.Task[None]] = set()  # the pump of every Generate call
        self._stopping = False
        self._began = time.monotonic()

    async def stop(self) -> None:
        """Ends every Generate call with UNAVAILABLE; later ones are refused."""
        self._stopping = True
        for pump in list(self._calls):
            await _cancel(pump)

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.StatusReply:
        self.activity.called(context.peer())
        return self.status()

    def status(self) -> pb.StatusReply:
        """The current answer to Status. Call it on the event loop. Raises RuntimeError if the engine has failed."""
        info, status = self._engine.info, self._engine.status()
        return pb.StatusReply(
            **{name: value for name, value in (vars(info) | vars(status)).items() if name in _SAME},
            server_id=self.server_id,
            engine=info.name,
            version=codec.version_to_proto(status.version),
            up_seconds=time.monotonic() - self._began,
            versions_applied=self._weights.versions_applied,
            chunks_refused=self._weights.store.chunks_refused,
        )

    # ------------------------------------------------------------------------------------------------ Generate

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        try:
            check_places(request.group_id, len(request.completions), self._engine.info)  # before they are decoded
            group = codec.request_from_proto(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        self._engine.end_older(group)  # even if this one is refused
        if self._stopping:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
        if group.pinned_step is not None and self._weights.late:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a later version has waited for too long")
        if group.incarnation == self._engine.status().version.incarnation:
            self.activity.welcome(group.incarnation, context.peer())
        # At most one item per completion requested, and the final None.
        outbox: asyncio.Queue[codec.Completion | None] = asyncio.Queue()
        pump = asyncio.create_task(self._pump(group, outbox))
        # However the pump ends, also if it is cancelled before it starts.
        pump.add_done_callback(lambda _: outbox.put_nowait(None))
        self._calls.add(pump)
        try:
            while (completion := await outbox.get()) is not None:
                self.activity.completed(group.incarnation)
                await context.write(codec.completion_to_proto(completion))
            if self._stopping:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
            try:
                await pump  # raises what the engine raised
            except tuple(REFUSALS) as error:
                await context.abort(next(REFUSALS[kind] for kind in type(error).mro() if kind in REFUSALS), str(error))
        finally:  # cancellation too: the client disconnected, or its deadline passed
            self._calls.discard(pump)
            await _cancel(pump)

    async def _pump(self, group: codec.GroupRequest, outbox: asyncio.Queue[codec.Completion | None]) -> None:
        async with contextlib.aclosing(self._engine.generate(group)) as completions:
            async for completion in completions:
                outbox.put_nowait(completion)

    # --------------------------------------------------------------------------------------------- PushWeights

    async def PushWeights(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        await self._weights.push(context)

    # --------------------------------------------------------------------------------------------------- Score

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreReply:
        try:
            reply = await self._scored(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return reply

    async def ScoreMany(self, request_iterator: object, context: CallContext) -> None:
        try:
            while True:
                async with asyncio.timeout(SCORE_STALL_SECONDS):
                    request = await context.read()
                if request is grpc.aio.EOF:
                    return
                await context.write(await self._scored(request))
        except ValueError as error:
            await context.drain()
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TimeoutError:
            why = f"no request has come for {SCORE_STALL_SECONDS:g} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, why)

    async def _scored(self, request: pb.ScoreRequest) -> pb.ScoreReply:
        """Scores one sequence. Raises ValueError where it can never be served."""
        sequence = codec.score_request_from_proto(request)
        check_score(sequence, self._engine.info)
        return codec.scores_to_proto(*await self._engine.score(sequence))


class RolloutServer:
    """An engine behind a port, on the running event loop."""

    def __init__(
        self,
        engine: Engine,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        access: Access = OPEN,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ):
        """Binds the port (0: a free one). Raises RuntimeError where it cannot listen there.

        access: who may call. interceptors: further interceptors, after the token check and the guard.
        """
        self.engine, self.service = engine, RolloutService(engine)
        self._watching: asyncio.Task[RuntimeError] | None = None
        self._checker, self._quiet = _Health(), QuietLog(log)
        bounded = bounds(engine.info)
        guard = Guard(bounded, lambda peer: self._connections.let_in(peer))
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_lost_answer)
        self._server = grpc.aio.server(
            interceptors=[*access.interceptors(), guard, *interceptors],
            options=SERVER_OPTIONS,
            # Four more for health, reflection and later services, each with the bound OTHERS.
            maximum_concurrent_rpcs=sum(bound.calls for bound in bounded.values()) + 4 * OTHERS.calls,
        )
        rpc.add_to_server(self.service, self._server, longest_header=longest_header(engine.info))
        health_pb2_grpc.add_HealthServicer_to_server(self._checker, self._server)
        names = (rpc.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        bare = ":" in host and not host.startswith("[")  # of IPv6
        address = f"[{host}]:{port}" if bare else f"{host}:{port}"
        if access.credentials is None:
            self.port: int = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, access.credentials)
        self._connections = Connections(self.port)

    async def start(self) -> None:
        await self._checker.set(rpc.SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> RuntimeError:
        """Logs the server's activity; returns the engine's error when it can never serve again."""
        while True:
            try:
                self.service.activity.tick(self.engine.status())
            except RuntimeError as error:
                return error
            if closed := self._connections.tick():
                self._quiet.log("unknown", logging.WARNING, "%d connections closed that showed no call", closed)
            await asyncio.sleep(WATCH_SECONDS)

    async def failure(self) -> RuntimeError:
        """Waits until the engine can never serve again; returns its error."""
        return await (self._watching or self._watch())

    async def stop(self) -> None:
        """Stops without finishing calls: health is NOT_SERVING, calls end with UNAVAILABLE, the engine is closed."""
        if self._watching is not None:
            self._watching.cancel()
        await self._checker.enter_graceful_shutdown()
        await self.service.stop()
        await self._server.stop(STOP_GRACE_SECONDS)
        self._connections.close()
        await self.engine.close()


def bounds(info: EngineInfo) -> dict[str, Bound]:
    """Limits of each method: its calls at a time, and message sizes with a margin for future fields."""
    places, token_bytes = info.slots + info.queue_capacity, 4 * info.maximum_tokens
    methods = {
        "Status": Bound(SPARE_CALLS, 2**12),
        "Generate": Bound(places + SPARE_CALLS, 2**16 + token_bytes + 64 * places),
        **dict.fromkeys(("Score", "ScoreMany"), Bound(MAXIMUM_SCORES, 2**12 + token_bytes * (1 + info.maximum_top_k))),
        "PushWeights": Bound(MAXIMUM_PUSHES, limits.MAXIMUM_REQUEST_BYTES),
    }
    return {f"/{rpc.SERVICE}/{name}": bound for name, bound in methods.items()}


def _is_no_lost_answer(record: logging.LogRecord) -> bool:
    """Filters the traceback that gRPC logs where a connection broke while an answer was sent: nothing is left to do."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core")


def longest_header(info: EngineInfo) -> int:
    """Most bytes of the header of a version of this model, or of a part of one."""
    tensors = sum(len(name.encode()) + 32 + 12 * len(shape) + 64 for name, shape in info.tensors.items())
    block = sum(8 + 2 * sum(size.bit_length() // 7 + 1 for size in shape) for shape in info.tensors.values())
    return 2**12 + tensors + limits.MAXIMUM_BLOCKS * block


class _Health(health.aio.HealthServicer):
    """Health servicer with a fixed set of services: gRPC's own keeps state forever for every service name requested."""

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        if request.service not in ("", rpc.SERVICE):
            request = health_pb2.HealthCheckRequest(service="no such service")
        await super().Watch(request, context)


async def _cancel(task: asyncio.Task[None]) -> None:
    """Cancels a task and waits for its end. Its exception is left to the code that awaits it."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# ------------------------------------------------------------------------------------------------------- metrics

METRIC_PREFIX = "scalerl_generator_"
ANSWER_SECONDS = 5.0  # for the event loop to return its status

# Field of StatusReply, which is the metric's name behind the prefix -> description. Counters run from the start of the
# process.
GAUGES = {
    "slots": "Completions sampled at once.",
    "busy_slots": "Completions being sampled.",
    "queue_capacity": "Completions that may wait for a slot.",
    "queued": "Completions that wait for a slot.",
    "devices": "Devices of the engine.",
    "up_seconds": "Since the start of the process.",
}
COUNTERS = {
    "sampled_tokens": "Tokens sampled.",
    "forced_tokens": "Tokens of interruptions, fed and not sampled.",
    "prefill_tokens": "Tokens of prompts fed.",
    "reused_tokens": "Tokens of prompts not fed again, since the turn before had.",
    "busy_seconds": "Time in which at least one slot was decoding.",
    "pause_seconds": "Time in which decoding stood still for new weights.",
    "versions_applied": "Versions of the weights taken.",
    "chunks_refused": "Chunks of weights with a wrong checksum.",
}
METRIC_LABELS = ("engine", "server_id", "compute_dtype", "sync_dtype", "head_precision")


def families(status: pb.StatusReply) -> Iterable["Family"]:
    for kind, fields in (("gauge", GAUGES), ("counter", COUNTERS)):
        for field, description in fields.items():
            yield METRIC_PREFIX + field, description, kind, (), {(): float(getattr(status, field))}
    yield METRIC_PREFIX + "step", "Step of the weights held.", "gauge", (), {(): float(status.version.step)}
    values = tuple(str(getattr(status, name)) for name in METRIC_LABELS)
    yield METRIC_PREFIX.removesuffix("_"), "What the generator is.", "info", METRIC_LABELS, {values: 1.0}


def serve_metrics(service: RolloutService, host: str, port: int) -> "MetricsEndpoint":
    """Serves metrics until the process ends. Call it on the event loop. Raises ValueError as MetricsEndpoint does.

    Each request asks the event loop, so a server whose loop is stuck answers 503, and one that has ended does not
    answer.
    """
    from scalerl_jax.system.metrics_endpoint import MetricsEndpoint  # for servers with --metrics_port alone

    loop = asyncio.get_running_loop()

    async def status() -> pb.StatusReply:
        return service.status()

    def collect() -> Iterable["Family"]:
        return list(families(asyncio.run_coroutine_threadsafe(status(), loop).result(ANSWER_SECONDS)))

    return MetricsEndpoint(collect, host=host, port=port)
