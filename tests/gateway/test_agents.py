"""Agents of a run: what they ask is asked of the fleet, recorded, and goes on from the journal where all was killed."""

import copy
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np
import psutil
import pytest

from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments import episode_pool
from scalerl_jax.environments.base import Row
from scalerl_jax.environments.episode import Outcome
from scalerl_jax.environments.episode_pool import EpisodePool
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.gateway.agents import RunAgents
from scalerl_jax.rollouts.group_buffer import Process
from scalerl_jax.rollouts.requests import Requests
from tests.rollouts.clock import Clock
from tests.support.chat_folders import chat_folder
from tests.support.episodes import pool_of
from tests.support.waiting import eventually

AGENT = """
import json, subprocess, time, urllib.error, urllib.request

class Agent:
    def rows(self, split): return []
    def run(self, row, client):
        def ask(path="/v1/completions", session=client.session, key=client.api_key, **body):
            base = client.anthropic_base_url.replace(client.session, session)
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            asked = urllib.request.Request(base + path, json.dumps({"model": "policy", **body}).encode(), headers)
            try:
                return json.load(urllib.request.urlopen(asked))
            except urllib.error.HTTPError as error:
                return error.code
        return eval(row.text, {**globals(), **locals()})
"""
A = Process("a:1", "x")


class Fleet:
    """Answers turns: the tokens are `said`, or 100 and how many it was asked for before."""

    def __init__(self, *, step: int = 3, answered: int = 1000, said: Sequence[int] = ()):
        self.asked: list[tuple[list[int], str, Process | None, int | None]] = []
        self._step, self._answered, self._said = step, answered, said

    def ask(self, prompt, turn, after, most) -> "Future[tuple[Completion, Process]]":
        ids = np.array(self._said or [100, len(self.asked)], np.int32)
        self.asked.append((prompt.tolist(), turn, after, most))
        answer: Future[tuple[Completion, Process]] = Future()
        if len(self.asked) <= self._answered:
            whole, logprobs = ((self._step, 0, len(ids)),), -np.ones(len(ids), np.float32)
            answer.set_result((Completion(1, "g", 0, ids, logprobs, whole, (), "stop"), A))
        return answer


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Iterator[tuple[Config, EpisodePool, Tokenizer]]:
    folder = tmp_path_factory.mktemp("agents")
    chat_folder(folder / "model", "qwen3")
    (folder / "agent.py").write_text(AGENT)
    config = Config()
    config.model.path, config.environment.name = str(folder / "model"), f"{folder / 'agent.py'}:Agent"
    rollout = config.rollout
    rollout.thinking_budget_min = rollout.thinking_budget_max = 0
    rollout.answer_budget, rollout.max_prompt_tokens, rollout.max_episode_tokens, rollout.max_turns = 8, 16, 24, 4
    rollout.prompts_per_step = 2
    pool = pool_of(config)
    yield config, pool, Tokenizer(config.model.path)
    pool.close()


def test_an_agent_has_so_many_seconds(made):
    config = copy.deepcopy(made[0])
    config.environment.episode_seconds = 0.5
    pool = pool_of(config)
    try:
        with RunAgents(config, pool, made[2], Requests(config, made[2]), folder="", saved=lambda: 0) as of_run:
            outcome = of_run.run(Row("time.sleep(3600)"), "train/6/0", Fleet().ask, attempt=0).result(600)
    finally:
        pool.close()
    assert outcome.score.metrics["ended/deadline"] == 1 and not outcome.score.excluded
    assert outcome.branches[0].finish_reason == "length"


@pytest.mark.parametrize(("name", "ended"), [("train/6/0", "done"), ("eval/3/0/0", "deadline")])
def test_time_in_which_no_turn_can_be_sampled_is_not_an_agents(made, monkeypatch, name, ended):
    """But an evaluation's agent has no other time: what it waits for is sampled then."""
    config, _, tokenizer = made
    clock = Clock().install(monkeypatch, episode_pool)
    asked, said = list[str](), Future()
    looks, monotonic = list[float](), clock.monotonic
    clock.monotonic = lambda: looks.append(monotonic()) or looks[-1]

    def ask(prompt, turn, after, most) -> Future:
        asked.append(turn)
        return said

    pool = pool_of(config)
    try:
        with RunAgents(config, pool, tokenizer, Requests(config, tokenizer), folder="", saved=lambda: 0) as of_run:
            outcome = of_run.run(Row("ask(prompt=[7]) and 1.0"), name, ask, attempt=0)
            eventually(lambda: asked, "it asks for a turn")
            pool.clock.stand(True)
            clock.ahead += 2 * config.environment.episode_seconds
            pool.clock.stand(False)
            if ended == "done":
                before = len(looks)
                eventually(lambda: len(looks) > before + 1, "it is looked at whether its time is up")
                said.set_result(Fleet().ask(np.array([7]), *asked, None, None).result())
            assert outcome.result(600).score.metrics[f"ended/{ended}"] == 1
    finally:
        pool.close()


@pytest.mark.parametrize("history", ["all", "template"])
def test_an_agent_of_a_mixture_has_the_template_settings_of_its_environment(made, history):
    config, tokenizer = copy.deepcopy(made[0]), made[2]
    config.rollout.max_prompt_tokens = 200
    environment, config.environment = config.environment, EnvironmentConfig()
    environment.template_arguments, environment.history = {"enable_thinking": False}, history
    config.mixture = {"chat": environment, "other": dataclasses.replace(environment, template_arguments={})}
    asked, again = {"role": "user", "content": "2+2?"}, {"role": "user", "content": "3+3?"}
    text = f"""(ask("/v1/chat/completions", messages=[{asked}]),
        ask("/v1/chat/completions", messages=[{asked}, {{"role": "assistant", "content": "4"}}, {again}])) and 1.0"""
    said = tokenizer.encode("4<|im_end|>")
    fleet = Fleet(said=said)
    pool = pool_of(config)
    try:
        with RunAgents(config, pool, tokenizer, Requests(config, tokenizer), folder="", saved=lambda: 0) as of_run:
            row = Row(text, environment="chat", agent=True)
            branches = ids_of(of_run.run(row, "train/6/0", fleet.ask, attempt=0).result(600))
    finally:
        pool.close()
    prompts = [tokenizer.decode(prompt) for prompt, *_ in fleet.asked]
    user, begin, closed = "<|im_start|>user\n", "<|im_start|>assistant\n", "<think>\n\n</think>\n\n"
    first, second = f"{user}2+2?<|im_end|>\n{begin}", f"{user}3+3?<|im_end|>\n{begin}"
    kept = closed if history == "all" else ""  # the template writes no empty thinking before a question
    assert prompts == [first + closed, f"{first}{kept}4<|im_end|>\n{second}{closed}"]
    assert len(branches) == (1 if history == "all" else 2)
    assert all(tokens[-len(said) :] == said for _, tokens in branches)


@pytest.fixture
def agents(made, tmp_path) -> Callable[..., RunAgents]:
    config, pool, tokenizer = made

    def agents_of(saved: int = 3) -> RunAgents:
        folder = str(tmp_path / "sessions")
        return RunAgents(config, pool, tokenizer, Requests(config, tokenizer), folder=folder, saved=lambda: saved)

    return agents_of


def ids_of(outcome: Outcome) -> list[tuple[list[int], list[int]]]:
    """(prompt, tokens) of each branch."""
    assert all(branch.prompt is not None for branch in outcome.branches)
    return [(branch.prompt.tolist(), branch.token_ids.tolist()) for branch in outcome.branches]


def test_what_an_agent_asks_is_asked_of_the_fleet(agents):
    fleet = Fleet()
    text = """[ask(prompt=[7, 8], temperature=0, seed=1, max_tokens=3), ask(prompt=[7, 8, 100, 0, 9], n=2),
               ask(session="train-9-9", prompt=[7]), ask(key="sk-scalerl-x:no", prompt=[7]), ask("/v1/none")][2:]"""
    with agents() as of_run:
        outcome = of_run.run(
            Row(f"1.0 if {text} == [400, 401, 404] else -1.0"), "train/6/0", fleet.ask, attempt=0
        ).result(600)
    # Each choice is a turn of its own; what a client says of the sampling counts for nothing, but for its length.
    assert fleet.asked[0] == ([7, 8], "0", None, 3)
    assert sorted(fleet.asked[1:]) == [([7, 8, 100, 0, 9], name, A, 8) for name in ("1", "1.1")]
    assert ids_of(outcome) == [([7, 8], [100, 0, 9, 100, 1]), ([7, 8], [100, 0, 9, 100, 2])]
    first, second = outcome.branches
    assert (first.replies, second.replies) == (((2, 3),), ((0, 2), (2, 3)))
    assert first.sampled().sum() == 4 and second.sampled().sum() == 2
    assert first.finish_reason == "stop" and outcome.parts == (((A, 2), (A, 5)),) * 2
    assert outcome.score.reward == 1.0 and outcome.score.correct
    metrics = outcome.score.metrics
    assert (metrics["turns"], metrics["branches"], metrics["ended/done"]) == (3, 2, 1)


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        ("1 / 0", "failed"),
        ("1.0", "failed"),  # it has asked for nothing
        ("(ask(prompt=[7]), __import__('os').kill(__import__('os').getpid(), 9))", "failed"),
        ("([ask(prompt=[8]) for _ in range(4)], 1 / 0)", "failed"),
        ("([ask(prompt=[8]) for _ in range(5)], 1 / 0)", "max_turns"),
        ("(ask(prompt=[7]), ask(prompt=[8] * 33), 1 / 0)", "max_tokens"),
    ],
)
def test_how_an_agent_ends(agents, text, ended):
    with agents() as of_run:
        outcome = of_run.run(Row(text), "train/6/0", Fleet().ask, attempt=0).result(600)
    assert outcome.score.metrics[f"ended/{ended}"] == 1
    assert outcome.score.excluded == (ended == "failed")
    assert outcome.branches[0].finish_reason == ("stop" if ended == "failed" else "length")
    assert len(outcome.branches) == len(outcome.parts) >= 1


def test_an_agent_may_say_its_score_in_numbers_of_numpy(agents):
    number = "__import__('numpy').float32(0.5)"
    text = f"(ask(prompt=[7]), {{'reward': {number}, 'correct': {number} > 0, 'metrics': {{'depth': {number}}}}})[1]"
    with agents() as of_run:
        score = of_run.run(Row(text), "train/6/0", Fleet().ask, attempt=0).result(600).score
    assert (score.reward, score.correct, score.excluded) == (0.5, True, False) and score.metrics["depth"] == 0.5


def test_an_agent_goes_on_where_everything_was_killed(agents, tmp_path):
    text = "(ask(prompt=[7]), ask(prompt=[7, 100, 0, 9])) and 1.0"
    fleet = Fleet(answered=1)
    with agents() as of_run:
        of_run.run(Row(text), "train/6/0", fleet.ask, attempt=0)
        eventually(lambda: len(fleet.asked) == 2, "the second turn is asked for")
    fleet = Fleet()
    with agents() as of_run:
        outcome = of_run.run(Row(text), "train/6/0", fleet.ask, attempt=0).result(600)
    assert [asked[:2] for asked in fleet.asked] == [([7, 100, 0, 9], "1")]  # the first is known
    assert ids_of(outcome) == [([7], [100, 0, 9, 100, 0])]
    # Another time it asks for something else: what it had asked for is not trained on.
    with agents() as of_run:
        outcome = of_run.run(Row("ask(prompt=[5]) and 1.0"), "train/6/0", Fleet().ask, attempt=0).result(600)
    assert ids_of(outcome) == [([5], [100, 0])]

    journals = tmp_path / "sessions"
    assert [path.name for path in journals.iterdir()] == ["train-6-0.journal"]
    with agents(saved=2):  # version 3 is made again, and not alike
        assert not list(journals.iterdir())


def test_journals_are_kept_until_they_are_not_needed(agents, tmp_path):
    saved = 3
    with agents() as of_run:
        for name in ("train/6/0", "train/7/0", "train/8/0", "eval/3/0/0"):
            of_run.run(Row("ask(prompt=[7]) and 1.0"), name, Fleet().ask, attempt=0).result(600)
    names = sorted(path.name for path in (tmp_path / "sessions").iterdir())
    assert names == ["train-6-0.journal", "train-7-0.journal", "train-8-0.journal"]
    with agents(saved=saved + 1):
        assert [path.name for path in (tmp_path / "sessions").iterdir()] == ["train-8-0.journal"]


def test_an_agent_that_is_given_up_ends_with_its_programs(agents, tmp_path):
    marker = f"{tmp_path}/started"
    script = f"echo $$ > {marker}.part; mv {marker}.part {marker}; sleep 999"
    text = f"(ask(prompt=[7]), subprocess.run(['sh', '-c', {script!r}]))"
    with agents() as of_run:
        outcome = of_run.run(Row(text), "train/6/0", Fleet().ask, attempt=0)
        eventually(lambda: pathlib.Path(marker).exists(), "its program has started")
        outcome.cancel()
        eventually(lambda: not psutil.pid_exists(int(pathlib.Path(marker).read_text())), "its program has ended")


def test_a_turn_that_the_fleet_gives_up_is_over(agents):
    gone: Future[tuple[Completion, Process]] = Future()
    gone.cancel()
    with agents() as of_run:
        row = Row("1.0 if ask(prompt=[7]) == 409 and ask(prompt=[7]) == 409 else -1.0")
        outcome = of_run.run(row, "train/6/0", lambda *_: gone, attempt=0).result(600)
    assert outcome.score.why == "it asked for no turn"


def test_an_agent_that_begins_again_has_forgotten_everything(agents, tmp_path):
    """What it had came from a server that is not trusted any more: not in this process, and not in the next."""
    row = Row("ask(prompt=[7]) and 1.0")
    with agents() as of_run:
        for attempt in range(3):
            fleet = Fleet()
            outcome = of_run.run(row, "train/6/0", fleet.ask, attempt=attempt).result(600)
            assert len(fleet.asked) == 1 and outcome.score.reward == 1.0
    assert [path.name for path in (tmp_path / "sessions").iterdir()] == ["train-6-0-again2.journal"]
    fleet = Fleet()
    with agents() as of_run:
        of_run.run(row, "train/6/0", fleet.ask, attempt=0).result(600)
    assert len(fleet.asked) == 1
