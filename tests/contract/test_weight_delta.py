"""What changed between two versions: encoded, decoded, merged, and the digest, against plain loops over the bits."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.contract.weight_delta import Change, Sparse, WeightDelta, decode, digest, encode, merge

# 0.0, -0.0, two different not-a-numbers, an infinity, a denormal, 1.0
SPECIAL = [0x0000, 0x8000, 0x7FC0, 0xFFC1, 0x7F80, 0x0001, 0x3F80]
bits = st.sampled_from(SPECIAL) | st.integers(0, 0xFFFF)


@st.composite
def changes(draw: st.DrawFn) -> tuple[int, Change]:
    """(elements of the tensor, change): nothing, everything, and gaps of every length of varint."""
    kind = draw(st.sampled_from(["empty", "full", "gaps"]))
    if kind == "gaps":
        gaps = draw(st.lists(st.integers(0, 200) | st.integers(0, 2**23), min_size=1, max_size=20))
        positions = np.cumsum(np.array(gaps, np.int64) + 1) - 1
        size = int(positions[-1]) + 1 + draw(st.integers(0, 5))
    else:
        size = draw(st.integers(1, 40))
        positions = np.arange(size if kind == "full" else 0, dtype=np.int64)
    values = draw(st.lists(bits, min_size=len(positions), max_size=len(positions)))
    return size, Change(positions, np.array(values, np.uint16))


@given(changes())
def test_a_change_survives_the_wire(given_change: tuple[int, Change]) -> None:
    size, change = given_change
    sparse = encode(change)
    assert (sparse.changed, sparse.gaps.dtype) == (len(change.positions), np.uint8)
    sent = Sparse(
        sparse.changed,
        np.frombuffer(sparse.gaps.tobytes(), np.uint8),
        np.frombuffer(sparse.values.tobytes(), "<u2"),
    )
    back = decode(sent, size)
    np.testing.assert_array_equal(back.positions, change.positions)
    np.testing.assert_array_equal(back.values, change.values)
    assert back.positions.dtype == np.int64


def varint(number: int) -> bytes:
    """As protobuf writes it, one byte after another."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


@given(changes())
def test_gaps_are_varints(given_change: tuple[int, Change]) -> None:
    _, change = given_change
    places = [-1, *change.positions.tolist()]
    assert encode(change).gaps.tobytes() == b"".join(varint(b - a - 1) for a, b in itertools.pairwise(places))


@pytest.mark.parametrize(
    ("gaps", "changed", "told"),
    [
        (b"\x01\x02", 3, "2 gaps"),
        (b"\x01\x02", 1, "2 gaps"),
        (b"\x01\x82", 1, "1 gaps in 2 bytes"),
        (b"\x80\x80\x80\x80\x80\x01", 1, "6 bytes"),
        (b"\x0a", 1, "a gap of 10"),
        (b"\x05\x04", 2, "position 10"),
        (b"\xff\xff\xff\xff\x7f", 1, "a gap of"),
        (b"", 1, "0 gaps"),
    ],
)
def test_gaps_that_cannot_be(gaps: bytes, changed: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        decode(Sparse(changed, np.frombuffer(gaps, np.uint8), np.zeros(changed, np.uint16)), 10)


@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.integers(1, 5),
    shares=st.lists(st.sampled_from([0.0, 0.05, 1.0]), min_size=5, max_size=5),
    dense=st.sets(st.integers(0, 4)),
)
def test_merged_patches_do_what_they_do_one_by_one(seed: int, steps: int, shares: list[float], dense: set[int]) -> None:
    rng = np.random.default_rng(seed)
    held = rng.integers(0, 2**16, (6, 7)).astype(np.uint16)
    version, deltas = held.copy(), []
    for step in range(steps):
        positions = np.flatnonzero(rng.random(42) < shares[step])
        version.reshape(-1)[positions] = rng.choice(SPECIAL, len(positions))
        part = version.copy() if step in dense else encode(Change(positions, version.reshape(-1)[positions]))
        deltas.append(WeightDelta(step, step + 1, {"w": part}, {"w": digest(version)}, {"w": (6, 7)}))
    merged = merge(deltas)
    assert (merged.base, merged.step, merged.digests) == (0, steps, {"w": digest(version)})
    part = merged.tensors["w"]
    if isinstance(part, Sparse):
        change = decode(part, 42)
        assert len(np.unique(change.positions)) == len(change.positions)
        held.reshape(-1)[change.positions] = change.values
    else:
        held = part
    np.testing.assert_array_equal(held, version)


def plain_digest(tensor: np.ndarray) -> int:
    """The sum of rollout.proto, one element at a time, in Python's integers."""

    def final(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        x = x * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    total, columns = 0, tensor.shape[-1] if tensor.ndim else 1
    for place, element in enumerate(tensor.reshape(-1).tolist()):
        row, column = divmod(place, columns)
        x = (element * (final(row ^ 0x9E3779B9) | 1) + final(column ^ 0x7F4A7C15)) % 2**32
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        total += x ^ (x >> 15)
    return total % 2**32


@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (5,), (3, 7), (2, 3, 4), (300, 130)])
def test_the_digest_is_the_one_of_the_contract(shape: tuple[int, ...]) -> None:
    tensor = np.random.default_rng(0).integers(0, 2**16, shape).astype(np.uint16)
    assert digest(tensor) == plain_digest(tensor)


@given(seed=st.integers(0, 2**32 - 1), flips=st.integers(1, 3), bit=st.integers(0, 15))
def test_a_digest_sees_flipped_bits_and_moved_values(seed: int, flips: int, bit: int) -> None:
    rng = np.random.default_rng(seed)
    tensor = rng.integers(0, 2**16, (16, 16)).astype(np.uint16)
    other = tensor.copy()
    other.reshape(-1)[rng.choice(256, flips, replace=False)] ^= 1 << bit  # signs among them: -0.0
    assert digest(other) != digest(tensor)
    a, b = rng.choice(256, 2, replace=False)
    moved = tensor.copy()
    moved.reshape(-1)[[a, b]] = moved.reshape(-1)[[b, a]]
    assert (digest(moved) == digest(tensor)) == (tensor.reshape(-1)[a] == tensor.reshape(-1)[b])
