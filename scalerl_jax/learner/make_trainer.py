"""The trainer of a config: mesh, precision, layout and adapter; and the policy of one of its checkpoints."""

from collections.abc import Callable, Sequence

import jax

from scalerl_jax.config import Config, ObjectiveConfig, OptimizerConfig
from scalerl_jax.learner.checkpoint import Checkpoint
from scalerl_jax.learner.digests import fingerprint
from scalerl_jax.learner.trainer import Layout, Trainer
from scalerl_jax.model.decoder import Params, Precision
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.head import chunk_of
from scalerl_jax.model.hf import load_hf
from scalerl_jax.model.lora import BASE, Lora, check_base
from scalerl_jax.model.sharding import MESH_AXES, make_mesh, row_shards
from scalerl_jax.objective.losses import DIVERGENCES


def make_trainer(
    config: Config,
    decoder: DecoderConfig,
    *,
    max_segment: int,
    seq_len: int | None = None,
    rows_per_step: int | None = None,
    objective: ObjectiveConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    adapted: bool = True,
    devices: Sequence[jax.Device] | None = None,
    make: Callable[..., Trainer] = Trainer,
) -> Trainer:
    """The trainer of a run. Raises ValueError as Trainer and Lora.of.

    Args:
        max_segment: see Layout.
        seq_len, objective, optimizer: None: as the config has them for RL. A warm start passes all three.
        rows_per_step: rows of an update, if they may be fewer than the config's micro-batch has; None: any number.
        adapted: use config.lora; a new decoder has no adapter.
        devices: None: all devices.
        make: called with the arguments of Trainer.
    """
    mesh = make_mesh(devices=devices, **{axis: getattr(config.learner, axis) for axis in MESH_AXES})
    shards = row_shards(mesh)
    rows = config.learner.micro_batch_rows
    if rows_per_step is not None:
        rows = min(rows, -(-rows_per_step // shards))
    rl = objective is None
    objective = objective or config.objective
    return make(
        decoder=decoder,
        objective=objective,
        optimizer=optimizer or config.optimizer,
        mesh=mesh,
        precision=Precision(
            compute=config.model.compute_dtype,
            sync=config.model.sync_dtype,
            head=config.model.head_precision,
            numerics=config.numerics if rl else "fast",  # a warm start has no generators
        ),
        layout=Layout(
            seq_len=seq_len or config.learner.seq_len,
            rows=rows * shards,
            max_segment=max_segment,
            logprob_chunk=chunk_of(config.learner.logprob_chunk, mesh.devices.flat[0].platform),
            remat=config.model.remat,
            attention=config.model.attention,
            router_replay=rl and config.rollout.router_replay,
            teacher_k=config.distill.k if objective.distill in DIVERGENCES else 0,
            reference=objective.reference_kl > 0,
            delta_share=config.fleet.max_delta_density if rl and config.model.sync_dtype == "bfloat16" else 0.0,
        ),
        lora=lora_of(config, decoder) if adapted else None,
    )


def lora_of(config: Config, decoder: DecoderConfig) -> Lora | None:
    """The adapter of a config; None: all parameters are trained. Raises ValueError as Lora.of."""
    lora = config.lora
    if not lora.rank:
        return None
    return Lora.of(
        decoder, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, folder=lora.adapter, seed=config.seed
    )


def start_policy(config: Config, decoder: DecoderConfig) -> Params:
    """The parameters that a run starts from, with the adapter that it starts from. Raises ValueError as
    Lora.start."""
    lora, frozen = lora_of(config, decoder), load_hf(config.model.path, dtype=config.model.sync_dtype)[1]
    return frozen if lora is None else lora.join(lora.start(base=fingerprint(frozen)), frozen)


def policy_of(checkpoint: Checkpoint, config: Config, decoder: DecoderConfig, *, model: str = "") -> Params:
    """The parameters of a checkpoint. An adapter's is joined with the frozen ones of config.model.path or `model`.
    Raises ValueError if these are not those it was trained with."""
    params, lora = checkpoint.state["params"], lora_of(config, decoder)
    if lora is None:
        return params
    frozen = load_hf(model or config.model.path, dtype=config.model.sync_dtype)[1]
    check_base("the checkpoint's adapter", checkpoint.manifest[BASE], fingerprint(frozen))
    return lora.join(params, frozen)
