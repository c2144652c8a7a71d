"""Teachers: models that are never updated, and score what the policy samples (config.distill, objective.distill).

    where         config.distill.teachers: servers of the contract, listed as --servers lists the run's; or a model
                  folder, which a local server serves
    sampled       the teacher's log-prob of each token
    topk_forward  and of the teacher's k most likely tokens
    student_topk  and of the policy's k most likely tokens, which a generator of the run names
    queue         each branch of a completion is one sequence. It goes to the least loaded server, and after a failure
                  to another one. CACHE_BYTES of the latest answers are cached, so that none is requested twice
    server        one that dies is checked again when it answers; discovery may find another

A server that does not return the teacher's log-probs is rejected (servers/teacher_server.py). The run ends if every
server was rejected and no other can appear; while all are lost the run waits.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import grpc
import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.contract import codec, peer_text
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.codec import TeacherScores
from scalerl_jax.contract.fingerprint import tokenizer_fingerprint
from scalerl_jax.environments import Row
from scalerl_jax.learner.batch import prompt_of
from scalerl_jax.rollouts.loop_thread import LoopThread, on_loop, watched
from scalerl_jax.rollouts.servers.client import ServerClient
from scalerl_jax.rollouts.servers.discovery import ListedServers, relist
from scalerl_jax.rollouts.servers.teacher_server import (
    OTHER_TOKENIZER,
    PAUSE_SECONDS,
    TeacherContext,
    TeacherServer,
    accepted_nothing,
    vocabulary_of,
)
from scalerl_jax.rollouts.servers.validate_status import Expected, FleetError, ProbeError

_log = logging.getLogger(__name__)

CACHE_BYTES = 2**28  # of answers that are kept
CALLS = 2  # to one server at a time: one is computed, one waits
SEQUENCES = 16  # at most, in one call
STUDENT_CALLS = 4  # scores asked of one generator of the run at a time: it answers no more than 8
TRIES = 16  # of one sequence: one that crashes servers must not crash them all repeatedly


@dataclasses.dataclass(frozen=True)
class Where(ListedServers):
    """Where a teacher's servers are."""

    folder: str = ""  # of a model for local servers to serve; their addresses are known once they have started


def where_of(config: Config, rows: Sequence[Row], expected: Expected) -> dict[str, Where]:
    """The teachers of a config, by name. Raises ValueError, one line, if one is invalid or a row names another."""
    found = {}
    for name, text in config.distill.teachers.items():
        field = f"config.distill.teachers.{name}"
        if os.path.isdir(text):
            if tokenizer_fingerprint(text) != expected.tokenizer_fingerprint:
                raise ValueError(f"{field}={text}: its tokenizer is not the policy's, {OTHER_TOKENIZER}")
            found[name] = Where(folder=text)
        elif os.sep in text and not text.startswith(("file:", "dns:")):
            raise ValueError(f"{field}={text}: no such folder")
        else:
            found[name] = Where.of(text, config.fleet, field=field)
    named = {teacher_of(config, row) for row in rows}
    if found and named <= {""}:
        raise ValueError(f"config.distill.column={config.distill.column}: no row has it")
    return found


def teacher_of(config: Config, row: Row) -> str:
    """The name of a row's teacher, "" if it has none. Raises ValueError if the row names an unknown teacher."""
    distill = config.distill
    if not distill.column:
        return next(iter(distill.teachers), "")
    known = {"task": row.task, "environment": row.environment} | dict(row.extra)
    name = str(known.get(distill.column) or "")
    if name and name not in distill.teachers:
        of = f"{row.name or f'row {row.index}'}: its {distill.column} is {peer_text.printable(name)!r}"
        raise ValueError(f"{of}, and config.distill.teachers has {', '.join(distill.teachers)}")
    return name


def top_k_of(config: Config) -> int:
    """Number of ids that a teacher's server must score at each token."""
    return 0 if config.objective.distill == "sampled" else config.distill.k


@dataclasses.dataclass(eq=False)
class _WaitingSequence:
    """A sequence that waits for its scores."""

    request: codec.ScoreRequest
    answer: "asyncio.Future[codec.Scores]"
    asked_at: float = dataclasses.field(default_factory=time.monotonic)
    tries: int = 0
    failed_at: str = ""  # the server that last failed to deliver


class Teachers:
    """The teachers of one run.

    where: each teacher's servers. prompt, limits, observe: see TeacherContext.

    Used on the fleet's loop, except for `drain`.
    """

    def __init__(
        self,
        config: Config,
        where: Mapping[str, Where],
        *,
        prompt: np.ndarray,
        expected: Expected,
        limits: Mapping[str, tuple[float, float]],
        observe: Callable[[pb.StatusReply, bool], None],
    ):
        self._config, self._where = config, where
        self._form, self._k = config.objective.distill, config.distill.k
        self._vocabulary = vocabulary_of(expected.model_config)
        self._context = functools.partial(
            TeacherContext, config=config, expected=expected, top_k=top_k_of(config), prompt=prompt, limits=limits,
            observe=observe,
        )  # fmt: skip
        self._teachers: dict[str, _Teacher] = {}
        self._known = collections.OrderedDict[bytes, asyncio.Future[codec.Scores]]()  # by digest, the oldest first
        self._known_bytes = 0
        self._freed = asyncio.Event()  # a generator of the run has answered
        self._drained_at = time.monotonic()

    def begin(
        self,
        thread: LoopThread,
        *,
        fail: Callable[[BaseException], None],
        students: Callable[[], Sequence[ServerClient]],
    ) -> list[Coroutine[Any, Any, None]]:
        """The coroutines to run on the fleet's loop. students: returns the servers that hold the policy now."""
        self._thread, self._students = thread, students
        context = functools.partial(self._context, fail=fail)
        self._teachers = {name: _Teacher(name, where, context) for name, where in self._where.items()}
        return [job for teacher in self._teachers.values() for job in teacher.jobs()]

    async def score(self, row: Row, completion: codec.Completion) -> tuple[TeacherScores, ...]:
        """The teacher's scores of each branch; () if the row has no teacher. Waits without a time limit."""
        name = teacher_of(self._config, row)
        if not name:
            return ()
        asked = [self._branch(self._teachers[name], prompt_of(branch, row), branch) for branch in completion.branches]
        return tuple(await asyncio.gather(*asked))

    async def _branch(self, teacher: "_Teacher", prompt: np.ndarray, branch: codec.Completion) -> TeacherScores:
        if not len(branch.token_ids):
            return TeacherScores(np.zeros(len(prompt), np.float32))
        request = codec.ScoreRequest(np.concatenate([prompt, branch.token_ids]).astype(np.int32), first=len(prompt))
        if self._form == "sampled":
            return TeacherScores(_behind(len(prompt), (await self._scores(teacher, request)).logprobs, 0))
        with_top = dataclasses.replace(request, top_k=self._k)
        if self._form == "student_topk":
            ids = (await self._ask_student(with_top)).top_ids
            scores = await self._scores(teacher, dataclasses.replace(request, target_ids=ids))
            logprobs = scores.target_logprobs
        else:
            scores = await self._scores(teacher, with_top)
            ids, logprobs = scores.top_ids, scores.top_logprobs
            beyond = ids >= self._vocabulary  # padding of the teacher's vocabulary
            ids, logprobs = np.where(beyond, -1, ids), np.where(beyond, 0, logprobs)
        return TeacherScores(
            _behind(len(prompt), scores.logprobs, 0), _behind(len(prompt), ids, -1), _behind(len(prompt), logprobs, 0)
        )

    async def _scores(self, teacher: "_Teacher", request: codec.ScoreRequest) -> codec.Scores:
        """The teacher's scores, from the cache if they were requested before."""
        asked = codec.score_request_to_proto(request).SerializeToString(deterministic=True)
        digest = hashlib.blake2b(asked, digest_size=20, key=teacher.name.encode()[:64]).digest()
        answer = self._known.get(digest)
        if answer is None:
            answer = self._known[digest] = teacher.add(request)
            answer.add_done_callback(self._keep)
        else:
            self._known.move_to_end(digest)
            teacher.row["cached"] += 1
        return await asyncio.shield(answer)

    def _keep(self, answer: "asyncio.Future[codec.Scores]") -> None:
        if answer.cancelled():
            return
        self._known_bytes += _bytes(answer.result())
        for digest in list(self._known):
            if self._known_bytes <= CACHE_BYTES:
                return
            if (old := self._known[digest]).done():
                del self._known[digest]
                self._known_bytes -= _bytes(old.result())

    async def _ask_student(self, request: codec.ScoreRequest) -> codec.Scores:
        """Scores by the policy that a generator of the run holds; tries another generator after a failure."""
        seconds, failed = self._config.distill.seconds, ""
        while True:
            now = time.monotonic()
            free = [one for one in self._students() if one.scores < STUDENT_CALLS and one.free_at <= now]
            client = min(free, key=lambda client: (client.address == failed, client.scores), default=None)
            if client is not None:
                failed = client.address
                if (scores := await client.score(request, seconds=seconds)) is not None:
                    self._freed.set()
                    return scores
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_SECONDS):
                    await self._freed.wait()

    @on_loop
    def drain(self) -> dict[str, dict[str, float]]:
        """For each teacher, since the last call: sequences and their tokens scored, tokens_per_second; seconds: mean
        from request to answer; cached: answers from the cache; asked_again: sequences; sent_away: rejected servers."""
        elapsed, self._drained_at = time.monotonic() - self._drained_at, time.monotonic()
        rows = {}
        for name, teacher in self._teachers.items():
            row, teacher.row = teacher.row, _fresh_row()
            row["tokens_per_second"] = row["tokens"] / max(elapsed, 1e-9)
            row["seconds"] /= max(1, row["sequences"])
            rows[name] = row
        return rows


def _fresh_row() -> dict[str, float]:
    return dict.fromkeys(("sequences", "tokens", "seconds", "cached", "asked_again", "sent_away"), 0)


def _behind(prompt: int, values: np.ndarray, blank: int) -> np.ndarray:
    """The values of a completion's tokens, after `blank` for each token of its prompt."""
    return np.concatenate([np.full((prompt, *values.shape[1:]), blank, values.dtype), values])


def _bytes(scores: codec.Scores) -> int:
    return sum(array.nbytes for array in vars(scores).values())


class _Teacher:
    """One teacher: its servers, and the sequences that wait for them."""

    def __init__(self, name: str, where: Where, context: Callable[..., TeacherContext]):
        """context: makes a TeacherContext with what all teachers share."""
        self.name, self._where, self.row = name, where, _fresh_row()
        self._context = context(name=name, credentials=where.credentials, changed=self._pump, sent_away=self._sent_away)
        self._servers: dict[str, TeacherServer] = {}
        self._queue: list[_WaitingSequence] = []
        self._lost = True  # no server can be asked

    def jobs(self) -> list[Coroutine[Any, Any, None]]:
        """What runs for it on the fleet's loop."""
        self._list(self._where.addresses)
        seconds, warning = self._context.config.fleet.discovery_seconds, "%s; the teacher's servers stay as they are"
        return [self._connect(), relist(self._where.resolve, self._list, seconds=seconds, warning=warning)]

    async def _connect(self) -> None:
        """Until a server has answered. Raises FleetError if none does in fleet.connect_seconds."""
        fleet, began = self._context.config.fleet, time.monotonic()
        while not any(server.heard for server in self._servers.values()):
            if time.monotonic() - began > fleet.connect_seconds:
                tried = f"{', '.join(self._servers)} (tried for {fleet.connect_seconds:g} s)"
                raise FleetError(f"teacher {self.name}: no server answers at {tried}: is scalerl-serve running?")
            await asyncio.sleep(min(fleet.discovery_seconds, fleet.connect_seconds))

    def _list(self, addresses: Sequence[str]) -> None:
        for address in set(self._servers) - set(addresses):
            _log.warning("teacher %s, server %s has left: it is no longer listed", self.name, address)
            self._servers.pop(address).task.cancel()
        for address in addresses:
            if address not in self._servers:
                self._servers[address] = TeacherServer(address, self._context)
        self._pump()

    def add(self, request: codec.ScoreRequest) -> "asyncio.Future[codec.Scores]":
        """Queues a sequence and returns the future of its scores."""
        sequence = _WaitingSequence(request, asyncio.get_running_loop().create_future())
        self._queue.append(sequence)
        asyncio.get_running_loop().call_soon(self._pump)  # together with others added now
        return sequence.answer

    def _pump(self) -> None:
        """Sends waiting sequences to every server that may be asked."""
        now, admitted = time.monotonic(), [s for s in self._servers.values() if s.admitted]
        self._log_whether_lost(bool(admitted))
        while self._queue:
            free = [s for s in admitted if len(s.calls) < CALLS and s.free_at <= now]
            for server in sorted(free, key=lambda s: s.load):
                mine = [one for one in self._queue if one.failed_at != server.address or len(admitted) == 1]
                if mine:
                    break
            else:
                return
            slots = sum(CALLS - len(s.calls) for s in free)
            asked = mine[: min(SEQUENCES, -(-len(mine) // slots))]
            self._queue = [one for one in self._queue if one not in asked]
            task = watched(self._ask(server, asked), self._context.fail)
            server.calls[task] = sum(len(one.request.token_ids) for one in asked)
            task.add_done_callback(functools.partial(self._asked, server, asked))  # also if it never began

    async def _ask(self, server: TeacherServer, asked: list[_WaitingSequence]) -> None:
        try:
            answers = await server.scores([one.request for one in asked])
            now = time.monotonic()
            for one, scores in zip(asked, answers, strict=True):
                one.answer.set_result(scores)
                self.row["sequences"] += 1
                self.row["tokens"] += len(one.request.token_ids)
                self.row["seconds"] += now - one.asked_at
        except (ValueError, TimeoutError, grpc.aio.AioRpcError) as error:
            for one in asked:
                one.tries -= accepted_nothing(error)
            server.failed(error)

    def _asked(self, server: TeacherServer, asked: list[_WaitingSequence], task: "asyncio.Task[None]") -> None:
        """Ends a call; sequences without an answer are queued again."""
        del server.calls[task]
        sequences = [one for one in asked if not one.answer.done()]
        for one in sequences:
            one.tries, one.failed_at = one.tries + 1, server.address
            if one.tries >= TRIES:
                what = f"{len(one.request.token_ids)} tokens were not scored in {TRIES} calls"
                self._context.fail(FleetError(f"teacher {self.name}: {what}, the last one at {server.reason}"))
        self._queue[:0] = sequences
        self.row["asked_again"] += len(sequences)
        self._pump()

    def _log_whether_lost(self, there: bool) -> None:
        if self._lost == there:
            self._lost = not there
            if there:
                _log.info("teacher %s: a server can be asked", self.name)
            else:
                why = "; ".join(server.reason for server in self._servers.values())
                _log.warning("teacher %s: every server is lost (%s); waiting until one answers", self.name, why)

    def _sent_away(self) -> None:
        """Counts a rejected server; the run ends if all are rejected and no other can appear."""
        self.row["sent_away"] += 1
        servers = self._servers.values()
        if self._where.resolve is None and all(server.refused for server in servers):
            self._context.fail(ProbeError("; ".join(server.reason for server in servers)))
