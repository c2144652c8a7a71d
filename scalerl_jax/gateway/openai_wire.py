"""OpenAI's protocol, and vLLM's for tokens: parses request bodies, and builds answers from turns.

/v1/chat/completions, /v1/completions    streamed: the whole answer once it is complete, in the chunks of a stream
/inference/v1/generate                   tokens in and tokens out, for verifiers' and prime-rl's TrainClient
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.environments.tool_calls import check_json
from scalerl_jax.gateway import wire
from scalerl_jax.gateway.chat import Message
from scalerl_jax.gateway.sessions import Turn
from scalerl_jax.gateway.wire import Sampled, SampleRequest, bad, field, number

_ROLES = ("system", "developer", "user", "assistant", "tool")
_NOT_OFFERED = {
    "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_p": 0, "min_tokens": 0,
    "logit_bias": None, "echo": False, "best_of": 1, "suffix": "", "prompt_logprobs": None, "functions": None,
    "ignore_eos": False, "use_beam_search": False, "guided_json": None, "structured_outputs": None,
    "guided_choice": None, "guided_regex": "", "guided_grammar": "", "guided_decoding": None, "allowed_token_ids": None,
    "bad_words": None, "length_penalty": 1, "logits_processors": None, "truncate_prompt_tokens": None,
}  # fmt: skip
_NOT_OF_TEXTS = {
    **_NOT_OFFERED, "stop_token_ids": None, "add_generation_prompt": True, "continue_final_message": False,
    "chat_template": None, "web_search_options": False,  # {} asks for a search
}  # fmt: skip
_COMPLETION_TOKENS = 16  # of a completion that names no max_tokens


# ---- requests


def chat(body: Mapping[str, Any]) -> SampleRequest:
    """Raises ApiError naming the field at fault."""
    _refuse(body)
    calls_tools = wire.may_call_tools(field(body, "tool_choice", (str, dict), "auto"))
    number(body, "top_logprobs", 0, 0, 20, whole=True)
    most = number(body, "max_completion_tokens", None, 1, 2**31 - 1, whole=True)
    return SampleRequest(
        messages=_messages(field(body, "messages", list, [])),
        tools=_tools(field(body, "tools", list, [])) if calls_tools else (),
        template_arguments=field(body, "chat_template_kwargs", dict, {}),
        choices=number(body, "n", 1, 1, wire.MOST_CHOICES, whole=True),
        max_tokens=most or number(body, "max_tokens", None, 1, 2**31 - 1, whole=True),
        **wire.sampling_fields(body),
    )


def completions(body: Mapping[str, Any], tokenizer: Tokenizer, vocabulary: int) -> list[SampleRequest]:
    """One for each prompt, whose token ids are below `vocabulary`. Raises ApiError naming the field at fault."""
    _refuse(body, chat_template_kwargs=None)
    number(body, "logprobs", None, 0, 5, whole=True)
    prompt = field(body, "prompt", (str, list))
    if not prompt:
        raise bad("prompt: must be a text, token ids, or a list of them", "prompt")
    several = isinstance(prompt, list) and all(isinstance(one, str | list) for one in prompt)
    given = {
        "choices": number(body, "n", 1, 1, wire.MOST_CHOICES, whole=True),
        "max_tokens": number(body, "max_tokens", _COMPLETION_TOKENS, 1, 2**31 - 1, whole=True),
        **wire.sampling_fields(body),
    }
    prompts = prompt if several else [prompt]
    if len(prompts) * given["choices"] > wire.MOST_CHOICES:
        raise bad(f"prompt: {wire.MOST_CHOICES} completions may be asked for at once", "prompt")
    ids = [tokenizer.encode_prompt(one) if isinstance(one, str) else one for one in prompts]
    return [SampleRequest(prompt=wire.token_ids(one, "prompt", vocabulary), **given) for one in ids]


def generate(body: Mapping[str, Any], vocabulary: int) -> SampleRequest:
    """Raises ApiError naming the field at fault."""
    sampling = field(body, "sampling_params", dict, {})
    wire.refuse(body, features=None, content_parts=None)  # images
    wire.refuse(sampling, **_NOT_OFFERED, n=1)
    stops = field(sampling, "stop_token_ids", list, [])
    return SampleRequest(
        prompt=wire.token_ids(body.get("token_ids"), "token_ids", vocabulary),
        max_tokens=number(sampling, "max_tokens", None, 1, 2**31 - 1, whole=True),
        stop_token_ids=tuple(wire.token_ids(stops, "stop_token_ids", vocabulary).tolist()) if stops else (),
        **wire.sampling_fields(sampling),
    )


def _refuse(body: Mapping[str, Any], **neutral: Any) -> None:
    wire.refuse(body, **_NOT_OF_TEXTS, **neutral)
    if (field(body, "response_format", dict, {}).get("type") or "text") != "text":
        raise bad("response_format: only text is offered", "response_format")


def _messages(given: Sequence[Any]) -> tuple[Message, ...]:
    if not given:
        raise bad("messages: one at least", "messages")
    return tuple(message_of(message, f"messages[{at}]") for at, message in enumerate(given))


def message_of(given: Any, where: str) -> Message:
    if not isinstance(given, dict) or given.get("role") not in _ROLES:
        raise bad(f"{where}: must have a role of {', '.join(_ROLES)}", where)
    role = "system" if given["role"] == "developer" else given["role"]
    message: dict[str, Any] = {"role": role, "content": wire.content_text(given.get("content"), f"{where}.content")}
    if role == "assistant":
        thinking = field(given, "reasoning_content", str) or field(given, "reasoning", str)
        if thinking:
            message["reasoning_content"] = thinking
        if calls := field(given, "tool_calls", list, []):
            message["tool_calls"] = [_tool_call(call, f"{where}.tool_calls") for call in calls]
    elif role == "tool":
        message["tool_call_id"] = field(given, "tool_call_id", str, "")
    return message


def _tool_call(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad(f'{where}: a call is {{"id", "type": "function", "function": {{"name", "arguments"}}}}', where)
    try:
        arguments = json.loads(field(function, "arguments", str, "{}") or "{}")
        check_json(arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise bad(f"{where}: arguments must be a JSON object, as text", where)
    call_id = field(given, "id", str, "")
    return {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(given: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
    for at, tool in enumerate(given):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad(f"tools[{at}]: must be a function with a name", f"tools[{at}]")
    return tuple(given)


# ---- answers


def chat_answer(found: Sampled) -> dict[str, Any]:
    (turns,), body = found.calls, found.body
    choices: list[dict[str, Any]] = []
    for turn in turns:
        choice: dict[str, Any] = {
            "index": turn.index, "message": _message(turn.message), "finish_reason": _finish(turn), "logprobs": None,
        }  # fmt: skip
        if body.get("logprobs"):
            content = [
                {**one, "top_logprobs": [one] * bool(body.get("top_logprobs"))}
                for one in _tokens(turn, found.tokenizer)
            ]
            choice["logprobs"] = {"content": content, "refusal": None}
        if body.get("return_token_ids"):
            choice["token_ids"] = turn.token_ids.tolist()
        choices.append(choice)
    head = _head(f"chatcmpl-{found.name}", "chat.completion", found.model)
    answer = {**head, "choices": choices, "usage": _usage(turns, turns[0].prompt)}
    return {**answer, **({"prompt_token_ids": found.prompt()} if body.get("return_token_ids") else {})}


def completion_answer(found: Sampled) -> dict[str, Any]:
    body, choices = found.body, list[dict[str, Any]]()
    prompts = [found.prompt(number) for number in range(len(found.calls))]
    for turns, prompt in zip(found.calls, prompts):
        for turn in turns:
            choice: dict[str, Any] = {
                "index": len(choices), "text": turn.message["content"], "finish_reason": turn.finish_reason,
                "logprobs": None,
            }  # fmt: skip
            if (logprobs := body.get("logprobs")) is not None:
                tokens = _tokens(turn, found.tokenizer)
                texts = [one["token"] for one in tokens]
                choice["logprobs"] = {
                    "tokens": texts,
                    "token_logprobs": [one["logprob"] for one in tokens],
                    "top_logprobs": [{one["token"]: one["logprob"]} for one in tokens] if logprobs else None,
                    "text_offset": [0, *np.cumsum([len(text) for text in texts])[:-1].tolist()],
                }
            if body.get("return_token_ids"):
                choice |= {"token_ids": turn.token_ids.tolist(), "prompt_token_ids": prompt}
            choices.append(choice)
    flat = [turn for turns in found.calls for turn in turns]
    usage = _usage(flat, sum(map(len, prompts)))
    answer = {**_head(f"cmpl-{found.name}", "text_completion", found.model), "choices": choices, "usage": usage}
    alone = len(prompts) == 1 and body.get("return_token_ids")
    return {**answer, **({"prompt_token_ids": prompts[0]} if alone else {})}


def generate_answer(found: Sampled) -> dict[str, Any]:
    turn = found.turn
    content = [
        {"token": f"token_id:{token}", "logprob": min(0.0, float(logprob))}
        for token, logprob in zip(turn.token_ids.tolist(), turn.logprobs)
    ]
    choice = {"index": 0, "token_ids": turn.token_ids.tolist(), "logprobs": {"content": content}}
    choice["finish_reason"] = turn.finish_reason
    usage = _usage([turn], turn.prompt)
    return {"request_id": found.name, "choices": [choice], "prompt_token_ids": found.prompt(), "usage": usage}


def chat_chunks(found: Sampled) -> Iterator[str]:
    """The events that stream an answer."""
    return _chunks(chat_answer(found), found.body)


def completion_chunks(found: Sampled) -> Iterator[str]:
    """The events that stream an answer."""
    return _chunks(completion_answer(found), found.body)


def _chunks(answer: Mapping[str, Any], body: Mapping[str, Any]) -> Iterator[str]:
    head = {name: answer[name] for name in ("id", "created", "model")}
    kind = answer["object"]
    head["object"] = "chat.completion.chunk" if kind == "chat.completion" else kind
    for choice in answer["choices"]:
        at = {"index": choice["index"]}
        whole = {name: value for name, value in choice.items() if name not in ("index", "message", "finish_reason")}
        last: dict[str, Any] = {"logprobs": None, "finish_reason": choice["finish_reason"]}
        if kind == "chat.completion":
            message = {name: value for name, value in choice["message"].items() if name != "role"}
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
            first = {"role": "assistant", "content": ""}
            yield _event({**head, "choices": [{**at, "delta": first, "logprobs": None, "finish_reason": None}]})
            whole["delta"], last["delta"] = message, {}
        else:
            last["text"] = ""
        yield _event({**head, "choices": [{**at, **whole, "finish_reason": None}]})
        yield _event({**head, "choices": [{**at, **last}]})
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield _event({**head, "choices": [], "usage": answer["usage"]})
    yield "data: [DONE]\n\n"


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value, allow_nan=False)}\n\n"


def _head(name: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def _message(message: Message) -> dict[str, Any]:
    """A message as it is in an answer."""
    shown = {**message, "refusal": None}
    if calls := message.get("tool_calls"):
        shown["content"] = message["content"] or None
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    return shown


def _finish(turn: Turn) -> str:
    return "tool_calls" if turn.finish_reason == "stop" and turn.message.get("tool_calls") else turn.finish_reason


def _tokens(turn: Turn, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    ids = turn.token_ids.tolist()
    texts = tokenizer.pieces(ids) or [tokenizer.decode([token]) for token in ids]
    return [
        {"token": text, "logprob": min(0.0, float(logprob)), "bytes": list(text.encode())}
        for text, logprob in zip(texts, turn.logprobs)
    ]


def _usage(turns: Sequence[Turn], prompt: int) -> dict[str, Any]:
    completion = sum(len(turn.token_ids) for turn in turns)
    return {
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        "scalerl": wire.usage_of(turns),
    }  # fmt: skip
