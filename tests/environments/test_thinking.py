"""The thinking trace is found whether the prompt or the completion opened it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.environments.tokenizer import opening, split_thinking, thinking_at_end

END = "</think>"
TEXT = st.lists(st.sampled_from(["<think>", "</think>", " ", "\n", "a", "7", "</thin"]), max_size=8).map("".join)


@pytest.mark.parametrize(
    ("prompt", "at_end"),
    [
        ("2+2=", "none"),
        ("", "none"),
        ("<|im_start|>assistant\n<think>\n", "opened"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "closed"),
        ("Think within <think> and </think>, then answer.\n2+2=", "none"),
        ("<think>Let me see", "none"),
    ],
)
def test_what_a_prompt_ends_in(prompt, at_end):
    assert thinking_at_end(prompt, END) == at_end


def test_other_markers():
    assert opening("[/THINK]") == "[THINK]"
    assert thinking_at_end("[INST]2+2[/INST][THINK]", "[/THINK]") == "opened"
    assert thinking_at_end("[INST]2+2[/INST][THINK]\n[/THINK] ", "[/THINK]") == "closed"
    assert opening("END OF THOUGHT") == "<think>"
    assert thinking_at_end("<think>", "") == "none"


@pytest.mark.parametrize(
    ("text", "opened", "thinking", "answer"),
    [
        ("<think>a</think>b", False, "a", "b"),
        ("<think>\na\n</think>\n\nb\n", False, "a", "b"),
        ("a</think>b", True, "a", "b"),
        ("a</think>b", False, "a", "b"),  # the policy forgot to open it
        ("<think>a</think>b", True, "<think>a", "b"),  # it opened it once more: part of what it thought
        ("<think>a</think>b</think>c", False, "a</think>b", "c"),
        ("<think>a</think> \n", False, "a", None),
        ("<think>a", False, "a", None),
        ("a", True, "a", None),
        ("", False, "", None),
    ],
)
def test_the_two_parts_of_a_completion(text, opened, thinking, answer):
    assert split_thinking(text, END, opened=opened) == (thinking, answer)


def test_a_completion_that_does_not_think_is_all_answer():
    assert split_thinking(" <think>a</think>b ", "") == ("", "<think>a</think>b")
    assert split_thinking(" \n", "") == ("", None)


@given(text=TEXT, end=st.sampled_from([END, ""]), opened=st.booleans())
def test_the_answer_is_what_follows_the_last_end(text, end, opened):
    """Whatever the thinking was, and whoever opened it; nothing of the text but markers and space is lost."""
    thinking, answer = split_thinking(text, end, opened=opened)
    after = text.split(end)[-1].strip() if end and end in text else "" if end else text.strip()
    assert answer == (after or None)
    kept = "".join((thinking + (END if end and end in text else "") + (answer or "")).split())
    assert "".join(text.split()) in (kept, "<think>" + kept)
