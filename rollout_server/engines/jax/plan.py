"""The JAX engine's memory on an accelerator that need not be present, from its programs compiled for it.

    python -m rollout_server.engines.jax.plan <question.json

The question has `topology`; `model`, the contents of a config.json; and `options`, the fields of EngineOptions that a
server would have there, except its folder and its queue. The answer is a line of JSON: `line`, which an engine would
log or fail with there, `fits`, and the numbers as `memory`; or `error`, in one line. scalerl-plan --generator runs this
as a process, since the trainer's code imports no server.
"""

import dataclasses
import json
import sys
from typing import Any

import jax

from launch import machines
from rollout_server.engines.engine import EngineOptions
from rollout_server.engines.engine_info import EngineMemory
from rollout_server.engines.jax.engine import device_parts, of_model, precision_of
from rollout_server.engines.jax.weights import abstract_weights, decode_precision
from scalerl_jax.model.decoder_config import DecoderConfig
from scalerl_jax.planning import compiled


def plan(machine: machines.Machine, config: DecoderConfig, options: EngineOptions) -> EngineMemory:
    """Compiles only the programs that need most memory: the chunk of all slots at their longest, the longest prefill
    and the longest score; none if memory is too small even without them. Raises ValueError, one line, where there is
    no such machine."""
    device = compiled.devices_of(machine)[0]
    precision = precision_of(options)
    computing = decode_precision(precision, device)
    on = jax.sharding.SingleDeviceSharding(device)
    weights = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), abstract_weights(config, precision)
    )
    memory = of_model(options, config, computing, weights)
    if memory.on_device > machine.chip.memory:
        return memory
    pool, scorer = device_parts(options, config, computing, allocated=False)
    memory = dataclasses.replace(memory, maximum_tokens=pool.longest)
    try:
        with compiled.compiling(device):
            working = sum(part.compile(weights, longest_only=True) for part in (pool, scorer))
    except jax.errors.JaxRuntimeError as error:
        working = max(0, compiled.needed(error) - memory.weights - memory.cache)
    return dataclasses.replace(memory, working=working)


def main() -> None:
    question = json.load(sys.stdin)
    machine = machines.parse(question["topology"])
    config, options = DecoderConfig.from_hf(question["model"]), EngineOptions(model="", queue=0, **question["options"])
    try:
        memory = plan(machine, config, options)
    except ValueError as error:
        answer: dict[str, Any] = {"error": str(error)}
    else:
        answer = {"memory": {**dataclasses.asdict(memory), "on_device": memory.on_device}}
        try:
            answer |= {"fits": True, "line": memory.check(device=machine.chip.memory, host=None, process=0)}
        except ValueError as error:
            answer |= {"fits": False, "line": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
