"""A server in this process that can be made to say anything, over real gRPC; until then it is the service as it is.

    with Liar() as liar:
        liar.status = change            a function of each StatusReply, in place or a new one (bytes: sent as they are;
                                        a code and words: the call ends with them)
        liar.generate = serve           async def serve(request, context, honest): instead of the honest answer; to
                                        anything but the probe
        liar.probe = serve              likewise, to the probe
        liar.push = receive             async def receive(context, honest)
        liar.score = change             a function of each ScoreReply of Score and ScoreMany, and of its request; what
                                        it returns is sent, awaited first if that is possible

The functions run on the liar's own event loop, in its thread.
"""

import asyncio
import collections
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from rollout_server.engines.engine import EngineInfo
from rollout_server.service import RolloutService
from scalerl_jax.contract import chunks
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.limits import SERVER_OPTIONS
from scalerl_jax.contract.rpc import SERVICE
from tests.rollouts.small_trainer import SHAPES, VOCABULARY
from tests.support.replay.engine import ReplayEngine
from tests.support.replay.scripts import Scripted

START_SECONDS = 150.0
BRISK = {"token_seconds": 0.001, "mean_tokens": 12.0}  # of the genuine server beside it


class Liar:
    """Looks like a ReplayServer to the helpers. `calls` counts the calls of each method."""

    def __init__(self, *, slots: int = 8, queue: int = 16, token_seconds: float = 0.0, mean_tokens: float = 12.0):
        self._token_seconds = token_seconds
        self._info = EngineInfo(
            "replay",
            slots,
            queue,
            maximum_tokens=4096,
            tensors=SHAPES,
            tokenizer_fingerprint="replay",
            maximum_top_k=VOCABULARY,
        )
        self._script = Scripted(vocabulary=VOCABULARY, mean_tokens=mean_tokens)
        self.status: Callable[[pb.StatusReply], Any] = lambda reply: reply
        self.generate: Callable[..., Awaitable[None]] = lambda request, context, honest: honest(request, context)
        self.probe = self.generate
        self.push: Callable[..., Awaitable[None]] = lambda context, honest: honest(None, context)
        self.score: Callable[[pb.ScoreReply, pb.ScoreRequest], Any] = lambda reply, request: reply
        self.calls: collections.Counter[str] = collections.Counter()
        self.asked: list[pb.GenerateRequest] = []
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> "Liar":
        self._thread.start()
        assert self._ready.wait(START_SECONDS)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_SECONDS)

    def be_another(self, server_id: str) -> None:
        """From now on it is another process."""
        self.service.server_id = server_id

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001  raised where the test begins
            self._failure = error
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        engine = ReplayEngine(self._script, self._info, decode_chunk=4, token_seconds=self._token_seconds)
        self.service = RolloutService(engine)
        server = grpc.aio.server(options=[*SERVER_OPTIONS, ("grpc.max_send_message_length", -1)])

        async def status(request: pb.StatusRequest, context: Any) -> Any:
            self.calls["Status"] += 1
            said = self.status(await self.service.Status(request, context))
            if isinstance(said, tuple):
                await context.abort(*said)
            return said

        async def generate(request: pb.GenerateRequest, context: Any) -> None:
            self.calls["Generate"] += 1
            self.asked.append(request)
            serve = self.probe if is_probe(request) else self.generate
            await serve(request, context, self.service.Generate)

        async def push(request: Any, context: Any) -> None:
            self.calls["PushWeights"] += 1
            await self.push(context, self.service.PushWeights)

        async def score(request: pb.ScoreRequest, context: Any) -> Any:
            self.calls["scored"] += 1
            said = self.score(await self.service.Score(request, context), request)
            if inspect.isawaitable(said):
                said = await said
            if isinstance(said, tuple):
                await context.abort(*said)
            return said

        async def score_many(requests: Any, context: Any) -> Any:
            self.calls["ScoreMany"] += 1
            async for request in requests:
                yield await score(request, context)

        handlers = {
            "Status": grpc.unary_unary_rpc_method_handler(status, pb.StatusRequest.FromString, _bytes),
            "Generate": grpc.unary_stream_rpc_method_handler(generate, pb.GenerateRequest.FromString, _bytes),
            "Score": grpc.unary_unary_rpc_method_handler(score, pb.ScoreRequest.FromString, _bytes),
            "ScoreMany": grpc.stream_stream_rpc_method_handler(score_many, pb.ScoreRequest.FromString, _bytes),
            "PushWeights": grpc.stream_stream_rpc_method_handler(push, chunks.from_bytes, _bytes),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._ready.set()
        await self._stop.wait()
        await self.service.stop()
        await server.stop(0)
        await engine.close()


def _bytes(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


async def never(request: pb.GenerateRequest, context: Any, honest: Any) -> None:
    """An answer that does not come."""
    await asyncio.Event().wait()


def is_probe(request: pb.GenerateRequest) -> bool:
    return request.group_id.startswith("probe/")
