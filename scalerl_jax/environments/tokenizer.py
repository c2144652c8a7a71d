"""The tokenizer of a Hugging Face folder, read with `tokenizers` alone; and training of one from a corpus.

Token ids are the contract between trainer and generators; text is derived from them for the verifier and for people.

Also where thinking begins and ends: the state at the end of a prompt, and the two parts of a completion.

    prompt ends in        completion                 thinking        answer
    none                  <think>a</think>b          a               b
    opened  (<think>)     a</think>b                 a               b
    closed  (</think>)    b                          there is none   b

A prompt opens or closes thinking if it ends with that marker, ignoring white space: a chat template's generation prompt
may do either. A prompt that only mentions the markers elsewhere, as system prompts do, does neither.

Not supported on purpose: slow tokenizers (a folder without tokenizer.json).
"""

import json
import os
from collections.abc import Iterable, Sequence
from typing import Literal

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from scalerl_jax.model.hf_fields import stops
from scalerl_jax.system.files import read_object

THINK, END_OF_THINKING, END_OF_TEXT = "<think>", "</think>", "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, THINK, END_OF_THINKING)  # ids 0, 1, 2
_LONGEST_CHARACTER = 32  # tokens; bytes that are no character after so many tokens never become one


class Tokenizer:
    """A tokenizer, its end-of-sequence id and the ids that stop a completion.

    Raises ValueError naming the file that is missing or unusable.
    """

    def __init__(self, path: str):
        file = os.path.join(path, "tokenizer.json")
        if not os.path.isfile(file):
            raise ValueError(f"{file}: no such file; a model folder needs its tokenizer in Hugging Face format")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(file)
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise ValueError(f"{file}: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.path = path
        self._beginning = self._read_beginning()  # ids that the tokenizer puts before each sequence
        # One more than the largest id, added tokens included.
        self.vocabulary = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.stop_ids = self._read_stop_ids()  # tuple[int, ...]
        self.eos_id = self.stop_ids[0]

    def check_vocabulary(self, size: int) -> None:
        """Raises ValueError naming the file if it has tokens beyond a model's vocabulary of `size`."""
        if self.vocabulary > size:
            token = self._tokenizer.id_to_token(self.vocabulary - 1)
            raise ValueError(
                f"{os.path.join(self.path, 'tokenizer.json')}: token {self.vocabulary - 1} ({token!r}) is beyond the "
                f"model's vocabulary of {size} (vocab_size in its config.json)"
            )

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without special tokens around it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode`, for many texts, on all cores."""
        return [found.ids for found in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a prompt, with what the tokenizer puts before a sequence (Llama: one <|begin_of_text|>)."""
        return self.begun(self.encode(text))

    def begun(self, ids: list[int]) -> list[int]:
        """`ids` with the tokens that the tokenizer puts before a sequence, as in `encode_prompt`."""
        beginning = self._beginning
        # A rendered chat template already begins with them: do not add them twice.
        return ids if ids[: len(beginning)] == beginning else beginning + ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens kept."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The part of decode(ids) that each token adds; joined, the parts equal that text.

        "" for a token that ends within a character: the whole character belongs to the token that completes it, and
        bytes that are never completed to the last token. Empty list: this text cannot be split by tokens (some decoders
        decode bytes that are not text differently when they stand alone).
        """
        whole = self.decode(ids)
        parts: list[str] = []
        context, done = 0, 0  # tokens before `done` have their part; those from `context` on are decoded with the next
        for end in range(1, len(ids) + 1):
            before, text = self.decode(ids[context:done]), self.decode(ids[context:end])
            unfinished = text.endswith("\ufffd") or not text.startswith(before)
            if unfinished and end - done < _LONGEST_CHARACTER:
                parts.append("")
                continue
            parts.append(text[len(before) :])
            context, done = done, end
        joined = "".join(parts)
        if not parts or not whole.startswith(joined):
            return []
        parts[-1] += whole[len(joined) :]
        return parts

    def is_added(self, token: int) -> bool:
        """Whether `token` is an added token, such as a control token, rather than one of the base vocabulary."""
        return token in self._tokenizer.get_added_tokens_decoder()

    def decode_completion(self, ids: Sequence[int]) -> str:
        """The text of a completion without its final stop token."""
        ids = [int(i) for i in ids]
        return self.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def _read_beginning(self) -> list[int]:
        # Tokens that some tokenizers append after a sequence are left out: a prompt is continued.
        bare = self.encode("a")
        ids = self._tokenizer.encode("a", add_special_tokens=True).ids
        before = (ids[:at] for at in range(len(ids)) if bare and ids[at : at + len(bare)] == bare)
        return next(before, [])

    def _read_stop_ids(self) -> tuple[int, ...]:
        # The same sources and order as Hugging Face's generate: generation_config.json, config.json, the tokenizer.
        for name in ("generation_config.json", "config.json"):
            file = os.path.join(self.path, name)
            eos_token_id = _read_json(file).get("eos_token_id")
            try:
                ids = stops(eos_token_id)
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from None
            if unknown := [one for one in ids if self._tokenizer.id_to_token(one) is None]:
                raise ValueError(f"{file}: eos_token_id has {unknown[0]}, and the tokenizer has no such token")
            if ids:
                return ids
        file = os.path.join(self.path, "tokenizer_config.json")
        token = _read_json(file).get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        index = self._tokenizer.token_to_id(content) if content else None
        if index is None:
            raise ValueError(f"{file}: has no eos_token of the vocabulary, so nothing would end a completion")
        return (index,)


def make_tokenizer(*, corpus: Iterable[str], path: str, vocabulary: int) -> Tokenizer:
    """Trains a byte-level BPE on `corpus`, writes it to the folder `path` in Hugging Face format, and returns it.

    Every digit is a separate token (numbers line up, arithmetic is per digit), and so is each of SPECIAL_TOKENS.
    The vocabulary has at most `vocabulary` tokens: fewer if the corpus offers no more merges.
    Raises ValueError if `vocabulary` is too small for the bytes and the special tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocabulary < len(alphabet) + len(SPECIAL_TOKENS):
        raise ValueError(
            f"a byte-level vocabulary needs {len(alphabet) + len(SPECIAL_TOKENS)} tokens, not {vocabulary}"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer=trainer)
    os.makedirs(path, exist_ok=True)
    tokenizer.save(os.path.join(path, "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    with open(os.path.join(path, "tokenizer_config.json"), "w", encoding="utf-8") as file:
        json.dump(described, file, indent=2)
        file.write("\n")
    return Tokenizer(path)


def _read_json(path: str) -> dict:
    return read_object(path) if os.path.isfile(path) else {}


def opening(end: str) -> str:
    """The marker that `end` closes: "<think>" for "</think>", "[THINK]" for "[/THINK]"."""
    return end.replace("/", "", 1) if "/" in end else THINK


def thinking_at_end(prompt: str, end: str) -> Literal["opened", "closed", "none"]:
    """Whether a rendered prompt ends by opening or closing the thinking. end: config.rollout.end_of_thinking."""
    text = prompt.rstrip()
    if not end.strip():
        return "none"
    if text.endswith(end.strip()):
        return "closed"
    return "opened" if text.endswith(opening(end.strip())) else "none"


def split_thinking(text: str, end: str, *, opened: bool = False) -> tuple[str, str | None]:
    """(thinking, answer) of a completion's text; the answer is None if nothing follows the thinking.

    The answer is the text after the last `end`; if `end` does not occur, the whole text is thinking. end="": the
    completion has no thinking, and all of it is the answer. opened: the prompt opened the thinking.
    """
    if not end:
        return "", text.strip() or None
    before, found, after = text.rpartition(end)
    thinking = (before if found else after).strip()
    if not opened:
        thinking = thinking.removeprefix(opening(end)).lstrip()
    return thinking, (after.strip() or None) if found else None


def split_as_run(text: str, end: str, *, prompt: str, budget: int) -> tuple[str, str | None]:
    """split_thinking as a run applies it to a completion of the rendered `prompt`: the completion has thinking if there
    is a budget (config.rollout.thinking_budget_max) or the prompt opened the thinking."""
    opened = thinking_at_end(prompt, end) == "opened"
    return split_thinking(text, end if opened or budget > 0 else "", opened=opened)
