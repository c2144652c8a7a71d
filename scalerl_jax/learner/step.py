"""One update: `accumulate` as often as the batch has micro-batches, then `apply`.

    grads = 0;  for each micro-batch: grads += d loss / d params;  params, moments, compensation = adamw(grads)

What `accumulate` computes of every token on its way, its log-prob, is there before `apply` is called: a batch may be
looked at, and dropped, before anything has changed. Where the loss has a KL to the policy that the run began with,
that policy is kept in the dtype that weights are sent in, which is what the forward pass rounds to anyway, and scores
each micro-batch before it.

Both are compiled once, for one shape, and overwrite what they carry (donated). The loss is a plain sum of weighted
tokens, so the gradient is the same however the batch is packed, cut or laid out on the mesh. The state is one tree
{"params", "opt_state", "compensation", "step"}; `step` counts the optimizer's steps (compensation: optimizer.py).

Left out on purpose: versions and batches are the caller's count: a batch in which no prompt survives never comes here.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalerl_jax.config import Config
from scalerl_jax.contract.codec import Completion
from scalerl_jax.learner import optimizer as optimizer_lib
from scalerl_jax.learner.packing import Elsewhere, MicroBatch, Place, Segment, pack, plain, positions_of
from scalerl_jax.model.attention import Shapes
from scalerl_jax.model.attention import choose as choose_attention
from scalerl_jax.model.decoder import Params, Precision, abstract_params, forward
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.head import token_logprobs
from scalerl_jax.model.hf import to_hf
from scalerl_jax.model.sharding import MESH_AXES, ROWS, make_mesh, row_shards
from scalerl_jax.objective import policy_loss

REFERENCE = "reference_logprobs"  # of a micro-batch, beside its arrays
IN_FLIGHT = 2  # micro-batches that are computed, or wait for that: the device never waits for the next one

State = dict[str, Any]
# What is about to be done, its segments and those beside, and by name what else there is to it.
Tell = Callable[..., None]
# Of logp_train, logp_gen, advantages, weights, segment_ids, [rows, length] each, and by name of reference and entropy:
# (loss, sums), as policy_loss
Loss = Callable[..., tuple[jax.Array, dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """What is on the devices at once."""

    seq_len: int  # tokens of a packed row
    rows: int  # of one micro-batch on the whole mesh; they divide over replica x fsdp x expert
    max_segment: int | None = None  # positions of the longest segment that will come; None: seq_len
    logprob_chunk: int = 128  # tokens per chunk of the head
    remat: str = "block"  # what is kept for the backward pass, as config.model.remat
    attention: str = "auto"  # what computes it, as config.model.attention
    router_replay: bool = False  # tokens go to the experts that their segment names
    reference: bool = False  # the policy that the run began with is kept, and its log-probs are the loss's
    entropy_gradient: bool = False  # the loss differentiates the entropy that it is given


@dataclasses.dataclass
class Pending:
    """An update that is computed and not applied. Applying it, or computing another one, is up to the caller."""

    grads: Params | None  # None: it has been applied
    sums: dict[str, jax.Array]  # of the loss, `entropy`, `loss`, and what model.forward counts
    batches: int  # micro-batches
    filled: int  # positions that segments take, those beside left out
    _scored: list[jax.Array]  # of each micro-batch: [rows, length] float32
    _places: list[Place]

    def logprobs(self) -> list[np.ndarray]:
        """The policy's log p of each token given those before it, at temperature 1: [t] float32 each, the first 0.

        Of the segments in the order given, those beside after the others. Waits for the device.
        """
        return unpack([np.asarray(scored) for scored in self._scored], self._places)


def unpack(scored: Sequence[np.ndarray], places: Sequence[Place]) -> list[np.ndarray]:
    """Of micro-batches [rows, length]: each segment's part [t], with a 0 for the token that nothing predicts."""
    out = []
    for place in places:
        row = scored[place.batch][place.row, place.start : place.start + place.positions]
        out.append(np.concatenate([np.zeros(1, np.float32), row]))
    return out


def scored_only(prompt: np.ndarray, completion: Completion) -> Segment:
    """Prompt [tokens] and completion, as a segment without loss."""
    return plain(np.concatenate([prompt, completion.token_ids]), completion.experts)


class Learner:
    """Owns the training state and the compiled functions over it.

    On several hosts every one of them calls the same methods in the same order; `tell` is called with what is about to
    be done ("differentiate", "apply", "score"), with its segments and those beside, and a step's scale.
    """

    def __init__(
        self,
        *,
        decoder: DecoderConfig,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        precision: Precision,
        loss: Loss,
        layout: Layout,
    ):
        """Raises ValueError where the layout's rows do not divide over the mesh, or attention cannot be as wanted."""
        seq_len, rows = layout.seq_len, layout.rows
        shards = row_shards(mesh)
        if rows % shards:
            raise ValueError(f"{rows} rows of a micro-batch do not divide over {shards} shards ({' x '.join(ROWS)})")
        if decoder.experts % mesh.shape["expert"]:
            across = mesh.shape["expert"]
            raise ValueError(
                f"config.learner.expert={across}: the model's {decoder.experts} experts do not divide over it"
            )
        self.decoder, self.mesh = decoder, mesh
        self.seq_len, self.rows, self.rows_per_shard = seq_len, rows, rows // shards
        self.layout, self.sync_dtype = layout, precision.sync
        if layout.router_replay and not decoder.experts:
            raise ValueError("config.rollout.router_replay: the model has no experts")
        self._routed = (decoder.layers, decoder.experts_per_token) if layout.router_replay else None
        self.compiled: tuple[Any, ...] = ()  # accumulate and apply, once they are
        self.tell: Tell = lambda what, segments, beside, **fields: None
        # Called before each micro-batch of a gradient, no more than IN_FLIGHT ahead of the device. What it raises
        # leaves the state as it is: a batch need not be finished where there is no time for it.
        self.before_micro_batch: Callable[[], None] = lambda: None
        if seq_len % (parts := mesh.shape["context"]):
            raise ValueError(f"rows of {seq_len} tokens do not divide over config.learner.context={parts}")
        self.attention, self.attention_note = choose_attention(
            layout.attention,
            mesh.devices.flat[0],
            Shapes(seq_len, decoder.head_dim, precision.compute, parts),
        )
        self._batch_sharding = NamedSharding(mesh, PartitionSpec(ROWS, "context"))
        self._whole = NamedSharding(mesh, PartitionSpec())
        # What a host reads has to be on one of its devices.
        self.several_hosts = len({device.process_index for device in mesh.devices.flat}) > 1
        told = self._whole if self.several_hosts else self._batch_sharding
        abstract = abstract_params(decoder, mesh)
        # The state as ShapeDtypeStructs with shardings: what a checkpoint is restored into.
        self.abstract_state = {
            "params": abstract,
            "opt_state": optimizer_lib.abstract_state(optimizer, abstract, mesh),
            "compensation": optimizer_lib.vectors(abstract),
            "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=self._whole),
        }
        self.shardings = jax.tree.map(lambda struct: struct.sharding, self.abstract_state)
        self.abstract_reference = jax.tree.map(
            lambda struct: jax.ShapeDtypeStruct(struct.shape, precision.sync, sharding=struct.sharding), abstract
        )
        self.state: State = {}
        self._reference: Params | None = None

        hidden_of = functools.partial(
            forward, config=decoder, precision=precision, max_segment=layout.max_segment, remat=layout.remat, mesh=mesh,
            attention=self.attention,
        )  # fmt: skip
        logprobs_of = functools.partial(
            token_logprobs, config=decoder, precision=precision, chunk=layout.logprob_chunk, mesh=mesh
        )

        def score(params: Params, batch: dict[str, jax.Array]) -> Any:
            return scored_and_routed(params, batch, entropy=False)[0]

        def scored_and_routed(params: Params, batch: dict[str, jax.Array], *, entropy: bool) -> Any:
            hidden, counts = hidden_of(
                params, tokens=batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"],
                experts=batch.get("experts"), counted=True,
            )  # fmt: skip
            scored = logprobs_of(
                params, hidden=hidden, targets=batch["targets"], entropy=entropy,
                entropy_gradient=layout.entropy_gradient,
            )  # fmt: skip
            return scored, counts

        def loss_of(params: Params, batch: dict[str, jax.Array]) -> tuple[jax.Array, tuple[dict[str, Any], jax.Array]]:
            (logp, entropy), counts = scored_and_routed(params, batch, entropy=True)
            total, sums = loss(
                logp, batch["generator_logprobs"], batch["advantages"], batch["weights"], batch["segment_ids"],
                reference=batch.get(REFERENCE), entropy=entropy,
            )  # fmt: skip
            sums["entropy"] = jax.lax.stop_gradient(jnp.sum(jnp.where(batch["weights"] > 0, entropy, 0.0)))
            sums["loss"] = jax.lax.stop_gradient(total)
            return total, ({**sums, **counts}, jax.lax.stop_gradient(logp))

        def accumulate(params: Params, carry: Any, batch: dict[str, jax.Array]) -> Any:
            grads, sums = carry
            new, (parts, logp) = jax.grad(loss_of, has_aux=True)(params, batch)
            grads = jax.tree.map(jnp.add, grads, new)
            sums = {k: jnp.maximum(v, parts[k]) if k.startswith("max_") else v + parts[k] for k, v in sums.items()}
            return (grads, sums), logp

        def apply(state: State, grads: Params, scale: jax.Array) -> tuple[State, jax.Array]:
            updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
            updates = jax.tree.map(lambda update: scale * update, updates)
            params, lost = optimizer_lib.apply_updates(state["params"], updates, state["compensation"])
            after = {"params": params, "opt_state": opt_state, "compensation": lost, "step": state["step"] + 1}
            return after, optax.tree.norm(grads)

        def zeros(params: Params) -> Any:
            return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)

        whole, batches = self._whole, self._batch_sharding
        batch_shape = {
            name: jax.ShapeDtypeStruct((rows, seq_len, *value.shape[2:]), value.dtype, sharding=batches)
            for name, value in pack([plain(np.zeros(2))], length=2, rows=1, routed=self._routed)[0][0].arrays().items()
        }
        self._batch_shape, self._loss_shape = batch_shape, dict(batch_shape)
        if layout.reference:
            self._loss_shape[REFERENCE] = jax.ShapeDtypeStruct((rows, seq_len), jnp.float32, sharding=batches)
        names = jax.eval_shape(lambda p, b: loss_of(p, b)[1][0], abstract, self._loss_shape)
        self._sums = {name: sum_.shape for name, sum_ in names.items()}
        carried = (self.shardings["params"], dict.fromkeys(names, whole))
        self._accumulate = jax.jit(accumulate, donate_argnums=1, out_shardings=(carried, told))
        self._apply = jax.jit(apply, donate_argnums=0, out_shardings=(self.shardings, whole))
        self._score = jax.jit(score, out_shardings=told)
        self._score_reference = jax.jit(score, out_shardings=batches)
        self._zeros = jax.jit(zeros, out_shardings=self.shardings["params"])
        self._to_sync = jax.jit(lambda params: to_hf(params, decoder, precision.sync))
        self._init_optimizer = jax.jit(
            lambda params: (optimizer.init(params), jax.tree.map(jnp.zeros_like, optimizer_lib.vectors(params))),
            out_shardings=(self.shardings["opt_state"], self.shardings["compensation"]),
        )

    def start(self, params: Params) -> None:
        """Begins from these parameters (float32, laid out as self.shardings["params"]), the optimizer at its start."""
        step = jax.device_put(jnp.zeros((), jnp.int32), self._whole)
        opt_state, compensation = self._init_optimizer(params)
        self.state = {"params": params, "opt_state": opt_state, "compensation": compensation, "step": step}

    def keep_reference(self, params: Params) -> None:
        """The policy that the run began with, in the sync dtype, laid out as self.abstract_reference."""
        assert self.layout.reference
        self._reference = params

    def compile(self) -> None:
        """Compiles what an update needs ahead of the first batch. Nothing is computed."""
        self.compile_update()
        self._score = self._score.lower(self.abstract_state["params"], self._batch_shape).compile()

    def compile_update(self) -> None:
        """Compiles `accumulate` and `apply` alone, for the mesh's devices, which need not be here."""
        params = self.abstract_state["params"]
        sums = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self._whole) for name, shape in self._sums.items()
        }
        self._accumulate = self._accumulate.lower(params, (params, sums), self._loss_shape).compile()
        scale = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._whole)
        self._apply = self._apply.lower(self.abstract_state, params, scale).compile()
        if self.layout.reference:
            self._score_reference = self._score_reference.lower(self.abstract_reference, self._batch_shape).compile()
        self.compiled = (self._accumulate, self._apply)

    def rehearse(self) -> None:
        """Runs the worst step that can come, on real buffers: full rows of the longest segments. The state, which is
        there by then, stays as it is."""
        longest = min(self.seq_len, self.layout.max_segment or self.seq_len)
        full, rest = divmod(self.seq_len, longest)
        row = [longest] * full + [rest] * (rest > 0)
        segments = [plain(np.zeros(positions + 1, np.int32)) for positions in row * self.rows]
        jax.block_until_ready(self.gradient(self.pack(segments)[0][:1]))
        self.score([plain(np.zeros(2))])
        jax.block_until_ready(self.sync_weights())

    def pack(
        self, segments: Sequence[Segment | Elsewhere], beside: Sequence[Segment | Elsewhere] = ()
    ) -> tuple[list[MicroBatch], list[Place]]:
        """As packing.pack, in micro-batches of this learner's shape."""
        return pack(segments, length=self.seq_len, rows=self.rows, beside=beside, routed=self._routed)

    def _put(self, batch: MicroBatch) -> dict[str, jax.Array]:
        arrays = batch.arrays()
        if not self.several_hosts:
            return {name: jax.device_put(value, self._batch_sharding) for name, value in arrays.items()}
        return {
            name: jax.make_array_from_callback(value.shape, self._batch_sharding, value.__getitem__)
            for name, value in arrays.items()
        }

    def rows_of_hosts(self) -> dict[int, set[int]]:
        """The rows of a micro-batch that each host has at least some positions of, by its number."""
        found: dict[int, set[int]] = {}
        for device, (rows, _) in self._batch_sharding.devices_indices_map((self.rows, self.seq_len)).items():
            found.setdefault(device.process_index, set()).update(range(*rows.indices(self.rows)))
        return found

    def gradient(self, batches: Sequence[MicroBatch]) -> tuple[Params, dict[str, jax.Array], list[jax.Array]]:
        """The gradient of the whole batch (float32), the summed statistics of the loss, `entropy` and `loss`, and the
        log-probs of each micro-batch's tokens. Raises what before_micro_batch does."""
        grads = self._zeros(self.state["params"])
        sums: Any = jax.device_put({k: np.zeros(shape, np.float32) for k, shape in self._sums.items()}, self._whole)
        scored = []
        for batch in batches:
            if len(scored) >= IN_FLIGHT:
                jax.block_until_ready(scored[-IN_FLIGHT])
            self.before_micro_batch()
            arrays = self._put(batch)
            if self.layout.reference:
                assert self._reference is not None, "keep_reference comes first"
                arrays |= {REFERENCE: self._score_reference(self._reference, arrays)}
            (grads, sums), logp = self._accumulate(self.state["params"], (grads, sums), arrays)
            scored.append(logp)
        return grads, sums, scored

    def differentiate(
        self, segments: Sequence[Segment | Elsewhere], beside: Sequence[Segment | Elsewhere] = ()
    ) -> Pending:
        """The gradient of one batch; nothing is changed by it.

        beside: segments without loss whose log-probs are wanted too. They change no bit of the gradient.
        """
        self.tell("differentiate", segments, beside)
        batches, places = self.pack(segments, beside)
        grads, sums, scored = self.gradient(batches)
        return Pending(grads, sums, len(batches), sum(map(positions_of, segments)), scored, places)

    def apply(self, pending: Pending, *, scale: float = 1.0) -> dict[str, Any]:
        """Steps the optimizer, at `scale` times its learning rate. Returns the summed statistics, `gradient_norm`, and
        how full the rows were.

        The gradient is let go of: it is as large as the parameters, and not to lie beside what comes next.

        Raises FloatingPointError where the gradient is not finite; the state is then lost: restart from a checkpoint.
        """
        assert pending.grads is not None, "applied before"
        self.tell("apply", (), (), scale=scale)
        grads, pending.grads = pending.grads, None
        self.state, norm = self._apply(self.state, grads, jax.device_put(np.float32(scale), self._whole))
        del grads
        sums = jax.device_get(pending.sums)
        out: dict[str, Any] = {name: value if np.ndim(value) else float(value) for name, value in sums.items()}
        out["gradient_norm"] = float(norm)
        if not np.isfinite(out["gradient_norm"]):
            raise FloatingPointError(f"the gradient norm is {out['gradient_norm']} at step {int(self.state['step'])}")
        out["micro_batches"] = pending.batches
        out["row_use"] = pending.filled / (pending.batches * self.rows * self.seq_len)
        return out

    def update(self, segments: Sequence[Segment]) -> dict[str, Any]:
        """Trains on one batch; as `apply`."""
        return self.apply(self.differentiate(segments))

    def score(self, segments: Sequence[Segment | Elsewhere]) -> list[np.ndarray]:
        """log p of each token given those before it, at temperature 1: [t] float32 each, the first 0."""
        self.tell("score", segments, ())
        batches, places = self.pack(segments)
        scored = [np.asarray(self._score(self.state["params"], self._put(batch))) for batch in batches]
        return unpack(scored, places)

    def score_completions(self, samples: Sequence[tuple[np.ndarray, Completion]]) -> list[np.ndarray]:
        """The log-probs of each completion's tokens after its prompt: [t] float32 each."""
        scored = self.score([scored_only(prompt, completion) for prompt, completion in samples])
        return [logprobs[len(prompt) :] for (prompt, _), logprobs in zip(samples, scored, strict=True)]

    def sync_weights(self) -> dict[str, jax.Array]:
        """The weights as they are sent: Hugging Face names, sync dtype, buffers of their own (safe to keep)."""
        return self._to_sync(self.state["params"])


def make_learner(
    config: Config,
    decoder: DecoderConfig,
    *,
    max_segment: int,
    seq_len: int | None = None,
    rows_per_step: int | None = None,
    optimizer: optax.GradientTransformation | None = None,
    loss: Loss | None = None,
    router_replay: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> Learner:
    """The learner of a run. Raises ValueError as Learner.

    Args:
        max_segment, router_replay: see Layout.
        seq_len, optimizer, loss: None: as the config says for RL.
        rows_per_step: of an update, where that may be fewer than the config has in a micro-batch; None: any number.
        devices: None: all there are.
    """
    mesh = make_mesh(devices=devices, **{axis: getattr(config.learner, axis) for axis in MESH_AXES})
    shards = row_shards(mesh)
    rows = config.learner.micro_batch_rows
    if rows_per_step is not None:
        rows = min(rows, -(-rows_per_step // shards))
    return Learner(
        decoder=decoder,
        optimizer=optimizer or optimizer_lib.from_config(config.optimizer),
        mesh=mesh,
        precision=Precision(config.model.compute_dtype, config.model.sync_dtype, config.model.head_precision),
        loss=loss or functools.partial(policy_loss, objective=config.objective),
        layout=Layout(
            seq_len=seq_len or config.learner.seq_len,
            rows=rows * shards,
            max_segment=max_segment,
            logprob_chunk=config.learner.logprob_chunk,
            remat=config.model.remat,
            attention=config.model.attention,
            router_replay=router_replay,
            reference=loss is None and config.objective.reference_kl > 0,
            entropy_gradient=loss is None and config.objective.entropy_bonus > 0,
        ),
    )
