"""The parts of bench_accelerator that measure this project, each in a process of its own."""

import asyncio
import collections
import dataclasses
import functools
import glob
import gzip
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollout_server.engines.engine import EngineOptions
from rollout_server.engines.jax import decode
from rollout_server.engines.jax.engine import JaxEngine
from rollout_server.engines.jax.weights import DecodePrecision, DecodeWeights, abstract_weights, decode_precision
from scalerl_jax.config import PHRASE, OptimizerConfig
from scalerl_jax.contract.codec import CompletionRequest, GroupRequest, Sampling
from scalerl_jax.environments.tokenizer import make_tokenizer
from scalerl_jax.learner.packing import pack
from scalerl_jax.learner.trainer import Layout, Trainer
from scalerl_jax.learner.weight_snapshots import WeightSnapshots
from scalerl_jax.model import Precision, init_params
from scalerl_jax.model.hf_folder import write_model_folder
from scalerl_jax.model.sharding import make_mesh
from scalerl_jax.planning import program_roofline
from scalerl_jax.planning.hlo import Program
from scalerl_jax.planning.program_roofline import ProgramRoofline
from tests.benchmarks.accelerator_model import (
    BETAS,
    DECAY,
    EPSILON,
    LEARNING_RATE,
    Work,
    machine_of,
    make_segments,
    prompts,
    speeds,
    timed,
)
from tests.support.trainers import trainer_of
from tests.support.trainers import update as trained

GIB = 2**30
GROUP = 8  # completions of one prompt


def make_trainer(work: Work, *, remat: str) -> Trainer:
    trainer = trainer_of(
        work.decoder,
        Layout(seq_len=work.positions, rows=1, max_segment=max(work.lengths), logprob_chunk=work.chunk, remat=remat),
        optimizer=OptimizerConfig(
            learning_rate=LEARNING_RATE,
            warmup_steps=0,
            beta1=BETAS[0],
            beta2=BETAS[1],
            epsilon=EPSILON,
            weight_decay=DECAY,
        ),
        precision=Precision("bfloat16", "bfloat16"),
    )
    trainer.start(init_params(work.decoder, jax.random.key(0), trainer.mesh))
    return trainer


def device() -> dict[str, Any]:
    first = jax.devices()[0]
    return {"device": first.device_kind, "platform": first.platform, "jax": jax.__version__}


def peak_memory() -> float | None:
    """GiB, since the process began; None where the device does not count (a CPU)."""
    found = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return None if found is None else found / GIB


def update(work: Work, *, remat: str = "block") -> dict[str, Any]:
    """Accumulate and apply on one packed row, and the gradient alone, as PyTorch's eager mode is timed too."""
    trainer, segments = make_trainer(work, remat=remat), make_segments(work)
    batches = pack(segments, length=trainer.seq_len, rows=1)[0]
    assert len(batches) == 1
    began = time.perf_counter()
    least = least_of(work, trainer.compile_update())
    compiling = time.perf_counter() - began
    found = timed(lambda: trained(trainer, segments), work.repeats)
    gradient = timed(lambda: jax.block_until_ready(trainer.gradient(batches)), 2)["seconds"]
    return {
        **device(),
        **speeds(work, found, device()["device"]),
        "compile_seconds": compiling,
        "least_seconds": None if least is None else least.seconds,
        "gradient_seconds": gradient,
        "peak_gib": peak_memory(),
    }


def least_of(work: Work, programs: Sequence[Any]) -> ProgramRoofline | None:
    """The least seconds of compiled programs, each run once; None on a device whose figures are not known."""
    machine = machine_of(device()["device"])
    if machine is None:
        return None
    attended = sum(n * (n + 1) / 2 for n in work.lengths) / work.positions
    found = [program_roofline.of(Program(one.as_text()), machine, attended=attended) for one in programs]
    return ProgramRoofline(tuple(kernel for one in found for kernel in one.kernels))


def beside_least(kernels: dict[str, float], least: ProgramRoofline) -> list[tuple[str, float, float]]:
    """(place in the source, seconds measured, seconds at the least), the furthest apart first. kernels: name -> s."""
    measured, bound = collections.Counter[str](), collections.Counter[str]()
    scopes = {one.name: one.scope for one in least.kernels}
    for name, seconds in kernels.items():
        measured[scopes.get(name, f"not in the program's text: {name}")] += seconds
    for one in least.kernels:
        bound[one.scope] += one.seconds
    apart = sorted(measured | bound, key=lambda scope: bound[scope] - measured[scope])
    return [(scope, measured[scope], bound[scope]) for scope in apart]


@contextmanager
def kernels_of(found: dict[str, Any], least: ProgramRoofline | None) -> Iterator[None]:
    """Traces the block: what the device ran, the longest first, and for how long it had nothing to run."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            yield
        (path,) = glob.glob(f"{folder}/plugins/profile/*/*.trace.json.gz")
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
    devices = {e["pid"] for e in events if e.get("name") == "process_name" and "/device:" in e["args"]["name"]}
    ran = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("ph") == "X" and e["pid"] in devices)
    of_instructions = collections.Counter[str]()
    for event in events:
        if event.get("ph") == "X" and event["pid"] in devices:
            name = event.get("args", {}).get("hlo_op", event["name"])
            of_instructions[name] += event["dur"] / 1e6
    seconds, calls = collections.Counter[str](), collections.Counter[str]()
    idle, until = 0.0, ran[0][0] if ran else 0.0
    for began, ended, name in ran:
        seconds[name] += (ended - began) / 1e6
        calls[name] += 1
        idle, until = idle + max(0.0, began - until) / 1e6, max(until, ended)
    found |= {
        "kernels": [(name, spent, calls[name]) for name, spent in seconds.most_common(20)],
        "busy_seconds": sum(seconds.values()),
        "idle_seconds": idle,
        "places": [] if least is None else beside_least(of_instructions, least)[:20],
    }


def update_traced(work: Work, *, remat: str = "block") -> dict[str, Any]:
    """One update, kernel by kernel."""
    trainer, segments = make_trainer(work, remat=remat), make_segments(work)
    least = least_of(work, trainer.compile_update())
    for _ in range(2):
        trained(trainer, segments)
    found = device()
    with kernels_of(found, least):
        trained(trainer, segments)
        jax.block_until_ready(trainer.state)
    return found


def update_products_saved(work: Work) -> dict[str, Any]:
    return update(work, remat="save_products")


def update_products_saved_traced(work: Work) -> dict[str, Any]:
    return update_traced(work, remat="save_products")


def update_without_remat(work: Work) -> dict[str, Any]:
    return update(work, remat="none")


def weights(work: Work) -> dict[str, Any]:
    """A version after an update: found on the device, encoded on the host; and all of it as one dense version."""
    trainer, segments = make_trainer(work, remat="block"), make_segments(work)
    copies = WeightSnapshots(work.decoder, trainer.mesh, share=1 / 16)
    first = copies.snapshot(trainer.state["params"], 0)
    first.delta()
    began = time.perf_counter()
    dense = sum(tensor.nbytes for tensor in first.tensors().values())
    found: dict[str, Any] = {**device(), "dense_seconds": time.perf_counter() - began, "dense_bytes": dense}
    for step in (1, 2):  # the first compiles
        trained(trainer, segments)
        jax.block_until_ready(trainer.state)
        began = time.perf_counter()
        version = copies.snapshot(trainer.state["params"], step)
        jax.block_until_ready(version._found)
        found["compare_seconds"] = time.perf_counter() - began
        delta = version.delta()
        found["delta_seconds"] = time.perf_counter() - began
        found |= {"delta_bytes": delta.nbytes, "changed": delta.changed, "whole_tensors": delta.whole}
    return {**found, "elements": delta.elements, "peak_gib": peak_memory()}


def engine(work: Work) -> dict[str, Any]:
    """All slots busy from the first token to the last; prefill apart; a version swapped in while it samples."""
    with tempfile.TemporaryDirectory() as folder:
        base, path = os.path.join(folder, "tokenizer"), os.path.join(folder, "model")
        make_tokenizer(corpus=[PHRASE] * 9, path=base, vocabulary=300)
        params = init_params(work.decoder, jax.random.key(0), make_mesh(fsdp=1, devices=jax.devices()[:1]))
        write_model_folder(path, params=params, decoder=work.decoder, tokenizer_dir=base, dtype="bfloat16")
        del params
        began = time.perf_counter()
        options = EngineOptions(
            path,
            slots=work.slots,
            queue=work.slots,
            decode_chunk=16,
            compute_dtype="bfloat16",
            sync_dtype="bfloat16",
            maximum_tokens=work.prompt + work.sampled,
        )
        served = JaxEngine(options)
        found = {**device(), "start_seconds": time.perf_counter() - began}
    measured = asyncio.run(_measure(served, work))
    # Of the longest cache, in which the last steps are.
    chunks = served._pool._whole
    least = least_of(work, [chunks[max(chunks, key=lambda kind: (kind.length, not kind.filtered, -kind.prompts))]])
    if least is not None:
        measured["least_step_milliseconds"] = 1e3 * least.seconds / options.decode_chunk
        measured["step_places"] = [(one.scope, 1e3 * one.seconds / options.decode_chunk) for one in least.places()]
    return {**found, **measured, "peak_gib": peak_memory()}


def long_caches(work: Work) -> dict[str, Any]:
    """A decode step at long caches, a half of which is live in the mean: only that read, where it can be, and all."""
    precision = Precision("bfloat16", "bfloat16")
    on = decode_precision(precision, jax.devices()[0])
    like = abstract_weights(work.decoder, precision)
    weights = jax.tree.map(lambda x: 0.02 * jax.random.normal(jax.random.key(0), x.shape, x.dtype), like)
    return {
        **device(),
        "slots": work.slots,
        "positions": work.cache,
        "live_step_milliseconds": _step_milliseconds(work, weights, on),
        "whole_step_milliseconds": _step_milliseconds(work, weights, dataclasses.replace(on, capability=(0,))),
        "peak_gib": peak_memory(),
    }


def _step_milliseconds(work: Work, weights: DecodeWeights, precision: DecodePrecision, *, steps: int = 8) -> float:
    state = decode.empty_state(work.decoder, precision, slots=work.slots, length=work.cache)
    spread = np.linspace(work.cache // 4, 3 * work.cache // 4, work.slots)
    state = dataclasses.replace(
        state, position=jnp.asarray(spread, jnp.int32), live=~state.live, phase=state.phase + decode.ANSWER,
        left=state.left + work.cache,
    )  # fmt: skip
    chunk = functools.partial(
        decode.decode_chunk, config=work.decoder, precision=precision, steps=steps, maximum=work.cache, width=work.slots
    )

    def run() -> None:
        nonlocal state
        state, output = chunk(weights, state)
        jax.block_until_ready(output.tokens)

    return float(1e3 * timed(run, work.repeats)["seconds"] / steps)


async def _measure(served: JaxEngine, work: Work) -> dict[str, Any]:
    async def group(number: int, prompt: np.ndarray, count: int, budget: int) -> int:
        completions = tuple(CompletionRequest(i, 1000 * number + i, 0) for i in range(count))
        request = GroupRequest(0, f"{number}", prompt, completions, Sampling(answer_budget=budget))
        return sum([len(completion.token_ids) async for completion in served.generate(request)])

    async def run(groups: int, count: int, budget: int, seed: int) -> float:
        began = time.perf_counter()
        made = await asyncio.gather(
            *(group(100 * seed + i, prompt, count, budget) for i, prompt in enumerate(prompts(work, seed)[:groups]))
        )
        assert sum(made) == groups * count * budget
        return time.perf_counter() - began

    groups = work.slots // GROUP
    await run(groups, GROUP, 8, 1)  # warm
    sampling = [await run(groups, GROUP, work.sampled, 2 + i) for i in range(2)]
    prefill = [await run(work.slots, 1, 1, 10 + i) for i in range(3)]
    await served.close()
    return {
        "sampled_tokens_per_second": work.slots * work.sampled / min(sampling),
        "step_milliseconds": 1e3 * min(sampling) / work.sampled,
        "prefill_tokens_per_second": work.slots * (work.prompt - 1) / min(prefill),
        "slots": work.slots,
        "sampled": work.sampled,
    }
