"""Engines of every kind, served over real gRPC on the loopback interface, and a client that keeps to the contract."""

import asyncio
import inspect
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import pytest
import safetensors.numpy
import tokenizers

from rollout_server.contract.fingerprint import tokenizer_fingerprint
from rollout_server.engines.engine import Engine
from rollout_server.engines.jax_engine import JaxEngine
from rollout_server.engines.replay_engine import ReplayEngine
from rollout_server.engines.scripts import Script, Scripted
from scalerl_jax.model import DecoderConfig, init_params
from scalerl_jax.model.hf import hf_tensors, to_hf

# Seconds that an async test may take; one that hangs says where.
ASYNC_TEST_SECONDS = 120

CONFIG = DecoderConfig(
    vocabulary=64, width=32, layers=2, heads=4, kv_heads=2, head_size=8, mlp_width=48, max_positions=512
)

# One set of options for both, so that every engine is judged by the same numbers.
DEFAULTS: dict[str, Any] = {
    "slots": 4,
    "queue": 8,
    "decode_chunk": 4,
    "maximum_tokens": 256,
    "compute_dtype": "float32",
    "wire_dtype": "float32",
}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def run() -> None:
        async with asyncio.timeout(ASYNC_TEST_SECONDS):
            await pyfuncitem.obj(**arguments)

    asyncio.run(run())
    return True


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny policy with its tokenizer, as Hugging Face saves them."""
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {f"t{number}": number for number in range(CONFIG.vocabulary)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0")).save(str(folder / "tokenizer.json"))
    params = init_params(CONFIG, jax.random.key(0))
    tensors = {name: jax.device_get(value) for name, value in to_hf(params, CONFIG, "float32").items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    return folder


def replay_engine(
    model_folder: pathlib.Path, *, script: Script | None = None, token_seconds: float = 0.001, **options: Any
) -> ReplayEngine:
    return ReplayEngine(
        script or Scripted(vocabulary=CONFIG.vocabulary),
        tensors=hf_tensors(CONFIG),
        model_config=CONFIG.canonical_json(),
        tokenizer_fingerprint=tokenizer_fingerprint(model_folder),
        token_seconds=token_seconds,
        **{**DEFAULTS, **options},
    )


def jax_engine(model_folder: pathlib.Path, **options: Any) -> JaxEngine:
    return JaxEngine(str(model_folder), **{**DEFAULTS, **options})


ENGINES: dict[str, Callable[..., Engine]] = {"replay": replay_engine, "jax": jax_engine}


@pytest.fixture(params=sorted(ENGINES))
def make_engine(request: pytest.FixtureRequest, model_folder: pathlib.Path) -> Callable[..., Engine]:
    """make_engine(**options) -> an engine of the kind the test is run for. It must be called on the event loop."""
    kind = ENGINES[request.param]

    def make(**options: Any) -> Engine:
        return kind(model_folder, **options)

    return make


@pytest.fixture
def make_replay(model_folder: pathlib.Path) -> Callable[..., ReplayEngine]:
    def make(**options: Any) -> ReplayEngine:
        return replay_engine(model_folder, **options)

    return make
