"""The least seconds of a compiled program: FLOPs and bytes beside what is known of them, and what is waited for."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from launch.machines import parse
from scalerl_jax.learner.trainer import Layout
from scalerl_jax.model.remat import BLOCK, FULL, REMATS
from scalerl_jax.planning import program_roofline, roofline
from scalerl_jax.planning.hlo import Instruction, Program
from tests.planning.test_flops import WIDE, formula
from tests.support.trainers import trainer_of

MACHINE = parse("h100:8")
CHIP = MACHINE.chip


def of(text: str, **given):
    return program_roofline.of(Program(text), MACHINE, **given)


@pytest.mark.parametrize(
    "remat", [pytest.param(name, marks=[pytest.mark.slow] if name not in (BLOCK, FULL) else []) for name in REMATS]
)
def test_flops_are_the_formulas_with_all_loops(remat):
    """Four layers and four chunks of the head: a compiler's own count would see one of each."""
    decoder = dataclasses.replace(WIDE, layers=4)
    trainer = trainer_of(decoder, Layout(seq_len=128, rows=2, logprob_chunk=32, remat=remat, attention="blocks"))
    found = of(trainer.compile_update()[0].as_text())
    assert found.flops == pytest.approx(formula(decoder, remat, block=64).total, rel=0.02)


def test_bytes_of_a_known_program():
    """A sum of three arrays in one kernel; a product; and both in a loop over slices, of which each is read once."""
    size = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    summed = jax.jit(lambda a, b, c: a * b + c).lower(size, size, size).compile()
    assert of(summed.as_text()).moved == pytest.approx(4 * 4 * 2**20, rel=0.05)
    product = jax.jit(jnp.dot).lower(size, size).compile()
    found = of(product.as_text())
    assert found.moved == pytest.approx(3 * 4 * 2**20, rel=0.05) and found.flops == 2 * 2**30
    slices = jax.ShapeDtypeStruct((16, 1024, 1024), jnp.float32)
    looped = jax.jit(lambda x, all: jax.lax.scan(lambda x, one: (x * one, None), x, all)[0]).lower(size, slices)
    assert of(looped.compile().as_text()).moved == pytest.approx(16 * 3 * 4 * 2**20, rel=0.05)


# A step of a loop as a GPU has it: a weight is gathered while a product runs, and the result goes into its place.
LOOP = """
%sliced (p.0: bf16[4,1024,8192], p.1: s32[]) -> bf16[1024,8192] {
  %p.0 = bf16[4,1024,8192]{2,1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %one = bf16[1,1024,8192]{2,1,0} dynamic-slice(%p.0, %p.1, %p.1, %p.1), dynamic_slice_sizes={1,1024,8192}
  ROOT %flat = bf16[1024,8192]{1,0} bitcast(%one)
}

%placed (p.0: bf16[4,64,8192], p.1: bf16[64,8192], p.2: s32[]) -> bf16[4,64,8192] {
  %p.0 = bf16[4,64,8192]{2,1,0} parameter(0)
  %p.1 = bf16[64,8192]{1,0} parameter(1)
  %p.2 = s32[] parameter(2)
  %whole = bf16[1,64,8192]{2,1,0} bitcast(%p.1)
  ROOT %put = bf16[4,64,8192]{2,1,0} dynamic-update-slice(%p.0, %whole, %p.2, %p.2, %p.2)
}

%multiplied (p.0: bf16[64,8192], p.1: bf16[8192,8192]) -> bf16[64,8192] {
  %p.0 = bf16[64,8192]{1,0} parameter(0)
  %p.1 = bf16[8192,8192]{1,0} parameter(1)
  ROOT %dot = bf16[64,8192]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (p: (s32[], bf16[4,1024,8192], bf16[64,8192], bf16[8192,8192], bf16[4,64,8192])) -> (s32[]) {
  %i = s32[] get-tuple-element(%p), index=0
  %weights = bf16[4,1024,8192]{2,1,0} get-tuple-element(%p), index=1
  %x = bf16[64,8192]{1,0} get-tuple-element(%p), index=2
  %before = bf16[8192,8192]{1,0} get-tuple-element(%p), index=3
  %kept = bf16[4,64,8192]{2,1,0} get-tuple-element(%p), index=4
  %part = bf16[1024,8192]{1,0} fusion(%weights, %i), kind=kLoop, calls=%sliced
  %begun = (bf16[1024,8192], bf16[8192,8192]) all-gather-start(%part), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %y = bf16[64,8192]{1,0} fusion(%x, %before), kind=kCustom, calls=%multiplied, metadata={op_name="jit(f)/jvp()/while/body/mlp/dot_general"}
  %ended = bf16[8192,8192]{1,0} all-gather-done(%begun)
  %next = bf16[4,64,8192]{2,1,0} fusion(%kept, %y, %i), kind=kLoop, calls=%placed
  ROOT %t = (s32[]) tuple(%i)
}

%condition (p: (s32[])) -> pred[] {
  ROOT %less = pred[] compare(%i, %end), direction=LT
}

ENTRY %main (a: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %start = (s32[]) tuple(%a)
  %loop = (s32[]) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"4"}}
}
"""  # noqa: E501


def test_a_collective_is_waited_for_as_far_as_nothing_goes_on_beside_it():
    found = of(LOOP)
    part, weight, x = 2 * 1024 * 8192, 2 * 8192 * 8192, 2 * 64 * 8192
    product = 4 * 2.0 * 64 * 8192 * 8192
    assert found.flops == product
    # The slice is read and written, the product reads the weight and x and writes y, which is read and put in place.
    assert found.moved == pytest.approx(4 * (2 * part + weight + 2 * x + 2 * x), rel=1e-6)
    beside = (weight + 2 * x) / CHIP.memory_rate
    assert found.waited == pytest.approx(4 * (weight * 7 / 8 / CHIP.link_rate - beside))
    assert found.seconds == pytest.approx(found.moved / CHIP.memory_rate + found.waited)
    first = found.places()[0]
    assert first.scope.endswith("waited for") and first.binds == roofline.LINKS
    mlp = next(one for one in found.places() if "mlp" in one.scope)
    assert mlp.scope == "forward: mlp dot_general" and mlp.calls == 4 and mlp.flops == product


def test_between_nodes_the_network_is_waited_for():
    found = program_roofline.of(Program(LOOP), parse("h100:2x4"))
    assert found.waited == found.bound_by[roofline.NETWORK] > 0 and found.places()[0].binds == roofline.NETWORK


def test_one_that_is_said_to_wait_has_nothing_beside_it():
    waiting = LOOP.replace("dimensions={0}\n  %y", 'dimensions={0}, backend_config={"is_sync":true}\n  %y')
    assert of(waiting).waited == pytest.approx(4 * 2 * 8192 * 8192 * 7 / 8 / CHIP.link_rate)


@pytest.mark.parametrize(
    ("left", "right", "rest", "flops"),
    [
        # As TPUs have products: by heads, so that what falls on padding is no work; and a plain one.
        ("bf16[16384,4096,1]", "bf16[32,4096,128]",
         "window={size=32 pad=31_31 rhs_reversal=1}, dim_labels=bf0_0io->b0f", 2 * 16384 * 4096 * 4096),
        ("bf16[16384,4096]", "bf16[4096,14336]", "dim_labels=bf_io->bf", 2 * 16384 * 4096 * 14336),
    ],
)  # fmt: skip
def test_products_of_tpus(left, right, rest, flops):
    result = "bf16[16384,32,128]" if "window" in rest else "bf16[16384,14336]"
    text = f"""
ENTRY %main (p.0: {left}, p.1: {right}) -> {result} {{
  %p.0 = {left} parameter(0)
  %p.1 = {right} parameter(1)
  ROOT %c = {result} convolution(%p.0, %p.1), {rest}
}}
"""
    assert of(text).flops == flops


def test_what_a_fusion_in_a_fusion_only_passes_on_is_read():
    """As a TPU's products have their weights."""
    text = """
%inner (q.0: bf16[4096,1024]) -> bf16[4096,1024] {
  %q.0 = bf16[4096,1024] parameter(0)
  ROOT %b = bf16[4096,1024] bitcast(%q.0)
}

%outer (p.0: bf16[32,4096], p.1: bf16[4096,1024]) -> bf16[32,1024] {
  %p.0 = bf16[32,4096] parameter(0)
  %p.1 = bf16[4096,1024] parameter(1)
  %f = bf16[4096,1024] fusion(%p.1), kind=kLoop, calls=%inner
  ROOT %c = bf16[32,1024] convolution(%p.0, %f), dim_labels=bf_io->bf
}

ENTRY %main (x: bf16[32,4096], w: bf16[4096,1024]) -> bf16[32,1024] {
  %x = bf16[32,4096] parameter(0)
  %w = bf16[4096,1024] parameter(1)
  ROOT %r = bf16[32,1024] fusion(%x, %w), kind=kOutput, calls=%outer
}
"""
    assert of(text).moved == 2 * (32 * 4096 + 4096 * 1024 + 32 * 1024)


def test_what_a_tpu_keeps_on_the_chip_costs_no_memory():
    text = """
ENTRY %main (p.0: f32[1024]) -> f32[1024] {
  %p.0 = f32[1024]{0:T(1024)} parameter(0)
  %start = (f32[1024]{0:T(1024)S(1)}, f32[1024]{0:T(1024)}, u32[]{:S(2)}) copy-start(%p.0)
  %done = f32[1024]{0:T(1024)S(1)} copy-done(%start)
  ROOT %n = f32[1024]{0:T(1024)} negate(%done)
}
"""
    assert of(text).moved == 2 * 4096
    text = """
ENTRY %main (p.0: bf16[2048,512]) -> bf16[512,512] {
  %p.0 = bf16[2048,512]{1,0:T(8,128)(2,1)} parameter(0)
  %start = ((bf16[2048,512]{1,0:T(8,128)(2,1)}), bf16[512,512]{1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) slice-start(%p.0), slice={[0:512], [0:512]}
  %done = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} slice-done(%start)
  ROOT %n = bf16[512,512]{1,0:T(8,128)(2,1)} negate(%done)
}
"""  # noqa: E501
    assert of(text).moved == 2 * 2 * 512 * 512


def test_attention_of_a_tpu_is_of_its_queries():
    """Not of the gathered keys of a row that is cut, nor of the sums that the kernel keeps, which are wider."""
    text = """
ENTRY %main (skips: s8[1,4,4], q: bf16[8,512,64], k: bf16[4,2048,64], v: bf16[4,2048,64]) -> f32[8,512,128] {
  %skips = s8[1,4,4] parameter(0)
  %q = bf16[8,512,64] parameter(1)
  %k = bf16[4,2048,64] parameter(2)
  %v = bf16[4,2048,64] parameter(3)
  %kept = f32[8,512,128] custom-call(), custom_call_target="AllocateBuffer"
  ROOT %splash_mha_fwd.1 = (bf16[8,512,64], f32[8,512,128]) custom-call(%skips, %q, %k, %v), custom_call_target="tpu_custom_call"
}
"""  # noqa: E501
    found = of(text, attended=100)
    assert found.flops == 4 * 8 * 512 * 64 * 100
    assert found.moved == 2 * (2 * 8 * 512 * 64 + 2 * 4 * 2048 * 64) + 4 * 8 * 512 * 128 + 16  # nothing for %kept


def test_float32_products_take_the_rate_of_float32():
    size = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    found = of(jax.jit(jnp.dot).lower(size, size).compile().as_text())
    assert found.products == pytest.approx(2 * 512**3 / CHIP.float32_flops)


@pytest.mark.parametrize(("call", "times"), [("__cudnn$fmhaSoftmax", 1.0), ("__cudnn$fmhaSoftmaxBackward", 2.5)])
def test_attention_is_of_the_keys_that_a_query_has(call, times):
    text = f"""
ENTRY %main (p.0: bf16[1,512,4,64]) -> bf16[1,512,4,64] {{
  %p.0 = bf16[1,512,4,64]{{3,2,1,0}} parameter(0)
  ROOT %a = (bf16[1,4,512,64]{{3,1,2,0}}, f32[8,4,512]{{2,1,0}}, u8[9999999]{{0}}) custom-call(%p.0, %p.0, %p.0), custom_call_target="{call}"
}}
"""  # noqa: E501
    found = of(text, attended=100.5)
    assert found.flops == times * 2 * 2 * 512 * 4 * 64 * 100.5
    assert found.moved == 4 * 2 * 512 * 4 * 64 + 4 * 8 * 4 * 512


def test_scopes_are_what_a_reader_knows():
    def scope_of(name):
        return program_roofline.scope_of(
            Instruction("a", "all-gather-start", "f32[2]", (), f'metadata={{op_name="{name}"}}')
        )

    name = "jit(accumulate)/transpose(jvp())/while/body/closed_call/checkpoint/rematted_computation/mlp/dot_general"
    assert scope_of(name) == "again: mlp dot_general"
    assert scope_of(name.replace("rematted_computation/", "")) == "backward: mlp dot_general"
    assert scope_of("jit(f)/jvp()/cond/branch_0_fun/add") == "forward: add"
    assert scope_of("jit(f)/transpose(jvp(head))/while/body/dot_general") == "backward: head dot_general"
    assert scope_of("jit(decode_chunk)/while/body/mlp/mul") == "mlp mul" and scope_of("") == "all-gather"
