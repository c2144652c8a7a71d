"""docs/algorithms, docs/recipes, docs/papers.md: every choice there is stands on them, and what they name exists."""

import ast
import functools
import json
import pathlib
import re
import typing

import pytest

from scalerl_jax import config_check
from scalerl_jax.config import Config
from scalerl_jax.objective.advantages import NORMALIZATIONS
from scalerl_jax.objective.losses import LOSSES
from scalerl_jax.scaling.law import LAWS
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
ALGORITHMS = sorted((DOCS / "algorithms").glob("*.md"))
PAGES = [*ALGORITHMS, *sorted((DOCS / "recipes").glob("*.md")), DOCS / "papers.md"]
FIELDS = config_check.leaves(Config())
# Groups of which an algorithms page names every field; of the others those whose value changes what is learned.
WHOLE = ("objective", "curriculum", "pacing", "optimizer", "evaluation")
OTHERS = (
    *("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.prompts_per_step", "rollout.group_size"),
    *("rollout.thinking_budget_min", "rollout.thinking_budget_max", "rollout.answer_budget", "rollout.length_control"),
    *("rollout.length_penalty_tokens", "rollout.interruption_text", "rollout.end_of_thinking"),
    *("rollout.router_replay", "model.sync_dtype", "model.compute_dtype", "model.head_precision", "model.remat"),
    *("model.attention", "fleet.max_delta_density", "fleet.delta_cache_bytes"),
    "checkpoint.on_collapse",
    "distill.k",
)

_CODE = re.compile(r"`([^`\n]+)`")
_FIELD = re.compile(r"(?:config\.)?([a-z_]+(?:\.[a-z0-9_]+)+)(?:=(\S*))?")
_TEST = re.compile(r"tests/[\w/]+\.py::\w+")
_ARXIV = re.compile(r"\b\d{2}(?:0[1-9]|1[0-2])\.\d{5}\b")
_UNITS = {"MiB": 2**20, "GiB": 2**30}


@functools.cache
def text(page: pathlib.Path) -> str:
    return page.read_text()


@functools.cache
def code() -> str:
    """What stands in backticks on the algorithms pages, a line each."""
    return "\n".join(span for page in ALGORITHMS for span in _CODE.findall(text(page)))


def choices(field: str) -> tuple[str, ...]:
    annotation = config_check.annotations()[field]
    return typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()


def fields() -> list[str]:
    return [name for name in FIELDS if name.partition(".")[0] in WHOLE] + [*OTHERS]


def test_every_loss_normalization_and_law_is_on_a_page() -> None:
    assert [name for name in (*LOSSES, *NORMALIZATIONS, *LAWS) if name not in code().splitlines()] == []


@pytest.mark.parametrize("field", fields())
def test_every_field_and_each_of_its_choices_is_on_a_page(field: str) -> None:
    spans = code().splitlines()
    assert any(re.fullmatch(rf"(config\.)?{re.escape(field)}(=.*)?", span) for span in spans)
    missing = [choice for choice in choices(field) if choice not in spans and f"{field}={choice}" not in spans]
    assert missing == []


def named_fields(page: pathlib.Path) -> list[tuple[str, str]]:
    """Fields in backticks, and the value that is given them, if one is."""
    groups = {name.partition(".")[0] for name in FIELDS} | {"config"}
    found = []
    for span in _CODE.findall(text(page)):
        span = span.removeprefix("--")
        match = _FIELD.fullmatch(span)
        if match and span.partition(".")[0] in groups and not span.endswith((".md", ".py", ".json", ".jsonl")):
            found.append((match[1], match[2] or ""))
    return found


def read(value: str) -> typing.Any:
    """A value as a page writes it."""
    value = value.strip("`").replace(",", "")
    number, _, unit = value.partition(" ")
    if unit in _UNITS:
        return int(number) * _UNITS[unit]
    if "/" in value and value.replace("/", "").isdigit():
        above, below = value.split("/")
        return int(above) / int(below)
    try:
        return json.loads(value)
    except ValueError:
        return value


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_field_that_is_named_exists_and_takes_the_value(page: pathlib.Path) -> None:
    for name, value in named_fields(page):
        name = name.removeprefix("config.")
        assert name in FIELDS or hasattr(Config(), name) or any(field.startswith(f"{name}.") for field in FIELDS), name
        if value:
            given = read(value)
            given = float(given) if isinstance(FIELDS[name], float) else given
            assert config_check.leaf_fault(name, given) == "", (name, value)


def rows(page: pathlib.Path) -> list[dict[str, str]]:
    """Of all tables of a page, by the words of their headers."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", text(page), re.MULTILINE):
        header, _, *lines = (
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()
        )
        for line in lines:
            assert len(line) == len(header), f"{page.name}: {line}"
            found.append(dict(zip(header, line, strict=True)))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_defaults_in_tables_are_the_defaults(page: pathlib.Path) -> None:
    for row in rows(page):
        if {"field", "default"} <= row.keys():
            names = _CODE.findall(row["field"])
            assert names, row
            values = row["default"].split(", ") if len(names) > 1 and ", " in row["default"] else [row["default"]]
            for name, value in zip(names, values * len(names) if len(values) == 1 else values, strict=True):
                if value in ("", "see below"):
                    continue
                assert read(value) == FIELDS[name], (name, value, FIELDS[name])


def test_the_tables_with_defaults_are_found() -> None:
    """So that another header does not leave the test above without work."""
    found = [row for page in ALGORITHMS for row in rows(page) if {"field", "default"} <= row.keys()]
    assert len(found) > 50


@functools.cache
def functions(file: pathlib.Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_test_that_is_named_exists(page: pathlib.Path) -> None:
    named = _TEST.findall(text(page))
    assert text(page).count("::") == len(named), "each is named as tests/FOLDER/FILE.py::NAME, on one line"
    for name in named:
        file, _, function = name.partition("::")
        assert (ROOT / file).is_file(), name
        assert function in functions(ROOT / file), name


def test_every_loss_mask_and_normalization_names_its_test() -> None:
    for page in ("losses", "advantages", "distillation", "curriculum", "pacing", "weight_stream", "fit"):
        assert len(_TEST.findall(text(DOCS / "algorithms" / f"{page}.md"))) >= 4, page


def test_every_flag_that_is_named_is_one() -> None:
    flags = "".join(file.read_text() for file in (ROOT / "scalerl_jax" / "cli").glob("*.py"))
    for page in PAGES:
        for flag in re.findall(r"--(?!config\.)([a-z][a-z0-9_]*)", text(page)):
            known = f'"{flag}"' in flags or flag in ("config", "servers", "workdir", "topology", "local", "repo")
            assert known, (page.name, flag)


def configs() -> list[str]:
    files = [*(ROOT / "configs").glob("*.py"), *(ROOT / "configs" / "recipes").glob("*.py")]
    return sorted(str(file.relative_to(ROOT)) for file in files)


@pytest.mark.parametrize("config", configs())
def test_every_config_is_on_the_page_of_recipes(config: str) -> None:
    assert f"]({'../../' + config})" in text(DOCS / "recipes" / "index.md")


def test_every_study_and_each_of_its_members_is_on_the_page_of_recipes() -> None:
    from scalerl_jax.config_io import load_file, load_module

    page = text(DOCS / "recipes" / "index.md")
    studies = load_module(str(ROOT / "configs" / "ablations.py"), "ablations").STUDIES
    base = load_file(str(ROOT / "configs" / "quickstart.py"))
    for name, make in studies.items():
        members = make(base)
        assert re.search(rf"^\| `{name}` \| {len(members)} \|", page, re.MULTILINE), name
        if name in ("leave_one_out", "forward", "scaling"):
            assert [member for member in members if f"| `{member}`" not in page] == []


def test_every_paper_that_the_source_names_is_on_the_page_of_papers() -> None:
    folders = ("scalerl_jax", "rollout_server", "launch", "configs", "docs", "tests")
    files = [file for folder in folders for end in ("py", "md", "proto") for file in (ROOT / folder).rglob(f"*.{end}")]
    named: dict[str, str] = {}
    for file in files:
        for line in file.read_text(errors="replace").splitlines():
            if "arxiv" in line.lower():
                named |= dict.fromkeys(_ARXIV.findall(line), str(file))
    assert "2510.13786" in named and len(named) > 10
    assert {number: file for number, file in named.items() if f"abs/{number})" not in text(DOCS / "papers.md")} == {}


def test_no_line_of_prose_is_too_long() -> None:
    for page in PAGES:
        assert text(page).count("\n") <= 300, page.name
        prose = [line for line in text(page).splitlines() if not line.startswith(("|", "!["))]
        assert [line for line in prose if len(line) > 120] == [], page.name
