"""scalerl-serve with what only tests need: --engine=replay (engine.py), and --faults (faults.py).

python -m tests.support.replay.serve --engine=replay --port=0 [--faults=nan_logprobs:8]
"""

import sys

from absl import flags, logging

from rollout_server import serve
from rollout_server.engines.make import ENGINES
from scalerl_jax.contract.limits import STOP_SECONDS
from tests.support.replay import faults, make

NAME = "tests.support.replay.serve"
FAULTS = flags.DEFINE_string("faults", "", "kind:after,... of what goes wrong on the wire.")


def interceptors() -> list[faults.FaultInterceptor]:
    try:
        wanted = faults.parse(FAULTS.value)
    except ValueError as error:
        raise ValueError(f"--faults={FAULTS.value}: {error}") from None
    if wanted:
        logging.warning("faults on purpose: %s", FAULTS.value)
    return [faults.FaultInterceptor(wanted)] if wanted else []


def run() -> None:
    ENGINES["replay"], STOP_SECONDS["replay"] = make.make, 5.0
    flags.FLAGS["engine"].parser.enum_values.append("replay")
    serve.run(interceptors)


if __name__ == "__main__":
    sys.exit(run())
