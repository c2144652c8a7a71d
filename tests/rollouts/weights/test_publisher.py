"""The wire form of a version, pushes over real gRPC with chunks damaged on the way, and the sums of all pushes."""

import asyncio
import dataclasses
import threading
import zlib

import ml_dtypes
import numpy as np
import pytest

from scalerl_jax.contract.codec import Version
from scalerl_jax.contract.weight_parts import Part
from scalerl_jax.rollouts import fleet
from scalerl_jax.rollouts.weights import push
from scalerl_jax.rollouts.weights.host_parts import Parts
from scalerl_jax.rollouts.weights.payload import Payload, dense
from scalerl_jax.rollouts.weights.publisher import SyncStats
from scalerl_jax.rollouts.weights.push import Push, PushReport
from tests.rollouts.clock import Clock
from tests.rollouts.liar import Liar
from tests.rollouts.small_trainer import SHAPES, Trainer, config, weights
from tests.support.waiting import SECONDS, eventually


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1000, 1 << 20])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_chunks_are_the_tensors_one_after_another(chunk_bytes, dtype):
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.normal(size=(3, 5)).astype(dtype),
        "b": rng.normal(size=(4, 2)).astype(dtype).T,  # not contiguous
        "scalar": np.array(-0.0, dtype),
        "empty": np.zeros((0, 4), dtype),
        "c": rng.normal(size=(17,)).astype(dtype),
    }
    payload = dense(Version(5, 6), tensors, {}, chunk_bytes=chunk_bytes)
    chunks = [payload.chunk(i) for i in range(payload.chunks)]
    whole = b"".join(np.ascontiguousarray(t).tobytes() for t in tensors.values())
    assert b"".join(c.data for c in chunks) == whole
    assert [c.index for c in chunks] == list(range(len(chunks)))
    assert all(len(c.data) == chunk_bytes for c in chunks[:-1])
    assert all(c.crc32 == zlib.crc32(c.data) for c in chunks)
    assert payload.header.payload_bytes == len(whole)
    assert [(t.name, t.dtype, tuple(t.shape)) for t in payload.header.tensors] == [
        (name, np.dtype(dtype).name, tensor.shape) for name, tensor in tensors.items()
    ]


def damage(monkeypatch, times: int) -> list[int]:
    """The first `times` chunks sent have a bit flipped, after their checksum was taken."""
    damaged: list[int] = []
    good = Payload.chunk

    def chunk(self, index):
        message = good(self, index)
        if len(damaged) < times:
            damaged.append(index)
            data = bytearray(message.data)
            data[len(data) // 2] ^= 16
            message = dataclasses.replace(message, parts=(data,))
        return message

    monkeypatch.setattr(Payload, "chunk", chunk)
    return damaged


def test_a_flipped_bit_is_asked_for_again(start, monkeypatch):
    damaged = damage(monkeypatch, 3)
    (server,) = start({})
    with Trainer(config(), [server]) as trainer:
        trainer.update()
        version, tensors = eventually(server.held)
        assert len(damaged) == 3
        np.testing.assert_array_equal(tensors["lm_head.weight"], weights(version.step)["lm_head.weight"])
        pushes = [fields for kind, fields in trainer.events if kind == "push"]
        assert pushes[0]["resent_chunks"] == 3
        assert pushes[0]["payload_bytes"] == sum(w.nbytes for w in weights(0).values())
        assert pushes[0]["seconds"] > 0 <= pushes[0]["pause_seconds"]


def test_a_push_that_failed_for_good_is_begun_again(start, monkeypatch):
    # A chunk damaged eight times is refused by the server; the next attempt succeeds.
    damaged = damage(monkeypatch, 60)
    (server,) = start({})
    with Trainer(config(), [server]) as trainer:
        trainer.update()
        assert len(damaged) == 60
        trainer.check()


def test_the_latest_version_wins_and_others_are_never_made(start):
    (server,) = start({"token_seconds": 0.002})
    made, gate = [], threading.Event()

    def tensors(version):
        def make():
            assert gate.wait(SECONDS)
            made.append((version, threading.current_thread().name))
            return weights(version)

        return make

    with Trainer(config(max_steps=20), [server]) as trainer:
        trainer.admit_all()
        for version in range(1, 6):
            trainer.fleet.publish(version, tensors(version))  # returns at once
        gate.set()
        eventually(lambda: server.held()[0].step == 5)
        np.testing.assert_array_equal(server.held()[1]["model.norm.weight"], weights(5)["model.norm.weight"])
        # One may have been begun before the next was offered, and stood at the gate; the others have no taker.
        assert len(made) <= 2 and made[-1][0] == 5
        assert all(name.startswith("publisher-staging") for _, name in made)


def test_the_other_hosts_keep_one_version_of_a_phase(start, monkeypatch):
    """The newest, which may be evaluated, and the phase's."""
    kept = []

    async def push(wanted):
        raise AssertionError("nothing is published within a phase")

    with Trainer(config(pacing_kind="phased", pacing_max_off_policy_steps=5), start({})) as trainer:
        trainer.update()
        parts = Parts(Part(0, 2), "float32", SHAPES, push=push, keep=lambda until, steps: kept.append((until, steps)))
        monkeypatch.setattr(trainer.fleet._publisher, "_parts", parts)
        for _ in range(3):
            trainer.update()
    assert kept == [(2, [0, 2]), (3, [0, 3]), (4, [0, 4])]


def test_what_making_the_tensors_raises_stops_the_run(start):
    def broken():
        raise RuntimeError("the device is gone")

    with Trainer(config(), start({})) as trainer:
        trainer.update()
        trainer.fleet.publish(2, broken)
        with pytest.raises(RuntimeError, match="the device is gone"):
            trainer.admit_until(lambda: False)


def test_all_servers_receive_at_once(start):
    servers = start({}, {}, {})
    with Trainer(config(), servers) as trainer:
        trainer.admit_all()
        trainer.fleet.publish(1, lambda: weights(1))
        for server in servers:
            eventually(lambda server=server: server.held()[0].step == 1)


# ---- Faults of ours end the run with their own words ----------------------------------------------------------------


def until_it_ends(trainer: Trainer) -> None:
    trainer.admit_until(lambda: False)


def test_a_chunk_that_cannot_be_cut_ends_the_run(start, monkeypatch):
    with Trainer(config(), start({})) as trainer:
        trainer.update()

        def broken(self, index):
            raise RuntimeError("no chunk today")

        monkeypatch.setattr(Payload, "chunk", broken)
        trainer.fleet.publish(2, lambda: weights(2))
        with pytest.raises(RuntimeError, match="no chunk today") as error:
            until_it_ends(trainer)
        assert any(entry.name == "broken" for entry in error.traceback)


def test_a_payload_that_cannot_be_made_ends_the_run(start, monkeypatch):
    with Trainer(config(), start({})) as trainer:
        trainer.update()
        wrong = weights(2) | {"lm_head.weight": "not an array"}
        trainer.fleet.publish(2, lambda: wrong)
        with pytest.raises(AttributeError, match="'str' object has no attribute"):
            until_it_ends(trainer)


def test_a_patch_that_cannot_be_found_ends_the_run_though_nobody_needs_it(start):
    def broken():
        raise RuntimeError("the device is gone")

    with Trainer(config(pacing_kind="phased", pacing_max_off_policy_steps=3), start({})) as trainer:
        trainer.update()
        trainer.fleet.publish(2, weights(2), broken)  # a version that goes to nobody
        with pytest.raises(RuntimeError, match="the device is gone"):
            until_it_ends(trainer)


@pytest.mark.parametrize(("where", "name"), [(Push, "_report"), (Push, "messages"), (fleet, "dispatch")])
def test_a_fault_behind_our_back_ends_the_run(start, monkeypatch, where, name):
    """In what the loop calls by itself: what a push reads and writes; who is asked next."""
    with Trainer(config(), start({}, {})) as trainer:
        trainer.admit_all()

        def broken(*args, **kwargs):
            raise RuntimeError("behind our back")

        def publish() -> None:
            trainer.fleet.publish(1, lambda: weights(1))
            until_it_ends(trainer)

        monkeypatch.setattr(where, name, broken)
        with pytest.raises(RuntimeError, match="behind our back"):
            publish()


def test_a_transfer_may_take_its_time_while_something_moves(start, monkeypatch):
    """Chunk by chunk, in more time than nothing may move for."""
    servers, began, clock = start({}), [], Clock().install(monkeypatch, push)
    with Trainer(config(fleet_push_seconds=90.0, fleet_chunk_bytes=500), servers) as trainer:
        trainer.update()
        cut = Payload.chunk

        def slowly(self, index):
            if self.header.target.step == 2:
                began.append(index)
                clock.ahead += 10.0
            return cut(self, index)

        monkeypatch.setattr(Payload, "chunk", slowly)
        trainer.fleet.publish(2, lambda: weights(2))
        eventually(lambda: servers[0].held()[0].step == 2)
        assert len(began) * 10.0 > 2 * trainer.config.fleet.push_seconds
        assert began == sorted(began), "begun anew"


def test_a_transfer_of_which_nothing_moves_is_given_up(start, caplog):
    """The server takes the header and says no more."""
    with Liar() as liar, Trainer(config(fleet_push_seconds=0.5), [*start({}), liar]) as trainer:

        async def silence(context, honest):
            await context.read()
            await asyncio.Event().wait()

        trainer.admit_all()
        liar.push = silence
        trainer.update_until(lambda: any("did not arrive in time" in m and liar.address in m for m in caplog.messages))
        trainer.check()


# ---- What is summed up between two rows of metrics ------------------------------------------------------------------


def reported(**changes: object) -> dict[str, object]:
    report = PushReport(
        step=1,
        sparse=True,
        payload_bytes=100,
        resent_chunks=1,
        seconds=2.0,
        transfer_seconds=1.0,
        staging_seconds=0.5,
        pause_seconds=0.25,
    )
    return {"server": "a:1", **dataclasses.asdict(report), **changes}


def test_sums_of_pushes_and_versions_since_the_last_row() -> None:
    stats = SyncStats()
    stats.event("push", reported())
    stats.event("push", reported(sparse=False, payload_bytes=400, resent_chunks=0))
    version = {"delta_bytes": 10, "dense_bytes": 400, "changed": 3, "elements": 200, "whole_tensors": 0}
    stats.event("version", {"step": 1, **version, "encode_seconds": 0.5})
    stats.event("server", {"server": "a:1", "state": "active"})
    assert stats.drain() == {
        "applied": 2,
        "sparse": 1,
        "payload_bytes": 500,
        "resent_chunks": 1,
        "seconds": 4.0,
        "transfer_seconds": 2.0,
        "staging_seconds": 1.0,
        "pause_seconds": 0.5,
        "deltas": 1,
        **version,
        "encode_seconds": 0.5,
    }
    assert set(stats.drain().values()) == {0}
