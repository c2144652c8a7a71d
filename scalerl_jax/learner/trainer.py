"""The trainer: gradients of batches, the optimizer's steps, log-probs, versions and checkpoints of one policy.

    pending = trainer.forward_backward(segments, beside=scored_only)     as often as the batch needs `accumulate`
    pending.logprobs()                                                   of every token, before anything has changed
    trainer.optim_step(pending)                                          `apply`
    version = trainer.version(step)                                      the weights as they are sent

    grads = 0;  for each micro-batch: grads += d loss / d params;  params, moments, compensation = adamw(grads)

A gradient may be dropped: nothing changes before `optim_step`. Gradients of several calls add up if one is passed to
the next (`add_to`). If the loss has a KL to the initial policy of the run, that policy is kept in the dtype of the
weights sent, to which the forward pass rounds anyway, and it scores each micro-batch first.

With an adapter (model/lora.py) the state's parameters are the adapter's; the frozen ones are kept beside the state, and
are loaded from their source when a run resumes.

Compiled once, for one shape of micro-batches: `accumulate` for each form of the objective (losses.py), `apply` and
`score`, which overwrite what they carry. The loss is a plain sum of weighted tokens, so the gradient is the same
however the batch is packed, cut or laid out on the mesh. The state is one tree {"params", "opt_state", "compensation",
"step"}; `step` counts the optimizer's steps (compensation: optimizer.py).

Left out on purpose: the caller counts versions and batches: a batch in which no prompt survives never comes here.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalerl_jax.config import ObjectiveConfig, OptimizerConfig
from scalerl_jax.learner import optimizer as optimizer_lib
from scalerl_jax.learner.checkpoint import Checkpoint, Checkpoints
from scalerl_jax.learner.digests import fingerprint
from scalerl_jax.learner.packing import Elsewhere, MicroBatch, Place, Segment, pack, plain, positions_of, unpack
from scalerl_jax.learner.weight_snapshots import WeightSnapshot, WeightSnapshots, host_arrays, host_blocks
from scalerl_jax.model import row_blocks
from scalerl_jax.model.attention import Shapes
from scalerl_jax.model.attention import choose as choose_attention
from scalerl_jax.model.decoder import Params, Precision, abstract_params, forward
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.head import token_logprobs
from scalerl_jax.model.hf import to_hf
from scalerl_jax.model.lora import BASE, Lora, check_base, in_dtype, starts_frozen
from scalerl_jax.model.sharding import ROWS, compiler_options, row_shards
from scalerl_jax.objective import losses
from scalerl_jax.objective.losses import Compared, Form, form_of, numbers_of, policy_loss

REFERENCE = "reference_logprobs"  # of a micro-batch, in addition to its arrays
IN_FLIGHT = 2  # micro-batches in computation or queued: the device never waits for the next one

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shapes and options of the compiled step."""

    seq_len: int  # tokens of a packed row
    rows: int  # of one micro-batch on the whole mesh; they divide over replica x fsdp x expert
    max_segment: int | None = None  # positions of the longest possible segment; None: seq_len
    logprob_chunk: int = 128  # tokens per chunk of the head
    remat: str = "block"  # what is kept for the backward pass, as config.model.remat
    attention: str = "auto"  # the backend, as config.model.attention
    router_replay: bool = False  # tokens are routed to their segment's experts
    teacher_k: int = 0  # a teacher's ids at each position, on which the policy is compared with it; 0: none
    reference: bool = False  # the initial policy of the run is kept, and the loss uses its log-probs
    # share of a tensor's shard up to which only its changes are sent; 0: versions are sent whole
    delta_share: float = 0.0


@dataclasses.dataclass
class Pending:
    """A gradient that is computed and not applied, with the log-probs of the same call."""

    grads: Params | None  # None: it was applied, or added to another one
    sums: dict[str, jax.Array]  # of the loss, `entropy`, `loss`, and what model.forward counts
    batches: int  # micro-batches
    filled: int  # positions of the segments, those of `beside` left out
    _scored: list[jax.Array]  # of each micro-batch of the last call: [rows, length] float32
    _places: list[Place]

    def logprobs(self) -> list[np.ndarray]:
        """The policy's log p of each token given those before it, at temperature 1: [t] float32 each, the first 0.

        Of the last call's segments in the order given, those of `beside` after the others. Waits for the device.
        With soft targets [t, 1 + k]: then of each target.
        """
        return unpack([np.asarray(scored) for scored in self._scored], self._places)

    def release_gradient(self) -> Params:
        """Returns the gradient once: its user overwrites it."""
        assert self.grads is not None, "used before"
        grads, self.grads = self.grads, None
        return grads


def _merged(name: str, one: Any, other: Any) -> Any:
    """Sums of the loss of two micro-batches, or of two calls."""
    return jnp.maximum(one, other) if name.startswith("max_") else one + other


@dataclasses.dataclass
class _CompiledProgram:
    """`accumulate` for one form of the objective."""

    run: Any  # (params, frozen, (grads, sums), batch, numbers) -> ((grads, sums), logp [rows, length])
    sums: dict[str, tuple[int, ...]]  # shapes
    batch: dict[str, jax.ShapeDtypeStruct]


class Trainer:
    """On several hosts all of them call the same methods in the same order (hosts/)."""

    def __init__(
        self,
        *,
        decoder: DecoderConfig,
        objective: ObjectiveConfig,
        optimizer: OptimizerConfig,
        mesh: Mesh,
        precision: Precision,
        layout: Layout,
        lora: Lora | None = None,
    ):
        """objective, optimizer: used by calls that pass none. lora: None: all parameters are trained.

        Raises ValueError if the layout's rows do not divide over the mesh, or the attention asked for is unavailable.
        """
        seq_len, rows = layout.seq_len, layout.rows
        shards = row_shards(mesh)
        if rows % shards:
            raise ValueError(f"{rows} rows of a micro-batch do not divide over {shards} shards ({' x '.join(ROWS)})")
        if decoder.experts % mesh.shape["expert"]:
            across = mesh.shape["expert"]
            raise ValueError(
                f"config.learner.expert={across}: the model's {decoder.experts} experts do not divide over it"
            )
        if layout.router_replay and not decoder.experts:
            raise ValueError("config.rollout.router_replay: the model has no experts")
        if seq_len % (parts := mesh.shape["context"]):
            raise ValueError(f"rows of {seq_len} tokens do not divide over config.learner.context={parts}")
        self.decoder, self.mesh, self.layout, self.sync_dtype = decoder, mesh, layout, precision.sync
        self.lora = lora
        self.seq_len, self.rows, self.rows_per_shard = seq_len, rows, rows // shards
        self._objective, self._optimizer = objective, optimizer
        self._routed = (decoder.layers, decoder.experts_per_token) if layout.router_replay else None
        shapes = Shapes(seq_len, decoder.head_dim, precision.compute, parts, layout.max_segment, precision.bitwise)
        self.attention, self.attention_note = choose_attention(layout.attention, mesh.devices.flat[0], shapes)
        self.most_segments = self.attention.segments or None  # of a row
        self.align = row_blocks.alignment(precision, decoder, seq_len)
        self._batch_sharding = batches = NamedSharding(mesh, PartitionSpec(ROWS, "context"))
        self._whole = whole = NamedSharding(mesh, PartitionSpec())
        # An array that a host reads must be on one of its devices.
        self.several_hosts = len({device.process_index for device in mesh.devices.flat}) > 1
        self._read = whole if self.several_hosts else batches
        self.abstract_policy = abstract_params(decoder, mesh, precision.sync)
        # The frozen parameters: the whole policy in the sync dtype, {} without an adapter.
        self.abstract_frozen: Params = {} if lora is None else self.abstract_policy
        abstract = abstract_params(decoder, mesh) if lora is None else lora.adapter(mesh)
        # The state as ShapeDtypeStructs with shardings: what a checkpoint is restored into.
        self.abstract_state = {
            "params": abstract,
            "opt_state": optimizer_lib.abstract_state(abstract, mesh),
            "compensation": optimizer_lib.vectors(abstract),
            "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
        }
        self.shardings = jax.tree.map(lambda struct: struct.sharding, self.abstract_state)
        self.state: State = {}
        self.frozen: Params = {}
        self.base = ""  # fingerprint of the frozen parameters
        self._reference: Params | None = None
        self._snapshots = WeightSnapshots(decoder, mesh, share=layout.delta_share) if layout.delta_share else None

        self._hidden_of = functools.partial(
            forward, config=decoder, precision=precision, max_segment=layout.max_segment, remat=layout.remat, mesh=mesh,
            attention=self.attention,
        )  # fmt: skip
        self._logprobs_of = functools.partial(
            token_logprobs, config=decoder, precision=precision, chunk=layout.logprob_chunk, mesh=mesh
        )

        def score(params: Params, frozen: Params, batch: dict[str, jax.Array]) -> Any:
            return self._scored(self._policy(params, frozen), batch)[0]

        def apply(state: State, grads: Params, numbers: Mapping[str, jax.Array]) -> tuple[State, jax.Array]:
            adamw = optimizer_lib.adamw(numbers)
            updates, opt_state = adamw.update(grads, state["opt_state"], state["params"])
            params, lost = optimizer_lib.apply_updates(state["params"], updates, state["compensation"])
            after = {"params": params, "opt_state": opt_state, "compensation": lost, "step": state["step"] + 1}
            return after, optax.tree.norm(grads)

        self._batch_shape = self._shape_of(self.pack([plain(np.zeros(2))])[0][0])
        self._programs: dict[tuple[Form, tuple[Any, ...]], _CompiledProgram] = {}
        self._apply = jax.jit(apply, donate_argnums=0, out_shardings=(self.shardings, whole))
        self._jit = functools.partial(jax.jit, compiler_options=compiler_options(mesh))
        self._score = self._jit(score, out_shardings=self._read)
        self._score_reference = self._jit(lambda *given: self._scored(*given)[0], out_shardings=batches)
        self._zeros = jax.jit(lambda p: jax.tree.map(jnp.zeros_like, p), out_shardings=self.shardings["params"])
        self._to_sync = jax.jit(lambda *params: to_hf(self._policy(*params), decoder, precision.sync))
        self._init_optimizer = jax.jit(
            lambda params: (optimizer_lib.init(params), jax.tree.map(jnp.zeros_like, optimizer_lib.vectors(params))),
            out_shardings=(self.shardings["opt_state"], self.shardings["compensation"]),
        )

    # ---- what is compiled

    def _policy(self, params: Params, frozen: Params) -> Params:
        return params if self.lora is None else self.lora.join(params, frozen)

    def _scored(self, params: Params, batch: dict[str, jax.Array], **wanted: Any) -> Any:
        hidden, counts = self._hidden_of(
            params, tokens=batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"],
            experts=batch.get("experts"), counted=True,
        )  # fmt: skip
        return self._logprobs_of(params, hidden=hidden, targets=batch["targets"], **wanted), counts

    def _shape_of(self, batch: MicroBatch) -> dict[str, jax.ShapeDtypeStruct]:
        struct = functools.partial(jax.ShapeDtypeStruct, sharding=self._batch_sharding)
        shape = self.rows, self.seq_len
        return {name: struct((*shape, *array.shape[2:]), array.dtype) for name, array in batch.arrays().items()}

    def _program(self, form: Form, batch: dict[str, jax.ShapeDtypeStruct] | None = None) -> _CompiledProgram:
        """Made once for each form and shape of `batch`, compiled at its first use, or by `compile`."""
        batch = dict(self._batch_shape if batch is None else batch)
        key = form, tuple((name, struct.shape) for name, struct in batch.items())
        if key in self._programs:
            return self._programs[key]
        fields = dict(form.fields)
        with_reference, compares = "reference_kl" in form.on, fields["distill"] in losses.OVER_IDS
        assert self.layout.reference or not with_reference, "the layout keeps no reference policy"
        assert "teacher_ids" in batch or not compares, "the batch has no ids of a teacher"

        def loss_of(params: Params, frozen: Params, batch: dict[str, jax.Array], numbers: Any) -> tuple[Any, Any]:
            ids = batch["teacher_ids"] if compares else None
            (logp, entropy, *others), counts = self._scored(
                self._policy(params, frozen), batch, entropy=True, entropy_gradient="entropy_bonus" in form.on, ids=ids
            )
            compared = Compared(ids, *others, batch["teacher_logprobs"]) if ids is not None else None
            if "thresholds" in batch:
                names = losses.THRESHOLDS[fields["loss"]]
                numbers = numbers | {name: batch["thresholds"][..., i] for i, name in enumerate(names)}
            total, sums = policy_loss(
                logp, batch["generator_logprobs"], batch["advantages"], batch["weights"], batch["segment_ids"],
                form.objective(numbers), reference=batch.get(REFERENCE), entropy=entropy, compared=compared,
            )  # fmt: skip
            sums["entropy"] = jax.lax.stop_gradient(jnp.sum(jnp.where(batch["weights"] > 0, entropy, 0.0)))
            sums["loss"] = jax.lax.stop_gradient(total)
            if fields["distill"] == losses.SOFT_TARGETS:
                logp = jnp.concatenate([logp[..., None], *others], axis=-1)
            return total, ({**sums, **counts}, jax.lax.stop_gradient(logp))

        def accumulate(params: Params, frozen: Params, carry: Any, batch: dict[str, jax.Array], numbers: Any) -> Any:
            grads, sums = carry
            new, (parts, logp) = jax.grad(loss_of, has_aux=True)(params, frozen, batch, numbers)
            grads = jax.tree.map(jnp.add, grads, new)
            return (grads, {name: _merged(name, sums[name], parts[name]) for name in sums}), logp

        if with_reference:
            batch[REFERENCE] = batch["weights"]
        sums = jax.eval_shape(
            lambda *of: loss_of(*of)[1][0],
            self.abstract_state["params"], self.abstract_frozen, batch, dict.fromkeys(form.on, 1.0),
        )  # fmt: skip
        carried = (self.shardings["params"], dict.fromkeys(sums, self._whole))
        run = self._jit(accumulate, donate_argnums=2, out_shardings=(carried, self._read))
        self._programs[key] = _CompiledProgram(run, {name: sum_.shape for name, sum_ in sums.items()}, batch)
        return self._programs[key]

    def _numbers(self, values: Mapping[str, float]) -> dict[str, jax.Array]:
        """The numbers on the device, as arguments of a program."""
        return jax.device_put({name: np.float32(value) for name, value in values.items()}, self._whole)

    def compile(self) -> None:
        """Compiles what an update needs ahead of the first batch. Nothing is computed."""
        self.compile_update()
        params = self.abstract_state["params"], self.abstract_frozen
        self._score = self._score.lower(*params, self._batch_shape).compile()

    def compile_update(self) -> tuple[Any, Any]:
        """Compiles `accumulate`, of the trainer's own objective, and `apply` alone, for the mesh's devices, which may
        be absent here. Returns both; if compiled already, unchanged."""
        params, form = self.abstract_state["params"], form_of(self._objective)
        program = self._program(form)
        if hasattr(program.run, "lower"):
            struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32, sharding=self._whole)
            sums = {name: struct(shape) for name, shape in program.sums.items()}
            given = params, self.abstract_frozen, (params, sums), program.batch, dict.fromkeys(form.on, struct(()))
            program.run = program.run.lower(*given).compile()
            numbers = dict.fromkeys(optimizer_lib.numbers_of(self._optimizer, 0.0), struct(()))
            self._apply = self._apply.lower(self.abstract_state, params, numbers).compile()
            if self.layout.reference:
                scored = self._score_reference.lower(self.abstract_policy, self._batch_shape)
                self._score_reference = scored.compile()
        return program.run, self._apply

    # ---- the state

    @property
    def policy(self) -> Params:
        """The parameters. With an adapter some of them are LowRank, and are merged where they are used."""
        return self._policy(self.state["params"], self.frozen)

    @property
    def steps(self) -> int:
        """The optimizer's steps."""
        return int(self.state["step"])

    def start(self, params: Params, frozen: Params | None = None) -> None:
        """Begins from these parameters (float32, laid out as self.shardings["params"]), the optimizer at its start.

        frozen: with an adapter, the policy that it adapts, as self.abstract_frozen; `params` are the adapter's.
        """
        self.frozen = {} if frozen is None else frozen
        step = jax.device_put(jnp.zeros((), jnp.int32), self._whole)
        opt_state, compensation = self._init_optimizer(params)
        self.state = {"params": params, "opt_state": opt_state, "compensation": compensation, "step": step}

    def keep_reference(self, params: Params) -> None:
        """Keeps the initial policy of the run, in the sync dtype, laid out as self.abstract_policy."""
        assert self.layout.reference
        self._reference = params

    def save(
        self, checkpoints: Checkpoints, step: int, *, manifest: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> None:
        """Saves the state as checkpoint `step`; see Checkpoints.save. Of frozen parameters only the fingerprint."""
        manifest = {**manifest, **({BASE: self.base} if self.lora else {})}
        checkpoints.save(step, self.state, manifest=manifest, arrays=arrays)

    def restore(self, checkpoints: Checkpoints, begin: Callable[[Any], Params]) -> Checkpoint | None:
        """Resumes from the newest readable checkpoint; None: there is none, and it starts from the initial policy of
        the run. Raises as Checkpoints.restore, and ValueError if an adapter belongs to another policy.

        begin: loads that policy, or its frozen parameters, laid out on the mesh, in the dtype that it is given.
        """
        found, started = checkpoints.restore(self.abstract_state), None
        if self.lora is not None:
            self.frozen = begin(self.sync_dtype)
            self.base = fingerprint(self.frozen)
            if found is None or self.layout.reference:
                started = self.lora.start(self.mesh, base=self.base)
            if found is not None:
                check_base("the checkpoint's adapter", found.manifest.get(BASE), self.base)
        if found is not None:
            self.state = found.state
        else:
            self.start(begin(jnp.float32) if started is None else started, self.frozen)
        if self.layout.reference:
            self.keep_reference(self.frozen if starts_frozen(self.lora) else self._policy_at_start(begin, started))
        return found

    def _policy_at_start(self, begin: Callable[[Any], Params], adapter: Params | None) -> Params:
        """The initial policy of the run, in the sync dtype."""
        if adapter is None:
            return begin(self.sync_dtype)
        rounded = jax.jit(
            lambda adapter, frozen: in_dtype(self._policy(adapter, frozen), self.sync_dtype),
            out_shardings=jax.tree.map(lambda struct: struct.sharding, self.abstract_policy),
        )
        return rounded(adapter, self.frozen)

    def version(self, step: int) -> WeightSnapshot:
        """The policy as version `step`, made on the device. Its bytes are copied to the host on request."""
        if self._snapshots is not None:
            found = self._snapshots.snapshot(self.policy, step)
            return WeightSnapshot(step, found.blocks if self.several_hosts else found.tensors, found.delta)
        weights = self.sync_weights()
        return WeightSnapshot(step, functools.partial(host_blocks if self.several_hosts else host_arrays, weights))

    # ---- batches

    def rehearse(self) -> None:
        """Runs the worst possible step on real buffers: full rows of the longest segments. The state, which exists by
        then, is not changed."""
        longest = min(self.seq_len, self.layout.max_segment or self.seq_len)
        full, rest = divmod(self.seq_len, longest)
        row = [longest] * full + [rest] * (rest > 0)
        segments = [plain(np.zeros(positions + 1, np.int32)) for positions in row * self.rows]
        jax.block_until_ready(self.gradient(self.pack(segments)[0][:1]))
        Trainer.score(self, [plain(np.zeros(2))])  # on this host alone: a subclass may send it to others
        jax.block_until_ready(self.sync_weights())

    def pack(
        self, segments: Sequence[Segment | Elsewhere], beside: Sequence[Segment | Elsewhere] = ()
    ) -> tuple[list[MicroBatch], list[Place]]:
        """As packing.pack, in micro-batches of this trainer's shape."""
        return pack(
            segments, length=self.seq_len, rows=self.rows, beside=beside, routed=self._routed,
            teacher_k=self.layout.teacher_k, most=self.most_segments, align=self.align,
        )  # fmt: skip

    def _put(self, batch: MicroBatch) -> dict[str, jax.Array]:
        arrays = batch.arrays()
        if not self.several_hosts:
            return {name: jax.device_put(value, self._batch_sharding) for name, value in arrays.items()}
        return {
            name: jax.make_array_from_callback(value.shape, self._batch_sharding, value.__getitem__)
            for name, value in arrays.items()
        }

    def gradient(
        self,
        batches: Sequence[MicroBatch],
        *,
        objective: ObjectiveConfig | None = None,
        grads: Params | None = None,
        before_micro_batch: Callable[[], None] = lambda: None,
    ) -> tuple[Params, dict[str, jax.Array], list[jax.Array]]:
        """The gradient of these micro-batches (float32), the summed statistics of the loss, `entropy` and `loss`, and
        the log-probs of each micro-batch's tokens. Arguments as of forward_backward.

        grads: overwritten, with the gradient added to it.
        """
        objective = objective or self._objective
        program = self._program(form_of(objective), self._shape_of(batches[0]))
        grads = self._zeros(self.state["params"]) if grads is None else grads
        numbers = self._numbers(numbers_of(objective))
        sums: Any = jax.device_put({k: np.zeros(shape, np.float32) for k, shape in program.sums.items()}, self._whole)
        scored = []
        for batch in batches:
            if len(scored) >= IN_FLIGHT:
                jax.block_until_ready(scored[-IN_FLIGHT])
            before_micro_batch()
            arrays = self._put(batch)
            if REFERENCE in program.batch:
                assert self._reference is not None, "keep_reference comes first"
                arrays |= {REFERENCE: self._score_reference(self._reference, arrays)}
            (grads, sums), logp = program.run(self.state["params"], self.frozen, (grads, sums), arrays, numbers)
            scored.append(logp)
        return grads, sums, scored

    def forward_backward(
        self,
        segments: Sequence[Segment | Elsewhere],
        *,
        beside: Sequence[Segment | Elsewhere] = (),
        objective: ObjectiveConfig | None = None,
        add_to: Pending | None = None,
        before_micro_batch: Callable[[], None] = lambda: None,
    ) -> Pending:
        """The gradient of one batch; the policy is not changed by it.

        beside: segments without loss, only for their log-probs. They change no bit of the gradient.
        objective: the loss and its numbers; None: the trainer's own. Another form of it is compiled at its first use.
        add_to: an earlier gradient, to which this one is added, and which is used up.
        before_micro_batch: called before each micro-batch, no more than IN_FLIGHT ahead of the device. If it raises,
        the policy is unchanged: a batch can be abandoned when time is short.
        """
        batches, places = self.pack(segments, beside)
        added = add_to.release_gradient() if add_to is not None else None
        grads, sums, scored = self.gradient(
            batches, objective=objective, grads=added, before_micro_batch=before_micro_batch
        )
        filled = sum(map(positions_of, segments))
        if add_to is not None:
            both = sums.keys() & add_to.sums.keys()
            sums = {**add_to.sums, **sums, **{name: _merged(name, add_to.sums[name], sums[name]) for name in both}}
            return Pending(grads, sums, add_to.batches + len(batches), add_to.filled + filled, scored, places)
        return Pending(grads, sums, len(batches), filled, scored, places)

    def optim_step(
        self, pending: Pending, *, learning_rate: float | None = None, optimizer: OptimizerConfig | None = None
    ) -> dict[str, Any]:
        """Steps the optimizer. Returns the summed statistics, `gradient_norm`, and how full the rows were.

        The gradient is released: it is as large as the parameters, and must not stay in memory afterwards.

        optimizer: its numbers, by default the trainer's own. learning_rate: by default `optimizer`'s for this step.
        Raises FloatingPointError if the gradient is not finite; the state is then lost: restart from a checkpoint.
        """
        optimizer = optimizer or self._optimizer
        if learning_rate is None:
            learning_rate = optimizer_lib.learning_rate(optimizer, self.steps)
        numbers = self._numbers(optimizer_lib.numbers_of(optimizer, learning_rate))
        self.state, norm = self._apply(self.state, pending.release_gradient(), numbers)
        sums = jax.device_get(pending.sums)
        out: dict[str, Any] = {name: value if np.ndim(value) else float(value) for name, value in sums.items()}
        out["gradient_norm"] = float(norm)
        if not np.isfinite(out["gradient_norm"]):
            raise FloatingPointError(f"the gradient norm is {out['gradient_norm']} at step {self.steps}")
        out["micro_batches"] = pending.batches
        out["row_use"] = pending.filled / (pending.batches * self.rows * self.seq_len)
        return out

    def score(self, segments: Sequence[Segment | Elsewhere]) -> list[np.ndarray]:
        """log p of each token given those before it, at temperature 1: [t] float32 each, the first 0."""
        batches, places = self.pack(segments) if segments else ([], [])
        params = self.state["params"], self.frozen
        scored = [np.asarray(self._score(*params, self._put(batch))) for batch in batches]
        return unpack(scored, places)

    def sync_weights(self) -> dict[str, jax.Array]:
        """The weights as they are sent: Hugging Face names, sync dtype, separate buffers (safe to keep)."""
        return self._to_sync(self.state["params"], self.frozen)
