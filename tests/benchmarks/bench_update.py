"""The trainer's update against the same update in PyTorch eager, on the same cores.

    python -m tests.benchmarks.bench_update [--case=short|long|both] [--dtype=float32|bfloat16] [--repeats=9]
                                            [--remat=none|save_products|save_attention|block|full]
                                            [--hidden_size=96 --layers=3 ...]

Both sides get the same sequences, start from the same parameters and do the same work: forward, CISPO with prompt
weights, backward, AdamW. Before anything is timed, their gradients are compared. A repeat times one update of each, in
turn, so that a slow moment of the machine hits both. Printed: tokens/s of both (real tokens, padding not counted) and
the ratio of the medians.

  long    rows of one segment each
  short   many segments of 32 to 100 tokens, as arithmetic traces have

The PyTorch side is written as one would by hand for speed: sequences sorted by length and padded to the longest of
their micro-batch (`padded`), so that scaled_dot_product_attention takes its causal flash kernel without a mask; or
packed in the trainer's rows with a block-diagonal mask (`packed`). The faster of the two counts. Fused cross entropy,
fused AdamW.
"""

import dataclasses
import os
import statistics
import time

import jax
import numpy as np
import torch
import torch.nn.functional as F
from absl import app, flags

from launch.commands import restart_with_tuned_malloc
from scalerl_jax.config import OptimizerConfig
from scalerl_jax.learner.packing import MicroBatch, Segment, pack
from scalerl_jax.learner.trainer import Layout
from scalerl_jax.model import DecoderConfig, Precision, init_params
from scalerl_jax.model.hf import to_hf
from scalerl_jax.model.remat import REMATS
from scalerl_jax.objective import token_weights
from tests.support.trainers import trainer_of, update

FLAGS = flags.FLAGS
flags.DEFINE_enum("case", "both", ["short", "long", "both"], "which sequences")
flags.DEFINE_integer("repeats", 9, "timed updates of each side")
flags.DEFINE_integer("hidden_size", 96, "of the decoder")
flags.DEFINE_integer("layers", 3, "of the decoder")
flags.DEFINE_integer("heads", 4, "query heads of 32; half as many key/value heads")
flags.DEFINE_integer("intermediate_size", 256, "of the decoder")
flags.DEFINE_integer("vocab_size", 384, "of the decoder")
flags.DEFINE_integer("long_length", 2048, "tokens of a long segment")
flags.DEFINE_integer("seq_len", 512, "short: tokens of a packed row")
flags.DEFINE_integer("rows", 8, "short: rows of a micro-batch")
flags.DEFINE_integer("long_rows", 2, "long: rows of a micro-batch")
flags.DEFINE_integer("logprob_chunk", 128, "tokens of a row whose logits exist at once")
flags.DEFINE_enum("remat", "save_products", REMATS, "as config.model.remat; the default is the fastest on CPUs")
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of matrix products; PyTorch's are cast by autocast")
flags.DEFINE_integer("torch_tokens", 4096, "padded tokens of PyTorch's micro-batch")
flags.DEFINE_enum("clock", "wall", ["wall", "cpu"], "cpu: processor seconds, for a machine that others use too")

CAP, LEARNING_RATE, EPSILON, DECAY = 5.0, 1e-4, 1e-15, 0.01
_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1}  # of the two gradients' difference, as a share of the norm
PROMPT = 8  # tokens without loss at the start of each segment


def make_segments(case: str, vocabulary: int) -> list[Segment]:
    """Groups of 8 completions, weighted per prompt; about 16 thousand tokens."""
    rng = np.random.default_rng(0)
    if case == "long":
        lengths = np.full(8, FLAGS.long_length + 1)
    else:
        lengths = rng.integers(32, 101, 240)
    loss_tokens = (lengths - PROMPT).reshape(-1, 8)
    kept = np.ones(loss_tokens.shape, bool)
    weights = token_weights(loss_tokens, kept, kept.any(axis=1), "prompt").ravel()
    out = []
    for length, weight in zip(lengths, weights):
        loss = (np.arange(length) >= PROMPT).astype(np.float32)
        out.append(
            Segment(
                tokens=rng.integers(0, vocabulary, length).astype(np.int32),
                weights=loss * np.float32(weight),
                advantages=loss * np.float32(rng.normal()),
                generator_logprobs=loss * (-np.log(vocabulary) + rng.normal(size=length) / 4).astype(np.float32),
            )
        )
    return out


# ---------------------------------------------------------------------------------------------------- PyTorch


class TorchPolicy(torch.nn.Module):
    """The same decoder, parameters under their Hugging Face names (dots as they are, in a dict)."""

    def __init__(self, config: DecoderConfig, tensors: dict[str, np.ndarray]):
        super().__init__()
        self.config = config
        self.weights = {name: torch.nn.Parameter(torch.tensor(np.array(v))) for name, v in tensors.items()}

    def forward(self, tokens, positions, mask):
        """tokens, positions [rows, length]; mask [rows, 1, length, length] bool, or None: causal. -> logits."""
        c, w = self.config, self.weights
        frequency = c.rope_theta ** (-torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        angle = positions[..., None].float() * frequency
        cos, sin = torch.cat([angle.cos()] * 2, -1)[:, None], torch.cat([angle.sin()] * 2, -1)[:, None]

        def rope(x):
            first, second = x.chunk(2, dim=-1)
            return x * cos + torch.cat([-second, first], -1) * sin

        def norm(x, name):
            return F.rms_norm(x, (x.shape[-1],), w[name], c.norm_epsilon)

        rows, length = tokens.shape
        x = F.embedding(tokens, w["model.embed_tokens.weight"])
        for i in range(c.layers):
            at = f"model.layers.{i}."
            h = norm(x, at + "input_layernorm.weight")
            q, k, v = (
                F.linear(h, w[f"{at}self_attn.{n}_proj.weight"]).view(rows, length, -1, c.head_dim) for n in "qkv"
            )
            q = rope(norm(q, at + "self_attn.q_norm.weight").transpose(1, 2))
            k = rope(norm(k, at + "self_attn.k_norm.weight").transpose(1, 2))
            mixed = F.scaled_dot_product_attention(
                q, k, v.transpose(1, 2), attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
            x = x + F.linear(mixed.transpose(1, 2).reshape(rows, length, -1), w[at + "self_attn.o_proj.weight"])
            h = norm(x, at + "post_attention_layernorm.weight")
            gated = F.silu(F.linear(h, w[at + "mlp.gate_proj.weight"])) * F.linear(h, w[at + "mlp.up_proj.weight"])
            x = x + F.linear(gated, w[at + "mlp.down_proj.weight"])
        return F.linear(norm(x, "model.norm.weight"), w["lm_head.weight"])


def torch_padded(segments: list[Segment], tokens: int) -> list[MicroBatch]:
    """Sorted by length, then cut where the padded tokens would pass the limit."""
    out, batch = [], []
    ordered = sorted(segments, key=lambda s: len(s.tokens))
    for i, segment in enumerate(ordered):
        batch.append(segment)
        following = len(ordered[i + 1].tokens) - 1 if i + 1 < len(ordered) else 0
        if not following or (len(batch) + 1) * following > tokens:
            rows, length = len(batch), len(segment.tokens) - 1
            made, _ = pack(batch, length=length, rows=rows)
            if len(made) > 1 or any(len(np.unique(r[r > 0])) > 1 for r in made[0].segment_ids):
                made, _ = _one_per_row(batch, length)
            out.extend(made)
            batch = []
    return out


def _one_per_row(batch: list[Segment], length: int) -> tuple[list[MicroBatch], None]:
    arrays = [pack([s], length=length, rows=1)[0][0].arrays() for s in batch]
    return [MicroBatch(**{k: np.concatenate([a[k] for a in arrays]) for k in arrays[0]})], None


def torch_inputs(batches: list[MicroBatch], packed: bool) -> list[dict[str, torch.Tensor]]:
    out = []
    for batch in batches:
        arrays = {k: torch.tensor(v) for k, v in batch.arrays().items()}
        arrays["targets"] = arrays["targets"].long()
        arrays["mask"] = None
        if packed:
            segment = arrays["segment_ids"]
            causal = torch.ones(segment.shape[1], segment.shape[1], dtype=torch.bool).tril()
            arrays["mask"] = ((segment[:, :, None] == segment[:, None, :]) & causal)[:, None]
        out.append(arrays)
    return out


def torch_gradient(policy: TorchPolicy, batches: list[dict[str, torch.Tensor]]) -> float:
    total = 0.0
    for b in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=FLAGS.dtype == "bfloat16"):
            logits = policy(b["tokens"], b["positions"], b["mask"])
        logp = -F.cross_entropy(logits.float().flatten(0, 1), b["targets"].flatten(), reduction="none").view(
            b["weights"].shape
        )
        with torch.no_grad():
            ratio = torch.where(b["weights"] > 0, logp - b["generator_logprobs"], 0.0).exp().clamp(max=CAP)
        loss = -(b["weights"] * ratio * b["advantages"] * logp).sum()
        loss.backward()
        total += float(loss.detach())
    return total


# ---------------------------------------------------------------------------------------------------- measuring


@dataclasses.dataclass
class Timed:
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def compare(case: str) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    clock = time.perf_counter if FLAGS.clock == "wall" else time.process_time
    config = DecoderConfig(
        vocab_size=FLAGS.vocab_size, hidden_size=FLAGS.hidden_size, layers=FLAGS.layers, heads=FLAGS.heads,
        kv_heads=FLAGS.heads // 2, head_dim=32, intermediate_size=FLAGS.intermediate_size,
    )  # fmt: skip
    segments = make_segments(case, config.vocab_size)
    tokens = sum(len(s.tokens) - 1 for s in segments)
    long = case == "long"
    trainer = trainer_of(
        config,
        Layout(
            seq_len=FLAGS.long_length if long else FLAGS.seq_len,
            rows=FLAGS.long_rows if long else FLAGS.rows,
            max_segment=max(len(s.tokens) - 1 for s in segments),
            logprob_chunk=FLAGS.logprob_chunk,
            remat=FLAGS.remat,
        ),
        optimizer=OptimizerConfig(
            learning_rate=LEARNING_RATE, warmup_steps=0, beta1=0.9, beta2=0.95, epsilon=EPSILON, weight_decay=DECAY
        ),
        precision=Precision(FLAGS.dtype, FLAGS.dtype),
        max_ratio=CAP,
    )
    params = init_params(config, jax.random.key(0), trainer.mesh)
    trainer.start(params)
    tensors = {name: np.asarray(value) for name, value in to_hf(params, config, np.float32).items()}

    # The two sides compute the same thing.
    packed_batches, _ = pack(segments, length=trainer.seq_len, rows=trainer.rows)
    grads, sums, _ = trainer.gradient(packed_batches)
    ours = {name: np.asarray(value) for name, value in to_hf(grads, config, np.float32).items()}
    del params, grads
    variants = {"padded": torch_inputs(torch_padded(segments, FLAGS.torch_tokens), packed=False)}
    if not long:
        variants["packed"] = torch_inputs(packed_batches, packed=True)
    for name, batches in variants.items():
        policy = TorchPolicy(config, tensors)
        loss = torch_gradient(policy, batches)
        norm = np.sqrt(sum(float((g**2).sum()) for g in ours.values()))
        off = np.sqrt(sum(float(((policy.weights[n].grad.numpy() - g) ** 2).sum()) for n, g in ours.items()))
        print(
            f"{case}: {name}: loss {float(sums['loss']):+.6f}, PyTorch's {loss:+.6f}; gradients {off / norm:.1e} apart"
        )
        if off > _TOLERANCES[FLAGS.dtype] * norm:
            raise SystemExit("the two sides do not compute the same gradient")

    # Time them, in turn.
    policy = TorchPolicy(config, tensors)
    adamw = torch.optim.AdamW(
        policy.weights.values(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=DECAY, fused=True
    )

    def torch_update(batches) -> None:
        adamw.zero_grad(set_to_none=True)
        torch_gradient(policy, batches)
        adamw.step()

    runs = {"jax": lambda: update(trainer, segments)}
    runs |= {f"torch {name}": lambda batches=batches: torch_update(batches) for name, batches in variants.items()}
    timed = {name: Timed([]) for name in runs}
    for repeat in range(FLAGS.repeats + 2):
        for name, run in runs.items():
            start = clock()
            run()
            if repeat >= 2:  # compilation, allocator
                timed[name].seconds.append(clock() - start)
    for name, times in timed.items():
        speed = f"{tokens / times.median:8,.0f} tokens/s   {times.median * 1e3:6.0f} ms an update"
        print(f"{case}: {name:13s} {speed} of {tokens} tokens")
    best = min((t.median, name) for name, t in timed.items() if name.startswith("torch"))
    print(f"{case}: ratio to {best[1]}: {best[0] / timed['jax'].median:.2f}")


def main(_) -> None:
    for case in ("long", "short") if FLAGS.case == "both" else (FLAGS.case,):
        compare(case)


if __name__ == "__main__":
    restart_with_tuned_malloc()  # as the commands do; PyTorch has it too
    app.run(main)
