"""Sampled completions to read: which of them fit into the page, and each one cut into spans to draw.

A completion is drawn as *spans*: the text that a token adds, with its log-probability. Tokens that end within a
character are one span with the token that completes it, with the sum of their log-probabilities; a span that holds the
end of the thinking is cut there. So the spans together are exactly the completion's text.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from scalerl_jax.report.log_rows import Row, five_digits, rounded
from scalerl_jax.run.jsonl import row_of

READ_BYTES = 16_000_000  # of sample files: read in well under a second
PAGE_BYTES = 3_000_000  # of the samples in a page, of all its runs together
MOST_STEPS = 40
MOST_SAMPLES = 48  # of a step
MOST_SPANS = 3_000  # of a completion; of a longer one the middle is left out
MOST_CHARACTERS = 12_000  # of a prompt, and of a completion without token texts

_NEEDED = (
    *("step", "group", "index", "prompt", "answer", "completion", "token_ids", "logprobs", "versions", "forced"),
    *("verdict", "reward", "finish_reason"),
)


@dataclasses.dataclass(frozen=True)
class Span:
    text: str
    logprob: float | None  # None at forced tokens
    ids: tuple[int, ...]
    step: int | None  # of the version that sampled it
    forced: str  # "", or why it was fed to the model: interrupted, environment


def sample_files(folder: str) -> list[tuple[int, str, int]]:
    """(step, path, bytes) of the run's samples, in order."""
    found = []
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        if matched := re.fullmatch(r"step-(\d+)\.jsonl", name):
            path = os.path.join(folder, name)
            found.append((int(matched[1]), path, os.path.getsize(path)))
    return sorted(found)


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """`count` of them (at least one), evenly spread, always with the last."""
    if not items or count >= len(items):
        return list(items)
    places = {round((len(items) - 1) * (1 - i / max(1, count - 1))) for i in range(max(1, count))}
    return [items[place] for place in sorted(places)]


def read_samples(path: str) -> tuple[list[Row], bool]:
    """The first rows of a file (MOST_SAMPLES, fewer if they are long, at least one), and whether these are all."""
    rows: list[Row] = []
    with open(path, "rb") as file:
        size = 0
        for number, line in enumerate(file, 1):
            size += len(line)
            if rows and (size > READ_BYTES or number > MOST_SAMPLES):
                return rows, False
            try:
                rows.append(row_of(line))
                if lacking := [name for name in _NEEDED if name not in rows[-1]]:
                    raise ValueError(f"has no {lacking[0]!r}")
            except ValueError as error:
                raise ValueError(f"{path}: row {number} {error}") from error
    return rows, True


def rollouts(workdir: str, settings: Mapping[str, Any], *, page_bytes: int = PAGE_BYTES) -> dict[str, Any]:
    """Samples of evenly spread steps, as many as fit.

    `written`: the number of steps with samples; `whole`: whether every sample of the steps shown is included.
    """
    files = sample_files(os.path.join(workdir, "rollouts"))
    count = min(MOST_STEPS, len(files))
    while count > 1 and sum(size for *_, size in evenly(files, count)) > READ_BYTES:
        count = count * 3 // 4
    marker = settings["rollout.end_of_thinking"] if settings["rollout.thinking_budget_max"] > 0 else ""
    read = [read_samples(path) for _, path, _ in evenly(files, count)]
    whole = all(all_of_them for _, all_of_them in read)
    shown = [[sample(row, marker) for row in rows] for rows, _ in read]
    sizes = [[len(json.dumps(one)) for one in rows] for rows in shown]
    while len(shown) > 1 and sum(map(sum, sizes)) > page_bytes:
        fewer = len(shown) * 3 // 4
        shown, sizes = evenly(shown, fewer), evenly(sizes, fewer)
    if len(shown) == 1:  # a single step: as many of its samples as fit, at least one
        fitting = sum(sum(sizes[0][: i + 1]) <= page_bytes for i in range(len(sizes[0])))
        whole = whole and fitting == len(shown[0])
        shown = [shown[0][: max(1, fitting)]]
    samples = [row for rows in shown for row in rows]
    return {"written": len(files), "shown": len(shown), "whole": whole, "samples": samples}


def sample(row: Row, marker: str) -> dict[str, Any]:
    """One completion as the reader draws it. marker: the end of thinking; "": there is none."""
    thinking, answer = at_marker(spans(row), end_of_thinking(row["completion"], marker))
    both = [*thinking, *answer]
    head, tail = ends(len(both))
    shown, lost = [*both[:head], *both[tail:]], sum(len(span.ids) for span in both[head:tail])
    answer_from = min(head, len(thinking)) + max(0, len(thinking) - tail)
    prompt, prompt_left_out = shortened(row["prompt"])
    pieces = bool(row.get("pieces"))
    parts = [(span.text, 0) if pieces else shortened(span.text) for span in shown]
    return {
        "step": row["step"],
        "group": row["group"],
        "index": row["index"],
        "branch": row.get("branch", [1, 1]),  # rows of older versions have none
        "task": row.get("task", ""),
        "prompt": prompt,
        "prompt_left_out": prompt_left_out,
        "expected": row["answer"],
        "outcome": "truncated" if row["finish_reason"] == "length" else "right" if row["verdict"] else "wrong",
        "reward": five_digits(row["reward"]),
        "finish": row["finish_reason"],
        "tokens": len(row["token_ids"]),
        "versions": row["versions"],
        "interrupted": len(row["forced"]) > len(row.get("replies", ())),
        "pieces": pieces,
        "text": [text for text, _ in parts],
        "logprob": rounded(None if span.logprob is None else round(span.logprob, 4) for span in shown),
        "ids": [list(span.ids) for span in shown] if pieces else [],
        "steps": runs([span.step for span in shown]),
        "forced": [[start, end, why] for why, start, end in runs([span.forced for span in shown]) if why],
        "answer_from": answer_from,
        # Where the gap is, the tokens left out there, and the characters left out (if tokens have no text).
        "left_out": [head if lost else 0, lost, sum(cut for _, cut in parts)],
    }


def spans(row: Row) -> list[Span]:
    """The completion, span by span; a single span without log-probability if the sample lacks the tokens' texts."""
    pieces, ids, logprobs = row.get("pieces") or [], row["token_ids"], row["logprobs"]
    if not pieces:
        return [Span(row["completion"], None, (), None, "")] if row["completion"] else []
    if not len(pieces) == len(ids) == len(logprobs) or "".join(pieces) != row["completion"]:
        raise ValueError(
            f"rollouts of step {row['step']}: group {row['group']}, completion {row['index']}: pieces, token_ids and "
            "logprobs do not go together"
        )
    steps: list[int | None] = [None] * len(ids)
    for step, start, end in row["versions"]:
        steps[start:end] = [step] * (end - start)
    forced = [""] * len(ids)
    for name, fed in (("interrupted", row["forced"]), ("environment", row.get("replies", ()))):
        for start, end in fed:
            forced[start:end] = [name] * (end - start)
    out, first = [], 0
    for at, text in enumerate(pieces):
        if not text and at < len(pieces) - 1:
            continue
        sampled = [logprobs[i] for i in range(first, at + 1) if not forced[i]]
        logprob = sum(sampled) if sampled else None
        out.append(Span(text, logprob, tuple(ids[first : at + 1]), steps[at], forced[at]))
        first = at + 1
    return out


def end_of_thinking(completion: str, marker: str) -> int:
    """Number of characters up to and including the last marker, after which the verifier reads; all of them without
    one."""
    at = completion.rfind(marker) if marker else 0
    return len(completion) if at < 0 else at + len(marker)


def at_marker(parts: Sequence[Span], characters: int) -> tuple[list[Span], list[Span]]:
    """The spans of the first `characters`, and the others; a span across that place is cut in two."""
    before: list[Span] = []
    after: list[Span] = []
    at = 0
    for span in parts:
        cut = characters - at
        at += len(span.text)
        if cut >= len(span.text):
            before.append(span)
        elif cut <= 0:
            after.append(span)
        else:
            before.append(dataclasses.replace(span, text=span.text[:cut]))
            after.append(dataclasses.replace(span, text=span.text[cut:]))
    return before, after


def ends(count: int) -> tuple[int, int]:
    """Of `count` spans, how many are kept at the head, and where the tail starts: two thirds and one third of
    MOST_SPANS."""
    if count <= MOST_SPANS:
        return count, count
    head = MOST_SPANS * 2 // 3
    return head, count - (MOST_SPANS - head)


def shortened(text: str) -> tuple[str, int]:
    """The text, or its beginning and its end, and the number of characters left out between them."""
    if len(text) <= MOST_CHARACTERS:
        return text, 0
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n\u2026\n{text[-half:]}", len(text) - 2 * half


def runs(values: Sequence[Any]) -> list[list[Any]]:
    """[value, start, end] of each run of equal neighbours."""
    out: list[list[Any]] = []
    for at, value in enumerate(values):
        if out and out[-1][0] == value:
            out[-1][2] = at + 1
        else:
            out.append([value, at, at + 1])
    return out
