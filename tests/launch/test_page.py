"""The commands of docs/how_to/kubernetes.md, slurm.md and distillation.md are taken, and print what the pages say."""

import pathlib
import re
import shlex

import pytest

from tests.launch.launched import launch
from tests.support.paths import ROOT

HOW_TO = pathlib.Path(ROOT) / "docs" / "how_to"
PAGE, SLURM, DISTILLATION = ((HOW_TO / f"{name}.md").read_text() for name in ("kubernetes", "slurm", "distillation"))
# A whole command, and the block of its output that comes next.
_COMMAND = re.compile(
    r"^```sh\n(scalerl-launch (?:[^\n]*\\\n)*[^\n]*)\n```\n\n(?:prints\n\n)?```text\n(.*?)```", re.DOTALL | re.MULTILINE
)
SHOWN = [shown for page in (PAGE, SLURM, DISTILLATION) for shown in _COMMAND.findall(page)]


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=["kubernetes", "slurm", "teachers"])
def test_a_launch_prints_what_the_page_shows(command: str, output: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "configs").symlink_to(pathlib.Path(ROOT) / "configs")
    for file in ("token", "a.pem", "c.pem", "k.pem"):
        (tmp_path / file).write_text("x")
    result = launch(*shlex.split(command.replace("\\\n", ""))[1:], where=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == output


def test_the_trainers_command_is_the_rendered_one(tmp_path: pathlib.Path) -> None:
    (tmp_path / "configs").symlink_to(pathlib.Path(ROOT) / "configs")
    launch(*shlex.split(SHOWN[0][0].replace("\\\n", ""))[1:], "--out=made", where=tmp_path)
    rendered = re.findall(r"^ +- (--\S+)$", (tmp_path / "made" / "trainer.yaml").read_text(), flags=re.MULTILINE)
    (shown,) = re.findall(r"^  (scalerl-train --config=.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert shown.split()[1:] == rendered


def test_the_mistakes_are_worded_so(tmp_path: pathlib.Path) -> None:
    (tmp_path / "configs").symlink_to(pathlib.Path(ROOT) / "configs")
    shown = re.findall(r"^error: .*$", PAGE, flags=re.MULTILINE)
    shown += re.findall(r"^error: --target.*$", SLURM, flags=re.MULTILINE)
    common = ("--config=configs/scalerl_8b.py", "--generator=h100:1")
    first = launch("--target=kubernetes", "--trainer=v5p:4x4", *common, where=tmp_path)
    second = launch(
        "--target=slurm", "--trainer=h200:2x8", "--insecure", *common, where=tmp_path, variables={"PATH": str(tmp_path)}
    )
    no_sbatch = second.stderr.strip()  # on both pages
    assert [first.stderr.strip(), no_sbatch, no_sbatch] == shown


def test_every_metric_on_the_page_is_told() -> None:
    from tests.launch.test_grafana import told

    known, prefix = told(), ""
    for row in re.findall(r"^\| (`scalerl_.*?) \|", PAGE, flags=re.MULTILINE):
        for name in re.findall(r"`(\w+)(?:\{.*?\})?`", row):
            if name.startswith("scalerl_"):
                prefix = "_".join(name.split("_")[:2])
            full = name if name.startswith("scalerl_") else prefix + name
            assert full in known, full


def test_the_page_links_to_what_there_is() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", PAGE + SLURM):
        assert (HOW_TO / target).exists(), target
