"""Runs programs of tinker-cookbook, as they are, against a server; none of it needs a network.

    python -m tests.tinker.acceptance NAME... --url=http://127.0.0.1:8000 --model=DIR --folder=DIR [--python=PYTHON]

NAME is a row of PROGRAMS. The server must have been started with --names=Qwen/Qwen3.5-9B-Base, which is what the
programs call the model, and --maximum_tokens=128 or more. PYTHON has tinker-cookbook; by default it is this one.

The programs run in --folder, where Qwen/Qwen3.5-9B-Base is a link to the model's folder, for its tokenizer, and each
data set that they load by name is a folder of that name: both libraries take a folder before they ask the network.
What they do is in the metrics that they write; each row of PROGRAMS has what is to be there.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

MODEL = "Qwen/Qwen3.5-9B-Base"  # the cookbook renders it as "User: ...\n\nAssistant: ..."
SECONDS = 1800.0  # that a program may take
_RECIPES = "tinker_cookbook.recipes"

SUPERVISED = 400  # steps of sl_loop
BATCH = 64

Metrics = list[dict[str, float]]  # of each step


@dataclasses.dataclass(frozen=True)
class Program:
    module: str
    arguments: tuple[str, ...]
    check: Callable[[Metrics], None]  # raises AssertionError
    begins: str = ""  # the program whose last checkpoint this one starts from


def series(metrics: Metrics, key: str) -> list[float]:
    found = [row[key] for row in metrics if key in row]
    assert found, f"no step has {key}: {sorted(set().union(*metrics))}"
    return found


def falls(key: str, *, by: float) -> Callable[[Metrics], None]:
    """The last value is below the first by at least this factor."""

    def check(metrics: Metrics) -> None:
        values = series(metrics, key)
        print(f"{key}: {values[0]:.3f} -> {values[-1]:.3f} in {len(values)} steps")
        assert values[-1] < values[0] / by, f"{key} went from {values[0]:.3f} to {values[-1]:.3f}"

    return check


def has(key: str, steps: int) -> Callable[[Metrics], None]:
    def check(metrics: Metrics) -> None:
        assert len(series(metrics, key)) == steps, series(metrics, key)

    return check


def _math_rl(steps: int, *more: str) -> tuple[str, ...]:
    size = ("groups_per_batch=16", "group_size=16", "max_tokens=12", "learning_rate=2e-4", "lora_rank=0")
    return ("env=arithmetic", "loss_fn=importance_sampling", *size, f"max_steps={steps}", "eval_every=0", *more)


_RIGHT = "env/all/correct"
PROGRAMS = {
    "sl_loop": Program(
        f"{_RECIPES}.sl_loop",
        (f"batch_size={BATCH}", "learning_rate=1e-3", "max_length=128", "lora_rank=0", "save_every=0"),
        falls("train_mean_nll", by=1.5),
    ),
    "math_rl": Program(f"{_RECIPES}.math_rl.train", _math_rl(8), has(_RIGHT, 8), "sl_loop"),
    "math_rl_async": Program(
        f"{_RECIPES}.math_rl.train", _math_rl(8, "max_steps_off_policy=2"), has(_RIGHT, 8), "sl_loop"
    ),
    "math_rl_stream": Program(
        f"{_RECIPES}.math_rl.train",
        _math_rl(8, "stream_minibatch_config.groups_per_batch=16", "stream_minibatch_config.num_minibatches=4"),
        has(_RIGHT, 8),
        "sl_loop",
    ),
    # The student is the base model, the teacher the model that sl_loop has trained.
    "distillation": Program(
        f"{_RECIPES}.distillation.on_policy_distillation",
        ("groups_per_batch=8", "group_size=4", "max_tokens=12", "learning_rate=2e-3", "lora_rank=32", "max_steps=8",
         "dataset=deepmath", "eval_every=0"),
        has("teacher_kl", 8),
        "sl_loop",
    ),
}  # fmt: skip


def write_folder(folder: pathlib.Path, model: pathlib.Path) -> None:
    """The folder in which the programs run."""
    link = folder / MODEL
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(model.absolute(), target_is_directory=True)
    rng = random.Random(0)
    talks, questions = [], []
    for i in range(SUPERVISED * BATCH):
        x, y = rng.randint(0, 100), rng.randint(0, 100)
        question = f"What is {x} + {y}?"
        # Three of ten are wrong, so that math_rl has something to learn.
        answer = x + y + rng.choice([-10, -2, -1, 1, 2, 10]) * (i % 10 < 3)
        questions.append({"question": question})
        talks.append(_talk("What is 4 + 5?", "9", question, f"{answer}"))
    _write_rows(folder / "HuggingFaceH4" / "no_robots", "default", talks)
    _write_rows(folder / "zwhe99" / "DeepMath-103K", "default", questions)


def _talk(*turns: str) -> dict[str, object]:
    roles = ("user", "assistant") * 2
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]}


def _write_rows(folder: pathlib.Path, name: str, rows: list[dict[str, object]]) -> None:
    """name: of the data set's configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = "  - split: train\n    path: train.jsonl"
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}\n---\n")


def run(name: str, *, url: str, folder: pathlib.Path, python: str) -> None:
    """Raises AssertionError where the program fails, or has not done what it was to do."""
    program, log = PROGRAMS[name], folder / "logs" / name
    shutil.rmtree(log, ignore_errors=True)
    arguments = [f"model_name={MODEL}", f"log_path={log}", *program.arguments]
    if name != "sl_loop":
        arguments += ["renderer_name=role_colon", "behavior_if_log_dir_exists=delete"]
    if program.begins:
        saved = checkpoint(folder / "logs" / program.begins)
        if name == "distillation":
            arguments += [f"teacher_model={MODEL}", f"teacher_checkpoint={saved['sampler_path']}"]
        else:
            arguments.append(f"load_checkpoint_path={saved['state_path']}")
    environment = {
        **os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-acceptance", "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "PYTHONSAFEPATH": "1", "TINKER_TELEMETRY": "0",
    }  # fmt: skip
    began = time.monotonic()
    print(f"{name}: python -m {program.module} {' '.join(arguments)}", flush=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(folder / "logs" / f"{name}.txt", "w") as output:
        done = subprocess.run(
            [python, "-m", program.module, *arguments], cwd=folder, env=environment, stdout=output, stderr=output,
            timeout=SECONDS, check=False,
        )  # fmt: skip
    text = pathlib.Path(output.name).read_text()
    assert done.returncode == 0, f"{name} failed, of {output.name}:\n{text[-3000:]}"
    lines = (log / "metrics.jsonl").read_text().splitlines()
    program.check([json.loads(line) for line in lines])
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def checkpoint(log: pathlib.Path) -> dict[str, str]:
    """The last that a program has saved: its state_path and sampler_path."""
    lines = (log / "checkpoints.jsonl").read_text().splitlines()
    found: dict[str, str] = json.loads(lines[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=PROGRAMS, metavar="NAME")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    write_folder(folder, arguments.model)
    for name in arguments.names:
        run(name, url=arguments.url, folder=folder, python=arguments.python)


if __name__ == "__main__":
    main()
