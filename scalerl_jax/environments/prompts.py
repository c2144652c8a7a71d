"""Renders a row's prompt to text and token ids, as configured in config.environment.

    text             used unchanged, unless the chat template renders it as a user message
    messages         rendered by the chat template
    system_prompt    the first message, replacing an existing system message; before a text, followed by an empty line
    prompt_suffix    appended to the last user message, or to the text, without a separator

chat_template=auto renders messages, and texts that are user messages (Row.chat); `always` renders every text; `never`
renders nothing, and messages are an error. A rendered prompt has only the special tokens that its template writes; a
text gets those that the tokenizer puts before a sequence.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.environments import parts
from scalerl_jax.environments.base import Row, joined_content
from scalerl_jax.environments.chat_template import ChatTemplate, Messages, read_chat_template
from scalerl_jax.environments.episode import Reply
from scalerl_jax.environments.tokenizer import Tokenizer, thinking_at_end
from scalerl_jax.environments.tool_calls import HERMES, form_of

_AT_ONCE = 1000  # rows that are tokenized together


class Prompts:
    """Renders prompts of one environment (config.environment). Raises ValueError naming the config field or file."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        environment = config.environment
        self._config, self._tokenizer, self._how = config, tokenizer, environment.chat_template
        self._template = None
        if self._how != "never":
            self._template = read_chat_template(tokenizer.path, environment.template_arguments)
        if self._how == "always" and self._template is None:
            raise ValueError(f"config.environment.chat_template=always: {tokenizer.path} has no chat template")
        if environment.history == "template" and self._template is None:
            none = f"{tokenizer.path} has no chat template"
            why = "none is used with chat_template=never" if self._how == "never" else none
            raise ValueError(f"config.environment.history=template: {why}")
        self._counts: Counter[str] = Counter()

    def render(self, row: Row) -> Row:
        """The row with its prompt's text and token ids. Raises ValueError, one line, naming the row."""
        (rendered,) = self.render_all([row])
        return rendered

    def render_all(self, rows: Iterable[Row]) -> Iterator[Row]:
        """As `render`, for many rows, on all cores; at most _AT_ONCE rows are held at a time."""
        waiting = iter(rows)
        while some := list(itertools.islice(waiting, _AT_ONCE)):
            asked = [self._asked(row) for row in some]
            for row, ids in zip(asked, self._encode(asked), strict=True):
                ids = ids if row.rendered else self._tokenizer.begun(ids)
                yield dataclasses.replace(row, token_ids=np.asarray(ids, np.int32))

    def _asked(self, row: Row) -> Row:
        """The row with its prompt's text, without its token ids."""
        # The original question, which a reward may read.
        messages = row.messages or ({"role": "user", "content": row.text},)
        as_user = self._template is not None and (row.chat or self._how == "always")
        rendered = not row.agent and (bool(row.messages) or bool(row.tools) or as_user)
        try:
            if row.agent:
                text = row.text  # an agent's requests are rendered when it makes them
            elif rendered:
                text = self.ask(self.complete(messages), tools=row.tools)
            else:
                text = self._text(row.text)
                self._count(text, "text")
        except (ValueError, TypeError) as error:
            raise self._named(row, error) from error
        calls = self._form or HERMES if rendered else HERMES
        return dataclasses.replace(row, text=text, messages=messages, rendered=rendered, calls=calls)

    def _encode(self, rows: Sequence[Row]) -> list[list[int]]:
        try:
            return self._tokenizer.encode_all([row.text for row in rows])
        except (ValueError, TypeError):  # the tokenizer rejects half a surrogate pair as not a text
            for row in rows:
                try:
                    self._tokenizer.encode(row.text)
                except (ValueError, TypeError) as error:
                    raise self._named(row, error) from error
            raise

    @staticmethod
    def _named(row: Row, error: Exception) -> ValueError:
        return ValueError(f"{row.name}: {error}" if row.name else str(error))

    def ask(self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The prompt's text for messages that `complete` returned. Raises ValueError, one line."""
        text = self.template().render(messages, tools=tools)
        self.template().check_written(messages, tools=tools)
        self._count(text, "rendered")
        self._counts["tools"] += bool(tools)
        return text

    @property
    def template_text(self) -> str:
        """The model's jinja template; "" if none is used."""
        return self._template.text if self._template is not None else ""

    def template(self) -> ChatTemplate:
        """The model's template. Raises ValueError if there is none or chat_template=never."""
        if self._template is not None:
            return self._template
        if self._how == "never":
            raise ValueError("the prompt is messages, and config.environment.chat_template=never")
        raise ValueError(f"the prompt is messages, and {self._tokenizer.path} has no chat template")

    @functools.cached_property
    def _form(self) -> str | None:
        """The format in which the template writes tool calls."""
        return form_of(self.template())

    @property
    def notes(self) -> list[str]:
        """Messages on how the prompts so far were rendered; none if all are unchanged texts and there is no alternative
        (no template, no template arguments)."""
        environment, counts, lines = self._config.environment, self._counts, []
        if counts["rendered"]:
            assert self._template is not None
            given = ", ".join(f"{name}={value!r}" for name, value in environment.template_arguments.items())
            lines.append(
                f"{counts['rendered']:,} prompts are rendered by the chat template in {self._template.file}"
                f"{f' with {given}' if given else ''}"
            )
            if unknown := self._template.unknown_end(self._tokenizer):
                lines.append(unknown)
            if self._template.dated:
                lines.append(
                    "the chat template writes today's date into them: tomorrow they are others, unless "
                    "config.environment.template_arguments gives it"
                )
        if counts["tools"]:
            as_written = "as the chat template writes them"
            if self._form is None:
                as_written = "though the chat template writes them in no form that is known"
            lines.append(f"calls of tools are read in the form {self._form or HERMES}, {as_written}")
        if counts["text"] and (self._template is not None or counts["rendered"] or environment.template_arguments):
            lines.append(
                f"{counts['text']:,} prompts stand as they are, without the model's chat template: "
                f"config.environment.chat_template={self._how}"
            )
        if counts["system"]:
            lines.append(
                f"config.environment.system_prompt replaces the system message of {counts['system']:,} prompts"
            )
        if counts["opened"]:
            where = f"{counts['opened']:,} prompts open thinking, which their completions end"
            if self._config.rollout.thinking_budget_max == 0:
                where += "; without a thinking budget it is part of config.rollout.answer_budget"
            lines.append(where)
        return lines

    def _text(self, text: str) -> str:
        system = self._config.environment.system_prompt
        return (f"{system}\n\n" if system else "") + text + self._config.environment.prompt_suffix

    def complete(self, messages: Messages) -> Messages:
        """Messages with the config's system prompt and suffix. Raises ValueError if they are not a prompt."""
        complete = [dict(message) for message in messages]
        for message in complete:
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise ValueError('a message is not of the form {"role": text, "content": text}')
        if complete[-1]["role"] == "assistant":
            raise ValueError("the messages end with the assistant's, which is no prompt")
        if suffix := self._config.environment.prompt_suffix:
            asked = [message for message in complete if message["role"] == "user"]
            if not asked:
                raise ValueError("config.environment.prompt_suffix has no place: none of the messages is a user's")
            asked[-1]["content"] += suffix
        if system := self._config.environment.system_prompt:
            if complete[0]["role"] == "system":
                self._counts["system"] += 1
                complete = complete[1:]
            complete = [{"role": "system", "content": system}, *complete]
        return complete

    def _count(self, text: str, how: str) -> None:
        """Counts a prompt. Raises ValueError if it closes the thinking but the config has a thinking budget."""
        rollout = self._config.rollout
        at_end = thinking_at_end(text, rollout.end_of_thinking)
        self._counts.update((how, at_end))
        if at_end == "closed" and rollout.thinking_budget_max > 0:
            given = self._config.environment.template_arguments
            which = f"config.environment.template_arguments={given}: " if given else ""
            raise ValueError(
                f"{which}the prompt ends in {rollout.end_of_thinking}, which leaves no thinking, and "
                f"config.rollout.thinking_budget_max={rollout.thinking_budget_max}: set thinking_budget_min and "
                "thinking_budget_max to 0, or have the template leave thinking open"
            )


class Replies:
    """Encodes an environment's replies in an episode as the tokens that are appended to the next turn's prompt."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        self._prompts = {part: Prompts(of_part, tokenizer) for part, of_part in parts.configs(config).items()}
        self._tokenizer = tokenizer

    def encode(self, row: Row, messages: Messages, *, behind: int) -> tuple[str, Reply]:
        """Text and tokens of `messages` after a turn that ends with token `behind`.

        If the chat template rendered the prompt, it renders them too, with the generation prompt of the next turn; else
        they are plain text. Raises ValueError if the reply is empty or the template fails.
        """
        text = joined_content(messages)
        if row.rendered:
            text = self._prompts[row.environment].template().next_turn(messages)
        ids = self._tokenizer.encode(text)
        if row.rendered and ids[:1] == [behind]:  # the turn's end has been sampled
            ids = ids[1:]
        return text, _reply(ids)

    def render_again(self, row: Row, messages: Messages, *, path: Sequence[int]) -> tuple[str, Reply]:
        """As `encode`, of all messages behind those of the row's prompt, as the chat template writes them now.

        path: tokens of the turns so far, the prompt's included. Raises ValueError if the template fails.
        """
        prompts = self._prompts[row.environment]
        template, whole = prompts.template(), [*prompts.complete(row.messages), *messages]
        template.check_roles([message for message in messages if message["role"] != "assistant"])
        text, again = template.continued(self._tokenizer.decode(path), whole, tools=row.tools)
        return text, _reply(self._tokenizer.encode(text), new_branch=again)


def _reply(ids: list[int], *, new_branch: bool = False) -> Reply:
    if not ids:
        raise ValueError("a reply of the environment is empty")
    return Reply(np.asarray(ids, np.int32), new_branch)
