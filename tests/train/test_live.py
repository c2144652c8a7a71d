"""A few updates with the real generator, which outlives a trainer that is killed."""

import json
import os

import grpc
import jax.numpy as jnp
import numpy as np
import pytest

from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.rollout_pb2_grpc import RolloutStub
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.learner.checkpoint import Checkpoints
from scalerl_jax.learner.make_trainer import make_trainer
from scalerl_jax.learner.packing import plain
from scalerl_jax.model import load_hf
from scalerl_jax.model.decoder_config import read_config
from scalerl_jax.run.jsonl import read_rows
from tests.support.runs import Run, config_of
from tests.support.servers import serve
from tests.train.comparing import saved_steps


def held(address: str) -> pb.Version:
    """The version a server decodes with."""
    with grpc.insecure_channel(address) as channel:
        return RolloutStub(channel).Status(pb.StatusRequest(), timeout=600).version


@pytest.mark.slow
def test_servers_ahead_of_the_checkpoint_are_brought_back(tmp_path, flags, model, start):
    last = 160
    flags = [
        *flags,
        f"--config.max_steps={last}",
        f"--config.evaluation.every={last}",
        "--config.telemetry.samples=16",  # all of a batch
        "--config.optimizer.ess_reference=0.999",
    ]
    config = config_of(flags)
    with serve(tmp_path, 2, "--engine=jax", f"--model={model}") as addresses:
        flags.append(f"--servers={','.join(addresses)}")
        run = start(tmp_path / "run", *flags, "--config.checkpoint.every=24")
        run.until(lambda: saved_steps(run), "a checkpoint is written")
        run.kill()
        saved = saved_steps(run)[-1]
        first = run.metrics[0]["incarnation"]

        # From here on there is no other checkpoint before the end, so there is time to look at the servers.
        run = start(tmp_path / "run", *flags, "--config.checkpoint.every=1000")

        def are_ahead() -> bool:
            versions = [held(address) for address in addresses]
            return all(version.incarnation > first and version.step > saved for version in versions)

        run.until(are_ahead, "both servers hold later weights")
        run.kill()
        assert saved_steps(run)[-1] == saved and are_ahead()
        ahead = held(addresses[0]).incarnation

        run.start()
        run.finish()
        second = run.metrics[-1]["incarnation"]
        assert second > ahead
        # A run that is over has left at least one with its last version; the other may have been on its way to it.
        versions = [held(address) for address in addresses]
        assert all(version.incarnation == second for version in versions), versions
        assert max(version.step for version in versions) == last, versions

    # 1. One timeline: every group once, no token older than k updates or than its trainer.
    rows = run.metrics
    assert [row["step"] for row in rows] == list(range(1, last + 1))
    assert [number for row in rows for number, _ in row["groups"]] == list(
        range(last * config.rollout.prompts_per_step)
    )
    assert [row["step"] for row in run.rows("evals.jsonl")] == [0, last]
    for row in rows:
        lags = [int(lag) for lag in row["lags"]]
        assert min(lags) >= 0 and max(lags) <= config.pacing.max_off_policy_steps
        assert row["incarnation"] == (first if row["step"] <= saved else second)
        if row["step"] > saved:
            assert max(lags) <= row["step"] - 1 - saved
    assert rows[-1]["optimizer_step"] > 0
    # Every row has every sign, those of the ratios where there was something to train on.
    for row in rows:
        assert all(0 <= row[name] <= 1 for name in ("truncated", "interrupted", "repetition", "repetitive"))
        if row["prompts_surviving"]:
            assert row["kl"] >= 0 and 0 <= row["mismatch_p99"] <= row["mismatch_max"] * (1 + 1e-5)
            sizes = [row[f"effective_sample_size{of}"] for of in ("", "_geometric", "_sequence")]
            assert all(0 < size <= 1 + 1e-6 for size in sizes) and sizes[1] >= 1 / row["completions_counted"] - 1e-6
            assert row["step_scale"] == pytest.approx(min(1, sizes[2] / 0.999) ** 0.5)
    assert min(row.get("step_scale", 1) for row in rows) < 0.999

    # 2. The weights that sampled are those of the timeline that survived: what the rollouts say of a token, who sampled
    #    it and with what probability, agrees with the checkpoint of that version. The first span of a completion has no
    #    older weights in its cache.
    trainer = make_trainer(config, read_config(model), max_segment=64)
    trainer.start(load_hf(model, trainer.mesh)[1])
    states = {0: trainer.state}
    for step in saved_steps(run):
        found = Checkpoints(only(tmp_path, run, step), keep=1).restore(trainer.abstract_state)
        assert found is not None and found.step == step
        states[step] = found.state
    tokenizer = Tokenizer(model)
    compared, moved = 0, 0.0
    for name in sorted(os.listdir(run.path("rollouts"))):
        for sample in read_rows(run.path("rollouts", name)):
            version, _, end = sample["versions"][0]
            if version not in states:
                continue
            prompt = tokenizer.encode_prompt(sample["prompt"])
            tokens = np.array(prompt + sample["token_ids"][:end], np.int32)
            sampled = np.array([not any(a <= t < b for a, b in sample["forced"]) for t in range(end)])
            recorded = np.array(sample["logprobs"][:end])[sampled]
            trainer.state = states[version]
            scored = trainer.score([plain(tokens)])[0][len(prompt) :][sampled]
            np.testing.assert_allclose(scored, recorded, atol=1e-4, err_msg=json.dumps(sample["versions"]))
            trainer.state = states[last]
            other = trainer.score([plain(tokens)])[0][len(prompt) :][sampled]
            moved = max(moved, float(jnp.abs(other - recorded).max()))
            compared += int(sampled.sum())
    assert compared > 100  # the first batch after either start is sampled with saved weights
    assert moved > 1e-2  # other weights would have been noticed


def only(tmp_path, run: Run, step: int) -> str:
    """A checkpoint folder in which `step` is the newest."""
    folder = tmp_path / f"only-{step}"
    folder.mkdir()
    os.symlink(run.path("checkpoints", str(step)), folder / str(step))
    return str(folder)
