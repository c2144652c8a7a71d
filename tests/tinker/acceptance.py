"""Runs programs of tinker-cookbook, as they are, against a server; none of it needs a network.

    python -m tests.tinker.acceptance NAME... --url=http://127.0.0.1:8000 --model=DIR --folder=DIR [--python=PYTHON]

NAME is a row of PROGRAMS, or the path of a tutorial of the cookbook's source archive: of version 0.6.1, 101, 103, 104,
202 to 204, 301 to 304 and 402 to 406 need no network. They import marimo and matplotlib, and the model must know
`<|im_end|>`, be at least 32 wide in each product and have a context of 2,048 tokens.

The server must have been started with --names=Qwen/Qwen3.5-9B-Base, which is what the programs call the model (for
tutorials also Qwen/Qwen3.5-4B), and --maximum_tokens=128 or more (2,048). PYTHON has tinker-cookbook; by default it is
this one.

The programs run in --folder, where Qwen/Qwen3.5-9B-Base is a link to the model's folder, for its tokenizer, and each
data set that they load by name is a folder of that name: both libraries take a folder before they ask the network.
What they do is in the metrics that they write; each row of PROGRAMS has what is to be there.

The model is a warm start on traces of the programs' tasks, of which a part is wrong, so that there is something to
learn; --traces=FILE writes them, with no NAME, for scalerl-sft --config.sft.traces.
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
from collections.abc import Callable, Mapping, Sequence

MODEL = "Qwen/Qwen3.5-9B-Base"  # the cookbook renders it as "User: ...\n\nAssistant: ..."
CHAT_MODEL = "Qwen/Qwen3.5-4B"  # of tutorials
SECONDS = 1800.0  # that a program may take
_RECIPES = "tinker_cookbook.recipes"

# As python -m, but gone at its end: a daemon thread of the client may be in compiled code, where Python then aborts.
_RUN = (
    "import os, runpy, sys; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True); "
    "sys.stdout.flush(); os._exit(0)"
)
BATCH = 64  # of sl_loop
_STEPS = 150  # of sl_loop

Metrics = list[dict[str, float]]  # of each step


@dataclasses.dataclass(frozen=True)
class Program:
    module: str
    arguments: tuple[str, ...]
    check: Callable[[Metrics], None]  # raises AssertionError
    begins: str = ""  # the program whose last checkpoint is the teacher


def series(metrics: Metrics, key: str) -> list[float]:
    found = [row[key] for row in metrics if key in row]
    assert found, f"no step has {key}: {sorted(set().union(*metrics))}"
    return found


def ends(metrics: Metrics, key: str, *, quarters: bool) -> tuple[float, float]:
    """(the first value, the last one). quarters: the means of the first and the last quarter of the steps."""
    values = series(metrics, key)
    part = len(values) // 4 if quarters else 1
    first, last = (sum(some) / part for some in (values[:part], values[-part:]))
    print(f"{key}: {first:.3f} -> {last:.3f} in {len(values)} steps")
    return first, last


def falls(key: str, *, by: float, quarters: bool = False) -> Callable[[Metrics], None]:
    """The last value is below the first by at least this factor."""

    def check(metrics: Metrics) -> None:
        first, last = ends(metrics, key, quarters=quarters)
        assert last < first / by, f"{key} went from {first:.3f} to {last:.3f}"

    return check


def rises(key: str, *, by: float) -> Callable[[Metrics], None]:
    """The mean of the last quarter of the steps is above that of the first."""

    def check(metrics: Metrics) -> None:
        first, last = ends(metrics, key, quarters=True)
        assert last > first + by, f"{key} went from {first:.3f} to {last:.3f}"

    return check


def _math_rl(*more: str) -> Program:
    size = ("groups_per_batch=16", "group_size=16", "max_tokens=12", "learning_rate=2e-4", "lora_rank=0")
    # A step has 256 answers: the difference of two means of ten steps is within .03 by chance, at four deviations.
    return Program(
        f"{_RECIPES}.math_rl.train",
        ("env=arithmetic", "loss_fn=importance_sampling", *size, "max_steps=40", "eval_every=0", *more),
        rises("env/all/correct", by=0.04),
    )


def _self_distillation(check: Callable[[Metrics], None], *more: str) -> Program:
    size = ("groups_per_batch=16", "max_tokens=12", "learning_rate=1e-4", "lora_rank=0", "max_steps=16", "topk=20")
    return Program(
        f"{_RECIPES}.sdft.train",
        ("dataset=sciknoweval", *size, "max_context_length=700", "eval_every=0", "save_every=0", *more),
        check,
    )


PROGRAMS = {
    "sl_loop": Program(
        f"{_RECIPES}.sl_loop",
        (f"batch_size={BATCH}", "learning_rate=1e-3", "max_length=128", "lora_rank=0", "save_every=0"),
        falls("train_mean_nll", by=3),
    ),
    "math_rl": _math_rl(),
    "math_rl_async": _math_rl("max_steps_off_policy=2"),
    "math_rl_stream": _math_rl(
        "stream_minibatch_config.groups_per_batch=16", "stream_minibatch_config.num_minibatches=4"
    ),
    "rl_loop": Program(
        f"{_RECIPES}.rl_loop",
        ("batch_size=16", "group_size=8", "learning_rate=2e-4", "lora_rank=0", "max_tokens=16", "save_every=0",
         "loss_fn=importance_sampling", "max_steps=24"),
        rises("reward/total", by=0.1),
    ),
    "guess_number": Program(
        f"{_RECIPES}.multiplayer_rl.guess_number.train",
        ("batch_size=8", "group_size=8", "learning_rate=2e-3", "max_tokens=12", "eval_every=0", "save_every=0",
         "max_steps=12"),
        rises("env/all/reward/total", by=0.5),  # of its ten guesses each that is in no form costs 1
    ),
    # The student is the base model, the teacher the model that sl_loop has trained.
    "distillation": Program(
        f"{_RECIPES}.distillation.on_policy_distillation",
        ("groups_per_batch=8", "group_size=4", "max_tokens=12", "learning_rate=2e-3", "lora_rank=32", "max_steps=20",
         "dataset=deepmath", "eval_every=0"),
        falls("teacher_kl", by=1.3),
        "sl_loop",
    ),
    "dpo": Program(
        f"{_RECIPES}.preference.dpo.train",
        ("dataset=hhh", "batch_size=32", "max_length=128", "learning_rate=1e-3", "max_steps=16"),
        rises("margin", by=0.5),
    ),
    # The teacher is the base model, which sees the answer; its most likely tokens are soft targets.
    "self_distillation": _self_distillation(falls("grad_norm:mean", by=1.5, quarters=True)),
    "self_distillation_reverse": _self_distillation(
        falls("sdft/reverse_kl_mean", by=1.3, quarters=True), "reverse=True"
    ),
}  # fmt: skip


def write_folder(folder: pathlib.Path, model: pathlib.Path) -> None:
    """The folder in which the programs run."""
    for name in (MODEL, CHAT_MODEL):
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(model.absolute(), target_is_directory=True)
    rng = random.Random(0)
    talks, questions, sums, pairs = [], [], [], []
    for _ in range(_STEPS * BATCH):
        number = rng.randint(10, 99)
        question = f"Say {number} backwards."
        questions.append({"question": question})
        said = [("user", question), ("assistant", str(number)[::-1])]
        better, worse = (f"\n\nHuman: {question}\n\nAssistant: {text}" for text in ("No.", str(number)))
        pairs.append({"chosen": better, "rejected": worse})
        talks.append({"messages": [{"role": role, "content": text} for role, text in said]})
        x, y = rng.randint(0, 9), rng.randint(0, 9)
        sums.append({"question": f"What is {x} + {y}?", "answer": f"It is\n#### {x + y}"})
    _write_rows(folder / "HuggingFaceH4" / "no_robots", "default", talks)
    _write_rows(folder / "zwhe99" / "DeepMath-103K", "default", questions)
    _write_rows(folder / "openai" / "gsm8k", "main", sums)
    choices = [(x, rng.randint(10, 99)) for x in rng.choices(range(10, 100), k=400)]
    science = [
        {"question": "Which is larger?", "choices": {"label": ["A", "B"], "text": [f"{x}", f"{y}"]},
         "answerKey": "A" if x > y else "B", "domain": "Chemistry", "details": {"level": "L3"}, "type": "mcq"}
        for x, y in choices
    ]  # fmt: skip
    _write_rows(folder / "hicai-zju" / "SciKnowEval", "default", science, "test")
    _write_rows(folder / "Anthropic" / "hh-rlhf", "default", pairs[:544], "train", "test")


def write_traces(path: pathlib.Path) -> None:
    """Of math_rl, rl_loop and guess_number, as the programs render them."""
    rng, rows = random.Random(1), []
    for i in range(30_000):
        slip = rng.choice([-10, -2, -1, 1, 2, 10]) * (rng.random() < 0.35)
        if i % 10 == 0:
            x, y = rng.randint(0, 9), rng.randint(0, 9)
            boxed = " Provide a numerical answer without units, written inside \\boxed{}."
            prompt = (
                f"User: How many r's are in strawberry?{boxed}\n\nAssistant: Let's spell the word out and number all "
                "the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and "
                "9. "
                f"\\boxed{{3}}\n\nUser: What is {x} + {y}?{boxed}\n\n"
            )
            answer = f"\\boxed{{{x + y + slip}}}"
        elif i % 10 == 1:
            prompt = (
                "System: Your job is to guess a integer between 0 and 1024. You can output your guess with the format "
                "Guess: <guess> (without the angle brackets), and say nothing else. Then we will tell you whether you "
                "guess is too high, too low, or correct.\n\n"
            )
            for _ in range(rng.randint(0, 5)):
                prompt += f"Player: Guess: {rng.randint(0, 1024)}\n\nUser: Too {rng.choice(['low', 'high'])}\n\n"
            answer = f"{'Is it' if slip else 'Guess:'} {rng.randint(0, 1024)}"
        else:
            x, y = rng.randint(0, 100), rng.randint(0, 100)
            prompt = f"User: What is 4 + 5?\n\nAssistant: 9\n\nUser: What is {x} + {y}?\n\n"
            answer = f"{x + y + slip}"
        rows.append({"prompt": f"{prompt}Assistant:", "completion": f" {answer}\n\nUser:"})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _write_rows(folder: pathlib.Path, name: str, rows: Sequence[Mapping[str, object]], *splits: str) -> None:
    """name: of the data set's configuration. splits: by default `train`; each has all rows."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = "\n".join(f"  - split: {split}\n    path: rows.jsonl" for split in splits or ("train",))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}\n---\n")


def run(name: str, *, url: str, folder: pathlib.Path, python: str) -> None:
    """Raises AssertionError where the program fails, or has not done what it was to do."""
    program, log = PROGRAMS[name], folder / "logs" / name
    shutil.rmtree(log, ignore_errors=True)
    arguments = [f"model_name={MODEL}", f"log_path={log}", *program.arguments]
    if name not in ("sl_loop", "rl_loop"):
        arguments += ["renderer_name=role_colon", "behavior_if_log_dir_exists=delete"]
    if program.begins:
        saved = checkpoint(folder / "logs" / program.begins)
        arguments += [f"teacher_model={MODEL}", f"teacher_checkpoint={saved['sampler_path']}"]
    began = time.monotonic()
    print(f"{name}: python -m {program.module} {' '.join(arguments)}", flush=True)
    _call(name, [python, "-c", _RUN, program.module, *arguments], url, folder)
    lines = (log / "metrics.jsonl").read_text().splitlines()
    program.check([json.loads(line) for line in lines])
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def run_tutorial(path: str, *, url: str, folder: pathlib.Path, python: str) -> None:
    """Raises AssertionError where it fails."""
    began, name = time.monotonic(), pathlib.Path(path).stem
    _call(name, [python, os.path.abspath(path)], url, folder)
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def _call(name: str, command: list[str], url: str, folder: pathlib.Path) -> None:
    """Raises AssertionError where it fails. What it prints is in logs/NAME.txt."""
    environment = {
        **os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-acceptance", "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "PYTHONSAFEPATH": "1", "TINKER_TELEMETRY": "0",
        "MPLBACKEND": "Agg", "TINKER_COOKBOOK_RUNS_DIR": str(folder / "runs"),
    }  # fmt: skip
    output = folder / "logs" / f"{name}.txt"
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(output, "w") as file:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=file, stderr=file, timeout=SECONDS, check=False
        )
    assert done.returncode == 0, f"{name} failed, of {output}:\n{output.read_text()[-3000:]}"


def checkpoint(log: pathlib.Path) -> dict[str, str]:
    """The last that a program has saved: its state_path and sampler_path."""
    lines = (log / "checkpoints.jsonl").read_text().splitlines()
    found: dict[str, str] = json.loads(lines[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--traces", type=pathlib.Path)
    parser.add_argument("--url")
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--python", default=sys.executable)
    arguments = parser.parse_args()
    if arguments.traces:
        write_traces(arguments.traces)
        return
    if not (arguments.names and arguments.url and arguments.model and arguments.folder):
        parser.error("NAME..., --url, --model and --folder, or --traces")
    if unknown := {name for name in arguments.names if name not in PROGRAMS and not os.path.isfile(name)}:
        parser.error(f"{min(unknown)} is not one of {', '.join(PROGRAMS)}, and no tutorial")
    folder = arguments.folder.absolute()
    write_folder(folder, arguments.model)
    for name in arguments.names:
        (run if name in PROGRAMS else run_tutorial)(name, url=arguments.url, folder=folder, python=arguments.python)


if __name__ == "__main__":
    main()
