"""One server of a teacher: a model that is never updated, and scores what the policy samples (teachers.py).

How its log-probs are checked:

    met        the first server of a teacher samples some tokens itself: it must score them as it sampled them. These
               scores are the reference: every other server must give the same, within the limits of the dtype
    each call  ends with the same tokens, and counts only if the server's scores of them match the reference
    answer     passes the codec's checks; a token that is among the top ids or the targets has the same log-prob there;
               and the weights are those that the server was met with

A server that fails is rejected with one line; another process on its address is met as a new one. A single server that
samples and scores with the same wrong weights is not detected: there is nothing else to compare with.

Lives on the fleet's event loop.
"""

import asyncio
import dataclasses
import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

import grpc
import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.contract import codec, peer_text, security
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.rollouts.loop_thread import watched
from scalerl_jax.rollouts.requests import validate
from scalerl_jax.rollouts.servers.discovery import Plaintext
from scalerl_jax.rollouts.servers.server_state import describe
from scalerl_jax.rollouts.servers.validate_status import Expected, Found, StatusCheck, clock

_log = logging.getLogger(__name__)

REFERENCE_TOKENS = 48  # that a teacher's first server samples, and all score at the end of each call
FAILURES = 8  # in a row, of any kind: then a server is rejected
PAUSE_SECONDS = 1.0  # in which a server that has failed gets no requests

OTHER_TOKENIZER = "and its log-probs are of other tokens: a teacher has the tokenizer of the policy"


def fault_of(status: pb.StatusReply, expected: Expected, *, top_k: int) -> str:
    """Why a server with this status cannot serve a teacher; "" if it may. top_k: ids it must return log-probs of."""
    theirs, ours = vocabulary_of(status.model_config), vocabulary_of(expected.model_config)
    if status.tokenizer_fingerprint != expected.tokenizer_fingerprint:
        return f"its tokenizer is not the policy's, {OTHER_TOKENIZER}"
    if theirs < ours:
        return f"its vocabulary has {theirs:.0f} ids, the policy's {ours:.0f}"
    if not status.maximum_top_k:
        return "it has no ScoreMany (its status has no maximum_top_k), which a teacher needs"
    if status.maximum_top_k < top_k:
        return f"it gives the log-probs of {status.maximum_top_k} ids at a token, and config.distill.k={top_k}"
    if status.maximum_tokens < expected.maximum_tokens:
        return (
            f"it holds {status.maximum_tokens} tokens of prompt and completion, the run needs up to "
            f"{expected.maximum_tokens}; its flag is --maximum_tokens"
        )
    return ""


def vocabulary_of(model_config: str) -> float:
    """Of a status; infinite if the status does not give it: then the answers are checked alone."""
    try:
        return float(json.loads(model_config)["vocab_size"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return math.inf


@dataclasses.dataclass
class TeacherContext:
    """What the servers of one teacher share, and their callbacks to the teacher."""

    name: str
    config: Config
    expected: Expected  # of the policy
    top_k: int  # ids requested at a token
    prompt: np.ndarray  # [tokens] int32, of the reference
    limits: Mapping[str, tuple[float, float]]  # by dtype, of |log-prob difference|: mean, 99th percentile
    credentials: security.Credentials
    observe: Callable[[pb.StatusReply, bool], None]  # a status; whether it is to be booked from here on only
    changed: Callable[[], None]  # there may be something to request
    sent_away: Callable[[], None]
    fail: Callable[[BaseException], None]  # an error of our own
    # The request and scores every server must reproduce, and the compute dtype of the first; None: none was met yet.
    reference: tuple[codec.ScoreRequest, codec.Scores, str] | None = None


class TeacherServer:
    """See the module."""

    def __init__(self, address: str, context: TeacherContext):
        self.address, self._context, self._config = address, context, context.config
        Plaintext(context.credentials).dial(address)
        self._channel = security.connect(address, context.credentials)
        self._stub, self._statuses = Stub(self._channel), StatusCheck()
        self.status = pb.StatusReply()
        self.admitted = False  # it may be asked
        self.refused = ""  # the process that was rejected, while no other answers
        self._set_reason("not reached yet")
        self.calls: dict[asyncio.Task[None], int] = {}  # tokens of each
        self.free_at, self._heard_at = 0.0, -math.inf
        self._failures = 0  # in a row, of this process
        self._limit = peer_text.LogLimit()
        self.task = watched(self._run(), context.fail)

    @property
    def heard(self) -> bool:
        """Whether it has answered."""
        return self._heard_at > -math.inf

    @property
    def load(self) -> float:
        """Tokens that it is scoring, per device."""
        return sum(self.calls.values()) / max(1, self.status.devices)

    async def _run(self) -> None:
        try:
            while True:
                await self._poll()
                await asyncio.sleep(self._config.fleet.heartbeat_seconds)
        finally:
            self.admitted = False
            self._end_calls()
            await self._channel.close()

    async def _poll(self) -> None:
        asked_at, fleet = clock(), self._config.fleet
        try:
            status = await self._stub.Status(pb.StatusRequest(), timeout=fleet.status_seconds)
        except grpc.aio.AioRpcError as error:
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if not late or time.monotonic() - self._heard_at > fleet.silence_seconds:
                self._lose(security.refusal(error, self._context.credentials) or describe(error))
            return
        found = Found("it cannot be decoded")
        if status is not None:
            found = self._statuses.check(status, asked_at=asked_at, heard_at=clock())
        if found.lie:
            self._lose(f"its status cannot be true: {found.lie}")
            return
        self._heard_at = time.monotonic()
        if status.server_id == self.refused:
            return
        if status.server_id != self.status.server_id:
            self._failures = 0
            if self.admitted:
                self._lose("it was restarted")
        self._context.observe(status, found.from_here)
        self.status, self.refused = status, ""
        if not self.admitted:
            await self._meet()

    async def _meet(self) -> None:
        """Checks whether it is a server of this teacher."""
        context, status = self._context, self.status
        try:
            if fault := fault_of(status, context.expected, top_k=context.top_k):
                raise ValueError(fault)
            if context.reference is None:
                request, sampled = await self._sample()
                (scores,) = await self._read([request])
                self._hold_against(scores.logprobs, sampled, "those that it samples with", status.compute_dtype)
                context.reference = context.reference or (request, scores, status.compute_dtype)
            else:
                await self.scores([])
        except (ValueError, TimeoutError, grpc.aio.AioRpcError) as error:
            self.failed(error)
            return
        self.admitted, self.free_at = True, 0.0
        _log.info("teacher %s: server %s scores (%s)", context.name, self.address, peer_text.printable(status.engine))
        context.changed()

    async def _sample(self) -> tuple[codec.ScoreRequest, np.ndarray]:
        """Lets it sample after the prompt; returns the request to score that, and its log-probs."""
        prompt, version = self._context.prompt, codec.version_from_proto(self.status.version)
        tokens = min(REFERENCE_TOKENS, self._context.expected.maximum_tokens - len(prompt))
        request = codec.GroupRequest(
            incarnation=version.incarnation,
            # Another run of this teacher asks it too: a call with the id of an earlier one ends that.
            group_id=f"teacher/{self.address}/{uuid.uuid4().hex}",
            prompt=prompt,
            completions=(codec.CompletionRequest(0, seed=self._config.seed),),
            sampling=codec.Sampling(answer_budget=tokens),
            minimum_step=version.step,
        )
        call = self._stub.Generate(codec.request_to_proto(request), timeout=self._config.distill.seconds)
        try:
            message = await call.read()
        finally:
            call.cancel()
        if not isinstance(message, pb.Completion):
            raise ValueError("it samples nothing")
        completion = codec.completion_from_proto(message)
        validate(completion, request, newest=version.step, vocabulary=0)
        ids, first = completion.token_ids, len(prompt)
        wanted = codec.ScoreRequest(np.concatenate([prompt, ids]).astype(np.int32), first, self._context.top_k)
        return dataclasses.replace(wanted, target_ids=ids[:, None]), completion.logprobs

    async def scores(self, requests: Sequence[codec.ScoreRequest]) -> list[codec.Scores]:
        """Scores of each request, once the server's scores of the reference match. Raises as `_read`."""
        assert self._context.reference is not None
        request, expected, dtype = self._context.reference
        *answers, again = await self._read([*requests, request])
        coarser = dtype if dtype == self.status.compute_dtype else "bfloat16"
        self._hold_against(_values(again), _values(expected), "those that this teacher gave before", coarser)
        self._failures = 0
        return answers

    async def _read(self, requests: Sequence[codec.ScoreRequest]) -> list[codec.Scores]:
        """Raises TimeoutError if one of the answers does not arrive in distill.seconds, grpc.aio.AioRpcError as the
        call does, ValueError if an answer cannot be right."""
        vocabulary = int(min(2**31, vocabulary_of(self.status.model_config)))
        version, answers = self.status.version.SerializeToString(), []
        call = self._stub.ScoreMany(map(codec.score_request_to_proto, requests))
        try:
            for request in requests:
                async with asyncio.timeout(self._config.distill.seconds):
                    message = await call.read()
                if not isinstance(message, pb.ScoreReply):
                    raise ValueError("it answers with something else than scores, or with too few of them")
                scores = codec.scores_from_proto(message, request, vocabulary=vocabulary)
                if message.version.SerializeToString() != version:
                    raise ValueError("its weights have changed, and a teacher is never updated")
                given = ((scores.top_ids, scores.top_logprobs), (request.target_ids, scores.target_logprobs))
                for ids, logprobs in given:
                    same = ids == request.token_ids[request.first :, None]
                    once = np.broadcast_to(scores.logprobs[:, None], same.shape)
                    self._hold_against(
                        logprobs[same], once[same], "its own of the same tokens", self.status.compute_dtype
                    )
                answers.append(scores)
        finally:
            call.cancel()
        return answers

    def _hold_against(self, ours: np.ndarray, expected: np.ndarray, whose: str, dtype: str) -> None:
        """Raises ValueError if the log-probs `ours` are not those `expected`, both [numbers]."""
        apart = np.abs(np.asarray(ours, np.float64) - expected)
        given, parity = self._context.limits["float32" if dtype == "float32" else "bfloat16"], self._config.parity
        mean, p99 = parity.mean_limit or given[0], parity.p99_limit or given[1]
        if len(apart) and (apart.mean() > mean or np.quantile(apart, 0.99) > p99):
            raise ValueError(
                f"its log-probs differ from {whose} by {apart.mean():.2g} on average and "
                f"{np.quantile(apart, 0.99):.2g} at the 99th percentile (limits {mean:g} and {p99:g})"
            )

    def failed(self, error: ValueError | TimeoutError | grpc.aio.AioRpcError) -> None:
        """Handles a request that failed or got an invalid answer."""
        code, why = _code_of(error), describe(error) if isinstance(error, grpc.aio.AioRpcError) else str(error)
        why = why or f"it scored no sequence in {self._config.distill.seconds:g} s (config.distill.seconds)"
        if code is grpc.StatusCode.UNAVAILABLE:
            self._lose(why)
            return
        self._failures += not accepted_nothing(error)
        now, times = time.monotonic(), self._limit.happened(str(code), now=time.monotonic())
        self._set_reason(why)
        if isinstance(error, ValueError) or code is grpc.StatusCode.INVALID_ARGUMENT or self._failures >= FAILURES:
            _log.warning("%s; it is not asked any more", self.reason)
            self.refused, self.admitted = self.status.server_id, False
            self._end_calls()
            self._context.sent_away()
            return
        if times:
            _log.warning("%s%s; another one is asked", self.reason, f", {times} times" if times > 1 else "")
        self.free_at = now + PAUSE_SECONDS
        asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._context.changed)

    def _lose(self, why: str) -> None:
        """Its requests go to another server; it is met again when it answers."""
        self._set_reason(why)
        if self.admitted:
            _log.warning("%s", self.reason)
        self.admitted = False
        self._end_calls()
        self._context.changed()

    def _set_reason(self, why: str) -> None:
        """Why it cannot be asked."""
        self.reason = f"teacher {self._context.name}, server {self.address}: {peer_text.printable(why, longest=600)}"

    def _end_calls(self) -> None:
        for task in list(self.calls):
            if task is not asyncio.current_task():
                task.cancel()


def accepted_nothing(error: BaseException) -> bool:
    """Whether a server was only too busy. gRPC reports INTERNAL if the call had ended before it was written."""
    return _code_of(error) in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL)


def _code_of(error: BaseException) -> grpc.StatusCode | None:
    return error.code() if isinstance(error, grpc.aio.AioRpcError) else None


def _values(scores: codec.Scores) -> np.ndarray:
    """Every log-prob: [numbers]."""
    return np.concatenate([scores.logprobs, scores.top_logprobs.ravel(), scores.target_logprobs.ravel()])
