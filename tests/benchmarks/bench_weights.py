"""What bringing a version of the weights to a generator costs: bytes, encoding, transfer, decode stall, latency.

    python -m tests.benchmarks.bench_weights --part=encode|stream|stall|bytes [--size=3m|10m|30m] [--repeats=9]

encode  the trainer's work per version: comparison and digests on the device, finds to the host, encoding. Pin it to a
        core with taskset to get GB/s per core. 1 % of the weights differ. Beside it what the server does: unpacking,
        writing into its host copy, digests of all of it.
stream  a dense version over loopback gRPC into a server process, against as many bytes over a raw TCP socket between
        two processes, in turn; and beside them what gRPC alone takes for messages of that size.
stall   a JAX engine that decodes in all its slots, in this process, behind real gRPC: the longest time without a new
        token while a version comes in, less that of a usual chunk, dense and sparse (the trainer and the loading of
        the version share the cores with the decoder); and the time from the optimizer's step to the first token that
        the new policy sampled.
bytes   reads the metrics of a run of scalerl-train: --run=WORKDIR, bytes of each delta relative to the dense version,
        and the share of weights that changed, over updates --from to --to.

Medians. GB are of bfloat16 weights, 2 bytes each.
"""

import asyncio
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from launch.commands import restart_with_tuned_malloc
from rollout_server.engines.engine import EngineInfo, EngineOptions
from rollout_server.engines.jax.engine import JaxEngine
from rollout_server.service import RolloutServer
from rollout_server.weight_store import WeightStore
from scalerl_jax.contract import codec
from scalerl_jax.contract.limits import SERVER_OPTIONS
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.contract.security import connect
from scalerl_jax.learner.weight_snapshots import WeightSnapshots
from scalerl_jax.model import init_params
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.sharding import make_mesh
from scalerl_jax.model.tensor_layout import hf_tensors
from scalerl_jax.rollouts.weights import payload as payload_lib
from scalerl_jax.rollouts.weights.publisher import Incarnation, Publisher
from tests.support.replay.engine import ReplayEngine
from tests.support.replay.scripts import Scripted

FLAGS = flags.FLAGS
flags.DEFINE_enum("part", None, ["encode", "stream", "stall", "bytes"], "what is measured", required=True)
flags.DEFINE_enum("size", "10m", ["3m", "10m", "30m"], "which decoder")
flags.DEFINE_integer("repeats", 9, "timed repeats")
flags.DEFINE_string("run", "", "bytes: the workdir of a run")
flags.DEFINE_integer("from", 100, "bytes: the first update")
flags.DEFINE_integer("to", 200, "bytes: the last update")

CHANGED = 0.01  # share of the weights that a version changes
INCARNATION = 1
SIZES = {
    "3m": DecoderConfig(
        vocab_size=2048, hidden_size=224, layers=4, heads=7, kv_heads=7, head_dim=32, intermediate_size=640
    ),
    "10m": DecoderConfig(
        vocab_size=4096, hidden_size=320, layers=6, heads=8, kv_heads=4, head_dim=40, intermediate_size=1024
    ),
    "30m": DecoderConfig(
        vocab_size=8192, hidden_size=512, layers=8, heads=8, kv_heads=4, head_dim=64, intermediate_size=1536
    ),
}


def median(values: list[float]) -> float:
    return statistics.median(values)


class Weights:
    """Parameters that change a little from version to version, and what the trainer makes of them."""

    def __init__(self, config: DecoderConfig):
        self.config, self.step = config, -1
        self._mesh = make_mesh(fsdp=1, devices=jax.devices()[:1])
        self._copies = WeightSnapshots(config, self._mesh, share=1 / 16)
        self.params = init_params(config, jax.random.key(0), self._mesh)
        self.bytes = 2 * sum(int(np.prod(shape)) for shape in hf_tensors(config).values())

        def change(params: Any, key: jax.Array) -> Any:
            leaves, tree = jax.tree.flatten(params)
            keys = jax.random.split(key, len(leaves))
            new = [jnp.where(jax.random.uniform(k, x.shape) < CHANGED, x * 1.01, x) for k, x in zip(keys, leaves)]
            return jax.tree.unflatten(tree, new)

        self._change = jax.jit(change)

    def update(self) -> None:
        """In place of the optimizer's step; returns when it is done."""
        self.params = jax.block_until_ready(self._change(self.params, jax.random.key(self.step + 100)))

    def version(self):
        self.step += 1
        return self._copies.snapshot(self.params, self.step)


# -------------------------------------------------------------------------------------------------------- encode


def encode(config: DecoderConfig) -> None:
    weights = Weights(config)
    print(f"{weights.bytes / 1e6:.1f} MB of weights, {len(os.sched_getaffinity(0))} cores")
    engine = replay(config)
    store = WeightStore(engine.info, engine.weight_buffer)
    first = weights.version()
    digests = first.delta().digests
    take(store, payload_lib.dense(codec.Version(INCARNATION, 0), first.tensors(), digests, chunk_bytes=2**20))
    device, host, server, sizes, whole = [], [], [], [], []
    for _ in range(FLAGS.repeats + 1):
        weights.update()
        began = time.perf_counter()
        version = weights.version()
        jax.block_until_ready(version._found)
        compared = time.perf_counter()
        delta = version.delta()
        device.append(compared - began)
        host.append(time.perf_counter() - compared)
        payload = payload_lib.sparse(INCARNATION, delta, chunk_bytes=2**20)
        server.append(take(store, payload))
        sizes.append(payload.bytes / weights.bytes)
        began = time.perf_counter()
        version.tensors()
        whole.append(time.perf_counter() - began)
    device, host, server, whole = device[1:], host[1:], server[1:], whole[1:]
    both = [a + b for a, b in zip(device, host)]
    print(f"comparison and digests   {median(device) * 1e3:8.1f} ms  {weights.bytes / median(device) / 1e9:6.2f} GB/s")
    print(f"finds to host, encoding  {median(host) * 1e3:8.1f} ms  {weights.bytes / median(host) / 1e9:6.2f} GB/s")
    print(f"together                 {median(both) * 1e3:8.1f} ms  {weights.bytes / median(both) / 1e9:6.2f} GB/s")
    print(f"whole version to host    {median(whole) * 1e3:8.1f} ms  {weights.bytes / median(whole) / 1e9:6.2f} GB/s")
    print(f"server, in its host copy {median(server) * 1e3:8.1f} ms  {weights.bytes / median(server) / 1e9:6.2f} GB/s")
    print(f"bytes relative to dense  {median(sizes):8.2%}    ({CHANGED:.0%} changed)")


def take(store: WeightStore, payload: payload_lib.Payload) -> float:
    """Seconds that a server takes once all chunks are there."""
    staging = store.stage(payload.header)
    for index in range(payload.chunks):
        assert staging.put(payload.chunk(index))
    began = time.perf_counter()
    store.finish(staging)
    seconds = time.perf_counter() - began
    store.held = staging.target
    return seconds


def replay(config: DecoderConfig) -> ReplayEngine:
    return ReplayEngine(
        Scripted(vocabulary=64),
        EngineInfo("replay", 8, 16, maximum_tokens=4096, tensors=hf_tensors(config), sync_dtype="bfloat16"),
    )


# -------------------------------------------------------------------------------------------------------- stream


def stream(config: DecoderConfig) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receiver, args=(FLAGS.size, theirs), daemon=True)
    process.start()
    grpc_port, bare_port, tcp_port = ours.recv()
    rng = np.random.default_rng(0)
    tensors = {name: rng.integers(0, 2**15, shape).astype(np.uint16) for name, shape in hf_tensors(config).items()}
    typed = {name: tensor.view(jnp.bfloat16) for name, tensor in tensors.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    flat = b"".join(tensor.tobytes() for tensor in tensors.values())
    grpc_seconds, bare_seconds, tcp_seconds = [], [], []
    cut = [flat[start : start + 2**20] for start in range(0, size, 2**20)]

    async def bare(channel: Any) -> float:
        began = time.perf_counter()
        call = channel.stream_unary("/bare/Take")()
        for data in cut:
            await call.write(data)
        await call.done_writing()
        assert int(await call) == size
        return time.perf_counter() - began

    async def push(publisher: Publisher, stub: Stub, step: int) -> float:
        publisher.publish(step, typed)
        return (await publisher.push(stub, step, timeout=60)).transfer_seconds

    async def run() -> None:
        publisher = Publisher(incarnation=Incarnation(INCARNATION), chunk_bytes=2**20)
        async with connect(f"127.0.0.1:{grpc_port}") as channel, connect(f"127.0.0.1:{bare_port}") as plain:
            stub = Stub(channel)
            for step in range(FLAGS.repeats + 1):
                grpc_seconds.append(await push(publisher, stub, step))
                bare_seconds.append(await bare(plain))
                tcp_seconds.append(await asyncio.to_thread(_send, tcp_port, flat))
        publisher.close()

    asyncio.run(run())
    process.kill()
    ratios = [tcp / ours for tcp, ours in zip(tcp_seconds[1:], grpc_seconds[1:])]
    print(f"{size / 1e6:.1f} MB, chunks of 1 MiB, CRC-32 and a copy into the host buffer on the gRPC side")
    print(f"gRPC     {size / median(grpc_seconds[1:]) / 1e9:6.2f} GB/s (header to last good chunk)")
    print(f"bare     {size / median(bare_seconds[1:]) / 1e9:6.2f} GB/s (gRPC alone: bytes that nobody looks at)")
    print(f"raw TCP  {size / median(tcp_seconds[1:]) / 1e9:6.2f} GB/s")
    print(f"ratio    {median(ratios):6.2f}  (smallest {min(ratios):.2f}, largest {max(ratios):.2f})")


def _send(port: int, data: bytes) -> float:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        began = time.perf_counter()
        connection.sendall(data)
        assert connection.recv(1) == b"."
        return time.perf_counter() - began


def _receiver(size: str, pipe: Any) -> None:
    """A process with three servers: of the contract; of a method /bare/Take, which counts the bytes that come and drops
    them; and one that reads from a socket into a buffer and does no more."""
    config = SIZES[size]
    wanted = 2 * sum(int(np.prod(shape)) for shape in hf_tensors(config).values())
    buffer = bytearray(wanted)

    def read(listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                view, got = memoryview(buffer), 0
                while got < wanted:
                    got += connection.recv_into(view[got:])
                connection.sendall(b".")

    async def take(messages: Any, _: grpc.aio.ServicerContext) -> bytes:
        return str(sum([len(message) async for message in messages])).encode()

    async def run() -> None:
        server, bare = RolloutServer(replay(config)), grpc.aio.server(options=SERVER_OPTIONS)
        method = grpc.stream_unary_rpc_method_handler(take)
        bare.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", {"Take": method}),))
        port = bare.add_insecure_port("127.0.0.1:0")
        await bare.start()
        await server.start()
        listener = socket.create_server(("127.0.0.1", 0))
        pipe.send((server.port, port, listener.getsockname()[1]))
        await asyncio.to_thread(read, listener)

    asyncio.run(run())


# --------------------------------------------------------------------------------------------------------- stall


def stall(config: DecoderConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_file({n: np.zeros(s, np.float32) for n, s in hf_tensors(config).items()}, f"{folder}/model.safetensors")
        with open(f"{folder}/config.json", "w") as file:
            json.dump(config.to_hf(), file)
        vocabulary = {f"t{i}": i for i in range(config.vocab_size)}
        Tokenizer(WordLevel(vocabulary, unk_token="t0")).save(f"{folder}/tokenizer.json")
        options = EngineOptions(
            folder, slots=32, queue=64, maximum_tokens=512, compute_dtype="float32", sync_dtype="bfloat16"
        )
        engine = JaxEngine(options)
    asyncio.run(_stall(config, engine))


async def _stall(config: DecoderConfig, engine: JaxEngine) -> None:
    weights, server = Weights(config), RolloutServer(engine)
    await server.start()
    publisher = Publisher(incarnation=Incarnation(INCARNATION), chunk_bytes=2**20, delta_bytes=2**30)
    watch = Watch(engine)
    loop = asyncio.get_running_loop()
    async with connect(f"127.0.0.1:{server.port}") as channel:
        stub = Stub(channel)
        rows: dict[str, list[tuple[float, float, float, float]]] = {"dense": [], "sparse": []}
        decoding: list[asyncio.Task] = []
        for number in range(2 * (FLAGS.repeats + 1)):
            await asyncio.to_thread(weights.update)
            began = time.perf_counter()
            version = await asyncio.to_thread(weights.version)
            publisher.deltas.record(version.step, version.delta)
            publisher.publish(version.step, version.tensors)
            kind = "dense" if number % 2 == 0 else "sparse"
            base = version.step - 1 if kind == "sparse" else None
            report = await publisher.push(stub, version.step, base=base, timeout=60)
            assert report.sparse == (kind == "sparse")
            first = await loop.run_in_executor(None, watch.next_token)
            ended = time.perf_counter()
            if decoding:
                rows[kind].append(
                    (watch.longest(began, ended), watch.usual(began), report.pause_seconds, first - began)
                )
            if not decoding:
                decoding = [asyncio.create_task(_decode(stub, i, engine.info.slots // 4)) for i in range(4)]
            await asyncio.sleep(1.0)
        for task in decoding:
            task.cancel()
        await asyncio.gather(*decoding, return_exceptions=True)
    watch.close()
    publisher.close()
    await server.stop()
    print(
        f"{weights.bytes / 1e6:.1f} MB of weights, 32 slots, chunks of 8 steps, "
        f"{len(os.sched_getaffinity(0))} cores for both sides"
    )
    for kind, measured in rows.items():
        longest, usual, pause, first = ([row[i] for row in measured[1:]] for i in range(4))
        ratio = median([a / b - 1 for a, b in zip(longest, usual)])
        print(f"{kind}: pause {median(pause) * 1e6:.0f} us, optimizer step to first token {median(first) * 1e3:.1f} ms")
        print(
            f"  longest time without a token {median(longest) * 1e3:.1f} ms, a usual chunk {median(usual) * 1e3:.1f} ms"
        )
        print(f"  stall: what the longest is above a usual one, in chunks {ratio:.2f}")


async def _decode(stub: Stub, worker: int, completions: int) -> None:
    number = 0
    while True:
        request = codec.GroupRequest(
            incarnation=INCARNATION,
            group_id=f"train/{worker}-{number}",
            prompt=np.arange(2, 10, dtype=np.int32),
            completions=tuple(codec.CompletionRequest(i, seed=number) for i in range(completions)),
            sampling=codec.Sampling(answer_budget=400),
        )
        async for _ in stub.Generate(codec.request_to_proto(request), timeout=300):
            pass
        number += 1


class Watch:
    """When the engine's count of sampled tokens rises, seen by a process-wide clock about every half millisecond."""

    def __init__(self, engine: JaxEngine):
        self._engine, self._rises, self._open = engine, [], True
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        before = self._engine.status().sampled_tokens
        while self._open:
            now = self._engine.status().sampled_tokens
            if now != before:
                self._rises.append(time.perf_counter())
                before = now
            time.sleep(0.0005)

    def next_token(self) -> float:
        """Waits for the next chunk's tokens; when they were there."""
        have, deadline = len(self._rises), time.perf_counter() + 1
        while len(self._rises) == have and time.perf_counter() < deadline:
            time.sleep(0.0005)
        return time.perf_counter()

    def longest(self, began: float, ended: float) -> float:
        """Between two rises, one of them in the time given."""
        rises = [at for at in self._rises if at >= began - 1]
        return max(b - a for a, b in itertools.pairwise(rises) if b > began and a < ended)

    def usual(self, before: float) -> float:
        rises = [at for at in self._rises if before - 0.6 < at < before]
        return statistics.median(b - a for a, b in itertools.pairwise(rises))

    def close(self) -> None:
        self._open = False
        self._thread.join()


# --------------------------------------------------------------------------------------------------------- bytes


def read_bytes(_: DecoderConfig) -> None:
    with open(os.path.join(FLAGS.run, "metrics.jsonl")) as file:
        rows = [json.loads(line) for line in file]
    chosen = [row for row in rows if FLAGS["from"].value <= row["step"] <= FLAGS.to and row["pushes"]["deltas"]]
    dense = chosen[0]["pushes"]["dense_bytes"] / chosen[0]["pushes"]["deltas"]
    print(f"{len(chosen)} rows, {dense / 1e6:.2f} MB dense")
    shares = [row["pushes"]["delta_bytes"] / row["pushes"]["dense_bytes"] for row in chosen]
    changed = [row["pushes"]["changed"] / row["pushes"]["elements"] for row in chosen]
    applied = sum(row["pushes"]["applied"] for row in chosen)
    print(f"bytes per update relative to dense: median {median(shares):.2%}, largest {max(shares):.2%}")
    print(f"share of weights that changed: median {median(changed):.2%}")
    print(f"pushes that were deltas: {sum(row['pushes']['sparse'] for row in chosen)} of {applied}")


PARTS: dict[str, Callable[[DecoderConfig], None]] = {
    "encode": encode, "stream": stream, "stall": stall, "bytes": read_bytes
}  # fmt: skip


def main(argv: list[str]) -> None:
    del argv
    PARTS[FLAGS.part](SIZES[FLAGS.size])


if __name__ == "__main__":
    restart_with_tuned_malloc()  # as the commands do
    app.run(main)
