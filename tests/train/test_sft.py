"""The warm start: what it trains on, what it writes, and that a kill changes nothing."""

import json
import os
import shutil

import numpy as np
import pytest

from scalerl_jax import sft
from scalerl_jax.cli.entry import UserError
from scalerl_jax.config import Config
from scalerl_jax.config_check import ConfigError
from scalerl_jax.config_io import load_file
from scalerl_jax.environments import arithmetic
from scalerl_jax.environments.tokenizer import Tokenizer, make_tokenizer
from scalerl_jax.learner.digests import fingerprint
from scalerl_jax.learner.packing import pack
from scalerl_jax.model import forward, load_hf, logits
from scalerl_jax.model.hf import to_hf
from scalerl_jax.model.lora import Lora, read_adapter
from scalerl_jax.traces import built_in, example, trace_files
from tests.train.warm_starts import killed_and_finished, rows_of, weights

CONFIG_FILE = """
from scalerl_jax.config import Config
def get_config():
    config = Config()
    config.model.compute_dtype = config.model.sync_dtype = "float32"
    config.model.remat = "none"
    config.environment.minimum_terms, config.environment.maximum_terms = 3, 4
    config.learner.micro_batch_rows = 8
    config.telemetry.tensorboard = False
    sft = config.sft
    sft.layers, sft.hidden_size, sft.heads, sft.kv_heads, sft.head_dim, sft.intermediate_size = 1, 32, 2, 1, 16, 64
    sft.max_steps, sft.rows_per_step, sft.seq_len, sft.warmup_steps = 60, 4, 128, 5
    sft.checkpoint_every, sft.log_every = 3, 2
    return config
"""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "tiny.py"
    path.write_text(CONFIG_FILE)
    return path


@pytest.fixture
def config(config_file):
    return load_file(str(config_file))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(
        corpus=built_in.corpus(Config()),
        path=str(tmp_path_factory.mktemp("tokenizer")),
        vocabulary=Config().sft.vocab_size,
    )


@pytest.fixture(scope="module")
def finished(config_file, tmp_path_factory):
    """A workdir in which the warm start ran through."""
    workdir = tmp_path_factory.mktemp("finished")
    sft.main(load_file(str(config_file)), str(workdir))
    return workdir


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ---- What it trains on ---------------------------------------------------------------------------------------------


def test_an_update_is_a_function_of_seed_and_number_and_fills_its_rows(config, tokenizer):
    config.sft.rows_per_step, config.sft.seq_len = 8, 256
    traces = built_in.BuiltInTraces(config, tokenizer)
    batch = traces.batch(7)
    again = built_in.BuiltInTraces(config, tokenizer).batch(7)
    assert [e.tokens.tolist() for e in batch] == [e.tokens.tolist() for e in again]
    assert batch[0].tokens.tolist() != traces.batch(8)[0].tokens.tolist()
    micro_batches, _ = pack(example.segments(batch), length=256, rows=8)
    assert len(micro_batches) == 1
    assert (micro_batches[0].segment_ids > 0).mean() > 0.85
    assert max(len(e.tokens) for e in batch) <= traces.longest


def test_loss_tokens_are_the_completion_without_prompt_and_forced_phrase(config, tokenizer):
    config.sft.rows_per_step, config.sft.seq_len = 32, 512
    batch = built_in.BuiltInTraces(config, tokenizer).batch(0)
    phrase = tokenizer.encode(config.rollout.interruption_text)
    interrupted = 0
    for trace in batch:
        text = tokenizer.decode(trace.tokens[trace.trained].tolist())
        context = tokenizer.decode(trace.tokens[~trace.trained].tolist())
        assert text.startswith("<think>") and text.endswith("<|endoftext|>")
        prompt, _, forced = context.partition("=")
        assert forced in ("", config.rollout.interruption_text)
        interrupted += bool(forced)
        assert not arithmetic.held_out(_problem(prompt + "="))
        assert bool(forced) == (sum(trace.tokens == phrase[0]) == 1)
    assert interrupted > 0
    total = sum(float(s.weights.sum()) for s in example.segments(batch))
    np.testing.assert_allclose(total, 1.0, rtol=1e-5)


def _problem(text):
    terms = text.rstrip("=").replace("-", "+-").split("+")
    return arithmetic.Problem(int(terms[0]), tuple(int(t) for t in terms[1:]))


def test_without_thinking_no_trace_is_interrupted(config, tokenizer):
    config.rollout.thinking_budget_min = config.rollout.thinking_budget_max = 0
    config.sft.rows_per_step, config.sft.seq_len = 32, 512
    for trace in built_in.BuiltInTraces(config, tokenizer).batch(0):
        assert tokenizer.decode(trace.tokens[~trace.trained].tolist()).endswith("=")


def test_file_traces_come_epoch_after_epoch_and_resume_at_any_update(config, tokenizer, tmp_path):
    config.sft.rows_per_step, config.sft.seq_len = 1, 16
    rows = [{"prompt": f"{i:03d}?", "completion": f"{i}"} for i in range(10)]
    config.sft.traces = write_rows(tmp_path / "traces.jsonl", rows)
    traces = trace_files.FileTraces(config, tokenizer, str(tmp_path / "tokens"))
    batches = [[e.tokens.tolist() for e in traces.batch(update)] for update in range(20)]
    resumed = trace_files.FileTraces(config, tokenizer, str(tmp_path / "tokens"))
    for update in (13, 14, 3):
        assert [e.tokens.tolist() for e in resumed.batch(update)] == batches[update]
    seen = [tokenizer.decode(tokens)[:3] for batch in batches for tokens in batch]
    for epoch in range(len(seen) // 10):
        assert sorted(seen[10 * epoch : 10 * epoch + 10]) == [f"{i:03d}" for i in range(10)]
    assert seen[:10] != seen[10:20]


# ---- What it writes ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_loss_falls_and_the_folder_is_one_that_transformers_loads(finished):
    rows = rows_of(finished)
    assert [row["step"] for row in rows] == list(range(2, 61, 2))
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]

    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    folder = str(finished / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    assert theirs.generation_config.eos_token_id == 0
    ids = transformers.AutoTokenizer.from_pretrained(folder)("31+8-3=")["input_ids"]
    assert ids == Tokenizer(folder).encode("31+8-3=")
    config, params = load_hf(folder)
    tokens = np.asarray([ids], np.int32)
    hidden = forward(params, config, tokens, np.arange(len(ids))[None], np.ones_like(tokens))
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(np.asarray(logits(params, config, hidden))[0], expected, atol=1e-4)


def test_once_more_with_the_model_there_does_nothing(finished, config, capsys):
    before = os.stat(finished / "model").st_mtime_ns
    config.optimizer.learning_rate = 1.0  # of no concern to the warm start
    sft.main(config, str(finished))
    assert "is there already" in capsys.readouterr().out
    assert os.stat(finished / "model").st_mtime_ns == before


def test_a_workdir_of_another_warm_start_is_refused(finished, config):
    config.sft.error_rate = 0.5
    with pytest.raises(ConfigError, match=r"config\.sft\.error_rate is 0\.2 there and 0\.5 now"):
        sft.main(config, str(finished))


def copy_of(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "copy")


def test_a_finished_warm_start_goes_on_where_more_updates_are_allowed(finished, config, tmp_path, capfd):
    work = copy_of(finished, tmp_path)
    config.sft.max_steps = 66
    with pytest.raises(ConfigError, match=r"--allow=sft\.max_steps"):
        sft.main(config, str(work))
    sft.main(config, str(work), allow=[" sft.max_steps"])
    assert "from update 57" in capfd.readouterr().err  # the newest checkpoint
    assert weights(work) != weights(finished)
    assert [row["step"] for row in rows_of(work)] == list(range(2, 67, 2))
    assert json.loads((work / "config.json").read_text())["sft"]["max_steps"] == 66
    assert sorted(path.name for path in work.glob("model*")) == ["model"]
    sft.main(config, str(work))
    assert "is there already" in capfd.readouterr().out


def test_killed_while_it_makes_the_model_again_it_goes_on(finished, config, tmp_path, monkeypatch):
    work = copy_of(finished, tmp_path)
    config.sft.max_steps = 62

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as delta:
        delta.setattr(sft, "write_model_folder", killed)
        with pytest.raises(KeyboardInterrupt):
            sft.main(config, str(work), allow=["sft.max_steps"])
    assert weights(work) == weights(finished)  # whole, until another one is
    sft.main(config, str(work))  # the config is no other now
    assert weights(work) != weights(finished)


def test_fewer_updates_than_are_made_are_refused(finished, config, tmp_path):
    config.sft.max_steps = 10
    with pytest.raises(ConfigError, match=r"config\.sft\.max_steps=10: the checkpoint in .* has 57 already"):
        sft.main(config, str(copy_of(finished, tmp_path)), allow=["sft.max_steps"])


def test_the_precision_of_the_head_is_the_warm_starts_too(finished, config):
    config.model.head_precision = "highest"
    with pytest.raises(ConfigError, match=r"config\.model\.head_precision is 'default' there and 'highest' now"):
        sft.main(config, str(finished))


def test_a_slip_in_allow_is_told_at_the_first_start(config, tmp_path):
    with pytest.raises(ConfigError, match=r"--allow=foo: config has no field 'foo'"):
        sft.main(config, str(tmp_path / "new"), allow=["seed", "foo"])
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_killed_and_started_again_it_ends_with_the_same_weights(finished, config_file, tmp_path):
    killed_and_finished(tmp_path, config_file)
    assert weights(tmp_path) == weights(finished)
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(2, 61, 2))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(8, marks=pytest.mark.long)])
def test_traces_of_a_file_are_learnt_also_from_a_given_model(config, finished, tmp_path, rank):
    answers = {"capital of France?": "Paris", "two and two?": "4", "colour of snow?": "white"}
    rows = [{"prompt": p, "completion": f"<think>known</think>{a}"} for p, a in answers.items()]
    config.sft.traces = write_rows(tmp_path / "traces.jsonl", rows)
    config.sft.model_path = str(finished / "model")
    config.sft.max_steps, config.sft.learning_rate = 80, 1e-2
    config.lora.rank = rank
    sft.main(config, str(tmp_path / "work"))
    tokenizer = Tokenizer(str(tmp_path / "work" / "model"))
    decoder, params = load_hf(str(tmp_path / "work" / "model"))
    for row in rows:
        prompt = tokenizer.encode(row["prompt"])
        ids = np.asarray(prompt + tokenizer.encode(row["completion"]) + [tokenizer.eos_id], np.int32)[None]
        hidden = forward(params, decoder, ids, np.arange(ids.shape[1])[None], np.ones_like(ids))
        best = np.asarray(logits(params, decoder, hidden)).argmax(-1)[0]
        assert best[len(prompt) - 1 : -1].tolist() == ids[0, len(prompt) :].tolist()
    if rank:  # the adapter lies beside the model, which is what it makes of the one before
        frozen = load_hf(config.sft.model_path, dtype=config.model.sync_dtype)[1]
        lora = Lora.of(decoder, rank=rank, alpha=config.lora.alpha, targets="all-linear", folder="", seed=0)
        merged = lora.join(read_adapter(str(tmp_path / "work" / "adapter"), lora, base=fingerprint(frozen)), frozen)
        wanted = to_hf(params, decoder, config.model.sync_dtype)
        for name, value in to_hf(merged, decoder, config.model.sync_dtype).items():
            np.testing.assert_array_equal(value, wanted[name])
    assert (tmp_path / "work" / "adapter").exists() == bool(rank)


# ---- What the user got wrong ---------------------------------------------------------------------------------------


def test_mistakes_in_files_are_named_and_leave_no_model(config, tmp_path):
    config.sft.traces = write_rows(tmp_path / "t.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "a"}])
    with pytest.raises(
        UserError, match=r"t\.jsonl row 2: is no trace .keys: prompt; wanted: prompt and completion, or messages"
    ):
        sft.main(config, str(tmp_path / "a"))
    config.sft.traces = write_rows(tmp_path / "long.jsonl", [{"prompt": "a", "completion": "b " * 200}])
    with pytest.raises(UserError, match=r"long\.jsonl row 1: has \d+ tokens, a row holds 129"):
        sft.main(config, str(tmp_path / "b"))
    config.sft.traces = ""
    config.sft.model_file = str(tmp_path / "absent.json")
    with pytest.raises(UserError, match=r"config\.sft\.model_file=.*absent\.json: No such file"):
        sft.main(config, str(tmp_path / "c"))
    (tmp_path / "small.json").write_text(json.dumps(_qwen3(vocabulary=100)))
    config.sft.model_file = str(tmp_path / "small.json")
    with pytest.raises(UserError, match=r"the decoder has 100 tokens, the tokenizer \d+"):
        sft.main(config, str(tmp_path / "d"))
    assert not [path for path in tmp_path.rglob("model*") if path.is_dir()]


def _qwen3(vocabulary):
    return {
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
    }


def test_a_model_of_the_hub_that_is_no_folder_gets_the_command_that_fetches_it(config, tmp_path):
    config.sft.model_path = "Qwen/Qwen3-0.6B"
    told = r"^config\.sft\.model_path=Qwen/Qwen3-0\.6B: no such folder; .*: hf download Qwen/Qwen3-0\.6B --local-dir="
    with pytest.raises(UserError, match=told):
        sft.main(config, str(tmp_path))
