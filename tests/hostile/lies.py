"""What a faulty server may do otherwise than a genuine one, as seen on the wire; the base of every lie is the truth.

    Lie           one faulty server: its three calls, each given the genuine one to lean on
    LieInterceptor   puts a Lie between gRPC and a real RolloutService

A lie begins when the server has delivered `after` completions for training, or long after its first probe, since a
trainer may ask others for all it needs; probes are always answered truly, or else hardly any lie would get past the
meeting.
"""

import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from scalerl_jax.contract import chunks
from scalerl_jax.contract import rollout_pb2 as pb

Context = Any  # grpc.aio.ServicerContext, or what stands for it
Generate = Callable[[pb.GenerateRequest, Context], Awaitable[None]]
Push = Callable[[Context], Awaitable[None]]


class Lie:
    after = 4  # completions delivered for training, before it begins
    patience = 30.0  # seconds after the first probe

    def __init__(self) -> None:
        self.delivered = 0
        self.probed_at = math.inf

    @property
    def lies(self) -> bool:
        return self.delivered >= self.after or time.monotonic() > self.probed_at + self.patience

    async def status(self, reply: pb.StatusReply, context: Context) -> pb.StatusReply | bytes:
        """What is answered instead of `reply`, which is true."""
        return reply

    async def generate(self, request: pb.GenerateRequest, context: Context, genuine: Generate) -> None:
        await genuine(request, context)

    async def push(self, context: Context, genuine: Push) -> None:
        await genuine(context)


class Around:
    """A call's context, but for what a subclass does otherwise."""

    def __init__(self, context: Context):
        self.context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self.context, name)


class _Counting(Around):
    """Counts what goes out for training."""

    def __init__(self, context: Context, lie: Lie):
        super().__init__(context)
        self._lie = lie

    async def write(self, message: pb.Completion | bytes) -> None:
        await self.context.write(message)
        self._lie.delivered += 1


class LieInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self, lie: Lie):
        self._lie = lie

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler, lie = await continuation(handler_call_details), self._lie
        method = handler_call_details.method.rpartition("/")[2]
        if handler is None or method not in ("Status", "Generate", "PushWeights"):
            return handler
        codecs = {"request_deserializer": handler.request_deserializer, "response_serializer": _serialize}

        async def status(request: pb.StatusRequest, context: Context) -> pb.StatusReply | bytes:
            return await lie.status(await handler.unary_unary(request, context), context)

        async def generate(request: pb.GenerateRequest, context: Context) -> None:
            if not request.group_id.startswith("train/"):
                lie.probed_at = min(lie.probed_at, time.monotonic())
                await handler.unary_stream(request, context)
                return
            counting = _Counting(context, lie)
            await (lie.generate(request, counting, handler.unary_stream) if lie.lies else genuine(request, counting))

        async def genuine(request: pb.GenerateRequest, context: Context) -> None:
            await handler.unary_stream(request, context)

        async def push(_: object, context: Context) -> None:
            await lie.push(context, lambda mine: handler.stream_stream(None, mine))

        if method == "Status":
            return grpc.unary_unary_rpc_method_handler(status, **codecs)
        if method == "Generate":
            return grpc.unary_stream_rpc_method_handler(generate, **codecs)
        return grpc.stream_stream_rpc_method_handler(
            push, request_deserializer=chunks.from_bytes, response_serializer=_serialize
        )


def _serialize(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
