"""Environments that are a class in a user's file."""

import itertools
from contextlib import closing

import pytest

from scalerl_jax.config import Config
from scalerl_jax.environments import Completion, Row, Score
from scalerl_jax.environments.base import ScorerError
from scalerl_jax.environments.load import make_environment
from scalerl_jax.environments.prompts import Prompts
from scalerl_jax.environments.scorer_pool import ScorerPool
from scalerl_jax.environments.tokenizer import Tokenizer
from tests.support.chat_folders import chat_folder
from tests.support.waiting import eventually

CLASSES = """
from scalerl_jax.environments import Row

class Riddles:
    weights = {"old": 2.0}
    waits_seconds = 3

    def __init__(self, config):
        self.most = config.train_prompts

    def prepare(self):
        self.ready = True

    def rows(self, split):
        old = {"source": "old"}
        yield old | {"prompt": f"{split}: what has keys?", "answer": "a piano", "task": "objects", "level": 3}
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
        yield old | {"prompt": chat, "answer": 4}
        yield Row("a row", "x", source="old")

    async def score(self, row, completion):
        assert self.ready
        return {"reward": row.extra.get("level", 0) * (completion == row.answer), "why": completion.thinking}

class Plain:
    def rows(self, split):
        return []
    def score(self, row, completion):
        return completion == "yes"

def made():
    return Plain()

class NoScore:
    def rows(self, split): return []

class Fails:
    def __init__(self): raise OSError("no such disk")

class Inside(Plain):
    in_processes = False

class Unready(Plain):
    def prepare(self): raise RuntimeError("out of order")

class UnreadyHere(Plain):
    def prepare(self): raise SystemExit("out of order")

class BadRows(Plain):
    rows_are = [{"prompt": "fine?"}, {"question": "?"}]
    def rows(self, split): return self.rows_are

class Unprompted(BadRows):
    rows_are = [{"prompt": [{"content": 1}]}]

class Listed(BadRows):
    rows_are = [["prompt"]]

class Untexted(BadRows):
    rows_are = [Row(None)]

class Unlisted(BadRows):
    rows_are = [Row("?", messages="?")]

class Numbered(BadRows):
    rows_are = [Row("?", 4)]

class Blank(BadRows):
    rows_are = [Row(" ")]

class Unsourced(BadRows):
    weights = {"a": 1, "b": 2}
    rows_are = [{"prompt": "1?", "source": "a"}, {"prompt": "2?"}]

class Absent(BadRows):
    rows_are = None

class Parses(Plain):
    def rows(self, split):
        yield {"prompt": int("four")}

class Leaves(Plain):
    def rows(self, split):
        raise SystemExit(3)

class Weightless(Plain):
    weights = {"a": 0.0}

class Worded(Plain):
    weights = {"a": "3"}

class Endless(Plain):
    weights = {"a": float("inf")}

class Runs(Plain):
    def run(self, row, client): return 1.0

class Agent:
    def rows(self, split): return [{"prompt": [{"role": "user", "content": "four?"}], "answer": 4}, Row("five?", "5")]
    async def run(self, row, client): return {"reward": 0.5, "correct": True}

class Slow(Plain):
    waits_seconds = float("nan")

class Crashes(Plain):
    def rows(self, split):
        return [{}["x"]]

NUMBER = 3
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "mine.py").write_text(CLASSES)

    def of(name):
        made = Config()
        made.environment.name = f"{tmp_path}/mine.py:{name}"
        return made

    return of


def test_rows_are_dicts_or_rows(config):
    environment = make_environment(config("Riddles"))
    piano, sum_, row = environment.rows("train")
    assert (piano.text, piano.answer, piano.task) == ("train: what has keys?", "a piano", "objects")
    assert piano.extra == {"level": 3, "source": "old"} and piano.name.endswith("mine.py:Riddles train row 1")
    assert sum_.text == "Be brief.\n\n2+2?" and sum_.answer == "4"
    assert [message["role"] for message in sum_.messages] == ["system", "user"]
    assert (row.text, row.answer) == ("a row", "x")
    assert {each.source for each in (piano, sum_, row)} == {"old"}
    assert environment.weights == {"old": 2.0} and environment.waits_seconds == 3 and environment.reads_thinking


def test_it_scores_in_processes_of_its_own(config):
    of = config("Riddles")
    environment = make_environment(of)
    row = next(iter(environment.rows("validation")))
    with closing(ScorerPool(of, {"": environment})) as pool:
        assert pool.submit(row, Completion("a piano", thinking="hm")).result(600) == Score(3.0, True, why="hm")
        assert pool.submit(row, Completion("a piano", thinking="ha")).result(600).why == "ha"
        assert pool.submit(row, Completion("a map")).result(600) == Score(0.0, False)


@pytest.mark.parametrize("name", ["Plain", "made"])
def test_a_class_or_what_makes_one(config, name):
    environment = make_environment(config(name))
    assert environment.in_processes
    assert environment.score(Row("?"), Completion("yes")) == Score(1.0, True)


def test_an_agent_has_its_prompts_as_they_are_written(config, tmp_path):
    made = config("Agent")
    chat_folder(tmp_path / "model", "qwen3")
    made.environment.chat_template, made.environment.prompt_suffix = "always", "Think."
    environment = make_environment(made)
    rows = list(Prompts(made, Tokenizer(str(tmp_path / "model"))).render_all(environment.rows("train")))
    assert [(row.text, row.agent, row.rendered) for row in rows] == [("four?", True, False), ("five?", True, False)]
    assert rows[0].messages == ({"role": "user", "content": "four?"},)
    assert environment.run(rows[0], None) == Score(0.5, True) and not environment.scores_answers
    made.environment.reward = "judge"
    with pytest.raises(ValueError, match=r"is not asked: .* has an agent, which says what its run is worth"):
        make_environment(made)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Plane", r"mine\.py has no Plane \(it has: "),
        ("NUMBER", "is int, not a class$"),
        ("NoScore", "has no function score$"),
        ("Fails", r"cannot be made: OSError: no such disk \(mine\.py line \d+\)$"),
        ("Weightless", "weights: 'a' has 0.0, not a number above 0$"),
        ("Worded", "weights: 'a' has '3', not a number above 0$"),
        ("Endless", "weights: 'a' has inf, not a number above 0$"),
        ("Slow", "waits_seconds is nan$"),
        ("Runs", "has score and run; what a run is worth it says itself$"),
        ("Inside", "in_processes is False: .* scored in processes, where its limits of time hold; leave it out$"),
    ],
)
def test_what_is_no_environment(config, name, expected):
    with pytest.raises(ValueError, match=rf"^config\.environment\.name=.*mine\.py:{name}: .*{expected}") as caught:
        make_environment(config(name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("BadRows", r"train row 2: has no 'prompt' \(it has: question\)$"),
        ("Unprompted", "train row 1: 'prompt' is neither a text nor messages"),
        ("Listed", "train row 1: is list, not a Row or a dict$"),
        ("Untexted", "train row 1: text is None, not a text$"),
        ("Unlisted", r"train row 1: messages is '\?', not messages$"),
        ("Numbered", "train row 1: answer is 4, not a text$"),
        ("Blank", "train row 1: 'prompt' is empty$"),
        ("Unsourced", "train row 2: 'source' is '', and weights has a, b$"),
        ("Absent", r"rows\('train'\) is NoneType, not a list of rows$"),
        ("Parses", r"rows\('train'\): ValueError: invalid literal for int.*: 'four' \(mine\.py line \d+\)$"),
        ("Leaves", r"rows\('train'\): SystemExit: 3 \(mine\.py line \d+\)$"),
        ("Crashes", r"rows\('train'\): KeyError: 'x' \(mine\.py line \d+\)$"),
    ],
)
def test_what_is_no_row(config, name, expected):
    with pytest.raises(ValueError, match=expected):
        list(make_environment(config(name)).rows("train"))


def test_a_start_that_fails_is_one_line(config):
    of = config("Unready")
    with closing(ScorerPool(of, {"": make_environment(of)})) as pool:
        with pytest.raises(ScorerError, match=r"mine\.py:Unready: cannot be made: RuntimeError: out of order \("):
            pool.prepare()


def test_a_start_that_fails_where_the_run_is_is_one_line(config):
    prepare = make_environment(config("UnreadyHere")).prepare
    with pytest.raises(
        ValueError, match=r"mine\.py:UnreadyHere: cannot be made: SystemExit: out of order \(mine\.py line"
    ):
        prepare()


def test_making_it_has_time_of_its_own(tmp_path):
    """An environment may load more than a score may take."""
    (tmp_path / "slow.py").write_text(
        "import time\nclass Slow:\n    waits_seconds = 0.0\n    def prepare(self): time.sleep(2.5)\n"
        "    def rows(self, split): return []\n    def score(self, row, completion): return True\n"
    )
    of = Config()
    of.environment.name = f"{tmp_path}/slow.py:Slow"
    rows = map(str, itertools.count())
    with closing(ScorerPool(of, {"": make_environment(of)}, stuck_seconds=1.5)) as pool:
        # Were it given 1.5 s as a score is, it would never be made; a score may take longer on a busy machine.
        assert eventually(lambda: pool.submit(Row(next(rows)), Completion("x")).result(600).correct)
