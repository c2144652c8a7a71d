"""A run that trains an adapter: killed, gone on with, evaluated, exported both ways, and started from what it exported.

Costs a minute and a half: three starts of a trainer and its servers, an evaluation.
"""

import os

import numpy as np
import pytest

from scalerl_jax.model import load_hf
from scalerl_jax.model.hf import to_hf
from scalerl_jax.model.lora import Lora, read_adapter
from scalerl_jax.system.files import read_object
from tests.support.processes import run_command
from tests.support.runs import config_of

LORA = (
    "--config.lora.rank=4", "--config.lora.targets=all-linear", "--config.optimizer.learning_rate=1e-3",
    "--config.model.sync_dtype=bfloat16", "--config.sft.model_path=before-the-warm-start",
)  # fmt: skip


@pytest.mark.slow
def test_an_adapter_is_trained_served_and_exported(tmp_path, flags, start):
    flags = [
        *flags, *LORA, "--config.max_steps=4", "--config.objective.filter_zero_variance=false",
        "--config.objective.entropy_bonus=0.1",  # no reward differs
    ]  # fmt: skip
    run = start(tmp_path / "run", *flags)
    run.until(lambda: len(run.metrics) >= 2, "two steps")
    run.kill()
    run.start().finish()
    rows, model = run.metrics, config_of(flags).model.path
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["lag_max"] == 0 and rows[0]["mismatch"] < 1e-4  # generators have the merged weights
    assert any(row["gradient_norm"] > 0 for row in rows)

    merged, adapter = str(tmp_path / "merged"), str(tmp_path / "adapter")
    for out, more in ((merged, ["--merge"]), (adapter, ["--adapter"])):
        done = run_command("scalerl_jax.export", f"--workdir={run.workdir}", f"--out={out}", *more)
        assert done.returncode == 0, done.stderr
    decoder, frozen = load_hf(model, dtype="bfloat16")
    lora = Lora.of(decoder, rank=4, alpha=32.0, targets="all-linear", folder="", seed=0)
    served = to_hf(lora.join(read_adapter(adapter, lora), frozen), decoder, "bfloat16")
    written = to_hf(load_hf(merged, dtype="bfloat16")[1], decoder, "bfloat16")
    assert all(np.array_equal(served[name], written[name]) for name in served)
    assert not np.array_equal(served["model.layers.0.mlp.up_proj.weight"], to_hf(frozen, decoder, "bfloat16")[
        "model.layers.0.mlp.up_proj.weight"
    ])  # fmt: skip

    done = run_command(
        "scalerl_jax.evaluate",
        f"--workdir={run.workdir}",
        "--steps=4",
        "--samples=2",
        f"--out={tmp_path / 'evaluated'}",
    )
    assert done.returncode == 0, done.stderr

    more = (f"--config.lora.adapter={adapter}", "--config.max_steps=1", "--config.optimizer.learning_rate=1e-6")
    further = start(tmp_path / "further", *flags, *more)
    further.finish()
    remark = "config.optimizer.learning_rate=1e-06: an adapter (config.lora) wants about ten times the rate"
    assert remark in further.output() and "wants about ten times" not in run.output()
    assert further.metrics[0]["mismatch"] < 1e-4
    other = start(tmp_path / "other", *flags, f"--config.lora.adapter={adapter}", "--config.lora.alpha=8")
    assert other.wait() == 2 and "lora_alpha is 32.0, config.lora.alpha=8" in other.output().splitlines()[-1]
    assert read_object(os.path.join(adapter, "adapter_config.json"))["base_model_name_or_path"] == model
