"""An environment as a user would write it, whose scores are odd: what is asked for is in the completion."""

import os
import time

from scalerl_jax.config import Config
from scalerl_jax.environments import Environment, Row, Score


def make(config: Config) -> Environment:
    return Environment(lambda split: [Row(f"{split} {n}?", str(n), extra={"bonus": n / 4}) for n in range(3)], score)


def score(row: Row, completion: str) -> Score:
    if completion == "not a number":
        return Score(float("nan"), True)
    if completion == "not a score":
        return 1.0  # type: ignore[return-value]
    if completion == "fails":
        raise KeyError(completion)
    if completion == "crashes":
        os._exit(3)
    if completion == "escapes":  # what holds the worker's pipe is in no group that a kill of it reaches
        if os.fork() == 0:
            os.setsid()
        time.sleep(20)
        os._exit(3)
    if completion == "computes":
        while True:
            time.process_time()
    return Score(row.extra["bonus"], completion == row.answer, {"length": float(len(completion))})
