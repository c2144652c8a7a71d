"""What goes wrong between an engine and its client on purpose, so that trainers can be tested against it.

    Fault(kind, after, value)     from the time on that the process has sent `after` completions

    delay             every completion comes `value` seconds late
    duplicate         every completion is sent twice
    reorder           the completions of a call come last one first, at its end
    truncated_stream  the last completion of a call is left out, and the call ends well
    stale_version     completions name a version older than any
    nan_logprobs      the first log-prob of every completion is NaN
    wrong_group       completions name a group that nobody asked for
    corrupt_chunk     a bit of every chunk of weights is flipped when it comes for the first time

Log-probs that keep the contract and are not those of the policy (sampled tokens; never above 0):

    shifted_logprobs  `value` is added to each
    noisy_logprobs    a draw from N(0, value^2) is added to each
    flat_logprobs     each is `value`
    copied_logprobs   each is that of the completion before, repeated where that one is shorter
    random_tokens     the tokens are drawn anew from the ids up to the completion's largest; the log-probs stay

Status that claims what cannot be:

    wrong_tokenizer   another tokenizer's fingerprint
    nan_status        busy_seconds is NaN
    many_devices      `value` devices
    many_seconds      busy and up for `value` seconds
    many_tokens       `value` sampled tokens
    many_slots        `value` slots
    no_slots          no slot and no queue

The service knows nothing of it: the faults are done to the messages, in a gRPC interceptor, and go with every engine.
Crash and hang are the replay engine's own; a process frozen or killed is the test's business.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np

from rollout_server.guard import CallContext
from scalerl_jax.contract import codec, rpc
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.chunks import Chunk

ON_LOGPROBS = "nan_logprobs shifted_logprobs noisy_logprobs flat_logprobs copied_logprobs random_tokens".split()
ON_COMPLETIONS = ("delay", "duplicate", "reorder", "truncated_stream", "stale_version", "wrong_group", *ON_LOGPROBS)
# What a kind says in which fields of a status; None: the fault's value.
CLAIMS: dict[str, tuple[tuple[str, ...], Any]] = {
    "wrong_tokenizer": (("tokenizer_fingerprint",), "another tokenizer"),
    "nan_status": (("busy_seconds",), float("nan")),
    "many_devices": (("devices",), None),
    "many_seconds": (("busy_seconds", "up_seconds"), None),
    "many_tokens": (("sampled_tokens",), None),
    "many_slots": (("slots",), None),
    "no_slots": (("slots", "queue_capacity"), 0),
}
KINDS = (*ON_COMPLETIONS, *CLAIMS, "corrupt_chunk")
# Kinds that take a value, and what it is.
VALUES = {
    "delay": "seconds",
    "shifted_logprobs": "nats",
    "noisy_logprobs": "nats",
    "flat_logprobs": "nats",
    "many_devices": "number",
    "many_seconds": "seconds",
    "many_tokens": "number",
    "many_slots": "number",
}
SIGNED = ("shifted_logprobs", "flat_logprobs")


@dataclasses.dataclass(frozen=True)
class Fault:
    kind: str
    after: int = 0  # completions sent
    value: float = 0.0  # in the unit of VALUES


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
        unsigned = numbers[: 1 if kind in SIGNED else 2]
        if len(numbers) != 1 + (kind in VALUES) or min(map(float, unsigned)) < 0:
            form = f"{kind}:after" + (f":{VALUES[kind]}" if kind in VALUES else "")
            raise ValueError(f"{part}: is not {form}, numbers from 0 on")
    return faults


class FaultInterceptor(grpc.aio.ServerInterceptor):
    """Does the faults to what goes in and out of the service."""

    def __init__(self, faults: Sequence[Fault]):
        self._faults = {fault.kind: fault for fault in faults}
        self.told = 0  # completions that the service has sent
        self.draws = np.random.default_rng(0)
        self.before = np.zeros(1, np.float32)  # log-probs of the completion before

    def on(self, kind: str) -> Fault | None:
        """The fault, if it happens now."""
        fault = self._faults.get(kind)
        return fault if fault is not None and self.told >= fault.after else None

    async def intercept_service(
        self, continuation: rpc.Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.rpartition("/")[2]
        if handler is None or method not in ("Generate", "Status", "PushWeights"):
            return handler

        async def serve(request: Any, context: grpc.aio.ServicerContext) -> Any:
            if method == "Status":
                reply = await handler.unary_unary(request, context)
                claim(reply, self)
                return reply
            if method == "PushWeights":
                return await handler.stream_stream(request, _Chunks(context, self))
            faulty = _Completions(context, self)
            await handler.unary_stream(request, faulty)
            return await faulty.end()

        codecs = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        return rpc.handler(handler.request_streaming, handler.response_streaming, serve, **codecs)


def claim(reply: pb.StatusReply, faults: FaultInterceptor) -> None:
    """Does to a status what is due now."""
    for kind, (fields, value) in CLAIMS.items():
        if fault := faults.on(kind):
            for field in fields:
                claimed = fault.value if value is None else value
                setattr(reply, field, type(getattr(reply, field))(claimed))


def distort(message: pb.Completion, faults: FaultInterceptor) -> None:
    """Does to a completion's tokens and log-probs what is due now."""
    if not any(faults.on(kind) for kind in ON_LOGPROBS):
        return
    tokens, logprobs = codec.decode_ids(message.token_ids), codec.decode_floats(message.logprobs)
    sampled = np.ones(len(tokens), bool)
    for span in message.forced:
        sampled[span.start : span.end] = False
    own = logprobs.copy()
    if fault := faults.on("shifted_logprobs"):
        logprobs = logprobs + np.float32(fault.value)
    if fault := faults.on("noisy_logprobs"):
        logprobs = logprobs + fault.value * faults.draws.normal(size=len(logprobs))
    if fault := faults.on("flat_logprobs"):
        logprobs = np.full_like(logprobs, fault.value)
    if faults.on("copied_logprobs"):
        logprobs = np.resize(faults.before, len(logprobs))
    faults.before = own
    logprobs = np.where(sampled, np.minimum(logprobs, 0), 0).astype(np.float32)
    if faults.on("nan_logprobs"):
        logprobs[0] = np.nan
    if faults.on("random_tokens"):
        sampled[-1] = False  # it may be the one that it stopped at
        drawn = faults.draws.integers(0, tokens.max() + 1, size=len(tokens), dtype=np.int32)
        message.token_ids = codec.encode_ids(np.where(sampled, drawn, tokens))
    message.logprobs = codec.encode_floats(logprobs)


class _Completions(CallContext):
    """What a Generate call writes."""

    def __init__(self, context: grpc.aio.ServicerContext, faults: FaultInterceptor):
        super().__init__(context)
        self._faults = faults
        self._held: list[pb.Completion] = []

    async def write(self, message: pb.Completion) -> None:
        on = self._faults.on
        distort(message, self._faults)
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


class _Chunks(CallContext):
    """What a PushWeights call reads."""

    def __init__(self, context: grpc.aio.ServicerContext, faults: FaultInterceptor):
        super().__init__(context)
        self._faults = faults
        self._seen: set[int] = set()

    async def read(self) -> Any:
        message = await self._context.read()
        if not isinstance(message, Chunk) or message.index in self._seen or not self._faults.on("corrupt_chunk"):
            return message
        self._seen.add(message.index)
        data = bytearray(message.data)
        data[0] ^= 4
        return dataclasses.replace(message, parts=(data,))
