"""Episodes on a fleet: each turn is sampled behind the path so far, by any server, and what a server did is taken back.

A replay server's tokens are a function of the request alone, so what was fed can be told from what came of it.
"""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.environments import episode_pool
from scalerl_jax.environments.episode import Reply
from scalerl_jax.environments.episode_pool import EpisodePool
from scalerl_jax.environments.load import make_environment
from scalerl_jax.environments.scorer_pool import Complaints
from scalerl_jax.rollouts.requests import Requests
from tests.rollouts.clock import Clock
from tests.rollouts.small_trainer import VOCABULARY, ByteTokenizer, Trainer, config, row
from tests.support.replay.scripts import Scripted
from tests.support.waiting import eventually

BRISK = {"token_seconds": 0.002, "mean_tokens": 6.0}
GAME = """
class Count:
    def __init__(self, row):
        self.row, self.turns = row, 0
    def step(self, turn):
        self.turns += 1
        wanted = 1 + int(self.row.answer) % 4
        if self.turns == wanted:
            return {"done": True, "reward": float(turn.count("1") % 2), "metrics": {"wanted": wanted}}
        return f"turn {self.turns} of {wanted}"

class Counts:
    def rows(self, split): return []
    def episode(self, row): return Count(row)
"""


class Replies:
    """branching: every second reply begins a new branch."""

    def __init__(self, *, branching: bool):
        self._branching = branching

    def encode(self, row, messages, *, behind):
        text = messages[0]["content"]
        ids = np.array([10 + ord(letter) % 40 for letter in text], np.int32)
        return text, Reply(ids, new_branch=self._branching and text.startswith("turn 2"))


@pytest.fixture(params=[False, True], ids=["one_branch", "branches"])
def played(tmp_path, request):
    """A config, and the episodes of its environment."""
    (tmp_path / "game.py").write_text(GAME)
    made = config(rollout_max_turns=8, rollout_max_episode_tokens=400)
    made.environment.name = f"{tmp_path}/game.py:Counts"
    requests = Requests(made, ByteTokenizer())
    pool = EpisodePool(
        made, {"": make_environment(made)}, replies=Replies(branching=request.param), complaints=Complaints(),
        turn_tokens=requests.turn_tokens, decode=lambda ids: " ".join(map(str, ids)),
    )  # fmt: skip
    yield made, pool
    pool.close()


def turns_of(completion) -> list[tuple[int, int]]:
    """(start, end) of each."""
    ends = [0, *(end for _, end in completion.replies)]
    return list(zip(ends, [*(start for start, _ in completion.replies), len(completion.token_ids)]))


def check(group, requests: Requests, *, minimum: int, version: int | None = None) -> None:
    """What is trained on is what the servers sampled, turn by turn, behind what came before; nothing is cut."""
    script, open_group = Scripted(vocabulary=VOCABULARY, mean_tokens=6.0), requests.train(group.number, group.row)
    if version is not None:
        open_group = requests.evaluation(group.number, group.row, version=version, samples=len(group.completions))
    for index, (completion, score) in enumerate(zip(group.completions, group.scores)):
        turns = [(branch, *span) for branch in completion.branches for span in turns_of(branch)]
        if score.metrics["ended/done"]:
            assert len(turns) == score.metrics["turns"] == score.metrics["wanted"] == 1 + group.row.index % 4
        assert score.metrics["turns"] == len(turns) and score.metrics["branches"] == len(completion.branches)
        ends = [parts[-1].end for parts in group.servers[index]]
        assert ends == [len(branch.token_ids) for branch in completion.branches]
        assert min(branch.token_steps().min() for branch in completion.branches) >= minimum
        for turn, (branch, start, end) in enumerate(turns):
            wanted = open_group.requests[index]
            group_id = open_group.group_id
            if turn:
                wanted, group_id = requests.turn(wanted, turn), f"{group_id}/{index}/{turn}"
            prompt = group.row.token_ids if branch.prompt is None else branch.prompt
            prompt = np.concatenate([prompt, branch.token_ids[:start]])
            asked = dataclasses.replace(
                requests.probe("x", row(1), incarnation=1, samples=1, version=0), group_id=group_id, prompt=prompt,
                completions=(wanted,), sampling=requests.sampling, interruption=requests.interruption,
            )  # fmt: skip
            sampled = script.rollout(asked, wanted)
            np.testing.assert_array_equal(branch.token_ids[start:end], sampled.token_ids)
            np.testing.assert_array_equal(branch.logprobs[start:end], sampled.logprobs)


def check_batches(trainer: Trainer, requests: Requests) -> None:
    """All that was trained on."""
    for batch, groups in enumerate(trainer.batches):
        for group in groups:
            check(group, requests, minimum=batch - trainer.pacing.k)


def delivered(trainer: Trainer) -> set[str]:
    """The servers that have sampled a part of what was trained on."""
    groups = [group for groups in trainer.batches for group in groups]
    return {part.process.address for group in groups for of in group.servers for parts in of for part in parts}


def test_every_turn_follows_the_path_so_far_and_is_trained_once(start, played):
    made, pool = played
    servers = start(BRISK, BRISK)
    with Trainer(made, servers, episodes=pool) as trainer:
        requests = Requests(made, ByteTokenizer())
        seen = []
        while len(trainer.batches) < 6:
            seen += trainer.update()
        future = trainer.fleet.evaluate(trainer.version, [row(5000 + i) for i in range(6)], 3)
        while not future.done():
            trainer.update()
        check_batches(trainer, requests)
        for group in future.result():
            check(group, requests, minimum=6, version=6)
            assert {step for c in group.completions for step in c.token_steps().tolist()} == {6}
    numbers = [group.number for group in seen]
    assert numbers == list(range(len(seen)))
    turns = [score.metrics["turns"] for group in seen for score in group.scores]
    assert {1, 2, 3} <= set(turns) <= {1, 2, 3, 4}


@pytest.mark.parametrize("played", [False], indirect=True)
def test_an_evaluation_takes_no_time_from_an_episode(start, played, monkeypatch):
    made, pool = played
    made.evaluation.servers = 0
    clock, servers = Clock().install(monkeypatch, episode_pool), start(BRISK, BRISK)
    for server in servers:
        server.hold_back("train/5/0/1")  # the second turn of an episode
    with Trainer(made, servers, episodes=pool) as trainer:
        trainer.admit_all()

        def goes_on() -> bool:
            group = trainer.fleet._buffer.in_flight.get(5)
            return group is not None and 0 in group.trajectories and 0 in group.asked

        eventually(goes_on)
        future = trainer.fleet.evaluate(0, [row(5000)], 2)
        assert all(server["evaluating"] for server in trainer.fleet.status()["servers"].values())
        clock.ahead += 2 * made.environment.episode_seconds
        for server in servers:
            server.let_go()
        trainer.fleet.result(future, trainer.wait)
        scores = [score for _ in range(2) for group in trainer.update() for score in group.scores]
        assert len(scores) == 32 and not any(score.metrics["ended/deadline"] for score in scores)


def test_experts_that_nobody_asked_for_are_dropped(liar, played):
    """Turns of different shapes cannot be joined."""
    made, pool = played
    each = itertools.cycle([1, 2])

    async def generate(request, context, honest):
        write = context.write

        async def tell(message):
            fed = (len(request.prompt_token_ids) + len(message.token_ids)) // 4 - 1
            per_token = next(each)
            ids = bytes(fed * per_token)
            message.experts.CopyFrom(pb.Experts(layers=1, experts_per_token=per_token, expert_bytes=1, ids=ids))
            await write(message)

        await honest(request, SimpleNamespace(write=tell, peer=context.peer, abort=context.abort))

    liar.generate = generate
    with Trainer(made, [liar], episodes=pool) as trainer:
        groups = [group for _ in range(2) for group in trainer.update()]
        assert any(score.metrics["turns"] > 1 for group in groups for score in group.scores)
        assert all(branch.experts is None for group in groups for c in group.completions for branch in c.branches)


@pytest.mark.slow
def test_episodes_outlive_a_server(start, played):
    made, pool = played
    servers = start(BRISK, BRISK)
    with Trainer(made, servers, episodes=pool) as trainer:
        requests = Requests(made, ByteTokenizer())
        trainer.admit_all()
        trainer.update_until(lambda: servers[0].address in delivered(trainer))  # whichever was admitted first
        servers[0].kill()
        trainer.update_until(lambda: servers[1].address in delivered(trainer))
        for _ in range(4):
            trainer.update()
        assert delivered(trainer) == {server.address for server in servers}
        check_batches(trainer, requests)


@pytest.mark.slow
def test_what_a_server_did_to_an_episode_is_taken_back(start, played):
    made, pool = played
    servers = start(BRISK, BRISK)
    with Trainer(made, servers, episodes=pool) as trainer:
        requests = Requests(made, ByteTokenizer())
        trainer.admit_all()
        groups = trainer.fleet.batch(0, trainer.wait)
        bad = groups[0].servers[0][0][0].process
        assert trainer.fleet.trust.dismiss(bad, "a test") > 0
        again = trainer.update()
        assert [group.number for group in again] == [group.number for group in groups]
        for group in again:
            check(group, requests, minimum=0)
            assert bad not in {part.process for of in group.servers for parts in of for part in parts}
