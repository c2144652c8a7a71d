"""Every program that a trainer or an engine runs on a device, compiled for accelerators that are not here, as JSON.

    python -m tests.accelerator_compile.programs TOPOLOGY CASE [CASE ...]

A case is one of UPDATES or of ENGINES. Of each program: how many arrays it takes over (donation), the largest array
that it copies, the dtypes of its products' operands, what travels along which axes of the mesh, and its memory.
"""

import dataclasses
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launch.machines import parse
from rollout_server.engines.jax import caches, decode, prompts
from rollout_server.engines.jax.engine import _hidden, _score
from rollout_server.engines.jax.weights import abstract_weights, decode_precision
from scalerl_jax.learner.memory_estimate import bytes_on_one_device, needs_of
from scalerl_jax.learner.trainer import Layout
from scalerl_jax.learner.weight_snapshots import WeightSnapshots
from scalerl_jax.model import Precision
from scalerl_jax.model.remat import REMATS
from scalerl_jax.model.sharding import make_mesh
from scalerl_jax.planning import compiled
from scalerl_jax.planning.hlo import Program
from tests.planning.axes_program import received
from tests.support.models import toy_decoder
from tests.support.trainers import trainer_of

LENGTH, LONGEST, VOCABULARY = 1024, 512, 2048
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 512, "heads": 4, "kv_heads": 2, "head_dim": 128,
    "intermediate_size": 1024, "layers": 4,
}  # fmt: skip
DENSE = toy_decoder(**SIZES)
ENGINES = {"engine": DENSE, "engine, narrow heads": dataclasses.replace(DENSE, heads=8, kv_heads=4, head_dim=64)}
EXPERTS = toy_decoder(family="qwen3_moe", **{**SIZES, "experts": 8, "moe_intermediate_size": 256})
SLOTS, CACHE, LONG_CACHE = 64, 512, 2048
BFLOAT16 = Precision("bfloat16", "bfloat16")

# Case -> decoder, mesh, fields of the layout, fields of the objective, precision.
UPDATES: dict[str, tuple[Any, dict[str, int], dict[str, Any], dict[str, Any], Precision]] = {
    **{f"remat {name}": (DENSE, {"fsdp": 4}, {"remat": name}, {}, BFLOAT16) for name in REMATS},
    "context": (DENSE, {"fsdp": 2, "context": 2}, {}, {}, BFLOAT16),
    "tensor": (DENSE, {"fsdp": 2, "tensor": 2}, {}, {}, BFLOAT16),
    "replica": (DENSE, {"fsdp": 2, "replica": 2}, {}, {}, BFLOAT16),
    "blocks": (DENSE, {"fsdp": 4}, {"attention": "blocks"}, {}, BFLOAT16),
    "float32": (DENSE, {"fsdp": 4}, {}, {}, Precision("float32", "float32")),
    "entropy": (DENSE, {"fsdp": 4}, {}, {"entropy_bonus": 0.01}, BFLOAT16),
    "reference": (DENSE, {"fsdp": 4}, {}, {"reference_kl": 0.1}, BFLOAT16),
    "teacher": (DENSE, {"fsdp": 2, "tensor": 2}, {"teacher_k": 8}, {"distill": "student_topk"}, BFLOAT16),
    "experts": (EXPERTS, {"fsdp": 2, "expert": 2}, {}, {}, BFLOAT16),
    "router replay": (EXPERTS, {"fsdp": 2, "expert": 2}, {"router_replay": True}, {}, BFLOAT16),
}


def facts(program: Any, mesh: dict[str, int] | None = None) -> dict[str, Any]:
    text = program.as_text()
    read, memory = Program(text), program.memory_analysis()
    copied, operands = 0, set[str]()
    for where, one, _ in read.walk():
        if one.op == "copy" or (one.op == "copy-start" and not any(array.on_chip for array in one.arrays[:2])):
            copied = max(copied, one.arrays[0].size)
        for inner, part in ((where, one), *read.inside(one)):
            if part.op in ("dot", "convolution"):
                made = [read.named(inner, name) for name in part.operands[:2]]
                operands.add(" x ".join(other.arrays[0].dtype for other in made if other is not None))
    header = text.partition("\n")[0]
    return {
        "taken_over": len(re.findall(r"(?:may|must)-alias", header)),
        "copied": copied,
        "products": sorted(operands),
        "received": received(text, mesh) if mesh else {},
        "temporaries": memory.temp_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
        "allocated": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes,
        "attention": sorted(
            set(re.findall(r"fmha(?:ScaleBias)?Softmax\w*|splash_mha_(?:fwd|dq|dkv)|live_attention", text))
        ),
    }


def of_update(case: str, devices: list[jax.Device]) -> Iterator[tuple[str, dict[str, Any]]]:
    decoder, axes, fields, objective, precision = UPDATES[case]
    mesh = make_mesh(devices=devices, **axes)
    layout = Layout(
        seq_len=LENGTH, rows=4 // axes.get("context", 1) // axes.get("tensor", 1), max_segment=LONGEST,
        logprob_chunk=256, **fields,
    )  # fmt: skip
    trainer = trainer_of(decoder, layout, mesh=mesh, precision=precision, **objective)
    sizes = dict(zip(mesh.axis_names, mesh.devices.shape))
    accumulate, apply = trainer.compile_update()
    trainer.compile()
    params, needs = trainer.abstract_state["params"], needs_of(trainer)
    of_all = {
        "carried": len(jax.tree.leaves(params)) + len(next(iter(trainer._programs.values())).sums),
        "state": len(jax.tree.leaves(trainer.abstract_state)),
    }
    estimated = bytes_on_one_device(params) + needs.gradient + needs.temporaries  # what is not here is no argument
    yield f"{case}: accumulate", facts(accumulate, sizes) | of_all | {"estimated": estimated}
    yield f"{case}: apply", facts(apply, sizes) | of_all
    yield f"{case}: score", facts(trainer._score, sizes) | of_all
    if precision.sync == "bfloat16":
        copies = WeightSnapshots(decoder, mesh, share=1 / 16)
        compared = copies._compare.lower(params, jax.eval_shape(copies._nothing)).compile()
        yield f"{case}: compare", facts(compared, sizes) | of_all


def of_engine(case: str, device: jax.Device) -> Iterator[tuple[str, dict[str, Any]]]:
    config = ENGINES[case]
    on = jax.sharding.SingleDeviceSharding(device)
    precision = decode_precision(BFLOAT16, device)

    def there(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=on), tree)

    weights = there(abstract_weights(config, BFLOAT16))
    state, long = (
        there(jax.eval_shape(functools.partial(decode.empty_state, config, precision, slots=SLOTS, length=length)))
        for length in (CACHE, LONG_CACHE)
    )
    tokens = jax.ShapeDtypeStruct((128,), jnp.int32, sharding=on)
    slots = jax.ShapeDtypeStruct((SLOTS,), jnp.int32, sharding=on)
    numbers = jax.ShapeDtypeStruct((3,), jnp.int32, sharding=on)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=on)
    settings = there(decode.empty_settings(SLOTS))
    both: dict[str, Any] = {"config": config, "precision": precision}
    prefix = there(
        jax.eval_shape(
            lambda keys, values: caches.fit_prefix(keys, values, length=CACHE, keys_last=precision.keys_last),
            *jax.eval_shape(functools.partial(decode.prefill, **both), weights, tokens)[:2],
        )
    )
    hidden = there(jax.eval_shape(functools.partial(_hidden, **both), weights, tokens))[0]
    ids = jax.ShapeDtypeStruct((len(hidden), 1), jnp.int32, sharding=on)
    shared = there(jax.eval_shape(functools.partial(prompts.empty, config, precision, rows=2, length=CACHE)))
    of_chunk: Any = {**both, "steps": 4, "maximum": CACHE}
    chunk = functools.partial(decode.decode_chunk.lower, weights, state, **of_chunk)
    lowered: dict[str, Callable[[], Any]] = {
        "prefill": lambda: decode.prefill.lower(weights, tokens, **both),
        "insert": lambda: decode.insert.lower(state, prefix, slots, slots, numbers, settings),
        "move": lambda: decode.move.lower(state, slots, slots, count),
        "decode": lambda: chunk(width=SLOTS),
        "decode, half of the slots": lambda: chunk(width=SLOTS // 2),
        "decode, shared prompts": lambda: chunk(shared, width=SLOTS),
        "decode, long caches": lambda: decode.decode_chunk.lower(weights, long, shared, **of_chunk, width=SLOTS),
        "put": lambda: prompts.put.lower(shared, prefix, count, count),
        "decode, filtered": lambda: chunk(width=SLOTS, filtered=True),
        "hidden": lambda: _hidden.lower(weights, tokens, **both),
        "score": lambda: _score.lower(weights, hidden, ids, **both, top_k=8),
    }
    of_all = {
        "caches": len(state.keys) + len(state.values),
        "cache": state.keys[0].size * state.keys[0].dtype.itemsize,
        "cache_dtype": str(state.keys[0].dtype),
        "weights": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weights)),
    }
    for name, lower in lowered.items():
        yield f"{case}: {name}", facts(lower().compile()) | of_all


def main(topology: str, cases: list[str]) -> None:
    machine = parse(topology)
    devices = compiled.devices_of(machine)
    jax.config.update("jax_enable_compilation_cache", False)
    found: dict[str, dict[str, Any]] = {}
    with compiled.cudnn_of(devices[0]):
        for case in cases:
            found |= of_engine(case, devices[0]) if case in ENGINES else of_update(case, devices)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
