"""A trainer around a small decoder, for tests."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from scalerl_jax.config import ObjectiveConfig, OptimizerConfig
from scalerl_jax.contract.codec import Completion
from scalerl_jax.learner.packing import Segment, scored_only
from scalerl_jax.learner.trainer import Layout, Trainer
from scalerl_jax.model import Precision
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.model.lora import Lora
from scalerl_jax.model.sharding import make_mesh


def trainer_of(
    decoder: DecoderConfig,
    layout: Layout,
    *,
    mesh: Mesh | None = None,
    precision: Precision | None = None,
    optimizer: OptimizerConfig | None = None,
    learning_rate: float = 1e-2,
    warmup_steps: int = 0,
    epsilon: float = OptimizerConfig.epsilon,
    lora: Lora | None = None,
    **objective: Any,
) -> Trainer:
    """Not started. On the first device; with the defaults of the config, where nothing else is said.

    objective: fields of ObjectiveConfig.
    """
    return Trainer(
        decoder=decoder,
        objective=ObjectiveConfig(**objective),
        optimizer=optimizer or OptimizerConfig(learning_rate=learning_rate, warmup_steps=warmup_steps, epsilon=epsilon),
        mesh=mesh if mesh is not None else make_mesh(fsdp=1, devices=jax.devices()[:1]),
        precision=precision or Precision(),
        layout=dataclasses.replace(layout, reference="reference_kl" in objective),
        lora=lora,
    )


def update(trainer: Trainer, segments: Sequence[Segment]) -> dict[str, Any]:
    """Trains on one batch."""
    return trainer.optim_step(trainer.forward_backward(segments))


def scored(trainer: Trainer, samples: Sequence[tuple[np.ndarray, Completion]]) -> list[np.ndarray]:
    """The log-probs of each completion's tokens after its prompt: [tokens] float32 each."""
    found = trainer.score([scored_only(prompt, completion) for prompt, completion in samples])
    return [logprobs[len(prompt) :] for (prompt, _), logprobs in zip(samples, found, strict=True)]
