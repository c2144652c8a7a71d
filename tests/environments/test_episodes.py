"""Episodes: what a step may give, and what becomes of one whose environment fails, crashes, hangs or is given up."""

import dataclasses
import gc
import os
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from scalerl_jax.config import Config
from scalerl_jax.contract.codec import Completion
from scalerl_jax.environments import Row, Score
from scalerl_jax.environments.base import ScorerError
from scalerl_jax.environments.episode import LONGEST_REPLY, Reply, Step, Trajectory, as_step
from scalerl_jax.environments.episode_pool import EpisodePool
from scalerl_jax.environments.load import make_environment
from scalerl_jax.environments.prompts import Prompts
from scalerl_jax.environments.score_worker import LONGEST_WHY
from scalerl_jax.environments.scorer import Scorer
from scalerl_jax.environments.scorer_pool import Complaints
from tests.support.chat_folders import chat_folder
from tests.support.episodes import Letters, chat_pool, chat_turn, pool_of, turn_of
from tests.support.waiting import eventually

CLASSES = """
import ctypes, os, random, time

class Echo:
    def __init__(self, row):
        self.row, self.turns, self.drawn = row, 0, random.random()
    def step(self, turn):
        self.turns += 1
        if turn == "fail": raise OSError("no such\\ndisk")
        if turn == "exit": raise SystemExit(3)
        if turn == "die": os._exit(7)
        if turn == "hang":
            try:
                time.sleep(3600)
            except Exception:
                return "slept"
        if turn == "compiled":  # a lock that this thread holds already
            lock = ctypes.create_string_buffer(64)
            for _ in range(2): ctypes.CDLL(None).pthread_mutex_lock(lock)
        while turn == "spin": pass
        if turn == "odd": return 5
        if turn == "long": raise ValueError("x" * 10_000_000)
        if turn == "done":
            right = {"done": True, "reward": self.row.extra.get("last", 0.75), "metrics": {"drawn": self.drawn}}
            return right if "correct" not in self.row.extra else right | {"correct": self.row.extra["correct"]}
        if turn.tool_calls: return " and ".join(f"{c.name} {dict(c.arguments)}" for c in turn.tool_calls)
        if turn[:2] == "0.": return {"messages": ["x"], "reward": float(turn)}
        if turn == "tool": return {"messages": [{"role": "tool", "content": "4"}]}
        if turn == "think": return f"you thought {turn.thinking!r} in {turn.tokens} tokens"
        return {"messages": [f"{self.row.text} {self.turns}: {turn}"], "reward": 0.25}
    def close(self):
        open(self.row.extra["closed"], "a").write(".")

class Echoes:
    def rows(self, split): return []
    def episode(self, row): return Echo(row)

class NotMade(Echoes):
    def prepare(self): raise OSError("no such file")

class Both(Echoes):
    def score(self, row, completion): return 1

class Killed(Echoes):
    def prepare(self):
        with open(__file__ + ".killed", "a") as file:
            file.write(".")
        if os.path.getsize(__file__ + ".killed") < 3:
            os.kill(os.getpid(), 9)

class Leaves(Echoes):
    def prepare(self): os._exit(5)

def not_begun():
    class Never(Echoes):
        def episode(self, row): raise ValueError("no more of these")
    return Never()
"""


def config_of(path, name: str, **rollout) -> Config:
    file = path / "echo.py"
    file.write_text(CLASSES)
    config = Config()
    config.environment.name = f"{file}:{name}"
    config.environment.turn_seconds = 60.0
    config.rollout.thinking_budget_min = config.rollout.thinking_budget_max = 0
    config.rollout.max_turns, config.rollout.max_episode_tokens = 6, 1000
    for field, value in rollout.items():
        setattr(config.rollout, field, value)
    return config


class Untold(Complaints):
    """Logs every complaint."""

    def log(self, kind: str, line: str) -> None:
        Complaints().log(kind, line)


class Player:
    """Plays episodes of one row by what the policy would say."""

    def __init__(self, pool: EpisodePool, path, **extra):
        self.pool, self.closed = pool, path / "closed"
        self.row = Row("hello", extra={"closed": str(self.closed), **extra})
        self.trajectory: Trajectory | None = None

    def say(self, text: str, *, finish: str = "stop") -> Score | str:
        """The score, or the text of the reply."""
        turn = turn_of(text, finish=finish)
        if self.trajectory is None:
            self.trajectory = Trajectory(turn, "a:1")
        else:
            self.trajectory.add_turn(turn, "a:1")
        found = self.pool.step(self.row, self.trajectory).result()
        if isinstance(found, Score):
            return found
        self.trajectory.add_reply(found)
        return "".join(map(chr, found.token_ids))

    def again(self) -> None:
        self.trajectory = None

    def closes(self) -> int:
        return len(self.closed.read_text()) if self.closed.exists() else 0


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[EpisodePool]:
    pool = pool_of(config_of(tmp_path_factory.mktemp("echoes"), "Echoes"), Untold())
    yield pool
    pool.close()


@pytest.fixture
def player(pool, tmp_path) -> Player:
    return Player(pool, tmp_path)


def test_a_step_has_the_calls_of_tools(player):
    one = '<tool_call>{{"name": "add", "arguments": {{"a": {}}}}}</tool_call>'
    assert player.say(one.format(1) + one.format("[2]")) == "add {'a': 1} and add {'a': [2]}"


def test_an_episode_is_a_conversation_and_its_rewards_add_up(player):
    assert player.say("hi") == "hello 1: hi"
    assert player.say("ho") == "hello 2: ho"
    score = player.say("done")
    assert (score.reward, score.correct, score.failed) == (1.25, True, False)
    assert score.turns == (0.25, 0.25, 0.75)
    assert {
        "turns": 3.0,
        "ended/done": 1.0,
        "ended/max_turns": 0.0,
        "ended/failed": 0.0,
    }.items() <= score.metrics.items()
    assert score.metrics["environment_seconds"] > 0
    whole = player.trajectory.completion
    assert "".join(map(chr, whole.token_ids)) == "hihello 1: hihohello 2: hodone"
    assert "".join(map(chr, whole.token_ids[whole.sampled()])) == "hihodone"
    eventually(lambda: player.closes() == 1)


def test_the_episodes_of_a_row_draw_the_same_numbers(player):
    drawn = set()
    for _ in range(3):
        player.again()
        drawn.add(player.say("done").metrics["drawn"])
    assert len(drawn) == 1
    other = Player(player.pool, player.closed.parent, seed=2)
    assert other.say("done").metrics["drawn"] not in drawn


def test_rows_that_differ_in_their_keys_alone_draw_other_numbers_and_templates_change_none(player):
    def drawn(**fields) -> float:
        player.again()
        player.row = dataclasses.replace(player.row, **fields)
        return player.say("done").metrics["drawn"]

    assert len({drawn(), drawn(key="a"), drawn(key="b")}) == 3
    messages = ({"role": "user", "content": "hello"},)
    dated = {drawn(messages=messages, rendered=True, text=f"{day} hello") for day in ("Monday", "Tuesday")}
    assert len(dated) == 1
    assert drawn(messages=({"role": "user", "content": "bye"},)) not in dated


def test_correct_is_what_the_last_step_says_or_by_its_reward(tmp_path, player):
    assert not player.say("done").correct  # 0.75 is less than environment.correct_at
    assert Player(player.pool, tmp_path, correct=True).say("done").correct
    tenths = Player(player.pool, tmp_path, last=0.1)
    assert (
        tenths.say("0.7") == tenths.say("0.2") == "x" and tenths.say("done").correct
    )  # adds up to a little less than 1


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("fail", "OSError: no such disk"),
        ("exit", "SystemExit"),
        ("die", "its process ended"),
        ("odd", "a step is int"),
    ],
)
def test_an_environment_that_fails_costs_its_trajectory_and_no_other(player, said, why, caplog):
    player.say("hi")
    other = Player(player.pool, player.closed.parent)
    other.say("hi")
    score = player.say(said)
    assert score.excluded and score.failed and not score.correct and why in score.why
    assert score.metrics["ended/failed"] == 1 and score.metrics["turns"] == 2
    assert "an episode failed" in caplog.text and why in caplog.text
    assert other.say("ho") == "hello 2: ho"
    player.again()
    assert player.say("hi") == "hello 1: hi"


def test_episodes_that_all_fail_end_the_run_with_the_first_reason(tmp_path):
    """Two are a batch here; once one has ended otherwise it takes ten batches."""
    with closing(pool_of(config_of(tmp_path, "Echoes", prompts_per_step=1, group_size=2))) as pool:
        player = Player(pool, tmp_path)

        def play(said: str, **how: str) -> Score | str:
            player.again()
            return player.say(said, **how)

        assert play("fail").failed
        assert play("cut", finish="length").metrics["ended/turn_cut"] == 1  # no environment was asked
        line = ":Echoes: the last 2 episodes all failed, the first of them: OSError: no such disk"
        with pytest.raises(ScorerError, match=f"^config.environment.name=.*{line}"):
            play("odd")
        for _ in range(2):
            assert not play("done").failed
            assert all(play("fail").failed for _ in range(19))
        with pytest.raises(ScorerError, match="the last 20 episodes all failed"):
            play("fail")


def test_a_step_that_hangs_is_ended(tmp_path):
    """And the episode closed, unless it hangs in compiled code."""
    config = config_of(tmp_path, "Echoes")
    config.environment.turn_seconds = 0.5
    with closing(pool_of(config)) as pool:
        player = Player(pool, tmp_path)
        score = player.say("hang")
        assert score.excluded and "a step took 0.5 s (turn_seconds)" in score.why
        player.again()
        gc.collect()
        eventually(lambda: player.closes() == 1)
        score = player.say("compiled")
        assert score.excluded and "a step took 0.5 s (turn_seconds)" in score.why and player.closes() == 1


def test_an_episode_ends_when_its_time_is_over(tmp_path):
    """The turn with which it is over still counts: it may have been the last."""
    config = config_of(tmp_path, "Echoes")
    config.environment.episode_seconds = 1e-6
    with closing(pool_of(config)) as pool:
        player = Player(pool, tmp_path)
        score = player.say("go on")
        assert score.metrics["ended/deadline"] == 1.0 and not score.excluded and "episode_seconds" in score.why
        assert player.trajectory.completion.finish_reason == "length"


def test_an_episode_takes_no_time_while_its_clock_stands_still(tmp_path):
    """But that of an evaluation does."""
    config = config_of(tmp_path, "Echoes")
    config.environment.episode_seconds = 1e-6
    with closing(pool_of(config)) as pool:
        pool.clock.stand(True)
        player = Player(pool, tmp_path)
        assert player.say("go on") == "hello 1: go on"
        score = pool.step(player.row, Trajectory(turn_of("go on"), "a:1"), evaluation=True).result()
        assert score.metrics["ended/deadline"] == 1.0
        pool.clock.stand(False)
        assert player.say("go on").metrics["ended/deadline"] == 1.0


def test_an_episode_whose_threads_spin_is_ended(tmp_path):
    """CPU time is limited too. About 1 CPU second."""
    config = config_of(tmp_path, "Echoes")
    config.environment.episode_seconds = 1.0
    with closing(pool_of(config)) as pool:
        score = Player(pool, tmp_path).say("spin")
        assert score.excluded and "its CPU time was up" in score.why


def test_a_long_error_is_cut(player, caplog):
    score = player.say("long")
    assert score.excluded and len(score.why) <= LONGEST_WHY and len(caplog.text) < 2 * LONGEST_WHY


def test_a_process_that_is_killed_before_it_is_ready_is_started_again(tmp_path):
    with closing(pool_of(config_of(tmp_path, "Killed"))) as pool:
        assert Player(pool, tmp_path).say("hi") == "hello 1: hi"
    with pytest.raises(ScorerError, match="ended: exit code 5"):
        pool_of(config_of(tmp_path, "Leaves"))


def test_one_that_cannot_begin_is_excluded(tmp_path):
    with closing(pool_of(config_of(tmp_path, "not_begun"))) as pool:
        score = Player(pool, tmp_path).say("hi")
        assert score.excluded and "no more of these" in score.why


def test_turns_and_tokens_end(tmp_path):
    with closing(pool_of(config_of(tmp_path, "Echoes", max_turns=2))) as pool:
        player = Player(pool, tmp_path)
        player.say("hi")
        score = player.say("ho")
        assert not score.excluded and score.metrics["ended/max_turns"] == 1 and "not done after 2 turns" in score.why
        assert player.trajectory.completion.finish_reason == "length"
        eventually(lambda: player.closes() == 1)
    # "hi" and its reply have 13 tokens; another turn may have 20.
    with closing(pool_of(config_of(tmp_path, "Echoes", max_episode_tokens=33))) as pool:
        player = Player(pool, tmp_path)
        assert player.say("hi") == "hello 1: hi"
        assert "no room for another turn" in player.say("ho").why
        player.again()
        assert player.say("hi", finish="length").why == "a turn is cut by its budget"


def test_an_episode_that_is_given_up_is_closed(player):
    player.say("hi")
    assert player.closes() == 0
    player.again()
    gc.collect()
    eventually(lambda: player.closes() == 1)


def test_a_worker_that_died_is_replaced(player):
    player.say("hi")
    player.pool._worker.process.kill()
    player.pool._worker.process.wait()
    assert player.say("ho").excluded
    player.again()
    assert player.say("hi") == "hello 1: hi"


def test_all_episodes_end_with_the_pool(tmp_path):
    pool = pool_of(config_of(tmp_path, "Echoes"))
    players = [Player(pool, tmp_path) for _ in range(20)]
    for player in players:
        player.say("hi")
    worker = pool._worker.process.pid
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_thinking_is_apart(tmp_path):
    with closing(pool_of(config_of(tmp_path, "Echoes", thinking_budget_max=100))) as pool:
        assert Player(pool, tmp_path).say("<think>so</think>think") == "you thought 'so' in 22 tokens"


def test_a_history_as_the_template_writes_it(tmp_path):
    """What the template leaves out of the turns so far begins a new branch, behind the whole conversation."""
    config = config_of(tmp_path, "Echoes", thinking_budget_max=100)
    config.environment.history = "template"
    config.environment.system_prompt = "Be brief."
    tokenizer = chat_folder(tmp_path / "model", "qwen3")
    config.model.path = str(tmp_path / "model")
    asked = Row("hello", chat=True, extra={"closed": str(tmp_path / "closed")})
    row = Prompts(config, tokenizer).render(asked)
    user, assistant = "<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n{}"
    begin = "<|im_start|>system\nBe brief.<|im_end|>\n" + user.format("hello") + assistant.format("")
    assert row.text == begin
    thought = "<think>\nHm.\n</think>\n\n"
    with closing(chat_pool(config, make_environment(config), tokenizer)) as pool:
        trajectory = Trajectory(chat_turn(tokenizer, f"{thought}tool"), "a:1")

        def reply(turn: str = "") -> Reply:
            if turn:
                trajectory.add_turn(chat_turn(tokenizer, turn), "a:1")
            found = pool.step(row, trajectory).result()
            assert isinstance(found, Reply), found
            trajectory.add_reply(found)
            return found

        answered = user.format("\n<tool_response>\n4\n</tool_response>").replace("user\n\n", "user\n")
        tool = reply()  # behind a tool's result the template keeps thinking
        assert (tokenizer.decode(tool.token_ids), tool.new_branch) == (f"\n{answered}{assistant.format('')}", False)
        asked_again = reply(f"{thought}so")
        whole = f"{begin}tool<|im_end|>\n{answered}{assistant.format('so<|im_end|>')}\n"
        whole += user.format(f"{row.text} 2: so") + assistant.format("")
        assert (tokenizer.decode(asked_again.token_ids), asked_again.new_branch) == (whole, True)
        trajectory.add_turn(chat_turn(tokenizer, "</think>done"), "b:1")
        score = pool.step(row, trajectory).result()
        assert isinstance(score, Score) and score.turns == (0.0, 0.25, 0.75)
        assert (score.metrics["turns"], score.metrics["branches"]) == (3, 2)
        first, second = trajectory.completion.branches
        assert first.prompt is None and np.array_equal(second.prompt, asked_again.token_ids)
        sampled = [tokenizer.decode(branch.token_ids[branch.sampled()]) for branch in (first, second)]
        assert sampled == [f"{thought}tool<|im_end|>{thought}so<|im_end|>", "</think>done<|im_end|>"]
        assert [[part.process for part in parts] for parts in trajectory.branch_parts] == [["a:1"] * 3, ["b:1"]]
        # The prompt of a new branch is bounded as the path is.
        config.rollout.max_episode_tokens = 2 + len(asked_again.token_ids) - len(row.token_ids)
        cut = pool.step(row, Trajectory(chat_turn(tokenizer, f"{thought}so"), "a:1")).result()
        assert isinstance(cut, Score) and cut.metrics["ended/max_tokens"] == 1
    config.rollout.thinking_budget_max, config.rollout.max_episode_tokens = 0, 1000
    with closing(chat_pool(config, make_environment(config), tokenizer)) as pool:  # turns that the template keeps
        plain = pool.step(row, Trajectory(chat_turn(tokenizer, "plain"), "a:1")).result()
        said = "\n" + user.format(f"{row.text} 1: plain") + assistant.format("")
        assert isinstance(plain, Reply) and (tokenizer.decode(plain.token_ids), plain.new_branch) == (said, False)


@pytest.mark.parametrize(
    ("step", "line"),
    [
        ({"done": False}, "no messages"),
        ({"says": "x"}, "a step has no field 'says'"),
        ({"messages": [3]}, "a message of a step is 3"),
        ({"messages": [{"role": "user"}]}, "a message of a step is"),
        ({"messages": ["x"], "reward": float("nan")}, "not a finite number"),
        ({"messages": ["x" * (LONGEST_REPLY + 1)]}, "100001 characters"),
        ({"messages": ["x", "\ud83d"]}, "half of a surrogate pair"),
        ({"done": True, "metrics": {"m": float("inf")}}, "not a finite number"),
    ],
)
def test_a_step_that_cannot_be_is_refused(step, line):
    with pytest.raises(ValueError, match=line):
        as_step(step)


def test_the_forms_of_a_step():
    said = Step(({"role": "user", "content": "x"},))
    assert as_step("x") == as_step({"messages": ["x"]}) == as_step({"messages": "x"}) == as_step(said) == said
    assert as_step({"done": 1, "reward": 2, "correct": 0}) == Step((), True, 2.0, False)


def test_mistakes_are_one_line(tmp_path):
    with pytest.raises(ScorerError, match="no such file"):
        pool_of(config_of(tmp_path, "NotMade"))
    with pytest.raises(ValueError, match="has score and episode"):
        make_environment(config_of(tmp_path, "Both"))
    rewarded = config_of(tmp_path, "Echoes")
    rewarded.environment.reward = "judge"
    with pytest.raises(ValueError, match=r"config\.environment\.reward: is not asked: .* has episodes"):
        make_environment(rewarded)
    alone = config_of(tmp_path, "Echoes", max_turns=1)
    with pytest.raises(ScorerError, match="which are not scored alone"):
        Scorer(alone, decode=str)
    single = Config()
    single.rollout.max_turns = 4
    with pytest.raises(ScorerError, match="no environment of the run has episodes"):
        Scorer(single, decode=str, replies=Letters())
    with pytest.raises(ScorerError, match=r"require config\.rollout\.max_turns of 2 or more"):
        Scorer(alone, decode=str, replies=Letters())


def test_experts_of_an_episode_are_those_that_tokens_were_sampled_with():
    def turn(tokens: int, fed: int, expert: int) -> Completion:
        ids, zeros = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32)
        experts = np.full((fed, 1, 1), expert, np.uint8)
        return Completion(1, "g", 0, ids, zeros, ((0, 0, tokens),), (), "stop", experts=experts)

    trajectory = Trajectory(turn(3, 4 + 3 - 1, 1), "a:1")  # a prompt of 4 tokens
    trajectory.add_reply(Reply(np.arange(2)))
    trajectory.add_turn(turn(4, 4 + 5 + 4 - 1, 2), "a:1")
    experts = trajectory.completion.experts
    assert experts[:, 0, 0].tolist() == [1] * 6 + [2] * 6 and len(experts) == 4 + 9 - 1
