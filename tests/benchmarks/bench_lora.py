"""What an adapter costs to send: bytes of merged deltas beside the adapter's own, by rank and learning rate.

    python -m tests.benchmarks.bench_lora [--width=2048] [--ranks=1,8,32] [--rates=5e-7,...] [--steps=10]

One layer of a Llama of this width, with a small vocabulary, weights as they are drawn at a start, bfloat16 on the wire;
random segments with random advantages, so that AdamW's steps are as large as noise makes them, as in RL. Rank 0 is all
parameters. Each row has medians over the second half of the steps: the share of all weights that changed from one
version to the next, the bytes of that delta, those of the adapter in bfloat16, and their ratio.
"""

import statistics

import jax
from absl import app, flags
from rich.console import Console
from rich.table import Table

from scalerl_jax.config import ObjectiveConfig, OptimizerConfig
from scalerl_jax.learner.trainer import Layout, Trainer
from scalerl_jax.model import Precision, init_params
from scalerl_jax.model.lora import Lora
from scalerl_jax.model.sharding import make_mesh
from tests.learner.segments import make_segments
from tests.support.models import toy_decoder

FLAGS = flags.FLAGS
flags.DEFINE_integer("width", 2048, "Hidden size; the MLP's is four times that.")
flags.DEFINE_list("ranks", ["0", "1", "8", "32"], "Of the adapter; 0: all parameters.")
flags.DEFINE_list("rates", ["5e-7", "5e-6", "1e-5", "5e-5", "1e-4"], "Learning rates.")
flags.DEFINE_integer("steps", 10, "Of each.")


def main(_: list[str]) -> None:
    heads = FLAGS.width // 128
    decoder = toy_decoder(
        vocab_size=256, hidden_size=FLAGS.width, layers=1, heads=heads, kv_heads=max(1, heads // 4), head_dim=128,
        intermediate_size=4 * FLAGS.width,
    )  # fmt: skip
    mesh = make_mesh(fsdp=1, devices=jax.devices()[:1])
    params = init_params(decoder, jax.random.key(0), mesh, "bfloat16")
    table = Table("rank", "rate", "changed %", "delta MB", "adapter MB", "delta / adapter")
    for rank in map(int, FLAGS.ranks):
        lora = Lora.of(decoder, rank=rank, alpha=32.0, targets="all-linear", folder="", seed=0) if rank else None
        trainer = Trainer(
            decoder=decoder, objective=ObjectiveConfig(loss="reinforce"), optimizer=OptimizerConfig(), mesh=mesh,
            precision=Precision(sync="bfloat16"), layout=Layout(seq_len=64, rows=2, delta_share=0.5), lora=lora,
        )  # fmt: skip
        for rate in map(float, FLAGS.rates):
            found = deltas(trainer, params, rate)
            changed, sent = (statistics.median(x) for x in zip(*found[len(found) // 2 :], strict=True))
            own = 2 * sum(leaf.size for leaf in jax.tree.leaves(trainer.state["params"])) if lora else 0
            ratio = f"{sent / own:.2f}" if lora else ""
            table.add_row(
                str(rank), f"{rate:g}", f"{100 * changed:.3f}", f"{sent / 1e6:.2f}", f"{own / 1e6:.2f}", ratio
            )
    Console(width=100).print(table)


def deltas(trainer: Trainer, params: object, rate: float) -> list[tuple[float, int]]:
    """(share of the weights that changed, bytes) of each version."""
    if trainer.lora is None:
        trainer.start(jax.tree.map(lambda p: p.astype("float32"), params))
    else:
        trainer.start(trainer.lora.new(trainer.mesh), params)  # type: ignore[arg-type]
    assert trainer._snapshots is not None
    trainer._snapshots._step = trainer._snapshots._sent = None
    trainer.version(0)
    out = []
    for step in range(1, FLAGS.steps + 1):
        segments = make_segments((65, 64, 33, 30), vocabulary=trainer.decoder.vocab_size, seed=step)
        trainer.optim_step(trainer.forward_backward(segments), learning_rate=rate)
        changes = trainer.version(step).changes
        assert changes is not None
        delta = changes()
        out.append((delta.changed / delta.elements, delta.nbytes))
    return out


if __name__ == "__main__":
    app.run(main)
