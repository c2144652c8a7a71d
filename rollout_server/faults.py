"""What goes wrong between an engine and its client on purpose, so that trainers can be tested against it.

    Fault(kind, after, value)     from the time on that the process has sent `after` completions

    delay             every completion comes `value` seconds late
    duplicate         every completion is sent twice
    reorder           the completions of a call come last one first, at its end
    truncated_stream  the last completion of a call is left out, and the call ends well
    stale_version     completions name a version older than any
    nan_logprobs      the first log-prob of every completion is NaN
    wrong_group       completions name a group that nobody asked for
    wrong_tokenizer   Status gives another tokenizer's fingerprint
    corrupt_chunk     a bit of every chunk of weights is flipped when it comes for the first time

The service knows nothing of it: the faults are done to the messages, in a gRPC interceptor, and go with every engine.
Crash and hang are the replay engine's own; a process frozen or killed is the test's business.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import numpy as np

from rollout_server.contract import codec
from rollout_server.contract import rollout_pb2 as pb
from rollout_server.contract.chunks import Chunk

ON_COMPLETIONS = "delay duplicate reorder truncated_stream stale_version nan_logprobs wrong_group".split()
KINDS = (*ON_COMPLETIONS, "wrong_tokenizer", "corrupt_chunk")


@dataclasses.dataclass(frozen=True)
class Fault:
    kind: str
    after: int = 0  # completions sent
    value: float = 0.0  # delay: seconds


def parse(text: str) -> list[Fault]:
    """Reads kind:after or kind:after:value, several with commas between. Raises ValueError naming the part."""
    faults = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        kind, *numbers = part.split(":")
        if kind not in KINDS:
            raise ValueError(f"{part}: is not one of {', '.join(KINDS)}")
        try:
            faults.append(Fault(kind, int(numbers[0]), *(float(number) for number in numbers[1:])))
        except (IndexError, TypeError, ValueError):
            raise ValueError(f"{part}: is not kind:after or kind:after:value") from None
        if len(numbers) != (2 if kind == "delay" else 1) or min(map(float, numbers)) < 0:
            raise ValueError(f"{part}: is not {kind}:after{':seconds' if kind == 'delay' else ''}, numbers from 0 on")
    return faults


class FaultInterceptor(grpc.aio.ServerInterceptor):
    """Does the faults to what goes in and out of the service."""

    def __init__(self, faults: Sequence[Fault]):
        self._faults = {fault.kind: fault for fault in faults}
        self.told = 0  # completions that the service has sent

    def on(self, kind: str) -> Fault | None:
        """The fault, if it happens now."""
        fault = self._faults.get(kind)
        return fault if fault is not None and self.told >= fault.after else None

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.rpartition("/")[2]
        if handler is None or method not in ("Generate", "Status", "PushWeights"):
            return handler
        codecs = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if method == "Generate":

            async def generate(request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
                faulty = _Completions(context, self)
                await handler.unary_stream(request, faulty)
                await faulty.end()

            return grpc.unary_stream_rpc_method_handler(generate, **codecs)
        if method == "Status":

            async def status(request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.StatusReply:
                reply = await handler.unary_unary(request, context)
                if self.on("wrong_tokenizer"):
                    reply.tokenizer_fingerprint = "another tokenizer"
                return reply

            return grpc.unary_unary_rpc_method_handler(status, **codecs)

        async def push(messages: object, context: grpc.aio.ServicerContext) -> None:
            await handler.stream_stream(messages, _Chunks(context, self))

        return grpc.stream_stream_rpc_method_handler(push, **codecs)


class _Context:
    """A call's context, but for what the subclass does otherwise."""

    def __init__(self, context: grpc.aio.ServicerContext, faults: FaultInterceptor):
        self._context, self._faults = context, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class _Completions(_Context):
    """What a Generate call writes."""

    def __init__(self, context: grpc.aio.ServicerContext, faults: FaultInterceptor):
        super().__init__(context, faults)
        self._held: list[pb.Completion] = []

    async def write(self, message: pb.Completion) -> None:
        on = self._faults.on
        if on("nan_logprobs"):
            logprobs = codec.decode_floats(message.logprobs)
            logprobs[0] = np.nan
            message.logprobs = codec.encode_floats(logprobs)
        if on("stale_version"):
            for span in message.versions:
                span.step = -1
        if on("wrong_group"):
            message.group_id += "-another"
        delay, reorder, truncated = on("delay"), on("reorder"), on("truncated_stream")
        copies = 2 if on("duplicate") else 1
        self._faults.told += 1
        if delay:
            await asyncio.sleep(delay.value)
        for _ in range(copies):
            if reorder or truncated:
                self._held.append(message)
                if truncated and not reorder and len(self._held) > 1:
                    await self._context.write(self._held.pop(0))
            else:
                await self._context.write(message)

    async def end(self) -> None:
        """The service is through with the call, and has ended it well."""
        if self._held and self._faults.on("truncated_stream"):
            self._held.pop()
        for message in reversed(self._held):
            await self._context.write(message)


class _Chunks(_Context):
    """What a PushWeights call reads."""

    def __init__(self, context: grpc.aio.ServicerContext, faults: FaultInterceptor):
        super().__init__(context, faults)
        self._seen: set[int] = set()

    async def read(self) -> Any:
        message = await self._context.read()
        if not isinstance(message, Chunk) or message.index in self._seen or not self._faults.on("corrupt_chunk"):
            return message
        self._seen.add(message.index)
        data = bytearray(message.data)
        data[0] ^= 4
        return dataclasses.replace(message, parts=(data,))
