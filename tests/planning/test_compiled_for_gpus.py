"""An update compiled by CUDA's own compiler for GPUs that are not here: an 8B Llama in full, the rest small.

In `make test-long`, for the compiler takes 5.5 GB; five minutes on two cores beside other work. What is printed
goes into docs/how_to/plan.md.
"""

import pytest

from launch.machines import CHIPS
from scalerl_jax.planning.compiled import GPUS
from tests.planning.compilers import GPU, needs_gpu_compiler, plan
from tests.planning.test_compiled_for_tpus import CONFIG, GIB, SECONDS, SHORT, received, small

compiled = [pytest.mark.slow, pytest.mark.long, needs_gpu_compiler, pytest.mark.timeout(SECONDS + 100)]


def planned(folder, *flags):
    return plan(folder / "plan.json", CONFIG, *flags, seconds=SECONDS, packages=GPU)


def test_every_gpu_whose_figures_are_known_is_described():
    assert set(GPUS) == {name for name, chip in CHIPS.items() if chip.memory and not chip.is_tpu}
    for name, target in GPUS.items():
        chip = CHIPS[name]
        assert chip.memory < target.memory and target.memory_rate == pytest.approx(chip.memory_rate, rel=0.01), name


class TestCompiled:
    pytestmark = compiled

    def test_an_update_of_8b(self, tmp_path):
        found, said = planned(tmp_path, "--topology=h100:8")
        own = found["plan"]
        assert "cuDNN on NVIDIA H100 80GB HBM3, packed rows" in own["attention"] and "compiled in" in said
        assert own["fits"] and own["compiler_warnings"] == {}
        sizes = own["bytes_per_device"]
        assert 10 * GIB < sizes["temporaries"] < 16 * GIB  # it found 14.0
        # What the trainer says before it starts is what the compiler needs, and what the update has not as arguments.
        in_accumulate = sizes["needed"] - sizes["optimizer"] - sizes["weights_sent"]
        assert sizes["live_in_accumulate"] == pytest.approx(in_accumulate, rel=0.03)  # it found .4 %
        formula = own["received_by_formula"]["fsdp"]["bytes"]
        assert 0.95 * formula < received(found, "fsdp") < 1.5 * formula
        assert own["mfu"] > 0.6  # it found .62; by far most of it products
        times, flops = own["step_seconds"], own["flops_of_a_micro_batch"]
        chip, each = CHIPS["h100"], own["micro_batches"] / 8
        # All products that the text has are the formula's, but for attention's, which the text has by its segments.
        wanted = each * (flops["layers"] + flops["head"]) / chip.flops
        assert wanted < times["matrix products"] < wanted + each * flops["attention"] / chip.flops

    def test_an_adapter_of_8b_on_one_gpu(self, tmp_path):
        found, _ = planned(tmp_path, "--topology=h100:1", "--config.lora.rank=32")
        own = found["plan"]
        assert own["compiled"] and own["fits"] and own["compiler_warnings"] == {}
        assert own["bytes_per_device"]["temporaries"] < 10 * GIB  # it found 7.9

    @pytest.mark.parametrize("cut", [("context=4", "fsdp=2"), ("context=2", "fsdp=2", "tensor=2")])
    def test_no_array_is_whole_on_every_device(self, tmp_path, cut):
        """The partitioner says so where it knows no way from one cut to another."""
        axes = [f"--config.learner.{one}" for one in cut]
        found, said = planned(tmp_path, "--topology=h100:8", small(tmp_path), *axes, *SHORT)
        assert found["plan"]["compiler_warnings"] == {} and "the compiler says" not in said
        assert "cuDNN" in found["plan"]["attention"] and "with a mask" in found["plan"]["attention"]

    @pytest.mark.parametrize("chip", sorted(GPUS))
    def test_each_gpu_is_compiled_for(self, tmp_path, chip):
        found, _ = planned(tmp_path, f"--topology={chip}:1", small(tmp_path), *SHORT)
        assert found["plan"]["compiled"] and GPUS[chip].name in found["plan"]["attention"]

    def test_nodes_send_gradients_over_the_network(self, tmp_path):
        flags = ("--topology=h100:2x2", small(tmp_path), "--config.learner.replica=2", *SHORT)
        own = planned(tmp_path, *flags)[0]["plan"]
        network = sum(one["bytes_over_network"] for one in own["received_per_device"].values())
        assert own["compiled"] and network >= 0.9 * own["bytes_per_device"]["gradients"]

    def test_experts(self, tmp_path):
        shape = small(tmp_path, family="qwen3_moe", experts=8, experts_per_token=2, moe_intermediate_size=256)
        found, _ = planned(tmp_path, "--topology=h200:4", shape, "--config.learner.expert=2", *SHORT)
        assert found["plan"]["compiled"] and received(found, "expert") > 0
