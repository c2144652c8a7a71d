"""What peers say, in logs and in the details of errors: one line, printable, bounded."""

import pytest

from scalerl_jax.contract import peer_text


@pytest.mark.parametrize("text", ["", "plain", "Grüße, 你好", r"back\slash", 'a "quote"'])
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert peer_text.printable(text) == peer_text.details(text) == text


@pytest.mark.parametrize("hidden", ["\n", "\r", "\x1b[2K", "\x00", "\u2028", "\u202e", "\x85", "\ud800", "\x7f"])
def test_nothing_begins_another_line_or_moves_the_cursor(hidden: str) -> None:
    for function in (peer_text.printable, peer_text.details):
        line = function(f"all is well{hidden}INFO: forged")
        assert line.isprintable() and len(line.splitlines()) == 1
        assert line.startswith("all is well\\") and line.endswith("INFO: forged")


@pytest.mark.parametrize("character", ["x", "\n", "é", "\U0001f600", "\x00"])
def test_long_text_is_cut_and_its_length_told(character: str) -> None:
    text = character * 1_000_000
    assert len(peer_text.printable(text)) <= peer_text.LONGEST + 40
    assert "(1000000 characters)" in peer_text.printable(text)
    assert len(peer_text.details(text).encode()) <= peer_text.DETAIL_BYTES


def test_other_things_than_text_are_taken_too() -> None:
    assert peer_text.printable(ValueError("two\nlines")) == "two\\nlines"
