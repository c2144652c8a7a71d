"""What a replay engine plays: token ids and log-probabilities as a function of a completion's name alone.

    Scripted    made up by a hash: tokens from [0, vocabulary), skewed lengths, the interruption phrase where the
                thinking budget runs out; log-probabilities from a "bigram model" without a table

                    log p(t | s) = -8 * hash(s, t) / 2^32 - log(vocabulary)

                whose probabilities add up to less than 1

    Recorded    played from JSONL, one completion a row:
                    {"prompt_token_ids": [...], "token_ids": [...], "logprobs": [...], "forced": [[start, end], ...],
                     "finish_reason": "stop" | "length", "group_id": str, "index": int}
                and is cut where the request's budgets and the phrase end.
                group_id and index are optional. A row that has them is played for that completion only; the others of
                a prompt are a bank, drawn from by a hash of (group_id, index, seed), so that any number of groups can
                be asked of it.

Neither looks at a clock, at the weights or at what was asked before: the same request always gives the same tokens.
"""

import dataclasses
import hashlib
import json
import os
from typing import Any, Protocol

import numpy as np

from scalerl_jax.contract.codec import Completion, CompletionRequest, GroupRequest, ScoreRequest, Scores


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A whole completion, before any of it is played."""

    token_ids: np.ndarray  # [tokens] int32
    logprobs: np.ndarray  # [tokens] float32, 0 at forced tokens
    forced: tuple[tuple[int, int], ...]  # (start, end)
    finish_reason: str  # "stop" | "length"

    def cut(self, limit: int) -> "Rollout":
        """The first `limit` tokens."""
        if len(self.token_ids) <= limit:
            return self
        forced = tuple((start, min(end, limit)) for start, end in self.forced if start < limit)
        return Rollout(self.token_ids[:limit], self.logprobs[:limit], forced, "length")


class Script(Protocol):
    def rollout(self, request: GroupRequest, wanted: CompletionRequest) -> Rollout:
        """Raises ValueError where there is nothing to play."""
        ...

    def score(self, token_ids: np.ndarray) -> np.ndarray:
        """[tokens] float32; the first is 0. Agrees with what `rollout` gives after the prompt."""
        ...

    def scores(self, request: ScoreRequest) -> Scores:
        """Raises ValueError where it has no log-probabilities of other tokens, and they are asked for."""
        ...


def completion_hash(request: GroupRequest, wanted: CompletionRequest) -> int:
    """64 bits from all that names a completion."""
    name = f"\0{request.group_id}\0{wanted.index}\0{wanted.seed}\0".encode()
    digest = hashlib.blake2b(name + request.prompt.astype("<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class Scripted:
    """Lengths are minimum + an exponential of mean `mean - minimum`: many short completions, a few long ones."""

    def __init__(self, *, vocabulary: int, minimum_tokens: int = 2, mean_tokens: float = 24.0):
        if not 1 <= minimum_tokens <= mean_tokens:
            raise ValueError(f"minimum_tokens {minimum_tokens} is not within 1 and mean_tokens {mean_tokens}")
        self._vocabulary, self._minimum, self._mean = vocabulary, minimum_tokens, mean_tokens

    def rollout(self, request: GroupRequest, wanted: CompletionRequest) -> Rollout:
        rng = np.random.default_rng(completion_hash(request, wanted))
        sampling, interruption = request.sampling, request.interruption
        special = {*sampling.stop_token_ids, *interruption.end_of_thinking_token_ids, *interruption.text_token_ids}
        ordinary = np.setdiff1d(np.arange(self._vocabulary, dtype=np.int32), np.array(sorted(special), np.int32))
        if not len(ordinary):
            raise ValueError(f"nothing in a vocabulary of {self._vocabulary} but special tokens")

        tokens: list[int] = []
        forced: tuple[tuple[int, int], ...] = ()
        if interruption.text_token_ids and wanted.thinking_budget:
            end = interruption.end_of_thinking_token_ids
            wished = self._length(rng)
            if end and wished + len(end) <= wanted.thinking_budget:
                tokens += [*rng.choice(ordinary, wished).tolist(), *end]
            else:
                tokens += rng.choice(ordinary, wanted.thinking_budget).tolist()
                forced = ((len(tokens), len(tokens) + len(interruption.text_token_ids)),)
                tokens += interruption.text_token_ids
        wished = self._length(rng)
        stops = bool(sampling.stop_token_ids) and wished < sampling.answer_budget
        tokens += rng.choice(ordinary, wished if stops else sampling.answer_budget).tolist()
        if stops:
            tokens.append(int(rng.choice(np.array(sampling.stop_token_ids))))

        token_ids = np.array(tokens, np.int32)
        logprobs = self.score(np.concatenate([request.prompt, token_ids]))[len(request.prompt) :]
        for start, stop in forced:
            logprobs[start:stop] = 0
        return Rollout(token_ids, logprobs, forced, "stop" if stops else "length")

    def _length(self, rng: np.random.Generator) -> int:
        return self._minimum + int(rng.exponential(self._mean - self._minimum))

    def score(self, token_ids: np.ndarray) -> np.ndarray:
        return np.concatenate([[np.float32(0)], self._logprobs(token_ids[:-1], token_ids[1:])])

    def _logprobs(self, before: np.ndarray, token: np.ndarray) -> np.ndarray:
        """float32, in the shape of both together."""
        mixed = before.astype(np.uint32) * np.uint32(0x9E3779B1) ^ token.astype(np.uint32) * np.uint32(0x85EBCA77)
        mixed = (mixed ^ mixed >> np.uint32(15)) * np.uint32(0xC2B2AE3D)
        mixed ^= mixed >> np.uint32(13)
        return (mixed / 2.0**32 * -8.0 - np.log(self._vocabulary)).astype(np.float32)

    def scores(self, request: ScoreRequest) -> Scores:
        first, targets, begin = request.first, request.target_ids, int(request.first == 0)
        before = request.token_ids[max(first, 1) - 1 : -1, None]
        top_ids = np.full((len(request.token_ids) - first, request.top_k), -1, np.int32)
        top, told = np.zeros(top_ids.shape, np.float32), np.zeros(targets.shape, np.float32)
        if request.top_k:
            row = self._logprobs(before, np.arange(self._vocabulary)[None])
            top_ids[begin:] = np.argsort(-row, axis=1, kind="stable")[:, : request.top_k]
            top[begin:] = np.take_along_axis(row, top_ids[begin:], axis=1)
        told[begin:] = np.where(targets[begin:] < 0, 0, self._logprobs(before, targets[begin:]))
        return Scores(self.score(request.token_ids)[first:], top_ids, top, told)


class Recorded:
    """Plays a JSONL file. Raises ValueError naming file and line where a row is not a completion."""

    def __init__(self, path: str | os.PathLike[str]):
        self._path = os.fspath(path)
        self._named: dict[tuple[str, int, bytes], Rollout] = {}
        self._bank: dict[bytes, list[Rollout]] = {}  # prompt -> completions
        self._scores: dict[bytes, np.ndarray] = {}  # prompt and completion -> log-probs of the completion
        if not os.path.isfile(self._path):
            raise ValueError(f"{self._path}: no such file")
        with open(self._path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                try:
                    self._add(json.loads(line))
                except (KeyError, TypeError, ValueError) as error:
                    raise ValueError(f"{self._path}:{number}: not a completion ({error!r})") from None

    def _add(self, row: dict[str, Any]) -> None:
        prompt = np.array(row["prompt_token_ids"], np.int32).tobytes()
        token_ids, logprobs = np.array(row["token_ids"], np.int32), np.array(row["logprobs"], np.float32)
        if not 0 < len(token_ids) == len(logprobs):
            raise ValueError(f"{len(token_ids)} tokens, {len(logprobs)} logprobs")
        if row["finish_reason"] not in ("stop", "length"):
            raise ValueError(f"finish_reason {row['finish_reason']!r}")
        forced = tuple((int(start), int(end)) for start, end in row.get("forced", ()))
        rollout = Rollout(token_ids, logprobs, forced, row["finish_reason"])
        if "group_id" in row:
            self._named[row["group_id"], row["index"], prompt] = rollout
        else:
            self._bank.setdefault(prompt, []).append(rollout)
        self._scores[prompt + token_ids.tobytes()] = logprobs

    def rollout(self, request: GroupRequest, wanted: CompletionRequest) -> Rollout:
        prompt = request.prompt.astype(np.int32).tobytes()
        most = request.most_tokens(wanted)
        if rollout := self._named.get((request.group_id, wanted.index, prompt)):
            return rollout.cut(most)
        if bank := self._bank.get(prompt):
            return bank[completion_hash(request, wanted) % len(bank)].cut(most)
        raise ValueError(f"group {request.group_id!r}: {self._path} has no completion {wanted.index} of this prompt")

    def score(self, token_ids: np.ndarray) -> np.ndarray:
        """The prompt's own log-probs were not recorded: 0."""
        logprobs = self._scores.get(token_ids.astype(np.int32).tobytes())
        if logprobs is None:
            raise ValueError(f"{self._path} has no completion that ends these {len(token_ids)} tokens")
        return np.concatenate([np.zeros(len(token_ids) - len(logprobs), np.float32), logprobs])

    def scores(self, request: ScoreRequest) -> Scores:
        if request.top_k or request.target_ids.size:
            raise ValueError(f"{self._path} has log-probabilities of its own tokens only")
        logprobs = self.score(request.token_ids)[request.first :]
        none = np.zeros((len(logprobs), 0), np.float32)
        return Scores(logprobs, none.astype(np.int32), none, none)


def recorded_row(prompt: np.ndarray, completion: Completion, *, named: bool) -> dict[str, Any]:
    """The row of a JSONL file from which Recorded plays `completion` again; named: for its own name only."""
    if completion.finish_reason == "aborted":
        raise ValueError(f"completion {completion.group_id!r}/{completion.index} was aborted: nothing to play again")
    row: dict[str, Any] = {
        "prompt_token_ids": prompt.tolist(),
        "token_ids": completion.token_ids.tolist(),
        # A float32 becomes the decimal of a double, which gives the same float32 back.
        "logprobs": completion.logprobs.tolist(),
        "forced": [list(span) for span in completion.forced],
        "finish_reason": completion.finish_reason,
    }
    if named:
        row |= {"group_id": completion.group_id, "index": completion.index}
    return row
