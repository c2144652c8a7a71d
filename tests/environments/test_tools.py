"""Tools: what a turn may call, what it reads of that, and what the prompt says of them."""

import contextlib
import functools

import pytest

from scalerl_jax.config import Config
from scalerl_jax.config_check import leaf_fault
from scalerl_jax.environments import Completion as Turn
from scalerl_jax.environments import Row, Score
from scalerl_jax.environments.episode import LONGEST_REPLY, Trajectory, as_step
from scalerl_jax.environments.load import make_environment
from scalerl_jax.environments.prompts import Prompts
from scalerl_jax.environments.scorer import Scorer
from scalerl_jax.environments.tools import ToolEpisode, Tools
from tests.support.chat_folders import chat_folder
from tests.support.episodes import call, chat_pool, chat_turn, with_calls

pytest.importorskip("transformers")
CLASSES = """
import asyncio, time

def add(a: int, b: int = 2) -> int:
    \'\'\'Adds two numbers.

    Args:
        a: the first one
        b: the second one
    \'\'\'
    return a + b

class Adding:
    tools = [add]
    def rows(self, split):
        yield {"prompt": f"{split}: 2+3?", "answer": 5}
    def score(self, row, completion):
        return completion.strip().endswith(row.answer)

def sleeps() -> str:
    \'\'\'Sleeps.\'\'\'
    time.sleep(3600)

async def waits() -> str:
    \'\'\'Waits.\'\'\'
    await asyncio.sleep(3600)

def spins() -> str:
    \'\'\'Spins.\'\'\'
    while True: pass

async def floods() -> str:
    \'\'\'Floods.\'\'\'
    return "0123456789" * 5_000_000

class Hanging(Adding):
    tools = [sleeps, waits, spins, floods]

class Fussy(Adding):
    def score(self, row, completion):
        return 1.0 if not completion else {}[completion]

class Undescribed(Adding):
    tools = [lambda a: a]

class NoList(Adding):
    tools = add

class Both:
    tools = [add]
    def rows(self, split): return []
    def episode(self, row): return None
""".replace("\\'", "'")


async def later(text: str) -> str:
    """Twice a text.

    Args:
        text: which one
    """
    return text * 2


def broken() -> None:
    """Fails."""
    raise OSError("no such\ndisk")


def leaves() -> None:
    """Leaves."""
    raise SystemExit(3)


def table() -> dict:
    """A table."""
    return {"é": [1, None]}


def long() -> str:
    """A long text."""
    return "x" * 100


def halves() -> str:
    """A pair of surrogates, and half of one."""
    return "\ud83d\ude00\ud83d"


class Notes:
    """A toolset: what an episode has noted."""

    opened: list["Notes"] = []  # noqa: RUF012

    def __init__(self, row: Row | None = None):
        self.notes: list[str] = [row.text] if row else []

    def schemas(self):
        names = {"name": "note", "description": "Notes", "parameters": {"type": "object", "properties": {}}}
        return [{"type": "function", "function": names}]

    def open(self, row: Row) -> "Notes":
        self.opened.append(Notes(row))
        return self.opened[-1]

    def call(self, name: str, arguments) -> list[str]:
        self.notes.append(arguments["text"])
        return self.notes

    def close(self) -> None:
        self.notes = ["closed"]


def score(row: Row, turn: Turn) -> Score:
    return Score(0.5, turn == "right", {"length": len(turn)})


TOOLS = (later, broken, leaves, table, long, halves)


def episode() -> ToolEpisode:
    return ToolEpisode(Row("q"), Tools(TOOLS), score=score, characters=20)


def results(text: str) -> list[str]:
    step = episode().step(with_calls(text))
    assert not step.done and {message["role"] for message in step.messages} == {"tool"}
    return [message["content"] for message in step.messages]


def test_each_call_has_its_result_in_order():
    assert results(f"Let me see. {call('later', text='ab')} and {call('table')}") == ["abab", '{"é": [1, null]}']


def test_what_goes_wrong_is_for_the_policy_to_read():
    assert results(call("broken"))[0].startswith("error: OSError: no s")
    assert results(call("leaves"))[0].startswith("error: SystemExit")
    assert results(call("long")) == ["x" * 20 + "... (cut)"]
    for text in ("<tool_call>{'name': 'later'}</tool_call>", "<tool_call>", "<tool_call>[1]</tool_call>"):
        assert results(text)[0].startswith("error: ")
    patient = ToolEpisode(Row("q"), Tools([later]), score=score, characters=999)
    (message,) = patient.step(with_calls(call("off"))).messages
    assert "there is no tool 'off' (there is: later)" in message["content"]
    assert results(call("later", txt="a"))[0].startswith("error: TypeError")


def test_a_result_is_a_text_whatever_the_tool_gives():
    assert results(call("halves")) == ["\N{GRINNING FACE}\ufffd"]
    assert "\ud83d" not in results(call("later", text="\ud83d"))[0]


def test_the_results_of_a_turn_share_what_a_step_may_say():
    def said(characters: int, *calls: str) -> list[str]:
        playing = ToolEpisode(Row("q"), Tools([later, long]), score=score, characters=characters)
        return [message["content"] for message in as_step(playing.step(with_calls("".join(calls)))).messages]

    most = call("later", text="ab" * (LONGEST_REPLY // 2))
    assert not leaf_fault("environment.tool_characters", LONGEST_REPLY)
    assert leaf_fault("environment.tool_characters", LONGEST_REPLY + 1)
    assert [*map(len, said(LONGEST_REPLY, most))] == [LONGEST_REPLY]
    first, second, third, last = said(60_000, call("long"), most, most, call("long"))
    assert first == "x" * 100 and len(second) == 60_009 and third.endswith("ab... (cut)") and last == "... (cut)"
    assert LONGEST_REPLY - 9 <= len(first + second + third + last) <= LONGEST_REPLY
    assert len(said(9, call("long") * 12_000)) == 12_000


def test_a_turn_without_a_call_is_scored():
    playing = episode()
    playing.step(with_calls(call("later", text="a") + call("broken")))
    step = playing.step(with_calls("right"))
    assert (step.done, step.reward, step.correct) == (True, 0.5, True)
    names = {f"tool_errors/{tool.__name__}": int(tool is broken) for tool in TOOLS}
    assert step.metrics == {"length": 5, "tool_calls": 2, "tool_errors": 1, **names}


def test_a_score_reads_the_turns_before_the_answer():
    seen = []

    def judge(row: Row, turn: Turn) -> Score:
        seen.extend(turn.messages)
        return Score(0.0, False)

    playing = ToolEpisode(Row("q"), Tools([later]), score=judge, characters=20)
    turn = with_calls(f"Twice. {call('later', text='ab')}")
    playing.step(turn)
    playing.step(with_calls("abab"))
    asked, answered = seen
    assert asked["role"] == "assistant" and asked["content"] == turn
    assert [(one.name, one.arguments) for one in asked["tool_calls"]] == [("later", {"text": "ab"})]
    assert answered == {"role": "tool", "content": "abab"} and Turn("an answer alone").messages == ()


def test_a_toolset_is_opened_for_the_episode_that_calls_it():
    Notes.opened.clear()
    first, second = (ToolEpisode(Row("q"), Tools([later, Notes()]), score=score, characters=99) for _ in range(2))
    first.step(with_calls(call("later", text="a")))
    assert not Notes.opened
    assert first.step(with_calls(call("note", text="a"))).messages[0]["content"] == '["q", "a"]'
    assert second.step(with_calls(call("note", text="b"))).messages[0]["content"] == '["q", "b"]'
    assert first.step(with_calls(call("note", text="c"))).messages[0]["content"] == '["q", "a", "c"]'
    first.close()
    assert [notes.notes for notes in Notes.opened] == [["closed"], ["q", "b"]]
    assert second.step(with_calls(call("note"))).messages[0]["content"].startswith("error: KeyError")
    assert second.step(with_calls("right")).metrics["tool_errors/note"] == 1


def config_of(path, name: str) -> Config:
    (path / "adding.py").write_text(CLASSES)
    config = Config()
    config.environment.name = f"{path}/adding.py:{name}"
    config.rollout.max_turns, config.rollout.thinking_budget_max = 4, 0
    config.rollout.thinking_budget_min = 0
    return config


@pytest.mark.parametrize(
    ("style", "form", "called"),
    [
        ("qwen2_5", "hermes", call("add", a=3)),
        pytest.param("llama3", "json", '{"name": "add", "parameters": {"a": 3}}', marks=pytest.mark.slow),
    ],
)
def test_a_whole_episode_of_a_chat_model(tmp_path, style, form, called):
    """The prompt names the tool, a turn calls it in the model's form, the result is rendered, the answer is scored."""
    config, tokenizer = config_of(tmp_path, "Adding"), chat_folder(tmp_path / "model", style)
    environment, prompts = make_environment(config), Prompts(config, tokenizer)
    (row,) = prompts.render_all(environment.rows("train"))
    assert row.rendered and '"name": "add"' in row.text and "Adds two numbers." in row.text
    assert [line for line in prompts.notes if line.startswith(f"calls of tools are read in the form {form}, as ")]
    turn = functools.partial(chat_turn, tokenizer)
    with contextlib.closing(chat_pool(config, environment, tokenizer)) as pool:
        trajectory = Trajectory(turn(called), "a:1")
        reply = pool.step(row, trajectory).result()
        text = tokenizer.decode(reply.token_ids)
        assert "5" in text and text.endswith(row.text[-20:])
        trajectory.add_reply(reply)
        trajectory.add_turn(turn("It is 5"), "a:1")
        found = pool.step(row, trajectory).result()
        assert found.correct and found.metrics["tool_calls"] == 1 and found.metrics["turns"] == 2
        # The calls of an episode that is cut count, too.
        trajectory = Trajectory(turn(called), "a:1")
        trajectory.add_reply(pool.step(row, trajectory).result())
        trajectory.add_turn(turn("It is", "length"), "a:1")
        found = pool.step(row, trajectory).result()
        assert found.metrics["ended/turn_cut"] == 1 and found.metrics["tool_calls"] == 1


def test_a_tool_that_hangs_costs_its_episode_and_one_that_floods_is_cut(tmp_path):
    config, tokenizer = config_of(tmp_path, "Hanging"), chat_folder(tmp_path / "model", "qwen2_5")
    environment = make_environment(config)
    (row,) = Prompts(config, tokenizer).render_all(environment.rows("train"))
    config.rollout.max_episode_tokens, config.environment.tool_characters = 2000, 100
    with contextlib.closing(chat_pool(config, environment, tokenizer)) as pool:
        text = tokenizer.decode(pool.step(row, Trajectory(chat_turn(tokenizer, call("floods")), "a:1")).result()[0])
        assert "01234" in text and len(text) < len(row.text) + 200
    config.environment.turn_seconds = 0.5
    with contextlib.closing(chat_pool(config, environment, tokenizer)) as pool:
        turns = [Trajectory(chat_turn(tokenizer, call(name)), "a:1") for name in ("sleeps", "waits", "spins")]
        for found in [pool.step(row, turn) for turn in turns]:
            score = found.result()
            assert score.excluded and score.failed and score.metrics["ended/failed"] == 1, score
            assert "turn_seconds" in score.why


def test_an_answer_that_is_empty_or_whose_score_fails_is_wrong(tmp_path, caplog):
    config, tokenizer = config_of(tmp_path, "Fussy"), chat_folder(tmp_path / "model", "qwen2_5")
    environment = make_environment(config)
    (row,) = Prompts(config, tokenizer).render_all(environment.rows("train"))
    with contextlib.closing(chat_pool(config, environment, tokenizer)) as pool:
        for answer, failed in (("", False), ("It is 5", True)):
            trajectory = Trajectory(chat_turn(tokenizer, call("add", a=3)), "a:1")
            trajectory.add_reply(pool.step(row, trajectory).result())
            trajectory.add_turn(chat_turn(tokenizer, answer), "a:1")
            score = pool.step(row, trajectory).result()
            assert (score.reward, score.correct, score.excluded, score.failed) == (-1.0, False, False, failed)
            assert score.metrics["ended/done"] == 1 and score.turns == (0.0, -1.0)
        assert score.metrics["tool_calls"] == 1 and score.metrics["rewards/environment/errors"] == 1
    line = f"{tmp_path}/adding.py:Fussy: failed: KeyError: 'It is 5' (adding.py line"
    assert line in score.why and line in caplog.text and "counts as wrong (logged once)" in caplog.text


def test_an_answer_is_scored_without_its_episode(tmp_path):
    with Scorer(config_of(tmp_path, "Adding"), decode=str) as scorer:
        (row,) = make_environment(config_of(tmp_path, "Adding")).rows("train")
        assert scorer.score_answer(row, "It is 5", thinking="", tokens=4).result().correct


def test_mistakes_are_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"tool <lambda>: .*docstring"):
        list(make_environment(config_of(tmp_path, "Undescribed")).rows("train"))
    with pytest.raises(ValueError, match="not a list of functions"):
        make_environment(config_of(tmp_path, "NoList"))
    with pytest.raises(ValueError, match="has tools and episode"):
        make_environment(config_of(tmp_path, "Both"))
    with pytest.raises(ValueError, match="tool note: there are two of this name"):
        Tools([Notes(), later, Notes()]).schemas()
    config, tokenizer = config_of(tmp_path, "Adding"), chat_folder(tmp_path / "model", "deepseek_r1")
    with pytest.raises(ValueError, match="the chat template does not know tools"):
        list(Prompts(config, tokenizer).render_all(make_environment(config).rows("train")))
