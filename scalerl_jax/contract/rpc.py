"""Both ends of the service, with chunks of weights read and written as chunks.py does it; all else as generated."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from scalerl_jax.contract import chunks, rollout_pb2_grpc
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.limits import MAXIMUM_MESSAGE_BYTES

SERVICE = pb.DESCRIPTOR.services_by_name["Rollout"].full_name


class Stub(rollout_pb2_grpc.RolloutStub):
    """The client's end, on a channel of grpc.aio. A reply that cannot be decoded comes as None."""

    def __init__(self, channel: Any):
        super().__init__(channel)
        path = f"/{SERVICE}/"
        self.Status = channel.unary_unary(
            path + "Status",
            request_serializer=pb.StatusRequest.SerializeToString,
            response_deserializer=_decoder(pb.StatusReply),
        )
        self.Generate = channel.unary_stream(
            path + "Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=_decoder(pb.Completion),
        )
        self.Score = channel.unary_unary(
            path + "Score",
            request_serializer=pb.ScoreRequest.SerializeToString,
            response_deserializer=_decoder(pb.ScoreReply),
        )
        self.PushWeights = channel.stream_stream(
            path + "PushWeights",
            request_serializer=chunks.to_bytes,
            response_deserializer=_decoder(pb.WeightReply),
        )


def _decoder(kind: Any) -> Callable[[bytes], Any]:
    """gRPC makes None of what a decoder cannot read, too, but logs a traceback for each."""

    def decode(data: bytes) -> Any:
        try:
            return kind.FromString(data)
        except DecodeError:
            return None

    return decode


class _Generated:
    """Takes down what the generated code would register: which of two handlers counts differs between gRPC releases."""

    def __init__(self, servicer: Any):
        self.handlers: dict[str, grpc.RpcMethodHandler] = {}
        rollout_pb2_grpc.add_RolloutServicer_to_server(servicer, self)

    def add_generic_rpc_handlers(self, _: Any) -> None:
        """The same handlers once more."""

    def add_registered_method_handlers(self, _: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
        self.handlers.update(handlers)


def add_to_server(servicer: Any, server: grpc.aio.Server, *, longest_header: int = MAXIMUM_MESSAGE_BYTES) -> None:
    """longest_header: bytes of the longest message to PushWeights that is no chunk."""
    handlers = _Generated(servicer).handlers
    handlers["PushWeights"] = grpc.stream_stream_rpc_method_handler(
        servicer.PushWeights,
        request_deserializer=functools.partial(chunks.from_bytes, longest=longest_header),
        response_serializer=pb.WeightReply.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_registered_method_handlers(SERVICE, handlers)
