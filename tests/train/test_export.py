"""A run's policy as a Hugging Face folder: transformers computes what we compute; whole, or not at all."""

import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from scalerl_jax.cli import entry
from scalerl_jax.config import Config
from scalerl_jax.environments.tokenizer import make_tokenizer
from scalerl_jax.export import export
from scalerl_jax.gateway import command as gateway
from scalerl_jax.learner.checkpoint import Checkpoints
from scalerl_jax.model import DecoderConfig, abstract_params, forward, load_hf, logits
from scalerl_jax.model.hf import to_hf
from scalerl_jax.model.hf_folder import write_model_folder
from scalerl_jax.model.tensor_layout import hf_tensors
from scalerl_jax.run.folder import RunFolder
from scalerl_jax.system import files
from tests.support.processes import run_command

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
}
QWEN3_TIED = DecoderConfig(**SIZES, family="qwen3", tied_embeddings=True, stop_token_ids=(2,))
QWEN3_MILLION = dataclasses.replace(QWEN3_TIED, rope_theta=1e6)
LLAMA3_UNTIED = DecoderConfig(
    **SIZES,
    family="llama",
    tied_embeddings=False,
    rope_theta=500_000.0,
    rope_scaling=(8.0, 1.0, 4.0, 64.0),
    stop_token_ids=(2, 5),
)


def make_params(decoder, seed):
    """Norms are not all ones here, which would hide one that is lost or misplaced."""
    rng = np.random.default_rng(seed)
    scales = {"final_norm": 1.0, "attention_norm": 1.0, "mlp_norm": 1.0, "query_norm": 1.0, "key_norm": 1.0}

    def draw(path, leaf):
        return jnp.asarray(scales.get(path[-1].key, 0.0) + 0.2 * rng.normal(size=leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(decoder))


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("tokenizer"))
    make_tokenizer(corpus=["3+8-4=7\n"] * 5, path=path, vocabulary=300)
    return path


def make_run(tmp_path, decoder, tokenizer_dir):
    """A start model and a run from it, with checkpoints at steps 4 and 8; returns (workdir, params at step 8)."""
    start = str(tmp_path / "start")
    write_model_folder(start, params=make_params(decoder, 0), decoder=decoder, tokenizer_dir=tokenizer_dir)
    config = Config()
    config.model.path, config.model.sync_dtype, config.telemetry.tensorboard = start, "float32", False
    by_step = {step: make_params(decoder, step) for step in (4, 8)}
    with RunFolder(tmp_path / "run", config) as run:
        run.resume(0)
        checkpoints = Checkpoints(run.path("checkpoints"), keep=2)
        for step, params in by_step.items():
            state = {"params": params, "opt_state": optax.adamw(1e-3).init(params), "step": jnp.int32(step)}
            checkpoints.save(step, state, manifest={}, arrays={"history": np.arange(3)})
        checkpoints.close()
    return str(tmp_path / "run"), by_step[8]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokenizer_dir):
    """(workdir, params at step 8) by decoder; read only."""
    return {d: make_run(tmp_path_factory.mktemp("run"), d, tokenizer_dir) for d in (QWEN3_TIED, LLAMA3_UNTIED)}


@pytest.fixture
def start(tmp_path, runs):
    """A copy of the start model of the Qwen3 run, to be changed."""
    copy = tmp_path / "start"
    shutil.copytree(os.path.join(os.path.dirname(runs[QWEN3_TIED][0]), "start"), copy)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("decoder", [QWEN3_TIED, LLAMA3_UNTIED], ids=["qwen3-tied", "llama3-untied"])
def test_transformers_computes_the_same_logits(tmp_path, runs, decoder):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    workdir, params = runs[decoder]
    out = str(tmp_path / "out")
    assert export(workdir=workdir, out=out) == 8

    tokens = np.random.default_rng(0).integers(0, decoder.vocab_size, (2, 96))
    positions = np.broadcast_to(np.arange(96), tokens.shape)
    hidden = forward(params, decoder, tokens, positions, np.ones_like(tokens))
    ours = np.asarray(logits(params, decoder, hidden))
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)).logits.numpy()
    assert np.abs(ours - theirs).max() < 1e-4 < np.abs(ours).max()
    assert model.config.tie_word_embeddings == decoder.tied_embeddings

    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer.encode("3+8-4=\n")) == "3+8-4=\n"
    stops = model.generation_config.eos_token_id
    assert stops == (2 if decoder is QWEN3_TIED else [2, 5])
    # And our own reader gets back what was saved, to the bit.
    again_config, again = load_hf(out)
    assert again_config == decoder
    assert jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y), again, params))


def test_the_run_s_wire_dtype_is_what_is_written(tmp_path, runs):
    workdir, params = runs[QWEN3_TIED]
    export(workdir=workdir, out=str(tmp_path / "bf16"), dtype="bfloat16")
    stored = load_file(tmp_path / "bf16" / "model.safetensors")
    expected = jax.jit(lambda p: to_hf(p, QWEN3_TIED, jnp.bfloat16))(params)
    assert stored.keys() == expected.keys()
    assert all(stored[name].dtype == jnp.bfloat16 and np.array_equal(stored[name], expected[name]) for name in stored)
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"
    export(workdir=workdir, out=str(tmp_path / "default"))
    assert load_file(tmp_path / "default" / "model.safetensors")["model.norm.weight"].dtype == np.float32


def test_large_models_are_cut_into_files(tmp_path, tokenizer_dir):
    params, out = make_params(LLAMA3_UNTIED, 1), tmp_path / "out"
    write_model_folder(str(out), params=params, decoder=LLAMA3_UNTIED, tokenizer_dir=tokenizer_dir, shard_bytes=50_000)
    files = sorted(name for name in os.listdir(out) if name.endswith(".safetensors"))
    assert len(files) >= 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shapes = hf_tensors(LLAMA3_UNTIED)
    assert index["metadata"]["total_size"] == sum(4 * int(np.prod(shape)) for shape in shapes.values())
    stored = {name: load_file(out / name) for name in files}
    assert {name: file for file, tensors in stored.items() for name in tensors} == index["weight_map"]
    assert index["weight_map"].keys() == shapes.keys()
    assert all(sum(x.nbytes for x in tensors.values()) <= 50_000 or len(tensors) == 1 for tensors in stored.values())
    assert jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y), load_hf(str(out))[1], params))


def test_what_the_start_model_says_is_kept(tmp_path, runs, start):
    for name, extra in (("config.json", {"pad_token_id": 7}), ("generation_config.json", {"max_length": 99})):
        (start / name).write_text(json.dumps({**json.loads((start / name).read_text()), **extra}))
    export(workdir=runs[QWEN3_TIED][0], out=str(tmp_path / "out"), model=str(start))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"] == 7
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["max_length"] == 99


@pytest.mark.parametrize("left_out", [("rope_theta", "rope_scaling"), ("rope_parameters",)])
@pytest.mark.parametrize("decoder", [QWEN3_MILLION, LLAMA3_UNTIED], ids=["qwen3", "llama3"])
def test_rope_is_written_as_old_and_new_libraries_read_it(tmp_path, tokenizer_dir, decoder, left_out):
    """transformers 4 does not know of rope_parameters, and takes a theta of 10,000 without a word."""
    params, start, out = make_params(decoder, 0), tmp_path / "start", tmp_path / "out"
    write_model_folder(str(start), params=params, decoder=decoder, tokenizer_dir=tokenizer_dir)
    written = json.loads((start / "config.json").read_text())
    own = {key: value for key, value in written.items() if key not in (*left_out, "torch_dtype")}
    (start / "config.json").write_text(json.dumps(own | {"pad_token_id": 3}))
    write_model_folder(str(out), params=params, decoder=decoder, tokenizer_dir=str(start))
    found = json.loads((out / "config.json").read_text())
    assert found == written | {"pad_token_id": 3}
    scaled = decoder.rope_scaling is not None
    assert found["rope_theta"] == found["rope_parameters"]["rope_theta"] == decoder.rope_theta
    assert bool(found["rope_scaling"]) == scaled
    if scaled:
        assert found["rope_scaling"] | {"rope_theta": decoder.rope_theta} == found["rope_parameters"]
    transformers = pytest.importorskip("transformers")
    for folder in (start, out):
        theirs = transformers.AutoConfig.from_pretrained(folder).rope_parameters
        assert theirs == found["rope_parameters"]


def test_whole_or_not_at_all(tmp_path, runs, start):
    workdir, _ = runs[QWEN3_TIED]
    before = sorted(os.listdir(tmp_path))
    (start / "generation_config.json").write_text("{")  # is read after the weights are written
    with pytest.raises(entry.UserError, match=r"generation_config\.json"):
        export(workdir=workdir, out=str(tmp_path / "out"), model=str(start))
    assert sorted(os.listdir(tmp_path)) == before
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = tmp_path / f"out.{ended.pid}-0.tmp"
    for folder in (left, tmp_path / "out.tmp"):  # of a process that was killed; of the user
        folder.mkdir()
        (folder / "left.safetensors").write_text("")
    (start / "generation_config.json").unlink()
    export(workdir=workdir, out=str(tmp_path / "out"), model=str(start))
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "out", "out.tmp"]) and os.listdir(tmp_path / "out.tmp")
    assert "left.safetensors" not in os.listdir(tmp_path / "out")
    modes = {os.stat(tmp_path / "out" / name).st_mode for name in os.listdir(tmp_path / "out")}
    assert len(modes) == 1  # who may read the config may read the weights


def test_mistakes_are_one_line(tmp_path, runs, tokenizer_dir):
    workdir, _ = runs[QWEN3_TIED]
    out = str(tmp_path / "out")
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copyfile(os.path.join(workdir, "config.json"), empty / "config.json")
    for arguments, message in (
        ({"workdir": str(tmp_path)}, "no config.json there, so it is not the folder of a run"),
        ({"workdir": str(empty)}, "no checkpoint there"),
        ({"out": tokenizer_dir}, "exists already"),
        ({"model": str(tmp_path / "gone")}, "--model says where it is"),
        ({"model": tokenizer_dir}, "no config.json there"),
        ({"merge": True}, "^--merge: the run in .* has no adapter, config.lora.rank is 0$"),
        ({"merge": True, "adapter": True}, "^--merge: makes another folder than --adapter: give one of the two$"),
    ):
        with pytest.raises(entry.UserError, match=message) as caught:
            export(**{"workdir": workdir, "out": out, **arguments})
        assert "\n" not in str(caught.value)
    assert not os.path.exists(out)


def test_the_command(tmp_path, runs):
    out = str(tmp_path / "out")
    done = run_command("scalerl_jax.export", f"--workdir={runs[QWEN3_TIED][0]}", f"--out={out}")
    assert (done.returncode, done.stdout) == (0, f"{out}: the policy after 8 batches\n"), done.stderr
    assert load_hf(out)[0] == QWEN3_TIED


def test_the_gateway_serves_the_policy_of_a_run(tmp_path, runs, monkeypatch):
    """Its --model is a run, whose newest checkpoint is written once."""
    run = tmp_path / "run"
    shutil.copytree(runs[QWEN3_TIED][0], run)
    monkeypatch.setattr(gateway, "FLAGS", types.SimpleNamespace(model=str(run), names=[]))
    folder = gateway.model_folder()
    assert folder == str(run / "exported" / "8") and gateway.names_of_model() == ("run",)
    assert jax.tree.all(jax.tree.map(np.array_equal, load_hf(folder)[1], runs[QWEN3_TIED][1]))
    (run / "config.json").write_text("{")
    assert gateway.model_folder() == folder
    shutil.rmtree(folder)
    with pytest.raises(entry.UserError, match=f"^--model={run}: .*config.json.*$"):
        gateway.model_folder()
    assert not os.path.exists(folder)


@pytest.mark.parametrize("data", [b"{", b"\xff\0", b"[]", b"[" * 100_000, b'{"seed": "five"}'])
def test_a_config_that_is_none_is_one_line(tmp_path, data):
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(entry.UserError) as caught:
        export(workdir=str(tmp_path), out=str(tmp_path / "out"))
    assert str(caught.value).startswith(f"--workdir={tmp_path}: config") and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_disk_without_room_is_one_line_and_leaves_nothing(tmp_path, runs):
    """No file may become longer than 4096 bytes: what safetensors says of it is its own error."""
    workdir, _ = runs[QWEN3_TIED]
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(files.WriteError) as caught:
            export(workdir=workdir, out=str(tmp_path / "out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert str(caught.value) == f"{tmp_path / 'out'}: file too large"
    assert os.listdir(tmp_path) == []


def test_a_warm_starts_folder_says_where_its_policy_is(tmp_path):
    config = Config()
    config.telemetry.tensorboard = False
    with RunFolder(tmp_path / "warm", config, warm_start=True) as run:
        run.resume(0)
    out = str(tmp_path / "out")
    with pytest.raises(entry.UserError, match=r"config\.model\.path is empty there; --model says"):
        export(workdir=str(tmp_path / "warm"), out=out)
    (tmp_path / "warm" / "model").mkdir()
    line = r"a warm start's folder, whose policy is .*/warm/model already"
    with pytest.raises(entry.UserError, match=line):
        export(workdir=str(tmp_path / "warm"), out=out)
    # The checkpoints of one that trains an adapter end before its last batch.
    config.lora.rank, config.sft.model_path = 2, str(tmp_path)
    with RunFolder(tmp_path / "adapted", config, warm_start=True) as run:
        run.resume(0)
    (tmp_path / "adapted" / "model").mkdir()
    with pytest.raises(entry.UserError, match=r"/adapted/model already, and its adapter .*/adapted/adapter$"):
        export(workdir=str(tmp_path / "adapted"), out=out, adapter=True)
