"""Gateways over servers that play, one for each module."""

import contextlib
import pathlib
from collections.abc import Iterator

import pytest

from scalerl_jax.gateway.chat import Chat
from tests.gateway import chat_model
from tests.gateway.chat_model import gateway, generator


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def chat(model: pathlib.Path) -> Chat:
    return chat_model.model_folder(model)


@pytest.fixture(scope="module")
def recorded(chat: Chat, model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a gateway whose server plays the conversation of chat_model.py."""
    folder = tmp_path_factory.mktemp("recorded")
    chat_model.write_completions(chat, folder / "said.jsonl")
    with contextlib.closing(generator(folder, model, f"--replay_file={folder / 'said.jsonl'}").wait()) as server:
        with gateway(folder, model, f"--servers={server.address}") as process:
            yield process.address


@pytest.fixture(scope="module")
def made_up(chat: Chat, model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of one whose server says anything."""
    folder = tmp_path_factory.mktemp("made_up")
    with contextlib.closing(generator(folder, model).wait()) as server:
        with gateway(folder, model, f"--servers={server.address}") as process:
            yield process.address
