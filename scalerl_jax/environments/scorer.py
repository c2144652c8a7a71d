"""What each completion is worth: asked once of every one, trained on or held out, and the same for both.

    cut by the token budget        wrong, whatever its text says so far; nobody is asked
    nothing follows the thinking   wrong, likewise
    others                         the environment's score of what follows the thinking

What follows the thinking is the text after the last `end_of_thinking`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from scalerl_jax.config import Config
from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments.base import WRONG, Environment, Row, Score
from scalerl_jax.environments.scorer_pool import ScorerPool


class Scorer:
    """Of one run; a context manager. `decode` gives the text of a completion's tokens without the stop token."""

    def __init__(self, environment: Environment, config: Config, *, decode: Callable[[Sequence[int]], str]):
        self._environment, self._decode = environment, decode
        self._end = config.rollout.end_of_thinking if config.rollout.thinking_budget_max > 0 else ""
        self._pool: ScorerPool | None = None
        if environment.in_processes:
            self._pool = ScorerPool(
                environment.score,
                prepare=environment.prepare,
                processes=config.environment.verifier_processes,
                seconds=config.environment.verifier_seconds,
            )

    def score(self, row: Row, completion: Completion) -> "Future[Score]":
        """May block for a moment. The result raises ScorerError where a completion cannot be scored."""
        said = None
        if completion.finish_reason == "stop":
            said = after_thinking(self._decode(completion.token_ids.tolist()), self._end)
        if said is not None and self._pool is not None:
            return self._pool.submit(row, said)
        known: Future[Score] = Future()
        known.set_result(WRONG if said is None else self._environment.score(row, said))
        return known

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()


def after_thinking(text: str, end: str) -> str | None:
    """What follows the last `end` of a completion's text ("": all of it); None where nothing does."""
    if not end:
        return text.strip() or None
    _, found, answer = text.rpartition(end)
    return (answer.strip() or None) if found else None
