"""A judge model: config.environment.reward=judge lets any OpenAI-compatible endpoint score completions.

The question is made from config.environment.judge.template, a file in which {prompt}, {completion}, {answer} and any
column of the row in braces are replaced by their values (other braces stay), and sent as one user message at
temperature 0. Without a file it is TEMPLATE below. A reply must have one verdict, alone on its last line or else on its
first, after its own thinking:

    yes, correct, right, true              1, correct
    no, incorrect, wrong, false            -1, not correct
    0.8, 8/10, 8 out of 10                 a share from 0 to 1; correct if at least config.environment.correct_at

Case, bold marks, quotes, brackets, a period, and a label before it ("Verdict:", "Final score:") are ignored. Sentences
are not searched: "no, this is not the right answer" has words for both verdicts, and numbers in a reply are mostly
those of the problem. A number that would be a reward above 1 ("42", "8") is not a verdict. Any other reply makes that
completion wrong, and is logged once. A call that fails temporarily (no connection, no reply in time, 408, 409, 429,
5xx) is retried after up to 1, 4, 16, 60, 60, ... seconds, or the server's retry-after if that is longer (at most 60).
After the last retry, and at once for any other error, the run ends with one line: scoring everything as wrong would
train on nothing.

Replies are cached in memory, and in config.environment.judge.cache, a SQLite file shared by processes and runs. Up to
config.environment.verifier_processes calls are made concurrently.
"""

import asyncio
import collections
import contextlib
import functools
import hashlib
import math
import os
import random
import re
import sqlite3
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.environments.base import Completion, Row, Score, ScoreFailed, ScorerError, asked
from scalerl_jax.environments.user_functions import to_score

TEMPLATE = """Question:
{prompt}

Right answer:
{answer}

Somebody's answer:
{completion}

Does that answer say the same as the right one, whatever the wording? Reply with exactly one word and nothing else:
CORRECT or INCORRECT.
"""
KEPT, KEPT_ON_DISK = 16_384, 1_000_000  # number of cached replies
_PAUSES = (1.0, 4.0, 16.0, 60.0)  # seconds before the first retries; the last value applies to all further ones
_AGAIN = (408, 409, 429)
_BUSY_SECONDS = 60.0  # to wait while another process locks the file of replies
_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")
_MARKS = str.maketrans("", "", "*_`")
_AROUND = " \t\"'“”‘’()[]{}#>"
_LABEL = re.compile(
    r"(?:(?:the|my|final|overall)\s+)*"
    r"(?:verdict|score|grade|rating|judge?ment|decision|result|evaluation|conclusion|reward|correctness)\s*[:=]",
    re.IGNORECASE,
)  # not "answer": the text after it is an answer to the problem
_NUMBER = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_SHARE = re.compile(rf"(?P<number>{_NUMBER})(?:\s*(?:/|out of)\s*(?P<of>{_NUMBER}))?", re.IGNORECASE)
_WORDS = dict.fromkeys(("yes", "correct", "right", "true"), True) | dict.fromkeys(
    ("no", "incorrect", "wrong", "false"), False
)


class Judge:
    """The judge of a config; call `prepare` before the first `score`."""

    def __init__(self, config: Config):
        self._config = judge = config.environment.judge
        self._correct_at = config.environment.correct_at
        self._client: Any = None
        self._runner = asyncio.Runner()
        self._headers: dict[str, Any] = {}
        self._replies: collections.OrderedDict[bytes, str] = collections.OrderedDict()
        self._file: sqlite3.Connection | None = None
        self.waits_seconds = (judge.retries + 1) * judge.seconds + sum(map(_pause, range(judge.retries)))

    def prepare(self) -> None:
        """Raises ValueError, one line, if the judge cannot be used."""
        where = "config.environment.judge"
        for field in ("url", "model"):
            if not getattr(self._config, field):
                raise ValueError(f"{where}.{field}: is empty; a judge needs it")
        try:
            import openai
        except ImportError:
            raise ValueError(
                "config.environment.reward=judge: needs the package openai: pip install 'scalerl-jax[environments]'"
            ) from None
        if "completion" not in _PLACE.findall(self._template):
            raise ValueError(f"{where}.template={self._config.template}: {{completion}} does not stand in it")
        if self._config.cache:
            try:
                self._file = _open(self._config.cache)
            except (sqlite3.Error, OSError) as error:
                raise ValueError(f"{where}.cache={self._config.cache}: {error}") from error
        key = os.environ.get(self._config.key_variable, "") if self._config.key_variable else ""
        # httpx's own timeout is that of each read.
        self._client = openai.AsyncOpenAI(base_url=self._config.url, api_key=key or "none", max_retries=0, timeout=None)
        self._headers = {} if key else {"Authorization": openai.Omit()}
        self._repeated(self._list_models)

    @functools.cached_property
    def _template(self) -> str:
        """Raises ValueError, one line, if its file cannot be read."""
        file = self._config.template
        return _read(file, "config.environment.judge.template") if file else TEMPLATE

    def check(self, row: Row) -> None:
        """Raises ScorerError if the question has a place for the right answer, and the row has none; ValueError, one
        line, if the template cannot be read."""
        if not row.answer and "answer" in _PLACE.findall(self._template):
            which = f"={self._config.template}" if self._config.template else ", the default one,"
            raise ScorerError(
                f"{row.name or 'a row'} has no answer, and config.environment.judge.template{which} asks with "
                "{answer}: a template without it judges such rows"
            )

    def score(self, row: Row, completion: Completion) -> Score:
        """Raises ScorerError if the judge does not reply, and as `check`; ScoreFailed if its reply has no verdict."""
        self.check(row)
        given: dict[str, Any] = {
            **row.extra,
            "prompt": asked(row),
            "completion": completion,
            "thinking": completion.thinking,
            "answer": row.answer,
            "task": row.task,
        }
        reply = self._reply(
            _filled(self._template, given, f"config.environment.judge.template={self._config.template}")
        )
        score = judged(reply, correct_at=self._correct_at)
        if score is None:
            raise ScoreFailed(
                f"config.environment.judge: the reply {_short(reply)} is no verdict, as in CORRECT, no, 0.5 or "
                "8/10 alone on its last or first line; the completion counts as wrong",
                kind="judge reply",
                metrics={"rewards/judge/errors": 1.0},
            )
        return Score(score.reward, score.correct, {"rewards/judge/errors": 0.0}, why=f"the judge: {_short(reply)}")

    def _reply(self, question: str) -> str:
        """The judge's reply, cached if it has a verdict; a reply without one is requested again next time."""
        config = self._config
        asked = "\0".join((config.url, config.model, str(config.max_tokens), question))
        key = hashlib.blake2b(asked.encode(errors="replace"), digest_size=20).digest()
        reply = self._replies.get(key)
        if reply is None and self._file is not None:
            with _of_the_file(config.cache):
                found = self._file.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
            reply = found[0] if found else None
            if reply is not None and judged(reply, correct_at=self._correct_at) is None:
                reply = None  # cached by a version that accepted it as a verdict
        if reply is None:
            reply = self._repeated(lambda: self._asked(question))
            if judged(reply, correct_at=self._correct_at) is None:
                return reply
            if self._file is not None:
                with _of_the_file(config.cache), self._file:
                    self._file.execute("INSERT OR REPLACE INTO replies (key, reply) VALUES (?, ?)", (key, reply))
                    self._file.execute(
                        "DELETE FROM replies WHERE rowid <= (SELECT max(rowid) FROM replies) - ?", (KEPT_ON_DISK,)
                    )
        self._replies[key] = reply
        self._replies.move_to_end(key)
        if len(self._replies) > KEPT:
            self._replies.popitem(last=False)
        return reply

    async def _asked(self, question: str) -> str:
        reply = await self._client.chat.completions.create(
            model=self._config.model,
            messages=[{"role": "user", "content": question.encode(errors="replace").decode()}],
            max_tokens=self._config.max_tokens,
            temperature=0,
            extra_headers=self._headers,
        )
        choices = getattr(reply, "choices", None)
        if not choices:
            raise _Unreadable(f"the reply has no choices: {_short(str(reply))}")
        return str(choices[0].message.content or "")

    async def _list_models(self) -> str:
        """Checks that a server responds and accepts the key. Raises the exceptions of openai."""
        import openai

        try:
            await self._client.models.list(extra_headers=self._headers)
        except openai.APIStatusError as error:
            if error.status_code in (401, 403) or error.status_code in _AGAIN or error.status_code >= 500:
                raise
        except (openai.APIResponseValidationError, ValueError):
            pass  # not every server provides this list
        return ""

    def _repeated(self, call: Callable[[], Coroutine[Any, Any, str]]) -> str:
        """Calls with retries. Raises ScorerError, one line."""
        import openai

        where = f"config.environment.judge.url={self._config.url}"
        reason, delay = "", 0.0
        for attempt in range(self._config.retries + 1):
            if attempt:
                time.sleep(max(delay, _pause(attempt - 1) * random.uniform(0.5, 1.0)))
            try:
                return self._runner.run(asyncio.wait_for(call(), self._config.seconds))
            except TimeoutError:
                reason, delay = f"it took longer than config.environment.judge.seconds={self._config.seconds:g}", 0.0
            except openai.APIStatusError as error:
                reason, delay = f"{error.status_code}: {_short(error.message)}", _retry_after(error.response.headers)
                if error.status_code not in _AGAIN and error.status_code < 500:
                    key = "; the key is that of config.environment.judge.key_variable=" + self._config.key_variable
                    raise ScorerError(f"{where}: {reason}{key if error.status_code in (401, 403) else ''}") from error
            except (openai.APIError, _Unreadable, ValueError) as error:  # no connection, no JSON
                cause = error.__cause__ if isinstance(error, openai.APIConnectionError) else None
                reason, delay = _short(" ".join(f"{error} {cause or ''}".split())), 0.0
        raise ScorerError(f"{where}: no reply in {self._config.retries + 1} calls, the last one said: {reason}")


class _Unreadable(Exception):
    """A reply that is not in the format of the API."""


def judged(reply: str, *, correct_at: float) -> Score | None:
    """The score of a judge's reply (see the module's docstring); None if it has no verdict."""
    text = reply.rpartition("</think>")[2]
    if "<think>" in text:  # cut in its thinking
        return None
    lines = [line for line in text.splitlines() if line.strip()]
    for line in (*lines[-1:], *lines[:1]):
        verdict = _verdict(line)
        if verdict is not None:
            return to_score(verdict, correct_at=correct_at)
    return None


def _verdict(line: str) -> bool | float | None:
    """The verdict in a line; None if the line is anything else."""
    plain = line.translate(_MARKS).strip(_AROUND)
    if label := _LABEL.match(plain):
        plain = plain[label.end() :]
    plain = plain.strip(_AROUND).rstrip(_AROUND + ".!,;")
    if plain.lower() in _WORDS:
        return _WORDS[plain.lower()]
    found = _SHARE.fullmatch(plain)
    if not found:
        return None
    number, of = float(found["number"]), float(found["of"] or 1)
    return number / of if math.isfinite(of) and of > 0 and number <= of else None


def _filled(template: str, given: Mapping[str, Any], where: str) -> str:
    """Fills in the template. Raises ScorerError if it names a column that the row does not have."""

    def value(place: re.Match[str]) -> str:
        if place[1] not in given:
            raise ScorerError(f"{where}: {{{place[1]}}} is no column; the row has {', '.join(map(str, given))}")
        return str(given[place[1]])

    return _PLACE.sub(value, template)


def _read(path: str, field: str) -> str:
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"{field}={path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{field}={path}: is not UTF-8 text ({error})") from error


def _open(path: str) -> sqlite3.Connection:
    file = sqlite3.connect(path, timeout=_BUSY_SECONDS)
    with file:
        file.execute("CREATE TABLE IF NOT EXISTS replies (key BLOB UNIQUE, reply TEXT)")
    return file


@contextlib.contextmanager
def _of_the_file(path: str) -> Any:
    try:
        yield
    except sqlite3.Error as error:
        raise ScorerError(f"config.environment.judge.cache={path}: {error}") from error


def _pause(attempt: int) -> float:
    return _PAUSES[min(attempt, len(_PAUSES) - 1)]


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds of the server's retry-after header, at most the longest pause; 0 if there are none."""
    try:
        return min(_PAUSES[-1], max(0.0, float(headers.get("retry-after", "0"))))
    except ValueError:
        return 0.0


def _short(text: str) -> str:
    shown = repr(" ".join(text.split()))
    return shown if len(shown) <= 120 else f"{shown[:117]}..."
