"""docs/how_to/generator_node: a generator in Node, from rollout.proto: it conforms, and a trainer trains with it."""

import asyncio
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import grpc
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tokenizers import models

from rollout_server import health
from scalerl_jax.contract import codec, rpc
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.fingerprint import tokenizer_fingerprint
from scalerl_jax.contract.security import PLAIN, connect
from scalerl_jax.contract.weight_delta import Change, WeightDelta, digest, encode
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.tensor_layout import hf_tensors
from scalerl_jax.rollouts.weights.publisher import Incarnation, Publisher
from scalerl_jax.rollouts.weights.push import FullSyncNeeded
from tests.support.chat_folders import chat_folder
from tests.support.models import random_tensors, toy_decoder, write_folder
from tests.support.paths import ROOT
from tests.support.processes import SECONDS
from tests.support.runs import CONFIG, Run
from tests.support.servers import ServerProcess
from tests.support.tiny_task import write_model, write_task

FOLDER = ROOT / "docs" / "how_to" / "generator_node"
PAGE = ROOT / "docs" / "how_to" / "write_a_generator.md"
PROTO = ROOT / "scalerl_jax" / "contract" / "rollout.proto"
OLDEST = 18  # major version of Node
NO_NETWORK = re.compile(r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ENETUNREACH|ETIMEDOUT|ERR_SOCKET_TIMEOUT")
TEXT = np.array([7, 8, 9, 20, 21, 22, 23], np.int32)


def test_the_page_shows_the_program_as_it_is() -> None:
    assert f"```js\n{(FOLDER / 'generator.js').read_text(encoding='utf-8')}```" in PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of the generator, from a folder with its packages."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("there is no node and npm on PATH")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.removeprefix("v").partition(".")[0]) < OLDEST:
        pytest.skip(f"node is {version.strip()}, the example needs {OLDEST}")
    folder = tmp_path_factory.mktemp("node") / "generator_node"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("node_modules"))
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm has not fetched the example's packages within {SECONDS:.0f} s")
    if done.returncode and (said := NO_NETWORK.search(done.stderr)):
        pytest.skip(f"npm cannot fetch the example's packages: {said[0]}")
    assert done.returncode == 0, done.stderr
    return ["node", str(folder / "generator.js"), f"--proto={PROTO}"]


@pytest.fixture
def start(program: list[str], tmp_path: pathlib.Path) -> Iterator[Callable[..., ServerProcess]]:
    with contextlib.ExitStack() as stack:

        def begin(model: object, *flags: str) -> ServerProcess:
            server = ServerProcess(tmp_path, f"--model={model}", *flags, program=program)
            stack.callback(server.close)
            return server.wait()

        yield begin


@pytest.mark.slow
def test_it_conforms(program: list[str]) -> None:
    """The tests of every engine, as the page says to run them."""
    files = [f"tests/rollout_server/{name}.py" for name in ("test_conformance", "test_conformance_weights")]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env={**alone, "SCALERL_GENERATOR": " ".join([*program, "--steps_from_stdin"])},
        capture_output=True, text=True, check=False, timeout=1700,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    passed, skipped = re.search(r"(\d+) passed, (\d+) skipped", done.stdout).groups()
    # Those that hold up the engine's taking of a version, which is inside of the process.
    assert int(passed) >= 45 and int(skipped) == 2, done.stdout


@pytest.mark.slow
def test_a_trainer_trains_with_it_alone(start: Callable[..., ServerProcess], tmp_path: pathlib.Path) -> None:
    steps = 20
    model = write_model(str(tmp_path / "model"))
    (tmp_path / "task").mkdir()
    task = write_task(str(tmp_path / "task"))
    server = start(model, "--maximum_tokens=64", "--slots=8", "--queue=16")
    run = Run(
        tmp_path / "run", f"--config={CONFIG}", f"--config.model.path={model}", *task, f"--servers={server.address}",
        f"--config.max_steps={steps}", f"--config.evaluation.every={steps}", "--config.parity.every=1",
        # Of bfloat16 weights, few of which change in a step: so they come as deltas.
        "--config.model.sync_dtype=bfloat16", "--config.optimizer.learning_rate=1e-6", "--config.telemetry.samples=16",
    ).start()  # fmt: skip
    try:
        run.finish()
    finally:
        run.close()
    # 1. Met: its log-probs are those of the policy that the trainer computes.
    joined = re.search(rf"{server.address} joined: \|log-prob difference\| (\S+) on average", run.output())
    assert joined and float(joined[1]) < 1e-5, run.output()
    rows = run.metrics
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert rows[-1]["optimizer_step"] > 0
    assert [row["step"] for row in run.rows("evals.jsonl")] == [0, steps]
    # 2. Nothing that it delivered was found wrong, then or later. (How many later probes come in time is chance.)
    assert sum(row["parity"][what] for row in rows for what in ("taken_back", "sent_away")) == 0
    told = [server for row in rows for server in row["servers"].values()]
    assert told and max(one["mismatch"] for one in told) < 1e-2
    # 3. Its weights are the trainer's, by deltas: each was held against the digests in its header.
    pushes = [row["pushes"] for row in rows]
    # The first is dense, and the evaluation of the last step wants that version.
    assert sum(push["sparse"] for push in pushes) > 0 and max(push["payload_bytes"] for push in pushes) > 0
    assert sum(push["resent_chunks"] for push in pushes) == 0
    with grpc.insecure_channel(server.address) as channel:
        status = rpc.rollout_pb2_grpc.RolloutStub(channel).Status(pb.StatusRequest(), timeout=SECONDS)
    assert (status.version.incarnation, status.version.step) == (rows[-1]["incarnation"], steps)
    # 4. Tokens of later versions, and of thinking that was interrupted.
    samples = [sample for step in range(1, steps + 1) for sample in run.rows(f"rollouts/step-{step:08d}.jsonl")]
    assert max(end for sample in samples for end, _, _ in sample["versions"]) > 0
    phrases = {tuple(s["token_ids"][a:b]) for s in samples for a, b in s["forced"]}
    assert len(phrases) == 1 and next(iter(phrases))
    assert all(not any(s["logprobs"][a:b]) for s in samples for a, b in s["forced"])


@pytest.mark.slow
def test_deltas_arrive_bit_for_bit_or_not_at_all(start: Callable[..., ServerProcess], tmp_path: pathlib.Path) -> None:
    config, rng = toy_decoder(tied_embeddings=True), np.random.default_rng(0)
    held = {name: value.astype(ml_dtypes.bfloat16) for name, value in random_tensors(config, 0).items()}
    folder = write_folder(tmp_path / "model", config, random_tensors(config, 1))
    server = start(folder)

    def change(share: float) -> dict[str, Change]:
        changes = {}
        for name, tensor in held.items():
            positions, bits = np.flatnonzero(rng.random(tensor.size) < share), tensor.view(np.uint16).reshape(-1)
            bits[positions] ^= 5
            changes[name] = Change(positions, bits[positions])
        return changes

    async def follow() -> None:
        publisher = Publisher(incarnation=Incarnation(7), chunk_bytes=300, delta_bytes=2**24)
        channel = connect(server.address, PLAIN)
        stub = rpc.Stub(channel)

        def publish(step: int, share: float) -> None:
            parts = {name: encode(one) for name, one in change(share).items()} if step else {}
            digests = {name: digest(tensor) for name, tensor in held.items()}
            delta = WeightDelta(step - 1 if step else None, step, parts, digests, hf_tensors(config))
            whole = {name: tensor.copy() for name, tensor in held.items()}
            publisher.deltas.record(step, lambda: delta)
            publisher.publish(step, whole)

        async def score() -> np.ndarray:
            reply = await stub.Score(pb.ScoreRequest(token_ids=codec.encode_ids(TEXT)), timeout=SECONDS)
            return codec.decode_floats(reply.logprobs)

        publish(0, 0)
        assert not (await publisher.push(stub, 0, timeout=SECONDS)).sparse
        before = await score()
        for step, share in enumerate([0.01, 0, 0.2], start=1):
            publish(step, share)
            assert (await publisher.push(stub, step, base=step - 1, timeout=SECONDS)).sparse
        after = await score()
        assert np.abs(after - before).max() > 0

        # From another base than the one held; and with a digest that is not the version's.
        publish(4, 0.01)
        publish(5, 0.01)
        with pytest.raises(FullSyncNeeded):
            await publisher.push(stub, 5, base=4, timeout=SECONDS)
        assert (await stub.Status(pb.StatusRequest(), timeout=SECONDS)).version.step == 3
        np.testing.assert_array_equal(await score(), after)
        assert not (await publisher.push(stub, 5, timeout=SECONDS)).sparse
        publish(6, 0.01)
        payload = await publisher._payload(5, 6, publisher._sources[6])
        payload.header.tensors[3].digest ^= 1
        with pytest.raises(FullSyncNeeded, match="digest"):
            await publisher.push(stub, 6, base=5, timeout=SECONDS)
        assert (await stub.Status(pb.StatusRequest(), timeout=SECONDS)).version.step == 5
        publisher.close()
        await channel.close()

    asyncio.run(follow())


@pytest.mark.slow
def test_what_it_offers_beside_the_contract(start: Callable[..., ServerProcess], tmp_path: pathlib.Path) -> None:
    config = toy_decoder()
    server = start(write_folder(tmp_path / "model", config, random_tensors(config, 1)))
    assert health.ask(server.address, PLAIN, seconds=SECONDS) == "SERVING"
    with grpc.insecure_channel(server.address) as channel:
        found = ProtoReflectionDescriptorDatabase(channel)
        assert rpc.SERVICE in found.get_services()
        described = found.FindFileContainingSymbol(rpc.SERVICE)
        assert {"StatusReply", "WeightHeader"} <= {message.name for message in described.message_type}
        # Bytes that are no message.
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(f"/{rpc.SERVICE}/Score")(b"\x0a\xff", timeout=SECONDS)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def shapes() -> list[DecoderConfig]:
    return [
        toy_decoder(family="qwen3", rope_theta=5e5, norm_epsilon=1e-5),
        toy_decoder(family="qwen2", rope_theta=1_000_000.0, tied_embeddings=True),
        toy_decoder(family="llama", rope_theta=12345.678, norm_epsilon=1.25e-7),
        toy_decoder(family="llama", rope_theta=1e17, norm_epsilon=0.00015, heads=2, kv_heads=1),
    ]


@pytest.mark.slow
def test_it_names_itself_as_the_trainer_does(program: list[str], tmp_path: pathlib.Path) -> None:
    """model_config and tokenizer_fingerprint are compared as strings, and the tensors by name and shape."""
    folders = {}
    for number, config in enumerate(shapes()):
        folder = write_folder(tmp_path / f"shape-{number}", config, random_tensors(config, 0))
        folders[folder] = config
    for folder, style in zip(folders, ("qwen3", "llama3", "deepseek_r1")):
        chat_folder(tmp_path / style, style)
        shutil.copy(tmp_path / style / "tokenizer.json", folder / "tokenizer.json")
    *_, last = folders
    pieces = [("<unk>", 0.0), ("\u2581a", -1.5), ("é\u2028\x7f", -2.000001), ("😀", -1e-7), ("b", -12.0)]
    tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0)).save(str(last / "tokenizer.json"))

    script = (
        "const { readFolder } = require(process.argv[1]);"
        "const told = process.argv.slice(2).map((name) => readFolder(name));"
        "console.log(JSON.stringify(told.map((f) => [f.modelConfig, f.fingerprint, f.shapes])));"
    )
    read = str(pathlib.Path(program[1]).with_name("folder.js"))
    told = subprocess.run(["node", "-e", script, read, *map(str, folders)], capture_output=True, text=True, check=True)
    for (model, fingerprint, named), (folder, config) in zip(json.loads(told.stdout), folders.items(), strict=True):
        assert model == config.canonical_json()
        assert fingerprint == tokenizer_fingerprint(folder)
        assert {name: tuple(shape) for name, shape in named.items()} == hf_tensors(config)
