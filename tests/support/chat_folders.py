"""Small model folders with a chat template in the style of a known model's, and that model's control tokens."""

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Fast

from scalerl_jax.environments.tokenizer import Tokenizer, make_tokenizer

TEMPLATES = pathlib.Path(__file__).parents[1] / "environments" / "chat_templates"
QWEN = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
LLAMA = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
ADDED = {"__type": "AddedToken", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
DEEPSEEK = {
    "bos_token": {**ADDED, "content": "<｜begin▁of▁sentence｜>"},
    "eos_token": {**ADDED, "content": "<｜end▁of▁sentence｜>"},
}
STYLES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    # name: (what tokenizer_config.json says, special tokens)
    "qwen2_5": (QWEN, ("<|im_start|>", "<|im_end|>")),
    "qwen3": (QWEN, ("<|im_start|>", "<|im_end|>")),
    "marked": (QWEN, ("<|im_start|>", "<|im_end|>")),
    "llama3": (LLAMA, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "deepseek_r1": (DEEPSEEK, ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")),
}
CORPUS = (
    "You are a helpful assistant. Please reason step by step, and put your final answer within boxed.",
    "<think>\nTwo and two: 2+2=4.\n</think>\n\nThe answer is 4.",
    "system user assistant\n\n",
)


def chat_folder(
    path: pathlib.Path,
    style: str,
    *,
    in_config: bool = False,
    config: Mapping[str, Any] = {},
    corpus: Iterable[str] = CORPUS * 4,
    vocabulary: int = 340,
) -> Tokenizer:
    """A folder with tokenizer files and template; in_config: the template is in tokenizer_config.json.

    Llama's and DeepSeek's tokenizers put the beginning of text before each sequence.
    """
    described, special = STYLES[style]
    make_tokenizer(corpus=corpus, path=str(path), vocabulary=vocabulary)
    fast = Fast.from_file(str(path / "tokenizer.json"))
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    first = described.get("bos_token")
    if first is not None:
        text = first["content"] if isinstance(first, dict) else first
        fast.post_processor = processors.TemplateProcessing(
            single=f"{text} $A", pair=f"{text} $A $B", special_tokens=[(text, fast.token_to_id(text))]
        )
    fast.save(str(path / "tokenizer.json"))
    template = (TEMPLATES / f"{style}.jinja").read_text(encoding="utf-8")
    written: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **described, **config}
    if in_config:
        written["chat_template"] = template
    else:
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(written), encoding="utf-8")
    return Tokenizer(str(path))


def two_stops(path: pathlib.Path, style: str) -> Tokenizer:
    """A folder whose first stop token ends a text, and whose second ends a turn, as of many instruct models."""
    tokenizer = chat_folder(path, style)
    turn = STYLES[style][0]["eos_token"]
    (turn_id,) = tokenizer.encode(turn if isinstance(turn, str) else turn["content"])
    stops = [tokenizer.encode("<|endoftext|>")[0], turn_id]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}), encoding="utf-8")
    return Tokenizer(str(path))
