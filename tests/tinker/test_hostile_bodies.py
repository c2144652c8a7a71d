"""Requests that no client should send: each has an answer of the stated codes, and the server goes on.

4,000 of them take 10 s of CPU, and all in test-long 40.
"""

import json
import pathlib
import random
from typing import Any

import httpx
import numpy as np
import pytest

from scalerl_jax.tinker import tinker_pb2 as pb
from tests.gateway.test_hostile_bodies import changed
from tests.tinker.served import answer_to, model_folder, rollout_server, tinker_server

pytestmark = pytest.mark.slow

CODES = {200, 400, 404, 405, 409, 410, 413}
ADAM = {"learning_rate": 0.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
LORA = {"rank": 2, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
LATER = 10**6  # calls from here on wait
OF_A_RUN = ("optim_step", "load_weights", "save_weights", "save_weights_for_sampler", "forward_backward")


def bodies(session: str, model: str, sampler: str) -> dict[str, dict[str, Any]]:
    return {
        "create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0"},
        "session_heartbeat": {"session_id": session},
        "telemetry": {"events": []},
        "get_info": {"model_id": model},
        "weights_info": {"tinker_path": f"tinker://{model}/weights/a"},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 1, "base_model": "model"},
        "create_model": {"session_id": session, "model_seq_id": 0, "base_model": "model", "lora_config": LORA},
        "load_weights": {
            "model_id": model, "seq_id": LATER + 4, "path": f"tinker://{model}/weights/a", "optimizer": True,
        },
        "optim_step": {"model_id": model, "seq_id": LATER + 3, "adam_params": ADAM},
        "save_weights": {"model_id": model, "seq_id": LATER + 5, "path": "a", "ttl_seconds": 3600, "overwrite": False},
        "save_weights_for_sampler": {
            "model_id": model, "seq_id": LATER + 6, "sampling_session_seq_id": 2, "kind": "snapshot",
        },
        "asample": {
            "sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "prompt_logprobs": True,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}, "topk_prompt_logprobs": 1,
            "sampling_params": {"max_tokens": 1, "seed": 1, "stop": ["a"], "temperature": 1.0, "top_k": 3},
            "target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]},
        },
        "retrieve_future": {"request_id": f"{model}:0"},
    }  # fmt: skip


def proto(model: str, rng: random.Random, number: int) -> bytes:
    """A call of forward_backward, some bytes of which are others."""
    forward = rng.random() < 0.5
    request = pb.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn="cross_entropy", forward_only=forward)
    several = rng.random() < 0.3
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(4, dtype=np.int32).tobytes()
    for name, dtype, kind in (("target_tokens", np.int64, pb.DTYPE_INT64), ("weights", np.float32, pb.DTYPE_FLOAT32)):
        array = np.arange(1, 5, dtype=dtype)
        datum.loss_fn_inputs[name].CopyFrom(pb.Tensor(dense=array.tobytes(), dtype=kind, shape=[4]))
        if several:
            rows, columns = (np.asarray(one, np.int64).tobytes() for one in ([0, 1, 2, 3, 4], [0, 1, 1, 0]))
            sparse = pb.SparseCsr(values=array.tobytes(), crow_indices=rows, col_indices=columns)
            datum.loss_fn_inputs[name].CopyFrom(pb.Tensor(sparse_csr=sparse, dtype=kind, shape=[4, 2]))
    data = bytearray(request.SerializeToString())
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])


@pytest.mark.parametrize("count", [4_000, pytest.param(20_000, marks=pytest.mark.long)])
def test_every_request_has_an_answer(count: int, tmp_path: pathlib.Path) -> None:
    rng, model_path = random.Random(0), model_folder(tmp_path / "model")
    (tmp_path / "work").mkdir()
    with rollout_server(tmp_path, model_path) as address:
        server = tinker_server(tmp_path / "work", model_path, address)
        try:
            base = f"http://{server.wait().address}/api/v1/"
            with httpx.Client(base_url=base, timeout=120) as http:
                ask(http, rng, count)
            assert server.process.poll() is None, server.log.read_text()
        finally:
            server.close()
    assert "Traceback" not in server.log.read_text()


def ask(http: httpx.Client, rng: random.Random, count: int) -> None:
    session = http.post("create_session", json={}).json()["session_id"]
    made = {"session_id": session, "model_seq_id": 0, "base_model": "model", "lora_config": LORA | {"rank": 0}}
    model = http.post("create_model", json=made).json()["model_id"]
    wanted = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "model"}
    sampler = http.post("create_sampling_session", json=wanted).json()["sampling_session_id"]
    good = bodies(session, model, sampler)
    codes, numbers, runs, call, last = set[int](), iter(range(1, count + 1)), iter(range(1, 4)), 1, None
    for _ in range(count):
        name = rng.choice([*good, "forward_backward"])
        # The next call of the run, which is computed.
        number = call if name in OF_A_RUN and rng.random() < 0.2 else 0
        if name == "forward_backward":
            content, kind = proto(model, rng, number or LATER), "application/x-protobuf"
        else:
            body = changed(good[name], rng)
            if isinstance(body, dict) and "seq_id" in body:
                if name == "asample" and rng.random() < 0.1:
                    body["seq_id"] = next(numbers)
                if number:
                    body["seq_id"] = number
                    body |= {"sampling_session_seq_id": number} if name == "save_weights_for_sampler" else {}
            if name == "create_model" and isinstance(body, dict) and rng.random() < 0.05:
                body["model_seq_id"] = next(runs, 1)
            content, kind = json.dumps(body).encode("utf-8", "surrogatepass"), "application/json"
            if rng.random() < 0.05:
                content = content[: rng.randrange(len(content) + 1)]
        answer = http.post(name, content=content, headers={"content-type": kind})
        assert answer.status_code in CODES, (name, content, answer.text)
        assert answer.status_code == 200 or answer.json()["detail"], (name, content)
        codes.add(answer.status_code)
        if number and answer.status_code == 409 and f" call {call}," in answer.json()["detail"]:
            call += 1  # another body came under this number before
        if number and answer.status_code == 200 and answer.json()["request_id"] == f"{model}:{call}":
            call, last = call + 1, answer
    assert {200, 400, 404, 409, 410} <= codes and call > count / 200
    # It goes on: what is asked as it should be is answered.
    assert last is not None and answer_to(http, last).status_code == 200
    answer = http.post("asample", json={**good["asample"], "seq_id": count + 5})
    assert pb.SampleResponse.FromString(answer_to(http, answer).content).sequences
