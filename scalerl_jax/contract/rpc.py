"""Both ends of the service, as the schema lists its methods, with chunks of weights encoded by chunks.py."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from scalerl_jax.contract import chunks, rollout_pb2_grpc
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.limits import MAXIMUM_MESSAGE_BYTES

_ROLLOUT = pb.DESCRIPTOR.services_by_name["Rollout"]
SERVICE = _ROLLOUT.full_name

# What an interceptor calls next: the interceptors after it, then the service.
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]]


class Stub(rollout_pb2_grpc.RolloutStub):
    """The client's end, on a channel of grpc.aio. A reply that cannot be decoded is returned as None."""

    def __init__(self, channel: Any):
        super().__init__(channel)
        for method in _ROLLOUT.methods:
            make = getattr(channel, kind(method.client_streaming, method.server_streaming))
            call = make(
                f"/{SERVICE}/{method.name}",
                request_serializer=chunks.to_bytes,
                response_deserializer=_decoder(getattr(pb, method.output_type.name)),
            )
            setattr(self, method.name, call)


def kind(client_streaming: bool, server_streaming: bool) -> str:
    """gRPC's name for methods of that kind: unary_unary, unary_stream, ..."""
    return "_".join("stream" if streaming else "unary" for streaming in (client_streaming, server_streaming))


def handler(client_streaming: bool, server_streaming: bool, serve: Callable[..., Any], **codecs: Any) -> Any:
    """A grpc.RpcMethodHandler of that kind; codecs: request_deserializer, response_serializer."""
    return getattr(grpc, f"{kind(client_streaming, server_streaming)}_rpc_method_handler")(serve, **codecs)


def _decoder(message: Any) -> Callable[[bytes], Any]:
    """Decodes to None what cannot be decoded. gRPC would do that too, but log a traceback for each."""

    def decode(data: bytes) -> Any:
        try:
            return message.FromString(data)
        except DecodeError:
            return None

    return decode


def add_to_server(servicer: Any, server: grpc.aio.Server, *, longest_header: int = MAXIMUM_MESSAGE_BYTES) -> None:
    """longest_header: bytes of the longest message to PushWeights that is not a chunk."""
    handlers = {}
    for method in _ROLLOUT.methods:
        read = getattr(pb, method.input_type.name).FromString
        if method.name == "PushWeights":
            read = functools.partial(chunks.from_bytes, longest=longest_header)
        handlers[method.name] = handler(
            method.client_streaming,
            method.server_streaming,
            getattr(servicer, method.name),
            request_deserializer=read,
            response_serializer=chunks.to_bytes,
        )
    # Both: which of the two counts differs between gRPC releases.
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_registered_method_handlers(SERVICE, handlers)
