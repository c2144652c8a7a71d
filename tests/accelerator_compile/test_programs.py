"""Every device program of trainer and engine, compiled for accelerators that are not here, and what its text must say.

One update for TPUs and the engine's programs in `make test-full`, 60 CPU seconds; the others, and all of those for
GPUs, in `make test-long`.
"""

import json
import os
import pathlib

import pytest

from scalerl_jax.model.remat import REMATS
from tests.accelerator_compile.programs import UPDATES
from tests.planning.compilers import GPU, TPU, needs_gpu_compiler, needs_tpu_compiler
from tests.support.processes import run_command

SECONDS = 1400  # a loaded machine takes ten times the time of an idle one
pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 100)]
CHIPS = {
    "tpu": ("v5e:2x2", TPU),
    "hopper": ("h100:4", GPU),
    "ampere": ("a100-80gb:4", GPU),
    "blackwell": ("b200:4", GPU),
}


def compiled(chip: str, *cases: str):
    """name of the program -> facts."""
    topology, packages = CHIPS[chip]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = run_command(
        "tests.accelerator_compile.programs", topology, *cases, packages=pathlib.Path(packages), seconds=SECONDS,
        environment=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def check_update(found, case: str, chip: str) -> None:
    _, mesh, fields, _, precision = UPDATES[case]
    accumulate, apply, score = (found[f"{case}: {name}"] for name in ("accumulate", "apply", "score"))
    # Gradients, the loss's sums and the state are changed where they are, and none is copied.
    assert accumulate["taken_over"] == accumulate["carried"] and apply["taken_over"] == apply["state"]
    assert apply["copied"] < 1024 and apply["temporaries"] < 12 * 2**20
    for name, one in found.items():
        if "compare" not in name and "apply" not in name:
            dtypes = {"bf16 x bf16"} if precision.compute == "bfloat16" else {"f32 x f32"}
            # The router's logits are float32, and its weights.
            dtypes |= {"bf16 x f32", "f32 x f32", "f32 x bf16"} if "experts" in case or "router" in case else set()
            assert set(one["products"]) <= dtypes, name
    # Weights are gathered, and gradients summed, along the axes that cut them.
    axes = set("+".join(accumulate["received"]).split("+"))
    assert axes == {axis for axis, count in mesh.items() if count > 1}
    assert accumulate["estimated"] == pytest.approx(accumulate["allocated"], rel=0.03)
    if chip != "tpu":  # there the peak has what is on the chip too
        # What temporaries take lies between what is in use at once and 1.08 of all; of the 8B 1.004.
        assert accumulate["peak"] <= accumulate["estimated"] < 1.08 * accumulate["peak"]
    kernels = "".join(accumulate["attention"])
    if fields.get("attention") == "blocks" or precision.compute == "float32":
        assert kernels == ""
    else:
        assert "splash" in kernels if chip == "tpu" else "SoftmaxBackward" in kernels
    assert score["temporaries"] < accumulate["temporaries"] or chip == "tpu"


def check_engine(found, chip: str) -> None:
    found = {name.partition(": ")[2]: one for name, one in found.items()}
    for name, one in found.items():
        assert set(one["products"]) <= {"bf16 x bf16"}, name
        assert one["cache_dtype"] == "bfloat16"
        kernel = "live_attention" if chip == "tpu" else "fmhaSoftmax"
        assert one["attention"] == ([kernel] if name == "decode, long caches" else []), name
        if name in ("prefill", "hidden", "score"):
            continue
        assert one["taken_over"] >= one["caches"], name
        # On a TPU other small arrays are laid out again, and none of the caches is.
        assert one["copied"] < one["cache"] / (10 if chip == "tpu" else 100), name
    # Scores need no second copy of the weights.
    for name in ("hidden", "score"):
        assert found[name]["temporaries"] < found[name]["weights"] / 2, name
    whole, half = found["decode"], found["decode, half of the slots"]
    # Of all slots a step works on the caches where they are; of half of them on a copy of their part.
    assert whole["temporaries"] < whole["cache"] * (whole["caches"] / 4 if chip == "tpu" else 1)
    assert half["temporaries"] < 0.6 * half["caches"] * half["cache"]


@needs_tpu_compiler
def test_an_update_for_tpus():
    check_update(compiled("tpu", "remat block"), "remat block", "tpu")


@needs_tpu_compiler
@pytest.mark.parametrize("case", ["engine", pytest.param("engine, narrow heads", marks=pytest.mark.long)])
def test_the_engine_for_tpus(case):
    check_engine(compiled("tpu", case), "tpu")


@needs_tpu_compiler
@pytest.mark.long
@pytest.mark.parametrize("case", ["remat save_products", "context", "experts", "reference", "teacher"])
def test_updates_for_tpus(case):
    check_update(compiled("tpu", case), case, "tpu")


@needs_gpu_compiler
@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in UPDATES if not case.startswith("remat")])
def test_updates_for_hopper(case):
    check_update(compiled("hopper", case), case, "hopper")


@needs_gpu_compiler
@pytest.mark.long
def test_remats_for_hopper():
    """Each takes less memory than the one before; `full` only of more blocks than these four."""
    cases = [f"remat {name}" for name in REMATS]
    found = compiled("hopper", *cases)
    for case in cases:
        check_update({name: one for name, one in found.items() if name.startswith(case + ":")}, case, "hopper")
    sizes = [found[f"{case}: accumulate"]["temporaries"] for case in cases]
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True), sizes


@needs_gpu_compiler
@pytest.mark.long
@pytest.mark.parametrize(
    ("chip", "case"), [*((chip, "engine") for chip in CHIPS if chip != "tpu"), ("hopper", "engine, narrow heads")]
)
def test_the_engine_for_gpus(chip, case):
    check_engine(compiled(chip, case), chip)


@needs_gpu_compiler
@pytest.mark.long
@pytest.mark.parametrize("chip", ["ampere", "blackwell"])
def test_an_update_for_other_gpus(chip):
    check_update(compiled(chip, "remat block"), "remat block", chip)
