"""What a run depends on beside its config is known again, and said by name where it has changed."""

from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.environments import Row
from scalerl_jax.run.inputs import changed, digests


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
    assert changed(file, digests(config, rows), anew=True) == []
    assert changed(file, digests(config, [rows[0], Row("2?", "3")])) == ["the held-out rows"]
    config.mixture["b"].reward = "other.py:reward"  # a config's field, which is compared as such
    assert changed(file, digests(config, [rows[0], Row("2?", "3")])) == []


def test_a_training_row_is_known_by_what_scores_it():
    rows = [Row("1?", "1", extra={"tests": ["a"]}), Row("2?", "2", extra={"tests": ["b"]})]
    other = [rows[0], Row("2?", "2", extra={"tests": ["c"]})]
    name = "the other columns of the training rows"
    assert digests(Config(), [], rows)[name] != digests(Config(), [], other)[name]
    assert name not in digests(Config(), [], [Row("1?", "1")])  # there are none
