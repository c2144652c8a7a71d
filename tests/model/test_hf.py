"""Folders of safetensors: read lazily, in parts and whole; load -> export gives back every bit."""

import itertools
import json
import os
import pathlib
import shutil
import struct
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from scalerl_jax.model import DecoderConfig, hf, load_hf, safetensors_folder
from scalerl_jax.model.hf_folder import write_model_folder
from scalerl_jax.model.safetensors_folder import INDEX, SINGLE, Tensors
from scalerl_jax.model.tensor_layout import hf_tensors
from tests.model import loading_program
from tests.support.compiled import on_devices
from tests.support.families import CASES, decoder
from tests.support.models import in_files, random_tensors, read_tensors, toy_decoder, write_folder
from tests.support.params import from_hf
from tests.support.ports import free_port
from tests.support.processes import begin_python

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Both zeros, the smallest number, one that float32 has as a subnormal, the largest, and -1 / 3.
ODD = np.array([0x0000, 0x8000, 0x0001, 0x807F, 0x7F7F, 0xBEAB], np.uint16)


def all_bits(config: DecoderConfig) -> dict[str, np.ndarray]:
    """bfloat16 of any finite bits."""
    rng = np.random.default_rng(0)
    named = {}
    for name, shape in hf_tensors(config).items():
        bits = rng.integers(0, 2**16, shape, np.uint16)
        bits[(bits & 0x7F80) == 0x7F80] ^= 0x4000  # no infinities and NaNs
        bits.reshape(-1)[: len(ODD)] = ODD
        named[name] = bits.view(BFLOAT16)
    return named


def write_sharded(folder: pathlib.Path, config: DecoderConfig, named: dict[str, np.ndarray], count: int = 3) -> None:
    write_folder(folder, config, named)
    (folder / SINGLE).unlink()
    named = in_files(config, named)
    where = {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        own = dict(list(named.items())[number::count])
        save_file(own, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(own, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))


# One row at a time and a few, on the device; whole, on the host.
BLOCKS = [(case, 2**24) for case in CASES] + [(case, size) for case in CASES if "eights" in case for size in (1, 200)]


@pytest.mark.parametrize(("case", "blocks"), BLOCKS)
def test_untouched_weights_survive_to_the_bit(
    case: str, blocks: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "_BLOCK_BYTES", blocks)
    config = decoder(case)
    named = all_bits(config)
    write_sharded(tmp_path / "start", config, named)
    # What others have put beside it is not read.
    (tmp_path / "start" / "consolidated.safetensors").write_bytes(b"another layout")
    file = tmp_path / "start" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token_id": 3, "unsloth_version": "2026.1"}))
    read, params = load_hf(str(tmp_path / "start"))
    assert read == config and all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), from_hf(named, config))
    out = tmp_path / "out"
    write_model_folder(str(out), params=params, decoder=read, tokenizer_dir=str(tmp_path / "start"), dtype="bfloat16")
    written, wanted = load_file(out / SINGLE), in_files(config, named)
    assert written.keys() == wanted.keys()
    for name, value in wanted.items():
        assert written[name].dtype == BFLOAT16 and written[name].tobytes() == value.tobytes(), name
    config = json.loads((out / "config.json").read_text())
    assert (config["pad_token_id"], config["unsloth_version"]) == (3, "2026.1")


@pytest.mark.parametrize("case", CASES)
def test_tests_read_what_they_wrote(case: str, tmp_path: pathlib.Path) -> None:
    config = decoder(case)
    named = random_tensors(config, 0)
    read = read_tensors(write_folder(tmp_path / "model", config, named), config)
    assert list(read) == list(named)
    for name, value in named.items():
        np.testing.assert_array_equal(read[name], value, err_msg=name)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, DecoderConfig, dict[str, np.ndarray]]:
    config = toy_decoder(family="qwen2", tied_embeddings=True)
    folder, named = tmp_path_factory.mktemp("model"), random_tensors(config, 0)
    write_sharded(folder, config, named)
    return folder, config, named


def copy(model: Any, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(model[0], tmp_path / "copy"))


@given(data=st.data())
def test_any_part_of_any_tensor(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=0, max_size=4)))
    page = data.draw(st.sampled_from([1, 16, 4096]))
    value = np.random.default_rng(0).normal(size=shape).astype(np.float16)
    folder = tmp_path_factory.mktemp("part")
    save_file({"before": np.ones(3, np.float32), "x": value}, folder / SINGLE)
    parts = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    index = tuple(slice(*part) for part in parts)
    with mock.patch.object(safetensors_folder, "_PAGE", page):
        got = Tensors(str(folder)).read("x", index)
    assert got.dtype == np.float16 and got.flags.c_contiguous
    np.testing.assert_array_equal(got, value[index])


def test_a_slice_costs_its_own_bytes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = np.random.default_rng(0).normal(size=(16, 8192)).astype(np.float32)
    save_file({"x": value, "experts": value.reshape(8, 2, 8192)}, tmp_path / SINGLE)
    tensors, counted = Tensors(str(tmp_path)), []
    read = os.preadv

    def counting(file: int, into: Any, offset: int) -> int:
        counted.append(read(file, into, offset))
        return counted[-1]

    monkeypatch.setattr(safetensors_folder.os, "preadv", counting)
    for name, index, share in (
        ("x", np.s_[4:8, :], 1 / 4),
        ("x", np.s_[:, 2048:4096], 1 / 4),  # pieces of two pages
        ("x", np.s_[4:8, 0:16], 1 / 4),  # of less than one: the rows are read whole, but no other
        ("experts", np.s_[2:3, :, :], 1 / 8),
        ("experts", np.s_[:, 1:2, :], 1 / 2),
        ("x", np.s_[3:3, :], 0),
    ):
        counted.clear()
        tensors.read(name, index)
        assert sum(counted) == share * value.nbytes


def mistakes(folder: pathlib.Path) -> dict[str, Any]:
    """What a user may have done to a folder of three files and an index -> what is said, after the folder's name."""
    first = folder / "model-00001-of-00003.safetensors"
    index = json.loads((folder / INDEX).read_text())
    header, broken = int.from_bytes(first.read_bytes()[:8], "little"), f"{first.name}: is no safetensors"

    def data(text: bytes) -> Any:
        return lambda: first.write_bytes(struct.pack("<Q", len(text)) + text)

    def with_index(change: Any) -> Any:
        return lambda: (folder / INDEX).write_text(json.dumps(change))

    def stored(**tensors: np.ndarray) -> Any:
        """The files as one, with these changes."""

        def write() -> None:
            whole = {name: Tensors(str(folder))[name] for name in index["weight_map"]}
            for file in folder.glob("model*"):
                file.unlink()
            whole |= {name.replace("__", "."): value for name, value in tensors.items()}
            save_file({name: value for name, value in whole.items() if value.size}, folder / SINGLE)

        return write

    norm, layer = "model__norm__weight", "model__layers__"
    other_head = random_tensors(toy_decoder(family="qwen2"), 1)["lm_head.weight"]
    return {
        "no file of those that the index names": (first.unlink, f"{INDEX}: {first.name} is missing (of 3 files)"),
        "no index": ((folder / INDEX).unlink, f"no weights there (*.safetensors); {first.name} is not read without"),
        "no weights": (lambda: [file.unlink() for file in folder.glob("model*")], "no weights there (*.safetensors)"),
        "a page of a sign-in": (lambda: first.write_text("<!doctype html>" * 9), f"{first.name}: is cut short, or no"),
        "an empty file": (lambda: first.write_bytes(b""), f"{first.name}: is cut short, or no safetensors"),
        "half a download": (lambda: os.truncate(first, header + 99), f"{first.name}: is cut short: tensor"),
        "half a header": (lambda: os.truncate(first, header), f"{first.name}: is cut short, or no safetensors"),
        "no JSON": (data(b"{{{{"), f"{broken} (Expecting"),
        "a list": (data(b"[]"), broken),
        "deep": (data(b"[" * 10**5), broken),
        "no tensor": (data(b'{"x":[]}'), f"{first.name}: tensor x is described as []"),
        "an index of nothing": (with_index({}), f"{INDEX}: weight_map must map tensor names"),
        "an index that is none": (lambda: (folder / INDEX).write_text("{"), f"{INDEX}: is not JSON"),
        "an index of elsewhere": (with_index({"weight_map": {"x": "../x"}}), f"{INDEX}: '../x' is no file of"),
        "a tensor that is not there": (
            with_index({"weight_map": {**index["weight_map"], "x": first.name}}),
            f"{INDEX}: tensor x is not in {first.name}",
        ),
        "two sets": (lambda: shutil.copy(first, folder / SINGLE), f"{SINGLE} and {INDEX} are two sets of weights"),
        "a layer too few": (stored(**{f"{layer}1__mlp__up_proj__weight": np.zeros(0)}), "tensor model.layers.1.mlp"),
        "a layer too many": (stored(**{f"{layer}2__mlp__up_proj__weight": np.ones((48, 32))}), "to a qwen2 of 2 la"),
        "a bias too many": (stored(**{f"{layer}0__self_attn__o_proj__bias": np.ones(32)}), "o_proj.bias does not"),
        **{
            f"{name}, unread": (stored(**{name.replace(".", "__"): np.ones(32)}), f"tensor {name} does not belong to a")
            for name in ("lm_head.bias", "score.weight", "v_head.summary.weight", "layers.0.bias", "layers.0.mlp.bias")
        },
        "a head that is not tied": (stored(lm_head__weight=other_head), "tensor lm_head.weight differs"),
        "a head of another size": (stored(lm_head__weight=other_head[1:]), "tensor lm_head.weight differs"),
        **{
            f"{value} of sign {sign} in {kind.__name__}": (
                stored(**{norm: np.append(np.ones(31), np.copysign(value, sign)).astype(kind)}),
                f"{SINGLE}: tensor model.norm.weight has a NaN or an infinity",
            )
            for value, sign in itertools.product((np.nan, np.inf), (1, -1))
            for kind in (np.float32, np.float16, np.float64, ml_dtypes.bfloat16)
        },
        "another shape": (stored(**{norm: np.ones(31, np.float32)}), "model.norm.weight has shape (31,), not (32,)"),
        "another dtype": (stored(**{norm: np.ones(32, np.int8)}), "model.norm.weight is of I8, not of F64, F32"),
    }  # fmt: skip


@pytest.mark.parametrize("mistake", range(44))
def test_mistakes_are_one_line(mistake: int, model: Any, tmp_path: pathlib.Path) -> None:
    folder = copy(model, tmp_path)
    made = mistakes(folder)
    assert len(made) == 44
    what, (make, words) = list(made.items())[mistake]
    make()
    with pytest.raises(ValueError) as error:
        load_hf(str(folder))
    assert words in str(error.value) and str(folder) in str(error.value) and "\n" not in str(error.value), what


def test_what_is_no_weight_of_the_decoder_is_no_mistake(model: Any, tmp_path: pathlib.Path) -> None:
    """Buffers that old files hold, and a head that is the tied embeddings."""
    folder, config, named = copy(model, tmp_path), model[1], model[2]
    for file in folder.glob("model*"):
        file.unlink()
    others = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        "lm_head.weight": named["model.embed_tokens.weight"],
        "model.rotary_emb.cos_cached": np.ones(4, np.float32),
    }
    save_file(named | others, folder / SINGLE)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(load_hf(str(folder))[1]), from_hf(named, config))


@pytest.mark.parametrize("shape", [(), (5,)])
def test_experts_without_rows_and_columns_are_named(tmp_path: pathlib.Path, shape: tuple[int, ...]) -> None:
    config, name = toy_decoder(family="llama4_text"), "model.layers.0.feed_forward.experts.gate_up_proj"
    write_folder(tmp_path, config, random_tensors(config, 0))
    whole = load_file(tmp_path / SINGLE)
    assert name in whole
    save_file({**whole, name: np.ones(shape, np.float32)}, tmp_path / SINGLE)
    with pytest.raises(ValueError, match=r"experts.* has shape \(5?,?\), not"):
        load_hf(str(tmp_path))


@pytest.mark.slow
def test_the_text_model_beside_one_for_images(tmp_path: pathlib.Path) -> None:
    config = toy_decoder(family="llama4_text", rope_theta=5e5)
    named = all_bits(config)
    write_sharded(tmp_path / "text", config, named)
    inside = {f"language_model.{name}": value for name, value in in_files(config, named).items()}
    start = write_folder(tmp_path / "start", config, named)
    save_file({**inside, "vision_model.x.weight": np.ones(3, np.float32)}, start / SINGLE)
    text = json.loads((start / "config.json").read_text())
    whole = {
        "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "image_token_index": 9,
        "text_config": {**text, "pad_token_id": 3}, "vision_config": {"hidden_size": 8},
    }  # fmt: skip
    (start / "config.json").write_text(json.dumps(whole))
    read, params = load_hf(str(start))
    assert read == config
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), from_hf(named, config))
    # What is written is the text model alone, in a layout of its own.
    write_model_folder(
        str(tmp_path / "out"), params=params, decoder=read, tokenizer_dir=str(start), dtype="bfloat16", shard_bytes=9000
    )
    again, same = load_hf(str(tmp_path / "out"))
    assert again == config and json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"] == 3
    jax.tree.map(np.testing.assert_array_equal, same, params)
    transformers = pytest.importorskip("transformers")
    _, about = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not about["missing_keys"] and not about["unexpected_keys"]


def test_a_file_that_is_cut_short_meanwhile(model: Any, tmp_path: pathlib.Path) -> None:
    folder = copy(model, tmp_path)
    tensors = Tensors(str(folder))
    for file in folder.glob("*.safetensors"):
        os.truncate(file, 100)
    with pytest.raises(ValueError, match=r"model-0000.*ends inside of tensor model\.embed_tokens\.weight"):
        tensors["model.embed_tokens.weight"]


def test_a_folder_that_is_replaced_meanwhile(model: Any, tmp_path: pathlib.Path) -> None:
    folder, named = copy(model, tmp_path), model[2]
    tensors = Tensors(str(folder))
    shutil.rmtree(folder)
    write_sharded(folder, model[1], random_tensors(model[1], 1), count=2)
    for name, value in named.items():
        np.testing.assert_array_equal(tensors[name], value)


@pytest.mark.slow
def test_each_host_reads_what_its_devices_hold(tmp_path: pathlib.Path) -> None:
    """Two processes with two devices each, over which the width is cut."""
    write_folder(tmp_path, loading_program.DECODER, random_tensors(loading_program.DECODER, 0))
    address = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": on_devices(2)}
    program = ("-m", "tests.model.loading_program", address)
    hosts = [begin_python(*program, rank, tmp_path, environment=environment) for rank in range(2)]
    try:
        for host, output in hosts:
            with output:
                read, held, everything = map(int, output.read().split())
            assert host.wait(600) == 0
            assert read == held and 0.5 <= held / everything < 0.51  # vectors are whole everywhere
    finally:
        for host, _ in hosts:
            host.kill()
            host.wait()
