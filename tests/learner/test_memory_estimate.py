"""What memory the trainer needs is told beforehand, is what it then takes, and too little of it ends the run there."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from scalerl_jax.learner import memory_estimate, optimizer
from scalerl_jax.learner.trainer import Layout
from scalerl_jax.model import init_params
from scalerl_jax.system import memory
from tests.support.params import DECODER
from tests.support.paths import ROOT
from tests.support.trainers import trainer_of

LAYOUT = Layout(seq_len=64, rows=2, max_segment=20, logprob_chunk=16, remat="none")


def trainer_at(layout=LAYOUT):
    trainer = trainer_of(DECODER, layout)
    trainer.start(init_params(DECODER, jax.random.key(0), trainer.mesh))
    return trainer


@pytest.fixture(scope="module")
def checked():
    trainer = trainer_at()
    before = jax.device_get(trainer.state)
    return trainer, before, memory_estimate.check_memory(trainer, longest=20)


def test_the_line_says_what_is_needed_and_what_there_is(checked):
    trainer, before, said = checked
    assert said.startswith("memory: host ") and "GiB of " in said
    for part in ("now", "gradient", "weights sent", "an update's temporaries", "a checkpoint and a version"):
        assert part in said
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state), before)


def test_needs_are_those_of_the_arrays(checked):
    needs = memory_estimate.needs_of(checked[0])
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(checked[0].state["params"]))
    assert needs.gradient == needs.sent == parameters  # the wire is float32
    compensation = sum(leaf.nbytes for leaf in jax.tree.leaves(optimizer.vectors(checked[0].state["params"])))
    assert 0 < compensation < parameters / 100
    assert 0 <= needs.state - 3 * parameters - compensation <= 64
    assert needs.version == needs.state + needs.sent
    assert needs.temporaries > 2 * 64 * DECODER.hidden_size * 4
    assert needs.device == needs.kept + max(needs.temporaries, needs.ending)


@pytest.mark.parametrize(
    ("change", "said", "unsaid"),
    [
        ({}, ["micro_batch_rows below 2", "remat=save_products (it is none)", "seq_len=20 (it is 64)"], []),
        ({"remat": "full", "rows": 1}, ["seq_len=20"], ["micro_batch_rows", "remat"]),
        ({"remat": "block", "seq_len": 20, "max_segment": 20}, ["remat=full (it is block)"], ["seq_len"]),
    ],
)
def test_too_little_is_told_before_anything_runs(checked, monkeypatch, change, said, unsaid):
    trainer, layout = checked[0], Layout(**(vars(LAYOUT) | change))
    monkeypatch.setattr(trainer, "compile", lambda: None)
    monkeypatch.setattr(trainer, "rehearse", lambda: pytest.fail("it was run"))
    monkeypatch.setattr(trainer, "layout", layout)
    monkeypatch.setattr(trainer, "rows_per_shard", layout.rows)
    taken = memory.resident()
    monkeypatch.setattr(memory, "resident", lambda: taken)
    monkeypatch.setattr(memory, "available", lambda: 100_000)
    with pytest.raises(
        memory_estimate.TooLittleMemory, match=r"^too little memory: host .* what would make it fit: "
    ) as error:
        memory_estimate.check_memory(trainer, longest=20)
    line = str(error.value)
    assert "\n" not in line and "more devices" in line
    assert all(words in line for words in said) and not any(words in line for words in unsaid), line


def test_too_little_by_the_forecast_may_be_tried_all_the_same(checked, monkeypatch):
    trainer, _, _ = checked
    ran = []
    monkeypatch.setattr(trainer, "compile", lambda: None)
    monkeypatch.setattr(trainer, "rehearse", lambda: ran.append(True))
    taken = memory.resident()
    monkeypatch.setattr(memory, "resident", lambda: taken)
    monkeypatch.setattr(memory, "available", lambda: 100_000)
    said = memory_estimate.check_memory(trainer, longest=20, refuse=False)
    assert said.startswith("too little memory, tried all the same: host ") and ran


def test_what_is_there_beside_the_step_does_not_get_smaller_by_smaller_rows(checked, monkeypatch):
    """State, gradient and weights alone are too much: fewer rows would not help, and are not proposed."""
    monkeypatch.setattr(checked[0], "compile", lambda: None)
    monkeypatch.setattr(memory, "resident", lambda: 1000)
    monkeypatch.setattr(memory, "available", lambda: 1000)
    with pytest.raises(memory_estimate.TooLittleMemory) as error:
        memory_estimate.check_memory(checked[0], longest=20)
    assert "what would make it fit: more devices" in str(error.value)


@pytest.mark.parametrize("step", ["compile", "rehearse"])
def test_an_allocation_that_fails_is_the_same_line(checked, monkeypatch, step):
    def fail():
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.\n  a long table\n"
        )

    monkeypatch.setattr(checked[0], "compile", lambda: None)
    monkeypatch.setattr(checked[0], step, fail)
    with pytest.raises(
        memory_estimate.TooLittleMemory, match=r"trying to allocate 17179869184 bytes.*make it fit: "
    ) as error:
        memory_estimate.check_memory(checked[0], longest=20)
    assert "\n" not in str(error.value) and "table" not in str(error.value)


def test_another_failure_is_not_taken_for_it(checked, monkeypatch):
    def fail():
        raise jax.errors.JaxRuntimeError("INTERNAL: a kernel failed")

    monkeypatch.setattr(checked[0], "compile", lambda: None)
    monkeypatch.setattr(checked[0], "rehearse", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        memory_estimate.check_memory(checked[0], longest=20)


PROGRAM = """
import dataclasses, json
import jax, numpy as np
from scalerl_jax.learner import memory_estimate
from scalerl_jax.learner.packing import plain
from scalerl_jax.learner.trainer import Layout
from scalerl_jax.model import init_params
from scalerl_jax.system import memory
from tests.support.trainers import trainer_of, update
from tests.support.params import DECODER

decoder = dataclasses.replace(DECODER, hidden_size=128, intermediate_size=256, head_dim=32)
layout = Layout(seq_len=512, rows=48, max_segment=64, remat="none")
trainer = trainer_of(decoder, layout)
trainer.start(init_params(decoder, jax.random.key(0), trainer.mesh))
trainer.compile()
memory.trim()
(found,) = memory_estimate.forecast(trainer)
trainer.rehearse()
update(trainer, [plain(np.arange(65, dtype=np.int32) % 61) for _ in range(8 * 48 + 1)])  # two micro-batches
print(json.dumps({
    "forecast": found.needed - memory_estimate.needs_of(trainer).version, "before": found.parts["now"],
    "measured": memory.peak_resident(),
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not memory.peak_resident(), reason="the system tells no peak")
def test_the_forecast_is_what_updates_then_take():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["forecast"] > 2 * found["before"], found  # most of it is the update's
    assert found["measured"] == pytest.approx(found["forecast"], rel=0.1), found
