"""Checkpoints: exact round trips, any damage noticed, kills survived, other meshes."""

import asyncio
import gc
import hashlib
import os
import shutil
import signal
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.learner import digests as digests_lib
from scalerl_jax.learner.checkpoint import Checkpoints, read_newest
from tests.support.processes import begin_python, run_python


def make_state(seed, width=24, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    params = {
        "embed": jnp.asarray(rng.normal(size=(40, width)), dtype),
        "layers": {"query": jnp.asarray(rng.normal(size=(3, width, width)), dtype)},
    }
    opt_state = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(params)
    opt_state = jax.tree.map(lambda x: x + jnp.asarray(rng.integers(1, 9, x.shape), x.dtype), opt_state)
    return {"params": params, "opt_state": opt_state, "step": jnp.int32(seed)}


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    return all(
        x.dtype == y.dtype and x.shape == y.shape and np.array_equal(np.asarray(x), np.asarray(y))
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other))
    )


def arrays_of(step):
    return {
        "history": np.arange(step * 7, dtype=np.int64).reshape(7, step) - 3,
        "retired": np.array([True, False, True]),
        "empty": np.zeros((0, 3), np.int32),
    }


def save_all(directory, steps, keep=2):
    checkpoints = Checkpoints(directory, keep=keep)
    for step in steps:
        manifest = {"cursor": step * 48, "seed": 2**63 - 1, "nested": {"é": [1, 2.5, None]}}
        checkpoints.save(step, make_state(step), manifest=manifest, arrays=arrays_of(step))
    checkpoints.close()


def test_round_trip_is_exact(tmp_path):
    save_all(tmp_path / "c", [5, 10, 15])
    found = Checkpoints(tmp_path / "c", keep=2).restore(abstract(make_state(0)))
    assert found.step == 15
    assert same(found.state, make_state(15))
    assert found.manifest == {"cursor": 720, "seed": 2**63 - 1, "nested": {"é": [1, 2.5, None]}}
    assert found.arrays.keys() == arrays_of(15).keys()
    for name, value in arrays_of(15).items():
        assert found.arrays[name].dtype == value.dtype and np.array_equal(found.arrays[name], value), name
    assert sorted(os.listdir(tmp_path / "c")) == ["10", "15"]  # keep=2


def test_one_may_be_kept_beside_the_newest(tmp_path):
    for steps in ([5, 10, 15, 20], [25]):  # also one of before a restart
        checkpoints = Checkpoints(tmp_path, keep=2)
        checkpoints.also = lambda steps: [step for step in steps if step <= 12][-1:]
        for step in steps:
            checkpoints.save(step, make_state(step), manifest={}, arrays={})
        checkpoints.close()
        assert sorted(map(int, os.listdir(tmp_path))) == [10, *{20: [15, 20], 25: [20, 25]}[steps[-1]]]
    save_all(tmp_path, [30])  # nobody asks for it any more
    assert sorted(map(int, os.listdir(tmp_path))) == [25, 30]


def test_bfloat16_and_no_arrays(tmp_path):
    state = make_state(3, dtype=jnp.bfloat16)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(3, state, manifest={}, arrays={})
    checkpoints.close()
    found = checkpoints.restore(abstract(state))
    assert same(found.state, state) and found.arrays == {} and found.manifest == {}


def test_no_checkpoint_is_none(tmp_path):
    assert Checkpoints(tmp_path / "none", keep=1).restore(abstract(make_state(0))) is None
    assert not (tmp_path / "none").exists()


def test_state_may_be_donated_while_it_is_saved(tmp_path):
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    state = step(make_state(1, width=256))
    expected = jax.tree.map(lambda x: np.array(x), state)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state, manifest={}, arrays={})
    for _ in range(20):
        state = step(state)
    found = checkpoints.restore(abstract(state))  # waits
    assert same(found.state, expected)
    checkpoints.close()


def test_a_saved_step_is_left_as_it_is(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(4, make_state(4), manifest={"first": True}, arrays={})
    checkpoints.wait()
    checkpoints.save(4, make_state(9), manifest={"first": False}, arrays={})
    checkpoints.close()
    assert checkpoints.restore(abstract(make_state(0))).manifest == {"first": True}


def damage(path, how):
    data = path.read_bytes()
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif data:
        changed = bytearray(data)
        changed[len(data) // 2] ^= 4
        path.write_bytes(bytes(changed))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # tensorstore's, of reads that failed
@pytest.mark.parametrize("how", ["delete", "truncate", "flip"])
def test_damage_to_any_file_is_harmless_or_noticed(tmp_path, how, caplog):
    """Whatever file is hurt: exactly the newest checkpoint, or exactly the one before it and a line that says so."""
    save_all(tmp_path / "whole", [5, 10])
    files = [p.relative_to(tmp_path / "whole") for p in sorted((tmp_path / "whole" / "10").rglob("*")) if p.is_file()]
    fell_back = 0
    for file in files:
        shutil.rmtree(tmp_path / "hurt", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "hurt")
        damage(tmp_path / "hurt" / file, how)
        caplog.clear()
        found = Checkpoints(tmp_path / "hurt", keep=2).restore(abstract(make_state(0)))
        assert found.step in (5, 10), file
        assert same(found.state, make_state(found.step)), file
        assert found.manifest["cursor"] == found.step * 48, file
        assert all(np.array_equal(found.arrays[k], v) for k, v in arrays_of(found.step).items()), file
        lines = [r.message for r in caplog.records if "cannot be read" in r.message]
        assert len(lines) == (found.step == 5), file
        assert (tmp_path / "hurt" / "10").exists() == (found.step == 10), file
        fell_back += found.step == 5
    assert fell_back >= 5  # manifest, its parts and the data files


def test_after_a_fall_back_the_step_is_saved_again(tmp_path, caplog):
    save_all(tmp_path, [5, 10])
    shutil.rmtree(tmp_path / "10" / "state")
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.restore(abstract(make_state(0))).step == 5
    assert [r.message for r in caplog.records if r.message.startswith("checkpoint 10 cannot be read")]
    checkpoints.save(10, make_state(77), manifest={}, arrays={})
    checkpoints.close()
    found = checkpoints.restore(abstract(make_state(0)))
    assert found.step == 10 and same(found.state, make_state(77))
    assert (tmp_path / "unreadable-10-0").is_dir()


def test_nothing_readable_is_an_error_and_moves_nothing(tmp_path):
    save_all(tmp_path, [5, 10])
    for step in ("5", "10"):
        (tmp_path / step / "manifest" / "metadata").unlink()
    with pytest.raises(ValueError, match=r"none of its 2 checkpoints can be read"):
        Checkpoints(tmp_path, keep=2).restore(abstract(make_state(0)))
    assert sorted(os.listdir(tmp_path)) == ["10", "5"]


def test_another_model_is_refused_and_nothing_is_set_aside(tmp_path):
    save_all(tmp_path, [5])
    checkpoints = Checkpoints(tmp_path, keep=2)
    with pytest.raises(ValueError, match=r"opt_state/.*/mu/embed is float32\[40, 24\], this run's float32\[40, 32\]"):
        checkpoints.restore(abstract(make_state(0, width=32)))
    state = make_state(0)
    state["params"]["head"] = jnp.zeros(3)
    with pytest.raises(ValueError, match=r"has no params/head"):
        checkpoints.restore(abstract(state))
    del state["params"]["head"], state["opt_state"]
    with pytest.raises(ValueError, match=r"has opt_state/.*, which this model and optimizer lack"):
        checkpoints.restore(abstract(state))
    assert os.listdir(tmp_path) == ["5"]


def test_only_a_part_is_read_and_nothing_changes_on_disk(tmp_path):
    save_all(tmp_path, [5, 10])
    shutil.rmtree(tmp_path / "10" / "state" / "d")
    found = read_newest(tmp_path, "params")
    assert found.step == 5 and list(found.state) == ["params"]
    assert same(found.state["params"], make_state(5)["params"])
    assert sorted(os.listdir(tmp_path)) == ["10", "5"]
    with pytest.raises(ValueError, match="no checkpoint there"):
        read_newest(tmp_path / "5", "params")


KILLED = """
import sys, numpy as np, jax.numpy as jnp
from scalerl_jax.learner.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=2)
found = checkpoints.restore({"w": __import__("jax").ShapeDtypeStruct((8, 1 << 18), jnp.float32)})
first = found.step + 1 if found else 1
if found:
    assert float(found.state["w"].min()) == float(found.state["w"].max()) == found.step == found.manifest["step"]
print("restored", found.step if found else 0, flush=True)
for step in range(first, first + 50):
    checkpoints.save(step, {"w": jnp.full((8, 1 << 18), step, jnp.float32)}, manifest={"step": step}, arrays={})
    print("saving", step, flush=True)
"""


@pytest.mark.slow
def test_kill_in_the_middle_of_a_save(tmp_path):
    """Killed with a save in flight, three times: each finds the newest whole one and saves the lost step again."""
    reached = 0
    for wait_for in (3, 2, 2):
        child, output = begin_python("-c", KILLED, tmp_path)
        kind, restored = output.readline().split()
        assert kind == "restored" and int(restored) >= reached - 1
        for _ in range(wait_for):
            kind, step = output.readline().split()
            assert kind == "saving"
        child.send_signal(signal.SIGKILL)
        with output:
            rest = output.read().split()  # what it output before the signal came
        child.wait()
        reached = int(rest[-1]) if rest else int(step)
    assert reached >= 5


MESHES = """
import os, sys
from tests.support.compiled import on_devices
os.environ["XLA_FLAGS"] = on_devices(8)
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from scalerl_jax.learner.checkpoint import Checkpoints
from scalerl_jax.model.sharding import make_mesh
value = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)
def state(mesh, spec):
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    return {"params": {"w": put(value, spec)}, "step": put(jnp.int32(3), P())}
one = state(make_mesh(fsdp=4, tensor=2), P("fsdp", "tensor"))
checkpoints = Checkpoints(sys.argv[1], keep=2)
checkpoints.save(3, one, manifest={}, arrays={"a": np.arange(3)})
alone = make_mesh(fsdp=1, devices=jax.devices()[:1])
for mesh in (make_mesh(fsdp=2, tensor=4), make_mesh(replica=2, fsdp=4), alone):
    for spec in (P("fsdp", "tensor"), P(None, "fsdp")):
        other = state(mesh, spec)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), other)
        found = checkpoints.restore(abstract)
        assert found.step == 3
        assert found.state["params"]["w"].sharding == other["params"]["w"].sharding
        assert np.array_equal(np.asarray(found.state["params"]["w"]), value)
checkpoints.close()
assert os.listdir(sys.argv[1]) == ["3"]
print("done")
"""


def test_restores_onto_other_meshes(tmp_path):
    done = run_python("-c", textwrap.dedent(MESHES), tmp_path)
    assert done.stdout.strip() == "done", done.stderr[-3000:]


def flip(x: np.ndarray, *bits: int) -> np.ndarray:
    data = bytearray(x.tobytes())
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    return np.frombuffer(bytes(data), x.dtype).reshape(x.shape)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32, np.uint8])
@given(data=st.data())
def test_a_digest_finds_any_one_or_two_flipped_bits_and_any_two_words_swapped(dtype, data):
    x = np.random.default_rng(0).permutation(7 * 33).reshape(7, 33).astype(dtype)
    last = 8 * x.nbytes - 1
    bits = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=2, unique=True))
    i, j = data.draw(st.lists(st.integers(0, x.size - 1), min_size=2, max_size=2, unique=True))
    swapped = x.reshape(-1).copy()
    swapped[[i, j]] = swapped[[j, i]]
    whole = digests_lib.digest(x)
    assert digests_lib.digest(flip(x, *bits)) != whole
    assert x.reshape(-1)[i] == x.reshape(-1)[j] or digests_lib.digest(swapped) != whole
    assert digests_lib.digest(jnp.asarray(x)) == whole


def test_a_digest_of_many_blocks_is_that_of_their_digests(monkeypatch):
    x = np.arange(1000, dtype=np.int32)
    monkeypatch.setattr(digests_lib, "_BLOCK", 512)
    blocks = [x.tobytes()[start : start + 512] for start in range(0, 4000, 512)]
    expected = hashlib.sha256(b"".join(hashlib.sha256(block).digest() for block in blocks)).hexdigest()
    assert digests_lib.digest(x) == expected
    assert digests_lib.digest(np.zeros(0)) == hashlib.sha256(b"").hexdigest()


def test_two_flipped_sign_bits_are_noticed(tmp_path, monkeypatch):
    """Saved under the digests of the state without them."""
    state = make_state(5)
    hurt = jax.tree.map(
        lambda x: jnp.asarray(flip(np.asarray(x), 31, 63) if x.dtype == np.float32 and x.size > 1 else x), state
    )
    checkpoints = Checkpoints(tmp_path, keep=1)
    monkeypatch.setattr(
        "scalerl_jax.learner.checkpoint.described",
        lambda tree: digests_lib.described(state if tree is hurt else tree),
    )
    checkpoints.save(5, hurt, manifest={}, arrays={})
    checkpoints.close()
    with pytest.raises(ValueError, match=r"none of its 1 checkpoints can be read .*the data of .* is damaged"):
        Checkpoints(tmp_path, keep=1).restore(abstract(make_state(0)))


NO_ROOM = """
import resource, signal, sys, jax, jax.numpy as jnp, numpy as np
from scalerl_jax.system.files import WriteError
from scalerl_jax.learner.checkpoint import Checkpoints
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
noise = lambda step: {name: jnp.asarray(np.random.default_rng(step).normal(size=60_000), jnp.float32) for name in "abc"}
checkpoints = Checkpoints(sys.argv[1], keep=2)
checkpoints.save(1, noise(1), manifest={}, arrays={})
checkpoints.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))  # as on a full disk, for root too
try:
    checkpoints.save(2, noise(2), manifest={}, arrays={})
    checkpoints.wait()
except WriteError as error:
    print(error)
checkpoints.close()
abstract = {name: jax.ShapeDtypeStruct((60_000,), jnp.float32) for name in "abc"}
print(Checkpoints(sys.argv[1], keep=2).restore(abstract).step)
"""


def test_a_save_that_has_no_room_is_one_exception_and_no_checkpoint(tmp_path):
    done = run_python("-c", NO_ROOM, tmp_path)
    assert done.stdout == f"{tmp_path}: file too large\n1\n", done.stderr[-3000:]
    assert done.stderr == ""


class _Failed(Exception):
    """As tensorstore tells of a write for which there is no room."""


@pytest.mark.parametrize(
    ("what", "lines"),
    [
        ('Error writing "m/.zarray" in local file "4.orbax-checkpoint-tmp/arrays": No space left on device', False),
        ("the connection is broken", True),
    ],
)
def test_what_is_written_beside_a_write_that_failed_is_not_told_again(tmp_path, caplog, what, lines):
    """Each of a checkpoint's arrays has a future; where there is no room many fail, and one of them is raised."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, make_state(0), manifest={}, arrays={})
    checkpoints.close()

    async def leave_behind() -> None:
        asyncio.get_running_loop().create_future().set_exception(_Failed(what))
        gc.collect()

    asyncio.run(leave_behind())
    assert [record.name for record in caplog.records if "never retrieved" in record.getMessage()] == ["asyncio"] * lines
