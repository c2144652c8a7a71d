"""The rollout contract over an engine: what contract/rollout.proto promises, on grpc.aio.

    RolloutServer    a port with RolloutService, health and reflection behind it, from start to stop
    RolloutService   the four calls:

        Status        counters of the engine and of this file
        Generate      one pump task per call moves completions from the engine to the call's outbox; ending the pump
                      frees the slots, whatever the client does or does not read
        PushWeights   weight_push.py
        Score         a bounded number at a time

Everything runs on one event loop, so the state below needs no locks; what matters is that nothing is awaited between a
check and the act that relies on it. An error that is not in the contract is a bug: it reaches the log and the client as
UNKNOWN.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rollout_server.contract import codec, rollout_pb2_grpc, rpc
from rollout_server.contract import rollout_pb2 as pb
from rollout_server.contract.limits import SERVER_OPTIONS
from rollout_server.contract.security import OPEN, PLAIN, Access, Credentials
from rollout_server.engines.engine import Engine, QueueFull, WrongVersion
from rollout_server.weight_push import WeightReceiver

# Score calls that may wait for the engine at once: each holds a whole sequence.
MAXIMUM_SCORES = 8

# Calls beyond those that can hold a slot or a place: status, health, pushes, scores.
SPARE_CALLS = 64

# How often the engine is asked whether it still lives.
WATCH_SECONDS = 1.0

# What is being written to a client when the server stops may still go out for so long.
STOP_GRACE_SECONDS = 0.5

log = logging.getLogger(__name__)


class _Call:
    """One Generate call that is being served."""

    def __init__(self) -> None:
        # Holds at most one item per completion asked for, and the None that ends it.
        self.outbox: asyncio.Queue[codec.Completion | None] = asyncio.Queue()
        self.pump: asyncio.Task[None] | None = None
        self.ended: tuple[grpc.StatusCode, str] | None = None  # why the server ended it

    async def end(self, code: grpc.StatusCode, why: str) -> None:
        """Frees the call's slots, then lets its client know."""
        self.ended = self.ended or (code, why)
        assert self.pump is not None
        await _cancel(self.pump)


class RolloutService(rollout_pb2_grpc.RolloutServicer):
    def __init__(self, engine: Engine, passing: Credentials | None = PLAIN):
        """passing: what servers that weights are passed on to are shown; None: they are not passed on."""
        self.server_id = uuid.uuid4().hex
        self._engine = engine
        self._weights = WeightReceiver(engine, passing)
        self._calls: dict[tuple[int, str, int], _Call] = {}  # by the name of each completion they were asked for
        self._scores = 0
        self._stopping = False
        self._began = time.monotonic()

    async def stop(self) -> None:
        """Ends every Generate call with UNAVAILABLE; later ones are refused."""
        self._stopping = True
        for call in set(self._calls.values()):
            await call.end(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.StatusReply:
        info, status = self._engine.info, self._engine.status()
        return pb.StatusReply(
            server_id=self.server_id,
            engine=info.name,
            version=codec.version_to_proto(status.version),
            model_config=info.model_config,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            compute_dtype=info.compute_dtype,
            head_dtype=info.head_dtype,
            head_precision=info.head_precision,
            wire_dtype=info.wire_dtype,
            devices=info.devices,
            slots=info.slots,
            busy_slots=status.busy_slots,
            queue_capacity=info.queue_capacity,
            queued=status.queued,
            maximum_tokens=info.maximum_tokens,
            sampled_tokens=status.sampled_tokens,
            forced_tokens=status.forced_tokens,
            prefill_tokens=status.prefill_tokens,
            up_seconds=time.monotonic() - self._began,
            busy_seconds=status.busy_seconds,
            pause_seconds=status.pause_seconds,
            versions_applied=self._weights.versions_applied,
            chunks_refused=self._weights.store.chunks_refused,
        )

    # ------------------------------------------------------------------------------------------------ Generate

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        try:
            group = codec.request_from_proto(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        names = [(group.incarnation, group.group_id, c.index) for c in group.completions]
        # An older call for one of these completions loses it; its slots are free before the engine is asked again.
        while older := next((self._calls[name] for name in names if name in self._calls), None):
            await older.end(grpc.StatusCode.ABORTED, f"group {group.group_id!r} was asked for again")
            self._forget(older)
        if self._stopping:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
        call = _Call()
        call.pump = asyncio.create_task(self._pump(group, call.outbox))
        self._calls.update(dict.fromkeys(names, call))
        try:
            while (completion := await call.outbox.get()) is not None:
                await context.write(codec.completion_to_proto(completion))
            if call.ended is not None:
                await context.abort(*call.ended)
            try:
                await call.pump  # raises what the engine raised
            except QueueFull as error:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            except WrongVersion as error:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            except ValueError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:  # reached by cancellation too: the client hung up, or its deadline passed
            self._forget(call)
            await _cancel(call.pump)

    async def _pump(self, group: codec.GroupRequest, outbox: asyncio.Queue[codec.Completion | None]) -> None:
        try:
            async with contextlib.aclosing(self._engine.generate(group)) as completions:
                async for completion in completions:
                    outbox.put_nowait(completion)
        finally:
            outbox.put_nowait(None)

    def _forget(self, call: _Call) -> None:
        for name in [name for name, owner in self._calls.items() if owner is call]:
            del self._calls[name]

    # --------------------------------------------------------------------------------------------- PushWeights

    async def PushWeights(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        await self._weights.push(context)

    # --------------------------------------------------------------------------------------------------- Score

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreReply:
        if self._scores >= MAXIMUM_SCORES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._scores} sequences are being scored")
        self._scores += 1
        try:
            token_ids = codec.decode_ids(request.token_ids)
            limit = self._engine.info.maximum_tokens
            if not 0 < len(token_ids) <= limit:
                raise ValueError(f"{len(token_ids)} tokens to score, not within 1 and {limit}")
            logprobs, version = await self._engine.score(token_ids)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._scores -= 1
        return pb.ScoreReply(logprobs=codec.encode_floats(logprobs), version=codec.version_to_proto(version))


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
        """Takes the port (0: a free one). Raises RuntimeError where it cannot listen there.

        access: who may call. interceptors: further ones, behind the one that looks at the token.
        """
        self.engine, self.service = engine, RolloutService(engine, access.passing)
        self._checker = health.aio.HealthServicer()
        calls = engine.info.slots + engine.info.queue_capacity + SPARE_CALLS
        self._server = grpc.aio.server(
            interceptors=[*access.interceptors(), *interceptors],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=calls,
        )
        rpc.add_to_server(self.service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._checker, self._server)
        names = (rpc.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        if access.credentials is None:
            self.port: int = self._server.add_insecure_port(f"{host}:{port}")
        else:
            self.port = self._server.add_secure_port(f"{host}:{port}", access.credentials)

    async def start(self) -> None:
        await self._checker.set(rpc.SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()

    async def failure(self) -> RuntimeError:
        """Returns when the engine can never serve again, with what it says about it."""
        while True:
            try:
                self.engine.status()
            except RuntimeError as error:
                return error
            await asyncio.sleep(WATCH_SECONDS)

    async def stop(self) -> None:
        """Finishes nothing: health says NOT_SERVING, calls end with UNAVAILABLE, the engine is closed."""
        await self._checker.enter_graceful_shutdown()
        await self.service.stop()
        await self._server.stop(STOP_GRACE_SECONDS)
        await self.engine.close()


async def _cancel(task: asyncio.Task[None]) -> None:
    """Returns when the task is over. What it raised stays in it."""
    task.cancel()
    await asyncio.wait({task})
