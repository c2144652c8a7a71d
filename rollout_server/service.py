"""The rollout contract over an engine: what contract/rollout.proto promises, on grpc.aio.

    RolloutServer    a port with RolloutService, health and reflection behind it, from start to stop
    RolloutService   the four calls:

        Status        counters of the engine and of this file
        Generate      one pump task per call moves completions from the engine to the call's outbox; ending the pump
                      frees the slots, whatever the client does or does not read
        PushWeights   header -> WeightStore.check -> chunks into the staging buffer -> commit -> engine.load
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

from rollout_server.contract import codec, rollout_pb2_grpc
from rollout_server.contract import rollout_pb2 as pb
from rollout_server.contract.limits import SERVER_OPTIONS
from rollout_server.contract.security import OPEN, Access
from rollout_server.engines.engine import Engine, QueueFull, WrongVersion
from rollout_server.weight_store import Staging, WeightStore

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Rollout"].full_name

# Score calls that may wait for the engine at once: each holds a whole sequence.
MAXIMUM_SCORES = 8

# Calls beyond those that can hold a slot or a place: status, health, pushes, scores.
SPARE_CALLS = 64

# How long a push that is over goes on reading, and dropping, what its client still sends.
DRAIN_SECONDS = 10.0

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
    def __init__(self, engine: Engine):
        self.server_id = uuid.uuid4().hex
        self._engine = engine
        self._store = WeightStore(engine.info, engine.weight_buffer)
        self._calls: dict[tuple[int, str, int], _Call] = {}  # by the name of each completion they were asked for
        self._receiving: object | None = None  # the ticket of the push that may write to the store
        self._receiving_version = codec.Version(0, 0)  # what it brings
        self._applying: asyncio.Task[float] | None = None
        self._scores = 0
        self._versions_applied = 0
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
            versions_applied=self._versions_applied,
            chunks_refused=self._store.chunks_refused,
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
        ticket = object()  # of this call: the one in self._receiving may go on
        try:
            reply = pb.WeightReply(applied=await self._receive(ticket, context))
        except ValueError as error:
            log.warning("weights refused: %s", error)
            reply = pb.WeightReply(refused=str(error))
        finally:
            if self._receiving is ticket:
                self._receiving = None
        await context.write(reply)
        # A call that ends under a client's write loses the reply that explains it, so the client ends it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while await context.read() is not grpc.aio.EOF:
                    pass

    async def _receive(self, ticket: object, context: grpc.aio.ServicerContext) -> pb.WeightReply.Applied:
        """Raises ValueError where the version is refused; the weights are then as they were."""
        message = await context.read()
        if message is grpc.aio.EOF or message.WhichOneof("kind") != "header":
            raise ValueError("the first message is not a header")
        header = message.header
        target = codec.version_from_proto(header.target)

        def still_welcome() -> None:
            if self._receiving is not ticket:
                raise ValueError(f"another push of step {self._receiving_version.step} took its place")

        # 1. The whole header is checked, and the newest of those that want to send goes on.
        self._store.check(header, self._engine.status().version)
        if self._receiving is not None and target < self._receiving_version:
            raise ValueError(f"step {self._receiving_version.step}, which is newer, is being received")
        self._receiving, self._receiving_version = ticket, target

        # 2. The buffer is the engine's until the version before this one is applied.
        while self._applying is not None:
            await asyncio.wait({self._applying})
            still_welcome()
        self._store.check(header, self._engine.status().version)

        # 3. Chunks, in any order, until commit and the last of them are there.
        staging, committed = self._store.stage(header), False
        while not (committed and staging.complete):
            message = await context.read()
            still_welcome()
            if message is grpc.aio.EOF:
                raise ValueError(f"the stream ended with {staging.waiting} chunks missing, commit {committed}")
            kind = message.WhichOneof("kind")
            if kind == "chunk":
                again = [] if staging.put(message.chunk) else [message.chunk.index]
            elif kind == "commit":
                committed, again = True, staging.ask()
            else:
                raise ValueError(f"a {kind} in the middle of a version")
            for index in again:
                await context.write(pb.WeightReply(resend=index))

        # 4. The engine takes it. From here on the client's going away changes nothing: all tensors or none.
        self._receiving = None
        self._applying = asyncio.create_task(self._apply(staging))
        pause = await asyncio.shield(self._applying)
        return pb.WeightReply.Applied(version=header.target, staging_seconds=staging.seconds, pause_seconds=pause)

    async def _apply(self, staging: Staging) -> float:
        """Seconds that decoding stood still."""
        try:
            tensors = staging.tensors()
            pause = await self._engine.load(staging.target, tensors, dict.fromkeys(tensors))
        finally:
            self._applying = None
        self._versions_applied += 1
        return pause

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
        self.engine, self.service = engine, RolloutService(engine)
        self._checker = health.aio.HealthServicer()
        calls = engine.info.slots + engine.info.queue_capacity + SPARE_CALLS
        self._server = grpc.aio.server(
            interceptors=[*access.interceptors(), *interceptors],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=calls,
        )
        rollout_pb2_grpc.add_RolloutServicer_to_server(self.service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._checker, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        if access.credentials is None:
            self.port: int = self._server.add_insecure_port(f"{host}:{port}")
        else:
            self.port = self._server.add_secure_port(f"{host}:{port}", access.credentials)

    async def start(self) -> None:
        await self._checker.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
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
