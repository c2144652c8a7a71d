"""Writes a policy as a Hugging Face folder, which transformers and vLLM load: whole, or not at all."""

import json
import math
import os
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalerl_jax.model import safetensors_folder
from scalerl_jax.model.decoder import Params
from scalerl_jax.model.decoder_config import DecoderConfig, read_config, text_of
from scalerl_jax.model.hf import to_hf
from scalerl_jax.model.tensor_layout import hf_tensors, layout, stored
from scalerl_jax.system import files
from scalerl_jax.system.files import read_object

_SHARD_BYTES = 5 * 10**9
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def write_model_folder(
    out: str,
    *,
    params: Params,
    decoder: DecoderConfig,
    tokenizer_dir: str,
    dtype: str = "float32",
    shard_bytes: int = _SHARD_BYTES,
    replace: bool = False,
) -> None:
    """Makes the folder `out`: weights in `dtype`, config.json, generation_config.json, the files of the tokenizer.

    The tokenizer's files come from `tokenizer_dir`; if it is a model folder of the same decoder, its config.json and
    generation_config.json are kept, so that their other fields (padding, chat tokens) are not lost.
    Raises ValueError if `out` exists (and is not to be replaced) or tokenizer_dir has no tokenizer.json.
    """
    if os.path.exists(out) and not replace:
        raise ValueError(f"{out}: exists already")
    if not os.path.isfile(os.path.join(tokenizer_dir, "tokenizer.json")):
        raise ValueError(f"{tokenizer_dir}: no tokenizer.json there")
    with files.whole_folder(os.path.abspath(out), replace=replace) as folder:
        _write_weights(folder, params, decoder, dtype, shard_bytes)
        _write_rest(folder, decoder, tokenizer_dir, dtype)


def _write_weights(folder: str, params: Params, decoder: DecoderConfig, dtype: str, limit: int) -> None:
    """One file, or several with an index. At most one file's tensors are in memory in addition to the parameters."""
    held, files_of = hf_tensors(decoder), stored(decoder)
    together: dict[str, list[str]] = {}  # stored tensor, or the first of several -> the names made of it
    for name, parts in files_of.items():
        together.setdefault(parts[0], []).append(name)
    width = jnp.dtype(dtype).itemsize
    sizes = {key: width * sum(math.prod(held[name]) for name in names) for key, names in together.items()}
    shards = _split(sizes, limit)
    where: dict[str, str] = {}
    for number, keys in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        names = [name for key in keys for name in together[key]]
        where |= {part: file for name in names for part in files_of[name]}
        tensors = jax.jit(lambda p, names=names: {n: to_hf(p, decoder, jnp.dtype(dtype))[n] for n in names})(params)
        gathered: dict[str, np.ndarray] = {}
        for key in keys:
            values = [np.asarray(tensors.pop(name)) for name in together[key]]
            parts = files_of[together[key][0]]
            if layout(decoder)[together[key][0]].row.columns:
                gathered[key] = np.ascontiguousarray(np.concatenate([v.swapaxes(1, 2) for v in values], axis=2))
            else:
                gathered |= {key: values[0]} if parts == together[key] else dict(zip(parts, values[0], strict=True))
        safetensors_folder.save(os.path.join(folder, file), gathered)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        _write_json(folder, "model.safetensors.index.json", index)


def _split(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """The names of the tensors of each file. sizes: in bytes."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_rest(folder: str, decoder: DecoderConfig, tokenizer_dir: str, dtype: str) -> None:
    for name in _TOKENIZER_FILES:
        if os.path.isfile(os.path.join(tokenizer_dir, name)):
            shutil.copyfile(os.path.join(tokenizer_dir, name), os.path.join(folder, name))
    config = decoder.to_hf(dtype)
    rope = {key: config[key] for key in ("rope_theta", "rope_scaling", "rope_parameters")}
    generation: dict[str, Any] = {"eos_token_id": config["eos_token_id"], "do_sample": True, "temperature": 1.0}
    if os.path.isfile(os.path.join(tokenizer_dir, "config.json")):
        if read_config(tokenizer_dir).canonical_json() == decoder.canonical_json():
            # Of a model that also reads images only the text model is here.
            own = read_object(os.path.join(tokenizer_dir, "config.json"))
            config = {"architectures": config["architectures"], **text_of(own)} if "text_config" in own else own
            # In both forms: a library that knows only the other one would silently use its default.
            config |= {key: value for key, value in rope.items() if not config.get(key)}
            config |= {"torch_dtype": dtype, "dtype": dtype}
        if os.path.isfile(os.path.join(tokenizer_dir, "generation_config.json")):
            generation = read_object(os.path.join(tokenizer_dir, "generation_config.json"))
    _write_json(folder, "config.json", config)
    _write_json(folder, "generation_config.json", generation)


def _write_json(folder: str, name: str, value: Any) -> None:
    pathlib.Path(folder, name).write_text(json.dumps(value, indent=2) + "\n")
