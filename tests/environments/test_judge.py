"""A model as judge, against a server on this machine that speaks the API over real sockets."""

import contextlib
import http.server
import json
import random
import sqlite3
import threading

import pytest

from scalerl_jax.config import Config
from scalerl_jax.environments import Completion, Row, judge
from scalerl_jax.environments.base import ScoreFailed, ScorerError
from scalerl_jax.environments.judge import Judge, judged
from scalerl_jax.environments.load import make_environment
from scalerl_jax.environments.scorer import Scorer
from scalerl_jax.environments.scorer_pool import ScorerPool

LATE = "after everything else"
DRIPS = "newlines for 5 s, then a wrong verdict"


class Endpoint:
    """Replies to each call with the next of `replies`, the last one for ever: a text, a status, LATE or DRIPS."""

    def __init__(self, *replies):
        self.replies, self.asked, self.headers = list(replies), [], []
        self.over = threading.Event()
        endpoint = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                self.say(404, b"{}")

            def do_POST(self):
                endpoint.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                endpoint.headers.append(self.headers)
                reply = endpoint.replies.pop(0) if len(endpoint.replies) > 1 else endpoint.replies[0]
                if reply == LATE:
                    endpoint.over.wait()
                    reply = "yes"
                before = b""
                if reply == DRIPS:
                    before, reply = b"\n" * 100, "no"
                if isinstance(reply, int):
                    self.say(reply, json.dumps({"error": {"message": f"no {reply}"}}).encode())
                elif isinstance(reply, bytes):
                    self.say(200, reply)
                else:
                    message = {"role": "assistant", "content": reply}
                    body = json.dumps({"id": "1", "choices": [{"index": 0, "message": message}]}).encode()
                    self.say(200, body, before)

            def say(self, status, body, before=b""):
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(before + body)))
                    self.end_headers()
                    for byte in before:
                        self.wfile.write(bytes([byte]))
                        endpoint.over.wait(0.05)
                    self.wfile.write(body)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def config(self, **fields):
        made = Config()
        made.environment.reward = "judge"
        made.environment.judge.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        made.environment.judge.model = "wise"
        for field, value in fields.items():
            setattr(made.environment.judge, field, value)
        return made

    def judge(self, **fields):
        made = Judge(self.config(**fields))
        made.prepare()
        return made


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setattr(judge, "_PAUSES", (0.01,))
    made = []

    def of(*replies):
        made.append(Endpoint(*replies))
        return made[-1]

    yield of
    for each in made:
        each.over.set()
        each.server.shutdown()
        each.server.server_close()


ROW = Row("<|user|>2+2?", "4", messages=({"role": "user", "content": "2+2?"},), extra={"level": 3})
SAID = Completion("four")


@pytest.mark.parametrize(
    ("reply", "reward", "correct"),
    [
        ("CORRECT", 1, True),
        ("INCORRECT.", -1, False),
        ("yes", 1, True),
        ("'No'", -1, False),
        ("<think>no, incorrect</think> yes", 1, True),
        ("The answer 5 is wrong.\nVerdict: correct", 1, True),
        ("Correct.\nThank you!", 1, True),  # the last line says nothing
        ("Incorrect.\n\nThe right answer is 42.", -1, False),
        ("CORRECT.\nNo issues.", 1, True),
        ("Score: 0.5", 0.5, False),
        ("**Final verdict:** INCORRECT", -1, False),
        ("8/10", 0.8, False),
        ("10 out of 10.", 1, True),
        ("0", 0, False),
        (".5", 0.5, False),
        ("1.0", 1, True),
        ("**Yes**", 1, True),
        ("[[1]]", 1, True),
        ("### True\n", 1, True),
    ],
)
def test_what_a_reply_is_worth(reply, reward, correct):
    score = judged(reply, correct_at=1.0)
    assert (score.reward, score.correct) == (reward, correct)


@pytest.mark.parametrize(
    "reply",
    [
        "", "Perhaps.", "yes</think>", "<think>\nyes", "50%", "1/0", "0/0", "corrected", "GPT4",
        "INCORRECT. The right answer is 42.", "No, this is not the right answer.", "CORRECT. No issues.",
        "Yes, it is.", "not correct", "It is not wrong", "CORRECT or INCORRECT", "yes/no", "It is 1",
        "42", "8", "[[7]]", "-2", "-1", "1.5", "11/10", "1e-3", f"1/{'9' * 400}", "nan", "\u0661",
        "Final answer: 1", "The answer is: yes", "Not: correct",
    ],
)  # fmt: skip
def test_a_reply_that_says_nothing(reply):
    assert judged(reply, correct_at=1.0) is None


def test_no_reply_is_worth_more_than_1_or_less_than_minus_1():
    random_source = random.Random(7)
    pieces = [
        "yes", "no", "CORRECT", "INCORRECT", "0.3", "42", "-7", "9/10", "10/9", "/", ":", "Score", "not", ".", "\n",
    ]  # fmt: skip
    counted = 0
    for _ in range(20_000):
        score = judged(" ".join(random_source.choices(pieces, k=random_source.randint(1, 4))), correct_at=1.0)
        if score is not None:
            counted += 1
            assert -1 <= score.reward <= 1 and score.correct == (score.reward == 1)
    assert counted > 1000


def test_a_kept_reply_that_is_no_verdict_is_asked_for_again(endpoint, tmp_path):
    server = endpoint("yes", "no")
    file = str(tmp_path / "replies.sqlite")
    assert server.judge(cache=file).score(ROW, SAID).correct
    with sqlite3.connect(file) as kept:
        kept.execute("UPDATE replies SET reply = 'CORRECT. No issues.'")
    assert not server.judge(cache=file).score(ROW, SAID).correct and len(server.asked) == 2


def test_the_question_is_the_template_filled_in(endpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    template = tmp_path / "template.txt"
    template.write_text('{prompt}|{completion}|{answer}|{level}|{"score": 1}|{}')
    server = endpoint("yes")
    assert server.judge(template=str(template), key_variable="MY_KEY").score(ROW, SAID).correct
    (asked,) = server.asked
    assert asked["messages"] == [{"role": "user", "content": '2+2?|four|4|3|{"score": 1}|{}'}]
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("wise", 0, 1024)
    assert server.headers[0]["Authorization"] == "Bearer secret"
    plain = endpoint("no")
    score = plain.judge(key_variable="NO_SUCH_VARIABLE").score(ROW, SAID)
    assert (score.reward, score.correct) == (-1, False) and "four" in plain.asked[0]["messages"][0]["content"]
    assert "Authorization" not in plain.headers[0]


@pytest.mark.parametrize("first", [500, 503, 429, 408, b"no JSON", b"{}"])
def test_a_call_that_fails_is_repeated(endpoint, first):
    server = endpoint(first, "yes")
    assert server.judge(retries=2).score(ROW, SAID).correct
    assert len(server.asked) == 2


@pytest.mark.parametrize("first", [LATE, DRIPS])
def test_a_call_that_takes_too_long_is_repeated(endpoint, first):
    """And so is the next one, where the machine takes that long for it."""
    server = endpoint(first, "yes")
    assert server.judge(seconds=1.0, retries=100).score(ROW, SAID).correct
    assert len(server.asked) >= 2


def test_a_judge_that_stays_away_ends_the_run(endpoint):
    server = endpoint(500)
    asks = server.judge(retries=2)
    with pytest.raises(
        ScorerError, match=r"judge\.url=http://.*: no reply in 3 calls, the last one said: 500: "
    ) as caught:
        asks.score(ROW, SAID)
    assert len(server.asked) == 3 and "\n" not in str(caught.value)
    server.server.shutdown()
    server.server.server_close()
    with pytest.raises(ScorerError, match="no reply in 3 calls"):
        asks.score(ROW, Completion("five"))
    with pytest.raises(ScorerError, match="no reply in 3 calls"):
        server.judge(retries=2)  # and is missed at the start


@pytest.mark.parametrize(("status", "line"), [(401, r"key_variable=OPENAI_API_KEY$"), (400, "400: "), (404, "404: ")])
def test_what_will_not_change_is_not_repeated(endpoint, status, line):
    server = endpoint(status)
    asks = server.judge()
    with pytest.raises(ScorerError, match=line):
        asks.score(ROW, SAID)
    assert len(server.asked) == 1


def test_a_reply_that_says_nothing_costs_that_completion_and_is_not_kept(endpoint):
    server = endpoint("Perhaps.", "yes")
    asks = server.judge()
    with pytest.raises(ScoreFailed, match=r"the reply 'Perhaps\.' is no verdict"):
        asks.score(ROW, SAID)
    assert asks.score(ROW, SAID).correct


def test_replies_are_kept_in_memory_and_in_a_file_that_is_shared(endpoint, tmp_path):
    server = endpoint("yes")
    file = str(tmp_path / "replies.sqlite")
    one, other = server.judge(cache=file), server.judge(cache=file)
    assert one.score(ROW, SAID).correct and one.score(ROW, SAID).correct and other.score(ROW, SAID).correct
    assert len(server.asked) == 1
    assert other.score(ROW, Completion("five")).correct and len(server.asked) == 2
    with sqlite3.connect(file) as found:
        assert found.execute("SELECT count(*) FROM replies").fetchone() == (2,)
    server.judge().score(ROW, SAID)
    assert len(server.asked) == 3


def test_what_is_missing_is_one_line(endpoint, tmp_path):
    server = endpoint("yes")
    (tmp_path / "text.sqlite").write_text("no database " * 100)
    (tmp_path / "template.txt").write_text("{prompt}")
    (tmp_path / "columns.txt").write_text("{completion} {difficulty}")
    for fields, expected in (
        ({"url": ""}, r"judge\.url: is empty"),
        ({"model": ""}, r"judge\.model: is empty"),
        ({"template": str(tmp_path / "nowhere")}, r"judge\.template=.*nowhere: No such file"),
        ({"template": str(tmp_path / "template.txt")}, r"\{completion\} does not stand in it"),
        ({"cache": str(tmp_path / "text.sqlite")}, r"judge\.cache=.*text\.sqlite: file is not a database"),
        ({"cache": str(tmp_path / "no" / "where")}, r"judge\.cache=.*where: unable to open"),
    ):
        with pytest.raises(ValueError, match=expected):
            server.judge(**fields)
    with pytest.raises(ScorerError, match=r"\{difficulty\} is no column; the row has level, prompt"):
        server.judge(template=str(tmp_path / "columns.txt")).score(ROW, SAID)


def test_a_row_without_an_answer_is_not_asked_about_its_answer(endpoint, tmp_path):
    """With the rows of a run at its start, and in a mixture by the names that the user gave."""
    server, row = endpoint("yes"), Row("2+2?", name="FILE row 3", environment="sums")
    line = r"^FILE row 3 has no answer, and config\.environment\.judge\.template, the default one, asks with \{answer\}"
    with pytest.raises(ScorerError, match=line):
        server.judge().score(row, SAID)
    config = server.config()
    config.mixture = {"sums": config.environment}
    with pytest.raises(ScorerError, match=line.replace("environment", "mixture.sums")):
        Scorer(config, decode=str, rows=[row])
    assert not server.asked
    template = tmp_path / "template.txt"
    template.write_text("{prompt} {completion}")
    assert server.judge(template=str(template)).score(row, SAID).correct


def test_in_the_processes_that_score(endpoint):
    server = endpoint("yes", "no")
    config = server.config(retries=0)
    config.environment.rewards, config.environment.reward = {"judge": 0.5, "environment": 1.0}, ""
    with contextlib.closing(ScorerPool(config, {"": make_environment(config)})) as pool:
        score = pool.submit(ROW, Completion("4")).result(600)
        assert (score.reward, score.correct) == (1.5, True) and score.metrics["rewards/judge"] == 1.0
        assert pool.submit(ROW, Completion("5")).result(600).reward == -1.5
