"""A model folder whose chat template knows tools, completions to play for it, and a gateway over servers that play."""

import base64
import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from scalerl_jax.environments.chat_template import read_chat_template
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.gateway.chat import Chat
from tests.support.chat_folders import chat_folder
from tests.support.models import random_tensors, toy_decoder, write_folder
from tests.support.servers import ServerProcess

GATEWAY = ("-m", "scalerl_jax.gateway.command")
VOCABULARY = 352
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
QUESTION = {"role": "user", "content": "2+2?"}
CALL = json.dumps({"name": "add", "arguments": {"a": 2, "b": 2}})
FIRST = f"<think>\nTwo and two.\n</think>\n\nI add.<tool_call>{CALL}</tool_call><|im_end|>"
SECOND = "The answer is 4.<|im_end|>"
LENGTH = 512


def model_folder(folder: pathlib.Path) -> Chat:
    decoder = toy_decoder(vocab_size=VOCABULARY, max_positions=1024)
    write_folder(folder, decoder, random_tensors(decoder, 0))
    chat_folder(folder, "qwen3")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    path = str(folder)
    return Chat(Tokenizer(path), read_chat_template(path), end_of_thinking="</think>")


def write_completions(
    chat: Chat, file: pathlib.Path, *, question: Mapping[str, str] = QUESTION, said: Sequence[str] = (FIRST, SECOND),
    results: Sequence[str] = ("4",),
) -> None:  # fmt: skip
    """What the policy says in a conversation with calls of the tool, which has these results; as no tokenizer would cut
    it. Without the tool it says the last at once."""
    tokenizer = chat.tokenizer

    def one_by_one(text: str) -> list[int]:
        said = text.removesuffix("<|im_end|>")
        return [*(token for character in said for token in tokenizer.encode(character)), tokenizer.eos_id]

    path = chat.render([question], [TOOL])
    rows = [(chat.render([question], []), one_by_one(said[-1]))]
    for text, result in zip(said, [*results, ""], strict=True):
        ids = one_by_one(text)
        rows.append((path, ids))
        reply = {"role": "tool", "content": result, "tool_call_id": ""}
        path = [*path, *ids, *chat.reply([reply], behind=ids[-1])]
    file.write_text("".join(json.dumps({
        "prompt_token_ids": prompt, "token_ids": ids, "logprobs": [-0.5] * len(ids), "finish_reason": "stop",
    }) + "\n" for prompt, ids in rows))  # fmt: skip


def generator(folder: pathlib.Path, model: pathlib.Path, *flags: str, name: str = "generator") -> ServerProcess:
    """A server that plays, not waited for."""
    common = ("--engine=replay", f"--model={model}", "--sync_dtype=float32", "--compute_dtype=float32")
    return ServerProcess(folder, *common, f"--maximum_tokens={LENGTH}", "--slots=8", "--queue=16", *flags, name=name)


@contextlib.contextmanager
def gateway(folder: pathlib.Path, model: pathlib.Path, *flags: str, name: str = "gateway") -> Iterator[ServerProcess]:
    """A gateway that answers; its model is called `tiny`."""
    pytest.importorskip("uvicorn")  # of the extra [gateway]
    process = ServerProcess(folder, f"--model={model}", "--names=tiny", *flags, program=GATEWAY, name=name)
    with contextlib.closing(process):
        yield process.wait()


def trace(address: str, session: str) -> dict[str, Any]:
    return httpx.get(f"http://{address}/sessions/{session}/trace").raise_for_status().json()


def array(text: str, kind: str = "<i4") -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), kind)


def check_conversation(chat: Chat, address: str, session: str) -> None:
    """Two turns, one branch, and both what was sampled, token for token."""
    found = trace(address, session)
    assert found["branches"] == [[0, 1]] and [turn["parent"] for turn in found["trace"]] == [None, 0]
    said = [chat.tokenizer.decode(array(turn["token_ids"]).tolist()) for turn in found["trace"]]
    assert said == [FIRST, SECOND]
    assert all((array(turn["logprobs"], "<f4") == -0.5).all() for turn in found["trace"])
