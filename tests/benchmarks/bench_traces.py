"""How long the warm start takes to tokenize a file of chats, how much memory that needs, and what a second start costs.

    python -m tests.benchmarks.bench_traces [--traces=50000] [--words=400]

Chats of a question and an answer with its thinking, in JSONL, through a Qwen3-style template with a tokenizer of 16,000
tokens made from them. Each start is a process of its own. Printed: seconds by clock and of the cores, tokens/s and the
memory that the process gained; beside it the same chats rendered and encoded one after the other and held in lists, as
a script would.
"""

import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer("traces", 50_000, "chats in the file")
flags.DEFINE_integer("words", 400, "of a chat, on average")
flags.DEFINE_enum("part", "", ["", "first", "second", "script"], "what the process itself does; empty: all, in turn")
flags.DEFINE_string("folder", "", "where the parts find what there is")
SEQ_LEN = 12_287


def write(folder: pathlib.Path) -> None:
    from tests.support.chat_folders import chat_folder

    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words = np.array(["".join(rng.choice(letters, rng.integers(2, 9))) for _ in range(20_000)])

    def text(count: int) -> str:
        return " ".join(words[np.minimum(rng.zipf(1.3, count), len(words)) - 1])

    corpus = (text(400) for _ in range(2000))
    chat_folder(folder / "model", "qwen3", corpus=corpus, vocabulary=16_000)
    with open(folder / "chats.jsonl", "w", encoding="utf-8") as file:
        for size in rng.geometric(1 / FLAGS.words, FLAGS.traces):
            said = f"<think>\n{text(int(size))}\n</think>\n\n{text(9)}"
            chat = [{"role": "user", "content": text(30)}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": chat}) + "\n")


def start(folder: str) -> int:
    from scalerl_jax.config import Config
    from scalerl_jax.environments.tokenizer import Tokenizer
    from scalerl_jax.traces.trace_files import FileTraces

    config = Config()
    config.sft.traces, config.sft.seq_len = os.path.join(folder, "chats.jsonl"), SEQ_LEN
    config.sft.long_traces, config.sft.evaluation_traces = "drop", 100
    traces = FileTraces(config, Tokenizer(os.path.join(folder, "model")), os.path.join(folder, "traces"))
    traces.batch(0)
    return os.path.getsize(os.path.join(folder, "traces", "tokens.int32")) // 4


def script(folder: str) -> int:
    """Tokens of the prompts and of the whole, held in lists."""
    from scalerl_jax.environments.chat_template import read_chat_template
    from scalerl_jax.environments.tokenizer import Tokenizer

    tokenizer, template = Tokenizer(os.path.join(folder, "model")), read_chat_template(os.path.join(folder, "model"))
    assert template is not None
    held, tokens = [], 0
    with open(os.path.join(folder, "chats.jsonl"), encoding="utf-8") as file:
        for line in file:
            chat = json.loads(line)["messages"]
            ids = tokenizer.encode(template.render(chat, generation_prompt=False))
            held.append((ids, len(tokenizer.encode(template.render(chat[:1])))))
            tokens += len(ids)
    return tokens


def main(_: list[str]) -> None:
    if FLAGS.part:
        import transformers.utils.chat_template_utils  # noqa: F401

        import scalerl_jax.traces.trace_files  # noqa: F401

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begun, used = time.perf_counter(), time.process_time()
        tokens = script(FLAGS.folder) if FLAGS.part == "script" else start(FLAGS.folder)
        seconds, used = time.perf_counter() - begun, time.process_time() - used
        gained = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        rate = f"{tokens / seconds / 1e6:.2f} M tokens/s"
        print(f"{FLAGS.part:8s} {seconds:6.1f} s ({used:.1f} of the cores), {rate}, {gained:.0f} MiB more memory")
        return
    with tempfile.TemporaryDirectory() as folder:
        write(pathlib.Path(folder))
        size = os.path.getsize(os.path.join(folder, "chats.jsonl"))
        print(f"{FLAGS.traces:,} chats, {size / 2**20:.0f} MiB", flush=True)
        for part in ("first", "second", "script"):
            again = ["--folder", folder, "--part", part]
            subprocess.run([sys.executable, "-m", "tests.benchmarks.bench_traces", *again], check=True, timeout=3600)
        tokens = os.path.getsize(os.path.join(folder, "traces", "tokens.int32")) // 4
        print(f"{tokens / 1e6:.1f} M tokens, {tokens * 4 / 2**20:.0f} MiB on disk")


if __name__ == "__main__":
    app.run(main)
