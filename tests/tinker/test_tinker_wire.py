"""What a client sends, as segments and objectives, against the formulas that the protocol states. 2 s of CPU."""

import asyncio
import itertools
import json
import types
from typing import Any

import httpx
import numpy as np
import pytest

from scalerl_jax.config import Config
from scalerl_jax.learner.packing import Segment
from scalerl_jax.tinker import command, tinker_app, tinker_wire
from scalerl_jax.tinker import tinker_pb2 as pb
from scalerl_jax.tinker.store import Store
from scalerl_jax.tinker.tinker_wire import RefusedCall
from scalerl_jax.tinker.training import Training
from tests.support.models import toy_decoder
from tests.support.waiting import eventually

VOCABULARY, LONGEST = 50, 16
FIELDS = {  # of the client's own messages: an update of it must not move them
    "ForwardBackwardRequest": [
        ("model_id", 1), ("seq_id", 2), ("data", 3), ("loss_fn", 4), ("loss_fn_config", 5), ("forward_only", 6),
        ("loss_fn_config_v2", 7),
    ],
    "Datum": [("model_input", 1), ("loss_fn_inputs", 2)],
    "Chunk": [("encoded_text", 1), ("image", 2), ("dmel", 3)],
    "EncodedTextChunk": [("tokens", 1)],
    "Tensor": [("dense", 1), ("sparse_csr", 2), ("dtype", 3), ("shape", 4)],
    "ForwardBackwardOutput": [("loss_fn_output_type", 1), ("loss_fn_outputs", 2), ("metrics", 3)],
    "ArrayRecord": [("type_tag", 1), ("fields", 2), ("num_datums", 3)],
    "BatchedTensor": [("data", 1), ("offsets", 2), ("dtype", 3), ("trailing_shape", 4)],
    "SampleResponse": [
        ("sequences", 1), ("prompt_logprobs", 2), ("topk_prompt_logprobs", 3), ("prompt_cache_hit_tokens", 4),
        ("target_prompt_logprobs", 5),
    ],
    "SampledSequence": [("stop_reason", 1), ("tokens", 2), ("logprobs", 3), ("topk_sampled_logprobs", 4)],
    "TopkLogprobs": [("token_ids", 1), ("logprobs", 2), ("k", 3), ("length", 4)],
}  # fmt: skip


def tensor(values: Any, dtype: Any = np.float32) -> pb.Tensor:
    array = np.asarray(values, dtype)
    kind = {np.float32: pb.DTYPE_FLOAT32, np.int64: pb.DTYPE_INT64}[dtype]
    return pb.Tensor(dense=array.tobytes(), dtype=kind, shape=array.shape)


def datum(tokens: list[int], **inputs: Any) -> pb.Datum:
    out = pb.Datum()
    out.model_input.add().encoded_text.tokens = np.asarray(tokens[:-1], np.int32).tobytes()
    out.loss_fn_inputs["target_tokens"].CopyFrom(tensor(tokens[1:], np.int64))
    for name, values in inputs.items():
        out.loss_fn_inputs[name].CopyFrom(tensor(values))
    return out


def request(loss: str, *data: pb.Datum, **thresholds: float) -> pb.ForwardBackwardRequest:
    return pb.ForwardBackwardRequest(model_id="m", seq_id=1, data=data, loss_fn=loss, loss_fn_config=thresholds)


def read(asked: pb.ForwardBackwardRequest) -> tinker_wire.Pass:
    return tinker_wire.pass_of(tinker_wire.parse(asked.SerializeToString()), vocabulary=VOCABULARY, longest=LONGEST)


TOKENS = [[1, 2, 3, 4, 5], [9, 8, 7]]
BEFORE = [[-1.0, -2.0, -0.5, -3.0], [-1.5, -0.2]]
AFTER = [[-1.2, -1.0, -0.4, -5.0], [-1.0, -0.9]]
ADVANTAGES = [[0.0, 1.5, -2.0, 0.7], [-0.5, 1.0]]


def rl(loss: str, **thresholds: float) -> tinker_wire.Pass:
    data = [datum(t, logprobs=b, advantages=a) for t, b, a in zip(TOKENS, BEFORE, ADVANTAGES, strict=True)]
    return read(request(loss, *data, **thresholds))


def loss_of(found: tinker_wire.Pass) -> float:
    after = [np.asarray([0.0, *row], np.float32) for row in AFTER]
    return tinker_wire.loss_of(found, after)


def expected(loss: str, *bounds: tuple[Any, Any]) -> float:
    """bounds: low and high, of all data or of each."""
    total = 0.0
    for before, after, advantages, (low, high) in zip(
        BEFORE, AFTER, ADVANTAGES, bounds * (2 // len(bounds)), strict=True
    ):
        log_r, a = np.asarray(after) - np.asarray(before), np.asarray(advantages)
        r = np.exp(log_r)
        if loss == "gspo":
            r = np.full(len(a), np.exp(log_r[a != 0].mean()))
        if loss == "cispo":
            total -= float(np.sum(np.clip(r, low, high) * np.asarray(after) * a))
        else:
            total -= float(np.sum(np.minimum(r * a, np.clip(r, low, high) * a)))
    return total


@pytest.mark.parametrize(
    ("loss", "thresholds", "bounds"),
    [
        ("importance_sampling", {}, (0, np.inf)),
        ("ppo", {}, (0.8, 1.2)),
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}, (0.5, 2.0)),
        ("cispo", {}, (0, 4)),
        ("cispo", {"clip_high_threshold": 1.3}, (0, 1.3)),
        ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, (0.9, 1.1)),
        ("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}, (0.9, 1.05)),
    ],
)
def test_a_loss_is_the_protocols_formula(loss: str, thresholds: Any, bounds: Any) -> None:
    assert loss_of(rl(loss, **thresholds)) == pytest.approx(expected(loss, bounds), rel=1e-5)


@pytest.mark.parametrize(("loss", "name"), [("ppo", "high"), ("cispo", "high"), ("cispo", "low"), ("gspo", "low")])
@pytest.mark.parametrize("config", [{}, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}])
def test_thresholds_of_single_tokens(loss: str, name: str, config: dict[str, float]) -> None:
    """Of one datum; the other has the call's, and so has the bound that is missing."""
    # The first token has no loss, and its own may be any.
    own = np.array([-7.0, 1.5, 1.0, 1.05] if name == "high" else [7.0, 0.9, 1.0, 0.45])
    first = datum(TOKENS[0], logprobs=BEFORE[0], advantages=ADVANTAGES[0], **{f"clip_{name}_threshold": own})
    found = read(request(loss, first, datum(TOKENS[1], logprobs=BEFORE[1], advantages=ADVANTAGES[1]), **config))
    default = (0.0, 4.0) if loss == "cispo" else (0.8, 1.2)
    call = (config.get("clip_low_threshold", default[0]), config.get("clip_high_threshold", default[1]))
    bounds = (call[0], own) if name == "high" else (own, call[1])
    assert loss_of(found) == pytest.approx(expected(loss, bounds, call), rel=1e-5)
    assert loss_of(found) != pytest.approx(expected(loss, call), rel=1e-3)


def test_the_ratio_of_a_sequence_is_over_its_mask() -> None:
    """Of tokens without an advantage, too."""
    mask, log_r = np.array([1.0, 1.0, 1.0, 0.0]), np.asarray(AFTER[0]) - np.asarray(BEFORE[0])
    advantages = np.array([0.0, 1.5, -2.0, 0.0])
    found = read(request("gspo", datum(TOKENS[0], logprobs=BEFORE[0], advantages=advantages, sequence_ratio_mask=mask)))
    after = [np.asarray([0.0, *AFTER[0]], np.float32)]
    s = np.exp(log_r[mask > 0].mean())
    wanted = -np.sum(np.minimum(s * advantages, np.clip(s, 0.8, 1.2) * advantages))
    assert tinker_wire.loss_of(found, after) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("numbers", "beta"), [({}, 0.05), ({"beta": 0.5}, 0.5), ({"beta": 0.0}, 0.0)])
def test_dro_is_the_protocols_formula(numbers: dict[str, float], beta: float) -> None:
    wanted = 0.0
    for before, after, advantages in zip(BEFORE, AFTER, ADVANTAGES, strict=True):
        for b, p, a in zip(before, after, advantages, strict=True):
            wanted -= (p * a - beta / 2 * (p - b) ** 2) if a else 0.0
    assert loss_of(rl("dro", **numbers)) == pytest.approx(wanted, rel=1e-5)


def test_cross_entropy_takes_weights_of_either_sign() -> None:
    weights = [[0.0, 1.0, -0.5, 2.0], [1.0, 0.0]]
    found = read(request("cross_entropy", *(datum(t, weights=w) for t, w in zip(TOKENS, weights, strict=True))))
    wanted = -sum(float(np.dot(w, after)) for w, after in zip(weights, AFTER, strict=True))
    assert loss_of(found) == pytest.approx(wanted, rel=1e-5)


def test_a_datum_is_a_segment_of_its_inputs_and_last_target() -> None:
    first: Segment = rl("ppo").segments[0]
    assert first.tokens.tolist() == TOKENS[0] and first.weights.tolist() == [0, 0, 1, 1, 1]
    np.testing.assert_allclose(first.generator_logprobs[1:], BEFORE[0])


SOFT = np.array([[2, 7, 0], [3, 0, 0], [9, 4, 1], [5, 6, 0]])  # of TOKENS[0]
SOFT_WEIGHTS = np.array([[0.5, 0.5, 0], [1, 0, 0], [0.1, 0.2, 0.7], [0, 2, 0]], np.float32)


def soft(targets: pb.Tensor, weights: pb.Tensor) -> pb.Datum:
    out = datum(TOKENS[0])
    out.loss_fn_inputs["target_tokens"].CopyFrom(targets)
    out.loss_fn_inputs["weights"].CopyFrom(weights)
    return out


def sparse(dense: np.ndarray, dtype: Any, **parts: Any) -> pb.Tensor:
    """Compressed rows; parts: arrays that are others."""
    there = dense != 0
    made = {
        "values": dense[there].astype(dtype), "crow_indices": np.cumsum([0, *there.sum(axis=1)], dtype=np.int64),
        "col_indices": np.nonzero(there)[1].astype(np.int64),
    } | {name: np.asarray(part) for name, part in parts.items()}  # fmt: skip
    kind = pb.DTYPE_INT64 if dtype is np.int64 else pb.DTYPE_FLOAT32
    out = pb.Tensor(dtype=kind, shape=dense.shape)
    out.sparse_csr.CopyFrom(pb.SparseCsr(**{name: part.tobytes() for name, part in made.items()}))
    return out


@pytest.mark.parametrize("is_sparse", [False, True])
def test_several_targets_of_a_token_are_a_sum_over_them(is_sparse: bool) -> None:
    """And a datum with one target each, beside it, is what it is alone, in its own shape."""
    make = sparse if is_sparse else tensor
    given = soft(make(SOFT, np.int64), make(SOFT_WEIGHTS, np.float32))
    found = read(request("cross_entropy", given, datum(TOKENS[1], weights=[0.5, -1.0])))
    assert found.soft and [one.weights.tolist() for one in found.segments] == [[0, 1, 1, 1, 1], [0, 1, 1]]
    teacher = found.segments[0].teacher
    assert teacher is not None and teacher.ids is not None and teacher.top_logprobs is not None
    np.testing.assert_array_equal(teacher.ids[1:], SOFT)
    np.testing.assert_array_equal(teacher.top_logprobs[1:], SOFT_WEIGHTS)
    assert not any(np.any(one.advantages) for one in found.segments)
    # The token's own log-prob, then those of the four targets that are compiled for.
    first, second = (-np.arange(n * 5, dtype=np.float32).reshape(n, 5) for n in (5, 3))
    wanted = -np.sum(SOFT_WEIGHTS * first[1:, 1:4]) - np.dot([0.5, -1.0], second[1:, 1])
    assert tinker_wire.loss_of(found, [first, second]) == pytest.approx(wanted, rel=1e-6)
    answer = pb.ForwardBackwardOutput.FromString(tinker_wire.output_of(found, [first, second], {}))
    fields = [record.fields["logprobs"] for record in answer.loss_fn_outputs]
    assert [list(field.trailing_shape) for field in fields] == [[3], []]
    np.testing.assert_array_equal(np.frombuffer(fields[0].data, np.float32).reshape(4, 3), first[1:, 1:4])
    np.testing.assert_array_equal(np.frombuffer(fields[1].data, np.float32), second[1:, 1])


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"crow_indices": np.array([0, 1, 2])}, "crow_indices must rise from 0 to 7 in 4 steps"),
        ({"crow_indices": np.array([0, 3, 2, 5, 7])}, "crow_indices must rise"),
        ({"crow_indices": np.array([-1, 1, 2, 5, 7])}, "crow_indices must rise"),
        ({"crow_indices": np.zeros(5, np.int64)}, "crow_indices must rise"),
        ({"crow_indices": np.zeros(0, np.int64)}, "crow_indices must rise"),
        ({"col_indices": np.array([0, 1, 0, 0, 1, 3, 1])}, "col_indices must be 7 from 0 to 2"),
        ({"col_indices": np.array([0, 1])}, "col_indices must be 7"),
        ({"col_indices": np.zeros(3, np.int8)}, "no whole number of items"),
    ],
)
def test_broken_rows_of_a_sparse_tensor_are_named(parts: dict[str, Any], told: str) -> None:
    given = soft(tensor(SOFT, np.int64), sparse(SOFT_WEIGHTS, np.float32, **parts))
    with pytest.raises(RefusedCall, match=told):
        read(request("cross_entropy", given))


def test_the_shapes_of_several_targets_are_those_of_their_weights() -> None:
    for targets, weights, told in (
        (tensor(SOFT, np.int64), tensor(SOFT_WEIGHTS[:, :2]), "weights have the shape of target_tokens"),
        (tensor(SOFT, np.int64), tensor(SOFT_WEIGHTS[:, 0]), "weights have the shape of target_tokens"),
        (tensor(np.zeros((4, 1025)), np.int64), tensor(np.zeros((4, 1025))), "1025 for each token, and 1 to 1024"),
        (pb.Tensor(dtype=pb.DTYPE_INT64, shape=[4, 10**12]), tensor(SOFT_WEIGHTS), "and 1 to 1024 are offered"),
        (pb.Tensor(dtype=pb.DTYPE_INT64, shape=[4, 9]), tensor(SOFT_WEIGHTS), r"0 numbers do not have the shape"),
        (tensor(SOFT[:3], np.int64), tensor(SOFT_WEIGHTS[:3]), r"must be \[4\] or \[4, k\]"),
        (tensor(SOFT + 50, np.int64), tensor(SOFT_WEIGHTS), "token ids are from 0 to 49"),
        (tensor(SOFT - 1, np.int64), tensor(SOFT_WEIGHTS), "token ids are from 0 to 49"),
    ):
        with pytest.raises(RefusedCall, match=told):
            read(request("cross_entropy", soft(targets, weights)))
    given = soft(tensor(SOFT, np.int64), tensor(SOFT_WEIGHTS))
    for name in ("logprobs", "advantages"):
        given.loss_fn_inputs[name].CopyFrom(tensor(BEFORE[0]))
    with pytest.raises(RefusedCall, match=r"its shape is \[4, 3\], and must be \[4\], a number for each token"):
        read(request("importance_sampling", given))


GOOD = {"logprobs": BEFORE[1], "advantages": ADVANTAGES[1]}


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (request("stable_reinforce", datum(TOKENS[1], **GOOD)), "'stable_reinforce' is not offered"),
        (request("ppa", datum(TOKENS[1], **GOOD)), "'ppa' is not known"),
        (request("ppo"), "data: there is none"),
        (request("ppo", datum(TOKENS[1], **GOOD), beta=1.0), "ppo has no beta"),
        (request("ppo", datum(TOKENS[1], **GOOD), clip_low_threshold=1.5), "must be around 1"),
        (request("cispo", datum(TOKENS[1], **GOOD), clip_low_threshold=5), "must be above 0 and clip_low_threshold"),
        (request("ppo", datum(TOKENS[1], advantages=[1, 1])), r"data\[0\].loss_fn_inputs: ppo needs logprobs"),
        (
            request("ppo", datum(TOKENS[1], **GOOD, clip_high_threshold=[1.2, 0.9])),
            r"data\[0\].loss_fn_inputs: the thresholds must be around 1, and are 0.8 and 0.9",
        ),
        (
            request("cispo", datum(TOKENS[1], **GOOD, clip_low_threshold=[-1, 0])),
            r"must be above 0 and clip_low_threshold, and is 4 \(clip_low_threshold: -1\)",
        ),
        (request("dro", datum(TOKENS[1], **GOOD, clip_high_threshold=[1, 1])), "dro does not take clip_high_threshold"),
        (request("ppo", datum(TOKENS[1], **GOOD, weights=[1, 1])), "does not take weights"),
        (request("ppo", datum(TOKENS[1], **(GOOD | {"advantages": [1]}))), "must be \\[2\\], a number for each token"),
        (request("ppo", datum(TOKENS[1], **(GOOD | {"advantages": [1, np.nan]}))), "some are not finite"),
        (request("ppo", datum([1, VOCABULARY, 2], **GOOD)), "token ids are from 0 to 49"),
        (request("cross_entropy", datum(list(range(20)), weights=[1.0] * 19)), "at most 15 are offered"),
        (
            request("gspo", datum(TOKENS[1], **GOOD, sequence_ratio_mask=[0, 1])),
            "leaves out tokens that have an advantage",
        ),
    ],
)
def test_what_is_refused_is_named(asked: pb.ForwardBackwardRequest, told: str) -> None:
    with pytest.raises(RefusedCall, match=told):
        read(asked)


def test_targets_that_do_not_follow() -> None:
    """They are soft targets of cross_entropy, one for each token, and the other losses refuse them."""
    other = datum(TOKENS[0], weights=[1.0] * 4)
    other.loss_fn_inputs["target_tokens"].CopyFrom(tensor([2, 3, 9, 5], np.int64))
    found = read(request("cross_entropy", other))
    assert found.soft and found.targets == [None] and found.segments[0].tokens.tolist() == TOKENS[0]
    # Where there is no loss a backward pass takes any, which recipes fill up with 0; a forward pass is for all of them.
    other.loss_fn_inputs["weights"].CopyFrom(tensor([1, 1, 0, 1]))
    other.loss_fn_inputs["target_tokens"].CopyFrom(tensor([2, 3, -100, 5], np.int64))
    assert not read(request("cross_entropy", other)).soft
    other.loss_fn_inputs["target_tokens"].CopyFrom(tensor([2, 3, 0, 5], np.int64))
    asked = request("cross_entropy", other)
    asked.forward_only = True
    assert read(asked).soft
    sampled = datum(TOKENS[0], logprobs=BEFORE[0], advantages=[1.0] * 4)
    sampled.loss_fn_inputs["target_tokens"].CopyFrom(tensor([2, 3, 9, 5], np.int64))
    with pytest.raises(RefusedCall, match="ppo has no targets but the tokens that follow the inputs"):
        read(request("ppo", sampled))


def test_answers_are_cut_by_datum() -> None:
    arrays = [np.arange(3, dtype=np.float32), np.arange(5, dtype=np.float32)]
    output = pb.ForwardBackwardOutput.FromString(tinker_wire.output_of(rl("ppo"), arrays, {"loss:sum": 1.5}))
    field = output.loss_fn_outputs[0].fields["logprobs"]
    offsets = np.frombuffer(field.offsets, np.int64)
    parts = [np.frombuffer(field.data[a:b], np.float32).tolist() for a, b in itertools.pairwise(offsets)]
    assert parts == [[1, 2], [1, 2, 3, 4]] and dict(output.metrics) == {"loss:sum": 1.5}


@pytest.mark.parametrize("name", FIELDS)
def test_the_numbers_of_fields_are_the_clients(name: str) -> None:
    assert [(field.name, field.number) for field in getattr(pb, name).DESCRIPTOR.fields] == FIELDS[name]


def test_the_client_has_these_numbers() -> None:
    proto = pytest.importorskip("tinker.proto.tinker_public_pb2")
    for name, fields in FIELDS.items():
        assert set(fields) <= {(field.name, field.number) for field in getattr(proto, name).DESCRIPTOR.fields}, name


def test_an_error_of_ours_is_the_answer_to_its_call_alone(tmp_path, monkeypatch):
    def taken_up(training, model):
        if model == "first":
            raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(Training, "_taken_up", taken_up)
    store, ended = Store(str(tmp_path)), []
    futures = []
    for name in ("first", "second"):
        store.put("models", id=name, session="s", created=0.0, rank=0, seed=0, body="{}")
        futures.append(store.accept(name, 0, "create_model", b"{}")[0])
    training = Training(
        Config(), toy_decoder(), folder=str(tmp_path), longest=8, answered=lambda _: None, fail=ended.append
    )
    training.start()
    first, second = eventually(
        lambda: (found := [store.future(one.id) for one in futures])[1].answer is not None and found, "both answers"
    )
    training.close()
    assert first.failed and json.loads(first.answer)["category"] == "server" and b"RESOURCE_EXHAUSTED" in first.answer
    assert not second.failed and not ended


def test_a_client_hears_which_run_it_waits_for(tmp_path, monkeypatch):
    monkeypatch.setattr(tinker_app, "POLL_SECONDS", 0.01)
    store = Store(str(tmp_path))
    future, _ = store.accept("second", 0, "create_model", b"{}")
    training = types.SimpleNamespace(holder="first")
    tinker = tinker_app.Tinker(
        store, training, None, family="", capacity=lambda: 8, folder="", names=("model",), token="", longest=8
    )

    async def talk() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(tinker.app()), base_url="http://here") as http:

            async def heard() -> dict[str, str]:
                key = {"x-api-key": "tml-x"}
                return (await http.post("/api/v1/retrieve_future", json={"request_id": future.id}, headers=key)).json()

            waits = {"queue_state": "paused_capacity", "queue_state_reason": "first has the mesh"}
            assert await heard() == {"type": "try_again", **waits}
            training.holder = "second"
            assert await heard() == {"type": "try_again", "queue_state": "active"}
            store.refuse(future, "no", category="user")
            assert await heard() == {"error": "no", "category": "user"}

    asyncio.run(talk())


def test_listings_are_in_pages(tmp_path):
    store = Store(str(tmp_path))
    runs, saved = [], []
    for number in range(5):
        session = store.new_session({})
        runs.append(f"{session}:train:0")
        body = json.dumps({"user_metadata": {"number": str(number)}})
        store.put("models", id=runs[-1], session=session, created=float(number), rank=0, seed=0, body=body)
        saved.append(f"tinker://{runs[-1]}/weights/w")
        store.put(
            "checkpoints", id=saved[-1], model=runs[-1], kind="training", folder="", created=0.0, bytes=1,
            body=json.dumps({"user_metadata": None}),
        )  # fmt: skip
    tinker = tinker_app.Tinker(
        store, None, None, family="", capacity=lambda: 8, folder="", names=("m",), token="", longest=8
    )

    async def talk() -> None:
        transport, key = httpx.ASGITransport(tinker.app()), {"x-api-key": "tml-x"}
        async with httpx.AsyncClient(transport=transport, base_url="http://here/api/v1", headers=key) as http:
            run = (await http.get(f"training_runs/{runs[3]}")).json()
            assert run["user_metadata"] == {"number": "3"} and run["last_sampler_checkpoint"] is None
            assert run["last_checkpoint"]["tinker_path"] == saved[3]
            for path, what, name, wanted in (
                ("sessions", "sessions", None, [run.split(":")[0] for run in runs]),
                ("training_runs", "training_runs", "training_run_id", runs),
                ("checkpoints", "checkpoints", "tinker_path", saved),
                (f"training_runs/{runs[2]}/checkpoints", "checkpoints", "tinker_path", saved[2:3]),
            ):
                for query, offset, limit in (
                    ({}, 0, len(wanted)),
                    ({"limit": 2}, 0, 2),
                    ({"limit": 2, "offset": 4}, 4, 2),
                ):
                    page = (await http.get(path, params=query)).json()
                    found = [one if name is None else one[name] for one in page[what]]
                    assert found == wanted[offset : offset + limit]
                    assert page["cursor"] == {"offset": offset, "limit": limit, "total_count": len(wanted)}
                for query in ({"limit": -1}, {"limit": ""}, {"offset": "1.5"}, {"offset": "9" * 5000}):
                    refused = await http.get(path, params=query)
                    assert refused.status_code == 400
                    assert refused.json()["detail"] == f"{next(iter(query))}: must be a whole number of at least 0"

    asyncio.run(talk())


def test_what_is_not_asked_again_is_not_kept(tmp_path):
    """Prompts of answered samples, and bodies of calls that a checkpoint contains; the answers are."""
    store = Store(str(tmp_path))
    sample, _ = store.accept("s", 0, "asample", b"prompt")
    calls = [store.accept("m", seq, "optim_step", b"step")[0] for seq in range(1, 4)]
    for future in (sample, *calls):
        store.answer(future, b"answer")
    store.forget_bodies("m", 2)
    kept = [store.future(future.id) for future in (sample, *calls)]
    assert [future.body for future in kept] == [b"", b"", b"", b"step"]
    assert {future.answer for future in kept} == {b"answer"}
    assert store.accept("s", 0, "asample", b"prompt")[1] is False


def test_the_base_model_of_a_workdir_stays(tmp_path, monkeypatch):
    """A run that goes on writes newer checkpoints; the runs in the workdir are of the one that they began with."""
    run, given = tmp_path / "run", tmp_path / "base_model.json"
    monkeypatch.setattr(command, "FLAGS", types.SimpleNamespace(model=str(run)))
    monkeypatch.setattr(command, "model_folder", lambda: str(run / "exported" / "7"))
    assert command._base_model(str(tmp_path)) == str(run / "exported" / "7")
    given.write_text(json.dumps({"folder": str(run / "exported" / "5")}))
    assert command._base_model(str(tmp_path)) == str(run / "exported" / "5")
    given.write_text(json.dumps({"folder": str(tmp_path / "other")}))
    with pytest.raises(ValueError, match=r"the runs in --workdir=.* are of .*other"):
        command._base_model(str(tmp_path))
