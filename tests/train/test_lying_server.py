"""A server that begins to lie about its log-probs, beside an honest one: named, sent away, and nothing of it counts."""

import signal
from collections.abc import Callable

import numpy as np
import pytest

from scalerl_jax.rollouts.parity import GROSS
from tests.support.runs import Run, config_of
from tests.support.servers import serve

AFTER = 120  # completions: the probe, the evaluation of step 0, and some groups

# What each lie does to what is trained on: where it is gross, no group of it is.
LIES = {
    "shifted_logprobs:-0.5": "gross",
    "shifted_logprobs:0.5": "gross",
    "flat_logprobs:-30": "gross",
    "random_tokens": "gross",
    "noisy_logprobs:1": "subtle",
}
IN_TEST_FULL = ("shifted_logprobs:-0.5", "noisy_logprobs:1")


def fault(lie: str) -> str:
    kind, *value = lie.split(":")
    return f"--faults={':'.join([kind, str(AFTER), *value])}"


@pytest.fixture(scope="module")
def large_flags(flags) -> list[str]:
    """Groups of enough tokens to judge one by; no probe that would find it by itself."""
    return [
        *flags,
        "--config.max_steps=16",
        "--config.rollout.group_size=16",
        "--config.optimizer.learning_rate=3e-4",
        "--config.parity.every=0",
        "--config.parity.share=0.1",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "lie", [lie if lie in IN_TEST_FULL else pytest.param(lie, marks=pytest.mark.long) for lie in LIES]
)
def test_a_server_that_begins_to_lie_is_sent_away(tmp_path, large_flags, model, start, lie):
    engine = ("--engine=jax", f"--model={model}")
    (tmp_path / "honest").mkdir()
    (tmp_path / "liar").mkdir()
    with serve(tmp_path / "honest", 1, *engine) as honest, serve(tmp_path / "liar", 1, *engine, fault(lie)) as liar:
        # Noise shows after some hundreds of tokens, of which each batch has about fifty.
        flags = [*large_flags, "--config.max_steps=100000"]
        run = start(tmp_path / "run", *flags, f"--servers={honest[0]},{liar[0]}")

        def gone_for_steps(rows: list[dict]) -> bool:
            sent_away = [row["step"] for row in rows if row["parity"]["sent_away"]]
            return bool(sent_away) and len(rows) >= sent_away[0] + 4 and sum("ratio" in row for row in rows) > 8

        finish_once(run, gone_for_steps, "the liar is sent away, and the run goes on")
    config, rows = config_of(flags), run.metrics
    # The run went on, and every group was trained on once.
    assert [n for row in rows for n, _ in row["groups"]] == list(range(len(rows) * config.rollout.prompts_per_step))
    evaluated, due = [row["step"] for row in run.rows("evals.jsonl")], list(range(0, len(rows) + 1, 4))
    assert evaluated in (due, due[:-1])  # the last one may have been under way
    # The one that lied is named, with what was found; the other one is not.
    (said,) = [line for line in run.output().splitlines() if "sent away" in line]
    assert liar[0] in said and ("mean importance ratio is" in said or "differ from the trainer's by" in said)
    assert sum(row["parity"]["sent_away"] for row in rows) == 1
    assert sum(row["parity"]["taken_back"] for row in rows) > 0
    trained = [row for row in rows if "ratio" in row]
    gone = next(n for n, row in enumerate(rows) if row["parity"]["sent_away"])
    if LIES[lie] == "gross":  # no group of what it said then was trained on
        # But for those it was at when it began, two at most: of them it had said enough honestly to be within GROSS.
        begun = [row for row in trained if row["mismatch_max"] >= 3 or abs(row["ratio"] - 1) >= 0.1]
        told = [(row["step"], row["ratio"], row["mismatch_max"]) for row in begun]
        assert len(begun) <= 2 and all(row["step"] <= rows[gone]["step"] for row in begun), told
        assert all(abs(row["ratio"] - 1) < GROSS for row in begun), told
    assert all(set(row["servers"]) <= {honest[0]} for row in rows[gone:])


def finish_once(run: Run, condition: Callable[[list[dict]], bool], what: str) -> None:
    """Lets the run go on until its rows are so, and stops it."""
    run.until(lambda: condition(run.metrics), what)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.output()


@pytest.mark.slow
def test_honest_servers_are_left_alone(tmp_path, flags, model, start):
    """With a learning rate at which this policy moves as far in an update as another one in a hundred."""
    flags = [*flags, "--config.max_steps=100000", "--config.parity.every=2", "--config.parity.share=0.5"]
    with serve(tmp_path, 2, "--engine=jax", f"--model={model}") as addresses:
        run = start(tmp_path / "run", *flags, f"--servers={','.join(addresses)}")

        def both_have_told(rows: list[dict]) -> bool:
            return len(rows) >= 12 and {server for row in rows for server in row["servers"]} == set(addresses)

        finish_once(run, both_have_told, "some steps are made of what both servers say")
    rows = run.metrics
    assert sum(row["parity"]["sent_away"] + row["parity"]["taken_back"] for row in rows) == 0, run.output()
    assert sum(row["parity"]["scored"] for row in rows) > 0
    for row in rows:
        for server in row["servers"].values():
            assert np.isfinite(list(server.values())).all() and server["tokens"] > 0


@pytest.mark.slow
def test_where_the_only_server_lies_the_run_ends_with_the_line_that_names_it(tmp_path, large_flags, model, start):
    engine = ("--engine=jax", f"--model={model}", fault("shifted_logprobs:-0.5"))
    with serve(tmp_path, 1, *engine) as liar:
        run = start(tmp_path / "run", *large_flags, f"--servers={liar[0]}")
        assert run.wait() == 2, run.output()
    last = run.output().splitlines()[-1]
    assert liar[0] in last and "mean importance ratio is 1." in last and "every rollout server was turned away" in last
    assert "Traceback" not in run.output()
