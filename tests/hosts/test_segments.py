"""What each host packs of a batch is its rows of what one host would pack."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.contract.codec import TeacherScores
from scalerl_jax.hosts import lead
from scalerl_jax.hosts.lead import MORE, Received, frames
from scalerl_jax.hosts.link import Frame
from scalerl_jax.learner.packing import Elsewhere, Segment, first_fit, pack, positions_of

LENGTH, ROWS, HOSTS, K = 32, 4, 2, 3


def segment(rng: np.random.Generator, tokens: int, routed: bool, taught: bool) -> Segment:
    """Where there are teachers, one in two segments has one."""
    given = rng.normal(size=tokens), rng.integers(-1, 9, (tokens, K)), rng.normal(size=(tokens, K))
    own, ids, top = (x.astype(kind) for x, kind in zip(given, (np.float32, np.int32, np.float32), strict=True))
    return Segment(
        rng.integers(0, 9, tokens).astype(np.int32),
        *(rng.normal(size=tokens).astype(np.float32) for _ in range(3)),
        experts=rng.integers(0, 5, (tokens - 1, 2, 2)).astype(np.uint8) if routed else None,
        teacher=TeacherScores(own, ids, top) if taught and rng.random() < 0.5 else None,
    )


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(2, LENGTH), min_size=1, max_size=20),
    beside=st.integers(0, 5),
    routed=st.booleans(),
    taught=st.booleans(),
    limit=st.sampled_from([1, 300, 2**20]),
    most=st.sampled_from([None, 2]),
    seed=st.integers(0, 99),
)
def test_all_hosts_together_pack_the_batch(
    sizes: list[int], beside: int, routed: bool, taught: bool, limit: int, most: int | None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    every = [segment(rng, tokens, routed, taught) for tokens in sizes]
    first = max(1, len(every) - beside)
    segments, others = every[:first], every[first:]
    layout = {"length": LENGTH, "rows": ROWS, "routed": (2, 2) if routed else None, "most": most}
    layout["teacher_k"] = K if taught else 0
    whole, places = pack(segments, beside=others, **layout)
    where = first_fit([positions_of(one) for one in every], length=LENGTH, beside=len(others), most=most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lead, "FRAME_BYTES", limit)
        for host in range(HOSTS):
            rows = range(host * ROWS // HOSTS, (host + 1) * ROWS // HOSTS)
            wanted = {place for place, (row, _) in enumerate(where) if row % ROWS in rows}
            received, sent = Received(), list(frames("differentiate", segments, others, wanted))
            *before, last = [Frame.from_bytes(frame.to_bytes()) for frame in sent]
            assert {frame.kind for frame in before} <= {MORE} and last.kind == "differentiate"
            for frame in before:
                received.add(frame)
            here, here_beside = received.finish(last)
            assert [i for i, one in enumerate([*here, *here_beside]) if isinstance(one, Segment)] == sorted(wanted)
            assert [positions_of(one) for one in here] == [positions_of(one) for one in segments]
            packed, same_places = pack(here, beside=here_beside, **layout)
            assert same_places == places
            for batch, full in zip(packed, whole, strict=True):
                for name, value in batch.arrays().items():
                    np.testing.assert_array_equal(
                        value[rows.start : rows.stop], full.arrays()[name][rows.start : rows.stop]
                    )


def test_what_lies_elsewhere_only_keeps_its_place() -> None:
    (batch,), (place,) = pack([Elsewhere(5)], length=LENGTH, rows=1)
    assert (place.start, place.positions) == (0, 4)
    assert not any(value.any() for value in batch.arrays().values())
