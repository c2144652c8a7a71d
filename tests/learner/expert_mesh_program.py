"""What test_expert_mesh.py compares: a model with experts on meshes of 8 virtual CPU devices. Writes OUT.npz, OUT.json.

python -m tests.learner.expert_mesh_program OUT
"""

import os
import sys

import jax
import numpy as np

from scalerl_jax.learner.trainer import Layout
from scalerl_jax.model import Precision
from scalerl_jax.model.sharding import make_mesh
from tests.learner.mesh_program import LENGTH, LENGTHS, ROWS, Results, arranged
from tests.learner.segments import make_segments, with_experts
from tests.support.compiled import on_devices
from tests.support.models import toy_decoder
from tests.support.params import params_of
from tests.support.trainers import trainer_of

# Four experts of 16 columns each: on both meshes a device has two of them.
EXPERTS = toy_decoder(family="qwen3_moe")
MESHES = {
    "one": {"fsdp": 1},
    "fsdp2-expert2-tensor2": {"fsdp": 2, "expert": 2, "tensor": 2},
    "replica2-context2-expert2": {"replica": 2, "fsdp": 1, "context": 2, "expert": 2},
}
IN_BFLOAT16 = ("one", "fsdp2-expert2-tensor2")


def gradient_on(name: str, compute: str, results: Results) -> None:
    """The gradient, what came to each expert, and where experts lie; in float32 also with router replay."""
    axes = MESHES[name]
    trainer = trainer_of(
        EXPERTS,
        Layout(seq_len=LENGTH, rows=ROWS, logprob_chunk=16, router_replay=compute == "float32"),
        precision=Precision(compute=compute, sync=compute),
        mesh=make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))]),
    )
    trainer.start(jax.device_put(jax.device_get(params_of(EXPERTS)), trainer.shardings["params"]))
    segments = make_segments(LENGTHS, vocabulary=EXPERTS.vocab_size)
    if compute == "float32":
        sent = with_experts(segments, EXPERTS, seed=4)
        pending = trainer.forward_backward([sent[i] if i % 2 else segment for i, segment in enumerate(segments)])
        results.tree(f"replay/{name}", pending.grads)
        results.arrays[f"replay/{name}/tokens"] = np.asarray(pending.sums["expert_tokens"])
        grads, sums, _ = trainer.gradient(trainer.pack(segments)[0])
    else:
        grads, sums, _ = trainer.gradient(arranged(segments, 2, 0))
    results.arrays[f"{compute}/{name}/tokens"] = np.asarray(sums["expert_tokens"])
    results.tree(f"{compute}/{name}", grads)
    results.shards(f"shards/{compute}/{name}", grads)


def main(out: str) -> None:
    results = Results()
    for name in MESHES:
        gradient_on(name, "float32", results)
    for name in IN_BFLOAT16:
        gradient_on(name, "bfloat16", results)
    results.write(out)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = on_devices(8)  # read when the devices are first asked for
    main(sys.argv[1])
