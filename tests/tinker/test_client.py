"""Tinker's own client against a server of a toy model. About 40 s of CPU, most of it compilation."""

import pathlib
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from scalerl_jax.environments.tokenizer import Tokenizer
from tests.gateway.chat_model import VOCABULARY
from tests.support.waiting import SECONDS, eventually
from tests.tinker.served import LONGEST, answer_to, model_folder, rollout_server, tinker_server

pytestmark = pytest.mark.slow
tinker = pytest.importorskip("tinker")
types = tinker.types

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("tinker")


@pytest.fixture(scope="module")
def url(place: pathlib.Path) -> Iterator[str]:
    model = model_folder(place / "model")
    (place / "work").mkdir()
    with rollout_server(place, model) as address:
        server = tinker_server(place / "work", model, address)
        try:
            yield f"http://{server.wait().address}"
        finally:
            server.close()


@pytest.fixture(scope="module")
def service(url: str) -> Iterator[Any]:
    client = tinker.ServiceClient(base_url=url, api_key="tml-x")
    yield client
    client.close("success")


def trained(service: Any, rank: int = 0) -> Any:
    return service.create_lora_training_client(base_model="model", rank=rank).result()


def supervised(tokens: list[int]) -> Any:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)},
    )


DATA = [[5, 6, 7, 8, 9], [5, 6, 8, 8], [1, 2, 3]]
ADAM = types.AdamParams(learning_rate=1e-2)


def logprobs(client: Any) -> list[float]:
    found = client.forward([supervised(tokens) for tokens in DATA], "cross_entropy").result()
    return [float(p) for one in found.loss_fn_outputs for p in one["logprobs"].tolist()]


def test_gradients_add_up_and_a_forward_pass_leaves_them_alone(service: Any) -> None:
    whole, parts = trained(service), trained(service)
    whole.forward_backward([supervised(tokens) for tokens in DATA], "cross_entropy")
    one = whole.optim_step(ADAM).result().metrics
    for tokens in DATA:
        parts.forward_backward([supervised(tokens)], "cross_entropy")
        parts.forward([supervised([9, 9, 9])], "cross_entropy")
    other = parts.optim_step(ADAM).result().metrics
    assert other["grad_norm:mean"] == pytest.approx(one["grad_norm:mean"], rel=1e-5)
    np.testing.assert_allclose(logprobs(parts), logprobs(whole), atol=1e-4)
    alone = trained(service)  # the same parts, without the forward passes
    for tokens in DATA:
        alone.forward_backward([supervised(tokens)], "cross_entropy")
    assert alone.optim_step(ADAM).result().metrics == other
    assert logprobs(alone) == logprobs(parts)


def test_a_saved_optimizer_takes_the_step_of_one_that_went_on(service: Any) -> None:
    def step(client: Any) -> list[float]:
        client.forward_backward([supervised(tokens) for tokens in DATA], "cross_entropy")
        client.optim_step(ADAM).result()
        return logprobs(client)

    client = trained(service)
    step(client)
    saved = client.save_state("half").result().path
    expected = step(client)
    assert step(service.create_training_client_from_state_with_optimizer(saved).result()) == expected
    assert step(service.create_training_client_from_state(saved).result()) != expected


def test_a_custom_loss_of_the_client_is_differentiated(service: Any) -> None:
    """sum of logp^2 / 2: its gradient by each logp is logp."""
    torch = pytest.importorskip("torch")
    mine, theirs = trained(service), trained(service)

    def loss(data: Any, found: Any) -> Any:
        return sum((one**2).sum() / 2 for one in found), {"half:sum": 0.5}

    result = mine.forward_backward_custom([supervised(tokens) for tokens in DATA], loss).result()
    assert result.metrics["half:sum"] == 0.5
    first, data = iter(logprobs(theirs)), []
    for tokens in DATA:
        weights = -np.array([next(first) for _ in tokens[1:]], np.float32)
        data.append(supervised(tokens))
        data[-1].loss_fn_inputs["weights"] = types.TensorData.from_torch(torch.from_numpy(weights))
    theirs.forward_backward(data, "cross_entropy").result()
    steps = [client.optim_step(ADAM).result().metrics for client in (mine, theirs)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-5)


def test_several_targets_of_a_token(service: Any) -> None:
    """The same one twice, with a part of its weight each, is that one; zeros are sent as compressed rows."""
    torch = pytest.importorskip("torch")
    mine, theirs, parts = trained(service), trained(service), []
    for tokens in DATA:
        targets, weights = torch.zeros(len(tokens) - 1, 8, dtype=torch.long), torch.zeros(len(tokens) - 1, 8)
        targets[:, 0] = targets[:, 5] = torch.tensor(tokens[1:])
        weights[:, 0], weights[:, 5] = 0.75, 0.25
        inputs = {"target_tokens": targets, "weights": weights}
        parts.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
        assert parts[-1].loss_fn_inputs["weights"].sparse_crow_indices is not None
    forward = mine.forward(parts, "cross_entropy").result()
    result = mine.forward_backward(parts, "cross_entropy").result()
    theirs.forward_backward([supervised(tokens) for tokens in DATA], "cross_entropy").result()
    own = iter(logprobs(theirs))
    for tokens, one, other in zip(DATA, result.loss_fn_outputs, forward.loss_fn_outputs, strict=True):
        found = one["logprobs"].to_numpy()
        assert found.shape == (len(tokens) - 1, 8)
        np.testing.assert_array_equal(found, other["logprobs"].to_numpy())
        np.testing.assert_allclose(found[:, 5], [next(own) for _ in tokens[1:]], atol=1e-5)
        np.testing.assert_array_equal(found[:, 5], found[:, 0])
    steps = [client.optim_step(ADAM).result().metrics for client in (mine, theirs)]
    assert steps[0]["grad_norm:mean"] == pytest.approx(steps[1]["grad_norm:mean"], rel=1e-5)


def test_dro_has_the_gradient_of_its_formula(service: Any) -> None:
    """That of logp is A - beta (logp - logprobs)."""
    torch, beta = pytest.importorskip("torch"), 0.5
    mine, theirs = trained(service), trained(service)
    now, by_dro, by_weights = iter(logprobs(theirs)), [], []
    for number, tokens in enumerate(DATA, 1):
        advantages = np.linspace(-1, 1, len(tokens) - 1, dtype=np.float32) + 0.05
        sampled = np.linspace(-3, -0.1, len(tokens) - 1, dtype=np.float32) / number
        away = np.array([next(now) for _ in advantages], np.float32) - sampled
        by_dro.append(supervised(tokens))
        del by_dro[-1].loss_fn_inputs["weights"]
        for name, values in (("advantages", advantages), ("logprobs", sampled)):
            by_dro[-1].loss_fn_inputs[name] = types.TensorData.from_torch(torch.from_numpy(values))
        by_weights.append(supervised(tokens))
        weights = torch.from_numpy(advantages - beta * away)
        by_weights[-1].loss_fn_inputs["weights"] = types.TensorData.from_torch(weights)
    mine.forward_backward(by_dro, "dro", {"beta": beta}).result()
    theirs.forward_backward(by_weights, "cross_entropy").result()
    steps = [client.optim_step(ADAM).result().metrics for client in (mine, theirs)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-5)


def test_an_adapter_trains_and_goes_on_from_its_checkpoint(service: Any) -> None:
    client = trained(service, rank=2)
    info = client.get_info()
    assert info.is_lora and info.lora_rank == 2
    before = sum(logprobs(client))
    for _ in range(3):
        client.forward_backward([supervised(tokens) for tokens in DATA], "cross_entropy")
        client.optim_step(ADAM).result()
    assert sum(logprobs(client)) > before + 1
    saved = client.save_state("adapter").result().path
    again = service.create_training_client_from_state_with_optimizer(saved).result()
    assert logprobs(again) == logprobs(client)
    with pytest.raises(tinker.RequestFailedError, match="is there already"):
        client.save_state("adapter").result()


def test_a_checkpoint_whose_time_is_over_is_deleted(service: Any, url: str) -> None:
    client, rest = trained(service), service.create_rest_client()

    def there() -> list[str]:
        return [one.tinker_path for one in rest.list_checkpoints(client.model_id).result().checkpoints]

    kept = client.save_state("kept", ttl_seconds=10**6).result().path
    gone = client.save_state("gone").result().path
    expires = [one.expires_at for one in rest.list_checkpoints(client.model_id).result().checkpoints]
    assert expires[0] is not None and expires[1] is None
    rest.set_checkpoint_ttl_from_tinker_path(kept, None).result()
    assert rest.list_checkpoints(client.model_id).result().checkpoints[0].expires_at is None
    with httpx.Client(base_url=f"{url}/api/v1", timeout=SECONDS) as http:  # the client has an hour at least
        place = "/training_runs/{}/checkpoints/{}/ttl".format(*gone.removeprefix("tinker://").split("/", 1))
        assert http.put(place, json={"ttl_seconds": "soon"}).status_code == 400
        assert http.put(place.replace("gone", "never"), json={"ttl_seconds": 1}).status_code == 404
        assert http.put(place, json={"ttl_seconds": 1}).status_code == 204
    eventually(lambda: there() == [kept], "its time is over")
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        service.create_training_client_from_state(gone).result()
    assert client.save_state("gone").result().path == gone
    assert there() == [kept, gone]
    service.create_training_client_from_state(gone).result()


def test_what_is_sampled_is_the_policys(service: Any, url: str) -> None:
    client = trained(service)
    client.forward_backward([supervised(tokens) for tokens in DATA], "cross_entropy")
    client.optim_step(ADAM).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    settings = types.SamplingParams(max_tokens=8, seed=3, stop=[])
    found = sampler.sample(types.ModelInput.from_ints(PROMPT), 3, settings, topk_prompt_logprobs=4).result()
    assert [one.stop_reason for one in found.sequences] == ["length"] * 3
    tokens = [[int(token) for token in one.tokens] for one in found.sequences]
    assert len({tuple(one) for one in tokens}) > 1
    likeliest = found.topk_prompt_logprobs
    assert likeliest[0] is None and [len(one) for one in likeliest[1:]] == [4] * (len(PROMPT) - 1)
    for one, token, logprob in zip(likeliest[1:], PROMPT[1:], found.prompt_logprobs[1:], strict=True):
        of_all = dict(one)
        assert sorted(of_all.values(), reverse=True) == [p for _, p in one] and sum(np.exp(p) for _, p in one) < 1
        assert of_all.get(token, logprob) == pytest.approx(logprob, abs=1e-5)
        assert logprob <= one[0][1] + 1e-5
    again = sampler.sample(types.ModelInput.from_ints(PROMPT), 3, settings).result()
    assert [[int(token) for token in one.tokens] for one in again.sequences] == tokens
    for one, ids in zip(found.sequences, tokens, strict=True):
        scored = sampler.compute_logprobs(types.ModelInput.from_ints([*PROMPT, *ids])).result()
        np.testing.assert_allclose(scored[len(PROMPT) :], [float(p) for p in one.logprobs], atol=1e-4)
        passed = client.forward([supervised([*PROMPT, *ids])], "cross_entropy").result()
        np.testing.assert_allclose(passed.loss_fn_outputs[0]["logprobs"].tolist(), scored[1:], atol=1e-4)
    # A text that stops it is part of what is sampled, and nothing behind it.
    stops = types.SamplingParams(max_tokens=8, seed=3, stop=tokens[0][:1])
    assert [
        int(t) for t in sampler.sample(types.ModelInput.from_ints(PROMPT), 1, stops).result().sequences[0].tokens
    ] == tokens[0][:1]
    tokenizer = Tokenizer(client.get_info().model_data.tokenizer_id)
    stop = next(character for character in tokenizer.decode(tokens[0]) if character.isascii())
    stops = types.SamplingParams(max_tokens=8, seed=3, stop=[stop])
    cut = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, stops).result().sequences[0]
    kept = [int(token) for token in cut.tokens]
    assert cut.stop_reason == "stop" and tokens[0][: len(kept)] == kept
    assert stop in tokenizer.decode(kept) and stop not in tokenizer.decode(kept[:-1])
    assert [[span[0], span[2:]] for span in versions_of(found, url)] == [[client.model_id, [0, 8]]]


def versions_of(found: Any, url: str) -> list[Any]:
    """Of the first sequence."""
    request = found.sequences[0].sequence_id.rpartition(":")[0]
    answer = httpx.get(f"{url}/api/v1/futures/{request}/versions", timeout=SECONDS)
    versions: list[list[Any]] = answer.json()["versions"]
    return versions[0]


def test_a_sampling_client_in_flight_follows_its_run(service: Any, url: str) -> None:
    client = trained(service)

    def trained_and_saved() -> Any:
        client.forward_backward([supervised(tokens) for tokens in DATA], "cross_entropy")
        client.optim_step(ADAM).result()
        return client.save_weights_and_get_sampling_client(kind="inflight").result()

    def used() -> set[str]:
        settings = types.SamplingParams(max_tokens=4, stop=[])
        found = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, settings).result()
        return {folder for _, folder, _, _ in versions_of(found, url)}

    sampler = trained_and_saved()
    (first,) = used()
    trained_and_saved()
    # Until the newer ones have come to the server, it samples with those that it has.
    eventually(lambda: first not in used(), "a sample by the newer weights alone")
    assert len(used()) == 1


def test_targets_are_scored_by_the_sampling_client(service: Any) -> None:
    sampler = service.create_sampling_client(base_model="model").result()
    prompt = types.ModelInput.from_ints([*PROMPT, 8])
    targets = types.TensorData(data=[6, 9, 7, -1, 8, 3], dtype="int64", shape=[3, 2])
    found = sampler.sample(
        prompt, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True, target_prompt_logprobs=targets
    ).result()
    scored = np.array(found.target_prompt_logprobs.data).reshape(3, 2)
    np.testing.assert_allclose(scored[:, 0], found.prompt_logprobs[1:], atol=1e-6)
    assert scored[1, 1] == 0 and scored[0, 1] < 0


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda client: client.optim_step(ADAM), "there is no gradient"),
        (lambda client: client.forward_backward([supervised([1, 2])], "custom"), "'custom' is not offered"),
        (
            lambda client: client.forward_backward([supervised([1] * (LONGEST + 1))], "cross_entropy"),
            f"at most {LONGEST - 1} are offered",
        ),
        (
            lambda client: client.forward_backward([supervised([1, VOCABULARY])], "cross_entropy"),
            "token ids are from 0",
        ),
        (lambda client: client.save_state("step 10"), "path: must be a name of letters"),
        (lambda client: client.save_weights_for_sampler("a/b"), "path: must be a name of letters"),
        (lambda client: client.save_state("a", ttl_seconds=0), "ttl_seconds"),
        (lambda client: client.optim_step(types.AdamParams(grad_clip_norm=-1.0)), "grad_clip_norm"),
        (lambda client: client.save_weights_external("out"), "save_weights_external is not offered"),
    ],
)
def test_what_is_refused_is_raised_by_name_and_the_run_goes_on(service: Any, ask: Any, told: str) -> None:
    client = trained(service)
    before = logprobs(client)
    with pytest.raises(tinker.RequestFailedError, match=told):
        ask(client).result()
    assert logprobs(client) == before


def step(client: Any) -> None:
    client.forward_backward([supervised(tokens) for tokens in DATA], "cross_entropy")
    client.optim_step(ADAM).result()


def test_a_name_may_be_saved_again_for_samplers(service: Any, place: pathlib.Path) -> None:
    def sampled(path: str) -> list[float]:
        sampler = service.create_sampling_client(model_path=path).result()
        return list(sampler.compute_logprobs(types.ModelInput.from_ints(DATA[0])).result()[1:])

    client = trained(service)
    for _ in range(3):
        path = client.save_weights_for_sampler("latest").result().path
        np.testing.assert_allclose(sampled(path), logprobs(client)[: len(DATA[0]) - 1], atol=1e-3)
        step(client)
    for _ in range(9):  # the oldest snapshots are deleted, and not what has a name
        client.save_weights_and_get_sampling_client().result()
    sampled(path)
    (run,) = (place / "work" / "models").glob(client.model_id.replace(":", "-"))
    assert [one.name for one in (run / "snapshots").glob("*-latest")] == ["9-latest"]


@pytest.mark.parametrize("change", ["overwritten", "deleted"])
def test_a_run_keeps_what_it_began_with(service: Any, change: str) -> None:
    """The other run takes the mesh meanwhile, so this one is restored."""
    other = trained(service)
    step(other)
    path, saved = other.save_state(change).result().path, logprobs(other)
    client = service.create_training_client_from_state(path).result()
    if change == "deleted":
        service.create_rest_client().delete_checkpoint(other.model_id, f"weights/{change}").result()
    step(other)
    if change == "overwritten":
        other.save_state(change, overwrite=True).result()
    assert logprobs(client) == saved


def test_a_refused_step_leaves_the_gradient_after_a_change_of_the_run_too(service: Any) -> None:
    other, client = trained(service), trained(service)
    client.forward_backward([supervised(tokens) for tokens in DATA], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="only adam_params"):
        client.optim_step(types.DimuonParams(learning_rate=1e-3)).result()
    client.optim_step(ADAM).result()
    client.forward_backward([supervised(tokens) for tokens in DATA], "cross_entropy").result()
    logprobs(other)  # takes the mesh: with a gradient this run is not saved, and its calls are repeated
    assert client.optim_step(ADAM).result().metrics["grad_norm:mean"] > 0


def test_what_no_client_sends_ends_nothing(url: str, service: Any, place: pathlib.Path) -> None:
    """Not the server, and no other call."""
    client = trained(service)
    client.forward_backward([supervised(tokens) for tokens in DATA], "cross_entropy").result()
    with httpx.Client(base_url=f"{url}/api/v1", timeout=SECONDS) as http:

        def post(route: str, **body: Any) -> httpx.Response:
            return http.post(route, json=body)

        session = post("/create_session").json()["session_id"]
        made = {"session_id": session, "base_model": "model"}
        odd = {"rank": 2, "train_mlp": False, "train_attn": "x"}
        assert post("/create_model", **made, model_seq_id=0, lora_config=odd).status_code == 400
        dimuon = {"type": "dimuon"}
        refused = post("/create_model", **made, model_seq_id=0, optimizer_config=dimuon)
        assert refused.status_code == 400 and "dimuon is not offered" in refused.json()["detail"]
        null = {"rank": 2, "seed": 2**62, "train_attn": None}
        adapter = answer_to(http, post("/create_model", **made, model_seq_id=0, lora_config=null)).json()
        assert adapter["model_id"] == f"{session}:train:0"
        refused = answer_to(http, post("/optim_step", model_id=adapter["model_id"], seq_id=1, adam_params={}))
        assert refused.json()["error"] == "adam_params.learning_rate: is missing"
        # Targets that would need terabytes.
        sampler = post("/create_sampling_session", **made, sampling_session_seq_id=0).json()["sampling_session_id"]
        prompt, targets = {"chunks": [{"tokens": [5]}]}, {"shape": [0, 10**12], "data": []}
        asked = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
        refused = answer_to(http, post("/asample", **asked, seq_id=0, target_prompt_logprobs=targets))
        assert refused.json()["category"] == "user" and "shape must be [0, k]" in refused.json()["error"]
    # What is saved has been damaged.
    saved = client.save_state("damaged").result().path
    (folder,) = (place / "work" / "models").glob("*/weights/damaged")
    for file in folder.rglob("*"):
        if file.is_file():
            file.write_bytes(b"?")
    with pytest.raises(tinker.RequestFailedError, match="can be read"):
        service.create_training_client_from_state(saved).result()
    assert client.optim_step(ADAM).result().metrics["grad_norm:mean"] > 0


def test_a_call_that_comes_again_is_the_same_call(url: str) -> None:
    with httpx.Client(base_url=f"{url}/api/v1", timeout=SECONDS) as http:

        def post(route: str, **body: Any) -> httpx.Response:
            return http.post(route, json=body)

        session = post("/create_session", tags=[], user_metadata=None, sdk_version="0").json()["session_id"]
        made = post("/create_model", session_id=session, model_seq_id=0, base_model="model", lora_config={"rank": 0})
        model = made.json()["model_id"]
        adam = ADAM.model_dump() if hasattr(ADAM, "model_dump") else dict(ADAM)
        # The second call comes first, and waits.
        second = post("/optim_step", model_id=model, seq_id=2, adam_params=adam)
        assert second.status_code == 200
        assert post("/optim_step", model_id=model, seq_id=2, adam_params=adam).json() == second.json()
        other = {**adam, "learning_rate": 1.0}
        assert post("/optim_step", model_id=model, seq_id=2, adam_params=other).status_code == 409
        body = {"model_id": model, "seq_id": 1, "path": "first"}
        first = post("/save_weights", **body)
        for answer in (first, second):
            found = answer_to(http, answer)
            assert found.status_code == 200
        assert "there is no gradient" in found.json()["error"] and found.json()["category"] == "user"
        # The client's own retry numbers the sampling session anew.
        snapshot = {"model_id": model, "seq_id": 3, "kind": "snapshot"}
        saved = [post("/save_weights_for_sampler", **snapshot, sampling_session_seq_id=i) for i in (0, 1)]
        assert saved[0].status_code == 200 and saved[0].json() == saved[1].json()
        assert answer_to(http, saved[1]).json()["sampling_session_id"] == f"{session}:sample:0"
        assert post("/save_weights_for_sampler", model_id=model, seq_id=3, path="other").status_code == 409
        assert post("/retrieve_future", request_id="nothing:7").status_code == 410
        assert post("/optim_step", model_id="nothing", seq_id=1, adam_params=adam).status_code == 404
        odd = {"model_id": model, "sampling_session_seq_id": 9, "kind": "mutable"}
        for seq, (route, asked) in enumerate(
            (
                ("/save_weights", body | {"path": "../up"}),
                ("/save_weights", body | {"overwrite": "false"}),
                ("/save_weights", odd),
                ("/save_weights_for_sampler", odd),
            ),
            4,
        ):
            refused = answer_to(http, post(route, **asked | {"seq_id": seq}))
            assert refused.json()["category"] == "user", refused.json()
        assert post("/create_model", session_id=session, model_seq_id=1, base_model="other").status_code == 400
        assert [
            one["tinker_path"] for one in http.get(f"/training_runs/{model}/checkpoints").json()["checkpoints"]
        ] == [f"tinker://{model}/weights/first"]
        assert http.post(f"/sessions/{session}/finish").status_code == 200
        assert post("/session_heartbeat", session_id=session).status_code == 410
