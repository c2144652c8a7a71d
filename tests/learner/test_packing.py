"""Packing: every token once, at the place told, and nothing else in the rows."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.contract.codec import TeacherScores
from scalerl_jax.learner.packing import MicroBatch, Segment, pack, plain

INTEGERS = ("tokens", "positions", "segment_ids", "targets")
FLOATS = ("weights", "advantages", "generator_logprobs")

cases = st.integers(2, 40).flatmap(
    lambda length: st.fixed_dictionaries(
        {
            "lengths": st.lists(st.integers(2, length + 1), min_size=1, max_size=25),
            "length": st.just(length),
            "rows": st.integers(1, 6),
        }
    )
)


def make(lengths) -> list[Segment]:
    """No number occurs twice, so that each can be found again. What stands at the first token must not be seen."""
    out, counter = [], 1
    for tokens in lengths:
        numbers = np.arange(counter, counter + 4 * tokens).reshape(4, tokens)
        counter += 4 * tokens
        values = numbers[1:].astype(np.float32)
        values[:, 0] = np.nan
        out.append(Segment(numbers[0].astype(np.int32), *values))
    return out


def stacked(batches: list[MicroBatch]) -> dict[str, np.ndarray]:
    """[micro-batches, rows, length]"""
    return {name: np.stack([batch.arrays()[name] for batch in batches]) for name in INTEGERS + FLOATS}


@given(case=cases)
def test_every_segment_lies_whole_where_it_is_told(case):
    segments = make(case["lengths"])
    batches, places = pack(segments, length=case["length"], rows=case["rows"])
    assert len(places) == len(segments)
    arrays = stacked(batches)
    for segment, place in zip(segments, places, strict=True):
        assert place.positions == len(segment.tokens) - 1
        assert 0 <= place.start <= place.start + place.positions <= case["length"]
        at = (place.batch, place.row, slice(place.start, place.start + place.positions))
        found = {name: array[at] for name, array in arrays.items()}
        np.testing.assert_array_equal(found["tokens"], segment.tokens[:-1])
        np.testing.assert_array_equal(found["targets"], segment.tokens[1:])
        np.testing.assert_array_equal(found["positions"], np.arange(place.positions))
        assert len(set(found["segment_ids"].tolist())) == 1
        for name in FLOATS:
            np.testing.assert_array_equal(found[name], getattr(segment, name)[1:])


def test_what_a_teacher_says_lies_beside_its_tokens() -> None:
    """At the position that predicts each; nothing elsewhere, and a segment without a teacher has no ids."""
    first, second, alone = make([5, 4, 3])
    rng = np.random.default_rng(0)

    def scores(tokens: int, k: int) -> TeacherScores:
        top = rng.normal(size=(tokens, k)).astype(np.float32)
        return TeacherScores(top[:, 0], rng.integers(0, 99, (tokens, k)).astype(np.int32), top)

    taught = [
        dataclasses.replace(first, teacher=scores(5, 2)),
        dataclasses.replace(second, teacher=scores(4, 3)),
        alone,
    ]
    (batch,), places = pack(taught, length=10, rows=2, teacher_k=3)
    assert batch.teacher_ids is not None and batch.teacher_logprobs is not None
    left = np.ones((2, 10, 3), bool)
    for segment, place in zip(taught, places, strict=True):
        if (teacher := segment.teacher) is not None:
            at = (place.row, slice(place.start, place.start + place.positions), slice(teacher.ids.shape[1]))
            np.testing.assert_array_equal(batch.teacher_ids[at], teacher.ids[1:])
            np.testing.assert_array_equal(batch.teacher_logprobs[at], teacher.top_logprobs[1:])
            left[at] = False
    assert (batch.teacher_ids[left] == -1).all() and not batch.teacher_logprobs[left].any()
    with pytest.raises(ValueError, match=r"segment 1: its teacher has 3 ids at a token, above 2 \(config.distill.k\)"):
        pack(taught, length=10, rows=2, teacher_k=2)


@given(case=cases)
def test_nothing_else_is_in_the_rows(case):
    """No two segments share a position, and what is no segment's is 0 in every array."""
    batches, places = pack(make(case["lengths"]), length=case["length"], rows=case["rows"])
    arrays = stacked(batches)
    covered = np.zeros(arrays["tokens"].shape, int)
    for place in places:
        covered[place.batch, place.row, place.start : place.start + place.positions] += 1
    assert covered.max() == 1
    assert covered.sum() == sum(case["lengths"]) - len(case["lengths"])
    for name, array in arrays.items():
        assert not array[covered == 0].any(), name
    np.testing.assert_array_equal(arrays["segment_ids"] > 0, covered == 1)


@given(case=cases)
def test_segments_of_a_row_are_told_apart_by_numbers_from_one(case):
    batches, places = pack(make(case["lengths"]), length=case["length"], rows=case["rows"])
    ids = stacked(batches)["segment_ids"]
    for batch, row in {(place.batch, place.row) for place in places}:
        mine = [place for place in places if (place.batch, place.row) == (batch, row)]
        numbers = sorted(int(ids[batch, row, place.start]) for place in mine)
        assert numbers == list(range(1, len(mine) + 1))


@given(case=cases)
def test_every_micro_batch_has_the_one_shape_and_the_last_is_filled_up(case):
    batches, places = pack(make(case["lengths"]), length=case["length"], rows=case["rows"])
    for batch in batches:
        assert [*batch.arrays()] == [*INTEGERS, *FLOATS]
        for name, array in batch.arrays().items():
            assert array.shape == (case["rows"], case["length"])
            assert array.dtype == (np.int32 if name in INTEGERS else np.float32)
    used = {place.batch * case["rows"] + place.row for place in places}
    assert used == set(range(len(used)))  # rows without a segment come last
    assert len(batches) == -(-len(used) // case["rows"])


@given(case=cases)
def test_rows_are_filled_first_fit(case):
    """No segment would have found space in a row before its own."""
    _, places = pack(make(case["lengths"]), length=case["length"], rows=case["rows"])
    row_of = [place.batch * case["rows"] + place.row for place in places]
    left = [case["length"]] * (max(row_of) + 1)
    for place, row in zip(places, row_of, strict=True):
        left[row] -= place.positions
    for place, row in zip(places, row_of, strict=True):
        assert all(place.positions > free for free in left[:row])


@given(case=cases, most=st.integers(1, 4))
def test_no_row_has_more_segments_than_it_may(case, most):
    """And it is first fit all the same: each row before a segment's own was full, or had as many."""
    _, places = pack(make(case["lengths"]), length=case["length"], rows=case["rows"], most=most)
    left, count = [case["length"]] * len(places), [0] * len(places)
    for place in sorted(places, key=lambda place: -place.positions):
        row = place.batch * case["rows"] + place.row
        assert all(place.positions > free or n == most for free, n in zip(left[:row], count[:row], strict=True))
        left[row], count[row] = left[row] - place.positions, count[row] + 1
    assert min(left) >= 0 and max(count) <= most


@given(case=cases, align=st.integers(1, 8))
def test_segments_start_where_they_are_to(case, align):
    length = -(-case["length"] // align) * align
    batches, places = pack(make(case["lengths"]), length=length, rows=case["rows"], align=align)
    assert all(place.start % align == 0 and place.start + place.positions <= length for place in places)
    taken = sum(int((batch.segment_ids > 0).sum()) for batch in batches)
    assert taken == sum(place.positions for place in places) == sum(case["lengths"]) - len(places)


@given(case=cases)
def test_the_weights_keep_their_sum(case):
    rng = np.random.default_rng(len(case["lengths"]))
    segments = []
    for segment in make(case["lengths"]):
        weights = rng.random(len(segment.tokens)).astype(np.float32)
        weights[0] = 0  # the first token has no prediction, so no loss
        segments.append(dataclasses.replace(segment, weights=weights))
    batches, _ = pack(segments, length=case["length"], rows=case["rows"])
    total = sum(batch.weights.sum(dtype=np.float64) for batch in batches)
    assert total == pytest.approx(sum(s.weights.sum(dtype=np.float64) for s in segments), rel=1e-12)


@given(case=cases, seed=st.integers(0, 2**32 - 1))
def test_the_order_given_changes_neither_content_nor_how_many_rows(case, seed):
    segments = make(case["lengths"])
    order = np.random.default_rng(seed).permutation(len(segments))
    one, places = pack(segments, length=case["length"], rows=case["rows"])
    other, others = pack([segments[i] for i in order], length=case["length"], rows=case["rows"])
    assert len(one) == len(other)
    for name in set(INTEGERS + FLOATS) - {"segment_ids"}:  # which only number those of a row
        array, moved = stacked(one)[name], stacked(other)[name]
        np.testing.assert_array_equal(np.sort(array, axis=None), np.sort(moved, axis=None), err_msg=name)
    # Longest first, so rows hold the same lengths at the same places, whichever of the equally long it is.
    assert sorted(map(dataclasses.astuple, places)) == sorted(map(dataclasses.astuple, others))
    for i, place in zip(order, others, strict=True):
        assert place.positions == places[i].positions


def test_the_longest_that_fits_and_the_shortest():
    batches, places = pack(make([9, 2, 9, 2]), length=8, rows=3)
    assert [(p.batch, p.row, p.start) for p in places] == [(0, 0, 0), (0, 2, 0), (0, 1, 0), (0, 2, 1)]
    np.testing.assert_array_equal(batches[0].segment_ids[2], [1, 2, 0, 0, 0, 0, 0, 0])
    assert len(batches) == 1


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (1, "segment 2 has 1 tokens: at least 2 are needed"),
        (0, "segment 2 has 0 tokens: at least 2 are needed"),
        (10, r"segment 2 has 10 tokens: a row holds 9 \(config\.learner\.seq_len\)"),
    ],
)
def test_a_segment_that_does_not_fit_is_named(tokens, message):
    segments = make([9, 2, 5, 10])
    segments[2] = plain(np.zeros(tokens, np.int32))
    with pytest.raises(ValueError, match=f"^{message}$"):
        pack(segments, length=8, rows=2)


def test_no_segments_are_one_empty_micro_batch():
    batches, places = pack([], length=8, rows=2)
    assert len(batches) == 1 and places == []
    assert not any(array.any() for array in batches[0].arrays().values())


def test_a_plain_segment_has_no_loss():
    segment = plain([5, 6, 7])
    assert segment.tokens.dtype == np.int32 and segment.tokens.tolist() == [5, 6, 7]
    for name in FLOATS:
        assert not getattr(segment, name).any() and len(getattr(segment, name)) == 3
