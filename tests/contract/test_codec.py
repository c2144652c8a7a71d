"""The codec: what goes in comes out, through real bytes, and what breaks the contract does not come out."""

import dataclasses
import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb

token_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20).map(lambda ids: np.array(ids, np.int32))
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def same(a: Any, b: Any) -> bool:
    """Equality of dataclasses that hold arrays, and of the arrays' dtypes."""
    if type(a) is not type(b):
        return False
    for field in dataclasses.fields(a):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, np.ndarray):
            if left.dtype != right.dtype or not np.array_equal(left, right):
                return False
        elif left != right:
            return False
    return True


@st.composite
def requests(draw: st.DrawFn) -> codec.GroupRequest:
    end = tuple(draw(st.lists(st.integers(0, 99), max_size=3)))
    lead = tuple(draw(st.lists(st.integers(0, 99), min_size=1, max_size=4))) if end or draw(st.booleans()) else ()
    thinking = st.integers(0, 2**32 - 1) if lead else st.just(0)
    return codec.GroupRequest(
        incarnation=draw(st.integers(0, 2**64 - 1)),
        group_id=draw(st.text(max_size=10)),
        prompt=draw(token_ids),
        completions=tuple(
            codec.CompletionRequest(index, draw(st.integers(0, 2**64 - 1)), draw(thinking))
            for index in draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4, unique=True))
        ),
        sampling=codec.Sampling(
            temperature=draw(st.floats(0.125, 4, width=32)),
            top_p=draw(st.floats(0.125, 1, width=32)),
            top_k=draw(st.integers(0, 2**32 - 1)),
            answer_budget=draw(st.integers(1, 2**32 - 1)),
            stop_token_ids=tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=4))),
        ),
        interruption=codec.Interruption(lead + end if lead else (), end),
        minimum_step=draw(st.integers(-(2**63), 2**63 - 1)),
        pinned_step=draw(st.none() | st.integers(0, 2**63 - 1)),
        router_replay=draw(st.booleans()),
    )


@given(requests())
def test_a_request_survives_the_wire(request: codec.GroupRequest) -> None:
    data = codec.request_to_proto(request).SerializeToString()
    assert same(codec.request_from_proto(pb.GenerateRequest.FromString(data)), request)


@st.composite
def experts(draw: st.DrawFn) -> np.ndarray:
    shape = [draw(st.integers(1, 4)) for _ in range(3)]
    dtype = draw(st.sampled_from([np.uint8, np.uint16]))
    return np.random.default_rng(draw(st.integers(0, 99))).integers(0, np.iinfo(dtype).max, shape, dtype)


@st.composite
def completions(draw: st.DrawFn) -> codec.Completion:
    tokens = draw(token_ids)
    edges = sorted(draw(st.sets(st.integers(1, len(tokens)), max_size=4)) | {0, len(tokens)})
    steps = sorted(draw(st.lists(st.integers(0, 2**40), min_size=len(edges) - 1, max_size=len(edges) - 1)))
    spans = list(itertools.pairwise(edges))
    return codec.Completion(
        incarnation=draw(st.integers(0, 2**64 - 1)),
        group_id=draw(st.text(max_size=10)),
        index=draw(st.integers(0, 2**32 - 1)),
        token_ids=tokens,
        logprobs=np.array(
            draw(st.lists(floats.map(lambda x: -abs(x)), min_size=len(tokens), max_size=len(tokens))), "f4"
        ),
        versions=tuple((step, start, end) for step, (start, end) in zip(steps, spans)),
        forced=tuple(span for span in spans if draw(st.booleans())),
        finish_reason=draw(st.sampled_from(["stop", "length", "aborted"])),
        queued_seconds=draw(st.floats(0, 1e9)),
        sampling_seconds=draw(st.floats(0, 1e9)),
        experts=draw(st.none() | experts()),
    )


@given(completions())
def test_a_completion_survives_the_wire(completion: codec.Completion) -> None:
    data = codec.completion_to_proto(completion).SerializeToString()
    assert same(codec.completion_from_proto(pb.Completion.FromString(data)), completion)


@given(completions())
def test_spans_tell_each_token(completion: codec.Completion) -> None:
    steps, sampled = completion.token_steps(), completion.sampled()
    for at in range(len(completion.token_ids)):
        assert [steps[at]] == [step for step, start, end in completion.versions if start <= at < end]
        assert sampled[at] == (not any(start <= at < end for start, end in completion.forced))


def good() -> codec.Completion:
    return codec.Completion(
        incarnation=1,
        group_id="train/3",
        index=2,
        token_ids=np.arange(6, dtype=np.int32),
        logprobs=np.full(6, -1.5, np.float32),
        versions=((4, 0, 2), (5, 2, 6)),
        forced=((1, 2), (3, 5)),
        finish_reason="stop",
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"token_ids": np.zeros(0, np.int32)}, "no tokens"),
        ({"token_ids": np.arange(5, dtype=np.int32)}, "5 tokens but 6"),
        ({"logprobs": np.array([-1, -1, np.nan, -1, -1, -1], np.float32)}, "not finite"),
        ({"logprobs": np.array([-1, -1, -np.inf, -1, -1, -1], np.float32)}, "not finite"),
        ({"logprobs": np.array([-1, -1, 0.5, -1, -1, -1], np.float32)}, "above 0"),
        ({"versions": ()}, "version spans end at 0 of 6"),
        ({"versions": ((4, 0, 2), (5, 3, 6))}, "do not cover"),
        ({"versions": ((4, 0, 3), (5, 2, 6))}, "do not cover"),
        ({"versions": ((4, 0, 6), (5, 6, 6))}, "do not cover"),
        ({"versions": ((4, 0, 2), (5, 2, 7))}, "end at 7"),
        ({"versions": ((5, 0, 2), (4, 2, 6))}, "version 4 follows version 5"),
        ({"forced": ((3, 3),)}, "forced"),
        ({"forced": ((3, 5), (1, 2))}, "forced"),
        ({"forced": ((1, 4), (3, 5))}, "forced"),
        ({"forced": ((4, 7),)}, "forced"),
    ],
)
def test_a_completion_that_breaks_the_contract(change: dict[str, Any], told: str) -> None:
    assert codec.completion_from_proto(codec.completion_to_proto(good())).index == 2
    with pytest.raises(ValueError, match=told) as error:
        codec.completion_from_proto(codec.completion_to_proto(dataclasses.replace(good(), **change)))
    assert "'train/3'/2" in str(error.value)


@pytest.mark.parametrize("spans", ["versions", "forced"])
def test_more_spans_than_tokens_are_not_read(spans: str) -> None:
    """Two bytes are an empty one: millions would take the event loop many seconds."""
    message = codec.completion_to_proto(good())
    message.MergeFromString(bytes([0x32 if spans == "versions" else 0x3A, 0]) * 7)
    with pytest.raises(ValueError, match=rf"'train/3'/2: \d+ {spans} of 6 tokens"):
        codec.completion_from_proto(message)


def test_bytes_that_are_no_arrays() -> None:
    message = codec.completion_to_proto(good())
    message.logprobs += b"\0"
    with pytest.raises(ValueError):
        codec.completion_from_proto(message)
    for change in ({"ids": b"\0" * 5}, {"expert_bytes": 4}, {"expert_bytes": 0}, {"layers": 0}):
        told = {"layers": 2, "experts_per_token": 1, "expert_bytes": 1, "ids": b"\0" * 4} | change
        message = codec.completion_to_proto(good())
        message.experts.CopyFrom(pb.Experts(**told))
        with pytest.raises(ValueError, match="bytes of experts"):
            codec.completion_from_proto(message)
    message = codec.completion_to_proto(good())
    message.finish_reason = 17
    with pytest.raises(ValueError, match="finish reason 17"):
        codec.completion_from_proto(message)


@st.composite
def scored(draw: st.DrawFn) -> tuple[codec.ScoreRequest, codec.Scores]:
    tokens, rng = draw(token_ids), np.random.default_rng(draw(st.integers(0, 99)))
    first, top_k, k = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, 5)), draw(st.integers(0, 4))
    rows, predicted = len(tokens) - first, (np.arange(first, len(tokens)) > 0)[:, None]
    targets = rng.integers(-1, 7, (rows, k)).astype(np.int32)
    # A row of eight probabilities, of which those asked for are told.
    row = -np.sort(-np.log(rng.dirichlet(np.ones(8), rows)).astype(np.float32), axis=1)
    ids = np.argsort(rng.random((rows, 8)), axis=1).astype(np.int32)
    told = np.take_along_axis(row, np.argsort(ids, axis=1), axis=1)
    of_targets = np.where(predicted & (targets >= 0), np.take_along_axis(told, np.maximum(targets, 0), axis=1), 0)
    return codec.ScoreRequest(tokens, first, top_k, targets), codec.Scores(
        logprobs=np.where(predicted[:, 0], row[:, 0], 0),
        top_ids=np.where(predicted, ids, -1)[:, :top_k],
        top_logprobs=np.where(predicted, row, 0)[:, :top_k],
        target_logprobs=of_targets.astype(np.float32),
    )


@given(scored())
def test_scores_survive_the_wire(pair: tuple[codec.ScoreRequest, codec.Scores]) -> None:
    request, scores = pair
    data = codec.score_request_to_proto(request).SerializeToString()
    assert same(codec.score_request_from_proto(pb.ScoreRequest.FromString(data)), request)
    data = codec.scores_to_proto(scores, codec.Version(3, 4)).SerializeToString()
    reply = pb.ScoreReply.FromString(data)
    assert codec.version_from_proto(reply.version) == codec.Version(3, 4)
    assert same(codec.scores_from_proto(reply, request, vocabulary=8), scores)


def test_a_request_to_score_of_a_client_that_knows_tokens_only() -> None:
    request = codec.score_request_from_proto(pb.ScoreRequest(token_ids=codec.encode_ids([5, 6, 7])))
    assert same(request, codec.ScoreRequest(np.array([5, 6, 7], np.int32)))
    assert (request.target_ids.shape, request.ids().tolist()) == ((3, 0), [[-1], [6], [7]])
    later = codec.ScoreRequest(np.array([5, 6, 7]), 1, target_ids=np.array([[1, -1], [2, 3]]))
    assert later.ids().tolist() == [[6, 1, -1], [7, 2, 3]]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"logprobs": [-1, -1, -1]}, "12 bytes of logprobs, which are [2] numbers"),
        ({"logprobs": [-1, np.nan]}, "logprobs that are not finite"),
        ({"logprobs": [-1, -np.inf]}, "logprobs that are not finite"),
        ({"logprobs": [-1, 0.5]}, "logprobs that are not finite or above 0"),
        ({"top_ids": [], "top_logprobs": []}, "0 bytes of top_ids, which are [2, 2] numbers"),
        ({"top_logprobs": [-1, -2]}, "8 bytes of top_logprobs"),
        ({"top_logprobs": [-1, -2, 1, -2]}, "top_logprobs that are not finite or above 0"),
        ({"top_logprobs": [-1, -2, -2, -1]}, "top_logprobs that do not descend"),
        ({"top_logprobs": [-1, -2, -0.1, -0.1]}, "more than all of the mass"),
        ({"top_ids": [4, 3, 2, 8]}, "top_ids outside [0, 8)"),
        ({"top_ids": [4, 3, 2, -1]}, "top_ids outside [0, 8)"),
        ({"top_ids": [4, 3, 2, 2]}, "an id twice"),
        ({"target_logprobs": []}, "0 bytes of target_logprobs, which are [2, 1] numbers"),
        ({"target_logprobs": [0.5, 0]}, "target_logprobs that are not finite or above 0"),
        ({"target_logprobs": [-1, -1]}, "target_logprobs where there is no target"),
    ],
)
def test_scores_that_break_the_contract(change: dict[str, Any], told: str) -> None:
    request = codec.ScoreRequest(np.array([5, 6, 7]), 1, 2, np.array([[3], [-1]]))
    good = {
        "logprobs": [-1, -2],
        "top_ids": [4, 3, 2, 0],
        "top_logprobs": [-1, -2, -0.5, -1],
        "target_logprobs": [-2, 0],
    }

    def reply(fields: dict[str, Any]) -> pb.ScoreReply:
        encode = {"top_ids": codec.encode_ids}
        return pb.ScoreReply(**{name: encode.get(name, codec.encode_floats)(value) for name, value in fields.items()})

    assert codec.scores_from_proto(reply(good), request, vocabulary=8).top_ids.tolist() == [[4, 3], [2, 0]]
    with pytest.raises(ValueError, match=f"^scores: .*{re.escape(told)}") as error:
        codec.scores_from_proto(reply(good | change), request, vocabulary=8)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["logprobs", "top_ids", "top_logprobs", "target_logprobs"])
def test_scores_tell_nothing_of_the_first_token(name: str) -> None:
    request = codec.ScoreRequest(np.array([5, 6]), 0, 1, np.array([[3], [2]]))
    arrays = {"logprobs": np.zeros(2), "top_ids": np.full((2, 1), -1), "top_logprobs": np.zeros((2, 1))}
    arrays |= {"target_logprobs": np.zeros((2, 1))}
    arrays["top_ids"][1] = 4
    assert codec.scores_from_proto(
        codec.scores_to_proto(codec.Scores(**arrays), codec.Version(0, 0)), request, vocabulary=8
    )
    arrays[name][0] -= 0.5 if name != "top_ids" else -4
    with pytest.raises(ValueError, match="first token, which nothing predicts"):
        codec.scores_from_proto(
            codec.scores_to_proto(codec.Scores(**arrays), codec.Version(0, 0)), request, vocabulary=8
        )


def test_the_wire_is_little_endian() -> None:
    assert codec.encode_ids([1, -2]) == b"\x01\0\0\0\xfe\xff\xff\xff"
    assert codec.encode_floats([1.0]) == b"\0\0\x80\x3f"
    np.testing.assert_array_equal(codec.decode_ids(b"\x01\0\0\0\xfe\xff\xff\xff"), [1, -2])
    assert codec.Version(2, 0) > codec.Version(1, 99)  # a new incarnation is newer whatever its step
