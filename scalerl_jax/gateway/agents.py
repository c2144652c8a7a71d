"""A run's agents: their processes, the gateway that they call, and how their sessions become completions.

    gateway      on a port of this machine, with a key that the agents have; on a separate thread
    turn         is requested from the fleet under the completion's group, so that no token of an agent is too stale
                 for its batch; temperature, budgets and seeds are the run's, whatever the client asks for
    journal      sessions/NAME.journal of the run folder, until the group is trained on and that is saved: if the
                 trainer was killed, the agent restarts, and the calls that it repeats are answered from the journal

A turn whose answer the agent has not read is not trained on. Evaluations have no journals.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.contract.codec import Completion, GroupRequest
from scalerl_jax.environments import parts
from scalerl_jax.environments.base import Row, Score
from scalerl_jax.environments.episode import Ask, Client, Outcome, SampledPart
from scalerl_jax.environments.episode_pool import ENDED, EpisodeFailed, EpisodePool, failed_score
from scalerl_jax.environments.scorer import Scorer
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.gateway.chat import Chat
from scalerl_jax.gateway.generators import Refused
from scalerl_jax.gateway.journal import Journal
from scalerl_jax.gateway.server import check_installed, listen, serve
from scalerl_jax.gateway.sessions import KEY, Branch, Session, SessionOver, Sessions, Turn, branches
from scalerl_jax.rollouts.group_buffer import Process
from scalerl_jax.rollouts.loop_thread import LoopThread, watched
from scalerl_jax.rollouts.requests import EVALUATION, Requests

SWEEP_SECONDS = 60.0  # between sweeps of the journals that are no longer needed
MOST_BYTES = 2**33  # of all sessions in memory
_JOURNAL = re.compile(r"train-(\d+)-.*\.journal")


@contextlib.contextmanager
def agents_of(
    config: Config, scorer: Scorer, tokenizer: Tokenizer, requests: Requests, *, folder: str = "",
    saved: Callable[[], int] = lambda: 0,
) -> "Iterator[RunAgents | None]":  # fmt: skip
    """The agents of the run's environments, see RunAgents; None if there are none."""
    if not scorer.agents:
        yield None
        return
    assert scorer.episodes is not None
    with RunAgents(config, scorer.episodes, tokenizer, requests, folder=folder, saved=saved) as agents:
        yield agents


class RunAgents:
    """A context manager.

    folder: of the journals; "": there are none. saved: returns the step from which the run would resume now.

    Raises ValueError, one line, if the gateway is not installed, and OSError naming the folder.
    """

    def __init__(
        self, config: Config, episodes: EpisodePool, tokenizer: Tokenizer, requests: Requests, *, folder: str,
        saved: Callable[[], int],
    ):  # fmt: skip
        check_installed()
        self._config, self._episodes, self._folder, self._saved = config, episodes, folder, saved
        configs = {part: of_part for part, of_part in parts.configs(config).items() if part in episodes.agents}
        self._chats = {part: Chat.of(of_part, tokenizer) for part, of_part in configs.items()}
        longest = config.rollout.max_prompt_tokens + requests.maximum_tokens
        self._fleet = _FleetSampler(longest, turn_tokens=requests.turn_tokens)
        self._sessions = Sessions(folder=folder, seed=config.seed, most=2**31, most_turns=0, most_bytes=MOST_BYTES)
        self._key, self._port, self._swept = secrets.token_urlsafe(24), 0, 0.0
        self._thread = LoopThread("agents' gateway")
        self._fault: BaseException | None = None
        if folder:
            os.makedirs(folder, exist_ok=True)
            self._sweep()
            self._drop_unsaved(saved())

    def __enter__(self) -> "RunAgents":
        from scalerl_jax.gateway.app import Gateway, Options  # Starlette, which is installed for agents only

        listening = listen("127.0.0.1", 0)
        listening.listen(2048)
        self._port = listening.getsockname()[1]

        async def serving() -> None:
            options = Options(("policy", "*"), token=self._key, request_seconds=float("inf"), sampling="run")
            try:
                chat = next(iter(self._chats.values()))  # each session has its own
                app = Gateway(chat, self._fleet, self._sessions, options).app()
                await serve(app, listening, over=lambda: False)
            except Exception as error:  # noqa: BLE001 (every run of an agent raises it from here on)
                self._fault = error

        self._thread.start(lambda: [serving()])
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.close()
        self._sessions.close()
        if self._folder:
            self._sweep()

    def run(self, row: Row, name: str, ask: Ask, *, attempt: int) -> "Future[Outcome]":
        """See environments.episode.Agents."""
        outcome: Future[Outcome] = Future()

        async def play() -> None:
            with contextlib.suppress(InvalidStateError):  # it was cancelled
                try:
                    outcome.set_result(await self._play(row, name, ask, attempt))
                except Exception as error:  # noqa: BLE001 (it is the caller's)
                    outcome.set_exception(error)

        def begin() -> None:
            task = watched(play(), self._thread.fail)

            def cancel() -> None:
                task.cancel()

            def ended(done: "Future[Outcome]") -> None:
                if done.cancelled():
                    self._thread.post(cancel)

            outcome.add_done_callback(ended)

        if self._fault is not None:
            outcome.set_exception(self._fault)
        elif not self._thread.post(begin):
            outcome.cancel()
        return outcome

    # ---- on the gateway's thread

    async def _play(self, row: Row, name: str, ask: Ask, attempt: int) -> Outcome:
        if self._folder and time.monotonic() >= self._swept + SWEEP_SECONDS:
            self._sweep()
        journalled = not name.startswith(EVALUATION)
        called = name = name.replace("/", "-")
        if attempt:  # its earlier turns must not be trained on, not after a restart either
            called = f"{name}-again{attempt}"
            before = f"{name}-again{attempt - 1}" if attempt > 1 else name
            if self._folder:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._sessions.path(before))
        session = self._sessions.find(called, {"row": row.name}, journal=journalled)
        session.chat = self._chats[row.environment]
        self._fleet.runs[called] = run = _RunningAgent(ask, session, most_turns=self._config.rollout.max_turns)
        base = f"http://127.0.0.1:{self._port}/s/{called}"
        client = Client(f"{base}/v1", base, f"{KEY}{called}:{self._key}", called, "policy")
        began, why, score = time.monotonic(), "", None
        try:
            score = await self._episodes.run(row, client, evaluation=not journalled)
            ended = "done"
            if not session.answered:
                raise EpisodeFailed("it asked for no turn")
        except EpisodeFailed as failure:
            ended, why = run.how(failure), str(failure)
        finally:
            del self._fleet.runs[called]
            self._sessions.leave(called)
        found = list(completions_of(session))
        completions = [completion for completion, _ in found] or [_NOTHING]
        cut = ended not in ("done", "failed")
        completions[0] = dataclasses.replace(completions[0], finish_reason="length" if cut else "stop")
        self._episodes.ended(ended)
        metrics = _metrics(session, completions, ended, seconds=time.monotonic() - began - run.waited)
        if ended == "failed":
            self._episodes.failed(row, why)
            score = failed_score(metrics, why)
        elif cut or score is None:
            score = Score(-1.0, False, metrics, why=why)
        else:
            score = dataclasses.replace(score, metrics={**score.metrics, **metrics})
        return Outcome(tuple(completions), tuple(parts for _, parts in found) or ((),), score)

    # ---- journals

    def _journals(self) -> list[tuple[int, str]]:
        """(number of its group, path) of each journal."""
        found = ((_JOURNAL.fullmatch(name), name) for name in os.listdir(self._folder))
        return [(int(match[1]), os.path.join(self._folder, name)) for match, name in found if match]

    def _sweep(self) -> None:
        """Removes the journals that no restart of the run would need."""
        self._swept = time.monotonic()
        first = self._saved() * self._config.rollout.prompts_per_step
        for number, path in self._journals():
            if number < first:
                os.unlink(path)

    def _drop_unsaved(self, newest: int) -> None:
        """Removes the journals with tokens of versions that the run will train again, with other weights."""
        for _, path in self._journals():
            journal = Journal(path)
            turns = (turn for record in journal.records for turn in record.get("turns", ()))
            later = any(step > newest for turn in turns for step, _, _ in turn["versions"])
            journal.close()
            if later:
                os.unlink(path)


class _RunningAgent:
    """The run of one agent."""

    def __init__(self, ask: Ask, session: Session, *, most_turns: int):
        self._ask, self._session, self._most_turns = ask, session, most_turns
        self._last: Process | None = None  # that sampled its last turn
        self._over = False  # it requested more turns than allowed
        self.waited = 0.0  # seconds in which a turn was being sampled
        self._asked, self._since = 0, 0.0

    def how(self, failure: EpisodeFailed) -> str:
        """How a failed run ended."""
        if failure.late:
            return "deadline"
        return "max_turns" if self._over else "max_tokens" if self._session.full else "failed"

    async def turn(self, prompt: np.ndarray, name: str, *, most_tokens: int) -> tuple[Completion, Process]:
        if len(self._session.answered) + self._asked >= self._most_turns:
            self._over = True
            raise SessionOver(f"an agent may ask for {self._most_turns} turns (config.rollout.max_turns)")
        if not self._asked:
            self._since = time.monotonic()
        self._asked += 1
        asked, task = self._ask(prompt, name, self._last, most_tokens), asyncio.current_task()
        try:
            completion, process = await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            if task is None or task.cancelling():
                raise
            raise SessionOver("this run of the agent is not wanted any more") from None  # by the fleet
        finally:
            self._asked -= 1
            if not self._asked:
                self.waited += time.monotonic() - self._since
        self._last = process
        return completion, process


class _FleetSampler:
    """The gateway's Sampler (generators.py): samples on the fleet, through the agents that run."""

    def __init__(self, maximum_tokens: int, *, turn_tokens: int):
        self.maximum_tokens, self._turn_tokens = maximum_tokens, turn_tokens
        self.longest_prompt = maximum_tokens - turn_tokens
        self.runs = dict[str, _RunningAgent]()  # by session

    @property
    def there(self) -> Sequence[Any]:
        return [self]

    def capacity(self, prompt: int) -> int:
        return self._turn_tokens if prompt <= self.longest_prompt else 0

    async def ready(self, seconds: float) -> None:
        """The fleet waits for its servers itself."""

    async def generate(self, request: GroupRequest, *, seconds: float) -> tuple[Completion, str]:
        run = self.runs.get(request.session.removeprefix("gateway/"))
        if run is None:
            raise Refused("only an agent of this run is answered, under its own session")
        number, index = request.group_id.rpartition("/")[2], request.completions[0].index
        turn = f"{number}.{index}" if index else number
        completion, process = await run.turn(request.prompt, turn, most_tokens=request.sampling.answer_budget)
        return completion, " ".join(process)


# ---- what is trained on

_NOTHING = Completion(0, "", 0, np.zeros(0, np.int32), np.zeros(0, np.float32), (), (), "stop")


def completions_of(session: Session) -> list[tuple[Completion, tuple[SampledPart, ...]]]:
    """The completion of each branch, and which processes sampled it."""
    found, counted = [], set[int]()
    for branch in branches(session.turns, leaves=session.answered):
        found.append(_completion(branch, [session.turns[i] for i in branch.turns], counted))
        counted.update(branch.turns)
    return found


def _completion(branch: Branch, turns: Sequence[Turn], counted: set[int]) -> tuple[Completion, tuple[SampledPart, ...]]:
    """counted: turns that an earlier branch has; here they count as replies."""
    at, forced, replies, parts = 0, list[tuple[int, int]](), list[tuple[int, int]](), list[SampledPart]()
    for turn in turns:
        process = Process(*turn.server.rsplit(" ", 1))
        begin = at + (len(turn.added) if parts else 0)  # the root's added tokens are the prompt
        end = begin + len(turn.token_ids)
        given = [(at, begin), *([(begin, end)] if turn.turn_id in counted else [])]
        replies += [span for span in given if span[0] < span[1]]
        forced += [span for span in given if span[0] < span[1]]
        if turn.turn_id not in counted:
            forced += [(begin + a, begin + b) for a, b in turn.forced]
        parts += [SampledPart(process, end)]
        at = end
    behind, steps = len(turns[0].added), branch.steps[len(turns[0].added) :]
    edges = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
    completion = Completion(
        incarnation=0, group_id="", index=0, token_ids=branch.token_ids[behind:], logprobs=branch.logprobs[behind:],
        versions=tuple((int(steps[a]), a, b) for a, b in itertools.pairwise(edges)), forced=tuple(forced),
        finish_reason=turns[-1].finish_reason, replies=tuple(replies), prompt=turns[0].added,
    )  # fmt: skip
    return completion, tuple(parts)


def _metrics(session: Session, completions: Sequence[Completion], ended: str, *, seconds: float) -> dict[str, float]:
    turns = [turn for turn in session.turns if turn.turn_id in session.answered]
    sampled = sum(int(completion.sampled().sum()) for completion in completions)
    return {
        "turns": float(len(turns)),
        "branches": float(len(completions)),
        "tokens_per_turn": sampled / max(1, len(turns)),
        "tool_calls": float(sum(len(turn.message.get("tool_calls", ())) for turn in turns)),
        "environment_seconds": seconds,
        **{f"ended/{how}": float(how == ended) for how in ENDED},
    }
