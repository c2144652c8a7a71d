"""The gateway as programs use it: through OpenAI's and Anthropic's own clients, over servers of ours."""

import asyncio
import contextlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.codec import CompletionRequest, GroupRequest, Sampling
from scalerl_jax.contract.fingerprint import tokenizer_fingerprint
from scalerl_jax.contract.security import Credentials
from scalerl_jax.gateway.chat import Chat
from scalerl_jax.gateway.generators import Generators
from scalerl_jax.system import files
from tests.gateway import chat_model
from tests.gateway.chat_model import LENGTH, QUESTION, TOOL, array, check_conversation, gateway, generator, trace
from tests.support.waiting import eventually, eventually_async

pytestmark = pytest.mark.slow

THOUGHT, SAID = "Two and two.", "I add."


@pytest.fixture(scope="module")
def openai() -> Any:
    """The package; only these tests need it, and it takes long to import."""
    return pytest.importorskip("openai")


@pytest.fixture(scope="module")
def anthropic() -> Any:
    return pytest.importorskip("anthropic")


def test_openai_calls_a_tool(openai: Any, chat: Chat, recorded: str) -> None:
    client = openai.OpenAI(base_url=f"http://{recorded}/s/openai/v1", api_key="any")
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=[QUESTION], tools=[TOOL])
    assert raw.headers["x-scalerl-versions"] == "0-0"
    answer = raw.parse()
    assert answer._request_id == raw.headers["x-request-id"]
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content, answer.choices[0].finish_reason) == (
        SAID,
        THOUGHT,
        "tool_calls",
    )
    (call,) = message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 2, "b": 2}
    assert answer.usage.prompt_tokens == len(chat.render([QUESTION], [TOOL]))
    assert answer.usage.scalerl == {"versions": [[0, 0, answer.usage.completion_tokens]], "forced": []}
    # As most clients do, it gives back what it knows, without the thinking.
    history = [QUESTION, {"role": "assistant", "content": SAID, "tool_calls": [call.to_dict()]}]
    result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    then = client.chat.completions.create(
        model="tiny", messages=[*history, result], tools=[TOOL], logprobs=True, top_logprobs=2
    )
    assert then.choices[0].message.content == "The answer is 4." and then.choices[0].finish_reason == "stop"
    assert {one.logprob for one in then.choices[0].logprobs.content} == {-0.5}
    check_conversation(chat, recorded, "openai")


def test_openai_streams_to_an_asynchronous_client(openai: Any, chat: Chat, recorded: str) -> None:
    async def stream() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"http://{recorded}/v1", api_key="sk-scalerl-streamed") as client:
            chunks = await client.chat.completions.create(
                model="tiny", messages=[QUESTION], tools=[TOOL], stream=True, stream_options={"include_usage": True}
            )
            return [chunk async for chunk in chunks]

    found = asyncio.run(stream())
    deltas = [chunk.choices[0].delta for chunk in found if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == SAID
    assert [call.function.name for delta in deltas for call in delta.tool_calls or ()] == ["add"]
    assert [chunk.choices[0].finish_reason for chunk in found if chunk.choices][-1] == "tool_calls"
    assert found[-1].usage.completion_tokens > 0
    assert trace(recorded, "streamed")["turns"] == 1


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_anthropic_calls_a_tool(anthropic: Any, chat: Chat, recorded: str, streamed: bool) -> None:
    session = f"anthropic-{streamed}"
    client = anthropic.Anthropic(base_url=f"http://{recorded}/s/{session}", api_key="any")
    tools = [{"name": "add", "description": "Adds.", "input_schema": chat_model.PARAMETERS}]

    def say(messages: list[Any]) -> Any:
        asked = {"model": "tiny", "max_tokens": 400, "tools": tools, "messages": messages}
        if not streamed:
            return client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
            return stream.get_final_message()

    answer = say([QUESTION])
    thinking, text, use = answer.content
    assert (thinking.thinking, text.text, use.name, use.input) == (THOUGHT, SAID, "add", {"a": 2, "b": 2})
    assert answer.stop_reason == "tool_use"
    assert answer.usage.input_tokens == len(chat.render([QUESTION], [TOOL])) and answer.usage.output_tokens > 50
    count = client.messages.count_tokens(model="tiny", messages=[QUESTION], tools=tools)
    assert count.input_tokens == answer.usage.input_tokens
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "4"}]}
    then = say([QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}])
    assert then.content[0].text == "The answer is 4." and then.stop_reason == "end_turn"
    check_conversation(chat, recorded, session)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_responses_call_a_tool(openai: Any, chat: Chat, recorded: str, streamed: bool) -> None:
    session = f"responses-{streamed}"
    client = openai.OpenAI(base_url=f"http://{recorded}/s/{session}/v1", api_key="any")
    tools = [{"type": "function", **TOOL["function"], "strict": False}]

    def say(given: Any) -> Any:
        asked = {"model": "tiny", "input": given, "tools": tools, "store": False}
        if not streamed:
            return client.responses.create(**asked)
        events = list(client.responses.create(**asked, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1].response
        for kind, delta in (("message", "response.output_text.delta"), ("function_call", "arguments.delta")):
            items = [item for item in last.output if item.type == kind]
            whole = "".join(getattr(item, "arguments", None) or item.content[0].text for item in items)
            assert whole == "".join(event.delta for event in events if event.type.endswith(delta))
        with client.responses.stream(**asked) as stream:  # the client puts it together itself
            assert stream.get_final_response().output_text == last.output_text
        return last

    answer = say("2+2?")
    reasoning, message, call = answer.output
    assert (reasoning.content[0].text, message.content[0].text, call.name) == (THOUGHT, SAID, "add")
    assert json.loads(call.arguments) == {"a": 2, "b": 2} and answer.status == "completed"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    then = say([QUESTION, *(item.to_dict() for item in answer.output), result])
    assert then.output_text == "The answer is 4."
    parents = [turn["parent"] for turn in trace(recorded, session)["trace"]]
    assert parents == ([None, None, 1, 1] if streamed else [None, 0])
    with pytest.raises(openai.BadRequestError, match="previous_response_id: is not offered"):
        client.responses.create(model="tiny", input="2+2?", previous_response_id=answer.id)


def test_asynchronous_anthropic_and_a_stop_sequence(anthropic: Any, recorded: str) -> None:
    async def ask() -> Any:
        async with anthropic.AsyncAnthropic(base_url=f"http://{recorded}", api_key="any") as client:
            return await client.messages.create(
                model="tiny", max_tokens=400, messages=[QUESTION], stop_sequences=[" is"]
            )

    answer = asyncio.run(ask())
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("The answer", "stop_sequence", " is")


def test_several_choices_are_siblings_with_seeds_of_their_own(openai: Any, chat: Chat, made_up: str) -> None:
    client = openai.OpenAI(base_url=f"http://{made_up}/s/siblings/v1", api_key="any")
    asked = {
        "model": "tiny",
        "messages": [QUESTION],
        "n": 3,
        "max_tokens": 20,
        "extra_body": {"return_token_ids": True},
    }
    answer = client.chat.completions.create(**asked)
    ids = [tuple(choice.token_ids) for choice in answer.choices]
    assert len(set(ids)) == 3 and answer.prompt_token_ids == chat.render([QUESTION], [])
    then = client.chat.completions.create(
        model="tiny", messages=[QUESTION, answer.choices[1].message, QUESTION], max_tokens=5
    )
    assert then.usage.completion_tokens <= 5
    found = trace(made_up, "siblings")
    assert [turn["parent"] for turn in found["trace"]] == [None, None, None, 1]
    assert [tuple(array(turn["token_ids"]).tolist()) for turn in found["trace"][:3]] == ids


def test_tokens_go_in_and_come_out(chat: Chat, made_up: str) -> None:
    client = httpx.Client(base_url=f"http://{made_up}", timeout=600)
    asked = {"model": "tiny", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 9, "logprobs": 1, "seed": 3}}
    answers = [client.post("/inference/v1/generate", json=asked).json() for _ in range(2)]
    (choice,) = answers[0]["choices"]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{one}" for one in choice["token_ids"]]
    assert all(one["logprob"] <= 0 for one in choice["logprobs"]["content"]) and answers[0]["prompt_token_ids"] == [
        5,
        6,
        7,
    ]

    text = {"model": "tiny", "prompt": [[5, 6, 7], "2+2"], "max_tokens": 4, "logprobs": 0, "return_token_ids": True}
    body = client.post("/v1/completions", json=text, headers={"x-session-id": "tokens"}).json()
    assert [found["prompt_token_ids"] for found in body["choices"]] == [[5, 6, 7], chat.tokenizer.encode_prompt("2+2")]
    assert [len(found["logprobs"]["token_logprobs"]) for found in body["choices"]] == [
        len(found["token_ids"]) for found in body["choices"]
    ]
    path = [5, 6, 7, *body["choices"][0]["token_ids"]]
    client.post("/v1/completions", json={**text, "prompt": [*path, 8]}, headers={"x-session-id": "tokens"})
    assert [turn["parent"] for turn in trace(made_up, "tokens")["trace"]] == [None, None, 0]

    tokens = client.post("/tokenize", json={"prompt": "2+2", "model": "tiny"}).json()
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == LENGTH
    assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "2+2"}
    assert [found["max_model_len"] for found in client.get("/v1/models").json()["data"]] == [LENGTH]
    assert client.get("/health").status_code == 200 and "version" in client.get("/version").json()


def test_tokens_of_log_probs_together_are_the_text(made_up: str) -> None:
    asked = {"model": "tiny", "prompt": "2+2", "max_tokens": 60, "n": 8, "logprobs": 0}
    answer = httpx.post(f"http://{made_up}/s/pieces/v1/completions", json=asked, timeout=600).json()
    alone = 0
    for choice in answer["choices"]:
        text, tokens, offsets = choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert "".join(tokens).removesuffix("<|im_end|>") == text
        assert all(text.startswith(token, at) for token, at in zip(tokens[:-1], offsets, strict=False))
        alone += tokens.count("")
    assert alone  # else no character was of several tokens


def test_bodies_of_agents(anthropic: Any, openai: Any, made_up: str) -> None:
    """As Claude Code and verifiers' TrainClient send them."""
    cached = {"cache_control": {"type": "ephemeral"}}
    coding = {
        "model": "tiny", "max_tokens": 3, "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "{}"}, "system": [{"type": "text", "text": "You", **cached}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **cached}]},
                     {"role": "system", "content": "Agents"}],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": chat_model.PARAMETERS, **cached}],
    }  # fmt: skip
    url = f"http://{made_up}/s/coding/v1/messages?beta=true"
    assert httpx.post(url, json=coding, timeout=600).status_code == 200
    ours = httpx.post(url, json={**coding, "tools": [{"type": "web_search_20250305", "name": "web_search"}]})
    assert ours.status_code == 400 and "tools[0]" in ours.json()["error"]["message"]

    sampling = {"max_tokens": 3, "logprobs": 1, "skip_special_tokens": False, "routed_experts_prompt_start": 2}
    tokens = {"model": "tiny", "token_ids": [5, 6, 7], "sampling_params": sampling}
    assert httpx.post(f"http://{made_up}/inference/v1/generate", json=tokens, timeout=600).status_code == 200

    assert openai.OpenAI(base_url=f"http://{made_up}/v1", api_key="any").models.retrieve("tiny").id == "tiny"
    assert anthropic.Anthropic(base_url=f"http://{made_up}", api_key="any").models.retrieve("tiny").id == "tiny"
    assert httpx.get(f"http://{made_up}/v1/models/other").json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("route", "asked"),
    [
        ("/v1/chat/completions", {"messages": [QUESTION], "stop_token_ids": [3]}),
        ("/v1/chat/completions", {"messages": [QUESTION], "continue_final_message": True}),
        ("/tokenize", {"messages": [QUESTION], "add_generation_prompt": False}),
        ("/tokenize", {"prompt": "2+2", "return_token_strs": True}),
        ("/inference/v1/generate", {"token_ids": [5], "content_parts": [{"type": "image_url", "url": "data:,"}]}),
    ],
)
def test_what_is_not_offered_is_not_read_over(made_up: str, route: str, asked: dict[str, Any]) -> None:
    answer = httpx.post(f"http://{made_up}{route}", json={"model": "tiny", **asked}, timeout=600)
    assert answer.status_code == 400 and answer.json()["error"]["param"] in asked


def test_errors_have_the_shape_that_the_clients_know(anthropic: Any, openai: Any, made_up: str) -> None:
    client = openai.OpenAI(base_url=f"http://{made_up}/s/errors/v1", api_key="any", max_retries=2)
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=[QUESTION])
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    long = [{"role": "user", "content": "2 " * LENGTH}]
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model="tiny", messages=long)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        anthropic.Anthropic(base_url=f"http://{made_up}", api_key="any").messages.create(
            model="tiny", max_tokens=5, messages=long
        )
    client.chat.completions.create(model="tiny", messages=[QUESTION], max_tokens=3)
    assert httpx.delete(f"http://{made_up}/sessions/errors").json()["over"] is True
    with pytest.raises(openai.ConflictError) as over:
        client.chat.completions.create(model="tiny", messages=[QUESTION])
    assert over.value.response.headers["x-should-retry"] == "false"
    assert over.value.response.request.headers["x-stainless-retry-count"] == "0"
    assert httpx.get(f"http://{made_up}/sessions/errors").status_code == 404
    method = httpx.get(f"http://{made_up}/v1/messages")
    assert (method.status_code, method.headers["allow"]) == (405, "POST")
    body = b'{"model": "tiny", "prompt": "' + b"a" * 2**25 + b'"}'
    with contextlib.suppress(httpx.WriteError):  # it may close while we still write
        assert httpx.post(f"http://{made_up}/v1/completions", content=body, timeout=600).status_code == 413


def test_a_gateway_with_a_token_and_limits(
    chat: Chat, model: pathlib.Path, made_up: str, tmp_path: pathlib.Path
) -> None:
    token = "a-token-of-the-gateway"
    (tmp_path / "token").write_text(token)
    with contextlib.closing(generator(tmp_path, model).wait()) as server:
        limits = (f"--token_file={tmp_path / 'token'}", "--sessions=1", "--turns=2", "--names=tiny,*")
        with gateway(tmp_path, model, f"--servers={server.address}", *limits) as process:
            base = f"http://{process.address}"
            asked = {"model": "claude-of-any-name", "max_tokens": 3, "messages": [QUESTION]}
            for key in ("", "wrong", "sk-scalerl-one"):
                answer = httpx.post(f"{base}/v1/messages", json=asked, headers={"x-api-key": key})
                assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
            for number, status in enumerate([200, 200, 409]):
                headers = {"authorization": f"Bearer sk-scalerl-one:{token}"}
                answer = httpx.post(f"{base}/v1/messages", json={**asked, "temperature": number}, headers=headers)
                assert answer.status_code == status, answer.text
            headers = {"x-api-key": token}
            answer = httpx.post(f"{base}/s/two/v1/messages", json=asked, headers=headers)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert httpx.post(f"{base}/v1/messages", json=asked, headers=headers).status_code == 200


def test_a_killed_gateway_goes_on_from_its_journal(chat: Chat, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    slow = "--replay_token_seconds=0.02"
    with contextlib.closing(generator(tmp_path, model, slow).wait()) as server:
        flags = (f"--servers={server.address}", f"--journal={tmp_path / 'journal'}")
        bodies = [{"model": "tiny", "messages": [QUESTION], "max_tokens": 30, "user": str(at)} for at in range(3)]
        with gateway(tmp_path, model, *flags) as process:
            url = f"http://{process.address}/s/kept/v1/chat/completions"
            # A client that gives up: the turn goes on, and its retry has it.
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json=bodies[0], timeout=httpx.Timeout(0.01, connect=30, write=30, pool=30))
            retry = {"x-stainless-retry-count": "1"}
            first = [httpx.post(url, json=bodies[0], headers=retry, timeout=600).json() for _ in range(2)]
            assert (first[0]["id"], first[0]["choices"]) == (first[1]["id"], first[1]["choices"])
            second = httpx.post(url, json=bodies[1], timeout=600).json()
            before = trace(process.address, "kept")
            assert before["turns"] == 2
            process.kill()
            process.start()
            process.wait()
            assert trace(process.address, "kept") == before
            again = [httpx.post(url, json=body, timeout=600).json() for body in bodies]
            assert [found["choices"] for found in again[:2]] == [first[0]["choices"], second["choices"]]
            after = trace(process.address, "kept")
            assert after["trace"][:2] == before["trace"] and after["turns"] == 3


def test_a_lost_server_costs_no_turn(chat: Chat, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    servers = [generator(tmp_path, model, "--replay_token_seconds=0.05", name=f"generator-{at}") for at in range(2)]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
        addresses = [server.wait().address for server in servers]
        with gateway(tmp_path, model, f"--servers={','.join(addresses)}") as process:
            answers = asyncio.run(ask_at_once(process.address, begun=servers[0].kill))
        # The same names and seeds on one server alone: what it says is the same.
        with gateway(tmp_path, model, f"--servers={addresses[1]}", name="alone") as process:
            alone = asyncio.run(ask_at_once(process.address))
        assert sorted(answers) == sorted(alone) and len({*map(tuple, answers)}) == len(answers)


def test_servers_are_listed_again(chat: Chat, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """One that is no longer listed delivers what it was asked for."""
    names, slow = ("first", "second"), "--replay_token_seconds=0.1"
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(contextlib.closing(generator(tmp_path, model, slow, name=n))) for n in names]
        first, second = [server.wait().address for server in servers]
        listed = tmp_path / "servers.txt"
        listed.write_text(first)
        flags = (f"--servers=file:{listed}", "--config.fleet.discovery_seconds=0.1")
        process = stack.enter_context(gateway(tmp_path, model, *flags))
        answers = asyncio.run(ask_at_once(process.address, begun=lambda: files.write_whole(str(listed), f"{second}\n")))
        left = f"server {first} has left: it is no longer listed"
        eventually(lambda: left in process.log.read_text())
        sampled = [turn["server"].split()[0] for turn in trace(process.address, "lost")["trace"]]
        assert sampled == [first] * len(answers)
        eventually(lambda: httpx.get(f"http://{process.address}/health").status_code == 200)
        body = {"model": "tiny", "messages": [QUESTION], "max_tokens": 4}
        httpx.post(f"http://{process.address}/s/then/v1/chat/completions", json=body, timeout=600).raise_for_status()
        assert trace(process.address, "then")["trace"][0]["server"].split()[0] == second
        assert "is lost" not in process.log.read_text()


def test_a_session_stays_where_its_turns_are(chat: Chat, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async def main(addresses: list[str]) -> None:
        fingerprint = tokenizer_fingerprint(str(model))
        generators = Generators(
            addresses, credentials=Credentials(), fingerprint=fingerprint, vocabulary=chat_model.VOCABULARY
        )
        watching = asyncio.create_task(generators.run())
        await eventually_async(lambda: len(generators.there) == 2)
        sampled = dict.fromkeys(addresses, 0)

        async def ask(session: str) -> str:
            """The address of the server that was asked."""
            prompt, sampling = np.array([5, 6], np.int32), Sampling(answer_budget=4)
            name = f"{session}/{sum(sampled.values())}"
            request = GroupRequest(0, name, prompt, (CompletionRequest(0, 1),), sampling, session=session)
            await generators.generate(request, seconds=60)
            for server in generators.servers:
                status = await server.stub.Status(pb.StatusRequest())
                before, sampled[server.address] = sampled[server.address], status.sampled_tokens
                if status.sampled_tokens > before:
                    return server.address
            raise AssertionError("no server was asked")

        first, second = generators.servers
        assert await ask("a") == first.address
        first.calls.add(watching)  # one of eight slots: it is no longer the least busy
        assert [await ask("a"), await ask("b"), await ask("b"), await ask("")] == [
            first.address, second.address, second.address, second.address,
        ]  # fmt: skip
        first.calls.update(asyncio.create_task(asyncio.sleep(0)) for _ in range(8))
        assert await ask("a") == second.address
        watching.cancel()

    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(contextlib.closing(generator(tmp_path, model, name=f"g{i}"))) for i in range(2)]
        asyncio.run(main([server.wait().address for server in servers]))


def test_servers_that_are_full_late_or_gone(chat: Chat, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    flags = ("--replay_token_seconds=1", "--slots=1", "--queue=1")
    with contextlib.closing(generator(tmp_path, model, *flags).wait()) as server:
        with gateway(tmp_path, model, f"--servers={server.address}", "--request_seconds=6") as process:
            url = f"http://{process.address}/v1/chat/completions"
            asked = {"model": "tiny", "messages": [QUESTION], "max_tokens": 60}
            full = httpx.post(url, json={**asked, "n": 6}, timeout=600)
            assert (full.status_code, full.json()["error"]["code"]) == (429, "queues_full")
            assert full.headers["retry-after"] == "1"
            late = httpx.post(url, json=asked, timeout=600)
            assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline")
            server.kill()
            eventually(lambda: httpx.get(f"http://{process.address}/health").status_code == 503)
            gone = httpx.post(url, json=asked, timeout=600)
            assert (gone.status_code, gone.json()["error"]["code"]) == (503, "no_server")


def test_calls_of_a_session_that_is_ended(chat: Chat, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    async def main(address: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=600) as client:
            asked = {"model": "tiny", "messages": [QUESTION], "max_tokens": 100}
            calls = [
                asyncio.create_task(client.post("/s/ended/v1/chat/completions", json=asked)),
                asyncio.create_task(client.post("/s/ended/v1/messages", json={**asked, "stream": True})),
            ]
            while (await client.get("/sessions/ended")).json().get("running") != len(calls):
                assert not any(call.done() for call in calls)
            await client.delete("/sessions/ended")
            return await asyncio.gather(*calls)

    with contextlib.closing(generator(tmp_path, model, "--replay_token_seconds=1").wait()) as server:
        with gateway(tmp_path, model, f"--servers={server.address}") as process:
            answers = asyncio.run(main(process.address))
            assert [answer.status_code for answer in answers] == [409, 409]
            assert answers[0].json()["error"]["code"] == "session_over" and answers[1].json()["type"] == "error"
            assert "Traceback" not in process.log.read_text()


async def ask_at_once(address: str, begun: Callable[[], None] = lambda: None) -> list[list[int]]:
    """The tokens of eight calls of a session; `begun` is called once all of them have begun."""
    asked = {"model": "tiny", "token_ids": [5, 6], "sampling_params": {"max_tokens": 60}}
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=600) as client:
        calls = [asyncio.create_task(client.post("/s/lost/inference/v1/generate", json=asked)) for _ in range(8)]
        count = 0
        while count < len(calls):
            found = (await client.get("/sessions/lost")).json()
            count = found.get("running", 0) + found.get("turns", 0)
        begun()
        answers = [call.raise_for_status().json() for call in await asyncio.gather(*calls)]
    return [answer["choices"][0]["token_ids"] for answer in answers]


def test_local_servers_are_started(openai: Any, chat: Chat, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    local = ("--config.fleet.servers=1", "--config.fleet.slots=4", "--maximum_tokens=64")
    with gateway(tmp_path, model, *local) as process:
        client = openai.OpenAI(base_url=f"http://{process.address}/s/jax/v1", api_key="any")
        greedy = [
            client.chat.completions.create(model="tiny", messages=[QUESTION], max_tokens=6, temperature=0)
            for _ in range(2)
        ]
        assert greedy[0].choices[0].message.content == greedy[1].choices[0].message.content
        process.process.terminate()
        assert eventually(lambda: process.process.poll() is not None)
        assert process.process.returncode == 128 + 15
        assert process.log.read_text().splitlines()[-1] == "the gateway has stopped"
