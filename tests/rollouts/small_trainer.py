"""Real replay servers in processes of their own, and a small trainer that lives on a real Fleet."""

import concurrent.futures
import functools
import json
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.contract.codec import Completion, Version
from scalerl_jax.environments import Row, Score
from scalerl_jax.environments.base import RIGHT, WRONG
from scalerl_jax.environments.episode_pool import EpisodePool
from scalerl_jax.rollouts import pacing as pacing_lib
from scalerl_jax.rollouts.fleet import Fleet
from scalerl_jax.rollouts.group_buffer import FinishedGroup
from scalerl_jax.rollouts.parity import Probe
from scalerl_jax.rollouts.requests import Requests
from scalerl_jax.rollouts.servers.discovery import Servers
from scalerl_jax.rollouts.servers.validate_status import Expected, compare
from scalerl_jax.rollouts.teachers import Teachers
from scalerl_jax.rollouts.weights.publisher import Incarnation
from tests.rollouts.replay_server import hold_file, read_dump
from tests.support.replay.scripts import Scripted
from tests.support.servers import ServerProcess
from tests.support.waiting import SECONDS, eventually

SHAPES = {"model.embed_tokens.weight": (64, 24), "model.norm.weight": (24,), "lm_head.weight": (64, 24)}
VOCABULARY = 64
ENDLESS = 10**9  # updates: no test ends because the run does


def row(index: int) -> Row:
    ids = np.array([10 + index % 40, 11, 12], np.int32)
    return Row(f"prompt {index}", str(index), index=index, token_ids=ids)


class ByteTokenizer:
    """Ids 1 and up for the letters of a short phrase, 0 stops."""

    stop_ids = (0,)

    def encode(self, text: str) -> list[int]:
        return [1 + ord(letter) % 7 for letter in text]


def weights(version: int) -> dict[str, np.ndarray]:
    """The tensors of a version: random bits of finite floats."""
    rng = np.random.default_rng(version)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


class ReplayServer(ServerProcess):
    """A replay server whose options, and whose weights, a test can look at."""

    def __init__(self, folder: str, name: str, **options: Any):
        self._options = options
        self.dump = os.path.join(folder, name + ".npz")
        self.touched = False  # killed or frozen at some time
        super().__init__(pathlib.Path(folder), name=name)

    def command(self) -> list[str]:
        options = {"port": self.port, "port_file": str(self.port_file), "dump": self.dump, "shapes": SHAPES}
        return ["-m", "tests.rollouts.replay_server", json.dumps(options | self._options)]

    def start(self, **changes: Any) -> None:
        self._options |= changes
        super().start()

    def held(self):
        """(version, tensors) as the engine has them; version 0 of nobody before there was one."""
        return read_dump(self.dump) if os.path.exists(self.dump) else (Version(0, 0), {})

    def hold_back(self, group_id: str) -> None:
        """From now on it says nothing to a request for this group, until `let_go`."""
        with open(self.dump + ".new", "w") as file:
            file.write(group_id)
        os.replace(self.dump + ".new", hold_file(self.dump))

    def let_go(self) -> None:
        if os.path.exists(hold_file(self.dump)):
            os.remove(hold_file(self.dump))

    def forget(self) -> None:
        """The dump of what an earlier test sent, and what it had held back."""
        self.let_go()
        if os.path.exists(self.dump):
            os.remove(self.dump)

    def kill(self) -> None:
        self.touched = True
        super().kill()

    def reserve(self) -> "ReplayServer":
        """Kills it: nobody listens at its port."""
        self.kill()
        self.forget()
        return self

    def freeze(self) -> None:
        self.touched = True
        super().freeze()


def config(**changes: Any) -> Config:
    """Small and quick; `changes` are dotted names with _ for the dot's first level: fleet_silence_seconds=1.

    The run has no end, and no server is given up because a process stood still for a minute, as it may on a busy
    machine.
    """
    made = Config(seed=3, max_steps=ENDLESS)
    made.rollout.prompts_per_step, made.rollout.group_size = 4, 4
    made.rollout.thinking_budget_min, made.rollout.thinking_budget_max, made.rollout.answer_budget = 4, 24, 16
    made.rollout.interruption_text, made.rollout.end_of_thinking = "time is up>", ">"
    made.fleet.connect_seconds, made.fleet.heartbeat_seconds = SECONDS, 0.1
    made.fleet.status_seconds, made.fleet.silence_seconds = 30.0, 120.0
    made.fleet.push_seconds = SECONDS
    made.fleet.chunk_bytes = 1000  # several chunks, and tensors across their borders
    made.evaluation.servers = 1
    for name, value in changes.items():
        group, _, field = name.partition("_")
        node, field = (made, name) if hasattr(made, name) else (getattr(made, group), field)
        assert hasattr(node, field)
        setattr(node, field, value)
    return made


def score(of: Row, completion: Completion) -> Score:
    """What the scorer of these tests says: a function of the tokens."""
    return RIGHT if completion.token_ids.sum() % 2 else WRONG


class Trainer:
    """Trains nothing, but takes every batch, publishes every version and keeps what it saw."""

    def __init__(
        self,
        made: Config,
        servers: Sequence[ReplayServer],
        *,
        start: int = 0,
        incarnation: int = 0,
        raised: Callable[[int], None] = lambda value: None,
        draw: Callable[[int], Row] | None = None,
        scorer: Callable[[Row, Completion], "concurrent.futures.Future[Score]"] | None = None,
        logprobs=None,
        episodes: EpisodePool | None = None,
        teachers: Teachers | None = None,
        **kwargs: Any,
    ):
        """logprobs: of completions, as the trainer's policy has them. kwargs: of Servers."""
        self.config, self.version, self.servers = made, start, servers
        common = {
            "k": made.pacing.max_off_policy_steps,
            "groups": made.rollout.prompts_per_step,
            "batches": made.max_steps,
            "start": start,
        }
        self.pacing: pacing_lib.Pacing = pacing_lib.Phased(**common)
        if made.pacing.kind == "pipeline":
            self.pacing = pacing_lib.Pipeline(**common, max_buffered_batches=made.pacing.max_buffered_batches)
        self.drawn: list[int] = []
        self.events: list[tuple[str, dict]] = []
        self.observed: list = []  # (status, evaluating)
        self.from_here: list[bool] = []  # of each of them
        self.serving: list[bool] = []  # at each call
        self.batches: list[list[FinishedGroup]] = []
        self.admitted: list[str] = []
        self.approves = True  # of every evaluation
        self.scorers = concurrent.futures.ThreadPoolExecutor(2)
        script = Scripted(vocabulary=VOCABULARY)
        expected = Expected(tokenizer_fingerprint="replay", model_config="{}", sync_dtype="float32")

        def own_logprobs(samples):
            whole = [script.score(np.concatenate([ids, c.token_ids])) for ids, c in samples]
            return [scores[len(ids) :] for scores, (ids, _) in zip(whole, samples)]

        self.probe = Probe(made.parity, expected=expected, score=logprobs or own_logprobs, dtype="float32")
        requests = Requests(made, ByteTokenizer())
        self.fleet = Fleet(
            made,
            servers=Servers(
                kwargs.pop("addresses", None) or [s.address for s in servers],
                probe_prompts=[row(1000), row(1001)],
                vocabulary=VOCABULARY,
                check=functools.partial(compare, expected=expected),
                **kwargs,
            ),
            requests=requests,
            buffer=requests.training_groups(self.pacing, draw or self.draw, trained=start),
            incarnation=Incarnation(incarnation or time.time_ns(), raised),
            score=scorer or (lambda row, completion: self.scorers.submit(score, row, completion)),
            episodes=episodes,
            teachers=teachers,
            on_event=lambda kind, fields: self.events.append((kind, fields)),
            observe=self.observe,
            serving=self.serving.append,
        )

    def __enter__(self) -> "Trainer":
        self.fleet.start()
        self.fleet.publish(self.version, weights(self.version))
        return self

    def __exit__(self, *_: object) -> None:
        self.fleet.close()
        self.scorers.shutdown()

    def observe(self, status: Any, evaluating: bool, from_here: bool) -> None:
        self.observed.append((status, evaluating))
        self.from_here.append(from_here)

    def draw(self, number: int) -> Row:
        self.drawn.append(number)
        return row(number)

    def wait(self) -> None:
        self.admitted += [server for server, _ in self.probe.admit_candidates(self.fleet)]
        if self.approves and self.fleet.trust.evaluation() is not None:
            self.fleet.trust.approve_evaluation()

    def update(self, wait: Callable[[], None] | None = None) -> list[FinishedGroup]:
        """One batch: taken, "trained", and the next version published where the pacing wants it."""
        groups = self.fleet.batch(self.version, wait or self.wait)
        self.batches.append(groups)
        self.version += 1
        self.fleet.advance(self.version)
        self.fleet.publish(self.version, lambda version=self.version: weights(version))
        return groups

    def states(self) -> dict[str, str]:
        return {address: s["state"] for address, s in self.fleet.status()["servers"].items()}

    def server(self, server: ReplayServer) -> dict[str, Any]:
        """What the fleet says of it."""
        return self.fleet.status()["servers"][server.address]

    def admit_until(self, condition: Callable[[], bool]) -> None:
        def look() -> bool:
            self.wait()
            return condition()

        eventually(look)

    def admit_all(self) -> None:
        """All servers given have been admitted; one that was lost since may not be again."""
        self.admit_until(lambda: {s.address for s in self.servers} <= set(self.admitted))

    def update_until(self, condition: Callable[[], Any]) -> None:
        """Updates, none if it holds already: a fleet that nobody takes batches from comes to a stop."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"not within {SECONDS:g} s"
            self.update()

    def check(self) -> None:
        """What must hold of everything trained so far, whatever happened."""
        size, k = self.config.rollout.prompts_per_step, self.pacing.k
        first = self.version - len(self.batches)
        numbers = [group.number for groups in self.batches for group in groups]
        assert numbers == list(range(first * size, self.version * size))
        assert self.drawn == list(range(first * size, first * size + len(self.drawn)))
        for batch, groups in enumerate(self.batches, start=first):
            for group in groups:
                assert len(group.completions) == len(group.scores) == self.config.rollout.group_size
                for index, completion in enumerate(group.completions):
                    assert (completion.group_id, completion.index) == (f"train/{group.number}", index)
                    assert 0 <= batch - int(completion.token_steps().min()) <= k
                    assert group.scores[index] == score(group.row, completion)
