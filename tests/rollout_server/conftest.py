"""Engines of every kind, served over real gRPC on the loopback interface, and a client that keeps to the contract.

jax and vLLM never share an environment, so each is tested where it is installed: `make test` and `make test-vllm` run
the same conformance tests. With SCALERL_GENERATOR they are run against a program instead, see external.py.
"""

import asyncio
import contextlib
import dataclasses
import importlib.util
import inspect
import math
import os
import pathlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rollout_server.engines.engine import Engine, EngineOptions
from rollout_server.engines.engine_info import engine_info
from scalerl_jax.model.tensor_layout import hf_tensors
from tests.rollout_server.external import VARIABLE, External
from tests.support.models import toy_decoder, write_folder
from tests.support.replay.engine import ReplayEngine
from tests.support.replay.scripts import Script, Scripted

CONFIG = toy_decoder(head_dim=32, max_positions=512)

# One set of options for all, so that every engine is judged by the same numbers.
DEFAULTS: dict[str, Any] = {
    "slots": 4,
    "queue": 8,
    "decode_chunk": 4,
    "maximum_tokens": 256,
    "compute_dtype": "float32",
    "sync_dtype": "float32",
}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine on an event loop of its own, or on that of the vLLM it asks for."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    marker = pyfuncitem.get_closest_marker("timeout")
    # Less than a test may take: one that hangs says where.
    seconds = float(marker.args[0] if marker else pyfuncitem.config.getini("timeout")) - 10

    async def run() -> None:
        async with asyncio.timeout(seconds):
            await pyfuncitem.obj(**arguments)

    shared = [value for value in pyfuncitem.funcargs.values() if hasattr(value, "vllm")]
    if shared:
        shared[0].run(run())
    else:
        asyncio.run(run())
    return True


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny policy with its tokenizer, as Hugging Face saves them."""
    rng, std = np.random.default_rng(0), 1 / math.sqrt(CONFIG.hidden_size)
    tensors = {
        name: (np.ones(shape) if len(shape) == 1 else rng.normal(0, std, shape)).astype(np.float32)
        for name, shape in hf_tensors(CONFIG).items()
    }
    return write_folder(tmp_path_factory.mktemp("model"), CONFIG, tensors)


def replay_engine(
    model_folder: pathlib.Path, *, script: Script | None = None, token_seconds: float = 0.001, **options: Any
) -> ReplayEngine:
    own = {name: options.pop(name) for name in ("load_seconds", "faults") if name in options}
    told = EngineOptions(str(model_folder), **{**DEFAULTS, **options})
    # It only passes for the model: no positions bound it.
    info = dataclasses.replace(engine_info("replay", told, CONFIG), maximum_tokens=told.maximum_tokens)
    script = script or Scripted(vocabulary=CONFIG.vocab_size)
    return ReplayEngine(script, info, decode_chunk=told.decode_chunk, token_seconds=token_seconds, **own)


def external_engine(model_folder: pathlib.Path, **options: Any) -> Any:
    return External(model_folder, **{**DEFAULTS, **options})


def jax_engine(model_folder: pathlib.Path, **options: Any) -> Engine:
    from rollout_server.engines.jax.engine import JaxEngine

    return JaxEngine(EngineOptions(str(model_folder), **{**DEFAULTS, **options}))


@contextlib.asynccontextmanager
async def opened_jax(folder: pathlib.Path, *, lookahead: int | None = None, **options: Any) -> AsyncIterator[Any]:
    """A JaxEngine, made on another thread, and closed at the end."""
    from rollout_server.engines.jax.engine import JaxEngine

    chosen = EngineOptions(str(folder), **{**DEFAULTS, **options})
    engine = await asyncio.to_thread(JaxEngine, chosen, lookahead=lookahead)
    try:
        yield engine
    finally:
        await engine.close()


class Maker:
    """make_engine(**options) -> an engine of the kind that the test is run for. To be called on the event loop."""

    def __init__(self, kind: Callable[..., Engine], model_folder: pathlib.Path):
        self._kind, self._model_folder = kind, model_folder

    def __call__(self, **options: Any) -> Engine:
        return self._kind(self._model_folder, **options)


class VllmMaker:
    """The same over the one vLLM of the session, so its options are few."""

    def __init__(self, shared: Any):
        self.vllm, self.run, self._engine = shared.vllm, shared.run, shared.engine

    def __call__(self, **options: Any) -> Engine:
        return self._engine(**{"slots": DEFAULTS["slots"], "queue": DEFAULTS["queue"], **options})


@pytest.fixture(scope="session")
def shared_vllm(model_folder: pathlib.Path) -> Iterator[Any]:
    from tests.rollout_server.shared_vllm import Shared

    names = ("slots", "maximum_tokens", "compute_dtype", "sync_dtype")
    shared = Shared(model_folder, **{name: DEFAULTS[name] for name in names})
    yield shared
    shared.close()


@pytest.fixture(scope="session", autouse=True)
def vllm_before_all_else(request: pytest.FixtureRequest) -> None:
    """It starts in seconds while this process has no other thread (shared_vllm.py)."""
    if any("[vllm" in item.name for item in request.session.items):
        request.getfixturevalue("shared_vllm")


ENGINES: dict[str, Callable[..., Engine]] = {"replay": replay_engine, "jax": jax_engine, "external": external_engine}
# Those that sample from a model, where they are installed.
MODEL_ENGINES = [name for name in ("jax", "vllm") if importlib.util.find_spec(name) is not None]
ALL_ENGINES = ["replay", *MODEL_ENGINES]
if VARIABLE in os.environ:
    MODEL_ENGINES = ALL_ENGINES = ["external"]


def _maker(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    if request.param == "vllm":
        return VllmMaker(request.getfixturevalue("shared_vllm"))
    return Maker(ENGINES[request.param], request.getfixturevalue("model_folder"))


@pytest.fixture(params=ALL_ENGINES)
def make_engine(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    return _maker(request)


@pytest.fixture(params=MODEL_ENGINES)
def make_model_engine(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """The same for engines that sample from a model only."""
    return _maker(request)


@pytest.fixture
def make_replay(model_folder: pathlib.Path) -> Callable[..., ReplayEngine]:
    def make(**options: Any) -> ReplayEngine:
        return replay_engine(model_folder, **options)

    return make
