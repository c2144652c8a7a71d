"""What a user's script does with Tinker's own client, the same each time. Writes what it was answered as JSON.

    python -m tests.tinker.script URL OUT

A warm start whose data come in several chunks, two steps of RL on what was sampled, log-probs, a run that goes on from
a checkpoint with its optimizer, and one that begins from its weights.
"""

import json
import sys
import warnings
from typing import Any

import numpy as np
import tinker
from tinker import types

from scalerl_jax.system import ending

PROMPT = [5, 6, 7]
ADAM = types.AdamParams(learning_rate=1e-2)


def supervised(i: int) -> types.Datum:
    tokens = [5, 6, 7 + i % 3, 8, 9 + i % 5]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": np.array([0, 1, 1, 0.5], np.float32)},
    )


def sampled(tokens: list[int], logprobs: list[float]) -> types.Datum:
    """Even tokens are what is wanted."""
    whole, behind = [*PROMPT, *tokens], len(PROMPT) - 1
    advantages = [0.0] * behind + [1.0 if token % 2 == 0 else -0.5 for token in tokens]
    return types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(whole[1:]),
            "logprobs": np.array([0.0] * behind + logprobs, np.float32),
            "advantages": np.array(advantages, np.float32),
        },
    )


def run(url: str) -> list[Any]:
    found: list[Any] = []
    service = tinker.ServiceClient(base_url=url, api_key="tml-x")
    client = service.create_lora_training_client(base_model="model", rank=0).result()

    def logprobs(result: Any) -> list[list[float]]:
        return [one["logprobs"].tolist() for one in result.loss_fn_outputs]

    for step in range(3):
        # More data than a request takes: it is cut, and the first part is sent last.
        data = [supervised(i) for i in range(step, step + 1030)] if step == 0 else [supervised(i) for i in range(8)]
        passed, stepped = client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)
        found += [passed.result().metrics, logprobs(passed.result()), stepped.result().metrics]
    for step in range(2):
        sampler = client.save_weights_and_get_sampling_client().result()
        settings = types.SamplingParams(max_tokens=6, temperature=1.0, seed=step)
        response = sampler.sample(types.ModelInput.from_ints(PROMPT), 4, settings).result()
        tokens = [(list(one.tokens), [float(p) for p in one.logprobs]) for one in response.sequences]
        found += [tokens, sampler.compute_logprobs(types.ModelInput.from_ints([*PROMPT, 8, 9])).result()]
        passed = client.forward_backward([sampled(*one) for one in tokens], "importance_sampling")
        found += [logprobs(passed.result()), client.optim_step(ADAM).result().metrics]
    saved = client.save_state("here").result().path
    found.append(saved)
    for again in (
        service.create_training_client_from_state_with_optimizer(saved).result(),
        service.create_training_client_from_state(saved).result(),
    ):
        again.forward_backward([supervised(1)], "cross_entropy").result()
        found.append(again.optim_step(ADAM).result().metrics)
        found.append(logprobs(again.forward([supervised(2)], "cross_entropy").result()))
    service.close("success")
    return found


def main() -> None:
    warnings.filterwarnings("ignore")
    answers = run(sys.argv[1])
    with open(sys.argv[2], "w") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    # A daemon thread of the client may be in compiled code, where Python before 3.14 aborts as it ends.
    ending.run(main)
