"""One layout on one machine: bytes on a device, communication between devices, the least time of a step.

Compiled where there is a compiler for the chip, else by formula. If a layout does not fit, `search` finds the nearest
one that does: mesh, rows of a micro-batch and remat may differ from the config's. A distance of one is a factor of two
of an axis, half the rows, or the next stage of remat. Only layouts that the model allows count: heads divide over
`tensor`, experts over `expert`, whole blocks of a row over `context`.

Bytes on one device of an update's persistent state, exact, from the shapes and the mesh:

parameters     float32 masters                              4 P / (axes that shard them); with an adapter also the
                                                            policy in the sync dtype, and P is the adapter's except
                                                            in "weights sent" and "reference"
optimizer      both moments, and the counters               8 P / ... ; and 4 of biases and norms' scales
gradients      float32                                      4 P / ...
weights sent   the last version, in the sync dtype          2 P / ... ; twice just before a version is sent
reference      in the sync dtype, if the loss has a KL      2 P / ...
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable

from launch.machines import Machine
from scalerl_jax.config import Config
from scalerl_jax.learner import optimizer as optimizer_lib
from scalerl_jax.learner.make_trainer import lora_of, make_trainer
from scalerl_jax.learner.memory_estimate import bytes_on_one_device
from scalerl_jax.model.attention import splash
from scalerl_jax.model.decoder import abstract_params
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.experts import LARGE_BLOCK, rows_of_block
from scalerl_jax.model.head import chunk_of
from scalerl_jax.model.lora import starts_frozen
from scalerl_jax.model.remat import REMATS
from scalerl_jax.model.sharding import MESH_AXES, mesh_sizes
from scalerl_jax.planning import analytic, compiled, program_roofline, roofline
from scalerl_jax.planning.analytic import Flops, of_micro_batch, pairs
from scalerl_jax.planning.collectives import found_in
from scalerl_jax.planning.program_roofline import ProgramRoofline
from scalerl_jax.planning.roofline import LINKS, MEMORY, NETWORK, PRODUCTS, Roofline, Traffic, by_axes
from scalerl_jax.planning.workload import Workload


@dataclasses.dataclass(frozen=True)
class Choice:
    """A layout that replaces the config's own."""

    mesh: tuple[tuple[str, int], ...]  # axis, devices
    rows: int  # config.learner.micro_batch_rows
    remat: str
    away: int  # distance from the config

    def __str__(self) -> str:
        axes = [f"--config.learner.{axis}={size}" for axis, size in self.mesh if size > 1 or axis == "fsdp"]
        return " ".join([*axes, f"--config.learner.micro_batch_rows={self.rows}", f"--config.model.remat={self.remat}"])

    def put_into(self, config: Config) -> Config:
        config = copy.deepcopy(config)
        for axis, size in self.mesh:
            setattr(config.learner, axis, size)
        config.learner.micro_batch_rows, config.model.remat = self.rows, self.remat  # type: ignore[assignment]
        return config


@dataclasses.dataclass(frozen=True)
class Question:
    """The inputs of a plan that do not depend on the layout."""

    config: Config  # with a definite compute dtype
    decoder: DecoderConfig
    machine: Machine
    workload: Workload
    peak_share: float


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes on one device; those of the state are exact."""

    parameters: int
    optimizer: int
    gradients: int
    sent: int  # weights of the last version, for deltas
    temporaries: int  # of the largest micro-batch, in addition
    ending: int  # of the optimizer's step
    limit: int
    reference: int  # the policy that the run started with

    @property
    def state(self) -> int:
        return self.parameters + self.optimizer

    @property
    def needed(self) -> int:
        """As in learner/memory_estimate.py: the larger of an update, and a version together with the previous one."""
        kept = self.state + self.reference + self.sent
        return max(kept + self.gradients + max(self.temporaries, self.ending), kept + self.sent)

    @property
    def over(self) -> int:
        """Bytes above the limit; positive if it does not fit."""
        return self.needed - self.limit


@dataclasses.dataclass(frozen=True)
class LayoutPlan:
    choice: Choice
    bytes: Bytes
    by_formula: int  # temporaries, for comparison
    update: compiled.Update  # without its programs
    rows: int  # of a micro-batch on the whole mesh
    micro_batches: int  # of a step
    flops: Flops  # of a micro-batch, on all devices
    traffic: tuple[Traffic, ...] | None  # of a micro-batch; None: it did not compile
    formula_traffic: tuple[Traffic, ...]
    roofline: Roofline
    program: ProgramRoofline | None  # of a step; None: not compiled


def own_choice(config: Config, devices: int) -> Choice:
    """The config's own layout. Raises ValueError where its mesh does not fit the number of devices."""
    sizes = mesh_sizes(devices, **{axis: getattr(config.learner, axis) for axis in MESH_AXES})
    return Choice(tuple(sizes.items()), config.learner.micro_batch_rows, config.model.remat, 0)


def other_choices(config: Config, decoder: DecoderConfig, devices: int) -> list[Choice]:
    """The layouts that use less memory in some way, nearest first; `replica` does not change."""
    now = own_choice(config, devices)
    before = dict(now.mesh)
    left = devices // before["replica"]
    parts = [n for n in (2**i for i in range(11)) if left % n == 0]
    tensors = [n for n in {*parts, before["tensor"]} if decoder.heads % n == 0 and decoder.vocab_size % n == 0]
    contexts = [n for n in {*parts, before["context"]} if config.learner.seq_len % (splash.LANES * n) == 0]
    experts = [n for n in {*parts, before["expert"]} if n == 1 or (decoder.experts and decoder.experts % n == 0)]
    rows = [now.rows] + [now.rows >> i for i in range(1, now.rows.bit_length())]
    remats = REMATS[REMATS.index(now.remat) :]
    found = []
    for tensor, context, expert, row, remat in itertools.product(tensors, contexts, experts, rows, remats):
        rest, odd = divmod(left, tensor * context * expert)
        if odd or rest == 0:
            continue
        sizes = {"replica": before["replica"], "fsdp": rest, "context": context, "expert": expert, "tensor": tensor}
        away = sum(abs(math.log2(sizes[axis] / before[axis])) for axis in ("context", "expert", "tensor"))
        away += math.log2(now.rows / row) + REMATS.index(remat) - REMATS.index(now.remat)
        if away:
            found.append(Choice(tuple(sizes.items()), row, remat, math.ceil(away)))
    return sorted(found, key=lambda choice: (choice.away, choice.mesh))


def plan(question: Question, choice: Choice) -> LayoutPlan:
    """Plans a layout; compiles if there is a compiler. Raises ValueError for an impossible layout, as Trainer does."""
    update = None
    if compiled.is_there(question.machine):
        devices = compiled.devices_of(question.machine)
        config = choice.put_into(question.config)
        trainer = make_trainer(config, question.decoder, max_segment=question.workload.longest, devices=devices)
        update = compiled.compile_update(trainer, rounds=_rounds(question, choice))
    return estimate(question, choice, update)


def search(
    question: Question, first: LayoutPlan, *, compiles: int, report: Callable[[str], None]
) -> tuple[LayoutPlan | None, list[LayoutPlan]]:
    """The nearest layout that fits (or None), and the layouts compiled on the way, at most `compiles`.

    Candidates are the layouts that fit by formula, nearest and then fastest first. The formula's temporaries are
    corrected by its error on the first layout; upwards only, if that did not compile: then the compiler gave up early.
    """
    wrong_by = first.bytes.temporaries / max(1, first.by_formula)
    if first.update.live is None:
        wrong_by = max(1.0, wrong_by)
    possible = list[LayoutPlan]()
    for choice in other_choices(question.config, question.decoder, question.machine.devices):
        one = estimate(question, choice)
        corrected = dataclasses.replace(one.bytes, temporaries=int(one.bytes.temporaries * wrong_by))
        if corrected.over <= 0:
            possible.append(one)
    possible.sort(key=lambda one: (one.choice.away, one.roofline.step))
    if not compiled.is_there(question.machine):
        return (possible[0] if possible else None), possible[:1]
    tried = list[LayoutPlan]()
    for one in possible[:compiles]:
        report(f"compiling {one.choice}")
        tried.append(plan(question, one.choice))
        if tried[-1].bytes.over <= 0:
            return tried[-1], tried
    return None, tried


def estimate(question: Question, choice: Choice, update: compiled.Update | None = None) -> LayoutPlan:
    """Plans a layout by formula, with the compiler's results in place of the formula's where there are any."""
    machine, decoder, workload = question.machine, question.decoder, question.workload
    config = choice.put_into(question.config)
    mesh = dict(choice.mesh)
    state = _state_bytes(config, decoder, mesh)
    shapes = analytic.DeviceShapes(
        decoder=decoder,
        mesh=mesh,
        seq_len=config.learner.seq_len,
        rows_per_shard=choice.rows,
        remat=choice.remat,
        logprob_chunk=chunk_of(config.learner.logprob_chunk, machine.kind),
        width=2 if config.model.compute_dtype == "bfloat16" else 4,
        trained=state["gradients"] / 4,
    )
    rows = choice.rows * mesh["replica"] * mesh["fsdp"] * mesh["expert"]
    by_formula, (backend, block) = analytic.temporaries(shapes), _attention(question)
    update = update or compiled.Update.by_formula(by_formula, attention=f"attention: {backend}, by formula")
    size = Bytes(**state, temporaries=update.temporaries, ending=update.ending, limit=machine.chip.memory)
    work = of_micro_batch(
        decoder, rows=rows, seq_len=shapes.seq_len, longest=workload.longest, remat=choice.remat, backend=backend,
        block=block, reference=config.objective.reference_kl > 0, adapted=config.lora.rank > 0,
    )  # fmt: skip
    formula = tuple(by_axes(analytic.collectives(shapes), mesh, machine))
    found: tuple[Traffic, ...] | None = formula
    if update.seconds is not None:
        found = None if update.programs is None else tuple(by_axes(found_in(update.programs[0]), mesh, machine))
        if found is not None and not any(one.over_network for one in found):
            # Between slices the compiler emits host transfers, which are not collectives: use the formula.
            found = _with_network(found, formula)
    micro_batches = workload.micro_batches(rows=rows, seq_len=shapes.seq_len)
    program = None
    if update.programs is not None:
        of_row = pairs(shapes.seq_len, workload.longest, backend, block) / shapes.seq_len
        attended = _attended(question, update.attention, of_row, block=block, parts=mesh["context"])
        chip = dataclasses.replace(machine.chip, flops=question.peak_share * machine.chip.flops)
        on = dataclasses.replace(machine, chip=chip)
        micro_batch, ending = (program_roofline.of(one, on, attended=attended) for one in update.programs)
        program = program_roofline.summed({"micro-batch": (micro_batch, micro_batches), "optimizer": (ending, 1)})
    times = roofline.of(
        machine,
        flops=work,
        memory_bytes=analytic.memory_traffic(shapes),
        traffic=list(formula if found is None else found),
        micro_batches=micro_batches,
        parameters=size.gradients / 4,
        dtype=config.model.compute_dtype,
        peak_share=question.peak_share,
    )
    if program is not None:
        on_chip, bound_by = program.seconds - program.waited, program.bound_by
        parts = times.parts | {PRODUCTS: program.products, MEMORY: program.moved / machine.chip.memory_rate}
        if machine.chip.is_tpu:  # traffic between slices is not in the program's text
            bound_by[NETWORK] = max(0.0, parts[NETWORK] - on_chip)
        step = max(program.seconds, on_chip + bound_by[NETWORK])
        in_turn = on_chip + parts[LINKS] + parts[NETWORK]
        times = Roofline(step, in_turn, parts, max(bound_by, key=lambda part: bound_by[part]))
    return LayoutPlan(
        choice=choice,
        bytes=size,
        by_formula=by_formula,
        update=dataclasses.replace(update, programs=None),  # they are large
        rows=rows,
        micro_batches=micro_batches,
        flops=work,
        traffic=found,
        formula_traffic=formula,
        roofline=times,
        program=program,
    )


def _with_network(found: tuple[Traffic, ...], formula: tuple[Traffic, ...]) -> tuple[Traffic, ...]:
    """What was found, and over the network what the formula has."""
    merged = {one.axes: one for one in found}
    for one in formula:
        if one.over_network:
            own = merged.get(one.axes, dataclasses.replace(one, received=0, link_seconds=0.0))
            received = own.received + round(one.over_network)
            merged[one.axes] = dataclasses.replace(
                own, received=received, over_network=one.over_network, network_seconds=one.network_seconds
            )
    return tuple(merged.values())


def _state_bytes(config: Config, decoder: DecoderConfig, sizes: dict[str, int]) -> dict[str, int]:
    """The fields of Bytes that a mesh of these sizes fixes."""
    mesh = analytic.abstract_mesh(sizes)
    lora, sent = lora_of(config, decoder), bytes_on_one_device(abstract_params(decoder, mesh, config.model.sync_dtype))
    params = abstract_params(decoder, mesh) if lora is None else lora.adapter(mesh)
    moments = optimizer_lib.abstract_state(params, mesh)
    trained = bytes_on_one_device(params)
    return {
        "parameters": trained if lora is None else trained + sent,
        "optimizer": bytes_on_one_device((moments, optimizer_lib.vectors(params))),
        "gradients": trained,
        "sent": sent,
        "reference": sent if config.objective.reference_kl > 0 and not starts_frozen(lora) else 0,
    }


def _attention(question: Question) -> tuple[str, int]:
    """(implementation of attention, tokens of its blocks), as `auto` chooses on this machine."""
    wanted, chip = question.config.model.attention, question.machine.chip
    if wanted == "blocks" or question.config.model.compute_dtype != "bfloat16":
        return "blocks", 512
    if not chip.is_tpu:
        return "cudnn", 1
    seq_len = question.config.learner.seq_len
    if seq_len % splash.LANES:
        return "blocks", 512
    return "splash", splash.block_sizes(chip.name, question.decoder.head_dim, seq_len, seq_len)[0]


def _attended(question: Question, note: str, of_row: float, *, block: int, parts: int) -> float:
    """Keys that a query is compared with on average. cuDNN uses the query's own segment in packed rows, and with a mask
    the row, which may be split into parts; splash its segment in whole blocks, which begin and end inside others, and
    are never fewer than two; blocks of plain XLA those of the row, `of_row` keys a query, whatever its segments.
    """
    if note.startswith("attention: splash"):  # another one may say why it is not splash
        return min(of_row, block + max(question.workload.attended, block))
    if "packed rows" in note:
        decoder, whole = question.decoder, question.workload.attended
        local = sum(decoder.local_layers()) / decoder.layers
        return (1 - local) * whole + local * min(whole, (decoder.attention_chunk + 1) / 2)
    if "with a mask" in note:  # in a row split into parts it cannot skip later keys
        seq_len = question.config.learner.seq_len
        return seq_len if parts > 1 else (seq_len + 1) / 2
    return of_row


def _rounds(question: Question, choice: Choice) -> float:
    """Trip count of the loop over blocks of (token, expert) pairs, if all experts have equally many and each expert's
    last block is half full."""
    decoder, mesh = question.decoder, dict(choice.mesh)
    if not decoder.experts:
        return 1.0
    tokens = choice.rows * question.config.learner.seq_len / mesh["context"] * mesh["expert"]  # a device
    pairs, own = int(tokens * decoder.experts_per_token), decoder.experts / mesh["expert"]
    return pairs / mesh["expert"] / rows_of_block(pairs, int(own), LARGE_BLOCK) + own / 2
