"""An environment as a user would write it, whose scores are odd: what is asked for is in the completion."""

import contextlib
import os
import pathlib
import time

from scalerl_jax.config import Config
from scalerl_jax.environments import Row, Score


def config(**environment: object) -> Config:
    made = Config()
    made.environment.name = f"{__file__}:Odd"
    for field, value in environment.items():
        setattr(made.environment, field, value)
    return made


class Odd:
    deterministic = True

    def rows(self, split):
        return [Row(f"{split} {n}?", str(n), extra={"bonus": n / 4}) for n in range(3)]

    def score(self, row, completion):
        if completion == "not a number":
            return Score(float("nan"), True)
        if completion == "not a score":
            return "1.0"
        if completion == "fails":
            raise KeyError(completion)
        if completion == "leaves":
            raise SystemExit(3)
        if completion == "crashes":
            os._exit(3)
        if completion.startswith("escapes to "):
            # What holds the worker's socket is in no group that a kill of it reaches.
            if os.fork() == 0:
                os.setsid()
                file = pathlib.Path(completion.removeprefix("escapes to "))
                file.with_suffix(".new").write_text(str(os.getpid()))
                file.with_suffix(".new").rename(file)
            time.sleep(600)
            os._exit(3)
        if completion.startswith("fails once, see "):
            seen = pathlib.Path(completion.removeprefix("fails once, see "))
            if not seen.exists():
                seen.touch()
                raise ConnectionError("no judge there")
            return Score(0.75, False)
        if completion == "forks" and os.fork() == 0:
            return Score(-2.0, False)  # of the fork, which goes on as if it were the worker
        if completion == "answers twice":
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    os.write(int(name), b'{"score": {"reward": 1.0, "correct": true}}\n')
        if completion == "computes":
            while True:
                time.process_time()
        if completion == "sleeps":
            time.sleep(600)
        if completion == "reads and prints":
            print("1", input("2"), flush=True)
        if completion == "keeps":
            self.kept = bytearray(2**31)
        if completion == "eats":
            return Score(float(len(bytearray(2**40))), True)
        return Score(row.extra["bonus"], completion == row.answer, {"length": float(len(completion))})
