"""TRL's GRPO trainer as the peer of whole RL steps: what bench_step.py and bench_trl_episodes.py have in common.

TRL's environment, which has no jax:

    python -m venv .venv-trl
    .venv-trl/bin/pip install torch==2.13.0 transformers==5.17.0 trl==1.16.0
"""

import dataclasses
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from tests.support.paths import ROOT

CONFIG = f"--config={ROOT / 'configs' / 'quickstart.py'}"
WARM_UP = 2  # steps of a run that are not counted
PLAIN = {"continuous": False, "cache": None, "one_thread": False}


@dataclasses.dataclass
class Steps:
    """Of one side, a value a step: seconds, tokens, mean turns of a completion, share of right ones."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    tokens: list[float] = dataclasses.field(default_factory=list)
    turns: list[float] = dataclasses.field(default_factory=list)
    right: list[float] = dataclasses.field(default_factory=list)

    def extend(self, other: "Steps") -> None:
        for field in dataclasses.fields(self):
            getattr(self, field.name).extend(getattr(other, field.name))


def command(name: str, *arguments: str) -> None:
    program = pathlib.Path(sys.executable).with_name(name)
    done = subprocess.run([program, CONFIG, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")


def flags_of(overrides: dict[str, object]) -> list[str]:
    return [f"--config.{name}={value}" for name, value in overrides.items()]


def ours(model: str, folder: pathlib.Path, overrides: dict[str, object], *, steps: int) -> Steps:
    """The steps after the first ones; tokens are those trained on."""
    command(
        "scalerl-train",
        f"--workdir={folder}",
        f"--config.model.path={model}",
        f"--config.max_steps={steps + 1}",
        f"--config.checkpoint.every={steps + 1}",
        f"--config.evaluation.every={steps + 1}",
        "--config.evaluation.prompts=8",
        "--config.evaluation.samples=1",
        *flags_of(overrides),
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "length_mean" in row]
    assert len(rows) == steps + 1
    seconds = [later["time"] - earlier["time"] for earlier, later in itertools.pairwise(rows)]
    counted = rows[1 + WARM_UP :]
    return Steps(
        seconds[WARM_UP:],
        [row["length_mean"] * row["completions_counted"] for row in counted],
        [row.get("score/turns", 1) for row in counted],
        [row["pass_rate"] for row in counted],
    )


def trl(python: str, asked: dict, *, steps: int) -> Steps | None:
    """The same of TRL, of all steps but the first; None where TRL cannot do it this way."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({**asked, "steps": steps + 1}, file)
        file.flush()
        threads = {"OMP_NUM_THREADS": "1"} if asked["one_thread"] else {}
        program = ROOT / "tests" / "benchmarks" / "trl_steps.py"
        # From a folder of its own: TRL takes a folder named vllm for the package.
        with tempfile.TemporaryDirectory() as where:
            done = subprocess.run(
                [pathlib.Path(python).absolute(), program, file.name],
                capture_output=True, text=True, check=False, cwd=where,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **threads},
            )  # fmt: skip
    if done.returncode:
        print(f"  not to be had: {done.stderr.strip().splitlines()[-1][:160]}")
        return None
    return Steps(**json.loads(done.stdout.strip().splitlines()[-1]))


def fastest(python: str, asked: dict) -> dict:
    """TRL's way of taking a step that takes least time here."""
    best, least = None, float("inf")
    for passes in (1, 3):
        for name, way in (
            ("generate, dynamic cache", {}),
            ("the same, one thread", {"one_thread": True}),  # on a busy machine threads wait for each other
            ("generate, static cache", {"cache": "static"}),
            ("continuous batching", {"continuous": True}),
        ):
            if passes > 1 and "continuous" in way:  # it knows no passes when it samples, and is the slowest by far
                continue
            print(f"TRL, {name}, {passes} passes a step:", flush=True)
            tried = {**asked, **PLAIN, **way, "micro_batch": asked["completions"] // passes}
            found = trl(python, tried, steps=2)
            if found is not None:
                print(f"  {min(found.seconds):.2f} s a step")
                if min(found.seconds) < least:
                    best, least = tried, min(found.seconds)
    if best is None:
        sys.exit("TRL did not run; see above")
    return best


def compare(
    name: str,
    model: str,
    peer: dict,
    overrides: dict[str, object],
    folder: pathlib.Path,
    *,
    python: str,
    steps: int,
    rounds: int,
) -> None:
    """Runs both sides in turn and prints their medians and the ratio; peer: what fastest() returns."""
    results = {"here": Steps(), "TRL": Steps()}
    for number in range(rounds):
        results["here"].extend(ours(model, folder / f"run-{number}", overrides, steps=steps))
        found = trl(python, peer, steps=steps)
        assert found is not None, "it ran before"
        results["TRL"].extend(Steps(*(getattr(found, field.name)[WARM_UP:] for field in dataclasses.fields(Steps))))
        medians = {side: statistics.median(found.seconds) for side, found in results.items()}
        print(f"round {number + 1}: so far {medians['here']:.2f} s a step here, {medians['TRL']:.2f} s TRL", flush=True)
    for side, found in results.items():
        seconds = statistics.median(found.seconds)
        print(
            f"{side:5} {60 / seconds:6.1f} steps a minute   {seconds:.2f} s a step ({min(found.seconds):.2f} to "
            f"{max(found.seconds):.2f})   {statistics.median(found.tokens):,.0f} tokens a step"
            f" in {statistics.mean(found.turns):.2f} turns, {statistics.mean(found.right):.2f} right"
        )
    ratio = statistics.median(results["TRL"].seconds) / statistics.median(results["here"].seconds)
    print(f"{name}: ratio {ratio:.2f}")
