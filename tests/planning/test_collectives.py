"""What is read from HLO: as often as loops run, once where a collective goes on beside other work, by mesh axis."""

import collections
import json
import os

from scalerl_jax.planning.collectives import axes_of, found_in, group_of, pairs_of
from scalerl_jax.planning.hlo import Program
from tests.planning.axes_program import ROUNDS, WIDTH, received
from tests.support.compiled import on_devices
from tests.support.processes import run_command

HLO = """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %gathered = bf16[64,16]{1,0} all-gather(%x), replica_groups=[4,16]<=[64], dimensions={1}
  ROOT %t = (s32[], f32[8]) tuple(%a, %b)
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %end = s32[] constant(32)
  ROOT %less = pred[] compare(%i, %end), direction=LT
}

%all-reduce-scatter.1 (p: f32[64]) -> f32[16] {
  %sum = f32[64]{0} all-reduce(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %loop = (s32[], f32[8]) while(%start), condition=%condition, body=%body
  %scales = f32[64]{0} all-gather(%s), replica_groups={{0,1},{2,3}}, dimensions={0}
  %kept = f32[16]{0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
  %sent = (f32[10], f32[10], u32[]) collective-permute-start(%z), source_target_pairs={{0,1},{1,0}}
  %sum.2 = f32[8]{0} all-reduce(%p), replica_groups=mesh['a'=8,'b'=2] {'b'}, to_apply=%add
}
"""

# Several arrays at once, and each begun in one line and ended in another: its operands, then its results.
BEGUN = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %a = ((bf16[4], bf16[6]), (bf16[8], bf16[12])) all-gather-start(%x, %y), replica_groups={{0,1},{2,3}}, dimensions={0}
  %b = (bf16[8], bf16[12]) all-gather-done(%a)
  %c = ((f32[16]), f32[8]) reduce-scatter-start(%x), replica_groups={{0,1},{2,3}}, dimensions={0}
  %d = (f32[10], f32[20]) all-reduce-start(%x, %y), replica_groups={{0,1},{2,3}}, to_apply=%add
  %e = (f32[4], f32[4]) all-to-all(%x, %y), replica_groups={{0,1},{2,3}}
}
"""

# A loop of 16 that goes by 2, as the compiler unrolls products that it has cut; in it a gather that has begun outside.
UNROLLED = """
%body (p: (bf16[8], u32[], f32[4])) -> (bf16[8], u32[], f32[4]) {
  %p = (bf16[8]{0}, u32[], f32[4]{0}) parameter(0)
  %two = u32[]{:T(128)} constant(2), metadata={op_name="x"}
  %i = u32[] get-tuple-element(%p), index=1
  %next = u32[]{:T(128)} add(%i, %two), metadata={op_name="x"}
  %sent = bf16[8]{0} collective-permute(%w), channel_id=5, source_target_pairs={{0,2},{2,0},{1,3},{3,1}}
  %step = f32[4]{0} fusion(%y), kind=kOutput, calls=%goes_on
  ROOT %t = (bf16[8]{0}, u32[], f32[4]{0}) tuple(%sent, %next, /*index=2*/%step)
}

%condition (p: (bf16[8], u32[], f32[4])) -> pred[] {
  %end = u32[]{:T(128)} constant(16)
  %p = (bf16[8]{0}, u32[], f32[4]{0}) parameter(0)
  %i = u32[] get-tuple-element(%p), index=1
  ROOT %less = pred[] compare(%i, %end), direction=LT
}

%goes_on (p: f32[2]) -> f32[4] {
  %all-gather.2 = f32[4]{0} all-gather(%p), channel_id=7, replica_groups=[2,2]<=[4], dimensions={0}
}

%begins (p: f32[2]) -> f32[4] {
  %all-gather.1 = f32[4]{0} all-gather(%p), channel_id=7, replica_groups=[2,2]<=[4], dimensions={0}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %start = f32[4]{0} fusion(%q), kind=kCustom, calls=%begins
  %loop = (bf16[8]{0}, u32[], f32[4]{0}) while(%start), condition=%condition, body=%body
}
"""


def by_kind(text: str) -> dict[str, int]:
    total = collections.Counter[str]()
    for one in found_in(Program(text)):
        total[one.kind] += one.received
    return total


def test_collectives_count_as_often_as_their_loops_run():
    assert by_kind(HLO) == {
        "all-gather": 32 * 64 * 16 * 2 * 15 // 16 + 64 * 4 // 2,
        "reduce-scatter": 64 * 4 * 3 // 4,
        "collective-permute": 40,
        "all-reduce": 2 * 32 // 2,
    }


def test_several_arrays_may_go_at_once():
    assert by_kind(BEGUN) == {
        "all-gather": (8 + 12) * 2 // 2, "reduce-scatter": 8 * 4, "all-reduce": 2 * 30 * 4 // 2,
        "all-to-all": 8 * 4 // 2,
    }  # fmt: skip


def test_a_loop_may_count_by_more_than_one_and_a_gather_go_on_in_it():
    assert by_kind(UNROLLED) == {"collective-permute": 8 * 16, "all-gather": 8}
    assert received(UNROLLED, {"fsdp": 2, "tensor": 2}) == {"fsdp": 8 * 16, "tensor": 8}


def test_each_way_of_writing_a_group_names_the_same_devices():
    columns = (0, 4, 8, 12)
    assert group_of("replica_groups={{0,4,8,12},{1,5,9,13}}") == columns
    assert group_of("replica_groups=[4,4]<=[4,4]T(1,0), dimensions={0}") == columns
    assert group_of("replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=4] {'axis_0','axis_1'}, x") == columns
    transposed = "replica_groups=mesh['axis_0'=1,'axis_1'=2,'axis_2'=2], device_ids=([2,2]T(1,0)) {'axis_1'}, x"
    assert group_of(transposed) == (0, 1)
    assert group_of(transposed.replace("{'axis_1'}", "{'axis_2'}")) == (0, 2)
    assert group_of("replica_groups=[4,4]<=[16]") == (0, 1, 2, 3)
    assert group_of("replica_groups={}") == ()


def test_axes_are_those_along_which_partners_differ():
    mesh = {"replica": 2, "fsdp": 3, "tensor": 4}
    assert axes_of(pairs_of("replica_groups={{0,1,2,3},{4,5,6,7}}"), mesh) == ("tensor",)
    assert axes_of(pairs_of("source_target_pairs={{0,4},{4,8},{8,0}}, x"), mesh) == ("fsdp",)
    assert axes_of(((0, 12),), mesh) == ("replica",)
    assert axes_of(((0, 13),), mesh) == ("replica", "tensor")
    assert axes_of((), mesh) == ()


def test_a_compiled_program_sends_along_its_axes_what_it_was_written_to_send():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": on_devices(8)}
    done = run_command("tests.planning.axes_program", environment=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    size = 4 * WIDTH
    assert json.loads(done.stdout) == {
        "tensor": ROUNDS * 2 * size // 2,  # an all-reduce of two sends half of it twice
        "context": ROUNDS * size,
        "fsdp+tensor": 3 * size,  # of four parts one is one's own
    }
