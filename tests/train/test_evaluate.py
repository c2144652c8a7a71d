"""scalerl-eval beside the run's own evaluations: the same completions, wherever the policy lies; killed, it goes on."""

import dataclasses
import json
import math
import os
import pathlib
import signal

import jax
import numpy as np
import pytest
from absl import flags

from scalerl_jax.cli.entry import UserError
from scalerl_jax.config import Config
from scalerl_jax.config_io import GivenConfig, load_file, to_json
from scalerl_jax.evaluate import key_of, run_weights
from scalerl_jax.learner.digests import fingerprint
from scalerl_jax.learner.make_trainer import lora_of
from scalerl_jax.model.hf import load_hf, to_hf
from scalerl_jax.model.lora import write_adapter
from scalerl_jax.run import evaluation_request
from scalerl_jax.run.jsonl import read_rows
from tests.support import fork_server
from tests.support.processes import run_command, single_threaded
from tests.support.servers import serve
from tests.support.tiny_task import smaller
from tests.support.waiting import eventually

MISTAKES = (
    ("", "--model or --workdir: one of them says what is evaluated"),
    ("--model={model}", "--environment: says what to evaluate on"),
    ("--model={tmp} --environment=arithmetic", "{tmp}: no weights there (*.safetensors)"),
    ("--model={model} --environment=no_such", "--environment: 'no_such' is not one of arithmetic, "),
    ("--model={model} --environment=math", "--environment: math: of which rows? math:FILE"),
    ("--model={model} --environment=gsm8k:{tmp}/x.jsonl", "config.environment.validation={tmp}/x.jsonl: No such file"),
    ("--model={smaller} --environment=arithmetic", "{smaller}/tokenizer.json: token "),
    ("--model={model} --steps=3 --environment=arithmetic", "--steps=3: requires --workdir"),
    ("--workdir={tmp}", "--workdir={tmp}: no config.json there"),
    ("--workdir={run} --steps=3", "--steps=3: the run keeps no checkpoint 3; there are 0, 4, 6"),
    ("--workdir={run} --prompts=7", "--prompts=7: 6 are held out, and the others are trained on"),
    ("--workdir={run} --config.evaluation.prompts=9", "--prompts=9: 6 are held out, and the others are trained on"),
    ("--workdir={run} --config.evaluation.prompts=4", "config.evaluation.prompts=4: the run holds 6 out; --prompts=4 "),
    ("--workdir={run} --steps=x", "--steps=x: is not all, last, or steps"),
    ("--workdir={run} --samples=-1", "flag --samples=-1"),
    ("--workdir={run} --config.evaluation.sample=1", "--config.evaluation.sample: config.evaluation has no"),
    ("--workdir={run} --out={model}/config.json/x", "--out={model}/config.json/x: {model}/config.json is not a"),
)


def evaluate(*arguments: str, code: int = 0) -> str:
    done = run_command("scalerl_jax.evaluate", *arguments, environment=single_threaded())
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def completions(out: pathlib.Path, step: int) -> list[dict]:
    return [row for file in out.glob(f"completions-{step}-*.jsonl") for row in read_rows(str(file))]


@pytest.fixture(scope="module")
def run(tmp_path_factory, flags) -> tuple[pathlib.Path, list[str]]:
    """A run of six updates with two embedded engines, and its flags."""
    folder = tmp_path_factory.mktemp("evaluated")
    flags = [*flags, "--config.max_steps=6", "--config.checkpoint.every=2", "--config.evaluation.every=2"]
    flags += ["--config.evaluation.samples=4", "--config.checkpoint.keep=2"]
    done = run_command("scalerl_jax.train", f"--workdir={folder / 'run'}", *flags, environment=single_threaded())
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run", flags


@pytest.mark.slow
def test_the_checkpoints_of_a_run_give_its_own_rows(run, tmp_path):
    workdir, _ = run
    said = evaluate(f"--workdir={workdir}", f"--out={tmp_path / 'out'}")
    own = {row["step"]: row for row in read_rows(str(workdir / "evals.jsonl"))}
    found = read_rows(str(tmp_path / "out" / "evals.jsonl"))
    spent = {row["step"]: row["compute"]["device_hours"] for row in read_rows(str(workdir / "metrics.jsonl"))}
    assert [row["step"] for row in found] == [0, 4, 6]  # those that are kept, and the start
    for row in found:
        for name in (
            "passes",
            "pass_rate",
            "pass_at",
            "majority_at",
            "truncated",
            "interrupted",
            "length_mean",
            "reward",
        ):
            assert row[name] == own[row["step"]][name], name
        # The run asked for its evaluation behind that update and before the next one.
        assert row["device_hours"] == spent.get(row["step"], 0)
        assert row["device_hours"] <= own[row["step"]]["device_hours"] <= spent.get(row["step"] + 1, math.inf)
    assert found[1]["device_hours"] > found[0]["device_hours"] == 0
    assert "mean@4" in said and "pass@4" in said and "completions and numbers" in said
    lines = completions(tmp_path / "out", 6)
    assert len(lines) == 6 * 4 and {line["index"] for line in lines} == set(range(6))
    assert sum(line["correct"] for line in lines) == sum(found[-1]["passes"])


@pytest.mark.slow
def test_an_exported_model_gives_the_last_row_with_servers_that_are_there(run, tmp_path):
    workdir, flags = run
    exported = tmp_path / "policy"
    run_command("scalerl_jax.export", f"--workdir={workdir}", f"--out={exported}").check_returncode()
    start = next(flag for flag in flags if flag.startswith("--config.model.path=")).partition("=")[2]
    given = [flag for flag in flags if not flag.startswith("--config.model.path=")]
    with serve(tmp_path, 1, "--engine=jax", f"--model={start}") as addresses:  # which holds other weights
        arguments = [f"--model={exported}", *given, f"--servers={addresses[0]}"]
        for name, more in (("one", ()), ("two", ("--take",))):
            if more:  # it holds the weights of the first now, and they might be a trainer's
                told = evaluate(*arguments, f"--out={tmp_path / name}", code=2)
                assert "holds the weights of a trainer" in told and "--take takes it" in told
            evaluate(*arguments, *more, f"--out={tmp_path / name}")
            (row,) = read_rows(str(tmp_path / name / "evals.jsonl"))
            assert row["passes"] == read_rows(str(workdir / "evals.jsonl"))[-1]["passes"]


@pytest.mark.slow
def test_killed_and_started_again_it_goes_on(run, tmp_path):
    workdir, _ = run
    out = tmp_path / "out"
    arguments = [f"--workdir={workdir}", "--steps=6", f"--out={out}", "--config.fleet.servers=1"]
    with open(os.devnull, "w") as silent:
        process = fork_server.start(
            "-m", "scalerl_jax.evaluate", *arguments,
            environment=single_threaded(), stdout=silent, stderr=silent, new_session=True,
        )  # fmt: skip
    try:
        eventually(lambda: completions(out, 6), "a prompt is done", seconds=600)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # it may have come to its end by now
        process.wait()
    evaluate(*arguments)
    (file,) = out.glob("completions-6-*.jsonl")
    whole = file.read_text().splitlines(keepends=True)
    expected = read_rows(str(workdir / "evals.jsonl"))[-1]["passes"]
    assert len(whole) == 24 and read_rows(str(out / "evals.jsonl"))[0]["passes"] == expected
    # Killed while it wrote the third prompt: two are kept as they are, and the others come again.
    file.write_text("".join(whole[:9]) + whole[9][:40])
    os.remove(out / "evals.jsonl")
    evaluate(*arguments)
    again = file.read_text().splitlines(keepends=True)
    assert again[:8] == whole[:8] and sorted(again) == sorted(whole)
    assert read_rows(str(out / "evals.jsonl"))[0]["passes"] == expected
    before = file.stat().st_mtime_ns
    assert "mean@4" in evaluate(*arguments) and file.stat().st_mtime_ns == before  # nothing is left to do


@pytest.mark.slow
def test_a_mistake_is_one_line(run, model, tmp_path, tmp_path_factory):
    less = smaller(model, tmp_path_factory.mktemp("less") / "smaller")
    places = {"tmp": tmp_path, "run": run[0], "model": model, "smaller": less}
    for given, said in MISTAKES:
        told = evaluate(*(argument.format(**places) for argument in given.split()), code=2)
        assert told.splitlines()[-1].startswith(f"error: {said.format(**places)}"), told
        assert "Traceback" not in told
    assert os.listdir(tmp_path) == []  # nothing was made


@pytest.mark.slow
def test_published_rows_beside_a_made_environment(model, tmp_path):
    rows = [{"question": f"What is {n}?", "answer": f"It is {n}.\n#### {n}"} for n in range(1, 4)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = evaluate(
        f"--model={model}", f"--environment=gsm8k:{tmp_path}/gsm8k.jsonl,arithmetic", "--samples=2", "--prompts=3",
        f"--out={tmp_path / 'out'}", "--config.rollout.thinking_budget_max=0", "--config.rollout.thinking_budget_min=0",
        "--config.rollout.answer_budget=8", "--config.rollout.max_prompt_tokens=64", "--config.fleet.slots=4",
        "--config.model.sync_dtype=float32", "--config.model.compute_dtype=float32", "--config.fleet.servers=1",
    )  # fmt: skip
    (row,) = read_rows(str(tmp_path / "out" / "evals.jsonl"))
    assert row["prompts"] == 6 and {part["prompts"] for part in row["environments"].values()} == {3}
    lines = completions(tmp_path / "out", 0)
    assert {line["answer"] for line in lines if "gsm8k" in line["environment"]} == {"1", "2", "3"}
    assert next(name for name in row["environments"] if "gsm8k" in name) in said and "arithmetic" in said


def test_step_0_of_a_run_has_the_adapter_that_it_started_from(model, tmp_path):
    config = Config()
    config.model.path, config.model.sync_dtype, config.lora.rank, config.lora.alpha = model, "bfloat16", 4, 32.0
    decoder, frozen = load_hf(model, dtype="bfloat16")
    lora = lora_of(config, decoder)
    rng = np.random.default_rng(0)
    adapter = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), lora.adapter(None))
    config.lora.adapter = str(tmp_path / "adapter")
    write_adapter(config.lora.adapter, adapter, lora, model=model, base=fingerprint(frozen))
    wanted = to_hf(lora.join(adapter, frozen), decoder, "bfloat16")
    found = run_weights(config, str(tmp_path), 0)
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    base = to_hf(frozen, decoder, "bfloat16")
    assert any(not np.array_equal(found[name], base[name]) for name in base)
    assert key_of(config, str(tmp_path), 0, {}) != key_of(config, "", 0, {})


def give_flags(monkeypatch, *, environment=("arithmetic",), **texts):
    """Flags of scalerl-eval as evaluation_request reads them."""
    values = flags.FlagValues()
    for name, value in {"model": "", "workdir": "", "steps": "all", **texts}.items():
        flags.DEFINE_string(name, value, "", flag_values=values)
    for name in ("samples", "prompts"):
        flags.DEFINE_integer(name, 0, "", flag_values=values)
    flags.DEFINE_list("environment", [*environment], "", flag_values=values)
    values([""])
    monkeypatch.setattr(evaluation_request, "FLAGS", values)


@pytest.mark.parametrize("file", [True, False])
def test_other_environments_are_asked_as_those_of_a_mixture(tmp_path, monkeypatch, file):
    parts = "".join(
        f"    config.mixture[{name!r}] = EnvironmentConfig(name='arithmetic', prompt_suffix=' Answer:', "
        f"verifier_seconds={seconds}.0)\n"
        for name, seconds in (("one", 60), ("two", 70))
    )
    path = tmp_path / "mixture.py"
    path.write_text(
        "from scalerl_jax.config import Config, EnvironmentConfig\n\n\ndef get_config():\n"
        f"    config = Config()\n{parts}    return config\n"
    )
    (tmp_path / "config.json").write_text(to_json(load_file(str(path))))
    give_flags(monkeypatch, model="policy" * file, workdir=str(tmp_path) * (not file))
    given = GivenConfig(str(path) if file else "", ())
    differ = r"config.mixture.one.verifier_seconds=60.0, config.mixture.two.verifier_seconds=70.0"
    with pytest.raises(UserError, match=differ):
        evaluation_request.asked(given)
    config = evaluation_request.asked(dataclasses.replace(given, overrides=(("environment.verifier_seconds", "80"),)))
    assert (config.environment.prompt_suffix, config.environment.verifier_seconds) == (" Answer:", 80)
    assert config.mixture == {}


def test_fields_that_flags_give_are_those_of_each_environment(tmp_path, monkeypatch):
    start = Config()
    start.environment.name, start.environment.columns.prompt, start.environment.reward = "math", "problem", "judge"
    start.environment.turn_seconds, start.environment.correct_at = 7.0, 0.5
    (tmp_path / "config.json").write_text(to_json(start))
    (tmp_path / "rows.jsonl").write_text("")
    give_flags(monkeypatch, workdir=str(tmp_path), environment=(f"{tmp_path}/rows.jsonl", "arithmetic"))
    given = GivenConfig("", (("environment.columns.answer", "solution"), ("environment.max_malformed_rows", "3")))
    first, second = evaluation_request.asked(given).mixture.values()
    for one in (first, second):
        assert (one.turn_seconds, one.correct_at, one.max_malformed_rows) == (7.0, 0.5, 3)
        assert (one.columns.prompt, one.columns.answer, one.reward) == ("prompt", "solution", "")
    assert (first.name, second.name) == ("math", "arithmetic")
    given = GivenConfig("", (("environment.validation", "other.jsonl"),))
    with pytest.raises(UserError, match=r"^--environment: .*rows\.jsonl says .* --config\.environment\.validation="):
        evaluation_request.asked(given)


@pytest.mark.slow
def test_another_evaluation_is_not_mixed_in(run, tmp_path):
    arguments = [f"--workdir={run[0]}", "--steps=0", "--prompts=2", f"--out={tmp_path}"]
    evaluate(*arguments)
    (row,) = read_rows(str(tmp_path / "evals.jsonl"))
    assert row["passes"] == read_rows(str(run[0] / "evals.jsonl"))[0]["passes"][:2]
    told = evaluate(*arguments, "--samples=8", code=2)
    assert "holds another evaluation: evaluation.samples is 4 there and 8 now; another --out" in told
    assert json.loads((tmp_path / "settings.json").read_text())["evaluation.samples"] == 4
