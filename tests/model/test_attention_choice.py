"""Which backend is taken where, and how one that cannot be is refused."""

import types

import jax
import pytest

from scalerl_jax.model.attention import Shapes, choose, cudnn


def device(platform, kind, **more):
    return types.SimpleNamespace(platform=platform, device_kind=kind, **more)


CPU = device("cpu", "cpu")
V5P = device("tpu", "TPU v5")
A100 = device("gpu", "NVIDIA A100", compute_capability="8.0")
H100 = device("gpu", "NVIDIA H100", compute_capability="9.0")
V100 = device("gpu", "NVIDIA V100", compute_capability="7.0")
MI300 = device("gpu", "AMD MI300", compute_capability="gfx942")


def shapes(seq_len=16_384, head_dim=128, compute_dtype="bfloat16", context=1):
    return Shapes(seq_len, head_dim, compute_dtype, context)


@pytest.mark.parametrize(
    ("where", "of", "name", "words"),
    [
        (CPU, shapes(), "blocks", "blocks, in plain XLA (cpu)"),
        (V5P, shapes(), "splash", "splash on TPU v5, blocks of 1024 queries and 1024 keys"),
        (V5P, shapes(34_816, context=4), "splash", "blocks of 512 queries and 1024 keys"),
        (V5P, shapes(1000), "blocks", "not splash: needs rows of a multiple of 128 tokens, and they have 1000"),
        (V5P, shapes(compute_dtype="float32"), "blocks", "not splash: needs config.model.compute_dtype=bfloat16"),
        (H100, shapes(), "cudnn", "cuDNN on NVIDIA H100, packed rows"),
        (H100, shapes(head_dim=256), "cudnn", "packed rows"),
        (H100, shapes(context=2), "cudnn_mask", "with a mask (config.learner.context=2)"),
        (A100, shapes(), "cudnn_mask", "cuDNN on NVIDIA A100 with a mask (older than Hopper)"),
        (A100, shapes(34_816), "blocks", "not cudnn: it would take a mask of 2.3 GiB a row (older than Hopper)"),
        (A100, shapes(head_dim=256), "blocks", "needs heads of a multiple of 8 up to 128, and they are of 256"),
        (V100, shapes(), "blocks", "needs an NVIDIA GPU from Ampere on, and this is NVIDIA V100"),
        (MI300, shapes(), "blocks", "needs an NVIDIA GPU from Ampere on, and this is AMD MI300"),
    ],
)
def test_auto(where, of, name, words):
    backend, line = choose("auto", where, of)
    assert backend.name == name and words in line and "\n" not in line


def test_a_jax_that_was_not_read_takes_the_public_call(monkeypatch):
    monkeypatch.setattr(cudnn, "FLASH_VERSIONS", ((0, 1, 0), (0, 2, 0)))
    backend, line = choose("auto", H100, shapes())
    assert backend.name == "cudnn_mask" and f"jax {jax.__version__}" in line


@pytest.mark.parametrize(
    ("wanted", "where", "of", "words"),
    [
        ("splash", CPU, shapes(), "config.model.attention=splash: needs a TPU, and this is cpu (cpu)"),
        ("splash", V5P, shapes(1000), "config.model.attention=splash: needs rows of a multiple of 128 tokens"),
        ("splash", V5P, shapes(16_384 + 128, context=2), "a multiple of 256 tokens, and they have 16512"),
        ("cudnn", CPU, shapes(), "config.model.attention=cudnn: needs an NVIDIA GPU"),
        ("cudnn", H100, shapes(compute_dtype="float32"), "config.model.compute_dtype=bfloat16, and it is float32"),
    ],
)
def test_one_that_cannot_be_is_refused(wanted, where, of, words):
    with pytest.raises(ValueError) as error:
        choose(wanted, where, of)
    assert words in str(error.value)


def test_what_is_asked_for_is_taken_whatever_its_size():
    assert choose("cudnn", A100, shapes(34_816))[0].name == "cudnn_mask"
    for where in (CPU, V5P, H100):
        assert choose("blocks", where, shapes())[0].name == "blocks"
