"""Data sets of the hub without a network: what `hf download` has left is read; for the rest there is its command."""

import json
import os
import subprocess
import sys

import pyarrow
import pytest
from pyarrow import parquet

from scalerl_jax.environments.data import hub
from scalerl_jax.environments.data.row_files import files_of
from tests.support import ports
from tests.support.paths import ROOT

REVISION = 40 * "a"
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: other
  data_files:
  - {split: validation, path: other/validation-*}
---
"""
# Which splits each config of it has.
DEEPCODER = {"codeforces": ["test"], "lcbv5": ["train", "test"], "primeintellect": ["train"], "taco": ["train"]}


def rows(split, count):
    return [{"question": f"{split} {n}?", "answer": f"So #### {n}"} for n in range(count)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """HF_HOME as `hf download --repo-type=dataset openai/gsm8k` leaves it, and of a set of files beside a program."""
    home = tmp_path_factory.mktemp("hub")

    def snapshot(name):
        repository = home / "hub" / f"datasets--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(REVISION)
        folder = repository / "snapshots" / REVISION
        folder.mkdir(parents=True)
        return folder

    gsm8k = snapshot("openai/gsm8k")
    (gsm8k / "README.md").write_text(CARD)
    for config, split, count in (("main", "train", 300), ("main", "test", 3), ("other", "validation", 2)):
        (gsm8k / config).mkdir(exist_ok=True)
        table = pyarrow.Table.from_pylist(rows(f"{config} {split}", count))
        parquet.write_table(table, gsm8k / config / f"{split}-00000-of-00001.parquet")
    deepcoder = snapshot("agentica-org/DeepCoder-Preview-Dataset")
    lines = ["---", "configs:"]
    for config, splits in DEEPCODER.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split in splits:
            lines.append(f"  - {{split: {split}, path: {config}/{split}-*}}")
            (deepcoder / config).mkdir(exist_ok=True)
            table = pyarrow.Table.from_pylist([{"problem": f"{config} {split}?", "tests": "[]"}])
            parquet.write_table(table, deepcoder / config / f"{split}-00000-of-00001.parquet")
    (deepcoder / "README.md").write_text("\n".join((*lines, "---", "")))
    benchmark = snapshot("livecodebench/code_generation_lite")
    (benchmark / "code_generation_lite.py").write_text("raise SystemExit('a program of the data set was run')\n")
    for name in ("test.jsonl", "test2.jsonl", "test3.jsonl"):
        (benchmark / name).write_text(json.dumps({"question_content": f"{name}?", "public_test_cases": "[]"}) + "\n")
    return home


def read(cache, *asked, **variables):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "environments" / "data" / "hub_rows.py"],
        input=json.dumps(asked), capture_output=True, text=True, check=True, cwd=cache, timeout=600,
        env={**environment, "PYTHONPATH": str(ROOT), "HF_HOME": str(cache), **variables},
    )  # fmt: skip
    assert done.stderr == "", done.stderr  # no bars, no warnings of the libraries
    return json.loads(done.stdout)


@pytest.mark.slow
def test_what_has_been_downloaded_is_read_offline(cache):
    train, test, other, named, mine = read(
        cache,
        ("gsm8k", "train"),
        ("gsm8k", "validation"),
        ("openai/gsm8k@other", "validation"),
        ("openai/gsm8k@main#test", "train"),
        ("gsm8k:openai/gsm8k#test", "train"),
        HF_HUB_OFFLINE="1",
    )
    assert train == [[f"openai/gsm8k@main#train row {n + 1}", f"main train {n}?", f"{n}"] for n in range(300)]
    assert test == mine == [[f"openai/gsm8k@main#test row {n + 1}", f"main test {n}?", f"{n}"] for n in range(3)]
    assert [row[1:] for row in other] == [[f"other validation {n}?", f"So #### {n}"] for n in range(2)]
    assert [row[1:] for row in named] == [[f"main test {n}?", f"So #### {n}"] for n in range(3)]


@pytest.mark.slow
def test_what_is_not_there_gets_the_command_that_fetches_it(cache):
    absent, polaris, split, config, none = read(
        cache,
        ("me/mine", "train"),
        ("me/mine@a#b*2", "train"),
        ("gsm8k#nosplit", "train"),
        ("openai/gsm8k@third", "train"),
        ("openai/gsm8k", "train"),
        HF_DATASETS_OFFLINE="1",
    )
    assert absent == (
        "config.environment.train=me/mine: is no file or folder here, and is not in the hub's cache "
        "(HF_DATASETS_OFFLINE is set): hf download --repo-type=dataset me/mine"
    )
    assert polaris.startswith("config.environment.train=me/mine@a#b: is no file") and polaris.endswith(" me/mine")
    assert split.startswith("config.environment.train=gsm8k#nosplit: Unknown split") and "#SPLIT names one" in split
    assert config.startswith("config.environment.train=openai/gsm8k@third: BuilderConfig 'third' not found")
    assert none.startswith("config.environment.train=openai/gsm8k: Config name is missing") and "@CONFIG" in none
    assert not [line for line in (absent, polaris, split, config, none) if "\n" in line]


@pytest.mark.slow
def test_files_beside_a_program_are_read_as_they_are(cache, tmp_path):
    (found,) = read(cache, ("livecodebench", "validation"), HF_HUB_OFFLINE="1")
    assert [text for _, text, _ in found] == ["test.jsonl?", "test2.jsonl?", "test3.jsonl?"]
    (absent,) = read(tmp_path, ("livecodebench", "validation"), HF_HUB_OFFLINE="1")
    assert absent == (
        "config.environment.validation=livecodebench: is no file or folder here, and is not in the hub's cache "
        "(HF_HUB_OFFLINE is set): "
        "hf download --repo-type=dataset livecodebench/code_generation_lite --include='test*.jsonl'"
    )


def test_a_release_is_its_files_and_those_of_the_releases_before_it(cache):
    first, second, fourth, latest, split = read(
        cache,
        *((f"livecodebench{part}", "validation") for part in ("@release_v1", "@release_v2", "@release_v4")),
        ("livecodebench@release_latest", "validation"),
        ("livecodebench:livecodebench/code_generation_lite@release_v2#test", "validation"),
        HF_HUB_OFFLINE="1",
    )
    assert [text for _, text, _ in first] == ["test.jsonl?"]
    assert [text for _, text, _ in second] == ["test.jsonl?", "test2.jsonl?"]
    assert fourth.endswith("livecodebench/code_generation_lite test.jsonl test2.jsonl test3.jsonl test4.jsonl")
    assert latest == (
        "config.environment.validation=livecodebench@release_latest: @release_latest is not one of its releases, "
        "@release_v1, @release_v2, ..."
    )
    assert split.endswith("code_generation_lite@release_v2#test: #test says nothing of it: it has one split")


@pytest.mark.slow
def test_each_split_is_read_of_the_configs_that_have_it(cache):
    train, validation, test, one = read(
        cache,
        ("deepcoder", "train"),
        ("deepcoder", "validation"),
        ("deepcoder#test", "train"),
        ("deepcoder@lcbv5", "validation"),
        HF_HUB_OFFLINE="1",
    )
    assert [text for _, text, _ in train] == ["primeintellect train?", "taco train?", "lcbv5 train?"]
    assert validation == test and [text for _, text, _ in test] == ["codeforces test?", "lcbv5 test?"]
    assert [text for _, text, _ in one] == ["lcbv5 test?"]


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("me/mine", "me/mine"),
        ("me/mine@a.b#c", "me/mine@a.b#c"),
        ("me/data.v1_x", "me/data.v1_x"),
        ("me/mine.jsonl", None),
        ("data/train/more", None),
        ("./mine", None),
        ("/me/mine", None),
        ("mine", None),
        ("me/*", None),
    ],
)
def test_what_may_be_a_name_of_the_hub(tmp_path, monkeypatch, where, name):
    monkeypatch.chdir(tmp_path)
    assert (str(hub.parse(where)) if hub.parse(where) else None) == name
    if name:
        (tmp_path / where).mkdir(parents=True)
        assert hub.parse(where) is None


def test_a_name_of_a_folder_that_is_here_is_no_name_of_the_hub(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(cache))
    for folder in ("data", "openai", "me"):
        (tmp_path / folder).mkdir()
    (tmp_path / "data" / "train").mkdir()
    assert hub.parse("data/trian") is None and hub.parse("me/mine") is None
    assert str(hub.parse("data/trian#train")) == "data/trian#train"
    assert str(hub.parse("openai/gsm8k")) == "openai/gsm8k"  # which has been fetched
    assert str(hub.parse("you/mine")) == "you/mine"
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "datasets" / "me___mine").mkdir(parents=True)
    assert str(hub.parse("me/mine")) == "me/mine"  # which `datasets` has prepared
    with pytest.raises(
        ValueError, match=r"^train=data/trian: No such file or directory; did you mean data/train\? \(if"
    ):
        files_of("data/trian", "train")


def test_a_hub_that_cannot_be_reached_is_asked_once(tmp_path):
    asked = (("me/mine", "train"), ("gsm8k", "train"), ("livecodebench", "validation"))
    with ports.nowhere() as address:
        found = read(tmp_path, *asked, HF_ENDPOINT=f"http://{address}")  # and the libraries tell of no retries
    for line, name in zip(found, ("me/mine", "openai/gsm8k", "livecodebench/code_generation_lite"), strict=True):
        assert "is not in the hub's cache (the hub cannot be reached): hf download" in line and name in line


@pytest.mark.slow
def test_what_is_here_is_read_where_the_hub_cannot_be_reached(cache):
    with ports.nowhere() as address:
        (rows,) = read(cache, ("gsm8k#test", "train"), HF_ENDPOINT=f"http://{address}")
    assert [answer for _, _, answer in rows] == ["0", "1", "2"]
