"""The tokenizer made here is one that transformers reads the same way."""

import json
import pathlib
import re
import shutil

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from scalerl_jax.config import PHRASE, Config
from scalerl_jax.contract.fingerprint import tokenizer_fingerprint
from scalerl_jax.environments.tokenizer import SPECIAL_TOKENS, Tokenizer, make_tokenizer
from scalerl_jax.traces.built_in import corpus

TEXTS = [
    "31+8-3+9=<think>31+8=39-3=36+9=45</think>45<|endoftext|>",
    "The quick brown fox, 1234567890 times; naïve café.\n\n\tTab — 数学 😀",
    PHRASE,
    "",
    " leading and trailing ",
]


@pytest.fixture(scope="module")
def folder(tokenizer):
    return pathlib.Path(tokenizer.path)


@pytest.fixture
def copy(folder, tmp_path):
    """A copy of it, to be changed."""
    return shutil.copytree(folder, tmp_path / "t")


def test_any_text_comes_back(tokenizer):
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(data=st.data())
def test_pieces_are_the_text_token_by_token(tokenizer, data):
    """Also of what a policy says that is no text: bytes that never become a character."""
    texts = data.draw(st.lists(st.sampled_from(TEXTS) | st.text(max_size=5), max_size=6))
    ids = [i for text in texts for i in tokenizer.encode(text)]
    ids += data.draw(st.lists(st.integers(0, tokenizer.vocabulary - 1), max_size=20))
    pieces = tokenizer.pieces(ids)
    assert len(pieces) == len(ids) and "".join(pieces) == tokenizer.decode(ids)


def test_the_pieces_of_characters_of_several_tokens(tokenizer):
    smile = tokenizer.encode("😀")
    assert len(smile) == 4
    assert tokenizer.pieces([*tokenizer.encode("7"), *smile, *tokenizer.encode("8")]) == ["7", "", "", "", "😀", "8"]
    assert tokenizer.pieces([*tokenizer.encode("7"), *smile[:2]]) == ["7", "", "\ufffd"]
    assert tokenizer.pieces([]) == []


def test_pieces_where_a_decoder_treats_bytes_and_spaces_in_its_own_way(tmp_path):
    """As Llama 2's: the first space is dropped, characters that have no token are bytes."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b", "▁", "▁def"]
    made = tokenizers.Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<unk>"}))
    tokenizer = Tokenizer(str(tmp_path))
    letter = [1 + byte for byte in "é".encode()]
    assert tokenizer.pieces([257, 258, 260, *letter, 257]) == ["a", "b", " def", "", "é", " a"]
    # Half a character before another: together the three bytes are no text, and whoever comes next shows it.
    assert tokenizer.pieces([257, letter[0], *letter, 258]) == ["a", "", "", "", "\ufffd\ufffd\ufffdb"]


def test_digits_and_special_tokens_are_single_tokens(tokenizer):
    assert tokenizer.vocabulary <= 384
    assert len(tokenizer.encode("9876543210")) == 10
    assert len(set(tokenizer.encode("0123456789"))) == 10
    assert [tokenizer.encode(token) for token in SPECIAL_TOKENS] == [[0], [1], [2]]
    assert tokenizer.encode("7</think>7")[1] == tokenizer.encode("</think>")[0]
    assert tokenizer.eos_id == 0 and tokenizer.stop_ids == (0,)


def test_the_phrase_is_its_words(tokenizer):
    ids = tokenizer.encode(PHRASE)
    assert ids[-1:] == tokenizer.encode("</think>")
    assert len(ids) <= len(PHRASE.split()) + 5  # punctuation


@pytest.mark.slow
def test_transformers_reads_the_same(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    # Beside a model's config.json, as it is used.
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": 0}))
    for path in (folder, tmp_path / "model"):
        theirs = transformers.AutoTokenizer.from_pretrained(str(path))
        ours = Tokenizer(str(path))
        for text in TEXTS:
            assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
            assert theirs.decode(ours.encode(text), clean_up_tokenization_spaces=False) == text
        assert theirs.eos_token_id == ours.eos_id


def test_the_same_corpus_makes_the_same_tokenizer(folder, tmp_path):
    make_tokenizer(corpus=corpus(Config()), path=str(tmp_path), vocabulary=384)
    assert tokenizer_fingerprint(tmp_path) == tokenizer_fingerprint(folder)


def test_a_completion_is_read_without_its_stop_token(tokenizer):
    ids = tokenizer.encode("<think>1</think>1")
    assert tokenizer.decode_completion([*ids, 0]) == tokenizer.decode_completion(ids) == "<think>1</think>1"
    assert tokenizer.decode_completion([]) == ""


def test_a_prompt_gets_the_beginning_of_text_once(copy):
    """As Llama's tokenizers do it: the token before each sequence, which a rendered chat template has already."""
    content = json.loads((copy / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<think>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<think>": {"id": "<think>", "ids": [1], "tokens": ["<think>"]}},
    }
    (copy / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer(str(copy))
    bare = tokenizer.encode("1+1=")
    assert 1 not in bare
    assert tokenizer.encode_prompt("1+1=") == tokenizer.encode_prompt("<think>1+1=") == [1, *bare]


def test_stop_ids_come_from_where_hugging_face_looks(copy):
    (copy / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert Tokenizer(str(copy)).stop_ids == (2,)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert Tokenizer(str(copy)).stop_ids == (1, 2)


@pytest.mark.parametrize("ids", [[], [0, None], ["2"], 2.0, True, -1, 10**6])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_stop_ids_that_cannot_be_are_one_line(copy, name, ids):
    (copy / name).write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ValueError, match=rf"{name}: eos_token_id") as error:
        Tokenizer(str(copy))
    assert "\n" not in str(error.value)


def test_tokens_beyond_the_model_s_vocabulary_are_named(folder, copy):
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    size, last = len(vocabulary), max(vocabulary, key=vocabulary.get)
    Tokenizer(str(folder)).check_vocabulary(size)
    vocabulary[last] = size + 5  # the largest id is more than there are tokens
    (copy / "tokenizer.json").write_text(json.dumps(content))
    line = rf"tokenizer\.json: token {size + 5} \({re.escape(repr(last))}\) is beyond the model's vocabulary of {size} "
    with pytest.raises(ValueError, match=line) as error:
        Tokenizer(str(copy)).check_vocabulary(size)
    assert "\n" not in str(error.value)
    Tokenizer(str(copy)).check_vocabulary(size + 6)


def test_unusable_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file"):
        Tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer(str(tmp_path))


def test_a_folder_without_an_end_of_sequence_is_refused(folder, tmp_path):
    shutil.copyfile(folder / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="eos_token"):
        Tokenizer(str(tmp_path))


def test_a_vocabulary_without_room_for_the_bytes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="needs 259 tokens"):
        make_tokenizer(corpus=corpus(Config()), path=str(tmp_path), vocabulary=200)
