"""On every mesh the gradient of an adapter is that of the merged weights, projected by hand.

Costs 40 s of CPU time for a family: nine programs with eight devices.
"""

import pytest

from tests.model import lora_meshes
from tests.model.test_family_meshes import lines_of

pytestmark = pytest.mark.slow

CASES = (
    "qwen3",
    "qwen3_moe-two-of-eight",
    "llama-fours-untied-scaled",
    "qwen2-alone-tied",
    "llama4_text-one-of-four",
)
IN_FULL = ("qwen3_moe-two-of-eight",)


@pytest.mark.parametrize(
    "case", [case if case in IN_FULL else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
def test_the_gradient_is_the_merged_weights_projected(case: str) -> None:
    found = lines_of("lora_meshes", case)
    assert [line["mesh"] for line in found] == lora_meshes.MESHES
    for line in found:
        assert line["loss"] < 1e-6 and line["gradient"] < 1e-6, line
