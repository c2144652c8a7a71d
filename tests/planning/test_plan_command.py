"""scalerl-plan as a user runs it, where no compiler is needed: GPUs by formula, what it refuses, and its search."""

import json
import pathlib
import re

import pytest

from launch import machines
from scalerl_jax import plan
from scalerl_jax.cli.entry import UserError
from scalerl_jax.cli.plan_flags import VALUES
from scalerl_jax.config_check import ConfigError
from scalerl_jax.config_io import GivenConfig, load_file
from scalerl_jax.model.decoder_config import config_of_file
from scalerl_jax.planning import compiled, cost, layout_plan, workload
from tests.planning.test_cost import written
from tests.support.paths import ROOT
from tests.support.processes import run_command

CONFIG = str(ROOT / "configs" / "scalerl_8b.py")
LLAMA_8B = 8_030_261_248  # parameters


def run(capsys, *overrides: tuple[str, str], config: str = CONFIG, **given) -> str:
    """What it prints."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setattr(VALUES[name], "value", value)
        plan.main(GivenConfig(config, overrides))
    return capsys.readouterr().out


def test_a_run_on_gpus_from_the_command_line(tmp_path):
    out = tmp_path / "plan.json"
    done = run_command(
        "scalerl_jax.plan", f"--config={CONFIG}", "--topology=h200:8", "--generator_tokens_per_second=2500",
        "--price_per_chip_hour=3", "--generator_price_per_hour=2", f"--out={out}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    size, step = found["plan"]["bytes_per_device"], found["plan"]["step_seconds"]
    assert size["parameters"] == pytest.approx(4 * LLAMA_8B / 8, rel=1e-3)
    assert 2 < size["optimizer"] / size["parameters"] < 2.001  # and the compensation of norms' scales
    assert size["weights_sent"] == pytest.approx(size["parameters"] / 2, rel=1e-6)
    assert found["plan"]["fits"] and size["needed"] < size["limit"]
    assert step["roofline"] >= max(step["matrix products"], step["links"]) and step["in_turn"] >= step["roofline"]
    # Remat computes a third of the layers again, so no step reaches 3/4 of the peak rate.
    assert 0.4 < found["plan"]["mfu"] < 0.75
    cost, fleet = found["cost"], found["fleet"]
    assert cost["hours"] == pytest.approx(6250 * fleet["step_seconds"] / 3600)
    assert cost["money"] == pytest.approx(cost["hours"] * (8 * 3 + fleet["generators"] * 2))
    assert re.search(r"needed at once +[\d.]+ +of 124.8: fits", done.stdout)
    assert f"generators: {fleet['generators']} keep the trainer fed" in done.stdout


def test_what_is_by_formula_has_no_places(capsys, monkeypatch):
    monkeypatch.setattr(compiled, "is_there", lambda machine: False)
    assert "--explain: requires what was compiled" in run(capsys, topology="h200:8", explain=True)


def test_two_nodes_send_the_rest_over_the_network(capsys, tmp_path):
    out = str(tmp_path / "plan.json")
    run(capsys, topology="h200:2x8", out=out)
    (along,) = json.loads((tmp_path / "plan.json").read_text())["plan"]["received_by_formula"].values()
    assert along["bytes_over_network"] == pytest.approx(along["bytes"] / 15)


def test_a_target_gives_the_steps(capsys, tmp_path):
    out = tmp_path / "plan.json"
    said = run(capsys, topology="h200:8", fit=written(tmp_path), target=0.5, out=str(out))
    found = json.loads(out.read_text())
    assert found["cost"]["trainer_hours"] == pytest.approx(
        float(re.search(r"needs ([\d.]+) device-hours", said)[1]), 1e-3
    )


@pytest.mark.parametrize(
    ("given", "overrides", "said"),
    [
        ({}, (), "--topology: no machine given, for example --topology=v5p:4x4x4"),
        ({"topology": "v9:4x4"}, (), "--topology=v9:4x4: 'v9' is not one of v5e, v5p, v6e, a100, "
         "a100-80gb, l4, l40s, h100, h200, b200, gpu, cpu"),
        (
            {"topology": "h200:8"}, (("learner.tensor", "3"),),
            "config.learner: replica 1 x fsdp 2 x context 1 x expert 1 x tensor 3 is not the 8 devices",
        ),
        (
            {"topology": "h200:8"}, (("rollout.answer_budget", "9000"),),
            "config.learner.seq_len=16384: a prompt and its completion may have 23048 tokens (longest prompt, thinking "
            "and answer budgets)",
        ),
        (
            {"topology": "h200:8"}, (("rollout.max_turns", "4"), ("rollout.max_episode_tokens", "16384")),
            "config.learner.seq_len=16384: a prompt and its completion may have 18432 tokens (longest prompt, "
            "config.rollout.max_episode_tokens)",
        ),
        (
            {"topology": "h200:8", "completion_tokens": 20000.0}, (),
            "--completion_tokens=20000: is above what a completion may have, 14048 (thinking and answer budgets)",
        ),
        (
            {"topology": "h200:8", "prompt_tokens": 3000.0}, (),
            "--prompt_tokens=3000: is above config.rollout.max_prompt_tokens=2048",
        ),
        ({"topology": "h200:8", "target": 0.5}, (), "--fit and --target go together"),
        ({"topology": "h200:8", "generators": 3}, (), "--generators: requires --generator_tokens_per_second"),
        (
            {"topology": "h200:8", "generator_price_per_hour": 3.0}, (),
            "--generator_price_per_hour: requires --generator_tokens_per_second",
        ),
        ({"topology": "h200:8", "generator": "cpu"}, (), "--generator=cpu: a plan needs the figures of a chip, which "
         "are known of v5e, v5p, v6e, a100-80gb, l4, l40s, h100, h200, b200"),
        ({"topology": "h200:8", "model_config": "/no/such.json"}, (), "--model_config=/no/such.json: no such file"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(capsys, given, overrides, said):
    with pytest.raises((UserError, ConfigError)) as error:
        run(capsys, *overrides, **given)
    assert str(error.value) == said


def test_nothing_is_planned_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--out=.*: .*file is not a folder"):
        run(capsys, topology="h200:8", out=str(tmp_path / "file" / "plan.json"))
    with pytest.raises(UserError, match=r"--out=.*: is a folder"):
        run(capsys, topology="h200:8", out=str(tmp_path))


def test_float32_is_slower_by_formula_too(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "is_there", lambda machine: False)
    seconds = []
    for dtype in ("bfloat16", "float32"):
        out = str(tmp_path / "new" / f"{dtype}.json")
        run(capsys, ("model.compute_dtype", dtype), topology="h100:8", out=out)
        seconds.append(json.loads(pathlib.Path(out).read_text())["plan"]["step_seconds"]["matrix products"])
    chip = machines.parse("h100:8").chip
    assert seconds[1] / seconds[0] == pytest.approx(chip.flops / chip.float32_flops, rel=0.05)


def test_a_hub_name_needs_no_model_but_a_shape(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(f"from scalerl_jax.config_io import load_file\n\n\ndef get_config():\n"
                                      f"    return load_file({CONFIG!r})\n")  # fmt: skip
    hub = (("model.path", "meta-llama/Llama-3.1-8B"),)
    with pytest.raises(
        UserError, match=r"config\.model\.path=meta-llama/Llama-3\.1-8B: no config\.json there.*--model_config"
    ):
        run(capsys, *hub, config=str(tmp_path / "mine.py"), topology="h200:8")
    shape = str(ROOT / "configs" / "scalerl_8b.json")
    assert "decoder of" in run(capsys, *hub, config=str(tmp_path / "mine.py"), topology="h200:8", model_config=shape)
    (tmp_path / "mine.json").write_text((ROOT / "configs" / "scalerl_8b.json").read_text())
    assert str(tmp_path / "mine.json") in run(capsys, *hub, config=str(tmp_path / "mine.py"), topology="h200:8")


def test_without_the_compiler_the_line_that_installs_it(capsys, monkeypatch):
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        run(capsys, topology="v5p:4x4x4")
    assert str(error.value) == (
        "--topology: compiling for TPUs needs libtpu, which is not installed: pip install 'scalerl-jax[plan]'"
    )
    with pytest.raises(UserError, match=r"^--generator=l4:1: its compiler is not installed: make plan-packages-gpu$"):
        run(capsys, topology="h200:8", generator="l4:1")


def test_a_generator_computes_as_the_trainer_does(capsys, monkeypatch):
    asked = []

    def memory_on(machine, config, decoder):
        asked.append(config.fleet.compute_dtype)
        return {"line": "", "fits": True, "memory": {}}

    monkeypatch.setattr(compiled, "is_there", lambda machine: False)
    monkeypatch.setattr(cost, "find_server", machines.parse)
    monkeypatch.setattr(cost, "memory_on", memory_on)
    for dtype in ("auto", "float32"):
        run(capsys, ("fleet.compute_dtype", dtype), topology="h200:8", generator="h100:1")
    assert asked == ["bfloat16", "float32"]


def question(topology: str, **learner: int) -> layout_plan.Question:
    config = load_file(CONFIG)
    config.model.compute_dtype = "bfloat16"
    for name, value in learner.items():
        setattr(config.learner, name, value)
    decoder = config_of_file(str(ROOT / "configs" / "scalerl_8b.json"))
    work = workload.of(config, prompt_tokens=256, completion_tokens=0, row_use=1.0)
    return layout_plan.Question(config, decoder, machines.parse(topology), work, 1.0)


def test_what_does_not_fit_has_a_nearest_layout_that_does(capsys):
    said = run(capsys, ("learner.micro_batch_rows", "16"), topology="h100:8")
    assert re.search(r"needed at once +[\d.]+ +of 70.8: does not fit, by [\d.]+ GiB", said)
    nearest = re.search(r"the nearest that fits: (.*)", said)[1]
    overrides = [tuple(word.removeprefix("--config.").split("=")) for word in nearest.split()]
    assert "does not fit" not in run(capsys, *overrides, topology="h100:8")


def test_the_search_passes_over_nothing_nearer():
    asked = question("h100:8", micro_batch_rows=16)
    first = layout_plan.plan(asked, layout_plan.own_choice(asked.config, 8))
    found, _ = layout_plan.search(asked, first, compiles=0, report=print)
    assert found is not None and found.bytes.over <= 0
    nearer = [c for c in layout_plan.other_choices(asked.config, asked.decoder, 8) if c.away < found.choice.away]
    assert nearer and all(layout_plan.estimate(asked, choice).bytes.over > 0 for choice in nearer)


def test_where_the_state_alone_is_too_large_more_chips_are_asked_for(capsys):
    said = run(capsys, topology="h100:1")
    assert "state, gradients and weights sent alone do not fit: at least 2 times as many chips along fsdp" in said


def test_with_an_adapter_one_gpu_of_80_gb_is_enough(capsys):
    assert re.search(r"needed at once +[\d.]+ +of 70.8: fits", run(capsys, ("lora.rank", "32"), topology="h100:1"))
    asked = question("h100:1")
    asked.config.lora.rank = 32
    size = layout_plan.estimate(asked, layout_plan.own_choice(asked.config, 1)).bytes
    adapter = 83_886_080  # 2.6 M parameters for each rank
    assert (size.gradients, size.sent) == (4 * adapter, 2 * LLAMA_8B)
    assert size.parameters == 2 * LLAMA_8B + 4 * adapter and 8 * adapter <= size.optimizer < 8.01 * adapter


def test_every_layout_has_all_devices_and_takes_no_less_than_its_own_part():
    asked = question("v5p:4x4x4", tensor=4, micro_batch_rows=4)
    found = layout_plan.other_choices(asked.config, asked.decoder, 64)
    assert len({(c.mesh, c.rows, c.remat) for c in found}) == len(found) > 50
    for choice in found:
        sizes = dict(choice.mesh)
        devices = 1
        for size in sizes.values():
            devices *= size
        assert devices == 64 and sizes["replica"] == sizes["expert"] == 1 and asked.decoder.heads % sizes["tensor"] == 0
        assert choice.put_into(asked.config).learner.tensor == sizes["tensor"]


def test_half_the_rows_take_less_memory_and_more_micro_batches():
    asked = question("h200:8", micro_batch_rows=2)
    own = layout_plan.own_choice(asked.config, 8)
    (half,) = [c for c in layout_plan.other_choices(asked.config, asked.decoder, 8) if c.rows == 1 and c.away == 1]
    two, one = layout_plan.estimate(asked, own), layout_plan.estimate(asked, half)
    assert one.bytes.temporaries < two.bytes.temporaries
    assert (two.rows, one.rows) == (16, 8)
    assert two.flops.total == pytest.approx(2 * one.flops.total)
    assert abs(one.micro_batches - 2 * two.micro_batches) <= 1
