"""scalerl-verify: scores completions of a file as a run would, and shows why: a dry run that costs nothing.

    scalerl-verify [LAYOUT:]ANSWERS.jsonl [--config=F.py | --environment=math] [--config.a.b=v] [--out=SCORES.jsonl]
    scalerl-verify --prompts=3 --config=F.py [--config.a.b=v]

A row of the file (JSONL, JSON, CSV, Parquet; several files may be given) has a "completion" and the columns of the
environment's rows: "answer", "task", "tests" and "prompt" under the names of config.environment.columns, or of a layout
as in config.environment.train, and any other column that the score needs. Columns that it does not need may be missing.
In a mixture "environment" names the row's environment.

The scorer is the run's own, with its processes and limits: config.environment.verifier_processes rows are scored at a
time. A completion may be whole, or only what follows the thinking (--thinking). With --config, thinking and answer are
separated as in a run: without a thinking budget, by how the rendered prompt ends. Without --config the environment is
math, and prompts are not read. There is no length penalty: it counts tokens, and the file has text.

It prints a table of rows (--show), the share that is correct, the mean of the reward and of every metric, and the time
of a score. --out writes all rows with their scores, whole or not at all. The exit code is 1 if no row could be scored.

--prompts shows what a run with this config would ask, and starts none: which rows are left out, how many tokens prompts
have, the tokens that end a completion, and the first prompts as they are rendered.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from absl import flags
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scalerl_jax.cli import command_flags, entry
from scalerl_jax.config import Config
from scalerl_jax.environments import code, parts
from scalerl_jax.environments.base import Row, Score, scores_itself
from scalerl_jax.environments.data import columns as columns_lib
from scalerl_jax.environments.data import layouts, sources
from scalerl_jax.environments.data.columns import Malformed, MalformedRows
from scalerl_jax.environments.data.layouts import LAYOUTS
from scalerl_jax.environments.data.row_files import read_file
from scalerl_jax.environments.load import load_rows
from scalerl_jax.environments.prompts import Prompts
from scalerl_jax.environments.scorer import Scorer
from scalerl_jax.environments.tokenizer import Tokenizer, opening, split_as_run, split_thinking, thinking_at_end
from scalerl_jax.model.decoder_config import check_folder
from scalerl_jax.run.progress import ProgressLine, rounded
from scalerl_jax.system import files, signals

COMPLETION, ENVIRONMENT = "completion", "environment"  # columns


@dataclasses.dataclass(frozen=True)
class Judged:
    """A row of the file, with its score."""

    columns: Mapping[str, Any]
    row: Row
    score: Score
    seconds: float  # elapsed


def read_rows(paths: Sequence[str], config: Config) -> Iterator[tuple[Mapping[str, Any], Row]]:
    """(columns, row) of each row of the files. Raises ValueError naming file and row."""
    configs = parts.configs(config)
    limits = {part: alone.environment.max_malformed_rows for part, alone in configs.items()}
    part = max(limits, key=lambda part: limits[part])
    malformed = MalformedRows(field=parts.field(part, "max_malformed_rows"), most=limits[part])
    for given in paths:
        layout, path = _layout(given)
        for name, found in read_file(path, malformed):
            try:
                yield found, _row(name, found, configs, layout)
            except Malformed as error:
                looks = "" if layout or COMPLETION not in found else layouts.looks_like(found, config.environment.name)
                hint = f"; that looks like {looks}: {looks}:{path}" if looks else ""
                malformed.skip(name, f"{error}{hint}")
    for line in malformed.notes():
        _print(line)


def _print(line: str, console: Console | None = None) -> None:
    """Prints a line as it is, without wrapping. console: by default stderr."""
    console = console or Console(stderr=True, highlight=False, emoji=False)
    console.print(line, markup=False, soft_wrap=True)


def _layout(given: str) -> tuple[str, str]:
    """(layout, path) of a command-line argument; layout "": the config's columns."""
    layout, _, path = given.partition(":")
    return (layout, path) if layout in LAYOUTS and not os.path.exists(given) else ("", given)


def _row(name: str, found: Mapping[str, Any], configs: Mapping[str, Config], layout: str) -> Row:
    """The row of a record of the file. Raises Malformed."""
    if not isinstance(found.get(COMPLETION), str):
        raise Malformed(f"has no text {COMPLETION!r} ({columns_lib.keys(found)})")
    part = ""
    if "" not in configs:
        part = str(found.get(ENVIRONMENT, ""))
        if part not in configs:
            raise Malformed(f"{ENVIRONMENT!r} is {part!r}, not one of {', '.join(configs)}")
    environment = configs[part].environment
    columns = {key: value for key, value in found.items() if key not in (COMPLETION, ENVIRONMENT)}
    prompt = LAYOUTS[layout].prompt if layout else environment.columns.prompt
    if columns_lib.find(columns, prompt) is columns_lib.MISSING:
        columns[prompt] = name  # a placeholder, of no use to a score that needs the prompt
    if layout:
        if LAYOUTS[layout].kind != environment.name:
            raise ValueError(f"{layout}: is a layout for config.environment.name={LAYOUTS[layout].kind}")
        row = layouts.make_row(columns, LAYOUTS[layout])
        columns = dict(layouts.with_tests(columns, LAYOUTS[layout], environment.columns.tests))
    else:
        compares = environment.name in ("math", "arithmetic") and scores_itself(environment)
        row = columns_lib.make_row(columns, environment.columns, needs_answer=compares)
    if environment.name in ("code", "programs"):
        try:
            row = code.with_tests(row, columns, environment=environment)
        except ValueError as error:
            raise Malformed(str(error)) from error
    return dataclasses.replace(row, name=name, environment=part)


def judge(
    rows: Sequence[tuple[Mapping[str, Any], Row]], config: Config, *, thinking: str, line: ProgressLine | None = None
) -> list[Judged]:
    """Scores every row. thinking: as the flag; "": as in a run. Raises ScorerError if nothing can be scored."""
    alone = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, length_control="none"))
    rendered = _rendered(config) if not thinking else _as_it_is
    workers = max(part.environment.verifier_processes for part in parts.configs(config).values())
    with contextlib.ExitStack() as stack:
        scorer = stack.enter_context(Scorer(alone, decode=_no_tokens, everywhere=True, rows=[row for _, row in rows]))
        # One thread for each scoring process: a row waits for no other, so its time is only its own.
        threads = stack.enter_context(concurrent.futures.ThreadPoolExecutor(workers))
        stack.callback(threads.shutdown, cancel_futures=True, wait=False)

        def judged(of: tuple[Mapping[str, Any], Row]) -> Judged:
            columns, row = of
            thought, answer = split(columns[COMPLETION], config, thinking=thinking, prompt=rendered(row))
            began = time.monotonic()
            score = scorer.score_answer(row, answer, thinking=thought, tokens=0).result()
            return Judged(columns, row, score, time.monotonic() - began)

        asked = [threads.submit(judged, of) for of in rows]
        found = []
        for number, done in enumerate(asked, 1):
            while not done.done():
                signals.raise_if_interrupted()
                concurrent.futures.wait([done], timeout=0.2)
            found.append(done.result())
            if line is not None:
                line.update(step=number)
        return found


def split(text: str, config: Config, *, thinking: str, prompt: str = "") -> tuple[str, str | None]:
    """(thinking, answer) of a completion's text; answer None if it has none. prompt: as rendered."""
    end = config.rollout.end_of_thinking
    if not thinking:
        return split_as_run(text, end, prompt=prompt, budget=config.rollout.thinking_budget_max)
    shows = end in text or text.lstrip().startswith(opening(end))
    thinks = thinking == "always" or (thinking == "auto" and shows)
    return split_thinking(text, end if thinks else "")


def _rendered(config: Config) -> Callable[[Row], str]:
    """A row's prompt as a run renders it, where that decides whether thinking is open. Raises ValueError."""
    file = os.path.join(config.model.path, "tokenizer.json")
    if config.rollout.thinking_budget_max > 0 or not config.rollout.end_of_thinking:
        return _as_it_is  # thinking ends at the marker, whatever opened it
    if not os.path.isfile(file):
        line = f"{file}: no such file, so prompts are not rendered: whether they open thinking is told by their texts"
        _print(line)
        return _as_it_is
    tokenizer, prompts = Tokenizer(config.model.path), dict[str, tuple[Prompts, bool]]()
    for part, alone in parts.configs(config).items():
        environment = alone.environment
        given = [*sources.parse(environment.train, "train"), *sources.parse(environment.validation, "validation")]
        chat = environment.name.startswith("reasoning_gym:") or any(source.layout for source in given)
        prompts[part] = Prompts(alone, tokenizer), chat

    def rendered(row: Row) -> str:
        of_part, chat = prompts[row.environment]
        return of_part.render(dataclasses.replace(row, chat=row.chat or chat)).text

    return rendered


def _as_it_is(row: Row) -> str:
    return row.text


def _no_tokens(_: Sequence[int]) -> NoReturn:
    raise AssertionError("the completions of a file are text")


def show(found: Sequence[Judged], console: Console, *, most: int) -> None:
    """The table and the totals. most: rows of the table; 0: all."""
    shown = found[: most or None]
    table = Table(box=None, pad_edge=False)
    table.add_column("row", no_wrap=True)
    table.add_column("correct")
    table.add_column("reward", justify="right")
    table.add_column("seconds", justify="right")
    table.add_column("why", overflow="fold")
    for each in shown:
        table.add_row(
            _plain(each.row.name), "yes" if each.score.correct else "no", f"{each.score.reward:g}",
            f"{each.seconds:.3f}", _plain(each.score.why),
        )  # fmt: skip
    console.print(table)
    if len(shown) < len(found):
        console.print(f"... and {len(found) - len(shown)} more rows: --show=0 shows all", markup=False)
    console.print()
    for line in totals(found):
        _print(line, console)


def totals(found: Sequence[Judged]) -> Iterator[str]:
    """The lines about all rows."""
    correct = sum(each.score.correct for each in found)
    reward = statistics.fmean(each.score.reward for each in found)
    failed = sum(each.score.failed for each in found)
    yield (
        f"{len(found)} rows: {correct} correct ({correct / len(found):.1%}), mean reward {rounded(reward)}"
        + (f"; {failed} could not be scored" if failed else "")
    )
    metrics: dict[str, list[float]] = {}
    for each in found:
        for name, value in each.score.metrics.items():
            metrics.setdefault(name, []).append(value)
    for name, values in sorted(metrics.items()):
        yield f"  {name}: {rounded(statistics.fmean(values))} (of {len(values)} rows)"
    slowest = max(found, key=lambda each: each.seconds)
    mean = statistics.fmean(each.seconds for each in found)
    yield f"time of a row: {mean:.3f} s on average, the slowest {slowest.seconds:.3f} s ({slowest.row.name})"


def as_jsonl(found: Iterable[Judged]) -> str:
    """Every row of the file with its columns and its score."""
    return "".join(
        json.dumps({**each.columns, "score": {**vars(each.score), "seconds": round(each.seconds, 6)}}) + "\n"
        for each in found
    )


def _plain(text: str) -> Text:
    """The text for a cell of the table, without control characters, which would reach the terminal."""
    return Text("".join(c if c.isprintable() else " " for c in text))


def show_prompts(config: Config, console: Console, *, most: int) -> None:
    """Prints the prompts of a run. most: prompts of each kind. Raises ValueError as a run's start does."""
    if not config.model.path:
        raise entry.UserError("config.model.path is empty: prompts are rendered and counted by a model's tokenizer")
    with entry.user_mistakes():
        check_folder("config.model.path", config.model.path)
        tokenizer = Tokenizer(config.model.path)
        rows = load_rows(config, tokenizer)
    for line in rows.notes:
        _print(line, console)
    stops = ", ".join(f"{token} {tokenizer.decode([token])!r}" for token in tokenizer.stop_ids)
    _print(f"tokens that end a completion: {stops}", console)
    for kind, each in (("training", rows.train), ("held-out", rows.held_out)):
        if not each:
            continue
        lengths = sorted(len(row.token_ids) for row in each)
        _print(
            f"{kind} prompts have {lengths[0]} to {lengths[-1]} tokens, {lengths[len(lengths) // 2]} in the median; "
            f"config.rollout.max_prompt_tokens is {config.rollout.max_prompt_tokens}",
            console,
        )
    for kind, each in (("training", rows.train), ("held-out", rows.held_out)):
        for row in each[:most]:
            end = thinking_at_end(row.text, config.rollout.end_of_thinking)
            thinking = {"opened": "thinking is open", "closed": "thinking is closed", "none": "no thinking begun"}[end]
            heading = [f"{kind} prompt", row.name, f"{len(row.token_ids)} tokens", thinking]
            heading += [f"answer {row.answer!r}"] * bool(row.answer) + [f"task {row.task}"] * bool(row.task)
            console.print(Text(""))
            console.rule(_plain(", ".join(heading)), align="left")
            console.print(Text("\n".join(_plain(line).plain for line in row.text.split("\n"))), soft_wrap=True)


def main(config: Config, arguments: list[str]) -> None:
    values = flags.FLAGS
    with_config = any(item.lstrip("-").partition("=")[0] == "config" for item in sys.argv[1:])
    if values.environment:
        if config.mixture:
            raise entry.UserError(f"--environment={values.environment}: the config has a mixture, config.mixture")
        config.environment.name = values.environment
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 140  # lines of a log are not wrapped
    if values.prompts:
        if arguments or values.out is not None:
            raise entry.UserError("--prompts judges nothing: it goes without files and --out")
        show_prompts(config, console, most=values.prompts)
        return
    layouts_given = {LAYOUTS[layout].kind for layout, _ in map(_layout, arguments) if layout}
    if len(layouts_given) == 1 and not with_config and not values.environment:
        config.environment.name = layouts_given.pop()
    if not arguments:
        raise entry.UserError("no file given, as in scalerl-verify ANSWERS.jsonl")
    if values.out is not None:
        if any(os.path.realpath(_layout(given)[1]) == os.path.realpath(values.out) for given in arguments):
            raise entry.UserError(f"--out={values.out}: is the file that is read")
        entry.prepare_out("--out", values.out)
    thinking = values.thinking or ("" if with_config else "auto")
    with entry.user_mistakes():
        rows = list(read_rows(arguments, config))
        if not rows:
            raise entry.UserError(f"{', '.join(arguments)}: no rows there")
        with ProgressLine("verify", updates=len(rows)) as line:
            found = judge(rows, config, thinking=thinking, line=line)
    show(found, console, most=values.show)
    if values.out is not None:
        files.write_whole(values.out, as_jsonl(found))
    if all(each.score.failed for each in found):
        _print(f"error: none of {len(found)} rows could be scored: {found[0].score.why}")
        sys.exit(1)


def run() -> None:
    command_flags.verify()
    default = Config()
    default.environment.name = "math"
    entry.run_with_arguments(main, default=default)


if __name__ == "__main__":
    run()
