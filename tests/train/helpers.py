"""Whole runs as a user starts them: scalerl-train and scalerl-serve as processes, a tiny policy, a task of ten words.

The policy has random weights with a leaning: at every position it says 1, 2, "=" or stops, each about as often. So some
answers are right and some wrong without any warm start.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from scalerl_jax.config import Config
from scalerl_jax.config_io import load_file, override
from scalerl_jax.environments.tokenizer import Tokenizer, make_tokenizer
from scalerl_jax.model import DecoderConfig, init_params
from scalerl_jax.model.hf_folder import write_model_folder
from scalerl_jax.run.jsonl import read_rows
from tests.support.paths import ROOT
from tests.support.servers import ServerProcess
from tests.support.waiting import eventually

CONFIG = os.path.join(ROOT, "tests", "train", "tiny.py")
# A loaded machine starts a process in a minute.
SECONDS = 600.0

TRAIN_PROMPTS, HELD_OUT = 14, 6


def environment() -> dict[str, str]:
    # One thread: the runs of these tests are small, and there may be as many of them as cores.
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "NPROC": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # SIGABRT: every thread's stack
    }


# ---- The policy, the task, the rollouts to play --------------------------------------------------------------------


def write_model(folder: str, *, words: Sequence[str] = ("time is up",)) -> str:
    """A policy in a Hugging Face folder. Other `words` make another tokenizer."""
    base = os.path.join(os.path.dirname(folder), os.path.basename(folder) + "-tokenizer")
    tokenizer = make_tokenizer(corpus=[*words] * 9, path=base, vocabulary=280)
    decoder = DecoderConfig(
        vocab_size=280,
        hidden_size=32,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=16,
        intermediate_size=64,
        family="qwen3",
        tied_embeddings=False,
        stop_token_ids=tokenizer.stop_ids,
    )
    params = jax.device_get(init_params(decoder, jax.random.key(0)))
    rng = np.random.default_rng(0)
    common = rng.normal(size=decoder.hidden_size)
    params["embed"] = (common + 0.5 * rng.normal(size=params["embed"].shape)).astype(np.float32)
    head = 0.02 * rng.normal(size=params["head"].shape)
    for token in (*tokenizer.encode("12="), tokenizer.eos_id):
        head[token] += 0.25 * common
    params["head"] = head.astype(np.float32)
    write_model_folder(folder, params=params, decoder=decoder, tokenizer_dir=base)
    return folder


def prompts() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows of the training and of the held-out file; every answer is 1 or 2."""
    rows = [{"prompt": f"{'abcd'[n % 4]}{n}=", "answer": str(1 + n % 2)} for n in range(TRAIN_PROMPTS + HELD_OUT)]
    return rows[:TRAIN_PROMPTS], rows[TRAIN_PROMPTS:]


def write_task(folder: str) -> list[str]:
    """The task's files; returns the flags that name them."""
    flags = []
    for name, rows in zip(("train", "validation"), prompts()):
        path = os.path.join(folder, f"{name}.jsonl")
        with open(path, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        flags.append(f"--config.environment.{name}_file={path}")
    return flags


def write_rollouts(path: str, tokenizer: Tokenizer, config: Config) -> str:
    """Eight completions of each prompt for replay servers. Every fifth prompt is always right, every seventh never."""
    rng = np.random.default_rng(1)
    phrase = tokenizer.encode(config.rollout.interruption_text)
    train, held_out = prompts()
    with open(path, "w") as file:
        for n, row in enumerate([*train, *held_out]):
            for i in range(8):
                right = n % 5 == 0 or (n % 7 != 0 and i % 2 == 0)
                thought = rng.integers(3, 200, size=rng.integers(1, 10)).tolist()
                interrupted = i % 3 == 0
                end = phrase if interrupted else tokenizer.encode(config.rollout.end_of_thinking)
                answer = tokenizer.encode(row["answer"] if right else "0")
                cut = i == 5  # by the token budget
                tokens = [*thought, *end, *answer, *([] if cut else [tokenizer.eos_id])]
                logprobs = rng.uniform(-7, -4, size=len(tokens))
                forced = [(len(thought), len(thought) + len(end))] if interrupted else []
                for start, stop in forced:
                    logprobs[start:stop] = 0
                made = {
                    "prompt_token_ids": tokenizer.encode_prompt(row["prompt"]),
                    "token_ids": tokens,
                    "logprobs": logprobs.tolist(),
                    "forced": forced,
                    "finish_reason": "length" if cut else "stop",
                }
                file.write(json.dumps(made) + "\n")
    return path


# ---- Processes -----------------------------------------------------------------------------------------------------


def server(folder: pathlib.Path, name: str, *flags: str) -> ServerProcess:
    """A server that belongs to no trainer, not waited for."""
    common = ("--compute_dtype=float32", "--sync_dtype=float32", "--maximum_tokens=64", "--slots=8", "--queue=16")
    return ServerProcess(folder, *common, "--decode_chunk=4", *flags, name=name, environment=environment())


@contextlib.contextmanager
def serve(folder: pathlib.Path, count: int, *flags: str) -> Iterator[list[str]]:
    """`count` such servers; gives their addresses."""
    with contextlib.ExitStack() as stack:
        servers = []
        for number in range(count):
            servers.append(server(folder, f"server-{number}", *flags))
            stack.callback(servers[-1].close)
        yield [started.wait().address for started in servers]


class Run:
    """A run of scalerl-train on one workdir: started, killed, started again with the same command."""

    def __init__(
        self, workdir: pathlib.Path, *flags: str, log: pathlib.Path | None = None, variables: Mapping[str, str] = {}
    ):
        """log: what it says; default: beside the workdir. variables: of its environment, beside the usual ones."""
        self.workdir = str(workdir)
        self._command = [sys.executable, "-m", "scalerl_jax.train", f"--workdir={workdir}", *flags]
        self._output = str(log or f"{workdir}.log")
        self._variables = dict(variables)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Run":
        with open(self._output, "ab") as output:
            self.process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env={**environment(), **self._variables},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return self

    def kill(self) -> None:
        """SIGKILL to the trainer and all it started; it must have been running."""
        assert self.process is not None and self.process.poll() is None, read(self._output)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def wait(self) -> int:
        """The exit code."""
        assert self.process is not None
        try:
            return self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            self.process.wait()
            raise AssertionError(f"not within {SECONDS:.0f} s: the run ends\n{read(self._output)}") from None

    def finish(self) -> "Run":
        """Waits for the end, which must be a good one."""
        assert self.wait() == 0, read(self._output)
        return self

    def until(self, condition: Callable[[], Any], what: str) -> None:
        def look() -> Any:
            assert self.process is not None and self.process.poll() is None, read(self._output)
            return condition()

        eventually(look, what, seconds=SECONDS)

    def until_ended_or(self, condition: Callable[[], Any]) -> None:
        assert self.process is not None
        eventually(
            lambda: self.process.poll() is not None or condition(), "the run ends or comes so far", seconds=SECONDS
        )

    def path(self, *names: str) -> str:
        return os.path.join(self.workdir, *names)

    def rows(self, name: str) -> list[dict[str, Any]]:
        return read_rows(self.path(name)) if os.path.exists(self.path(name)) else []

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return self.rows("metrics.jsonl")

    def output(self) -> str:
        return read(self._output)

    def ledger(self) -> dict[str, Any]:
        return json.loads(read(self.path("ledger.json"))) if os.path.exists(self.path("ledger.json")) else {}


def read(path: str) -> str:
    if not os.path.exists(path):
        return ""
    with open(path) as file:
        return file.read()


def config_of(flags: Sequence[str]) -> Config:
    """The config that a run with these flags has."""
    config = load_file(CONFIG)
    for flag in flags:
        if flag.startswith("--config."):
            name, _, value = flag.removeprefix("--config.").partition("=")
            override(config, name, value)
    return config
