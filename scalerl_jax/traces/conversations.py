"""A trace as the policy would write it: the prompt as it is asked, and pieces of text, of which the assistant's count.

    {"prompt", "completion"}   the prompt as a row's (environments/prompts.py), the completion behind it; where the chat
                               template renders the prompt they are a chat's question and answer
    {"messages"}               a chat through the model's template; all turns of the assistant are trained on that the
                               whole chat has as the policy would write them, but for those with "weight": 0, as
                               OpenAI's files have it ("train" or "training": false in others); what comes after the
                               last turn that is trained on is left out

A turn begins where the messages before it end, rendered with the generation prompt, and ends where the messages up to
it do; a template that marks turns ({% generation %}) says so itself. Both renderings begin the whole chat's, or the
turn is context: templates of thinking models drop the thinking of all turns but the last. Where even the last is not
written down as it was (DeepSeek-R1's template drops its thinking too), its text follows the generation prompt. A last
turn without a stop token gets the one that the template ends turns with: it need not be the first of the model's.

Left out on purpose: calls of tools.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.environments.base import Row
from scalerl_jax.environments.made_problems import Piece
from scalerl_jax.environments.prompts import Prompts
from scalerl_jax.environments.thinking import opening, split_thinking, thinking_at_end
from scalerl_jax.environments.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
_ABSENT = (0, 0)  # the place of a turn that is not found
_WEIGHTS = ("weight", "train", "training")  # of a message, 0 or false: it is context


@dataclasses.dataclass(frozen=True)
class Trace:
    """What is trained on of a row."""

    prompt: Sequence[int]  # token ids of what stands before the pieces
    pieces: Sequence[Piece]


def continued(prompt: str, completion: str, end: str) -> str:
    """The completion without the marker that its prompt has opened thinking with already.

    Raises ValueError where the prompt has closed thinking, and the completion thinks; or it has opened thinking, and
    the completion never ends it, which would teach never to answer.
    """
    at_end = thinking_at_end(prompt, end)
    if at_end == "closed" and end in completion:
        raise ValueError(f"the prompt ends in {end}, and the completion thinks all the same")
    _check_ended(prompt, completion, end)
    bare = completion.lstrip()
    if at_end == "opened" and bare.startswith(opening(end)):
        bare = bare.removeprefix(opening(end))
        # The prompt has the end of the line, too, that follows the marker.
        return bare.removeprefix("\n") if prompt.endswith("\n") else bare
    return completion


def _check_ended(prompt: str, completion: str, end: str) -> None:
    if thinking_at_end(prompt, end) == "opened" and end not in completion:
        raise ValueError(
            f"the prompt has opened thinking ({opening(end)}), and the completion has no {end}: it would teach never "
            "to answer"
        )


def end_of_turn(prompts: Prompts, tokenizer: Tokenizer) -> str:
    """The stop token that the chat template writes behind what the assistant says, as text; "": it writes none."""
    asked = prompts.complete([{"role": "user", "content": "?"}])
    behind = tokenizer.encode(prompts.template().behind_answer(asked))
    return next((tokenizer.decode([token]) for token in behind if token in tokenizer.stop_ids), "")


class Conversations:
    """Of one environment's prompts (config.environment)."""

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
                f"{counts['behind']:,} last turns stand behind the generation prompt as they were given: the chat "
                "template would change them"
            )
        return notes

    def answered(self, prompt: str, completion: str) -> Trace:
        """Of two texts. Raises ValueError, one line."""
        if self._config.environment.chat_template == "always":
            answer = self._without_end(completion)
            return self.turns([{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}])
        row = self._prompts.render(Row(prompt))
        return Trace(row.token_ids.tolist(), [Piece(continued(row.text, completion, self._end))])

    def turns(self, messages: Messages) -> Trace:
        """Of a chat; what comes after the last turn that is trained on is left out. Raises ValueError, one line."""
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant" and at > 0]
        trained = [at for at in answers if _trained(messages[at])]
        if not trained:
            raise ValueError(
                "each answer of the assistant has weight 0"
                if answers
                else "none of the messages is an answer of the assistant"
            )
        if not _text(messages[trained[-1]], self._end).strip():
            raise ValueError("the assistant's last message is empty")
        # The prompt of the last turn has the system prompt and the suffix where a prompt of RL has them.
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

    def _turn_end(self) -> str:
        if self._end_of_turn is None:
            self._end_of_turn = end_of_turn(self._prompts, self._tokenizer)
        return self._end_of_turn

    def _without_end(self, completion: str) -> str:
        """Without the stop token that it may have been written down with."""
        bare = completion.rstrip()
        stop = next((stop for stop in self._stops if stop and bare.endswith(stop)), "")
        return bare.removesuffix(stop) if stop else completion

    def _spans(self, chat: Messages, whole: str, last_begin: str) -> list[tuple[int, int]]:
        """Where the assistant's turns are in the chat's text; the last is _ABSENT where it is not found.

        last_begin: the prompt of the last one.
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
        """Those that are trained on of the turns that the template marks. Raises ValueError, one line."""
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
        """Whether a turn's part of the chat's text has the thinking that the message has, and its answer."""
        text = _text(message, self._end)
        if self._end not in text:
            return text.strip() in written
        thinking, answer = split_thinking(text, self._end)
        return self._end in written and thinking in written and (answer or "") in written


def _text(message: Mapping[str, Any], end: str) -> str:
    """What the message says, its thinking in front where that stands by itself."""
    thought = message.get("reasoning_content")
    if not isinstance(thought, str) or not thought:
        return str(message["content"])
    return f"{opening(end)}\n{thought.strip()}\n{end}\n\n{message['content']}"


def _trained(message: Mapping[str, Any]) -> bool:
    """Whether a message is trained on, as far as it says so itself."""
    return not any(name in message and message[name] == 0 for name in _WEIGHTS)


def read_messages(value: Any) -> Messages:
    """A chat from a row's cell: {"role", "content"} or {"from", "value"} of each message, as ShareGPT has it.

    Raises ValueError where it is none.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("is no list of messages")
    messages = []
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
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(
                f"message {number} has no text as its role and its content ({', '.join(given) or 'no keys'})"
            )
        for name in _WEIGHTS:
            if message.get(name, 1) not in (0, 1):
                raise ValueError(f"message {number} has {name}={message[name]!r}: only 0 and 1 (false and true) are")
        try:
            "".join(part for part in message.values() if isinstance(part, str)).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"message {number} is no text: it has half of a surrogate pair") from error
        messages.append(message)
    return messages
