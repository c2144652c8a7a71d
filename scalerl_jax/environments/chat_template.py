"""The chat template of a model folder: messages as the text that the model was trained on.

    MODEL/chat_template.jinja, else `chat_template` in MODEL/tokenizer_config.json: a text, or a list of
    {"name", "template"} of which "default" is taken

The template is the model's own jinja, rendered by transformers' own code: a prompt is what `apply_chat_template` makes
of it, in training as in serving. `renderers`, the other well-kept library for it, has a Python class for each model it
knows and does not read the folder's template. transformers takes a second to import and brings no torch and none of its
models; only what renders imports it.

Left out on purpose: templates of a processor (chat_template.json) and the special tokens that a tokenizer's class adds
where tokenizer_config.json names none.
"""

import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.system.files import read_object

Messages = Sequence[Mapping[str, Any]]  # {"role", "content", ...}

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What the rendering itself is told by these names.
_TAKEN = {"conversations", "messages", "chat_template", "add_generation_prompt", "continue_final_message"}
_TAKEN |= {"return_assistant_tokens_mask", "strftime_now", "raise_exception"}
_ANSWER = "answered"  # what no template writes of itself behind an answer
_TURN = "answered 7f3a9c"  # nor anywhere else
_MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """Of one model folder, with the arguments that it is given at each rendering.

    Raises ValueError naming the file that is unusable, or the argument that the template does not read.
    """

    def __init__(self, *, file: str, template: str, tokens: Mapping[str, str], arguments: Mapping[str, Any]):
        self.file = file
        self.dated = False  # whether a rendering so far has today's date in it
        self.text, self._arguments = template, {**tokens, **arguments}
        self.marks_turns = _MARKS_TURNS.search(template) is not None  # which tokens an assistant says
        for name in arguments:
            if name in _TAKEN:
                raise ValueError(f"config.environment.template_arguments: {name!r} is not for the config to give")
            if not re.search(rf"\b{re.escape(name)}\b", template):
                raise ValueError(
                    f"config.environment.template_arguments: the chat template in {file} does not read {name!r}"
                )

    def render(
        self, messages: Messages, *, generation_prompt: bool = True, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """The text of `messages`, with what begins the assistant's next turn behind it. tools: their JSON schemas.

        Raises ValueError, one line with the template's file, for whatever the template raises.
        """
        return self._render(messages, generation_prompt=generation_prompt, turns=False, tools=tools)[0]

    def render_turns(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """The text of a whole chat, and which parts of it the template marks as the assistant's (`marks_turns`)."""
        return self._render(messages, generation_prompt=False, turns=True)

    def behind_answer(self, asked: Messages = ({"role": "user", "content": "?"},)) -> str:
        """What the template writes behind what the assistant says last. Raises ValueError as `render`."""
        whole = self.render([*asked, {"role": "assistant", "content": _ANSWER}], generation_prompt=False)
        return whole.rpartition(_ANSWER)[2]

    def next_turn(self, messages: Messages) -> str:
        """What the template writes behind what an assistant has said: the rest of that turn, `messages`, and what
        begins the assistant's next turn. Raises ValueError as `render`."""
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}]
        return self.render([*asked, *messages]).partition(_TURN)[2]

    def unknown_end(self, tokenizer: Tokenizer) -> str:
        """A line where the template ends the assistant's turns with a token that is no stop token of the folder's, as
        of many base models: completions would go on behind it. "": it does not."""
        try:
            behind = tokenizer.encode(self.behind_answer())
        except ValueError:  # one that renders prompts alone ends no turns
            return ""
        end = next((token for token in behind if tokenizer.is_added(token)), None)
        if end is None or set(behind) & set(tokenizer.stop_ids):
            return ""
        stops = ", ".join(f"{tokenizer.decode([stop])!r} ({stop})" for stop in tokenizer.stop_ids)
        return (
            f"the chat template in {self.file} ends the assistant's turns with {tokenizer.decode([end])!r} ({end}), at "
            f"which no completion stops: the stop tokens are {stops}; "
            f'"eos_token_id": {[*tokenizer.stop_ids, end]} in '
            f"{os.path.join(tokenizer.path, 'generation_config.json')} would stop there, too"
        )

    def _render(
        self, messages: Messages, *, generation_prompt: bool, turns: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, list[tuple[int, int]]]:
        given = {**self._arguments, "tools": [dict(tool) for tool in tools]} if tools else self._arguments
        if tools and not re.search(r"\btools\b", self.text):
            raise ValueError(f"{self.file}: the chat template does not know tools")
        try:
            # Here and not above: a run whose prompts are texts does not need it.
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise ValueError(f"{self.file}: chat templates need transformers ({error})") from error
        try:
            rendered: Any = render_jinja_template(  # its annotation is of what it returned once
                conversations=[[dict(message) for message in messages]],
                chat_template=self.text,
                add_generation_prompt=generation_prompt,
                return_assistant_tokens_mask=turns,
                strftime_now=self._today,
                **given,
            )
        # A template is a program of the folder's: beside jinja's own errors it raises whatever its expressions do.
        except Exception as error:
            line = getattr(error, "lineno", None)
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(
                f"{self.file}: the chat template fails{f' in line {line}' if line else ''}: {reason}"
            ) from error
        texts, marked = rendered
        return texts[0], [(start, stop) for start, stop in marked[0]] if turns else []

    def _today(self, form: str) -> str:
        """Like the library's own `strftime_now`: the date for a template that is not given one."""
        self.dated = True
        return datetime.now().strftime(form)


def read_chat_template(folder: str, arguments: Mapping[str, Any] | None = None) -> ChatTemplate | None:
    """The template of a model folder; None where it has none. Raises ValueError naming the file that is unusable."""
    arguments = arguments or {}
    config_file = os.path.join(folder, "tokenizer_config.json")
    config = read_object(config_file) if os.path.isfile(config_file) else {}
    file = os.path.join(folder, "chat_template.jinja")
    found: Any
    if os.path.isfile(file):
        try:
            with open(file, encoding="utf-8") as stream:
                found = stream.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{file}: cannot be read ({error})") from error
    else:
        file, found = config_file, config.get("chat_template")
    if isinstance(found, list):
        found = _of_several(found, file, tools="tools" in arguments)
    if found is None:
        return None
    if not isinstance(found, str):
        raise ValueError(f"{file}: chat_template is neither a text nor a list of named ones")
    if not found.strip():
        raise ValueError(f"{file}: the chat template is empty; config.environment.chat_template=never does without it")
    return ChatTemplate(file=file, template=found, tokens=_special_tokens(folder, config), arguments=arguments)


def _of_several(named: list[Any], file: str, *, tools: bool) -> str:
    templates = {entry.get("name"): entry.get("template") for entry in named if isinstance(entry, dict)}
    wanted = "tool_use" if tools and "tool_use" in templates else "default"
    template = templates.get(wanted)
    if not isinstance(template, str):
        names = ", ".join(sorted(str(name) for name in templates)) or "none"
        raise ValueError(f"{file}: chat_template has none of the name 'default' (it has: {names})")
    return template


def _special_tokens(folder: str, config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... as templates know them: those that the folder names."""
    named = dict(config)
    older = os.path.join(folder, "special_tokens_map.json")
    if "added_tokens_decoder" not in config and os.path.isfile(older):
        named |= read_object(older)
    tokens = {}
    for name in _SPECIAL:
        token = named.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            tokens[name] = content
    return tokens
