"""Experts give the same gradient on every mesh, however they, their columns and the tokens that go to them are cut."""

import numpy as np
import pytest

from tests.learner.expert_mesh_program import EXPERTS, IN_BFLOAT16, MESHES
from tests.learner.mesh_program import LENGTHS
from tests.learner.test_mesh import BFLOAT16_TOLERANCE, FLOAT32_TOLERANCE, compare, run, tree

pytestmark = pytest.mark.slow  # all of it: the program is most of what it costs


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(arrays by name, facts by name)"""
    return run(str(tmp_path_factory.mktemp("mesh") / "out"), program="expert_mesh_program")


@pytest.mark.parametrize("mesh", MESHES)
def test_the_gradient_is_the_same(results, mesh):
    compare(tree(results, f"float32/{mesh}"), tree(results, "float32/one"), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("mesh", MESHES)
def test_the_gradient_of_router_replay_is_the_same(results, mesh):
    compare(tree(results, f"replay/{mesh}"), tree(results, "replay/one"), FLOAT32_TOLERANCE)
    np.testing.assert_array_equal(results[0][f"replay/{mesh}/tokens"], results[0]["replay/one/tokens"])
    assert (results[0]["replay/one/tokens"] != results[0]["float32/one/tokens"]).any()


@pytest.mark.parametrize("mesh", MESHES)
def test_no_token_is_dropped(results, mesh):
    tokens = results[0][f"float32/{mesh}/tokens"]
    np.testing.assert_array_equal(tokens, results[0]["float32/one/tokens"])
    positions = sum(LENGTHS) - len(LENGTHS)  # the last token of a segment is no input
    assert (tokens.sum(axis=1) == EXPERTS.experts_per_token * positions).all()


@pytest.mark.parametrize("mesh", MESHES)
def test_experts_are_cut(results, mesh):
    (layers, experts, columns, width), dtype = results[1][f"shards/float32/{mesh}['layers']['expert_gate']"]
    axes = MESHES[mesh]
    assert (layers, experts) == (EXPERTS.layers, EXPERTS.experts // axes.get("expert", 1)) and dtype == "float32"
    assert columns == EXPERTS.moe_intermediate_size // axes.get("tensor", 1)
    assert width == EXPERTS.hidden_size // (axes["fsdp"] * axes.get("context", 1))


def test_the_gradient_in_bfloat16(results):
    """With float32 cotangents; the tolerance is that of dense models, twice, since there are twice as many sums."""
    wanted, got = (tree(results, f"bfloat16/{mesh}") for mesh in IN_BFLOAT16)
    compare(got, wanted, 2 * BFLOAT16_TOLERANCE["fsdp4-tensor2"])
    for path, leaf in got.items():
        assert leaf.dtype == np.float32
        if "expert_" in path:
            assert ((leaf[leaf != 0].view(np.uint32) & 0xFFFF) == 0).mean() < 0.1, path
