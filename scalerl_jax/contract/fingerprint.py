"""A hash that shows whether two tokenizers give the same meaning to the same token ids.

    fingerprint = sha256( canonical JSON of {kind, tokens: [[id, token], ...] by id, merges or scores} )

Only what maps ids to text is hashed. The rest of a `tokenizer.json` (normalizer, padding, flags, the order of its keys,
whether a special token is in the vocabulary or in `added_tokens`, how a merge is spelled) differs between copies of one
tokenizer saved by different versions of `tokenizers` and `transformers`, and a generator never turns text into ids.

Standard library only: a generator must not need `tokenizers` to identify its own.
"""

import hashlib
import json
import os
from typing import Any


def tokenizer_fingerprint(folder: str | os.PathLike[str]) -> str:
    """The fingerprint (hex) of the `tokenizer.json` in a Hugging Face folder. Raises ValueError naming the file."""
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.isfile(path):
        raise ValueError(f"{path}: no such file; the model's folder must hold its tokenizer")
    with open(path, encoding="utf-8") as file:
        try:
            content = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error})") from None
    try:
        meaning = _meaning(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: not a tokenizer ({type(error).__name__}: {error})") from None
    canonical = json.dumps(meaning, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _meaning(content: dict[str, Any]) -> dict[str, Any]:
    model = content["model"]
    vocabulary = model["vocab"]
    meaning: dict[str, Any] = {}
    if isinstance(vocabulary, dict):  # BPE, WordPiece, WordLevel
        tokens = {int(number): token for token, number in vocabulary.items()}
    else:  # Unigram: [[token, score], ...] by id
        tokens = {number: token for number, (token, _) in enumerate(vocabulary)}
        meaning["scores"] = [float(score) for _, score in vocabulary]
    # Special tokens are in the vocabulary, in added_tokens, or in both; on the same id they are the same token.
    tokens.update({int(added["id"]): added["content"] for added in content.get("added_tokens") or []})
    if "merges" in model:  # spelled "a b" by old versions, ["a", "b"] by new ones
        meaning["merges"] = [m.split(" ") if isinstance(m, str) else list(m) for m in model["merges"]]
    # Old files omit the kind if it is BPE.
    return meaning | {"kind": model.get("type") or "BPE", "tokens": sorted([n, t] for n, t in tokens.items())}
