"""Turns a second through scalerl-gateway: many sessions at once, over the replay engine.

    python -m tests.benchmarks.bench_gateway [--sessions=200] [--turns=10] [--tokens=24] [--journal=true]

Each session is a conversation of chat completions whose history grows by what it was answered, deleted at its end. The
client writes HTTP by hand, as an agent's costs more than the gateway. Printed: turns a second with client, gateway and
server on the same cores, the load of the machine, the gateway's memory, and CPU milliseconds of a turn in each process.
"""

import asyncio
import contextlib
import json
import os
import pathlib
import statistics
import tempfile
import time
from typing import Any

import psutil
from absl import app, flags

from tests.gateway.chat_model import QUESTION, TOOL, gateway, generator, model_folder
from tests.support.paths import ROOT

FLAGS = flags.FLAGS
flags.DEFINE_integer("sessions", 200, "at once", lower_bound=1)
flags.DEFINE_integer("turns", 10, "of a session", lower_bound=1)
flags.DEFINE_integer("tokens", 24, "sampled in a turn at most", lower_bound=1)
flags.DEFINE_integer("repeats", 5, "timed rounds of all sessions", lower_bound=1)
flags.DEFINE_bool("journal", True, "written by the gateway")
WARM = 20  # sessions before the clock starts


async def conversation(port: int, name: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages: list[dict[str, Any]] = [QUESTION]
    for _ in range(FLAGS.turns):
        asked = {"model": "tiny", "messages": messages, "tools": [TOOL], "max_tokens": FLAGS.tokens}
        body = json.dumps(asked).encode()
        head = f"POST /s/{name}/v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status, *fields = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        length = next(int(field.partition(":")[2]) for field in fields if field.startswith("content-length:"))
        answer = await reader.readexactly(length)
        assert " 200 " in status, answer
        messages += [json.loads(answer)["choices"][0]["message"], QUESTION]
    writer.write(f"DELETE /sessions/{name} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
    assert b" 200 " in (await reader.read()).partition(b"\r\n")[0]
    writer.close()


async def converse(port: int, names: str, sessions: int) -> None:
    await asyncio.gather(*(conversation(port, f"{names}{number}") for number in range(sessions)))


def cpu(processes: dict[str, psutil.Process]) -> dict[str, float]:
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def main(_) -> None:
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model_folder(folder / "model")
        os.environ["PYTHONPATH"] = (
            f"{ROOT}{os.pathsep}{folder}"  # processes of their own, and no forks of the tests' one
        )
        slots = ("--slots=256", "--queue=256", "--maximum_tokens=1024")
        server = stack.enter_context(contextlib.closing(generator(folder, folder / "model", *slots))).wait()
        journal = (f"--journal={folder / 'journal'}",) if FLAGS.journal else ()
        process = stack.enter_context(gateway(folder, folder / "model", f"--servers={server.address}", *journal))
        processes = {
            "client": psutil.Process(), "gateway": psutil.Process(process.process.pid),
            "server": psutil.Process(server.process.pid),
        }  # fmt: skip
        asyncio.run(converse(process.port, "warm", WARM))
        turns, rounds = FLAGS.sessions * FLAGS.turns, list[tuple[float, dict[str, float]]]()
        for number in range(FLAGS.repeats):
            before, began = cpu(processes), time.perf_counter()
            asyncio.run(converse(process.port, f"timed-{number}-", FLAGS.sessions))
            seconds, after = time.perf_counter() - began, cpu(processes)
            rounds.append((turns / seconds, {name: 1000 * (after[name] - before[name]) / turns for name in processes}))
            held = processes["gateway"].memory_info().rss / 2**20
            load = os.getloadavg()[0]
            print(f"{rounds[-1][0]:.0f} turns a second at a load of {load:.1f}; gateway {held:.0f} MB", flush=True)
        least = ", ".join(f"{name} {min(spent[name] for _, spent in rounds):.2f}" for name in processes)
        print(
            f"median {statistics.median(rate for rate, _ in rounds):.0f}; least CPU ms of a turn: {least}", flush=True
        )


if __name__ == "__main__":
    app.run(main)
