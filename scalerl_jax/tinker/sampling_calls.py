"""Answers a sampling client: completions, and log-probs of prompt and completions, by its weights.

    seed          the request's own, or derived from its name; each sample's seed is derived from that and its number
    stop          token ids; or texts, which are searched for in the completion: it is cut after the token that
                  completes one; none: the model's own; an empty list: nothing
    log-probs     of prompts, of their likeliest tokens, of the tokens that the request names: scored by a server

A call that a killed process had not answered is sampled again, under the same name: with the same weights that is the
same sample.
"""

import asyncio
import dataclasses
import json
import logging
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from scalerl_jax.contract.codec import Completion, CompletionRequest, GroupRequest, ScoreRequest, Scores
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.gateway.chat import Chat
from scalerl_jax.gateway.generators import NoServer
from scalerl_jax.gateway.generators import Refused as ServerRefused
from scalerl_jax.gateway.wire import ApiError, SampleRequest, field, number, sampling_fields, token_ids
from scalerl_jax.rollouts.requests import stable_hash
from scalerl_jax.tinker import tinker_pb2 as pb
from scalerl_jax.tinker import tinker_wire
from scalerl_jax.tinker.samplers import Samplers, Weights
from scalerl_jax.tinker.store import Future, Store
from scalerl_jax.tinker.tinker_wire import RefusedCall

_log = logging.getLogger(__name__)

MOST_SAMPLES = 1024
MOST_TOP_K = 1024


class SamplingCalls:
    """Used on the loop of `samplers`."""

    def __init__(
        self, store: Store, samplers: Samplers, *, vocabulary: int, tokenizer: Tokenizer, capacity: Callable[[], int],
        seed: int, seconds: float, answered: Callable[[Future], None], fail: Callable[[BaseException], None],
    ):  # fmt: skip
        """capacity: tokens of prompt and completion. seconds: for a call. fail: called with errors not the client's."""
        self._store, self._samplers, self._vocabulary = store, samplers, vocabulary
        self._chat = Chat(tokenizer, None, end_of_thinking="")
        self._capacity, self._seed, self._seconds = capacity, seed, seconds
        self._answered, self._fail = answered, fail
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, future: Future) -> None:
        """Samples what a call asks for, and answers it."""
        task = self._tasks[future.id] = asyncio.create_task(self._sampled(future))
        task.add_done_callback(lambda _: self._over(future, task))

    def _over(self, future: Future, task: asyncio.Task[None]) -> None:
        del self._tasks[future.id]
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._fail(fault)

    async def _sampled(self, future: Future) -> None:
        """Answers a call of asample."""
        try:
            async with asyncio.timeout(self._seconds):
                answer, versions = await self._sampled_in_time(future)
        except (ApiError, ServerRefused, ValueError) as error:
            message = error.message if isinstance(error, ApiError) else str(error)
            self._store.refuse(future, message, category="user")
        except (NoServer, TimeoutError) as error:
            why = f": {self._samplers.trouble}" if self._samplers.trouble else ""
            message = str(error) or f"not sampled within {self._seconds:.0f} s{why}"
            self._store.refuse(future, message, category="server")
        except (OSError, sqlite3.Error):
            raise
        except Exception as error:  # noqa: BLE001  it ends neither other clients' calls nor each start after this one
            _log.exception("%s", future.id)
            self._store.refuse(future, f"the server failed: {error!r}", category="server")
        else:
            self._store.answer(future, answer, proto=True, versions=json.dumps(versions))
        self._answered(future)

    async def _sampled_in_time(self, future: Future) -> tuple[bytes, list[Any]]:
        """(the answer, the versions). Raises if the request cannot be served."""
        body = future.fields
        row = self._store.row("samplers", future.owner)
        assert row is not None
        folder, model = row["folder"], row["model"]

        def weights() -> Weights:
            if folder:
                return Weights(folder, model)
            followed = self._store.row("models", model)
            assert followed is not None
            return Weights(followed["inflight"], model)

        prompt, asked = self._prompt(body), self._asked(body)
        capacity = self._capacity() - len(prompt)
        if capacity < 1:
            raise RefusedCall(
                f"prompt: it has {len(prompt)} tokens, and prompt and completion {self._capacity()} at most"
            )
        sampling = asked.sampling((), capacity=capacity)
        if field(body, "sampling_params", dict, {}).get("stop") is None:
            sampling = dataclasses.replace(sampling, stop_token_ids=tuple(self._chat.tokenizer.stop_ids))

        async def one(i: int) -> tuple[Completion, dict[int, Weights]]:
            seed = asked.seed if asked.seed is not None else stable_hash("tinker", self._seed, future.id)
            wanted = CompletionRequest(0, stable_hash("sample", seed, i))
            request = GroupRequest(0, f"{future.id}/{i}", prompt, (wanted,), sampling)
            return await self._samplers.generate(weights, request, inflight=not folder)

        async def score(tokens: np.ndarray, **more: Any) -> Scores:
            return await self._samplers.score(weights, ScoreRequest(tokens, **more))

        of_prompt, top, last, targets = self._prompt_scores(body, prompt)
        try:
            async with asyncio.TaskGroup() as group:
                sampled = [group.create_task(one(i)) for i in range(asked.choices)]
                scored = group.create_task(score(prompt, **of_prompt)) if of_prompt is not None else None
        except ExceptionGroup as failed:  # one is enough
            raise failed.exceptions[0] from None
        found = [task.result() for task in sampled]
        completions = [completion for completion, _ in found]
        if asked.stops:
            completions = [self._chat.text(completion, asked.stops)[0] for completion in completions]
        k = number(body, "topk_sample_logprobs", 0, 0, MOST_TOP_K, whole=True)
        tops: list[Scores | None] = [None] * len(completions)
        if k:
            tops = [
                await score(np.concatenate([prompt, one.token_ids]), first=len(prompt), top_k=k) for one in completions
            ]
        versions = [
            [[made[step].model, made[step].folder, start, end] for step, start, end in completion.versions]
            for completion, (_, made) in zip(completions, found, strict=True)
        ]
        prompt_scores = scored.result() if scored is not None else None
        answer = tinker_wire.samples_of(completions, tops, prompt_scores, last=last, top_k=top, targets=targets)
        return answer, versions

    def _prompt(self, body: Mapping[str, Any]) -> np.ndarray:
        """[tokens] int32. Raises ApiError, RefusedCall."""
        chunks = field(field(body, "prompt", dict, {}), "chunks", list, [])
        tokens: list[int] = []
        for chunk in chunks:
            if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
                raise RefusedCall("prompt: only chunks of encoded_text are offered")
            tokens += field(chunk, "tokens", list, [])
        return token_ids(tokens, "prompt", self._vocabulary)

    def _prompt_scores(
        self, body: Mapping[str, Any], prompt: np.ndarray
    ) -> tuple[dict[str, Any] | None, int, int | None, pb.Tensor | None]:
        """(fields of the prompt's ScoreRequest or None; its top k; how many last tokens are wanted; the targets)"""
        top = number(body, "topk_prompt_logprobs", 0, 0, MOST_TOP_K, whole=True)
        last = number(body, "prompt_logprobs_last_n", None, 1, len(prompt), whole=True)
        wanted: dict[str, Any] = {"top_k": top} if top or body.get("prompt_logprobs") else {}
        tensor = field(body, "target_prompt_logprobs", dict)
        if tensor is None:
            return wanted or None, top, last, None
        if tensor.get("sparse_crow_indices") is not None:
            raise RefusedCall("target_prompt_logprobs: sparse tensors are not offered")
        shape, data = field(tensor, "shape", list, []), field(tensor, "data", list, [])
        rows = len(prompt) - 1
        fits = len(shape) == 2 and shape[0] == rows and type(shape[1]) is int and 0 < shape[1] <= MOST_TOP_K
        if not fits or len(data) != rows * shape[1]:
            raise RefusedCall(f"target_prompt_logprobs: its shape must be [{rows}, k] with k up to {MOST_TOP_K}")
        vocabulary = self._vocabulary
        if not all(type(one) is int and -1 <= one < vocabulary for one in data):
            raise RefusedCall(f"target_prompt_logprobs: token ids are from 0 to {vocabulary - 1}, and -1 for none")
        ids = np.full((len(prompt), shape[1]), -1, np.int32)
        ids[1:] = np.asarray(data, np.int32).reshape(shape)
        targets = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=shape)
        return {"top_k": top, "target_ids": ids}, top, last, targets

    def _asked(self, body: Mapping[str, Any]) -> SampleRequest:
        """How it is sampled. Raises ApiError, RefusedCall."""
        for name in ("prompt_alt_tokens_k", "record_stability_info"):
            if body.get(name):
                raise RefusedCall(f"{name}: is not offered")
        given = dict(field(body, "sampling_params", dict, {}))
        stop = given.pop("stop", None)
        ids: tuple[int, ...] = ()
        if isinstance(stop, list) and stop and all(type(one) is int for one in stop):
            ids, stop = tuple(token_ids(stop, "stop", self._vocabulary).tolist()), None
        return SampleRequest(
            choices=number(body, "num_samples", 1, 1, MOST_SAMPLES, whole=True),
            max_tokens=number(given, "max_tokens", None, 1, 2**31 - 1, whole=True),
            stop_token_ids=ids,
            **sampling_fields({**given, "stop": stop}),
        )
