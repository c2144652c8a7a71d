"""A run of the trainer's own update from the policy in a folder, each version recorded as the trainer would send it.

    python -m tests.rollout_server.record_run MODEL OUT

Whole versions are taken by another way than deltas are (model.hf.to_hf, on the device), so that one is the reference
of the other. A process of its own: engines are tested in environments without jax too. Read it with `Recorded`.
"""

import sys

import numpy as np

from scalerl_jax.contract.weight_delta import Sparse, WeightDelta
from scalerl_jax.model.decoder_config import read_config
from scalerl_jax.model.tensor_layout import hf_tensors

UPDATES = 200
EMPTY = 25  # every so many batches no prompt survives: the version differs in nothing
LENGTHS = (30, 28, 25, 22, 20, 18, 12, 9)


class Recorded:
    """The versions 0 to UPDATES of a recorded run."""

    def __init__(self, model: str, path: str):
        with np.load(path) as file:
            self._arrays = {name: file[name] for name in file.files}
        self._shapes = hf_tensors(read_config(model))
        self._edges = np.cumsum([0, *(int(np.prod(shape)) for shape in self._shapes.values())])

    def tensors(self, step: int) -> dict[str, np.ndarray]:
        """The whole version, as bits (uint16)."""
        whole = self._arrays[f"{step}/whole"]
        return {
            name: whole[start:end].reshape(shape)
            for (name, shape), start, end in zip(self._shapes.items(), self._edges, self._edges[1:])
        }

    def delta(self, step: int) -> WeightDelta:
        kinds, sizes, digests = (self._arrays[f"{step}/{name}"] for name in ("changed", "gap_bytes", "digests"))
        gaps, values = self._arrays[f"{step}/gaps"], self._arrays[f"{step}/values"]
        parts: dict[str, Sparse | np.ndarray] = {}
        for (name, shape), changed, size in zip(self._shapes.items(), kinds.tolist(), sizes.tolist()):
            if step == 0:
                break
            count = int(np.prod(shape)) if changed < 0 else changed
            part, values = values[:count], values[count:]
            parts[name] = part.reshape(shape) if changed < 0 else Sparse(changed, gaps[:size], part)
            gaps = gaps[size:]
        base = None if step == 0 else step - 1
        return WeightDelta(base, step, parts, dict(zip(self._shapes, digests.tolist())), dict(self._shapes))


def record(arrays: dict[str, np.ndarray], delta: WeightDelta, whole: dict[str, np.ndarray]) -> None:
    parts = [delta.tensors.get(name, np.zeros(0, np.uint16)) for name in whole]
    made = {
        "whole": np.concatenate([np.asarray(tensor).view(np.uint16).reshape(-1) for tensor in whole.values()]),
        "changed": np.array([part.changed if isinstance(part, Sparse) else -1 for part in parts]),
        "gap_bytes": np.array([part.gaps.nbytes if isinstance(part, Sparse) else 0 for part in parts]),
        "gaps": np.concatenate([part.gaps if isinstance(part, Sparse) else np.zeros(0, np.uint8) for part in parts]),
        "values": np.concatenate([part.values if isinstance(part, Sparse) else part.reshape(-1) for part in parts]),
        "digests": np.array([delta.digests[name] for name in whole], np.uint32),
    }
    arrays.update({f"{delta.step}/{name}": array for name, array in made.items()})


def main(model: str, out: str) -> None:
    import jax

    from scalerl_jax.learner.trainer import Layout
    from scalerl_jax.learner.weight_snapshots import WeightSnapshots
    from scalerl_jax.model import Precision, load_hf
    from scalerl_jax.model.sharding import make_mesh
    from tests.learner.segments import make_segments
    from tests.support.trainers import trainer_of, update

    mesh = make_mesh(fsdp=1, devices=jax.devices()[:1])
    config, params = load_hf(model, mesh)
    trainer = trainer_of(
        config,
        Layout(seq_len=32, rows=8, logprob_chunk=32),
        learning_rate=3e-6,
        warmup_steps=20,
        mesh=mesh,
        precision=Precision(compute="float32", sync="bfloat16"),
    )
    trainer.start(params)
    copies = WeightSnapshots(config, mesh, share=1 / 16)
    arrays: dict[str, np.ndarray] = {}
    for step in range(UPDATES + 1):
        if step and step % EMPTY:
            update(trainer, make_segments(LENGTHS, vocabulary=config.vocab_size, seed=step))
        version = copies.snapshot(trainer.state["params"], step)
        whole = jax.device_get(trainer.sync_weights())
        record(arrays, version.delta(), {name: whole[name] for name in hf_tensors(config)})
    np.savez(out, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
