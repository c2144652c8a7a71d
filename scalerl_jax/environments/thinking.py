"""Where thinking begins and ends: the state at the end of a prompt, and the two parts of a completion.

    prompt ends in        completion                 thinking        answer
    none                  <think>a</think>b          a               b
    opened  (<think>)     a</think>b                 a               b
    closed  (</think>)    b                          there is none   b

A prompt opens or closes thinking if it ends with that marker, ignoring white space: a chat template's generation prompt
may do either. A prompt that only mentions the markers elsewhere, as system prompts do, does neither.
"""

from typing import Literal

from scalerl_jax.environments.tokenizer import THINK

AtEnd = Literal["opened", "closed", "none"]


def opening(end: str) -> str:
    """The marker that `end` closes: "<think>" for "</think>", "[THINK]" for "[/THINK]"."""
    return end.replace("/", "", 1) if "/" in end else THINK


def thinking_at_end(prompt: str, end: str) -> AtEnd:
    """Whether a rendered prompt ends by opening or closing the thinking. end: config.rollout.end_of_thinking."""
    text = prompt.rstrip()
    if not end.strip():
        return "none"
    if text.endswith(end.strip()):
        return "closed"
    return "opened" if text.endswith(opening(end.strip())) else "none"


def split_thinking(text: str, end: str, *, opened: bool = False) -> tuple[str, str | None]:
    """(thinking, answer) of a completion's text; the answer is None if nothing follows the thinking.

    The answer is the text after the last `end`; if `end` does not occur, the whole text is thinking. end="": the
    completion has no thinking, and all of it is the answer. opened: the prompt opened the thinking.
    """
    if not end:
        return "", text.strip() or None
    before, found, after = text.rpartition(end)
    thinking = (before if found else after).strip()
    if not opened:
        thinking = thinking.removeprefix(opening(end)).lstrip()
    return thinking, (after.strip() or None) if found else None


def split_as_run(text: str, end: str, *, prompt: str, budget: int) -> tuple[str, str | None]:
    """split_thinking as a run applies it to a completion of the rendered `prompt`: the completion has thinking if there
    is a budget (config.rollout.thinking_budget_max) or the prompt opened the thinking."""
    opened = thinking_at_end(prompt, end) == "opened"
    return split_thinking(text, end if opened or budget > 0 else "", opened=opened)
