"""Messages as tokens, and tokens as a message: one model's chat template, thinking, tool calls, stop strings.

{"role": "system" | "user" | "assistant" | "tool", "content": text}    and optionally
"reasoning_content": text                                               of an assistant: its thinking
"tool_calls": [{"id", "type": "function", "function": {"name", "arguments": {...}}}]
"tool_call_id": text                                                    of a tool
"""

import bisect
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments.chat_template import ChatTemplate, read_chat_template
from scalerl_jax.environments.tokenizer import Tokenizer, opening, split_thinking, thinking_at_end
from scalerl_jax.environments.tool_calls import HERMES, Schemas, form_of, split_calls
from scalerl_jax.model.decoder_config import read_config

Message = Mapping[str, Any]  # as above

_LONGEST_OPENING = 16  # tokens at the end of a prompt that are searched for the start of thinking


class NotRendered(ValueError):
    """The chat template does not accept these messages, or there is none."""


def vocabulary_of(folder: str) -> int:
    """The model's vocabulary size; 0 for a model family that only its engine knows."""
    try:
        return read_config(folder).vocab_size
    except ValueError:
        return 0


class Chat:
    """Chat of one model folder. template: None if it has none; then only prompts of tokens or text are possible.

    end_of_thinking: the marker after thinking; "": completions are not split. vocabulary: the model's, which may be
    larger than the tokenizer's. history: config.environment.history. Tool calls are parsed in the form that the
    template writes.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, *, end_of_thinking: str, vocabulary: int = 0,
        history: str = "all",
    ):  # fmt: skip
        self.tokenizer, self.template, self._end, self.history = tokenizer, template, end_of_thinking, history
        self.vocabulary = max(tokenizer.vocabulary, vocabulary)
        self._form = (form_of(template) if template is not None else None) or HERMES

    @classmethod
    def of(cls, config: Config, tokenizer: Tokenizer) -> "Chat":
        """Of the config's model. Raises ValueError naming an unusable file or setting."""
        template = read_chat_template(config.model.path, config.environment.template_arguments)
        return cls(
            tokenizer, template, end_of_thinking=config.rollout.end_of_thinking, history=config.environment.history,
            vocabulary=vocabulary_of(config.model.path),
        )  # fmt: skip

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any] = {}
    ) -> list[int]:
        """The prompt tokens of the assistant's next turn. arguments: of the template. Raises NotRendered."""
        return self._encoded(arguments, lambda template: template.render(messages, tools=tools))

    def reply(self, messages: Sequence[Message], arguments: Mapping[str, Any] = {}, *, behind: int) -> list[int]:
        """What the template writes after an assistant's turn that ends with token `behind`, up to its next turn.

        Raises NotRendered.
        """
        ids = self._encoded(arguments, lambda template: template.next_turn(messages))
        return ids[1:] if ids[:1] == [behind] else ids  # the turn's end has been sampled

    def continued(
        self, path: np.ndarray, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> list[int] | None:  # fmt: skip
        """As `render`, but only what is behind `path`; None if the template writes the turns of the path otherwise."""
        text = self.tokenizer.decode(path.tolist())

        def rest(template: ChatTemplate) -> str:
            more, again = template.continued(text, messages, tools=tools)
            return "" if again else more

        return self._encoded(arguments, rest) or None

    def _encoded(self, arguments: Mapping[str, Any], render: Callable[[ChatTemplate], str]) -> list[int]:
        if self.template is None:
            raise NotRendered("the model has no chat template: ask /v1/completions")
        try:
            return self.tokenizer.encode(render(self.template.with_arguments(arguments, "chat_template_kwargs")))
        except ValueError as error:
            raise NotRendered(str(error)) from error

    def text(self, completion: Completion, stops: Sequence[str]) -> tuple[Completion, str, str | None]:
        """(the completion up to the token that completes the first stop string, the text before it, the string)."""
        ids, text = completion.token_ids, self.tokenizer.decode_completion(completion.token_ids.tolist())
        at, stop = min(((text.find(stop), stop) for stop in stops if stop in text), default=(-1, None))
        if stop is None:
            return completion, text, None
        end = at + len(stop)
        tokens = 1 + bisect.bisect_left(range(1, len(ids)), end, key=lambda n: self._begun_alike(ids[:n], text))
        cut = dataclasses.replace(
            completion, token_ids=ids[:tokens], logprobs=completion.logprobs[:tokens], finish_reason="stop",
            versions=tuple((step, a, min(b, tokens)) for step, a, b in completion.versions if a < tokens),
            forced=tuple((a, min(b, tokens)) for a, b in completion.forced if a < tokens), experts=None,
        )  # fmt: skip
        return cut, text[:at], stop

    def _begun_alike(self, ids: np.ndarray, text: str) -> int:
        """Number of characters of `text` that these tokens decode to."""
        begun = self.tokenizer.decode(ids.tolist())
        while not text.startswith(begun):  # half a character at the end
            begun = begun[:-1]
        return len(begun)

    def message(self, prompt: np.ndarray, completion: Completion, text: str, *, tools: Schemas) -> Message:
        """The assistant's message from `text`, the completion's. tools: those that it may call."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        end = self._end
        opened = thinking_at_end(self.tokenizer.decode(prompt[-_LONGEST_OPENING:].tolist()), end) == "opened"
        if end and (opened or text.lstrip().startswith(opening(end))):
            thinking, answer = split_thinking(text, end, opened=opened)
            message |= {"content": answer or "", **({"reasoning_content": thinking} if thinking else {})}
        if tools:
            message["content"], calls = split_calls(message["content"], self._form, tools=tools)
            name = hashlib.blake2b(prompt.tobytes() + completion.token_ids.tobytes(), digest_size=10).hexdigest()
            if calls:
                message["tool_calls"] = [
                    {
                        "id": f"call_{name}{number:04d}",
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for number, call in enumerate(calls)
                ]
        return message
