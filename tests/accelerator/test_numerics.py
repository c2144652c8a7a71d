"""Attention, the update and log-probs on the device against the CPU in float32, in one process.

Norms of differences, as shares of the norm on the CPU:

    FLOAT32   products of float32 operands are float32 ones, not TF32's (which would be 3e-4)
    BFLOAT16  operands rounded to 8 bits, products summed in float32, against float32 of the same rounded weights
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout_server.engines.jax import caches, live_attention
from rollout_server.engines.jax.weights import decode_precision
from scalerl_jax.learner.packing import Segment, plain
from scalerl_jax.learner.trainer import Layout, Trainer
from scalerl_jax.model import DecoderConfig, Precision, init_params
from scalerl_jax.model.attention import Backend, Shapes, choose, packed_attention
from scalerl_jax.model.sharding import make_mesh
from tests.learner.segments import make_segments
from tests.support.params import relative
from tests.support.trainers import trainer_of, update

FLOAT32 = 2e-5
BFLOAT16 = 0.02
LOGPROB_FLOAT32, LOGPROB_BFLOAT16 = 2e-4, 0.1  # nats, of any one token
# As shares of the norm of what the update did: Adam's first step divides by the gradient's own size, so an element
# whose gradient is near 0 may go either way.
UPDATE_FLOAT32, UPDATE_BFLOAT16 = 5e-3, 0.5

CPU = jax.devices("cpu")[0]


def segment_ids(lengths: list[int], length: int) -> np.ndarray:
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:length]
    return np.pad(ids, (0, length - len(ids)))[None].astype(np.int32)


@pytest.mark.parametrize("path", ["few blocks", "many blocks"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", FLOAT32), ("bfloat16", BFLOAT16)])
def test_attention_is_the_cpus(device, sizes, path, dtype, tolerance):
    """Both ways of cutting it into blocks, values and gradients."""
    length = sizes.pick(256, 2048) if path == "few blocks" else sizes.pick(4352, 8192)
    longest = length // 2 if path == "few blocks" else sizes.pick(60, 500)
    heads, kv_heads, size = sizes.pick(4, 32), sizes.pick(2, 8), sizes.pick(16, 64)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, longest + 1, 4 * length // longest).tolist()
    ids = segment_ids(lengths, length)
    shapes = [(1, length, n, size) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, g = (rng.normal(size=shape).astype(dtype) for shape in shapes)

    def run(q, k, v, g, precision):
        def attend(q, k, v):
            return packed_attention(q, k, v, ids, max_segment=longest, precision=precision)

        out, back = jax.vjp(attend, q, k, v)
        return (out, *back(g))

    precision = Precision(compute=dtype).dot
    got = jax.jit(run, static_argnums=4)(*(jax.device_put(x, device) for x in (q, k, v, g)), precision)
    exact = (jax.device_put(x.astype(np.float32), CPU) for x in (q, k, v, g))
    wanted = jax.jit(run, static_argnums=4)(*exact, jax.lax.Precision.HIGHEST)
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        off = relative(np.asarray(ours, np.float32), theirs)
        print(f"{path}, {dtype}: {name} {off:.1e}")
        assert off < tolerance, name


@pytest.mark.parametrize("wanted", ["splash", "cudnn", "cudnn_mask"])
def test_kernels_are_the_cpus_blocks(device, sizes, wanted):
    """The device's own kernels, values and gradients, of rows with padding. None of them was ever run."""
    length, heads, kv_heads, size = sizes.pick(256, 4096), 8, 2, sizes.pick(16, 128)
    shapes = Shapes(length, size, "bfloat16")
    try:
        backend, line = choose(wanted.partition("_")[0], device, shapes)
    except ValueError as error:
        pytest.skip(str(error))
    if wanted == "cudnn_mask":
        backend = Backend(wanted)
    elif backend.name != wanted:
        pytest.skip(line)
    ids = np.concatenate([segment_ids([length // 2, 100, 3], length), segment_ids([1, length - 9], length)])
    rng = np.random.default_rng(0)
    real = (ids > 0)[..., None, None]
    q, k, v, g = (
        (real * rng.normal(size=(2, length, n, size))).astype("bfloat16") for n in (heads, kv_heads, kv_heads, heads)
    )

    def run(q, k, v, g, backend):
        out, back = jax.vjp(lambda *a: packed_attention(*a, ids, backend=backend), q, k, v)
        return (out, *back(g))

    got = jax.jit(run, static_argnums=4)(*(jax.device_put(x, device) for x in (q, k, v, g)), backend)
    exact = (jax.device_put(x.astype(np.float32), CPU) for x in (q, k, v, g))
    wanted_all = jax.jit(run, static_argnums=4)(*exact, Backend())
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), got, wanted_all, strict=True):
        off = relative(np.asarray(ours, np.float32) * real, np.asarray(theirs) * real)
        print(f"{line}: {name} {off:.1e}")
        assert off < BFLOAT16, name


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared prompts"])
def test_attention_over_the_live_part_is_that_over_all(device, sizes, shared):
    """Of a decode step. Positions that are not live may be anything."""
    slots, heads, group, length, size = 64, 2, 4, 2048, 128
    precision = decode_precision(Precision("bfloat16", "bfloat16"), device)
    q, k, v = (
        jax.random.normal(jax.random.key(i), shape, "bfloat16")
        for i, shape in enumerate([(slots, heads * group, size), *[(slots, heads, length, size)] * 2])
    )
    end = jnp.asarray(np.linspace(1, length - 1, slots), jnp.int32)  # new positions besides
    prompt = None
    if shared:
        prompt = caches.Partial(*(jnp.ones((slots, heads, group, last), jnp.float32) for last in (1, 1, size)))
    if device.platform == "tpu":
        new = k[:, :, :4], v[:, :, :4]
        run = jax.jit(functools.partial(caches._attend_held, first=None, prompt=prompt), static_argnames="live")
        live, whole = (run(q, (k, v), new, end, jnp.int32(2), live=live) for live in (True, False))
    elif live_attention.has_cudnn(v, precision):
        dead = jnp.arange(length)[:, None] >= end[:, None, None, None]
        given = q, *(jnp.where(dead, 1e4, x) for x in (k, v)), end - 1
        live, whole = (
            jax.jit(functools.partial(caches.attend, live=end > 0, precision=how, prompt=prompt))(*given)
            for how in (precision, dataclasses.replace(precision, capability=(0,)))
        )
    else:
        pytest.skip(f"{device.device_kind} reads caches whole")
    assert relative(np.asarray(live, np.float32), np.asarray(whole, np.float32)) < BFLOAT16


def make_trainer(device: jax.Device, decoder: DecoderConfig, precision: Precision, *, seq_len: int) -> Trainer:
    mesh = make_mesh(fsdp=1, devices=[device])
    layout = Layout(seq_len=seq_len, rows=2, logprob_chunk=64)
    trainer = trainer_of(decoder, layout, mesh=mesh, precision=precision, learning_rate=1e-3)
    host = jax.device_get(init_params(decoder, jax.random.key(0), make_mesh(fsdp=1, devices=[CPU])))
    trainer.start(jax.device_put(host, trainer.shardings["params"]))
    return trainer


def decoder_of(sizes) -> DecoderConfig:
    width = sizes.pick(64, 512)
    return DecoderConfig(
        vocab_size=sizes.pick(300, 8192),
        hidden_size=width,
        layers=sizes.pick(2, 4),
        heads=width // 32,
        kv_heads=width // 64,
        head_dim=32,
        intermediate_size=3 * width,
        family="qwen3",
        tied_embeddings=True,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_update_is_the_cpus(device, sizes, dtype):
    """The policy that the sync dtype makes of the masters: its log-probs, its gradient, the parameters after it."""
    decoder, seq_len = decoder_of(sizes), sizes.pick(128, 1024)
    segments: list[Segment] = make_segments([seq_len, seq_len // 2, seq_len // 3, 17, 2], vocabulary=decoder.vocab_size)
    ours = make_trainer(device, decoder, Precision(dtype, dtype), seq_len=seq_len)
    exact = make_trainer(CPU, decoder, Precision("float32", dtype), seq_len=seq_len)
    before = jax.device_get(exact.state["params"])

    tokens = [plain(segment.tokens) for segment in segments]
    differences = np.concatenate([np.abs(a - b) for a, b in zip(ours.score(tokens), exact.score(tokens), strict=True)])
    print(f"{dtype}: log-probs {differences.max():.1e} at most, {differences.mean():.1e} on average")
    assert differences.max() < (LOGPROB_FLOAT32 if dtype == "float32" else LOGPROB_BFLOAT16)

    got, wanted = update(ours, segments), update(exact, segments)
    limit = FLOAT32 if dtype == "float32" else BFLOAT16
    print(f"{dtype}: gradient norm {got['gradient_norm']:.6g}, the CPU's {wanted['gradient_norm']:.6g}")
    assert got["gradient_norm"] == pytest.approx(wanted["gradient_norm"], rel=limit)
    assert got["tokens"] == wanted["tokens"] and int(ours.state["step"]) == 1
    steps = [jax.tree.map(np.subtract, jax.device_get(one.state["params"]), before) for one in (ours, exact)]
    off = relative(*steps)
    print(f"{dtype}: the step {off:.1e}")
    assert off < (UPDATE_FLOAT32 if dtype == "float32" else UPDATE_BFLOAT16)


def test_products_of_float32_are_float32(device, sizes):
    """The head too: with TF32, or bfloat16 passes, the error would be a hundred times as large."""
    from scalerl_jax.model.head import logits

    decoder = decoder_of(sizes)
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(64, decoder.hidden_size)).astype(np.float32)
    weight = rng.normal(size=(decoder.vocab_size, decoder.hidden_size)).astype(np.float32)
    exact = hidden.astype(np.float64) @ weight.astype(np.float64).T
    for precision in (Precision(), Precision("bfloat16", "float32", "highest")):
        with jax.default_device(device):
            got = jax.jit(lambda h, w, p=precision: logits({"embed": w}, decoder, h, precision=p))(hidden, weight)
        assert got.dtype == jnp.float32
        assert np.linalg.norm(np.asarray(got) - exact) < 1e-6 * np.linalg.norm(exact)
