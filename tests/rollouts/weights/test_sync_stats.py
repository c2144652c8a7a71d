"""What is summed up between two rows of metrics."""

import dataclasses

from scalerl_jax.rollouts.weights.publisher import SyncStats
from scalerl_jax.rollouts.weights.push import PushReport


def push(**changes: object) -> dict[str, object]:
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
    stats.event("push", push())
    stats.event("push", push(sparse=False, payload_bytes=400, resent_chunks=0))
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
