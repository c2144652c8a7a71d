"""A scoring process: makes the run's environments from the config and answers each line with one line.

    read                                           written
    {"config": "{...}", "parent"}, the first       {"ready": true}
    {"id", "prepare": {part: [column, ...]}}       {"id", "deterministic": [part, ...]}: all are made, and these are
    {"id", "part", "row", "completion",            {"id", "score": {...}, "complaint": [kind, line], "last": true}
     "thinking", "tokens"}                         {"id", "out_of_time": true, "last": true}
                                                   {"id", "error": line}: nothing can be scored

A reply has its question's id, since a process that a score function started may write into the same socket. A part is
made when a question first needs it; columns: those of its rows, or null. A complaint describes a score function that
failed; its completion is wrong. `last`: the process uses so much memory that the next question needs a new one. If the
process cannot interrupt itself (a computation in C), the kernel ends it with SIGXCPU GRACE_SECONDS after the limit. It
ends at the end of its input, even if a score left threads running; on Linux the kernel kills it with the thread that
started it, even during a score that catches everything (worker_process.py).
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import resource
import signal
from collections.abc import Iterator, Mapping
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.environments import load, parts, user_code
from scalerl_jax.environments.base import Completion, Environment, Row, Score, ScoreFailed, ScorerError
from scalerl_jax.environments.worker_process import begin, memory_bytes, ready

GRACE_SECONDS = 1.0  # CPU time beyond the limit after which the kernel ends the process; it counts whole seconds
AGAIN_SECONDS = 0.1  # CPU time between two interruptions: a bare `except:` or a callback may swallow one
LONGEST_ANSWER = 200  # characters of a score's answer; a longer one is cut and distinguished by its digest
LONGEST_WHY = 500  # characters
MOST_METRICS = 64  # of one score


class OutOfTime(BaseException):
    """Not an Exception: math-verify and sympy catch those and continue."""


class CpuLimit:
    """Raises OutOfTime in `with limit.of(seconds):` after this process has spent that much CPU time in the block."""

    def __init__(self) -> None:
        self._armed = False
        signal.signal(signal.SIGPROF, self._interrupt)

    @contextlib.contextmanager
    def of(self, seconds: float) -> Iterator[None]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        limit = math.ceil(used.ru_utime + used.ru_stime + seconds + GRACE_SECONDS)
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))
        self._armed = True
        try:
            signal.setitimer(signal.ITIMER_PROF, seconds, AGAIN_SECONDS)
            yield
        finally:
            self.off()

    def off(self) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))  # making the next part is not limited

    def _interrupt(self, *_: object) -> None:
        if self._armed:
            raise OutOfTime


@contextlib.contextmanager
def raising_scorer_errors(part: str, config: Config, failed: str) -> Iterator[None]:
    """Raises ScorerError, one line, for any exception of the part's environment in the block. config: of the part."""
    try:
        yield
    except ValueError as error:
        raise ScorerError(parts.as_written(part, str(error))) from error
    except (Exception, SystemExit) as error:
        field, name = parts.field(part, "name"), config.environment.name
        raise ScorerError(f"{field}={name}: {failed}: {user_code.error_line(error)}") from error


class EnvironmentParts:
    """The environments of a run, each made on first access."""

    def __init__(self, config: Config):
        self._configs = parts.configs(config)
        self._made: dict[str, Environment] = {}
        self.size = 0  # bytes of address space after the last environment was made

    def __getitem__(self, part: str) -> Environment:
        """Raises ScorerError if it cannot be made or prepared."""
        if part not in self._made:
            with raising_scorer_errors(part, self._configs[part], "cannot be made"):
                environment = load.make_environment(self._configs[part])
                if environment.prepare is not None:
                    environment.prepare()
            self._made[part] = environment
            self.size = _address_space()
        return self._made[part]

    def seconds(self, part: str) -> float:
        """Limit of the CPU time of one score."""
        return self._configs[part].environment.verifier_seconds


def reply_to(question: Mapping[str, Any], environments: EnvironmentParts, limit: CpuLimit) -> dict[str, Any]:
    """The reply to a question. Never raises, whatever the text."""
    part = question.get("part", "")
    try:
        if "prepare" in question:
            for part, columns in question["prepare"].items():
                check = environments[part].check
                if check is not None and columns is not None:
                    check(columns)
            return {"deterministic": [part for part in question["prepare"] if environments[part].deterministic()]}
        environment = environments[part]
        completion = Completion(question["completion"], thinking=question["thinking"], tokens=question["tokens"])
        with limit.of(environments.seconds(part)):
            row = Row(environment=part, **question["row"])
            return {"score": plain(environment.score(row, completion))}
    except OutOfTime:
        limit.off()  # the context manager's own call may have been interrupted
        return {"out_of_time": True}
    except ScorerError as error:
        return {"error": parts.as_written(part, " ".join(str(error).split()))}
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code and parsers of any text raise anything)
        score, kind = score_of_failure(part, error)
        return {"score": plain(score), "complaint": [kind[:LONGEST_WHY], score.why]}


def score_of_failure(part: str, error: BaseException) -> tuple[Score, str]:
    """(score, kind of the failure) of a completion for which a score function of this part raised an exception."""
    if isinstance(error, ScoreFailed):
        line, kind, metrics = parts.as_written(part, error.line), error.kind, error.metrics
    else:
        what, kind, metrics = user_code.error_line(error), type(error).__name__, {}
        line = f"{parts.field(part, 'name')}: a score failed: {what}; the completion counts as wrong"
    return Score(-1.0, False, metrics, why=line, failed=True), f"{part} {kind}"


def plain(score: Score) -> dict[str, Any]:
    """The fields of a score as JSON values, long texts cut. Raises TypeError or ValueError for an invalid score."""
    if not isinstance(score, Score):
        raise TypeError(f"a score is {type(score).__name__}, not Score")
    answer = score.answer
    if answer is not None and len(answer) > LONGEST_ANSWER:
        digest = hashlib.blake2b(answer.encode(errors="replace"), digest_size=8).hexdigest()
        answer = f"{answer[: LONGEST_ANSWER - 20]}... {digest}"
    if len(score.metrics) > MOST_METRICS:
        raise ValueError(f"a score has {len(score.metrics)} metrics, more than {MOST_METRICS}")
    metrics = {str(name): float(value) for name, value in score.metrics.items()}
    if not all(map(math.isfinite, metrics.values())):
        raise ValueError(f"a metric of a score is no finite number: {metrics}")
    fields = dataclasses.replace(
        score, reward=float(score.reward), correct=bool(score.correct), metrics=metrics, answer=answer,
        turns=tuple(map(float, score.turns)),
        why=score.why if len(score.why) <= LONGEST_WHY else f"{score.why[: LONGEST_WHY - 3]}...",
    )  # fmt: skip
    return {name: value for name, value in vars(fields).items() if value not in (None, "", {})}


def _address_space() -> int:
    """Bytes of this process's address space; 0 if the system does not report them."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def main() -> None:
    questions, replies, config, _ = begin()
    limit, memory, environments = CpuLimit(), memory_bytes(config), EnvironmentParts(config)
    ready(replies)
    itself = os.getpid()
    for line in questions:
        question = json.loads(line)
        reply = {"id": question["id"], **reply_to(question, environments, limit)}
        if os.getpid() != itself:  # a score function forked, and the fork returned
            os._exit(0)
        if _address_space() > (memory + environments.size) / 2:  # half of the memory left for scores is used up
            reply["last"] = True
        replies.write(json.dumps(reply) + "\n")
    os._exit(0)  # without waiting for threads of user code


if __name__ == "__main__":
    main()
