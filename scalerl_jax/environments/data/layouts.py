"""Layouts of published data sets, selected by name: config.environment.train=gsm8k, or gsm8k:FILE for a copy.

Each is a row of LAYOUTS: its repository on the hub, and its columns for the prompt, the answer and the task. The
columns come from the data sets' cards, or from the code that made them if there is no card. Prompts are user messages,
rendered by the model's chat template if it has one; set an instruction on the answer's form ("put it in \\boxed{}")
with config.environment.prompt_suffix.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from scalerl_jax.environments.base import Row
from scalerl_jax.environments.data import columns as columns_lib
from scalerl_jax.environments.data.columns import MISSING, Malformed, find


@dataclasses.dataclass(frozen=True)
class DatasetLayout:
    """How to make problems from a data set's rows. Columns are named as in the config: "a.b" is b inside a."""

    hub: str  # repository
    prompt: str  # column of a text or messages
    answers: tuple[str, ...] = ("answer",)  # columns; the first that a row has is used; (): no answers
    kind: str = "math"  # the environment that reads it
    task: str = ""  # column
    task_text: str = "{}"  # format of the task's value
    starter: str = ""  # column of code that the program must continue
    tests: str = ""  # column of unit tests; "": the columns that code_tests.py knows
    only: tuple[str, tuple[str, ...]] = ("", ())  # (column, allowed values in lower case): other rows are left out
    ask: Callable[[str, Mapping[str, Any]], str] | None = None  # (prompt, row) -> the final prompt
    read_answer: Callable[[Any, str], str] = columns_lib.read_answer  # (value, column) -> answer; raises Malformed
    configs: tuple[str, ...] = ("",)  # configs on the hub; the rows of all are used
    held_out_configs: tuple[str, ...] = ()  # configs with the validation split; (): `configs`
    train: str = "train"  # split
    held_out: str = "test"  # split, for validation
    # If the hub loads the data set with a program: maps the name after @ to the files (or a pattern) to read directly.
    files: Callable[[str], tuple[str, ...]] | None = None  # raises ValueError
    marks: tuple[str, ...] = ()  # columns by which hints recognize rows of this layout
    note: str = ""  # a hint for people if some rows are known to be incomplete


def after_hashes(value: Any, column: str) -> str:
    """GSM8K: the number after the last ####, without thousands separators."""
    _, found, answer = columns_lib.read_answer(value, column).rpartition("####")
    if not found or not answer.strip():
        raise Malformed(f"{column!r} has nothing behind ####")
    return answer.strip().replace(",", "")


def first_of_list(value: Any, column: str) -> str:
    """Skywork-OR1: the first entry of a JSON list of forms of the answer."""
    found = columns_lib.written_out(value) if isinstance(value, str) else value
    return columns_lib.read_answer(found[0] if isinstance(found, list) and found else found, column)


def last_boxed(value: Any, column: str) -> str:
    """The content of the last \\boxed{} of a solution."""
    text = columns_lib.read_text(value, column)
    start = text.rfind("\\boxed{")
    depth = 0
    for end in range(start + len("\\boxed{") - 1, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return columns_lib.read_answer(text[start + len("\\boxed{") : end].strip(), "what is in \\boxed{}")
    raise Malformed(f"{column!r} has nothing in \\boxed{{}}")


def stub(prompt: str, _: Mapping[str, Any]) -> str:
    """HumanEval: asks to complete a function with the given signature and docstring."""
    return f"Write this function, with what it needs:\n\n```python\n{prompt.strip()}\n```"


def first_test(prompt: str, columns: Mapping[str, Any]) -> str:
    """MBPP: only the tests show the function's name and arguments, so the prompt includes the first test."""
    tests = columns.get("test_list")
    tests = columns_lib.written_out(tests) if isinstance(tests, str) else tests
    shown = f"\n\nIt should pass this test:\n\n```python\n{tests[0]}\n```" if isinstance(tests, list) and tests else ""
    return prompt.rstrip() + shown


def declared(prompt: str, columns: Mapping[str, Any]) -> str:
    """KodCode: adds the declaration of the function that the tests call."""
    declaration = find(columns, "test_info.0.function_declaration")
    if not isinstance(declaration, str) or not declaration.strip():
        return prompt
    return f"{prompt.rstrip()}\n\nDeclare the function like this:\n\n```python\n{declaration.strip()}\n```"


def released(release: str) -> tuple[str, ...]:
    """LiveCodeBench: each release adds one file to those of the previous release; the default is the latest."""
    if not release:
        return ("test*.jsonl",)
    found = re.fullmatch("release_v([1-9])", release)
    if found is None:
        raise ValueError(f"@{release} is not one of its releases, @release_v1, @release_v2, ...")
    return ("test.jsonl", *(f"test{n}.jsonl" for n in range(2, int(found[1]) + 1)))


# Code is scored by tests: its rows have no answers.
_code = functools.partial(DatasetLayout, answers=(), kind="code")

LAYOUTS = {
    # {"problem", "answer", "difficulty"}, difficulty is "3/8" for 3 of 8 correct; huggingface.co card of the data set.
    "polaris": DatasetLayout(
        "POLARIS-Project/Polaris-Dataset-53K", "problem", held_out="train", marks=("problem", "answer", "difficulty")
    ),
    # {"problem", "answer", "solution"}: the card. Six rows have no answer, according to a discussion on the hub.
    "deepscaler": DatasetLayout(
        "agentica-org/DeepScaleR-Preview-Dataset",
        "problem",
        held_out="train",
        marks=("problem", "answer", "solution"),
        note="a few rows have no answer: config.environment.max_malformed_rows=10",
    ),
    # {"prompt": [{"role", "content"}], "reward_model": {"ground_truth", "style"}, "data_source", "ability",
    # "extra_info": {"index"}}: the Parquet's schema, as the cards of its copies show it. Each of its 17 thousand
    # prompts occurs a hundred times. Open-R1's processed form has the prompt as a text, the answer as `solution`.
    "dapo": DatasetLayout(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        "prompt",
        answers=("reward_model.ground_truth", "solution"),
        held_out="train",
        marks=("prompt", "reward_model.ground_truth"),
    ),
    # {"prompt": messages, "reward_model": {"ground_truth", "style"}, "ability", "data_source", "extra_info"}: verl's
    # training format, according to its documentation and the card of Eurus-2.
    "verl": DatasetLayout(
        "PRIME-RL/Eurus-2-RL-Data",
        "prompt",
        answers=("reward_model.ground_truth",),
        only=("ability", ("math",)),
        held_out="validation",
    ),
    "verl_code": _code(
        "PRIME-RL/Eurus-2-RL-Data",
        "prompt",
        tests="reward_model.ground_truth",
        only=("ability", ("code", "coding")),
        held_out="validation",
        marks=("prompt", "reward_model.ground_truth"),
    ),
    # The same columns; for mathematics the ground truth is a JSON list, for code one of three kinds of tests: the card,
    # and the scoring code in the data set's own repository.
    "skywork": DatasetLayout(
        "Skywork/Skywork-OR1-RL-Data",
        "prompt",
        answers=("reward_model.ground_truth",),
        read_answer=first_of_list,
        train="math",
        held_out="math",
    ),
    "skywork_code": _code(
        "Skywork/Skywork-OR1-RL-Data",
        "prompt",
        tests="reward_model.ground_truth",
        train="code",
        held_out="code",
    ),
    # {"prompt", "task_type", "verification_info": JSON, "metadata", "problem_id"}: the cards.
    **{
        f"{name}{suffix}": DatasetLayout(
            hub,
            "prompt",
            answers=answers,
            kind=kind,
            tests="verification_info.test_cases" if kind == "code" else "",
            only=("task_type", (f"verifiable_{kind}",)),
            held_out="train",
            marks=("prompt", "task_type", "verification_info") if name == "synthetic1" else (),
        )
        for name, hub in (
            ("intellect2", "PrimeIntellect/INTELLECT-2-RL-Dataset"),
            ("synthetic1", "PrimeIntellect/SYNTHETIC-1"),
        )
        for suffix, kind, answers in (("", "math", ("verification_info.ground_truth",)), ("_code", "code", ()))
    },
    # [{"from": "human", "value"}, {"from": "assistant", "ground_truth": {"value"}}]: the files of its repository.
    "orz": DatasetLayout(
        "Open-Reasoner-Zero/orz_math_57k_collection",
        "0.value",
        answers=("1.ground_truth.value",),
        held_out="train",
        marks=("0.value", "1.ground_truth.value"),
    ),
    # {"problem", "ground_truth_solution", "domain", "test_cases", "starter_code", ...} in its config "metadata": the
    # card. Its other config has traces, which scalerl-sft reads (config.sft.columns.messages=conversations).
    "openthoughts": DatasetLayout(
        "open-thoughts/OpenThoughts-114k",
        "problem",
        answers=("ground_truth_solution",),
        read_answer=last_boxed,
        configs=("metadata",),
        only=("domain", ("math",)),
        held_out="train",
        marks=("problem", "ground_truth_solution", "domain"),
        note="solutions without \\boxed{} have no answer: config.environment.max_malformed_rows=N leaves such rows out",
    ),
    "openthoughts_code": _code(
        "open-thoughts/OpenThoughts-114k",
        "problem",
        tests="test_cases",
        starter="starter_code",
        configs=("metadata",),
        only=("domain", ("code",)),
        held_out="train",
        marks=("problem", "test_cases", "domain"),
    ),
    # {"task_id", "prompt", "canonical_solution", "test", "entry_point"}: the card.
    "humaneval": _code(
        "openai/openai_humaneval",
        "prompt",
        ask=stub,
        train="test",
        marks=("prompt", "test", "entry_point"),
    ),
    # {"text", "code", "test_list", "test_setup_code", ...}; of the config "sanitized" {"prompt", "test_imports", ...}:
    # the card.
    "mbpp": _code(
        "google-research-datasets/mbpp",
        "text",
        ask=first_test,
        configs=("full",),
        marks=("text", "test_list"),
    ),
    "mbpp_sanitized": _code(
        "google-research-datasets/mbpp",
        "prompt",
        ask=first_test,
        configs=("sanitized",),
        marks=("prompt", "test_list"),
    ),
    # {"question", "solution", "test", "test_info": [{"function_declaration", ...}], ...}: the card.
    "kodcode": _code(
        "KodCode/KodCode-V1",
        "question",
        ask=declared,
        held_out="train",
        marks=("question", "test", "test_info"),
        note="tests of classes, and with other packages than Python's own, cannot be judged: "
        "config.environment.max_malformed_rows=N leaves such rows out",
    ),
    # {"description", "public_tests", "private_tests", "generated_tests", "input_file", ...}: the card.
    "codecontests": _code(
        "deepmind/code_contests", "description", only=("input_file", ("",)), marks=("description", "public_tests")
    ),
    # {"problem", "answer", "solution", "subject", "level": int, "unique_id"}: the card's copies.
    "math500": DatasetLayout(
        "HuggingFaceH4/MATH-500",
        "problem",
        task="level",
        task_text="level {}",
        train="test",
        marks=("problem", "answer", "subject", "level"),
    ),
    # {"id", "problem", "solution", "answer", "url", "year"}: the card.
    "aime24": DatasetLayout(
        "HuggingFaceH4/aime_2024", "problem", held_out="train", marks=("problem", "answer", "url", "year", "solution")
    ),
    # {"problem", "answer", "id"}: code that loads it by this name reads these columns.
    "aime25": DatasetLayout("math-ai/aime25", "problem", train="test"),
    # {"problem_idx", "problem", "answer": int}: the card.
    "aime26": DatasetLayout(
        "MathArena/aime_2026", "problem", held_out="train", marks=("problem", "answer", "problem_idx")
    ),
    # {"question", "answer"}, the answer a solution that ends in "#### 42"; config "main" is the one commonly used.
    "gsm8k": DatasetLayout(
        "openai/gsm8k", "question", read_answer=after_hashes, configs=("main",), marks=("question", "answer")
    ),
    # {"problem", "tests", "starter_code", "metadata"}: copies of it; each config has further columns, and the splits
    # that its card lists: train in three, test in two.
    "deepcoder": _code(
        "agentica-org/DeepCoder-Preview-Dataset",
        "problem",
        starter="starter_code",
        configs=("primeintellect", "taco", "lcbv5"),
        held_out_configs=("codeforces", "lcbv5"),
        marks=("problem", "tests"),
    ),
    # {"question_content", "starter_code", "public_test_cases", "private_test_cases", "metadata", "difficulty", ...}:
    # the card. On the hub it is files, and a program that picks the files of a release.
    "livecodebench": _code(
        "livecodebench/code_generation_lite",
        "question_content",
        task="difficulty",
        starter="starter_code",
        train="test",
        files=released,
        marks=("question_content", "public_test_cases"),
    ),
    # {"question", "starter_code", "input_output", "difficulty", ...}: the card.
    "taco": _code(
        "BAAI/TACO",
        "question",
        task="difficulty",
        starter="starter_code",
        configs=("ALL",),
        marks=("question", "input_output"),
    ),
}


def make_row(columns: Mapping[str, Any], layout: DatasetLayout) -> Row:
    """The row made from the columns. Raises Malformed."""
    answer = next((value for name in layout.answers if (value := find(columns, name)) is not MISSING), MISSING)
    prompt = find(columns, layout.prompt)
    if prompt is MISSING or (layout.answers and answer is MISSING):
        wanted = ", ".join([layout.prompt, *([" or ".join(layout.answers)] if layout.answers else [])])
        missing = layout.prompt if prompt is MISSING else layout.answers[0]
        raise Malformed(f"has no {missing!r} ({columns_lib.keys(columns)}; wanted: {wanted})")
    text, messages = columns_lib.read_prompt(prompt, layout.prompt)
    if layout.ask is not None:
        text = layout.ask(text, columns)
    starter = find(columns, layout.starter) if layout.starter else MISSING
    if isinstance(starter, str) and starter.strip():
        text = f"{text.rstrip()}\n\nGo on from this code:\n\n```python\n{starter.rstrip()}\n```"
    right = layout.read_answer(answer, layout.answers[0]) if layout.answers else ""
    task = find(columns, layout.task) if layout.task else MISSING
    return Row(
        text,
        right,
        task="" if task in (MISSING, None, "") else layout.task_text.format(task),
        extra=dict(columns),
        messages=messages,
        chat=True,
    )


def with_tests(columns: Mapping[str, Any], layout: DatasetLayout, column: str) -> Mapping[str, Any]:
    """The columns, with the layout's unit tests (if it names their column) under `column`."""
    return {**columns, column: find(columns, layout.tests)} if layout.tests else columns


def has(columns: Mapping[str, Any], layout: DatasetLayout) -> bool:
    """Whether a row belongs to the layout (DatasetLayout.only): a data set may contain other rows too."""
    column, values = layout.only
    found = find(columns, column) if column else MISSING
    return found is MISSING or str("" if found is None else found).strip().lower() in values


def looks_like(columns: Mapping[str, Any], kind: str) -> str:
    """The layout with the most marks among those whose marks are all in `columns`, preferably of that kind; "" if there
    is none."""
    fits = [
        (layout.kind == kind, len(layout.marks), name)
        for name, layout in LAYOUTS.items()
        if layout.marks and all(find(columns, mark) is not MISSING for mark in layout.marks)
        if name != "gsm8k" or "####" in str(columns.get("answer"))
    ]
    return max(fits, key=lambda fit: fit[:2])[2] if fits else ""
