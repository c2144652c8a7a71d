"""The warm start of a chat model on chats: what it writes down, what it depends on, and that a kill changes nothing."""

import dataclasses

import numpy as np
import pytest

from scalerl_jax import sft
from scalerl_jax.cli.entry import UserError
from scalerl_jax.config import Config, EnvironmentConfig
from scalerl_jax.config_check import ConfigError
from scalerl_jax.config_io import load_file
from scalerl_jax.environments.prompts import Prompts
from scalerl_jax.environments.tokenizer import Tokenizer
from scalerl_jax.model import forward, load_hf, logits
from scalerl_jax.traces import trace_files
from tests.support.chat_folders import chat_folder
from tests.support.models import random_tensors, toy_decoder, write_folder
from tests.train.warm_starts import killed_and_finished, rows_of, weights

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

CONFIG_FILE = """
from scalerl_jax.config import Config
def get_config():
    config = Config()
    config.model.compute_dtype = config.model.sync_dtype = "float32"
    config.model.remat = "none"
    config.learner.micro_batch_rows = 4
    config.telemetry.tensorboard = False
    sft = config.sft
    sft.model_path, sft.traces = {model!r}, {traces!r}
    sft.max_steps, sft.rows_per_step, sft.seq_len, sft.warmup_steps, sft.learning_rate = 36, 4, 128, 5, 1e-2
    sft.checkpoint_every, sft.log_every, sft.evaluation_traces, sft.evaluation_every = 3, 4, 6, 10
    return config
"""


def chat(i):
    thought = f"<think>\n{i} and one.\n</think>\n\n{i + 1}"
    return [{"role": "user", "content": f"{i}+1?"}, {"role": "assistant", "content": thought}]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    """Of a model folder with Qwen3's template, and 60 chats in a Parquet file."""
    folder = tmp_path_factory.mktemp("chats")
    (folder / "model").mkdir()
    tokenizer = chat_folder(folder / "model", "qwen3")
    kept = (folder / "model" / "tokenizer.json").read_text()
    stop = (tokenizer.encode("<|im_end|>")[0],)
    decoder = toy_decoder(vocab_size=tokenizer.vocabulary, family="qwen3", stop_token_ids=stop)
    tensors = {name: tensor * 0.2 for name, tensor in random_tensors(decoder, 0).items()}
    write_folder(folder / "model", decoder, tensors)
    (folder / "model" / "tokenizer.json").write_text(kept)
    parquet.write_table(pyarrow.table({"messages": [chat(i) for i in range(60)]}), folder / "chats.parquet")
    path = folder / "config.py"
    path.write_text(CONFIG_FILE.format(model=str(folder / "model"), traces=str(folder / "chats.parquet")))
    return path


@pytest.fixture
def config(config_file):
    return load_file(str(config_file))


@pytest.fixture(scope="module")
def finished(config_file, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    sft.main(load_file(str(config_file)), str(workdir))
    return workdir


@pytest.mark.slow
def test_evaluations_are_written_beside_the_losses_and_fall(finished):
    rows = rows_of(finished)
    assert [row["step"] for row in rows] == [0, 4, 8, 10, 12, 16, 20, 24, 28, 30, 32, 36]
    evaluated = {row["step"]: row["evaluation_loss"] for row in rows if "evaluation_loss" in row}
    assert list(evaluated) == [0, 10, 20, 30, 36]
    assert "loss" not in rows[0] and evaluated[0] > evaluated[10]
    assert evaluated[36] < 0.7 * evaluated[10]


@pytest.mark.slow
def test_the_evaluation_loss_is_that_of_the_assistant_s_tokens(finished, config):
    """By hand, from the model that was written and the chats with the lowest hashes."""
    from scalerl_jax.traces.trace_files import FileTraces

    folder = str(finished / "model")
    tokenizer = Tokenizer(folder)
    decoder, params = load_hf(folder)
    total = count = 0
    held_out = FileTraces(config, tokenizer, str(finished / "traces")).evaluation()
    for example in held_out:
        text = tokenizer.decode(example.tokens.tolist())
        prompt, _, said = text.partition("<|im_start|>assistant\n")
        begin = len(tokenizer.encode(prompt + "<|im_start|>assistant\n"))
        assert said.startswith("<think>\n") and text.endswith("<|im_end|>")
        ids = example.tokens[None]
        hidden = forward(params, decoder, ids, np.arange(ids.shape[1])[None], np.ones_like(ids))
        scores = np.asarray(logits(params, decoder, hidden), np.float64)[0]
        logp = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        total -= logp[np.arange(begin - 1, len(example.tokens) - 1), example.tokens[begin:]].sum()
        count += len(example.tokens) - begin
    assert len(held_out) == 6
    assert rows_of(finished)[-1]["evaluation_loss"] == pytest.approx(total / count, rel=1e-4)


def test_the_model_answers_the_prompt_that_a_rollout_asks(finished, config):
    """And the folder that is written has the template."""
    tokenizer = Tokenizer(str(finished / "model"))
    decoder, params = load_hf(str(finished / "model"))
    asked = Prompts(config, tokenizer).ask([{"role": "user", "content": "7+1?"}])
    ids = np.asarray(tokenizer.encode(asked), np.int32)[None]
    hidden = forward(params, decoder, ids, np.arange(ids.shape[1])[None], np.ones_like(ids))
    best = int(np.asarray(logits(params, decoder, hidden))[0, -1].argmax())
    assert tokenizer.decode([best]) == "<think>"


@pytest.mark.slow
def test_killed_and_started_again_it_ends_with_the_same_model(finished, config_file, tmp_path):
    assert "54 traces, " in killed_and_finished(tmp_path, config_file)
    assert weights(tmp_path) == weights(finished)
    losses = [(row["step"], row.get("loss"), row.get("evaluation_loss")) for row in rows_of(tmp_path)]
    assert losses == [(row["step"], row.get("loss"), row.get("evaluation_loss")) for row in rows_of(finished)]


def test_how_prompts_are_rendered_is_part_of_the_warm_start(finished, config):
    config.environment.system_prompt = "Be brief."
    with pytest.raises(ConfigError, match=r"config\.environment\.system_prompt is '' there and 'Be brief\.' now"):
        sft.main(config, str(finished))


def test_what_it_depends_on():
    """Of a mixture the environments that make their traces; with traces of files how prompts are rendered."""
    mixture = {
        "a": EnvironmentConfig(weight=2.0, minimum_terms=4, verifier_processes=7),
        "b": EnvironmentConfig(name="math", train="x.jsonl"),
    }
    kept = sft.relevant(Config(mixture=mixture))
    assert kept.mixture == {"a": EnvironmentConfig(weight=2.0, minimum_terms=4)}
    asked = EnvironmentConfig(name="math", train="x.jsonl", prompt_suffix="!", minimum_terms=4)
    config = Config(environment=asked)
    config.sft.traces = "y.jsonl"
    assert sft.relevant(config).environment == EnvironmentConfig(prompt_suffix="!")
    both = dataclasses.replace(config, mixture=mixture)
    assert sft.relevant(both).mixture == {} and sft.relevant(both).environment == EnvironmentConfig()
    for part in mixture.values():
        part.system_prompt = "Be brief."
    assert sft.relevant(both).environment == EnvironmentConfig(system_prompt="Be brief.")


def test_file_traces_beside_a_mixture_whose_parts_ask_otherwise_are_refused(config, tmp_path):
    config.mixture = {"a": EnvironmentConfig(), "b": EnvironmentConfig(system_prompt="Be brief.")}
    with pytest.raises(UserError, match=r"^config\.sft\.traces=.*config\.mixture\.b\.system_prompt='Be brief\.'$"):
        sft.main(config, str(tmp_path / "work"))
    assert not (tmp_path / "work").exists()


def test_whether_the_run_interrupts_is_part_of_traces_made_here():
    config = Config()
    config.rollout.length_control = "penalty"
    assert sft.relevant(config).rollout.length_control == "penalty"
    config.sft.traces = "y.jsonl"
    assert sft.relevant(config).rollout.length_control == "interrupt"


def test_killed_before_and_behind_a_checkpoint_it_takes_no_update_again(config, tmp_path, monkeypatch):
    """And the evaluation before the first update is written once."""
    config.sft.max_steps = 4
    taken, stops = [], [2, 6]

    def fill(*given, real=trace_files.fill, **fields):
        taken.append(0)
        return real(*given, **fields)

    def killed(examples, real=sft.segments):
        if len(taken) in stops:
            raise KeyboardInterrupt
        return real(examples)

    monkeypatch.setattr(trace_files, "fill", fill)
    monkeypatch.setattr(sft, "segments", killed)
    for _ in stops:
        with pytest.raises(KeyboardInterrupt):
            sft.main(config, str(tmp_path))
    sft.main(config, str(tmp_path))
    assert len(taken) == 7  # two; four, and a checkpoint behind the third; the last one
    assert [(row["step"], "evaluation_loss" in row) for row in rows_of(tmp_path)] == [(0, True), (4, True)]


def test_schedules():
    config = Config()
    config.sft.warmup_steps, config.sft.max_steps, config.sft.learning_rate = 10, 100, 1.0
    cosine = sft.schedule_of(config)
    config.sft.schedule = "constant"
    constant = sft.schedule_of(config)
    assert [float(constant(step)) for step in (0, 5, 10, 55, 100)] == [0.0, 0.5, 1.0, 1.0, 1.0]
    assert [float(cosine(step)) for step in (0, 5, 10, 55, 100)] == pytest.approx([0.0, 0.5, 1.0, 0.55, 0.1])
    config.sft.warmup_steps = 0
    for config.sft.schedule in ("cosine", "constant"):
        assert float(sft.schedule_of(config)(0)) == 1.0


def test_chats_need_a_template(config, tmp_path):
    """A new decoder's tokenizer, made from the traces, has none."""
    config.sft.model_path = ""
    with pytest.raises(UserError, match=r"chats\.parquet row 1: the prompt is messages, and .* has no chat template"):
        sft.main(config, str(tmp_path))
    assert not (tmp_path / "model").exists() and not (tmp_path / "traces").exists()
    config.sft.vocab_size += 1  # nothing is trained yet, so the config may change
    with pytest.raises(UserError, match=r"has no chat template"):
        sft.main(config, str(tmp_path))
