"""Published data sets whose rows are known by name: config.environment.train=gsm8k, or gsm8k:FILE for a copy.

Each is a row of LAYOUTS: where the hub has it, and which of its columns are the prompt, the answer and the task. The
columns are those of the data sets' own cards, or of the code that made them where there is no card. Their prompts are
asked as a user asks them, through the model's chat template if it has one; a wish for the answer's form
("put it in \\boxed{}") is config.environment.prompt_suffix.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from scalerl_jax.environments.base import Row, said_by
from scalerl_jax.environments.data import columns as columns_lib
from scalerl_jax.environments.data.columns import MISSING, find
from scalerl_jax.environments.data.malformed import Malformed


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a data set's rows become problems. Columns are named as in the config: "a.b" is b inside a."""

    hub: str
    prompt: str  # a text or messages
    answers: tuple[str, ...] = ("answer",)  # the first that a row has; (): it has none
    kind: str = "math"  # the environment it is for
    task: str = ""  # column
    task_text: str = "{}"  # of its value
    starter: str = ""  # column: code that a program is to go on from
    read_answer: Callable[[str], str] = str.strip  # raises Malformed
    configs: tuple[str, ...] = ("",)  # of the hub, whose rows are all taken
    held_out_configs: tuple[str, ...] = ()  # that have the split for validation; (): those
    train: str = "train"  # split
    held_out: str = "test"  # split, for validation
    # Where the hub's own way in is a program: of what is behind @, the files that are read as they are, or a pattern.
    files: Callable[[str], tuple[str, ...]] | None = None  # raises ValueError
    marks: tuple[str, ...] = ()  # columns by which rows are taken for this one's, in hints
    note: str = ""  # for people, where it is known that some rows lack what they should have


def after_hashes(text: str) -> str:
    """GSM8K: the number behind the last ####, without the commas of thousands."""
    _, found, answer = text.rpartition("####")
    if not found or not answer.strip():
        raise Malformed("'answer' has nothing behind ####")
    return answer.strip().replace(",", "")


def released(release: str) -> tuple[str, ...]:
    """LiveCodeBench: each release has the files of those before it and one more; without a name it is the latest."""
    if not release:
        return ("test*.jsonl",)
    found = re.fullmatch("release_v([1-9])", release)
    if found is None:
        raise ValueError(f"@{release} is none of its releases, @release_v1, @release_v2, ...")
    return ("test.jsonl", *(f"test{n}.jsonl" for n in range(2, int(found[1]) + 1)))


LAYOUTS = {
    # {"problem", "answer", "difficulty"}, difficulty as "3/8" right of eight; huggingface.co card of the data set.
    "polaris": Layout(
        "POLARIS-Project/Polaris-Dataset-53K", "problem", held_out="train", marks=("problem", "answer", "difficulty")
    ),
    # {"problem", "answer", "solution"}: the card. Six rows have no answer (a discussion there says).
    "deepscaler": Layout(
        "agentica-org/DeepScaleR-Preview-Dataset",
        "problem",
        held_out="train",
        marks=("problem", "answer", "solution"),
        note="a few rows have no answer: config.environment.max_malformed_rows=10",
    ),
    # {"prompt": [{"role", "content"}], "reward_model": {"ground_truth", "style"}, "data_source", "ability",
    # "extra_info": {"index"}}: the Parquet's schema, as the cards of its copies show it. Each of its 17 thousand
    # prompts is there a hundred times. Open-R1's processed form has the prompt as a text, the answer as `solution`.
    "dapo": Layout(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        "prompt",
        answers=("reward_model.ground_truth", "solution"),
        held_out="train",
        marks=("prompt", "reward_model.ground_truth"),
    ),
    # {"problem", "answer", "solution", "subject", "level": int, "unique_id"}: the card's copies.
    "math500": Layout(
        "HuggingFaceH4/MATH-500",
        "problem",
        task="level",
        task_text="level {}",
        train="test",
        marks=("problem", "answer", "subject", "level"),
    ),
    # {"id", "problem", "solution", "answer", "url", "year"}: the card.
    "aime24": Layout(
        "HuggingFaceH4/aime_2024", "problem", held_out="train", marks=("problem", "answer", "url", "year", "solution")
    ),
    # {"problem", "answer", "id"}: what loads it by this name reads these columns.
    "aime25": Layout("math-ai/aime25", "problem", train="test"),
    # {"problem_idx", "problem", "answer": int}: the card.
    "aime26": Layout("MathArena/aime_2026", "problem", held_out="train", marks=("problem", "answer", "problem_idx")),
    # {"question", "answer"}, the answer a solution that ends in "#### 42"; config "main": as it is commonly read.
    "gsm8k": Layout(
        "openai/gsm8k", "question", read_answer=after_hashes, configs=("main",), marks=("question", "answer")
    ),
    # {"problem", "tests", "starter_code", "metadata"}: copies of it; each config has other columns beside these, and
    # the splits that its card lists: train in three, test in two.
    "deepcoder": Layout(
        "agentica-org/DeepCoder-Preview-Dataset",
        "problem",
        answers=(),
        kind="code",
        starter="starter_code",
        configs=("primeintellect", "taco", "lcbv5"),
        held_out_configs=("codeforces", "lcbv5"),
        marks=("problem", "tests"),
    ),
    # {"question_content", "starter_code", "public_test_cases", "private_test_cases", "metadata", "difficulty", ...}:
    # the card. On the hub it is files beside a program that picks those of a release.
    "livecodebench": Layout(
        "livecodebench/code_generation_lite",
        "question_content",
        answers=(),
        kind="code",
        task="difficulty",
        starter="starter_code",
        train="test",
        files=released,
        marks=("question_content", "public_test_cases"),
    ),
    # {"question", "starter_code", "input_output", "difficulty", ...}: the card.
    "taco": Layout(
        "BAAI/TACO",
        "question",
        answers=(),
        kind="code",
        task="difficulty",
        starter="starter_code",
        configs=("ALL",),
        marks=("question", "input_output"),
    ),
}


def make_row(columns: Mapping[str, Any], layout: Layout) -> Row:
    """Raises Malformed."""
    answer = next((value for name in layout.answers if (value := find(columns, name)) is not MISSING), MISSING)
    prompt = find(columns, layout.prompt)
    if prompt is MISSING or (layout.answers and answer is MISSING):
        wanted = ", ".join([layout.prompt, *([" or ".join(layout.answers)] if layout.answers else [])])
        missing = layout.prompt if prompt is MISSING else layout.answers[0]
        raise Malformed(f"has no {missing!r} ({columns_lib.keys(columns)}; wanted: {wanted})")
    messages = columns_lib.read_messages(prompt, layout.prompt) if isinstance(prompt, list) else ()
    text = said_by(messages) if messages else columns_lib.read_text(prompt, layout.prompt)
    starter = find(columns, layout.starter) if layout.starter else MISSING
    if isinstance(starter, str) and starter.strip():
        text = f"{text.rstrip()}\n\nGo on from this code:\n\n```python\n{starter.rstrip()}\n```"
    right = layout.read_answer(columns_lib.read_answer(answer, layout.answers[0])) if layout.answers else ""
    task = find(columns, layout.task) if layout.task else MISSING
    return Row(
        text,
        right,
        task="" if task in (MISSING, None, "") else layout.task_text.format(task),
        extra=columns_lib.without(columns, (layout.prompt, *layout.answers)),
        messages=messages,
        chat=True,
    )


def looks_like(columns: Mapping[str, Any]) -> str:
    """The name of the layout that has most columns of these; "": none is known by them."""
    fits = [
        (len(layout.marks), name)
        for name, layout in LAYOUTS.items()
        if layout.marks and all(find(columns, mark) is not MISSING for mark in layout.marks)
        if name != "gsm8k" or "####" in str(columns.get("answer"))
    ]
    return max(fits, key=lambda fit: fit[0])[1] if fits else ""
