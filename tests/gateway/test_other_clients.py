"""The gateway through litellm and verifiers, which are in the environment of `make test-adapters`. About 25 CPU
seconds, most of them imports."""

import asyncio
import json
import pathlib
from typing import Any

import numpy as np
import pytest

from scalerl_jax.gateway.chat import Chat
from tests.gateway.chat_model import QUESTION, TOOL, array, check_conversation, trace

pytestmark = pytest.mark.slow


MISSING = "not installed: make test-adapters"


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm_calls_a_tool(chat: Chat, recorded: str, provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network
    litellm = pytest.importorskip("litellm", reason=MISSING)
    session = f"litellm-{provider}"
    base = f"http://{recorded}/s/{session}" + ("/v1" if provider == "openai" else "")

    def say(messages: list[Any], **more: Any) -> Any:
        return litellm.completion(
            model=f"{provider}/tiny",
            api_base=base,
            api_key="any",
            max_tokens=400,
            messages=messages,
            tools=[TOOL],
            **more,
        )

    message = say([QUESTION]).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 2, "b": 2}
    result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    chunks = list(say([QUESTION, message.model_dump(), result], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The answer is 4."
    check_conversation(chat, recorded, session)


def test_verifiers_relays_a_conversation(chat: Chat, recorded: str) -> None:
    pytest.importorskip("verifiers", reason=MISSING)
    from verifiers.v1.clients.eval import EvalClient
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    async def converse() -> list[Any]:
        client = EvalClient(EvalClientConfig(base_url=f"http://{recorded}/v1"))
        body = {"model": "tiny", "messages": [QUESTION], "tools": [TOOL]}

        async def say() -> Any:
            return await client.get_response(ChatDialect(), body, SamplingConfig(), session_id="relayed")

        first = await say()
        (call,) = first.message.tool_calls
        said = first.raw["choices"][0]["message"]
        body["messages"] += [said, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
        return [first, await say()]

    first, second = asyncio.run(converse())
    assert first.finish_reason == "tool_calls" and second.message.content == "The answer is 4."
    check_conversation(chat, recorded, "relayed")


def test_verifiers_trains_on_what_was_sampled(chat: Chat, model: pathlib.Path, made_up: str) -> None:
    """Its training client renders by itself, and asks for token ids and log-probs."""
    pytest.importorskip("verifiers", reason=MISSING)
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    async def ask() -> Any:
        config = TrainClientConfig(base_url=f"http://{made_up}/v1", renderer_model_name=str(model))
        client, body = TrainClient(config), {"model": "tiny", "messages": [QUESTION]}
        sampling = SamplingConfig(max_tokens=20)
        return await client.get_response(ChatDialect(), body, sampling, session_id="trained")

    tokens = asyncio.run(ask()).tokens
    (turn,) = trace(made_up, "trained")["trace"]
    assert list(tokens.prompt_ids) == chat.render([QUESTION], []) and len(tokens.completion_ids) <= 20
    np.testing.assert_array_equal(tokens.completion_ids, array(turn["token_ids"]))
    np.testing.assert_allclose(tokens.completion_logprobs, array(turn["logprobs"], "<f4"), atol=1e-6)
