"""What of a chat is trained on: the assistant's turns as the policy would write them, and nothing else."""

import pytest

from scalerl_jax.config import Config
from scalerl_jax.environments.prompts import Prompts
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.traces.conversations import Conversations, continued, read_messages
from scalerl_jax.traces.example import join
from tests.support.chat_folders import chat_folder, two_stops

STYLES = ("qwen2_5", "qwen3", "llama3", "deepseek_r1", "marked")
QUESTION = {"role": "user", "content": "2+2?"}
THOUGHT = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\n4"}
PLAIN = {"role": "assistant", "content": "4"}
MORE, SEVEN = {"role": "user", "content": "+3?"}, {"role": "assistant", "content": "7"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {style: chat_folder(tmp_path_factory.mktemp(style), style) for style in STYLES}


def config_of(*, budget=100, **fields):
    config = Config()
    config.rollout.thinking_budget_min = config.rollout.thinking_budget_max = budget
    config.environment.template_arguments = {}
    for name, value in fields.items():
        setattr(config.environment, name, value)
    return config


def trained_of(tokenizer, messages, **fields):
    """(the whole text, the texts that are trained on, lines said)."""
    conversations = Conversations(config_of(**fields), tokenizer)
    example = example_of(conversations.turns(messages), tokenizer)
    turns, last = [], False
    for token, trained in zip(example.tokens.tolist(), example.trained.tolist(), strict=True):
        if trained and not last:
            turns.append([])
        if trained:
            turns[-1].append(token)
        last = trained
    return tokenizer.decode(example.tokens.tolist()), [tokenizer.decode(turn) for turn in turns], conversations.notes


def example_of(trace, tokenizer):
    ids = tokenizer.encode_all([piece.text for piece in trace.pieces])
    return join(trace.prompt, ids, [piece.trained for piece in trace.pieces], tokenizer)


LLAMA = {"template_arguments": {"date_string": "26 Jul 2024"}}


@pytest.mark.parametrize(
    ("style", "messages", "turns"),
    [
        ("qwen2_5", [QUESTION, PLAIN, MORE, SEVEN], ["4<|im_end|>", "7<|im_end|>"]),
        ("marked", [QUESTION, PLAIN, MORE, SEVEN], ["4<|im_end|>", "7<|im_end|>"]),
        ("llama3", [QUESTION, PLAIN, MORE, SEVEN], ["4<|eot_id|>", "7<|eot_id|>"]),
        ("qwen3", [QUESTION, THOUGHT], ["<think>\nTwo and two.\n</think>\n\n4<|im_end|>"]),
        ("qwen2_5", [QUESTION, PLAIN, MORE], ["4<|im_end|>"]),  # the question that nobody answers is left out
    ],
)
def test_the_turns_of_the_assistant_are_trained_on(folders, style, messages, turns):
    fields = LLAMA if style == "llama3" else {}
    tokenizer = folders[style]
    text, trained, _ = trained_of(tokenizer, messages, **fields)
    assert trained == turns
    # The whole is what the template writes of the chat, up to the last stop token.
    answered = messages if messages[-1]["role"] == "assistant" else messages[:-1]
    config = config_of(**fields)
    whole = Prompts(config, tokenizer).template().render(answered, generation_prompt=False)
    assert text == whole.rstrip("\n")


def test_the_prompt_is_that_of_a_rollout(folders):
    """What stands before the last turn is, token for token, what a rollout of these messages is asked."""
    fields = {"system_prompt": "Be brief.", "prompt_suffix": "\nThink."}
    for style in STYLES:
        tokenizer, config = folders[style], config_of(**fields, **(LLAMA if style == "llama3" else {}))
        trace = Conversations(config, tokenizer).turns([QUESTION, PLAIN, MORE, THOUGHT])
        asked = (
            Prompts(config, tokenizer).template().render(Prompts(config, tokenizer).complete([QUESTION, PLAIN, MORE]))
        )
        tokens = example_of(trace, tokenizer).tokens.tolist()
        assert tokens[: len(tokenizer.encode(asked))] == tokenizer.encode(asked)
        assert "Be brief." in asked and asked.count("Think.") == 1


def test_turns_that_the_template_writes_otherwise_later_are_context(folders):
    """Qwen3's drops the thinking of all turns but the last."""
    text, trained, said = trained_of(folders["qwen3"], [QUESTION, THOUGHT, MORE, THOUGHT])
    assert trained == ["<think>\nTwo and two.\n</think>\n\n4<|im_end|>"]
    assert text.count("Two and two.") == 1
    assert [line for line in said if line.startswith("1 of 2 turns of the assistant are context only")]


def test_a_thought_of_its_own_is_written_before_the_answer(folders):
    message = {"role": "assistant", "content": "4", "reasoning_content": "Two and two."}
    assert trained_of(folders["qwen3"], [QUESTION, message])[1] == ["<think>\nTwo and two.\n</think>\n\n4<|im_end|>"]
    # This template does not know of it.
    _, trained, said = trained_of(folders["qwen2_5"], [QUESTION, message])
    assert trained == ["<think>\nTwo and two.\n</think>\n\n4<|im_end|>"]
    assert [line for line in said if line.startswith("1 turns stand behind the generation prompt")]


def test_earlier_turns_count_where_the_last_stands_behind_the_generation_prompt(folders):
    message = {"role": "assistant", "content": "7", "reasoning_content": "Four and three."}
    _, trained, _ = trained_of(folders["qwen2_5"], [QUESTION, PLAIN, MORE, message])
    assert trained == ["4<|im_end|>", "<think>\nFour and three.\n</think>\n\n7<|im_end|>"]
    _, trained, _ = trained_of(folders["deepseek_r1"], [QUESTION, PLAIN, MORE, THOUGHT])
    assert trained == ["Two and two.\n</think>\n\n4<｜end▁of▁sentence｜>"]


def test_a_template_that_drops_the_thinking_keeps_it_here(folders):
    """DeepSeek-R1's: the generation prompt has opened it, and the turn goes on from there."""
    text, trained, said = trained_of(folders["deepseek_r1"], [QUESTION, THOUGHT])
    assert text == (
        "<｜begin▁of▁sentence｜><｜User｜>2+2?<｜Assistant｜><think>\nTwo and two.\n</think>\n\n4<｜end▁of▁sentence｜>"
    )
    assert trained == ["Two and two.\n</think>\n\n4<｜end▁of▁sentence｜>"]
    assert [line for line in said if line.startswith("1 turns stand behind the generation prompt")]
    assert "1 prompts open thinking, which their completions end" in said


def test_without_thinking(folders):
    closed = {"budget": 0, "template_arguments": {"enable_thinking": False}}
    text, trained, _ = trained_of(folders["qwen3"], [QUESTION, PLAIN], **closed)
    assert trained == ["4<|im_end|>"]
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n4<|im_end|>")
    with pytest.raises(ValueError, match="the prompt ends in </think>, and the completion thinks all the same"):
        trained_of(folders["qwen3"], [QUESTION, THOUGHT], **closed)
    with pytest.raises(ValueError, match=r"thinking_budget_max=100: set thinking_budget_min"):
        trained_of(folders["qwen3"], [QUESTION, PLAIN], template_arguments={"enable_thinking": False})


@pytest.mark.parametrize(
    ("prompt", "completion", "rest"),
    [
        ("2+2=", "<think>a</think>4", "<think>a</think>4"),
        ("<think>", "<think>a</think>4", "a</think>4"),
        ("<think>\n", "\n<think>\na</think>4", "a</think>4"),
        ("<think>\n", "a</think>4", "a</think>4"),
        ("<think>\n\n</think>\n\n", "4", "4"),
    ],
)
def test_a_completion_goes_on_from_its_prompt(prompt, completion, rest):
    assert continued(prompt, completion, "</think>") == rest


def test_two_texts(folders):
    """The prompt as a rollout has it; a completion of its own ends with one stop token."""
    conversations = Conversations(config_of(chat_template="always"), folders["deepseek_r1"])
    for completion in ("<think>\na</think>4", "<think>\na</think>4<｜end▁of▁sentence｜>"):
        trace = conversations.answered("2+2?", completion)
        text = folders["deepseek_r1"].decode(example_of(trace, folders["deepseek_r1"]).tokens.tolist())
        assert text == "<｜begin▁of▁sentence｜><｜User｜>2+2?<｜Assistant｜><think>\na</think>4<｜end▁of▁sentence｜>"


@pytest.mark.parametrize(
    ("style", "completion"),
    [
        *((style, "<think>\nTwo.\n</think>\n\n4") for style in STYLES),
        *((style, "4") for style in STYLES if style != "deepseek_r1"),  # its prompt opens thinking
    ],
)
def test_two_texts_are_a_chat_s_question_and_answer(tmp_path, style, completion):
    """Where the template asks: they end as it ends a turn, which need not be the first of the stop tokens."""
    tokenizer = two_stops(tmp_path, style)
    end = tokenizer.decode([tokenizer.stop_ids[1]])
    conversations = Conversations(config_of(chat_template="always", prompt_suffix="!"), tokenizer)
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": completion}]
    expected = example_of(conversations.turns(chat), tokenizer)
    assert expected.tokens[-1] == tokenizer.stop_ids[1] and expected.trained[-1]
    for given in (completion, completion + end):
        found = example_of(conversations.answered("2+2?", given), tokenizer)
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.trained.tolist() == expected.trained.tolist()
    never = Conversations(config_of(chat_template="never"), tokenizer).answered("2+2?", completion)
    assert example_of(never, tokenizer).tokens[-1] == tokenizer.stop_ids[0]


def test_a_template_that_marks_what_is_said_without_its_end(tmp_path):
    tokenizer, template = two_stops(tmp_path, "marked"), tmp_path / "chat_template.jinja"
    example = example_of(Conversations(config_of(), tokenizer).turns([QUESTION, PLAIN]), tokenizer)
    jinja = template.read_text(encoding="utf-8")
    narrow = jinja.replace("+ '<|im_end|>' }}\n        {%- endgen", "}}\n        {%- endgen")
    narrow = narrow.replace("endgeneration %}", "endgeneration %}{{- '<|im_end|>' }}")
    assert narrow != jinja
    template.write_text(narrow, encoding="utf-8")
    again = example_of(Conversations(config_of(), tokenizer).turns([QUESTION, PLAIN]), tokenizer)
    assert tokenizer.decode(again.tokens.tolist()) == tokenizer.decode(example.tokens.tolist())
    assert again.trained.tolist() == example.trained.tolist()


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([QUESTION], "none of the messages is an answer of the assistant"),
        ([PLAIN], "none of the messages is an answer of the assistant"),
        ([QUESTION, {**PLAIN, "content": " \n"}], "the assistant's last message is empty"),
        ([QUESTION, PLAIN, SEVEN], "the messages end with the assistant's, which is no prompt"),
    ],
)
def test_a_chat_without_a_turn_to_learn(folders, messages, said):
    with pytest.raises(ValueError, match=said):
        trained_of(folders["qwen2_5"], messages)


def test_a_message_that_the_template_leaves_out_is_refused(folders):
    said = ("human", "2+2?"), ("function_call", "add(2, 2)"), ("observation", "four"), ("gpt", "4")
    chat = read_messages([{"from": role, "value": text} for role, text in said])
    with pytest.raises(ValueError, match=r"qwen3.*jinja: the chat template does not write a function_call message$"):
        trained_of(folders["qwen3"], chat)
    assert "four" in trained_of(folders["marked"], chat)[0]
    system = {"role": "system", "content": "Be brief."}
    for before in ([system], [{**system, "content": ""}], [QUESTION, PLAIN, system]):
        assert trained_of(folders["qwen3"], [*before, MORE, SEVEN])[1]


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}])
@pytest.mark.parametrize("style", ["qwen2_5", "marked"])
def test_turns_of_weight_0_are_context(folders, style, mark):
    learnt = {"weight": 1}
    for first, last, expected in ((mark, learnt, "7<|im_end|>"), (learnt, mark, "4<|im_end|>")):
        chat = read_messages([QUESTION, {**PLAIN, **first}, MORE, {**SEVEN, **last}])
        text, trained, _ = trained_of(folders[style], chat)
        assert trained == [expected] and text.endswith(expected)  # what follows the last one is left out
    chat = read_messages([QUESTION, {**PLAIN, **mark}, MORE, {**SEVEN, **mark}])
    with pytest.raises(ValueError, match=r"^each answer of the assistant has weight 0$"):
        trained_of(folders[style], chat)


def test_the_turn_of_weight_0_among_thoughts(folders):
    """Qwen3's template drops the thinking of a turn once the chat goes on: the last that counts is written as last."""
    text, trained, _ = trained_of(folders["qwen3"], [QUESTION, THOUGHT, MORE, {**THOUGHT, "weight": 0}])
    assert trained == ["<think>\nTwo and two.\n</think>\n\n4<|im_end|>"] and "+3?" not in text


@pytest.mark.parametrize("completion", ["4", "<think>\n4"])
def test_traces_that_never_end_the_thinking_that_their_prompt_opens(folders, completion):
    said = r"^the prompt has opened thinking \(<think>\), and the completion has no </think>: it would teach never"
    conversations = Conversations(config_of(chat_template="always"), folders["deepseek_r1"])
    with pytest.raises(ValueError, match=said):
        conversations.answered("2+2?", completion)
    with pytest.raises(ValueError, match=said):
        conversations.turns([QUESTION, {**PLAIN, "content": completion}])
    with pytest.raises(ValueError, match=said):
        continued("2+2? <think>", completion, "</think>")
    folder = folders["qwen2_5"]
    assert Conversations(config_of(), folder).turns([QUESTION, {**PLAIN, "content": completion}]).pieces


def test_an_end_of_turn_that_stops_nothing_is_said(tmp_path):
    """As of base models: the first of these folders stops at <|endoftext|> alone."""
    tokenizer = two_stops(tmp_path, "qwen2_5")
    said = trained_of(tokenizer, [QUESTION, PLAIN])[2]
    assert not [line for line in said if "no completion stops" in line]
    first, second = tokenizer.stop_ids
    stops = tmp_path / "generation_config.json"
    stops.write_text(f'{{"eos_token_id": {first}}}', encoding="utf-8")
    (line,) = [
        line
        for line in trained_of(Tokenizer(str(tmp_path)), [QUESTION, PLAIN])[2]
        if line.startswith("the chat template in")
    ]
    assert f"ends the assistant's turns with '<|im_end|>' ({second}), at which no completion stops" in line
    assert line.endswith(f'"eos_token_id": [{first}, {second}] in {stops} would stop there, too')


def test_how_data_sets_write_messages():
    ours = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    assert read_messages(ours) == ours
    assert read_messages([{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]) == ours
    parts = [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}, ours[1]]
    assert read_messages(parts) == ours
    # Of a table, a column that only some messages have.
    assert read_messages([{**ours[0], "reasoning_content": None}, ours[1]]) == ours


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("a", "is no list of messages"),
        ([], "is no list of messages"),
        (["a"], "message 1 is not an object"),
        (
            [QUESTION, {"role": "assistant", "text": "4"}],
            r"message 2 has no text as its role and its content \(role, text\)",
        ),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 1 has no text"),
        ([{"from": "human"}], "message 1 has no text"),
        ([QUESTION, {**PLAIN, "weight": 0.5}], r"message 2 has weight=0\.5: only 0 and 1"),
        ([QUESTION, {**PLAIN, "train": "no"}], r"message 2 has train='no': only 0 and 1"),
    ],
)
def test_what_is_no_chat(cell, said):
    with pytest.raises(ValueError, match=said):
        read_messages(cell)
