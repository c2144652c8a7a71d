"""Versions of the weights: what changed, found on the device, is what NumPy finds on the host, bit for bit."""

import jax
import ml_dtypes
import numpy as np

from scalerl_jax.contract.weight_delta import Sparse, decode, digest
from scalerl_jax.learner.weight_snapshots import WeightSnapshots
from scalerl_jax.model.hf import to_hf
from tests.accelerator.test_numerics import decoder_of, make_trainer
from tests.learner.segments import make_segments
from tests.support.trainers import update

UPDATES = 4
SHARE = 1 / 16


def host_bits(trainer) -> dict[str, np.ndarray]:
    """The parameters as they are sent, rounded on the host: name -> uint16."""
    params = jax.tree.map(np.asarray, jax.device_get(trainer.state["params"]))
    with jax.default_device(jax.devices("cpu")[0]):
        named = to_hf(params, trainer.decoder, np.float32)
    return {name: np.asarray(value).astype(ml_dtypes.bfloat16).view(np.uint16) for name, value in named.items()}


def test_deltas_are_exact(device, sizes):
    from scalerl_jax.model import Precision

    decoder, seq_len = decoder_of(sizes), sizes.pick(128, 1024)
    trainer = make_trainer(device, decoder, Precision("bfloat16", "bfloat16"), seq_len=seq_len)
    copies = WeightSnapshots(decoder, trainer.mesh, share=SHARE)
    before: dict[str, np.ndarray] | None = None
    sparse = dense = changed = 0
    for step in range(UPDATES + 1):
        version, now = copies.snapshot(trainer.state["params"], step), host_bits(trainer)
        for name, tensor in version.tensors().items():
            np.testing.assert_array_equal(tensor.view(np.uint16), now[name], err_msg=name)
        delta = version.delta()
        assert delta.digests == {name: digest(bits) for name, bits in now.items()}
        for name, part in delta.tensors.items():
            assert before is not None
            if isinstance(part, Sparse):
                found = decode(part, now[name].size)
                positions = np.flatnonzero(now[name] != before[name])
                np.testing.assert_array_equal(found.positions, positions, err_msg=name)
                np.testing.assert_array_equal(found.values, now[name].reshape(-1)[positions], err_msg=name)
                sparse, changed = sparse + 1, changed + len(positions)
            else:
                np.testing.assert_array_equal(np.asarray(part).view(np.uint16), now[name], err_msg=name)
                dense += 1
        before = now
        # The second update moves nearly everything, the others little: both ways of sending are taken.
        scale = 1.0 if step == 1 else 1e-4
        old = jax.tree.map(np.asarray, jax.device_get(trainer.state["params"]))
        update(trainer, make_segments([seq_len, 40, 9], vocabulary=decoder.vocab_size, seed=step))
        moves = jax.tree.map(lambda a, b: np.asarray(b) - a, old, trainer.state["params"])
        new = [a + np.float32(scale) * move for a, move in zip(jax.tree.leaves(old), jax.tree.leaves(moves))]
        new = jax.tree.unflatten(jax.tree.structure(old), new)
        trainer.state["params"] = jax.device_put(new, trainer.shardings["params"])
    assert sparse > 0 and dense > 0 and changed > 0
    print(f"{sparse} tensors by what changed ({changed} elements), {dense} whole")
