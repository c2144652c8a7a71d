"""A scoring process: makes the run's environments from the config and answers each line with one line.

    read                                           written
    {"config": "{...}", "parent"}, the first       {"ready": true}
    {"id", "prepare": {part: [column, ...]}}       {"id", "deterministic": [part, ...]}: all are made, and these are
    {"id", "part", "row", "completion",            {"id", "score": {...}, "complaint": [kind, line], "last": true}
     "thinking", "tokens"}                         {"id", "out_of_time": true, "last": true}
                                                   {"id", "error": line}: nothing can be scored

A reply has its question's id, since a process that a score function started may write into the same pipe. A part is
made when a question first needs it; columns: those of its rows, or null. A complaint describes a score function that
failed; its completion is wrong. `last`: the process uses so much memory that the next question needs a new one. If the
process cannot interrupt itself (a computation in C), the kernel ends it with SIGXCPU GRACE_SECONDS after the limit. It
ends at the end of its input, even if a score left threads running; on Linux the kernel kills it with the thread that
started it, even during a score that catches everything. The config is read from stdin, since any user can read a
command line.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import logging
import math
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from scalerl_jax import config_io
from scalerl_jax.config import Config
from scalerl_jax.environments import load, parts, user_code
from scalerl_jax.environments.base import Completion, Environment, Row, Score, ScorerError
from scalerl_jax.environments.complaints import failure

GRACE_SECONDS = 1.0  # CPU time beyond the limit after which the kernel ends the process; it counts whole seconds
AGAIN_SECONDS = 0.1  # CPU time between two interruptions: a bare `except:` or a callback may swallow one
LONGEST_ANSWER = 200  # characters of a score's answer; a longer one is cut and distinguished by its digest
LONGEST_WHY = 500  # characters
MOST_METRICS = 64  # of one score
_PR_SET_PDEATHSIG = 1


class OutOfTime(BaseException):
    """Not an Exception: math-verify and sympy catch those and continue."""


class Limit:
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


class Parts:
    """The environments of a run, each made on first access."""

    def __init__(self, config: Config):
        self._configs = parts.configs(config)
        self._made: dict[str, Environment] = {}
        self.size = 0  # bytes of address space after the last environment was made

    def __getitem__(self, part: str) -> Environment:
        """Raises ScorerError if it cannot be made or prepared."""
        if part not in self._made:
            try:
                environment = load.make_environment(self._configs[part])
                if environment.prepare is not None:
                    environment.prepare()
            except ValueError as error:
                raise ScorerError(parts.as_written(part, str(error))) from error
            except (Exception, SystemExit) as error:
                field = parts.field(part, "name")
                name = self._configs[part].environment.name
                raise ScorerError(f"{field}={name}: cannot be made: {user_code.error_line(error)}") from error
            self._made[part] = environment
            self.size = _address_space()
        return self._made[part]

    def seconds(self, part: str) -> float:
        """Limit of the CPU time of one score."""
        return self._configs[part].environment.verifier_seconds


def reply_to(question: Mapping[str, Any], environments: Parts, limit: Limit) -> dict[str, Any]:
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
            return {"score": _plain(environment.score(row, completion))}
    except OutOfTime:
        limit.off()  # the context manager's own call may have been interrupted
        return {"out_of_time": True}
    except ScorerError as error:
        return {"error": parts.as_written(part, " ".join(str(error).split()))}
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code and parsers of any text raise anything)
        line, kind, metrics = failure(part, error)
    return {
        "score": _plain(Score(-1.0, False, metrics, why=line, failed=True)),
        "complaint": [kind[:LONGEST_WHY], line],
    }


def _plain(score: Score) -> dict[str, Any]:
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
        why=score.why if len(score.why) <= LONGEST_WHY else f"{score.why[: LONGEST_WHY - 3]}...",
    )  # fmt: skip
    return {name: value for name, value in vars(fields).items() if value not in (None, "", {})}


def die_with_parent() -> None:
    """The kernel sends SIGKILL when the thread that started this process ends: a thread of the pool, which lives as
    long as the pool. If it ended before this call there is no signal; the caller must check that (getppid)."""
    if sys.platform == "linux":
        died = [ctypes.c_ulong(given) for given in (signal.SIGKILL, 0, 0, 0)]
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, *died):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _address_space() -> int:
    """Bytes of this process's address space; 0 if the system does not report them."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def main() -> None:
    die_with_parent()
    # Private copies of the pipes: a library that reads stdin or prints does not interfere with them.
    questions = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    with open(os.devnull, "r+b") as nowhere:
        os.dup2(nowhere.fileno(), 0)
        os.dup2(nowhere.fileno(), 1)
        logging.disable(logging.CRITICAL)  # math-verify logs every text it cannot read
        limit = Limit()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
        first = json.loads(questions.readline() or "{}")
        if first.get("parent") != os.getppid():
            os._exit(0)  # the parent ended before die_with_parent
        config = config_io.from_json(first["config"])
        each = parts.configs(config).values()
        memory = max(of_part.environment.verifier_memory_bytes for of_part in each)
        # Limits the address space, and disables core files; a size that the machine does not accept is skipped.
        for kind, size in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(kind, (size, size))
        environments = Parts(config)
        replies.write('{"ready": true}\n')
        os.dup2(nowhere.fileno(), 2)
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
