"""A trace as the policy would write it: the prompt as in RL, and pieces of text; only the assistant's are trained on.

    {"prompt", "completion"}   the prompt rendered like a row's (environments/prompts.py), then the completion; if the
                               chat template renders the prompt, they are a chat's question and answer
    {"messages"}               a chat through the model's template. An assistant turn is trained on if the whole chat
                               contains it as the policy would write it, unless it has "weight": 0, as in OpenAI's
                               files ("train" or "training": false in others); everything after the last trained turn
                               is left out
    {"messages", "tools"}      a chat whose turns call tools: an episode of RL, token for token. The prompt is the text
                               before the first answer, each turn is rendered as the last of the chat, and the text
                               between two turns is the environment's reply in an episode. So the thinking of every
                               turn stays, as it does in episodes

A turn starts at the end of the messages before it, rendered with the generation prompt, and ends at the end of the
messages up to it; a template that marks turns ({% generation %}) gives both itself. Both renderings must be prefixes of
the whole chat's, or the turn is context: templates of thinking models drop the thinking of all turns but the last. If
even the last turn is changed (DeepSeek-R1's template drops its thinking too), its text follows the generation prompt. A
last turn without a stop token gets the one with which the template ends turns, which may not be the model's first.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.environments.base import Row
from scalerl_jax.environments.made_problems import Piece
from scalerl_jax.environments.prompts import Prompts
from scalerl_jax.environments.tokenizer import Tokenizer, opening, split_thinking, thinking_at_end
from scalerl_jax.environments.tool_calls import Schemas, makes_calls

Messages = Sequence[Mapping[str, Any]]
_ABSENT = (0, 0)  # the span of a turn that is not found
_CONTENT = "said 5d1e08"  # a text that no message contains, to find where a template writes a turn's content
_WEIGHTS = ("weight", "train", "training")  # fields of a message; 0 or false: it is context


@dataclasses.dataclass(frozen=True)
class Trace:
    """The prompt and pieces of one row."""

    prompt: Sequence[int]  # token ids of the text before the pieces
    pieces: Sequence[Piece]


def continued(prompt: str, completion: str, end: str) -> str:
    """The completion without its opening marker of thinking, if the prompt ends with that marker.

    Raises ValueError where the prompt has closed thinking and the completion thinks, or where the prompt has opened
    thinking and the completion never ends it, which would teach never to answer.
    """
    at_end = thinking_at_end(prompt, end)
    if at_end == "closed" and end in completion:
        raise ValueError(f"the prompt ends in {end}, and the completion thinks all the same")
    _check_ended(prompt, completion, end)
    bare = completion.lstrip()
    if at_end == "opened" and bare.startswith(opening(end)):
        bare = bare.removeprefix(opening(end))
        # The prompt also has the newline that follows the marker.
        return bare.removeprefix("\n") if prompt.endswith("\n") else bare
    return completion


def _check_ended(prompt: str, completion: str, end: str) -> None:
    if thinking_at_end(prompt, end) == "opened" and end not in completion:
        raise ValueError(
            f"the prompt has opened thinking ({opening(end)}), and the completion has no {end}: it would teach never "
            "to answer"
        )


def end_of_turn(prompts: Prompts, tokenizer: Tokenizer) -> str:
    """The stop token that the chat template writes after the assistant's text, as text; "" if it writes none."""
    asked = prompts.complete([{"role": "user", "content": "?"}])
    behind = tokenizer.encode(prompts.template().behind_answer(asked))
    return next((tokenizer.decode([token]) for token in behind if token in tokenizer.stop_ids), "")


class Conversations:
    """Renders traces with the prompts of one environment (config.environment)."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        self._config, self._tokenizer, self._prompts = config, tokenizer, Prompts(config, tokenizer)
        self._stops = [tokenizer.decode([token]) for token in tokenizer.stop_ids]
        self._end_of_turn: str | None = None
        self._end = config.rollout.end_of_thinking
        self._counts: Counter[str] = Counter()

    @property
    def notes(self) -> list[str]:
        """Lines on how the traces so far were rendered."""
        notes, counts = list(self._prompts.notes), self._counts
        if counts["context"]:
            notes.append(
                f"{counts['context']:,} of {counts['turns']:,} turns of the assistant are context only: the chat "
                "template writes them otherwise once the chat goes on"
            )
        if counts["behind"]:
            notes.append(
                f"{counts['behind']:,} turns stand behind the generation prompt as they were given: the chat "
                "template would change them"
            )
        return notes

    def answered(self, prompt: str, completion: str, tools: Schemas = ()) -> Trace:
        """The trace of a prompt and a completion. Raises ValueError, one line."""
        if self._config.environment.chat_template == "always" or tools:
            answer = self._without_end(completion)
            return self.turns([{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}], tools)
        row = self._prompts.render(Row(prompt))
        return Trace(row.token_ids.tolist(), [Piece(continued(row.text, completion, self._end))])

    def turns(self, messages: Messages, tools: Schemas = ()) -> Trace:
        """The trace of a chat, up to the last turn that is trained on. Raises ValueError, one line."""
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant" and at > 0]
        trained = [at for at in answers if _trained(messages[at])]
        if not trained:
            raise ValueError(
                "each answer of the assistant has weight 0"
                if answers
                else "none of the messages is an answer of the assistant"
            )
        if not _text(messages[trained[-1]], self._end).strip() and "tool_calls" not in messages[trained[-1]]:
            raise ValueError("the assistant's last message is empty")
        if tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages):
            return self._episode(messages[: trained[-1] + 1], answers[: answers.index(trained[-1]) + 1], tools)
        # The last turn's prompt gets the system prompt and the suffix as prompts of RL do.
        before = self._prompts.complete(messages[: trained[-1]])
        chat = [*before, messages[trained[-1]]]
        template, begin = self._prompts.template(), self._prompts.ask(before)
        if template.marks_turns:
            whole, spans = template.render_turns(chat)
            spans = self._weighted(spans, chat)
        else:
            whole = template.render(chat, generation_prompt=False)
            spans = self._spans(chat, whole, begin)
        *earlier, last = spans or [_ABSENT]
        text, end, completion = whole, last[0], whole[slice(*last)]
        if last == _ABSENT or not self._as_given(chat[-1], completion):
            self._counts["behind"] += 1
            earlier = [span for span in earlier if begin.startswith(whole[: span[1]])]
            text, end, completion = begin, len(begin), continued(begin, _text(chat[-1], self._end), self._end)
        if self._without_end(completion) == completion:
            completion += self._turn_end()
        pieces: list[Piece] = []
        done = 0
        _check_ended(begin, completion, self._end)
        for start, stop in earlier:
            _check_ended(text[:start], text[start:stop], self._end)
            pieces += [Piece(text[done:start], trained=False), Piece(text[start:stop])]
            done = stop
        return Trace([], [*pieces, Piece(text[done:end], trained=False), Piece(completion)])

    def _episode(self, chat: Messages, answers: Sequence[int], tools: Schemas) -> Trace:
        """A chat as an episode of RL. answers: indices of the assistant's turns; the chat ends with the last one."""
        prompts, end = self._prompts, 0
        history = list(prompts.complete(chat[: answers[0]]))
        pieces = [Piece(prompts.ask(history, tools=tools), trained=False)]
        for at in answers:
            if pieces[1:]:
                # As in an episode, only these fields: an id or a name would change the text in some templates.
                replies = [{"role": message["role"], "content": message["content"]} for message in chat[end:at]]
                if not replies:
                    raise ValueError(f"messages {at} and {at + 1} are both the assistant's")
                history += replies
                pieces.append(Piece(prompts.template().next_turn(replies), trained=False))
            pieces.append(Piece(self._turn(history, chat[at], tools), _trained(chat[at])))
            history.append(chat[at])
            end = at + 1
        return Trace([], pieces)

    def _turn(self, history: Messages, message: Mapping[str, Any], tools: Schemas) -> str:
        """The assistant's `message` as the policy would write it after the messages `history`, with its end of turn."""
        template = self._prompts.template()
        begin = template.render(history, tools=tools)
        whole = template.render([*history, message], generation_prompt=False, tools=tools)
        turn = whole[len(begin) :] if whole.startswith(begin) else ""
        if not turn or not self._as_given(message, turn):
            # The thinking as given, followed by the template's text of the message without thinking.
            self._counts["behind"] += 1
            text = _text(message, self._end)
            answer = text.rpartition(self._end)[2].lstrip() if self._end and self._end in text else text
            bare = {name: part for name, part in message.items() if name != "reasoning_content"}
            whole, marked = (
                template.render([*history, {**bare, "content": content}], generation_prompt=False, tools=tools)
                for content in (answer, _CONTENT)
            )
            before, found, _ = marked.rpartition(_CONTENT)
            if not found or not whole.startswith(before):
                raise ValueError(f"{template.file}: the chat template leaves out what is said beside a call of a tool")
            turn = continued(begin, text[: len(text) - len(answer)] + whole[len(before) :], self._end)
        if any(call["function"]["name"] not in turn for call in message.get("tool_calls", ())):
            raise ValueError(f"{template.file}: the chat template does not write calls of tools")
        _check_ended(begin, turn, self._end)
        if self._without_end(turn) != turn:
            return turn.rstrip()
        return turn + (self._turn_end() or self._tokenizer.decode([self._tokenizer.eos_id]))

    def _turn_end(self) -> str:
        if self._end_of_turn is None:
            self._end_of_turn = end_of_turn(self._prompts, self._tokenizer)
        return self._end_of_turn

    def _without_end(self, completion: str) -> str:
        """The completion without a stop token at its end, if it has one."""
        bare = completion.rstrip()
        stop = next((stop for stop in self._stops if stop and bare.endswith(stop)), "")
        return bare.removesuffix(stop) if stop else completion

    def _spans(self, chat: Messages, whole: str, last_begin: str) -> list[tuple[int, int]]:
        """Spans of the assistant's turns in the chat's text; the last is _ABSENT if it is not found.

        last_begin: the prompt of the last turn.
        """
        template = self._prompts.template()
        spans = []
        for at, message in enumerate(chat):
            if message["role"] != "assistant" or at == 0:
                continue
            last = at == len(chat) - 1
            if not _trained(message):
                continue
            begin = last_begin if last else template.render(chat[:at])
            until = whole if last else template.render(chat[: at + 1], generation_prompt=False)
            self._counts["turns"] += 1
            if whole.startswith(begin) and whole.startswith(until) and len(until) > len(begin):
                spans.append((len(begin), len(until)))
            elif last:
                spans.append(_ABSENT)
            else:
                self._counts["context"] += 1
        return spans

    @staticmethod
    def _weighted(spans: Sequence[tuple[int, int]], chat: Messages) -> list[tuple[int, int]]:
        """The spans, among those that the template marks, that are trained on. Raises ValueError, one line."""
        turns = [_trained(message) for message in chat if message["role"] == "assistant"]
        if all(turns):
            return list(spans)
        if len(turns) != len(spans):
            raise ValueError(
                f"the chat template marks {len(spans)} parts as the assistant's, which has {len(turns)} turns: which "
                "of them have weight 0 is not clear"
            )
        return [span for span, trained in zip(spans, turns) if trained]

    def _as_given(self, message: Mapping[str, Any], written: str) -> bool:
        """Whether a turn's part of the chat's text contains the message's thinking, once, and its answer."""
        text, end = _text(message, self._end), self._end
        if not end or end not in text:
            return text.strip() in written
        thinking, answer = split_thinking(text, end)
        return written.count(end) == text.count(end) and thinking in written and (answer or "") in written


def _text(message: Mapping[str, Any], end: str) -> str:
    """The text of the message, preceded by its thinking if that is a separate field."""
    thought = message.get("reasoning_content")
    if not isinstance(thought, str) or not thought:
        return str(message["content"])
    return f"{opening(end)}\n{thought.strip()}\n{end}\n\n{message['content']}"


def _trained(message: Mapping[str, Any]) -> bool:
    """Whether a message's own fields allow training on it."""
    return not any(name in message and message[name] == 0 for name in _WEIGHTS)


def read_messages(value: Any) -> Messages:
    """A chat from a row's cell: messages with {"role", "content"}, or {"from", "value"} as in ShareGPT.

    Raises ValueError where it is not a chat.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("is no list of messages")
    messages: list[dict[str, Any]] = []
    waiting: list[Any] = []  # ids of calls whose results come next; None: a call without an id
    for number, given in enumerate(value, 1):
        if not isinstance(given, Mapping):
            raise ValueError(f"message {number} is not an object")
        message = {name: part for name, part in given.items() if part is not None}
        if "from" in message and "role" not in message:
            role = message.pop("from")
            message["role"] = {"human": "user", "gpt": "assistant"}.get(role, role)
            message["content"] = message.pop("value", None)
        content = message.get("content")
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
            if all(isinstance(part, str) for part in parts):
                message["content"] = "".join(map(str, parts))
        if "tool_calls" in message:
            try:
                calls = _read_calls(message.pop("tool_calls"))
            except ValueError as error:
                raise ValueError(f"message {number}: {error}") from error
            if calls:
                message |= {"tool_calls": calls, "content": message.get("content", "")}
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(
                f"message {number} has no text as its role and its content ({', '.join(given) or 'no keys'})"
            )
        if message["role"] == "tool":
            before = messages[-1] if messages else {}
            if before.get("role") == "assistant":  # in older sets the calls are in the text
                calls = before.get("tool_calls", [{}] * makes_calls(before["content"]))
                waiting = [call.get("id") for call in calls]
            elif before.get("role") != "tool":
                waiting = []
            _match_result(waiting, message.get("tool_call_id"), number)
        for name in _WEIGHTS:
            if message.get(name, 1) not in (0, 1):
                raise ValueError(f"message {number} has {name}={message[name]!r}: only 0 and 1 (false and true) are")
        try:
            "".join(part for part in message.values() if isinstance(part, str)).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"message {number} is no text: it has half of a surrogate pair") from error
        messages.append(message)
    return messages


def _read_calls(value: Any) -> list[dict[str, Any]]:
    """A message's calls in OpenAI's format, with the arguments as an object. Raises ValueError if malformed."""
    if not isinstance(value, list):
        raise ValueError(f"tool_calls is {type(value).__name__}, not a list")
    calls = []
    for given in value:
        function = given.get("function") if isinstance(given, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError('a call of tool_calls is not {"function": {"name": text, "arguments": ...}}')
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the arguments of {function['name']} are not JSON: {error}") from error
        else:
            arguments = _without_nulls({} if arguments is None else arguments)
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of {function['name']} are {type(arguments).__name__}, not an object")
        call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        calls.append(call if given.get("id") is None else {"id": given["id"], **call})
    return calls


def _match_result(waiting: list[Any], asked: Any, number: int) -> None:
    """Removes the call whose result is message `number`. Raises ValueError if it is not the result of a call."""
    for call in (asked, None):
        if call in waiting:
            return waiting.remove(call)
    if asked is None and waiting:
        return waiting.remove(waiting[0])
    which = f" with the id {asked!r}" if asked is not None else ""
    raise ValueError(f"message {number} is of the role tool, and no call{which} waits for a result there")


def read_tools(value: Any) -> list[dict[str, Any]]:
    """The JSON schemas of a row's tools: a list or its JSON text, of functions with or without their wrapper.

    Raises ValueError where they are malformed.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is neither a list of tools nor JSON: {error}") from error
    else:
        value = _without_nulls(value or [])
    if not isinstance(value, list):
        raise ValueError(f"is {type(value).__name__}, not a list of tools")
    tools = [
        {"type": "function", "function": tool} if isinstance(tool, dict) and "name" in tool else tool for tool in value
    ]
    for number, tool in enumerate(tools, 1):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tool {number} has no name")
    return tools


def _without_nulls(value: Any) -> Any:
    """Drops null values: in a table an object has the keys of all rows, with null for those it lacks."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
