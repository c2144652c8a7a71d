"""How long a run takes to read its problems, how much memory that needs, and what decontamination costs.

    python -m tests.benchmarks.bench_rows [--rows=1000000] [--words=60]

JSONL of {"prompt", "answer", "level", "source"}, a prompt some 60 words and 250 characters long, without a layout: read
row by row; then all of load.py: one of each prompt, a held-out split, token ids. Decontamination is of 50,000 training
prompts against 1,000. Printed: seconds by clock and of the cores, and the most memory that the process had by then.
"""

import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import app, flags

from scalerl_jax.config import Config
from scalerl_jax.environments.data.decontamination import EvaluationPrompts
from scalerl_jax.environments.data.reader import Reader
from scalerl_jax.environments.load import load_rows
from scalerl_jax.environments.tokenizer import make_tokenizer

FLAGS = flags.FLAGS
flags.DEFINE_integer("rows", 1_000_000, "in the file")
flags.DEFINE_integer("words", 60, "of a prompt")


def timed(what: str, work: Callable[[], Any]) -> Any:
    wall, cores = time.perf_counter(), time.process_time()
    done = work()
    wall, cores = time.perf_counter() - wall, time.process_time() - cores
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{what:44} {wall:7.1f} s by clock {cores:7.1f} s of cores {most:7.0f} MiB", flush=True)
    return done


def main(_: list[str]) -> None:
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words = np.array(["".join(rng.choice(letters, rng.integers(2, 7))) for _ in range(20_000)])

    def text() -> str:
        return " ".join(words[np.minimum(rng.zipf(1.3, FLAGS.words), len(words)) - 1])

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(
            corpus=(text() for _ in range(2000)), path=os.path.join(folder, "model"), vocabulary=16_000
        )
        config = Config()
        config.environment.name, config.environment.train = "math", os.path.join(folder, "rows.jsonl")
        with open(config.environment.train, "w", encoding="utf-8") as file:
            for n in range(FLAGS.rows):
                row = {"prompt": f"{n}: {text()}", "answer": str(n), "level": n % 9, "source": "made"}
                file.write(json.dumps(row) + "\n")
        read = timed(f"read {FLAGS.rows:,} rows", lambda: sum(1 for _ in Reader(config).rows("train")))
        rows = timed("load them: train, held out, token ids", lambda: load_rows(config, tokenizer))
        assert read == FLAGS.rows and len(rows.train) + len(rows.held_out) == read
        train = [row.text for row in rows.train[:50_000]]
        evaluations = timed(
            "1,000 evaluation prompts", lambda: EvaluationPrompts({"set": [text() for _ in range(1000)]})
        )
        timed(f"{len(train):,} prompts against them", lambda: [evaluations.has(one, "") for one in train])


if __name__ == "__main__":
    app.run(main)
