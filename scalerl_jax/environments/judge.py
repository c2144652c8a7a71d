"""Right or wrong: asked once of every completion, trained on or held out, and the same for both.

    cut by the token budget   wrong, whatever its text says so far; nobody is asked
    arithmetic                right where what follows the thinking is the right integer, and nothing else
    other tasks               math-verify's and the words' verdict (verifiers.py)

What follows the thinking is the text after the last `end_of_thinking`; a completion that never gets there is wrong.
"""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from scalerl_jax.config import Config
from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments.prompts import Prompt
from scalerl_jax.environments.verifiers import Verifier, after_thinking

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


class AnswerJudge(Protocol):
    """Says whether the text of a completion gives an answer. A context manager; `submit` may block for a moment."""

    def submit(self, text: str, answer: str) -> "Future[bool]": ...

    def __enter__(self) -> "AnswerJudge": ...

    def __exit__(self, *_: object) -> None: ...


class IntegerJudge:
    """Compares integers, exactly: the answer is one, perhaps with spaces around it."""

    def __init__(self, *, end_of_thinking: str):
        self._end = end_of_thinking

    def submit(self, text: str, answer: str) -> "Future[bool]":
        said: Future[bool] = Future()
        found = after_thinking(text, self._end)
        said.set_result(found is not None and same_integer(found, answer))
        return said

    def __enter__(self) -> "IntegerJudge":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def same_integer(text: str, answer: str) -> bool:
    """Whether `text` is the integer `answer`, which must be one: 3+4= is not 7, though it comes to that."""
    text = text.strip()
    return _INTEGER.fullmatch(text) is not None and int(text) == int(answer)


def make(config: Config) -> AnswerJudge:
    """Who judges the answers of a run. Raises ValueError naming a field of config.environment."""
    end = config.rollout.end_of_thinking if config.rollout.thinking_budget_max > 0 else ""
    if config.environment.name == "arithmetic":
        return IntegerJudge(end_of_thinking=end)
    return Verifier(
        processes=config.environment.verifier_processes,
        seconds=config.environment.verifier_seconds,
        end_of_thinking=end,
    )


def verdict(
    prompt: Prompt, completion: Completion, *, answers: AnswerJudge, decode: Callable[[Sequence[int]], str]
) -> "Future[bool]":
    """Whether a completion is right; `decode` gives its text without the stop token."""
    if completion.finish_reason != "stop":
        cut: Future[bool] = Future()
        cut.set_result(False)
        return cut
    return answers.submit(decode(completion.token_ids.tolist()), prompt.answer)
