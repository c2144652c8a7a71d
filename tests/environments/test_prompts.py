"""A row as its prompt: what the config's five fields do to texts and messages, and what is refused in one line."""

import pathlib
import re

import pytest

from scalerl_jax.config import Config
from scalerl_jax.environments.base import Row
from scalerl_jax.environments.chat_template import read_chat_template
from scalerl_jax.environments.prompts import Prompts, Replies
from scalerl_jax.environments.tokenizer import Tokenizer
from tests.support.chat_folders import chat_folder, two_stops

ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
CHAT = ({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}, {"role": "user", "content": "+3?"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    out = {style: chat_folder(tmp_path_factory.mktemp(style), style) for style in ("qwen3", "llama3", "deepseek_r1")}
    out["none"] = chat_folder(tmp_path_factory.mktemp("none"), "llama3")
    pathlib.Path(out["none"].path, "chat_template.jinja").unlink()
    return out


def config_of(*, budget=100, **fields):
    config = Config()
    config.rollout.thinking_budget_min = config.rollout.thinking_budget_max = budget
    for name, value in fields.items():
        setattr(config.environment, name, value)
    return config


def row_of(text="2+2?", **fields):
    return Row(text, name="FILE row 3", **fields)


def rendered(tokenizer, row, **fields):
    return Prompts(config_of(**fields), tokenizer).render(row)


@pytest.mark.parametrize(
    ("how", "row", "asked"),
    [
        ("auto", row_of(), False),
        ("auto", row_of(chat=True), True),
        ("always", row_of(), True),
        ("never", row_of(chat=True), False),
    ],
)
def test_which_texts_the_template_renders(folders, how, row, asked):
    made = rendered(folders["qwen3"], row, chat_template=how)
    assert made.text == (ASKED.format("2+2?") if asked else "2+2?")
    assert made.token_ids.tolist() == folders["qwen3"].encode(made.text)
    assert made.token_ids.dtype == "int32"


def test_messages_are_rendered(folders):
    made = rendered(folders["qwen3"], row_of(messages=CHAT))
    assert made.text == ("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n" + ASKED.format("+3?"))


def test_a_model_without_a_template(folders):
    """Texts that are asked as a user asks stand as they are; messages cannot."""
    made = rendered(folders["none"], row_of(chat=True))
    begin = folders["none"].encode("<|begin_of_text|>")
    assert made.text == "2+2?" and made.token_ids.tolist() == begin + folders["none"].encode("2+2?")
    with pytest.raises(ValueError, match=r"^FILE row 3: the prompt is messages, and .*none\d has no chat template$"):
        rendered(folders["none"], row_of(messages=CHAT))
    with pytest.raises(ValueError, match=r"^config\.environment\.chat_template=always: .*none\d has no chat template$"):
        Prompts(config_of(chat_template="always"), folders["none"])
    with pytest.raises(ValueError, match=r"^config\.environment\.history=template: .*none\d has no chat template$"):
        Prompts(config_of(history="template"), folders["none"])
    with pytest.raises(ValueError, match=r"history=template: none is used with chat_template=never$"):
        Prompts(config_of(history="template", chat_template="never"), folders["qwen3"])


def test_the_beginning_of_text_is_there_once(folders):
    first = folders["llama3"].encode("<|begin_of_text|>")[0]
    for row in (row_of(), row_of(chat=True), row_of("<|begin_of_text|>2+2?")):
        ids = rendered(folders["llama3"], row).token_ids.tolist()
        assert ids[0] == first and ids.count(first) == 1


def test_system_prompt_and_suffix(folders):
    fields = {"system_prompt": "Be brief.", "prompt_suffix": "\nThink."}
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert rendered(folders["qwen3"], row_of(), **fields).text == "Be brief.\n\n2+2?\nThink."
    assert rendered(folders["qwen3"], row_of(chat=True), **fields).text == system + ASKED.format("2+2?\nThink.")
    chat = rendered(folders["qwen3"], row_of(messages=CHAT), **fields).text
    assert chat.startswith(system) and chat.endswith(ASKED.format("+3?\nThink."))
    assert chat.count("Think.") == 1
    assert CHAT[-1]["content"] == "+3?"  # the row's own are as they were


def test_a_system_message_that_is_there_is_replaced_and_that_is_said(folders):
    own = ({"role": "system", "content": "Be long."}, *CHAT)
    prompts = Prompts(config_of(system_prompt="Be brief."), folders["qwen3"])
    assert "long" not in prompts.render(row_of(messages=own)).text
    assert "config.environment.system_prompt replaces the system message of 1 prompts" in prompts.notes
    assert "Be long." in rendered(folders["qwen3"], row_of(messages=own)).text


@pytest.mark.parametrize(
    ("messages", "fields", "expected"),
    [
        (CHAT[:2], {}, "the messages end with the assistant's, which is no prompt"),
        (({"role": "user"},), {}, "a message is not of the form"),
        (({"role": "user", "content": ["a"]},), {}, "a message is not of the form"),
        (
            ({"role": "system", "content": "a"},),
            {"prompt_suffix": "b"},
            "config.environment.prompt_suffix has no place",
        ),
        (CHAT, {"chat_template": "never"}, "the prompt is messages, and config.environment.chat_template=never"),
        (({"role": "user", "content": "\ud800"},), {}, ""),
    ],
)
def test_a_row_that_cannot_be_rendered_is_named(folders, messages, fields, expected):
    with pytest.raises(ValueError, match=rf"^FILE row 3: {re.escape(expected)}.*$"):
        rendered(folders["qwen3"], row_of(messages=messages), **fields)


def test_a_message_that_the_template_leaves_out_is_refused(folders):
    system, tool = {"role": "system", "content": "Add."}, {"role": "tool", "content": "4"}
    for style, messages in (("qwen3", [system, CHAT[0], tool]), ("deepseek_r1", [CHAT[0], system])):
        assert "Add." in rendered(folders[style], row_of(messages=messages)).text
    for style, role in (("qwen3", "developer"), ("deepseek_r1", "tool")):
        said = rf"^FILE row 3: .*jinja: the chat template does not write a {role} message$"
        with pytest.raises(ValueError, match=said):
            rendered(folders[style], row_of(messages=[{"role": role, "content": "?"}, CHAT[0]]))


def test_what_the_template_raises_names_file_and_row(folders):
    messages = ({"role": "user", "content": "a"}, {"role": "system", "content": "b"})
    with pytest.raises(
        ValueError, match=r"^FILE row 3: .*llama3\d/chat_template\.jinja: .*Only user and assistant roles"
    ):
        rendered(folders["llama3"], row_of(messages=messages))


# ---- Thinking ------------------------------------------------------------------------------------------------------


def test_a_prompt_that_closes_thinking_needs_a_budget_of_zero(folders):
    closed = {"template_arguments": {"enable_thinking": False}}
    expected = (
        r"^FILE row 3: config\.environment\.template_arguments=\{'enable_thinking': False\}: the prompt ends in "
        r"</think>.*config\.rollout\.thinking_budget_max=100: set thinking_budget_min and thinking_budget_max to 0.*$"
    )
    with pytest.raises(ValueError, match=expected):
        rendered(folders["qwen3"], row_of(chat=True), **closed)
    made = rendered(folders["qwen3"], row_of(chat=True), budget=0, **closed)
    assert made.text == ASKED.format("2+2?") + "<think>\n\n</think>\n\n"
    rendered(folders["qwen3"], row_of("Think within <think></think>, then answer: 2+2?", chat=True))


def test_a_prompt_that_opens_thinking_is_said(folders):
    for budget, more in ((100, ""), (0, "; without a thinking budget it is part of config.rollout.answer_budget")):
        prompts = Prompts(config_of(budget=budget), folders["deepseek_r1"])
        assert prompts.render(row_of(chat=True)).text.endswith("<｜Assistant｜><think>\n")
        assert f"1 prompts open thinking, which their completions end{more}" in prompts.notes


# ---- What is said --------------------------------------------------------------------------------------------------


def said_of(tokenizer, *rows, **fields):
    prompts = Prompts(config_of(**fields), tokenizer)
    for row in rows:
        prompts.render(row)
    return prompts.notes


def test_how_prompts_are_rendered_is_said(folders):
    assert said_of(folders["none"], row_of(), row_of(chat=True)) == []
    (stand,) = said_of(folders["qwen3"], row_of())
    assert stand.startswith("1 prompts stand as they are") and stand.endswith("config.environment.chat_template=auto")
    arguments = {"enable_thinking": True}
    (line,) = said_of(folders["qwen3"], row_of(chat=True), row_of(chat=True), template_arguments=arguments)
    assert re.fullmatch(r"2 prompts are .* template in .*/chat_template\.jinja with enable_thinking=True", line)
    dated = said_of(folders["llama3"], row_of(chat=True))
    assert dated[1].startswith("the chat template writes today's date into them")
    assert len(said_of(folders["llama3"], row_of(chat=True), template_arguments={"date_string": "1 Jan 2030"})) == 1


def test_a_template_whose_end_of_turn_stops_nothing_is_said(tmp_path):
    tokenizer = two_stops(tmp_path, "qwen3")
    assert len(said_of(tokenizer, row_of(chat=True))) == 1
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {tokenizer.eos_id}}}', encoding="utf-8")
    base = Tokenizer(tokenizer.path)
    (_, line) = said_of(base, row_of(chat=True))
    assert "ends the assistant's turns with '<|im_end|>'" in line and "generation_config.json" in line
    assert len(said_of(base, row_of())) == 1  # prompts that stand as they are: nothing of the template counts
    # A template that renders prompts alone has no such end.
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}:", encoding="utf-8")
    assert len(said_of(base, row_of(chat=True))) == 1


def test_many_rows_at_once_are_the_same_as_each_by_itself(folders):
    rows = [
        Row(f"{n}+{n}?" * (n % 7), name=f"row {n}", chat=n % 2 == 0, messages=CHAT if n % 5 == 0 else ())
        for n in range(2300)
    ]
    for tokenizer in (folders["qwen3"], folders["llama3"]):
        together = list(Prompts(config_of(), tokenizer).render_all(iter(rows)))
        assert len(together) == len(rows)
        for row, made in zip(
            rows[:40] + rows[990:1010] + rows[-20:], together[:40] + together[990:1010] + together[-20:]
        ):
            asked = row.chat or row.messages
            alone = tokenizer.encode(made.text) if asked else tokenizer.encode_prompt(row.text)
            assert made.token_ids.tolist() == alone and made.name == row.name
            assert made.text == rendered(tokenizer, row).text


def test_a_text_that_is_none_is_named_among_others(folders):
    rows = [Row("1?", name="row 1"), Row("\ud83d", name="row 2"), Row("3?", name="row 3")]
    with pytest.raises(ValueError, match=r"^row 2: "):
        list(Prompts(config_of(), folders["none"]).render_all(rows))


@pytest.mark.parametrize("style", ["qwen2_5", "qwen3", "llama3"])
def test_a_reply_goes_on_behind_the_token_that_ended_the_turn(tmp_path, style):
    """A chat of two turns is its prompt, its first turn with its end, and the reply; a whole one may be cut into other
    tokens where they meet."""
    tokenizer = chat_folder(tmp_path, style)
    config = Config()
    config.environment.chat_template = "always"
    (row,) = Prompts(config, tokenizer).render_all([Row("2+2?")])
    assert row.rendered
    turn = [*tokenizer.encode("The answer is 4."), tokenizer.eos_id]
    text, reply = Replies(config, tokenizer).encode(row, [{"role": "user", "content": "3+3?"}], behind=turn[-1])
    template = read_chat_template(tokenizer.path)
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "The answer is 4."}]
    whole = template.render([*chat, {"role": "user", "content": "3+3?"}])
    assert tokenizer.decode([*row.token_ids, *turn, *reply.token_ids]) == whole and not reply.new_branch
    assert "3+3?" in text


def test_a_reply_that_the_template_leaves_out_is_refused(tmp_path):
    tokenizer = chat_folder(tmp_path, "deepseek_r1")
    config = Config()
    config.environment.chat_template = "always"
    row = Prompts(config, tokenizer).render(Row("2+2?"))
    replies, tool = Replies(config, tokenizer), {"role": "tool", "content": "4"}
    said = [{"role": "assistant", "content": "?"}, tool]
    for encode in (
        lambda: replies.encode(row, [tool], behind=tokenizer.eos_id),
        lambda: replies.render_again(row, said, path=row.token_ids.tolist()),
    ):
        with pytest.raises(ValueError, match=r"does not write a tool message behind an answer$"):
            encode()


def test_a_reply_to_a_text_is_a_text(tmp_path):
    tokenizer = chat_folder(tmp_path, "qwen3")
    config = Config()
    config.environment.chat_template = "never"
    (row,) = Prompts(config, tokenizer).render_all([Row("2+2=")])
    messages = [{"role": "user", "content": " 4, "}, {"role": "tool", "content": "3+3="}]
    assert not row.rendered
    text, reply = Replies(config, tokenizer).encode(row, messages[:1], behind=0)
    assert (text, reply.token_ids.tolist()) == (" 4, ", tokenizer.encode(" 4, "))
    with pytest.raises(ValueError, match="a reply of the environment is empty"):
        Replies(config, tokenizer).encode(row, [{"role": "user", "content": ""}], behind=0)
