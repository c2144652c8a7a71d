"""The generated pages, held against what they are made from in another way."""

import html
import json
import pathlib
import re

import pytest

from docs.generate import (
    api_page,
    commands_page,
    config_page,
    formulas,
    labels,
    llms,
    markdown,
    metric_names,
    metrics_page,
    proto_page,
)
from docs.generate.pages import made
from docs.generate.repository import rewritten
from scalerl_jax import config_check
from scalerl_jax.cli import command_help
from scalerl_jax.config import Config
from scalerl_jax.contract import rollout_pb2 as pb
from tests.docs import pages

REPO = "https://example.org/scalerl-jax"


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return made()


def test_every_field_of_the_config_has_its_row(generated) -> None:
    rows = [line for line in generated["reference/config.md"].splitlines() if line.startswith('| <code id="')]
    named = [html.unescape(re.sub(r"<[^>]+>", "", row.split("|")[1])).strip() for row in rows]
    assert sorted(named) == sorted(f"--config.{name}" for name in config_check.leaves(Config()))
    by_name = dict(zip(named, rows))
    assert "| `cispo` `clip` `gspo` `reinforce` `dro` | `cispo` |" in by_name["--config.objective.loss"]
    assert "| number; above 0, up to 1 | `1.0` |" in by_name["--config.rollout.top_p"]
    assert by_name["--config.learner.fsdp"].endswith("| yes |")
    assert by_name["--config.evaluation.samples"].endswith("| yes, noted |")
    assert by_name["--config.objective.max_ratio"].endswith("| `--allow` |")
    assert by_name["--config.sft.layers"].endswith("| warm start: `--allow` |")


def test_every_command_has_its_flags(generated) -> None:
    """As --help prints them."""
    sections = dict(re.findall(r"^## (scalerl-\w+)\n(.*?)(?=^## |\Z)", generated["reference/commands.md"], re.M | re.S))
    described = commands_page.described()
    assert set(sections) == set(described) and len(sections) >= 13
    for command, said in described.items():
        for flag in said["flags"]:
            assert f"| `--{flag['name']}` |" in sections[command], command
        assert ("`--config`" in sections[command]) == bool(said["config"])
    assert "required |" in next(line for line in sections["scalerl-train"].splitlines() if "`--workdir`" in line)
    assert all(command_help.docstring(said["module"]).startswith(name) for name, said in described.items())


def test_every_target_of_make_is_there(generated) -> None:
    makefile = (pages.TREE / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"^# (make [a-z-]+)", makefile, re.MULTILINE))
    assert named and named == {" ".join(target.split()[:2]) for target in commands_page.targets()}
    assert all(f"| `{target}` |" in generated["reference/commands.md"] for target in commands_page.targets())


def test_every_message_of_the_proto_has_its_fields(generated) -> None:
    """By the descriptor that the compiler made of it."""
    _, blocks = proto_page.read(proto_page.SOURCE.read_text(encoding="utf-8"))
    found = {block.name: {one.name: one.number for one in block.members} for block in blocks if block.kind != "service"}

    def messages(all_, before: str = ""):
        for name, message in all_.items():
            yield f"{before}{name}", {field.name: field.number for field in message.fields}
            yield from messages(message.nested_types_by_name, f"{name}.")

    wanted = dict(messages(pb.DESCRIPTOR.message_types_by_name))
    wanted |= {name: {value.name: value.number for value in enum.values}
               for name, enum in pb.DESCRIPTOR.enum_types_by_name.items()}  # fmt: skip
    assert found == wanted
    methods = {one.name: one.kind for block in blocks if block.kind == "service" for one in block.members}
    assert set(methods) == set(pb.DESCRIPTOR.services_by_name["Rollout"].methods_by_name)
    assert methods["PushWeights"] == "stream WeightMessage -> stream WeightReply"
    page = generated["reference/proto.md"]
    assert all(f"### {name} {{" in page for name in [*wanted, *methods])
    assert "| 5 | `logprobs` | `bytes` | float32&#91;tokens&#93;, of the distribution sampled from; 0 at forced" in page
    with pytest.raises(ValueError, match=r"rollout\.proto, line 2"):
        proto_page.read("message A {\n  map<string, int32> b = 1;\n}\n")


def test_every_metric_is_explained(generated) -> None:
    page = generated["reference/metrics.md"]
    for table in [*metric_names.METRICS.values(), *metric_names.EVALS.values(), metric_names.LEDGER_FILE]:
        assert all(f"| `{key}` |" in page for key in table)
    told = [*metrics_page.trainer_families(), *metrics_page.generator_families()]
    assert len(told) > 40 and all(f"| `{name}" in page for name, *_ in told)
    assert "| `scalerl_trainer_device_seconds_total` | counter | `role` `state` |" in page


def test_what_the_dashboard_asks_for_is_on_the_page(generated) -> None:
    """Another list of these names, made by hand."""
    asked: set[str] = set()
    for path in (pages.TREE / "launch" / "grafana").rglob("*.json"):
        asked |= set(re.findall(r"scalerl_(?:trainer|generator)_\w+", path.read_text(encoding="utf-8")))
    assert len(asked) > 10
    named = set(re.findall(r"`(scalerl_\w+)`", generated["reference/metrics.md"]))
    assert asked <= named


def test_the_public_names_are_there() -> None:
    named = {f"{package}.{name}": home for package in api_page.PACKAGES for name, home in api_page.exported(package)}
    for name in (
        "scaling.fit_sigmoid", "scaling.SigmoidFit", "model.load_hf", "model.forward", "model.token_logprobs",
        "objective.advantages", "objective.token_weights", "objective.policy_loss", "objective.LOSSES",
        "environments.Environment", "environments.Row", "environments.Score",
    ):  # fmt: skip
        assert f"scalerl_jax.{name}" in named
    assert named["scalerl_jax.model.load_hf"] == "scalerl_jax.model.hf.load_hf"


def test_comments_become_markdown_that_says_the_same() -> None:
    assert markdown.prose("in [1 - low, 1 + high]; a|b * c") == ("in &#91;1 - low, 1 + high&#93;; a&#124;b &#42; c")
    assert markdown.prose("see --config.seed=3 and max_ratio") == "see `--config.seed=3` and `max_ratio`"
    assert markdown.prose("as model.path", {"model.path": "#there"}) == "as [`model.path`](#there)"
    assert markdown.prose("host:port, a file.py") == "host:port, a file.py"
    assert markdown.sentence("of the run") == "Of the run." and markdown.sentence("clip, gspo: x.") == "clip, gspo: x."
    said = markdown.commented(["First", "paragraph.", "  code  here", "  more", "", "Second."])
    assert said == "First paragraph.\n\n```text\ncode  here\nmore\n```\n\nSecond.\n"


def test_links_that_leave_the_pages() -> None:
    """Files and folders, pictures, what the site leaves out; blocks of code and addresses stay."""
    text = (
        "[a](../../scalerl_jax/config.py#L3) [b](../../launch) ![c](../../configs/quickstart.png) [d](data.md#x)\n"
        "[e](generator_node/generator.js) [f](https://x.org/a.py) [g](../../no_such_file.py) [h](#here)\n"
        "```\n[a](../../scalerl_jax/config.py)\n```\n[i]: ../../setup.py\n"
    )
    assert rewritten(text, "how_to/fleet.md", pages={"how_to/data.md"}, repo_url=REPO) == (
        f"[a]({REPO}/blob/main/scalerl_jax/config.py#L3) [b]({REPO}/tree/main/launch) "
        "![c](../assets/repository/configs/quickstart.png) [d](data.md#x)\n"
        f"[e]({REPO}/blob/main/docs/how_to/generator_node/generator.js) [f](https://x.org/a.py) "
        "[g](../../no_such_file.py) [h](#here)\n"
        f"```\n[a](../../scalerl_jax/config.py)\n```\n[i]: {REPO}/blob/main/setup.py\n"
    )


def test_formulas_are_mathml() -> None:
    page = r'<p><span class="arithmatex">\(\rho_t &lt; 5\)</span></p><div class="arithmatex">\[\sum_i x_i\]</div>'
    drawn = formulas.drawn(page)
    assert "arithmatex" not in drawn and drawn.count("<math") == 2 and 'display="block"' in drawn
    assert "ρ" in html.unescape(drawn) and "<mn>5</mn>" in drawn


def test_cells_say_their_column() -> None:
    table = "<table><tr><th>Flag</th><th>Default</th></tr><tr><td>x</td><td>1</td></tr></table>"
    assert labels.labelled(table).endswith('<tr><td>x</td><td data-label="Default">1</td></tr></table>')
    assert labels.unbroken("<code>--out</code> <code>a b</code>") == '<code class="flag">--out</code> <code>a b</code>'


def test_programs_get_the_pages_too() -> None:
    texts = {"a.md": "---\nx: 1\n---\n\n# A\n\nOne `thing` of [it](b.md). More.\n", "b.md": "# B\n\n## c { #d }\n"}
    sections = {"Start": [("A", "a.md")], "More": [("B", "b.md")]}
    index = llms.index("site", "What it is.", sections, texts)
    assert "# site\n\n> What it is.\n" in index and "## Start\n\n- [A](a.md): One thing of it.\n" in index
    assert llms.full(sections, texts).index("# A") < llms.full(sections, texts).index("## c\n")


def test_the_pages_are_made_by_a_process_of_their_own(generated) -> None:
    names = json.dumps(sorted(generated))
    assert names == json.dumps([f"reference/{name}.md" for name in ("api", "commands", "config", "metrics", "proto")])
    assert not any(pathlib.Path(pages.DOCS / name).exists() for name in generated)
    assert set(config_page.GROUPS) == {name.rpartition(".")[0] for name in config_page.anchors()}
