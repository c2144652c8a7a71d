"""An update compiled by the TPUs' own compiler for chips that are not here: an 8B Llama in full, the rest small.

Slow, some of it in `make test-long` only, and only where libtpu is installed, to which both see. What is printed goes
into docs/how_to/plan.md.
"""

import dataclasses
import json
import re

import pytest

from scalerl_jax.model.decoder_config import DecoderConfig
from tests.planning.compilers import needs_tpu_compiler, plan
from tests.support.models import toy_decoder
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, needs_tpu_compiler]

CONFIG = f"--config={ROOT / 'configs' / 'scalerl_8b.py'}"
SECONDS = 1400  # a loaded machine takes ten times the time of an idle one
# Rows of 1,024 tokens, with nothing to think.
SHORT = ("--config.learner.seq_len=1024", "--config.rollout.thinking_budget_min=0",
         "--config.rollout.thinking_budget_max=0", "--config.rollout.max_prompt_tokens=512",
         "--config.rollout.answer_budget=512")  # fmt: skip
GIB = 2**30


def small(folder, **sizes) -> str:
    """config.json of a decoder with heads as wide as a TPU wants them."""
    decoder = toy_decoder(**{"vocab_size": 2048, "hidden_size": 512, "heads": 4, "kv_heads": 2, "head_dim": 128,
                             "intermediate_size": 1024, "layers": 4, **sizes})  # fmt: skip
    path = folder / "decoder.json"
    path.write_text(json.dumps(decoder.to_hf()))
    assert dataclasses.replace(decoder, stop_token_ids=()) == DecoderConfig.from_hf(decoder.to_hf())
    return f"--model_config={path}"


def received(found, axes: str) -> float:
    return found["plan"]["received_per_device"].get(axes, {"bytes": 0})["bytes"]


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 100)
def test_an_update_of_8b_fits(tmp_path):
    found, _ = plan(
        tmp_path / "plan.json", CONFIG, "--topology=v5p:4x4x4", "--config.learner.tensor=4", seconds=SECONDS
    )
    own = found["plan"]
    assert "splash" in own["attention"] and own["fits"]
    assert own["bytes_per_device"]["live_in_accumulate"] < 9 * GIB
    assert own["bytes_per_device"]["temporaries"] < 10 * GIB  # it found 8.6
    # By the formula weights are gathered once a pass, in bfloat16, and not again with every chunk of tokens; and the
    # sums of partial products are of bfloat16.
    formula = {axes: one["bytes"] for axes, one in own["received_by_formula"].items()}
    assert received(found, "fsdp") == pytest.approx(formula["fsdp"], rel=0.2)
    assert received(found, "tensor") == pytest.approx(formula["tensor"], rel=0.05)


@pytest.mark.timeout(SECONDS + 100)
def test_what_a_generator_takes(tmp_path):
    """The trainer by formula. 20 CPU seconds."""
    flags = (
        CONFIG, small(tmp_path), *SHORT, "--topology=h200:8", "--generator=v5e:1x1", "--config.fleet.slots=64",
        "--config.fleet.decode_chunk=4",
    )  # fmt: skip
    found, printed = plan(tmp_path / "plan.json", *flags, seconds=SECONDS)
    memory = found["generator"]
    # Keys and values of 4 layers, 2 heads of 128, in bfloat16; a version of the weights, and one on its way in.
    assert memory["token"] == 2 * 4 * 2 * 128 * 2 and memory["maximum_tokens"] == 1024
    state = found["plan"]["bytes_per_device"]
    assert memory["weights"] == pytest.approx(state["parameters"] / 2 * 8, rel=0.01)
    cache = 64 * 1024 * memory["token"]
    # The scores of a prefill, and no copy of the caches.
    assert 2 * 2**20 < memory["working"] < cache
    assert memory["on_device"] == 2 * memory["weights"] + memory["working"] + cache * (1 + memory["copies"])
    assert "a generator on v5e:1x1: memory: " in printed and "sequences of 1024 tokens" in printed
    too_many = ("--config.fleet.slots=65536", "--compiles=0")
    found, printed = plan(tmp_path / "plan.json", *flags, *too_many, seconds=SECONDS)
    memory = found["generator"]
    assert not memory["fits"] and memory["working"] == 0
    (slots,) = re.findall(r"a generator on v5e:1x1: does not fit: .*; --slots=(\d+) ", " ".join(printed.split()))
    a_slot = 1024 * memory["token"] * (1 + memory["copies"])
    assert 0.9 * 15.75 * GIB < 2 * memory["weights"] + int(slots) * a_slot < 15.75 * GIB


@pytest.mark.timeout(SECONDS + 100)
def test_a_row_cut_along_context_sends_its_keys_and_values(tmp_path):
    shape = small(tmp_path)
    flags = (CONFIG, "--topology=v5e:2x2", shape, "--config.learner.fsdp=2", "--config.learner.context=2", *SHORT)
    found, said = plan(tmp_path / "plan.json", *flags, "--explain", seconds=SECONDS)
    assert "splash" in found["plan"]["attention"]
    places = found["plan"]["places"]
    assert "the most expensive places of a step" in said and places[0]["scope"].startswith("micro-batch, ")
    assert any("splash" in one["name"] or "attention" in one["scope"] for one in places)
    assert sum(one["seconds"] for one in places) < found["plan"]["step_seconds"]["roofline"]
    keys = 2 * 512 * 2 * 128 * 2  # keys and values of half a row, two heads of 128, bfloat16
    assert received(found, "context") >= 3 * 4 * keys  # forward, again, and their cotangents, in four layers


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 100)
def test_experts_of_two_kinds_of_layer_compile(tmp_path):
    shape = small(tmp_path, family="llama4_text", attention_chunk=512)
    flags = (CONFIG, "--topology=v5e:2x2", shape, "--config.learner.expert=2", "--config.learner.tensor=2", *SHORT)
    found, _ = plan(tmp_path / "plan.json", *flags, seconds=SECONDS)
    assert "splash" in found["plan"]["attention"]
    assert received(found, "expert") > 0 and received(found, "tensor") > 0


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 100)
def test_slices_send_gradients_over_the_network(tmp_path):
    shape = small(tmp_path)
    flags = (CONFIG, "--topology=v5e:2x2", "--slices=2", shape, "--config.learner.replica=2", *SHORT)
    found, _ = plan(tmp_path / "plan.json", *flags, seconds=SECONDS)
    own = found["plan"]
    network = sum(one["bytes_over_network"] for one in own["received_per_device"].values())
    # All gradients of this device's part, float32, once; the embedding's may go whole.
    assert network >= 0.9 * own["bytes_per_device"]["gradients"]
    assert own["step_seconds"]["network"] > 0


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 100)
def test_what_does_not_fit_is_compiled_with_fewer_rows(tmp_path):
    shape = small(tmp_path, layers=2)
    flags = (CONFIG, "--topology=v5e:2x2", shape, "--config.learner.micro_batch_rows=1024", "--compiles=2", *SHORT)
    found, said = plan(tmp_path / "plan.json", *flags, seconds=SECONDS)
    assert not found["plan"]["fits"] and found["chosen"]["fits"] and found["chosen"]["compiled"]
    assert "does not fit, by" in said and "the nearest that fits: --config.learner.fsdp=" in said
