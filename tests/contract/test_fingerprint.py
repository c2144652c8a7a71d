"""The tokenizer's fingerprint: kept by every way of saving the same tokenizer, changed by whatever changes its ids."""

import copy
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from scalerl_jax.contract.fingerprint import tokenizer_fingerprint

CORPUS = ["3 + 8 = 11 ; 11 - 4 = 7", "Okay, time is up. Let me stop thinking", "the answer is 7, the sum is 11"] * 5


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A byte-level BPE with special tokens, saved by `tokenizers`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<think>", "</think>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    made = tmp_path / "made"
    made.mkdir()
    tokenizer.save(str(made / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "model_max_length": 512}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


def changed(folder: pathlib.Path, change: Callable[[dict[str, Any]], None]) -> str:
    """The fingerprint after an edit of tokenizer.json."""
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    other = folder.parent / "changed"
    other.mkdir(exist_ok=True)
    (other / "tokenizer.json").write_text(json.dumps(content))
    return tokenizer_fingerprint(other)


def test_saving_again_keeps_it(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    wanted = tokenizer_fingerprint(folder)
    assert len(wanted) == 64
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    loaded.padding_side, loaded.pad_token = "left", "<|endoftext|>"
    loaded("some text", truncation=True, max_length=4)  # leaves its mark in the saved file
    loaded.save_pretrained(tmp_path / "transformers")
    assert tokenizer_fingerprint(tmp_path / "transformers") == wanted
    (tmp_path / "tokenizers").mkdir()
    tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).save(str(tmp_path / "tokenizers" / "tokenizer.json"))
    assert tokenizer_fingerprint(tmp_path / "tokenizers") == wanted


def test_spelling_does_not_matter(folder: pathlib.Path) -> None:
    wanted = tokenizer_fingerprint(folder)

    def old_merges(content: dict[str, Any]) -> None:
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
        content["model"]["vocab"] = dict(reversed(content["model"]["vocab"].items()))

    def special_tokens_beside(content: dict[str, Any]) -> None:
        for token in ("<think>", "</think>"):
            del content["model"]["vocab"][token]

    def noise(content: dict[str, Any]) -> None:
        content["padding"] = {"strategy": "BatchLongest"}
        content["normalizer"] = {"type": "NFC"}
        content["model"]["fuse_unk"] = True
        content["added_tokens"].reverse()
        for added in content["added_tokens"]:
            added["special"] = False

    for change in (old_merges, special_tokens_beside, noise):
        assert changed(folder, change) == wanted, change.__name__


def test_what_changes_ids_changes_it(folder: pathlib.Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    words = list(content["model"]["vocab"])

    def swap(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary[words[100]], vocabulary[words[101]] = vocabulary[words[101]], vocabulary[words[100]]

    def swap_merges(content: dict[str, Any]) -> None:
        merges = content["model"]["merges"]
        merges[0], merges[1] = merges[1], merges[0]

    changes = {
        "two tokens swapped": swap,
        "two merges swapped": swap_merges,
        "a token gone": lambda c: c["model"]["vocab"].pop(words[-1]),
        "a token more": lambda c: c["added_tokens"].append({"id": 999, "content": "<tool>", "special": True}),
        "a special token renamed": lambda c: c["added_tokens"][1].update(content="<thought>"),
        "another kind": lambda c: c["model"].update(type="WordLevel"),
    }
    seen = {tokenizer_fingerprint(folder)} | {changed(folder, change) for change in changes.values()}
    assert len(seen) == 1 + len(changes)


def test_unigram_scores_count(tmp_path: pathlib.Path) -> None:
    content = {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.5], ["b", -2.25]]}, "added_tokens": []}
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "tokenizer.json").write_text(json.dumps(content))
    other = copy.deepcopy(content)
    other["model"]["vocab"][1][1] = -1.25  # type: ignore[index]
    assert changed(tmp_path / "made", lambda c: c.update(other)) != tokenizer_fingerprint(tmp_path / "made")


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": [["a"]]}}'])
def test_a_folder_without_a_tokenizer(tmp_path: pathlib.Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=str(tmp_path / "tokenizer.json")) as error:
        tokenizer_fingerprint(tmp_path)
    assert "\n" not in str(error.value)


def test_it_is_the_same_in_every_process(folder: pathlib.Path) -> None:
    """Nothing of it hangs on the order of a set or the seed of a hash."""
    program = f"from scalerl_jax.contract.fingerprint import *; print(tokenizer_fingerprint({str(folder)!r}))"
    found = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in "12"
    }
    assert found == {f"{tokenizer_fingerprint(folder)}\n".encode()}
