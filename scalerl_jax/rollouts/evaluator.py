"""Evaluates policies one after another on a fleet that only evaluates, for a run that does not train.

    version v     the v-th policy given; every server gets a full sync of it, and samples for it alone
    a server      is admitted when it samples with what it was sent; there are no trainer log-probs to compare with

Requests, seeds and budgets are those of a run's own evaluations (requests.py), so the same policy, prompts and config
give the same completions. A server that holds a trainer's weights is left alone: its trainer would lose it for good.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from scalerl_jax.config import Config
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments import Row, Score
from scalerl_jax.environments.episode import Agents
from scalerl_jax.environments.episode_pool import EpisodePool
from scalerl_jax.rollouts.fleet import POLL_SECONDS, Fleet
from scalerl_jax.rollouts.group_buffer import FinishedGroup
from scalerl_jax.rollouts.pacing import Pipeline
from scalerl_jax.rollouts.requests import Requests
from scalerl_jax.rollouts.servers.discovery import Servers
from scalerl_jax.rollouts.servers.validate_status import Expected, ProbeError, compare
from scalerl_jax.rollouts.weights.publisher import Incarnation, Source


class Evaluator:
    """A context manager. Raises FleetError or ProbeError, one line, if no server can be used."""

    def __init__(
        self,
        config: Config,
        servers: Servers,
        *,
        expected: Expected,
        requests: Requests,
        score: Callable[[Row, Completion], "Future[Score]"],
        wait: Callable[[str], None],
        episodes: EpisodePool | None = None,
        agents: Agents | None = None,
        take_over: bool = False,
    ):
        """expected: what every server must have; its model_config is "" for a family that only the server's engine
        knows. take_over: also use servers that hold a trainer's weights.

        wait: called about five times a second during an evaluation, with a line about the servers that are not
        sampling, or "" if all are; what it raises ends the evaluation.
        """
        self._samples, self._version, self._wait = config.evaluation.samples, -1, wait
        incarnation = Incarnation(time.time_ns())

        def check_server(server: str, status: pb.StatusReply) -> None:
            if status.version.incarnation not in (0, incarnation.value) and not take_over:
                raise ProbeError(
                    f"server {server}: holds the weights of a trainer, which would lose it, or of an evaluation "
                    "before; --take takes it all the same"
                )
            model_config = expected.model_config or status.model_config
            compare(server, status, dataclasses.replace(expected, model_config=model_config))

        def nothing(number: int) -> Row:
            raise AssertionError("nothing is trained on")

        self._fleet = Fleet(
            config,
            servers=dataclasses.replace(servers, check=check_server),
            requests=requests,
            buffer=requests.training_groups(Pipeline(k=1, groups=1, batches=0), nothing, trained=0),
            incarnation=incarnation,
            score=score,
            episodes=episodes,
            agents=agents,
        )

    def __enter__(self) -> "Evaluator":
        self._fleet.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._fleet.close()

    def evaluate(self, weights: Source, rows: Sequence[Row]) -> Iterator[FinishedGroup]:
        """The samples of each row by the policy with these weights (Hugging Face names, sync dtype), in whatever
        order."""
        self._version += 1
        fleet, done = self._fleet, set[int]()
        fleet.publish(self._version, weights)
        if self._version:
            fleet.advance(self._version)
        evaluation = fleet.evaluate(self._version, rows, self._samples)
        while len(done) < len(rows):
            for candidate in fleet.trust.due():
                fleet.trust.admit(candidate.process.address)
            found = fleet.evaluated(but=done)
            done.update(group.number for group in found)
            yield from found
            servers = fleet.status()["servers"].items()
            self._wait(
                "; ".join(
                    f"{name}: {one['reason'] or one['state']}" for name, one in servers if one["state"] != "active"
                )
            )
            if not found:
                time.sleep(POLL_SECONDS)
        fleet.trust.approve_evaluation()
        fleet.result(evaluation)
