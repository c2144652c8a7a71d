"""What a run depends on beside its config is known again, and said by name where it has changed."""

import dataclasses
import json

import pytest

from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.environments import Row
from scalerl_jax.environments.curriculum import OtherPrompts
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.run import inputs
from scalerl_jax.run.continuing import changes
from scalerl_jax.run.inputs import changed, digests, explain_changed_prompts
from tests.support.tiny_task import write_model


def test_what_has_changed_is_named_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def reward(completion): return 1.0\n")
    (tmp_path / "ask.txt").write_text("Is {completion} right?")
    config = Config(mixture={"a": EnvironmentConfig(reward="mine.py:reward"), "b": EnvironmentConfig()})
    config.mixture["b"].judge.template = "ask.txt"
    rows, file = [Row("1?", "1"), Row("2?", "2")], str(tmp_path / "inputs.json")
    assert set(digests(config, rows)) == {"the held-out rows", "mine.py", "ask.txt"}
    assert changed(file, digests(config, rows)) == [] == changed(file, digests(config, rows))
    (tmp_path / "mine.py").write_text("def reward(completion): return 0.0\n")
    assert changed(file, digests(config, [rows[0], Row("2?", "3")])) == ["the held-out rows", "mine.py"]
    assert changed(file, digests(config, [rows[0], Row("2?", "3")])) == []  # from here on that is what it was
    assert changed(file, digests(config, rows), first=True) == []
    assert changed(file, digests(config, [rows[0], Row("2?", "3")])) == ["the held-out rows"]
    config.mixture["b"].reward = "other.py:reward"  # a config's field, which is compared as such
    assert changed(file, digests(config, [rows[0], Row("2?", "3")])) == []


def test_a_training_row_is_known_by_what_scores_it():
    rows = [Row("1?", "1", extra={"tests": ["a"]}), Row("2?", "2", extra={"tests": ["b"]})]
    other = [rows[0], Row("2?", "2", extra={"tests": ["c"]})]
    name = "the other columns of the training rows"
    assert digests(Config(), [], rows)[name] != digests(Config(), [], other)[name]
    assert name not in digests(Config(), [], [Row("1?", "1")])  # there are none


def test_other_training_prompts_are_put_down_to_a_field_or_to_a_file():
    def said(before, now):
        with pytest.raises(ValueError) as error, explain_changed_prompts(now, changes(dataclasses.asdict(before), now)):
            raise OtherPrompts(436, 1428)
        (line,) = str(error.value).splitlines()
        return line

    counts = "(436 when the checkpoint was made, 1,428 now)"
    before, now = Config(), Config(seed=3)  # another seed makes no other problems of files
    before.environment.train = now.environment.train = "train.jsonl"
    before.evaluation.prompts = now.evaluation.prompts = 64
    assert said(before, now) == (
        "config.environment.train=train.jsonl: the training rows are not those that the checkpoint was made with, "
        f"whose history it has {counts}: put the old rows back, or begin in another workdir"
    )
    now.environment.reward, now.evaluation.prompts = "mine.py:reward", 72
    assert said(before, now) == (
        "config.evaluation.prompts was 64 and is 72 now, and the training prompts are others by that "
        f"{counts}, whose history the checkpoint has: give the old value again, or begin in another workdir"
    )
    before.environment.validation = now.environment.validation = "held-out.jsonl"
    assert said(before, now).startswith(
        "config.environment.train=train.jsonl or config.environment.validation=held-out.jsonl: the training rows are"
    )
    assert said(Config(), Config(seed=3)).startswith("config.seed was 0 and is 3 now, and the training prompts are")
    before, now = (Config(mixture={"a": EnvironmentConfig(system_prompt=text)}) for text in ("", "Think."))
    assert said(before, now).startswith("config.mixture.a.system_prompt was '' and is 'Think.' now")
    assert said(now, now).startswith("config.environment.name=arithmetic: the training rows are not those")


def test_rows_that_were_looked_at_are_read_once(tmp_path):
    config = Config()
    config.model.path = write_model(str(tmp_path / "model"))
    config.environment.name, config.environment.train = "math", str(tmp_path / "train.jsonl")
    config.evaluation.prompts = 1
    tokenizer = Tokenizer(config.model.path)

    def write(answer):
        rows = [json.dumps({"prompt": f"{n}?", "answer": answer}) for n in range(4)]
        (tmp_path / "train.jsonl").write_text("\n".join(rows))

    def answers(rows):
        return {row.answer for row in rows}

    for look, read in (
        (lambda: inputs.preload(config), lambda: inputs.all_rows(config, tokenizer).train),
        (
            lambda: inputs.preload(config, held_out=True),
            lambda: inputs.held_out_rows(config, tokenizer, apart=False)[0],
        ),
    ):
        write("old")
        look()
        config.model.compute_dtype = "bfloat16"  # as it is settled at the start
        write("new")
        assert answers(read()) == {"old"}
        assert answers(read()) == {"new"}
        look()
        config.environment.prompt_suffix += " Put it in a box."
        write("other")
        assert answers(read()) == {"other"}
