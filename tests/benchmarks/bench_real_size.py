"""The whole loop at the size of Qwen3-0.6B on a CPU: a few updates, with either engine.

    python -m tests.benchmarks.bench_real_size [--engines=jax,vllm] [--updates=3] [--vllm_python=.venv-vllm/bin/python]

The policy has Qwen3-0.6B's shape and vocabulary and random weights, written as its bfloat16 folder would be. It leans
to its stop token, so that it stops after some forty tokens (a policy that never stops has all its completions cut, and
nothing to learn from), and a reward that is a coin thrown by the completion's text makes gradients. 2 prompts x 4
completions of up to 64 tokens a batch, bfloat16 products and weights, sparse deltas to one server.

Printed for each engine: seconds of an update's parts, the bytes of a version and the share of weights that changed, and
the most memory of either process (VmHWM) beside what the trainer's own lines said of it, which count on an update and a
checkpoint at the same time; here the only checkpoint is the last thing. 24 GB, about 10 minutes.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import psutil
import tokenizers
from absl import app, flags
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from launch.commands import restart_with_tuned_malloc
from scalerl_jax.model import DecoderConfig, forward, load_hf
from scalerl_jax.model.precision import Precision
from scalerl_jax.model.tensor_layout import hf_tensors
from scalerl_jax.run.jsonl import read_rows
from scalerl_jax.system import memory
from tests.support.paths import ROOT

FLAGS = flags.FLAGS
flags.DEFINE_list("engines", ["jax", "vllm"], "of the server")
flags.DEFINE_integer("updates", 3, "that are made", lower_bound=1)
flags.DEFINE_string("vllm_python", os.path.join(ROOT, ".venv-vllm/bin/python"), "environment with vLLM")
flags.DEFINE_string("keep", "", "folder for the model and the runs; empty: they are removed")

END = "<|endoftext|>"
QWEN3_0_6B = DecoderConfig(
    vocab_size=151_936,
    hidden_size=1024,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    rope_theta=1e6,
    tied_embeddings=True,
    max_positions=40_960,
    stop_token_ids=(0,),
)
STOP_EVERY = 40  # tokens
COMMON = 0.3  # of an embedding's length: what all of them share, by which the policy leans

CONFIG = """
from scalerl_jax.config import Config

def get_config():
    config = Config(max_steps={updates})
    config.model.path = {model!r}
    config.model.compute_dtype = config.model.sync_dtype = "bfloat16"
    config.environment.reward = {reward!r}
    config.environment.minimum_terms, config.environment.maximum_terms = 3, 4
    config.rollout.prompts_per_step, config.rollout.group_size = 2, 4
    config.rollout.max_prompt_tokens = 16
    config.rollout.thinking_budget_min = config.rollout.thinking_budget_max = 0
    config.rollout.answer_budget = 64
    config.optimizer.warmup_steps = 0
    config.learner.seq_len, config.learner.micro_batch_rows, config.learner.logprob_chunk = 96, 1, 32
    config.learner.too_little_memory = "say"
    config.fleet.engine, config.fleet.servers, config.fleet.slots, config.fleet.queue = {engine!r}, 1, 8, 16
    config.fleet.vllm_python = {vllm_python!r}
    config.evaluation.every, config.evaluation.prompts, config.evaluation.samples = 1000, 1, 1
    config.checkpoint.every = 1000
    config.telemetry.tensorboard = False
    return config
"""
REWARD = """
import zlib

def reward(completion):
    return bool(zlib.crc32(completion.encode()) % 2)
"""


def write_model(path: str) -> None:
    """Random weights that lean to the stop token, and a byte-level tokenizer of the same size."""
    os.makedirs(path)
    rng, width = np.random.default_rng(0), QWEN3_0_6B.hidden_size
    common = rng.standard_normal(width).astype(np.float32)
    common /= np.linalg.norm(common)
    named = {}
    for name, shape in hf_tensors(QWEN3_0_6B).items():
        scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
        value = np.ones(shape, np.float32) if len(shape) == 1 else rng.standard_normal(shape, np.float32) * scale
        named[name] = value.astype(ml_dtypes.bfloat16)
    table = named["model.embed_tokens.weight"].astype(np.float32) + COMMON * common
    named["model.embed_tokens.weight"] = table.astype(ml_dtypes.bfloat16)
    with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as file:
        json.dump(QWEN3_0_6B.to_hf("bfloat16"), file)
    _write_tokenizer(path)
    weights = os.path.join(path, "model.safetensors")
    save_file(named, weights, metadata={"format": "pt"})
    # How far what reaches the head lies along the common direction says how much the stop token's row must.
    _, params = load_hf(path, dtype=jnp.bfloat16)
    tokens = jnp.asarray(rng.integers(1000, 100_000, (1, 48)), jnp.int32)
    precision = Precision(compute="bfloat16", sync="bfloat16")
    hidden = jax.jit(
        lambda p, t: forward(p, QWEN3_0_6B, t, jnp.arange(48)[None], jnp.ones_like(t), precision=precision)
    )(params, tokens)
    along = float(jnp.mean(hidden[0, 8:].astype(jnp.float32) @ common))
    table[0] += np.log(QWEN3_0_6B.vocab_size / STOP_EVERY) / along * common
    named["model.embed_tokens.weight"] = table.astype(ml_dtypes.bfloat16)
    save_file(named, weights, metadata={"format": "pt"})


def _write_tokenizer(path: str) -> None:
    words = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"w{i}" for i in range(QWEN3_0_6B.vocab_size - len(words))]
    tokenizer = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    tokenizer.save(os.path.join(path, "tokenizer.json"))
    with open(os.path.join(path, "tokenizer_config.json"), "w", encoding="utf-8") as file:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}, file)


def run(engine: str, folder: str, model: str) -> None:
    os.makedirs(folder)
    paths = {name: os.path.join(folder, name) for name in ("config.py", "reward.py", "run", "log")}
    with open(paths["reward.py"], "w", encoding="utf-8") as file:
        file.write(REWARD)
    with open(paths["config.py"], "w", encoding="utf-8") as file:
        given = {"model": model, "engine": engine, "updates": FLAGS.updates, "vllm_python": FLAGS.vllm_python}
        file.write(CONFIG.format(**given, reward=f"{paths['reward.py']}:reward"))
    command = [sys.executable, "-m", "scalerl_jax.train", f"--config={paths['config.py']}", f"--workdir={paths['run']}"]
    began, most = time.monotonic(), dict[str, int]()
    with open(paths["log"], "wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=log, stderr=log
        )
        while process.poll() is None:
            for name, peak in _peaks(process.pid):
                most[name] = max(most.get(name, 0), peak)
            time.sleep(0.5)
    with open(paths["log"], encoding="utf-8") as log:
        said = log.read()
    if process.returncode:
        sys.exit(f"{engine}: scalerl-train ended with {process.returncode}:\n{said[-3000:]}")
    print(f"\n{engine}: {FLAGS.updates} updates, {time.monotonic() - began:.0f} s with the start")
    for line in re.findall(r"^.*memory.*$", said, re.MULTILINE):
        print(f"  said: {line}")
    for name, peak in most.items():
        print(f"  most memory of {name}: {peak / 1e9:.1f} GB")
    for row in read_rows(os.path.join(paths["run"], "metrics.jsonl")):
        pushes = row["pushes"]
        print(
            f"  update {row['step']}: {row['update_seconds']:.1f} s, waited {row['waited_seconds']:.1f} s, "
            f"{row['loss_tokens']:.0f} loss tokens of {row['completions_counted']:.0f} completions, gradient norm "
            f"{row.get('gradient_norm', 0):.2g}, versions sent {json.dumps(pushes)}"
        )


def _peaks(trainer: int) -> list[tuple[str, int]]:
    """(role, most bytes of it so far); a server's processes together. Those that have just ended are left out."""
    found = []
    try:
        root = psutil.Process(trainer)
        found.append(("the trainer", memory.peak_resident(trainer)))
        servers = [child for child in root.children() if "rollout_server" in " ".join(child.cmdline())]
        for child in servers:
            parts = [child.pid, *(below.pid for below in child.children(recursive=True))]
            found.append(("the server", sum(map(memory.peak_resident, parts))))
    except psutil.Error:
        pass
    return found


def main(argv: Sequence[str]) -> None:
    del argv
    with tempfile.TemporaryDirectory() as temporary:
        folder = FLAGS.keep or temporary
        model = os.path.join(folder, "model")
        if not os.path.exists(model):
            # In a process of its own: what it takes is given back before the run begins.
            make = "import sys; from tests.benchmarks.bench_real_size import write_model; write_model(sys.argv[1])"
            subprocess.run([sys.executable, "-c", make, model], cwd=ROOT, check=True)
        for engine in FLAGS.engines:
            run(engine, os.path.join(folder, engine), model)


if __name__ == "__main__":
    restart_with_tuned_malloc()  # as the commands do; what is started inherits it
    app.run(main)
