"""A process that plays episodes: it makes the run's environments once, and forks for each episode.

    standard input, a Unix socket   the config in one line (worker_process.py) and "parts", answered by {"ready": true}
                                    or {"error": line}; then one byte per episode, which carries the episode's socket
    an episode's socket             read                              written
                                    {"part", "row", "seed"}           {"pid"}: it has begun
                                    {"turn", "thinking", "tokens",    {"step": {...}}, and "complaint": [kind, line] if
                                     "calls", "tools"}                a score function failed; the episode is wrong then
                                    {"client"}: for an agent          {"score": {...}}: it has ended
                                                                      {"error": line}: instead of any of these

A fork costs milliseconds and shares the memory of the environments. A crash, a leak or a hang of an episode affects
only its process. A step is interrupted after environment.turn_seconds by clock; seconds later the process ends if that
did nothing, as in compiled code. An agent is interrupted by the pool's SIGALRM, since the time in which no turn can be
sampled is not its own. An episode ends when its socket closes, after calling its close() within the same limit as a
step. `random` and numpy are seeded alike in all episodes of a row. A process may use as much CPU time as its episode
may take, which ends one whose threads spin.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import gc
import json
import math
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from scalerl_jax.config import Config
from scalerl_jax.environments import parts, user_code
from scalerl_jax.environments.base import WRONG, Completion, Row, ScoreFailed, ScorerError
from scalerl_jax.environments.episode import Client, Step, as_step
from scalerl_jax.environments.score_worker import EnvironmentParts, plain
from scalerl_jax.environments.tool_calls import read_calls
from scalerl_jax.environments.worker_process import begin, die_with_parent, ready

_HANGS_SECONDS = 5.0  # until what an alarm does not interrupt is ended


class _Late(BaseException):
    """The time is up. No Exception, which a user's code may take for one of its own."""


def _raise_late(number: int, frame: Any) -> None:
    raise _Late


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raises _Late in the block after so many seconds by clock."""
    faulthandler.dump_traceback_later(seconds + _HANGS_SECONDS, exit=True)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


def _answer(question: Mapping[str, Any], environments: EnvironmentParts, episodes: list[Any]) -> dict[str, Any]:
    """The reply to a question. episodes: empty before the first one, then the episode, or the function of an agent."""
    if not episodes:
        part, seed = question["part"], question["seed"]
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % 2**32)
        begin, run = environments[part].episode, environments[part].run
        row = Row(environment=part, **question["row"])
        if run is not None:
            episodes.append(functools.partial(run, row))
        else:
            assert begin is not None
            episodes.append(begin(row))
        return {"pid": os.getpid()}
    if "client" in question:
        return {"score": plain(episodes[0](Client(**question["client"])))}
    # Parsed here and not in the trainer: a malicious turn of the policy can only harm this process.
    calls = read_calls(question["turn"], question["calls"], tools=question["tools"])
    turn = Completion(question["turn"], thinking=question["thinking"], tokens=question["tokens"], tool_calls=calls)
    try:
        return {"step": dataclasses.asdict(as_step(episodes[0].step(turn)))}
    except ScoreFailed as failed:
        step = as_step(Step(done=True, reward=WRONG.reward, correct=WRONG.correct, metrics=failed.metrics))
        return {"step": dataclasses.asdict(step), "complaint": [failed.kind, failed.line]}


def _limit_cpu(seconds: float) -> None:
    """The kernel ends this process, and each that it starts, after so many seconds of CPU time."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    limit = math.ceil(min(seconds, 2**31))
    resource.setrlimit(resource.RLIMIT_CPU, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _play(connection: socket.socket, environments: EnvironmentParts, configs: Mapping[str, Config]) -> None:
    """Plays an episode until its socket closes."""
    episodes: list[Any] = []
    limit, settings = 1.0, next(iter(configs.values())).environment
    with connection.makefile("rb") as questions:
        for line in questions:
            question = json.loads(line)
            if not episodes:
                settings = configs[question["part"]].environment
                _limit_cpu(settings.episode_seconds)
            name = "episode_seconds" if "client" in question else "turn_seconds"
            limit = getattr(settings, name)
            try:
                with contextlib.nullcontext() if "client" in question else _within(limit):
                    reply = json.dumps(_answer(question, environments, episodes))
            except _Late:
                reply = json.dumps({"error": f"a step took {limit:g} s ({name})"})
            except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code raises anything)
                reply = json.dumps({"error": user_code.error_line(error)})
            with contextlib.suppress(BrokenPipeError):  # the trainer no longer waits for it
                connection.sendall(reply.encode() + b"\n")
    if episodes and callable(close := getattr(episodes[0], "close", None)):
        with contextlib.suppress(Exception, SystemExit, _Late), _within(limit):
            close()


def main() -> None:
    control = socket.socket(fileno=os.dup(0))
    questions, replies, config, first = begin()
    environments, configs = EnvironmentParts(config), parts.configs(config)
    try:
        for part in first["parts"]:
            _ = environments[part]
    except ScorerError as error:
        replies.write(json.dumps({"error": str(error)}) + "\n")
        os._exit(0)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page
    ready(replies)
    questions.close()
    replies.close()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended episodes
    while True:
        began, sockets, _, _ = socket.recv_fds(control, 1, 1)
        if not began:
            os._exit(0)
        connection = socket.socket(fileno=sockets[0])
        with contextlib.suppress(OSError):  # out of memory: the episode's socket is closed
            if os.fork() == 0:
                try:
                    die_with_parent()
                    os.setsid()  # the programs that it starts are in its process group and can be killed with it
                    signal.signal(signal.SIGALRM, _raise_late)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an environment may start programs and wait for them
                    control.close()
                    _play(connection, environments, configs)
                finally:
                    os._exit(0)  # always, without waiting for threads of the environment
        connection.close()


if __name__ == "__main__":
    main()
