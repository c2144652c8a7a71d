"""Lies in what was sampled: log-probs and tokens that are not the policy's, and completions that break the contract."""

from collections.abc import Callable

import numpy as np

from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb
from tests.hostile.lies import Around, Context, Generate, Lie

Change = Callable[[pb.Completion, np.random.Generator], None]


class Falsifies(Lie):
    """Every completion is changed on its way."""

    def __init__(self, change: Change):
        super().__init__()
        self.change, self._rng = change, np.random.default_rng(9)

    async def generate(self, request: pb.GenerateRequest, context: Context, genuine: Generate) -> None:
        lie, rng = self, self._rng

        class Changing(Around):
            async def write(self, message: pb.Completion) -> None:
                lie.change(message, rng)
                await self.context.write(message)

        await genuine(request, Changing(context))


def _logprobs(make: Callable[[np.ndarray, np.random.Generator], np.ndarray]) -> Callable[[], Lie]:
    """make: from the true log-probs of the sampled tokens."""

    def change(message: pb.Completion, rng: np.random.Generator) -> None:
        logprobs, sampled = codec.decode_floats(message.logprobs), np.ones(len(message.token_ids) // 4, bool)
        for span in message.forced:
            sampled[span.start : span.end] = False
        logprobs[sampled] = make(logprobs[sampled], rng)
        message.logprobs = codec.encode_floats(logprobs)

    return lambda: Falsifies(change)


logprobs_lower = _logprobs(lambda true, rng: true - 0.5)
logprobs_higher = _logprobs(lambda true, rng: np.minimum(true + 0.5, 0))
logprobs_minus_30 = _logprobs(lambda true, rng: np.full_like(true, -30))
logprobs_noise = _logprobs(lambda true, rng: np.minimum(true + rng.normal(0, 1, true.shape), 0))
logprobs_constant = _logprobs(lambda true, rng: np.full_like(true, -1.5))
logprobs_nan = _logprobs(lambda true, rng: np.full_like(true, np.nan))
logprobs_positive = _logprobs(lambda true, rng: -true + 0.1)


def random_tokens() -> Lie:
    """Any tokens at all, with log-probs as a policy has them."""

    def change(message: pb.Completion, rng: np.random.Generator) -> None:
        tokens = codec.decode_ids(message.token_ids)
        forced = np.zeros(len(tokens), bool)
        for span in message.forced:
            forced[span.start : span.end] = True
        forced[-1] = True  # it stops where it stopped
        tokens[~forced] = rng.integers(3, 250, (~forced).sum())
        message.token_ids = codec.encode_ids(tokens)

    return Falsifies(change)


def _changed(change: Callable[[pb.Completion], object]) -> Callable[[], Lie]:
    return lambda: Falsifies(lambda message, rng: (change(message), None)[1])


def _tokens(message: pb.Completion, tokens: np.ndarray, logprob: float = -1.0) -> None:
    """These tokens, none of them forced, all by the version that sampled the first."""
    step = message.versions[0].step
    del message.forced[:], message.versions[:]
    message.token_ids = codec.encode_ids(tokens)
    message.logprobs = codec.encode_floats(np.full(len(tokens), logprob))
    if len(tokens):
        message.versions.add(step=step, start=0, end=len(tokens))


def _steps(message: pb.Completion, step: int) -> None:
    for span in message.versions:
        span.step = step


def _uncovered(message: pb.Completion) -> None:
    message.versions[-1].end += 1


wrong_incarnation = _changed(lambda m: setattr(m, "incarnation", 1))
wrong_group = _changed(lambda m: setattr(m, "group_id", m.group_id + "9"))
wrong_index = _changed(lambda m: setattr(m, "index", 2**32 - 1))
version_of_the_future = _changed(lambda m: _steps(m, 10**6))
version_of_the_past = _changed(lambda m: _steps(m, -1))
versions_uncovered = _changed(_uncovered)
wrong_forced = _changed(lambda m: (m.ClearField("forced"), m.forced.add(start=0, end=1))[0])
forced_backwards = _changed(lambda m: m.forced.add(start=3, end=1))
empty = _changed(lambda m: _tokens(m, np.zeros(0, np.int32)))
too_long = _changed(lambda m: _tokens(m, np.full(5_000, 7)))
beyond_vocabulary = _changed(lambda m: _tokens(m, np.full(5, 10**6)))
negative_tokens = _changed(lambda m: _tokens(m, np.full(5, -7)))
stops_without_stopping = _changed(
    lambda m: (_tokens(m, np.full(5, 7)), setattr(m, "finish_reason", pb.FINISH_REASON_STOP))[0]
)
no_reason = _changed(lambda m: setattr(m, "finish_reason", pb.FINISH_REASON_UNSPECIFIED))
odd_bytes = _changed(lambda m: setattr(m, "token_ids", m.token_ids + b"\1"))
huge = _changed(lambda m: setattr(m, "logprobs", bytes(40 * 2**20)))
endless_seconds = _changed(lambda m: setattr(m, "sampling_seconds", float("nan")))
