"""A toy model that scalerl-tinker trains, and a rollout server that samples from it."""

import contextlib
import pathlib
import sys
from collections.abc import Iterator

import httpx

from tests.gateway.chat_model import VOCABULARY
from tests.support.chat_folders import chat_folder
from tests.support.models import random_tensors, toy_decoder, write_folder
from tests.support.processes import single_threaded
from tests.support.servers import ServerProcess
from tests.support.waiting import eventually

TINKER = ("-m", "scalerl_jax.tinker.command")
LONGEST = 32
_DTYPES = ("--compute_dtype=float32", "--sync_dtype=float32")
_CONFIG = ("--config.model.compute_dtype=float32", "--config.model.sync_dtype=float32")


def model_folder(folder: pathlib.Path) -> pathlib.Path:
    decoder = toy_decoder(vocab_size=VOCABULARY, max_positions=64)
    write_folder(folder, decoder, random_tensors(decoder, 0))
    chat_folder(folder, "qwen3")
    return folder


@contextlib.contextmanager
def rollout_server(folder: pathlib.Path, model: pathlib.Path) -> Iterator[str]:
    flags = ("--engine=jax", f"--model={model}", *_DTYPES, f"--maximum_tokens={LONGEST}", "--slots=4", "--queue=8")
    server = ServerProcess(folder, *flags, name="generator", environment=single_threaded())
    try:
        yield server.wait().address
    finally:
        server.close()


def tinker_server(workdir: pathlib.Path, model: pathlib.Path, address: str, *flags: str) -> ServerProcess:
    """Not waited for. Its log is in the folder above workdir."""
    rows = ("--config.learner.seq_len=64", "--config.learner.micro_batch_rows=8", f"--maximum_tokens={LONGEST}")
    given = (f"--model={model}", f"--workdir={workdir}", f"--servers={address}", *_CONFIG, *rows, *flags)
    return ServerProcess(workdir.parent, *given, name=f"tinker-{workdir.name}", program=TINKER)


def answer_to(http: httpx.Client, call: httpx.Response) -> httpx.Response:
    """What retrieve_future has of a call, however often it says to try again. http: of the server's /api/v1."""

    def found() -> httpx.Response | None:
        answer = http.post("retrieve_future", json={"request_id": call.json()["request_id"]})
        is_json = answer.headers["content-type"].startswith("application/json")
        return None if is_json and answer.json().get("type") == "try_again" else answer

    answer: httpx.Response = eventually(found, "the answer to a call")
    return answer


SCRIPT = (sys.executable, "-m", "tests.tinker.script")
