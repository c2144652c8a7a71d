"""Thinking, phrase and answer of one completion, token by token.

    THINK    sampled; ends when end_of_thinking has just been sampled (-> ANSWER) or its budget is spent (-> PHRASE)
    PHRASE   the phrase's tokens are fed, whatever the model would sample: forced (-> ANSWER)
    ANSWER   sampled; ends with the answer budget: "length"

A sampled token of stop_token_ids ends the completion in any phase with "stop"; a full cache ends it with "length".
The phase is a pure function of the tokens so far: two processes that see the same tokens are in the same phase. The
engine that decodes inside jit has the same state machine for all its slots at once (jax/decode.py).
"""

from collections.abc import Sequence
from typing import Any

from scalerl_jax.contract.codec import CompletionRequest, GroupRequest


class ThinkingBudget:
    """The phase and remaining budget of one completion.

    Args:
      phrase, end: token ids of the forced phrase and of the end of thinking; see codec.Interruption.
      thinking_budget: sampled tokens of thinking; with 0, or no phrase, the whole completion is the answer.
      answer_budget: sampled tokens of the answer.
      stops: sampled tokens that end the completion.
      capacity: tokens that the completion may have, forced ones included.
    """

    def __init__(
        self,
        *,
        phrase: Sequence[int],
        end: Sequence[int],
        thinking_budget: int,
        answer_budget: int,
        stops: Sequence[int] = (),
        capacity: int,
    ):
        self._phrase, self._end, self._stops = list(phrase), list(end), frozenset(stops)
        self._thinking = thinking_budget > 0 and len(phrase) > 0
        self._left = thinking_budget if self._thinking else answer_budget  # sampled tokens left of the phase's budget
        self._answer_budget = answer_budget
        self._capacity_left = capacity
        self._recent: list[int] = []  # the last sampled tokens, as many as end_of_thinking has
        self._to_force = 0  # tokens of the phrase still to be fed
        self.finish = ""  # "stop" | "length" once it is over

    @staticmethod
    def arguments(request: GroupRequest, wanted: CompletionRequest, *, maximum_tokens: int) -> dict[str, Any]:
        """The constructor's arguments as plain lists and numbers, which can be sent to another process."""
        return {
            "phrase": list(request.interruption.text_token_ids),
            "end": list(request.interruption.end_of_thinking_token_ids),
            "thinking_budget": wanted.thinking_budget,
            "answer_budget": request.sampling.answer_budget,
            "stops": list(request.sampling.stop_token_ids),
            "capacity": maximum_tokens - len(request.prompt),
        }

    @property
    def forced(self) -> int | None:
        """The token that must come next; None if it is sampled."""
        return self._phrase[-self._to_force] if self._to_force else None

    @property
    def longest(self) -> int:
        """The most tokens that can still follow."""
        spent = len(self._phrase) + self._answer_budget if self._thinking else self._to_force
        return min(self._capacity_left, self._left + spent)

    def advance(self, token: int) -> bool:
        """Advances by one token; returns whether it was forced. The completion must not have ended."""
        assert not self.finish
        forced = self._to_force > 0
        self._capacity_left -= 1
        if forced:
            self._to_force -= 1
        else:
            self._left -= 1
            if self._thinking:
                self._think(token)
            elif self._left == 0:
                self.finish = "length"
            if token in self._stops:
                self.finish = "stop"
        if self._capacity_left == 0:
            self.finish = self.finish or "length"
        return forced

    def _think(self, token: int) -> None:
        if self._end:
            self._recent = [*self._recent, token][-len(self._end) :]
        ended = bool(self._end) and self._recent == self._end
        if ended or self._left == 0:
            self._to_force = 0 if ended else len(self._phrase)
            self._thinking, self._left = False, self._answer_budget
