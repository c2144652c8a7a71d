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
LORA = {"rank": 0, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}


def bodies(session: str, model: str, sampler: str) -> dict[str, dict[str, Any]]:
    return {
        "create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0"},
        "session_heartbeat": {"session_id": session},
        "telemetry": {"events": []},
        "get_info": {"model_id": model},
        "weights_info": {"tinker_path": f"tinker://{model}/weights/a"},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 1, "base_model": "model"},
        "create_model": {"session_id": session, "model_seq_id": 0, "base_model": "model", "lora_config": LORA},
        "load_weights": {"model_id": model, "seq_id": 4, "path": f"tinker://{model}/weights/a", "optimizer": True},
        "optim_step": {"model_id": model, "seq_id": 3, "adam_params": ADAM},
        "save_weights": {"model_id": model, "seq_id": 5, "path": "a", "ttl_seconds": 3600, "overwrite": False},
        "save_weights_for_sampler": {"model_id": model, "seq_id": 6, "sampling_session_seq_id": 2, "kind": "snapshot"},
        "asample": {
            "sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "prompt_logprobs": True,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}, "topk_prompt_logprobs": 1,
            "sampling_params": {"max_tokens": 1, "seed": 1, "stop": ["a"], "temperature": 1.0, "top_k": 3},
            "target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]},
        },
        "retrieve_future": {"request_id": f"{model}:0"},
    }  # fmt: skip


def proto(model: str, rng: random.Random) -> bytes:
    """A call of forward_backward, some bytes of which are others."""
    request = pb.ForwardBackwardRequest(model_id=model, seq_id=1, loss_fn="cross_entropy", forward_only=True)
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(4, dtype=np.int32).tobytes()
    for name, dtype, kind in (("target_tokens", np.int64, pb.DTYPE_INT64), ("weights", np.float32, pb.DTYPE_FLOAT32)):
        array = np.arange(1, 5, dtype=dtype)
        datum.loss_fn_inputs[name].CopyFrom(pb.Tensor(dense=array.tobytes(), dtype=kind, shape=[4]))
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
    made = {"session_id": session, "model_seq_id": 0, "base_model": "model", "lora_config": LORA}
    model = http.post("create_model", json=made).json()["model_id"]
    wanted = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "model"}
    sampler = http.post("create_sampling_session", json=wanted).json()["sampling_session_id"]
    good = bodies(session, model, sampler)
    codes, numbers = set[int](), iter(range(1, count + 1))
    for _ in range(count):
        name = rng.choice([*good, "forward_backward"])
        if name == "forward_backward":
            content, kind = proto(model, rng), "application/x-protobuf"
        else:
            body = changed(good[name], rng)
            if name == "asample" and isinstance(body, dict) and "seq_id" in body and rng.random() < 0.1:
                body["seq_id"] = next(numbers)
            content, kind = json.dumps(body).encode("utf-8", "surrogatepass"), "application/json"
            if rng.random() < 0.05:
                content = content[: rng.randrange(len(content) + 1)]
        answer = http.post(name, content=content, headers={"content-type": kind})
        assert answer.status_code in CODES, (name, content, answer.text)
        assert answer.status_code == 200 or answer.json()["detail"], (name, content)
        codes.add(answer.status_code)
    assert {200, 400, 404, 409, 410} <= codes
    # It goes on: what is asked as it should be is answered.
    answer = http.post("asample", json={**good["asample"], "seq_id": count + 5})
    assert pb.SampleResponse.FromString(answer_to(http, answer).content).sequences
