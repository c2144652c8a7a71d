"""Model folders for benchmarks."""

import json
import os

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from scalerl_jax.environments.tokenizer import make_tokenizer
from scalerl_jax.model import DecoderConfig
from scalerl_jax.model.hf_folder import write_model_folder
from scalerl_jax.model.tensor_layout import hf_tensors
from tests.support.params import leaning_params

QUICKSTART = DecoderConfig(  # as the defaults of config.sft say
    vocab_size=384,
    hidden_size=96,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate_size=256,
    tied_embeddings=True,
)


def write_folder(path: str, config: DecoderConfig) -> int:
    """A model folder with random weights; the number of parameters."""
    rng = np.random.default_rng(0)
    named = {}
    for name, shape in hf_tensors(config).items():
        value = np.ones(shape) if len(shape) == 1 else rng.normal(0, shape[-1] ** -0.5, shape)
        named[name] = value.astype(np.float32)
    save_file(named, os.path.join(path, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config.to_hf(), file)
    words = {str(i): i for i in range(config.vocab_size)}
    Tokenizer(WordLevel(words, unk_token="0")).save(os.path.join(path, "tokenizer.json"))
    return sum(value.size for value in named.values())


def write_stopping_policy(folder: str, *, width: int, layers: int, stop_every: float, vocabulary: int = 300) -> str:
    """A model folder with random weights that stops at every position with a probability of about 1 / stop_every.

    So its completions have geometric lengths: many short and a few long. Returns the folder, `folder`/model.
    """
    base = os.path.join(folder, "tokenizer")
    tokenizer = make_tokenizer(corpus=["0123456789 abc"] * 9, path=base, vocabulary=vocabulary)
    decoder = DecoderConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=32,
        intermediate_size=3 * width,
        family="qwen3",
        tied_embeddings=False,
        stop_token_ids=tokenizer.stop_ids,
    )

    def lean(head: np.ndarray, common: np.ndarray) -> None:
        # The last norm leaves a vector of mean square 1 along `common`, more or less: its product with `common` is
        # known.
        logit = np.log(vocabulary / stop_every / len(tokenizer.stop_ids))
        for token in tokenizer.stop_ids:
            head[token] = logit / np.linalg.norm(common) / np.sqrt(decoder.hidden_size) * common

    params = leaning_params(decoder, lean, spread=0.1, head=0.001)
    path = os.path.join(folder, "model")
    write_model_folder(path, params=params, decoder=decoder, tokenizer_dir=base)
    return path
