"""The held-out rows alone, as an evaluation reads them: those of a run, or all of each set that is named."""

from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.environments.load import load_held_out, load_rows
from tests.environments.test_load import jsonl


def rows(*numbers):
    return [{"prompt": f"{number}?", "answer": str(number)} for number in numbers]


def test_they_are_those_of_a_run(tokenizer, tmp_path):
    """Taken out of the training rows or not, alone or in a mixture in which an earlier one has some of its prompts."""
    config = Config()
    config.evaluation.prompts = 3
    first = EnvironmentConfig(name="math", train=jsonl(tmp_path / "a.jsonl", rows(*range(20))))
    second = EnvironmentConfig(name="math", train=jsonl(tmp_path / "b.jsonl", rows(*range(10, 30))))
    second.validation = jsonl(tmp_path / "c.jsonl", rows(*range(25, 40)))
    for mixture in ({"a": first}, {"b": second}, {"a": first, "b": second}, {"b": second, "a": first}):
        config.mixture = mixture
        held, _ = load_held_out(config, tokenizer)
        whole = load_rows(config, tokenizer).held_out
        assert [(row.index, row.environment, row.text) for row in held] == [
            (row.index, row.environment, row.text) for row in whole
        ]


def test_sets_that_are_named_are_whole_whatever_stands_beside_them(tokenizer, tmp_path):
    a = EnvironmentConfig(name="math", validation=jsonl(tmp_path / "a.jsonl", rows(1, 2, 3)))
    b = EnvironmentConfig(name="math", validation=jsonl(tmp_path / "b.jsonl", rows(2, 3, 4)))
    held, notes = load_held_out(Config(mixture={"a": a, "b": b}), tokenizer, apart=True)
    assert sorted(row.text for row in held if row.environment == "b") == ["2?", "3?", "4?"]
    assert [row.index for row in held] == list(range(6))
    assert notes == ["a: 3 prompts held out", "b: 3 prompts held out"]
