"""One update: `accumulate` as often as the batch has micro-batches, then `apply`.

    grads = 0;  for each micro-batch: grads += d loss / d params;  params, moments = adamw(grads)

What `accumulate` computes of every token on its way, its log-prob, is there before `apply` is called: a batch may be
looked at, and dropped, before anything has changed.

Both are compiled once, for one shape, and overwrite what they carry (donated). The loss is a plain sum of weighted
tokens, so the gradient is the same however the batch is packed, cut or laid out on the mesh. The state is one tree
{"params", "opt_state", "step"}; `step` counts the optimizer's steps.

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
from scalerl_jax.learner.packing import MicroBatch, Place, Segment, pack, plain
from scalerl_jax.model.decoder import Params, Precision, abstract_params, forward
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.head import token_logprobs
from scalerl_jax.model.hf import to_hf
from scalerl_jax.model.sharding import ROWS, make_mesh
from scalerl_jax.objective import policy_loss

State = dict[str, Any]
# Of logp_train, logp_gen, advantages, weights, segment_ids, [rows, length] each: (loss, sums), as policy_loss
Loss = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """What is on the devices at once."""

    seq_len: int  # tokens of a packed row
    rows: int  # of one micro-batch on the whole mesh; they divide over replica x fsdp
    max_segment: int | None = None  # positions of the longest segment that will come; None: seq_len
    logprob_chunk: int = 128  # tokens per chunk of the head
    remat: bool = True  # recompute each block in the backward pass


@dataclasses.dataclass
class Pending:
    """An update that is computed and not applied. Applying it, or computing another one, is up to the caller."""

    grads: Params | None  # None: it has been applied
    sums: dict[str, jax.Array]  # summed statistics of the loss, `entropy` and `loss`
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


class Learner:
    """Owns the training state and the compiled functions over it."""

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
        """Raises ValueError where the layout's rows do not divide over the mesh."""
        seq_len, rows = layout.seq_len, layout.rows
        shards = mesh.shape["replica"] * mesh.shape["fsdp"]
        if rows % shards:
            raise ValueError(f"{rows} rows of a micro-batch do not divide over {shards} shards (replica x fsdp)")
        self.decoder, self.mesh = decoder, mesh
        self.seq_len, self.rows = seq_len, rows
        self._batch_sharding = NamedSharding(mesh, PartitionSpec(ROWS, None))
        self._whole = NamedSharding(mesh, PartitionSpec())
        abstract = abstract_params(decoder, mesh)
        # The state as ShapeDtypeStructs with shardings: what a checkpoint is restored into.
        self.abstract_state = {
            "params": abstract,
            "opt_state": optimizer_lib.abstract_state(optimizer, abstract, mesh),
            "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=self._whole),
        }
        self.shardings = jax.tree.map(lambda struct: struct.sharding, self.abstract_state)
        self.state: State = {}

        hidden_of = functools.partial(
            forward, config=decoder, precision=precision, max_segment=layout.max_segment, remat=layout.remat, mesh=mesh
        )
        logprobs_of = functools.partial(
            token_logprobs, config=decoder, precision=precision, chunk=layout.logprob_chunk, mesh=mesh
        )

        def score(params: Params, batch: dict[str, jax.Array], *, entropy: bool = False) -> Any:
            hidden = hidden_of(
                params, tokens=batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"]
            )
            return logprobs_of(params, hidden=hidden, targets=batch["targets"], entropy=entropy)

        def loss_of(params: Params, batch: dict[str, jax.Array]) -> tuple[jax.Array, tuple[dict[str, Any], jax.Array]]:
            logp, entropy = score(params, batch, entropy=True)
            total, sums = loss(
                logp, batch["generator_logprobs"], batch["advantages"], batch["weights"], batch["segment_ids"]
            )
            sums["entropy"] = jnp.sum(jnp.where(batch["weights"] > 0, entropy, 0.0))
            sums["loss"] = jax.lax.stop_gradient(total)
            return total, (sums, jax.lax.stop_gradient(logp))

        def accumulate(params: Params, carry: Any, batch: dict[str, jax.Array]) -> Any:
            grads, sums = carry
            new, (parts, logp) = jax.grad(loss_of, has_aux=True)(params, batch)
            grads = jax.tree.map(jnp.add, grads, new)
            sums = {k: jnp.maximum(v, parts[k]) if k.startswith("max_") else v + parts[k] for k, v in sums.items()}
            return (grads, sums), logp

        def apply(state: State, grads: Params) -> tuple[State, jax.Array]:
            updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, optax.tree.norm(grads)

        def zeros(params: Params) -> Any:
            return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)

        whole, batches = self._whole, self._batch_sharding
        batch_shape = {
            name: jax.ShapeDtypeStruct((rows, seq_len), value.dtype, sharding=batches)
            for name, value in pack([plain(np.zeros(2))], length=2, rows=1)[0][0].arrays().items()
        }
        names = jax.eval_shape(lambda p, b: loss_of(p, b)[1][0], abstract, batch_shape)
        self._sums = dict.fromkeys(names, 0.0)
        carried = (self.shardings["params"], dict.fromkeys(names, whole))
        self._accumulate = jax.jit(accumulate, donate_argnums=1, out_shardings=(carried, batches))
        self._apply = jax.jit(apply, donate_argnums=0, out_shardings=(self.shardings, whole))
        self._score = jax.jit(score, out_shardings=batches)
        self._zeros = jax.jit(zeros, out_shardings=self.shardings["params"])
        self._to_sync = jax.jit(lambda params: to_hf(params, decoder, precision.sync))
        self._init_optimizer = jax.jit(optimizer.init, out_shardings=self.shardings["opt_state"])

    def start(self, params: Params) -> None:
        """Begins from these parameters (float32, laid out as self.shardings["params"]), the optimizer at its start."""
        step = jax.device_put(jnp.zeros((), jnp.int32), self._whole)
        self.state = {"params": params, "opt_state": self._init_optimizer(params), "step": step}

    def compile(self) -> None:
        """Compiles everything an update needs, ahead of the first batch. `start` or a restored state comes before."""
        empty = pack([plain(np.zeros(2, np.int32))], length=self.seq_len, rows=self.rows)[0]
        grads, _, _ = self.gradient(empty)
        self._apply = self._apply.lower(self.state, grads).compile()
        self.score([np.zeros(2, np.int32)])
        jax.block_until_ready(self.sync_weights())

    def _put(self, batch: MicroBatch) -> dict[str, jax.Array]:
        return {name: jax.device_put(value, self._batch_sharding) for name, value in batch.arrays().items()}

    def gradient(self, batches: Sequence[MicroBatch]) -> tuple[Params, dict[str, jax.Array], list[jax.Array]]:
        """The gradient of the whole batch (float32), the summed statistics of the loss, `entropy` and `loss`, and the
        log-probs of each micro-batch's tokens."""
        grads = self._zeros(self.state["params"])
        sums: Any = jax.device_put({k: np.float32(v) for k, v in self._sums.items()}, self._whole)
        scored = []
        for batch in batches:
            (grads, sums), logp = self._accumulate(self.state["params"], (grads, sums), self._put(batch))
            scored.append(logp)
        return grads, sums, scored

    def differentiate(self, segments: Sequence[Segment], beside: Sequence[Segment] = ()) -> Pending:
        """The gradient of one batch; nothing is changed by it.

        beside: segments without loss whose log-probs are wanted too. They change no bit of the gradient.
        """
        batches, places = pack(segments, length=self.seq_len, rows=self.rows, beside=beside)
        grads, sums, scored = self.gradient(batches)
        return Pending(grads, sums, len(batches), sum(len(s.tokens) - 1 for s in segments), scored, places)

    def apply(self, pending: Pending) -> dict[str, float]:
        """Steps the optimizer. Returns the summed statistics, `gradient_norm`, and how full the rows were.

        The gradient is let go of: it is as large as the parameters, and not to lie beside what comes next.

        Raises FloatingPointError where the gradient is not finite; the state is then lost: restart from a checkpoint.
        """
        assert pending.grads is not None, "applied before"
        grads, pending.grads = pending.grads, None
        self.state, norm = self._apply(self.state, grads)
        del grads
        out = {name: float(value) for name, value in jax.device_get(pending.sums).items()}
        out["gradient_norm"] = float(norm)
        if not np.isfinite(out["gradient_norm"]):
            raise FloatingPointError(f"the gradient norm is {out['gradient_norm']} at step {int(self.state['step'])}")
        out["micro_batches"] = pending.batches
        out["row_use"] = pending.filled / (pending.batches * self.rows * self.seq_len)
        return out

    def update(self, segments: Sequence[Segment]) -> dict[str, float]:
        """Trains on one batch; as `apply`."""
        return self.apply(self.differentiate(segments))

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """log p of each token given those before it, at temperature 1: [t] float32 each, the first 0."""
        batches, places = pack([plain(s) for s in sequences], length=self.seq_len, rows=self.rows)
        scored = [np.asarray(self._score(self.state["params"], self._put(batch))) for batch in batches]
        return unpack(scored, places)

    def score_completions(self, samples: Sequence[tuple[np.ndarray, Completion]]) -> list[np.ndarray]:
        """The log-probs of each completion's tokens after its prompt: [t] float32 each."""
        scored = self.score([np.concatenate([prompt, completion.token_ids]) for prompt, completion in samples])
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
) -> Learner:
    """The learner of a run on all devices there are. Raises ValueError as Learner.

    Args:
        max_segment: see Layout.
        seq_len, optimizer, loss: None: as the config says for RL.
        rows_per_step: of an update, where that may be fewer than the config has in a micro-batch; None: any number.
    """
    mesh = make_mesh(replica=config.learner.replica, fsdp=config.learner.fsdp, tensor=config.learner.tensor)
    shards = mesh.shape["replica"] * mesh.shape["fsdp"]
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
        ),
    )
