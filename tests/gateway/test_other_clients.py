"""The gateway through litellm and verifiers, which are in the environment of `make test-adapters`. About 25 CPU
seconds, most of them imports."""

import asyncio
import json
import pathlib
from contextlib import closing
from typing import Any

import httpx
import numpy as np
import pytest

from scalerl_jax.config import Config
from scalerl_jax.environments.adapters import Verifiers
from scalerl_jax.environments.episode import Client
from scalerl_jax.environments.episode_pool import EpisodeFailed
from scalerl_jax.environments.load import make_environment
from scalerl_jax.gateway.chat import Chat
from tests.gateway.chat_model import QUESTION, TOOL, array, check_conversation, trace
from tests.support.episodes import pool_of

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


def test_openenv_reads_a_trace(chat: Chat, recorded: str) -> None:
    training = pytest.importorskip("openenv.core.harness.training", reason=MISSING)
    address = f"http://{recorded}/sessions/openenv/trace?form="
    body = {"model": "tiny", "messages": [QUESTION], "max_tokens": 400}
    httpx.post(f"http://{recorded}/s/openenv/v1/chat/completions", json=body).raise_for_status()
    (turn,) = training.TrainingTrace.model_validate(httpx.get(address + "openenv").json()).turns
    (ours,) = trace(recorded, "openenv")["trace"]
    assert turn.prompt_token_ids == chat.render([QUESTION], [])
    assert turn.completion_token_ids == array(ours["token_ids"]).tolist()
    assert turn.loss_mask == [0] * len(turn.prompt_token_ids) + [1] * len(turn.completion_token_ids)
    assert httpx.get(address + "other").status_code == 400


TASKSET = """
import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

class Sum(vf.Task):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float("4" in trace.last_reply)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        while True:
            yield Sum(vf.TaskData(idx=0, prompt="2+2?"), self.config.task)

class Asks(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, *_, **__):
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt}]
        await client.chat.completions.create(model=ctx.model, messages=messages)
        return ProgramResult(exit_code=0, stdout="", stderr="")

class PairConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})
    judge: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})

class Pair(vf.Env[PairConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        for agent in (agents.solver, agents.solver, agents.judge):
            await agent.run(task)

__all__ = ["Sums", "Asks", "Pair"]
"""


def test_a_taskset_of_verifiers_is_played_by_its_agents(
    recorded: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verifiers", reason=MISSING)
    (tmp_path / "sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = {"taskset": {"id": "sums"}, "judge": {"client": {"type": "eval", "base_url": f"http://{recorded}/v1"}}}
    file = tmp_path / "tasks.py"
    file.write_text(f"""
from scalerl_jax.environments.adapters import Verifiers

def game(config):
    return Verifiers({settings}, prompts=3)

def all_trained(config):
    return Verifiers({{"taskset": {{"id": "sums"}}}}, prompts=3)
""")

    def played(name: str) -> Any:
        config = Config()
        config.environment.name = f"{file}:{name}"
        row, *others = make_environment(config).rows("train")
        assert row.text == "2+2?" and row.agent and len(others) == 2
        with closing(pool_of(config)) as pool:
            base = f"http://{recorded}/s/{name}"
            return asyncio.run(pool.run(row, Client(f"{base}/v1", base, "any", name, "tiny")))

    score = played("game")
    assert score.reward == 0.5 and not score.correct  # the mean of two agents; the judge's does not count
    assert score.metrics == {"solver/right": 0.5, "solver/turns": 1.0}
    assert len(trace(recorded, "game")["trace"]) == 2  # the judge's turn is not the policy's
    with pytest.raises(EpisodeFailed, match="the agent 'judge' is not to be trained: give it a client of its own"):
        played("all_trained")
    with pytest.raises(ValueError, match=r"has no end: prompts=\.\.\. says how many"):
        next(Verifiers(settings).rows("train"))
    with pytest.raises(ValueError, match="leave retries out"):
        next(Verifiers({**settings, "solver": {"retries": {"max_retries": 1}}}).rows("train"))
