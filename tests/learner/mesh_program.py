"""What test_mesh.py compares: one batch on meshes of 8 virtual CPU devices, and on one. Writes OUT.npz and OUT.json.

    python -m tests.learner.mesh_program OUT [others]

A process of its own, because the number of virtual devices is fixed when JAX starts. Each mesh compiles the update
once; micro-batches and packing orders are made by giving `pack` the segments in parts. `others`: only the gradients of
losses that have more than log-probs: a reference policy, the entropy, a teacher.
"""

import functools
import json
import os
import sys
from typing import Any

import jax
import numpy as np

from scalerl_jax.config import ObjectiveConfig, OptimizerConfig
from scalerl_jax.learner.checkpoint import Checkpoints
from scalerl_jax.learner.packing import MicroBatch, Segment, pack, plain
from scalerl_jax.learner.trainer import Layout, Trainer
from scalerl_jax.model import init_params
from scalerl_jax.model.decoder import Precision
from scalerl_jax.model.sharding import make_mesh
from scalerl_jax.objective import policy_loss
from scalerl_jax.objective.losses import DIVERGENCES
from tests.learner.segments import make_segments, with_teacher
from tests.support.compiled import on_devices
from tests.support.models import toy_decoder
from tests.support.params import params_of
from tests.support.trainers import trainer_of, update

# Heads, MLP and vocabulary divide over 2, the width over 8; two query heads share a key/value head.
DECODER = toy_decoder()
LENGTH, ROWS = 48, 8
LENGTHS = (49, 40, 33, 21, 21, 21, 17, 17, 17, 17, 9, 9, 9, 9, 9, 9, 5, 5, 5, 5, 3, 2)  # 22 segments, 7 rows full
MESHES = {
    "one": {"fsdp": 1},
    "fsdp8": {"fsdp": 8},
    "fsdp4-tensor2": {"fsdp": 4, "tensor": 2},
    "replica2-fsdp2-tensor2": {"replica": 2, "fsdp": 2, "tensor": 2},
    "fsdp4-expert2": {"fsdp": 4, "expert": 2},
    "fsdp2-tensor4": {"fsdp": 2, "tensor": 4},  # more devices than key heads: two share one
    # 24 positions on each of two devices: their chunks of the head do not fill up.
    "fsdp2-context2-tensor2": {"fsdp": 2, "context": 2, "tensor": 2},
}
TOGETHER = {
    "gspo": ObjectiveConfig(loss="gspo", clip_low=0.05, clip_high=0.05),
    "prefix budget": ObjectiveConfig(cppo_threshold=0.01, cppo_budget=0.001, cppo_budget_by_completion=True),
}
TEACHER_K = 5
MICRO_BATCHES = (1, 2, 4)
ORDERS = 2


def mesh_of(name: str):
    axes = MESHES[name]
    return make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])


@functools.cache
def params() -> Any:
    """The parameters that everything starts from, on the host."""
    return jax.device_get(params_of(DECODER))


def make_trainer(name: str, *, compute: str = "float32", teacher_k: int = 0, **objective: Any) -> Trainer:
    """With an epsilon as large as the gradients: else a first step is their sign, which rounding turns near 0."""
    trainer = trainer_of(
        DECODER,
        Layout(seq_len=LENGTH, rows=ROWS, logprob_chunk=16, teacher_k=teacher_k),
        optimizer=OptimizerConfig(
            learning_rate=1e-2,
            warmup_steps=0,
            beta1=0.9,
            beta2=0.95,
            epsilon=1e-2,
            weight_decay=0.01,
            max_grad_norm=0.05,
        ),
        mesh=mesh_of(name),
        precision=Precision(compute=compute, sync=compute),
        max_ratio=1.2,
        **objective,
    )
    trainer.start(jax.device_put(params(), trainer.shardings["params"]))
    return trainer


def arranged(segments: list[Segment], micro_batches: int, order: int, *, teacher_k: int = 0) -> list[MicroBatch]:
    """The whole batch in so many micro-batches; which segments share a row or a micro-batch depends on the order."""
    shuffled = np.random.default_rng(order).permutation(len(segments))
    out = []
    for part in np.array_split(shuffled, micro_batches):
        made, _ = pack([segments[i] for i in part], length=LENGTH, rows=ROWS, teacher_k=teacher_k)
        assert len(made) == 1
        out += made
    return out


class Results:
    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.facts: dict[str, Any] = {}

    def tree(self, name: str, tree: Any) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            self.arrays[name + jax.tree_util.keystr(path)] = np.asarray(leaf)

    def shards(self, name: str, tree: Any) -> None:
        """[shape on one device, dtype] of every array, and that all its devices hold as much."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            shapes = {shard.data.shape for shard in leaf.addressable_shards}
            assert len(shapes) == 1 and len(leaf.addressable_shards) == leaf.sharding.mesh.size
            self.facts[name + jax.tree_util.keystr(path)] = [*shapes.pop()], str(leaf.dtype)

    def sums(self, name: str, sums: Any) -> None:
        self.facts[name] = {key: float(value) for key, value in sums.items()}

    def write(self, out: str) -> None:
        np.savez(f"{out}.npz", **self.arrays)
        with open(f"{out}.json", "w") as file:
            json.dump(self.facts, file)


def float32_on(name: str, segments: list[Segment], results: Results) -> Trainer:
    """Gradients of every arrangement, then one update."""
    trainer = make_trainer(name)
    for micro_batches in MICRO_BATCHES:
        for order in range(ORDERS):
            key = f"gradient/{name}/{micro_batches}/{order}"
            grads, sums, _ = trainer.gradient(arranged(segments, micro_batches, order))
            results.tree(key, grads)
            results.sums(key, sums)
    results.shards(f"shards/{name}/gradient", grads)
    if name == "one":
        for i, segment in enumerate(segments):
            results.tree(f"alone/{i}", trainer.gradient(pack([segment], length=LENGTH, rows=ROWS)[0])[0])
    results.sums(f"update/{name}", update(trainer, segments))
    results.tree(f"state1/{name}", trainer.state)
    results.shards(f"shards/{name}/state", trainer.state)
    return trainer


def together_on(trainer: Trainer, batch: MicroBatch, objective: ObjectiveConfig) -> Any:
    """(loss, d loss / d logp) with rows laid out as an update has them."""
    rows = trainer._put(batch)
    logp = rows["generator_logprobs"] + 0.1 * rows["tokens"] / DECODER.vocab_size

    @jax.jit
    @jax.value_and_grad
    def loss(logp: jax.Array) -> jax.Array:
        names = ("generator_logprobs", "advantages", "weights", "segment_ids")
        return policy_loss(logp, *(rows[name] for name in names), objective)[0]

    return loss(logp)


def other_losses(segments: list[Segment], results: Results) -> None:
    # A KL to a policy that is kept, and the entropy's gradient.
    for name in ("one", "fsdp2-context2-tensor2"):
        trainer = make_trainer(name, reference_kl=0.3, entropy_bonus=0.2)
        reference = jax.tree.map(lambda p: p * np.float32(1.1), params())
        trainer.keep_reference(jax.device_put(reference, trainer.shardings["params"]))
        grads, sums, _ = trainer.gradient(arranged(segments, 2, 0))
        results.tree(f"reference/{name}", grads)
        results.sums(f"reference/{name}", sums)

    # The tokens that a teacher names, some of which lie on each part of the vocabulary.
    taught = [with_teacher(one, vocabulary=DECODER.vocab_size, k=TEACHER_K, seed=i) for i, one in enumerate(segments)]
    for form in DIVERGENCES:
        for name in ("one", "fsdp2-tensor4", "fsdp2-context2-tensor2"):
            trainer = make_trainer(name, teacher_k=TEACHER_K, distill=form, distill_weight=3.0)
            grads, sums, _ = trainer.gradient(arranged(taught, 2, 0, teacher_k=TEACHER_K))
            results.tree(f"{form}/{name}", grads)
            results.sums(f"{form}/{name}", sums)


def main(out: str, *others: str) -> None:
    assert jax.device_count() == 8
    results = Results()
    segments = make_segments(LENGTHS, vocabulary=DECODER.vocab_size)
    if others:
        other_losses(segments, results)
    else:
        every_mesh(out, segments, results)
    results.write(out)


def every_mesh(out: str, segments: list[Segment], results: Results) -> None:
    following = make_segments(LENGTHS, vocabulary=DECODER.vocab_size, seed=1)

    trainers = {name: float32_on(name, segments, results) for name in MESHES}

    # A checkpoint of one mesh goes on on another, and on its own.
    checkpoints = Checkpoints(f"{out}-checkpoints", keep=1)
    checkpoints.save(1, trainers["fsdp4-tensor2"].state, manifest={}, arrays={})
    for name in ("fsdp4-tensor2", "fsdp8"):
        found = checkpoints.restore(trainers[name].abstract_state)
        assert found is not None
        continued, trainers[name].state = trainers[name].state, found.state
        update(trainers[name], following)
        results.tree(f"restored/{name}", trainers[name].state)
        trainers[name].state = continued
    checkpoints.close()
    for name in MESHES:
        update(trainers[name], following)
        results.tree(f"state2/{name}", trainers[name].state)

    # What leaves the mesh: weights under their names, scores.
    mesh = "replica2-fsdp2-tensor2"
    results.tree("wire", trainers[mesh].sync_weights())
    for name in ("one", mesh):
        results.tree(f"score/{name}", trainers[name].score([plain(segment.tokens) for segment in segments]))

    # Fresh parameters are made where they lie; params() began with those of the same key, made on one device.
    fresh = init_params(DECODER, jax.random.key(0), mesh_of("fsdp4-tensor2"))
    results.tree("fresh", fresh)
    results.shards("shards/fresh", fresh)
    results.tree("start", params())

    # The loss and the mask in which tokens of a row meet.
    for name in ("one", "fsdp4-tensor2", "fsdp2-context2-tensor2"):
        for what, objective in TOGETHER.items():
            results.tree(f"{what}/{name}", together_on(trainers[name], arranged(segments, 1, 0)[0], objective))

    for name in ("one", "fsdp8", "fsdp4-tensor2"):
        trainer = make_trainer(name, compute="bfloat16")
        for micro_batches in (1, 4):
            grads, _, _ = trainer.gradient(arranged(segments, micro_batches, 0))
            results.tree(f"bfloat16/{name}/{micro_batches}", grads)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = on_devices(8)  # read when the devices are first asked for
    main(*sys.argv[1:])
