"""A run on agents, which ask the policy by HTTP through the run's own gateway; killed and gone on with."""

import json
import pathlib

import numpy as np
import pytest

from tests.support.runs import config_of, read
from tests.train.chaos import check_rows
from tests.train.test_episode_run import killed_fifty_times, with_environment

AGENT = """
import asyncio, json, os, time, urllib.request

class Agent:
    def rows(self, split):
        for n in range(24):
            yield {"prompt": f"{split[0]}{n}=", "answer": n % 4}

    async def run(self, row, client):
        def ask(**body):
            body = {"model": "policy", "return_token_ids": True, "temperature": 0.1, "min_p": 0.5, "top_p": 0, **body}
            body |= {"frequency_penalty": 0.5, "logit_bias": {"5": 9}, "sampling_params": {"repetition_penalty": 2}}
            headers = {"authorization": f"Bearer {client.api_key}", "content-type": "application/json"}
            asked = urllib.request.Request(f"{client.base_url}/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(asked) as reply:
                assert reply.headers["x-scalerl-sampling"] == "run"
                assert client.session in client.base_url
                return json.load(reply)["choices"][0]
        if row.text == "t11=":
            raise ValueError("it has asked for nothing")
        kind = int(row.answer)
        first = ask(prompt=row.text)
        path = first["prompt_token_ids"] + first["token_ids"]
        ones = first["text"].count("1")
        if kind == 1:  # two sub-agents that go on from the same turn, at once
            found = await asyncio.gather(*(asyncio.to_thread(ask, prompt=path + [5 + n]) for n in range(2)))
            ones += sum(one["text"].count("1") for one in found)
        elif kind == 2:  # another conversation
            ones += ask(prompt="1+")["text"].count("1")
        elif kind == 3 and row.text.startswith("t"):
            if row.text == "t3=":
                raise RuntimeError("a tool is broken")
            if row.text == "t7=":
                os._exit(3)
            for _ in range(9):
                ask(prompt="1+")  # more than there may be
        return {"reward": float(ones % 2), "metrics": {"ones": ones}}
"""


@pytest.mark.slow
def test_agents_are_trained_on_as_they_were_sampled(tmp_path, flags, start):
    """Costs a minute: two starts of a trainer and its servers."""
    flags = [
        *with_environment(flags, tmp_path / "agent.py", AGENT, "Agent"),
        "--config.max_steps=8",
        "--config.checkpoint.every=2",
        "--config.objective.filter_zero_variance=false",
        "--config.curriculum.no_positive_resampling_at=1.1",
        "--config.telemetry.samples_every=1",
    ]
    run = start(tmp_path / "run", *flags)
    run.until(lambda: len(run.metrics) >= 4, "four steps")
    run.kill()
    run.start().finish()

    rows, config = run.metrics, config_of(flags)
    assert len(rows) == 8
    check_rows(rows, config)
    assert rows[0]["lag_max"] == 0 and rows[0]["mismatch"] < 1e-4  # a path fed otherwise would have other log-probs
    assert max(row["lag_max"] for row in rows) <= config.pacing.max_off_policy_steps
    assert 1 < np.mean([row["score/branches"] for row in rows]) < 2
    assert sum(row["score/ended/failed"] for row in rows) > 0
    assert sum(row["score/ended/max_turns"] for row in rows) > 0
    assert "an episode failed: RuntimeError: a tool is broken" in run.output()
    assert "its process ended" in run.output() and "HTTP Error 400" not in run.output()
    evaluation = run.rows("evals.jsonl")[-1]
    assert evaluation["step"] == 8 and evaluation["prompts"] == 6
    assert "Traceback" not in run.output()
    assert not list(pathlib.Path(run.path("sessions")).iterdir())  # all are trained on, and that is saved
    for sample in map(json.loads, read(run.path("rollouts", "step-00000001.jsonl")).splitlines()):
        assert all(start < end for start, end in sample["replies"])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_whatever_is_killed_of_agents_nothing_is_lost_and_nothing_twice(tmp_path, flags, start):
    """A server, an agent, the process that plays all of them, or the trainer with its gateway: fifty times."""
    flags = with_environment(flags, tmp_path / "agent.py", AGENT, "Agent")
    killed_fifty_times(start, tmp_path / "run", flags, seed=11)
