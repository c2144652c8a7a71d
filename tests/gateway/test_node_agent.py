"""An agent in Node that knows nothing of the gateway but a base URL: its episode is one branch."""

import contextlib
import json
import pathlib
import shutil
import subprocess

import httpx
import pytest

from tests.gateway import chat_model
from tests.support.processes import SECONDS

AGENT = pathlib.Path(__file__).with_name("agent.mjs")
QUESTION = {"role": "user", "content": "2+2+1?"}
OLDEST = 18  # major version of Node that has fetch


def call(a: int, b: int) -> str:
    return f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': a, 'b': b}})}</tool_call><|im_end|>"


@pytest.mark.slow
def test_an_episode_of_three_turns_is_one_branch(tmp_path: pathlib.Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("there is no node on PATH")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.removeprefix("v").partition(".")[0]) < OLDEST:
        pytest.skip(f"node is {version.strip()}, the agent needs {OLDEST}")
    model = tmp_path / "model"
    chat = chat_model.model_folder(model)
    said = (f"<think>\nTwo first.\n</think>\n\n{call(2, 2)}", f"And one. {call(4, 1)}", "The answer is 5.<|im_end|>")
    chat_model.write_completions(chat, tmp_path / "said.jsonl", question=QUESTION, said=said, results=("4", "5"))
    flags = f"--replay_file={tmp_path / 'said.jsonl'}"
    with contextlib.closing(chat_model.generator(tmp_path, model, flags).wait()) as server:
        with chat_model.gateway(tmp_path, model, f"--servers={server.address}") as process:
            command = ["node", str(AGENT), f"http://{process.address}/s/node/v1", QUESTION["content"]]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
            assert (done.returncode, done.stdout) == (0, "The answer is 5.\n"), done.stderr
            found = chat_model.trace(process.address, "node")
            metrics = httpx.get(f"http://{process.address}/metrics")
    assert metrics.headers["content-type"].startswith("text/plain") and metrics.headers["x-request-id"]
    assert {"scalerl_gateway_turns_total 3.0", "scalerl_gateway_servers 1.0"} <= set(metrics.text.splitlines())
    assert found["branches"] == [[0, 1, 2]] and [turn["parent"] for turn in found["trace"]] == [None, 0, 1]
