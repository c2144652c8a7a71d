"""The chat template of a model folder: converts messages to the text format that the model was trained on.

    MODEL/chat_template.jinja, else `chat_template` in MODEL/tokenizer_config.json: a text, or a list of
    {"name", "template"} of which "default" is used ("tool_use" if template_arguments has tools)

The template is the model's own jinja, rendered by transformers' own code: a prompt equals the result of
`apply_chat_template`, in training as in serving. `renderers`, the other well-maintained library for this, has a Python
class for each known model and does not read the folder's template. transformers takes a second to import, without torch
or its models; it is imported only for rendering.

Not supported on purpose: templates of a processor (chat_template.json) and the special tokens that a tokenizer's class
adds if tokenizer_config.json names none.
"""

import copy
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.system.files import read_object

Messages = Sequence[Mapping[str, Any]]  # {"role", "content", ...}

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Arguments of the rendering function itself, which the config cannot set.
_RESERVED = {"conversations", "messages", "chat_template", "add_generation_prompt", "continue_final_message"}
_RESERVED |= {"return_assistant_tokens_mask", "strftime_now", "raise_exception"}
_ANSWER = "answered"  # a text that no template writes after an answer
_TURN = "answered 7f3a9c"  # a text that no template writes anywhere
_WRITES_DATE = re.compile(r"""strftime_now\(\s*(['"])(.+?)\1""")
_MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """The chat template of one model folder, with its arguments for every rendering.

    Raises ValueError naming an argument that the config cannot set or the template does not read.
    """

    def __init__(self, *, file: str, template: str, tokens: Mapping[str, str], arguments: Mapping[str, Any]):
        self.file = file
        self.dated = False  # whether any rendering so far contains today's date
        self.text = template
        self._date_forms = {form for _, form in _WRITES_DATE.findall(template)}
        self.marks_turns = _MARKS_TURNS.search(template) is not None  # whether it marks the assistant's tokens
        self._check(arguments, "config.environment.template_arguments")
        self._arguments = {**tokens, **arguments}
        self._roles = set[str]()  # that it is known to write behind an answer
        self._places = set[tuple[str, bool]]()  # (role, whether it is the first message) that it is known to write

    def with_arguments(self, arguments: Mapping[str, Any], setting: str) -> "ChatTemplate":
        """The template with further arguments. setting: the one with them, named by a ValueError as above."""
        self._check(arguments, setting)
        other = copy.copy(self)
        other._arguments = {**self._arguments, **arguments}
        return other

    def _check(self, arguments: Mapping[str, Any], setting: str) -> None:
        for name in arguments:
            if name in _RESERVED:
                raise ValueError(f"{setting}: {name!r} is not for it to give")
            if not re.search(rf"\b{re.escape(name)}\b", self.text):
                raise ValueError(f"{setting}: the chat template in {self.file} does not read {name!r}")

    def render(
        self, messages: Messages, *, generation_prompt: bool = True, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """The text of `messages`, followed by the generation prompt. tools: JSON schemas.

        Raises ValueError, one line with the template's file, for any exception of the template.
        """
        return self._render(messages, generation_prompt=generation_prompt, turns=False, tools=tools)[0]

    def render_turns(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """The text of a whole chat, and the (start, stop) spans that the template marks as the assistant's."""
        return self._render(messages, generation_prompt=False, turns=True)

    def behind_answer(self, asked: Messages = ({"role": "user", "content": "?"},)) -> str:
        """The text that the template writes after the assistant's last message. Raises ValueError as `render`."""
        whole = self.render([*asked, {"role": "assistant", "content": _ANSWER}], generation_prompt=False)
        return whole.rpartition(_ANSWER)[2]

    def next_turn(self, messages: Messages) -> str:
        """The text that the template writes after an assistant's message: the end of that turn, `messages`, and the
        generation prompt of the next turn. Raises ValueError as `render` and `check_roles`."""
        text = self._behind_turn(messages)
        self.check_roles(messages)
        return text

    def check_roles(self, messages: Messages) -> None:
        """Raises ValueError if the template leaves out a role of these messages behind an answer, or writes it
        before."""
        for role in {message["role"] for message in messages} - self._roles:
            if _ANSWER not in self._behind_turn([{"role": role, "content": _ANSWER}]):
                raise ValueError(f"{self.file}: the chat template does not write a {role} message behind an answer")
            self._roles.add(role)

    def check_written(self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Raises ValueError if the template leaves out one of these messages that is neither the user's nor the
        assistant's; each role is tried once as the first message, and once behind it. Raises as `render`, too."""
        for at, message in enumerate(messages):
            place = message["role"], at == 0
            if place[0] in ("user", "assistant") or place in self._places or not message["content"].strip():
                continue
            tried = [*messages[:at], {**message, "content": _TURN}, *messages[at + 1 :]]
            if _TURN not in self.render(tried, tools=tools):
                raise ValueError(f"{self.file}: the chat template does not write a {place[0]} message")
            self._places.add(place)

    def _behind_turn(self, messages: Messages) -> str:
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}]
        return self.render([*asked, *messages]).partition(_TURN)[2]

    def continued(self, path: str, messages: Messages, *, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, bool]:
        """What `render` writes after `path`, the text of the turns so far, and False; if the text does not begin with
        `path` (a template may leave out earlier thinking), the whole text, and True. Raises ValueError as `render`."""
        whole = self.render(messages, tools=tools)
        return (whole[len(path) :], False) if whole.startswith(path) else (whole, True)

    def unknown_end(self, tokenizer: Tokenizer) -> str:
        """A warning if the template ends the assistant's turns with a token that is not one of the folder's stop
        tokens, as in many base models: completions would continue after it. "" if there is no such problem."""
        try:
            behind = tokenizer.encode(self.behind_answer())
        except ValueError:  # a template that renders only prompts ends no turns
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
            # Imported here: a run whose prompts are texts does not need it.
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise ValueError(f"{self.file}: chat templates need transformers ({error})") from error
        dates = self._dates()
        try:
            rendered: Any = render_jinja_template(  # its return annotation is outdated
                conversations=[[dict(message) for message in messages]],
                chat_template=self.text,
                add_generation_prompt=generation_prompt,
                return_assistant_tokens_mask=turns,
                **given,
            )
        # A template is a program: besides jinja's own errors it raises any error of its expressions.
        except Exception as error:
            line = getattr(error, "lineno", None)
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(
                f"{self.file}: the chat template fails{f' in line {line}' if line else ''}: {reason}"
            ) from error
        texts, marked = rendered
        self.dated = self.dated or any(date in texts[0] for date in dates | self._dates())  # it may be midnight
        return texts[0], [(start, stop) for start, stop in marked[0]] if turns else []

    def _dates(self) -> set[str]:
        """Today's date in the forms in which the template writes it if it gets none as an argument."""
        return {datetime.now().strftime(form) for form in self._date_forms}


def read_chat_template(folder: str, arguments: Mapping[str, Any] | None = None) -> ChatTemplate | None:
    """The template of a model folder; None if it has none. Raises ValueError naming an unusable file."""
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
    """The special tokens that the folder names, as templates know them: bos_token, eos_token, ..."""
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
