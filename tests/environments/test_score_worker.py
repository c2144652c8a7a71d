"""A process that scores and the trainer that it belongs to."""

import json
import os
import subprocess
import sys

import psutil

from scalerl_jax import config_io
from scalerl_jax.config import Config
from tests.support.processes import SECONDS
from tests.support.waiting import eventually

TRAINER = """
import os, sys, time
from scalerl_jax.environments import Completion, Row
from scalerl_jax.environments.load import make_environment
from scalerl_jax.environments.scorer_pool import ScorerPool
from scalerl_jax.config import Config

config = Config()
config.environment.name = sys.argv[1] + ":Deaf"
pool = ScorerPool(config, {"": make_environment(config)})
pool.submit(Row("?"), Completion("x"))
time.sleep(600)
"""
DEAF = """
import os, pathlib, time

class Deaf:
    def rows(self, split): return []
    def score(self, row, completion):
        here = pathlib.Path(__file__)
        while True:
            try:
                here.with_suffix(".new").write_text(str(os.getpid()))
                here.with_suffix(".new").rename(here.with_suffix(".pid"))
                time.sleep(600)
            except BaseException:
                pass
"""


def test_a_score_that_catches_everything_ends_with_a_trainer_that_is_killed(tmp_path):
    (tmp_path / "deaf.py").write_text(DEAF)
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(tmp_path / "deaf.py")])
    try:
        assert eventually((tmp_path / "deaf.pid").exists, "the worker scores", seconds=SECONDS)
        worker = psutil.Process(int((tmp_path / "deaf.pid").read_text()))
    finally:
        trainer.kill()
        trainer.wait()
    try:
        assert not psutil.wait_procs([worker], timeout=SECONDS)[1]
    finally:
        if worker.is_running():
            worker.kill()


def test_a_worker_whose_trainer_is_gone_already_does_nothing():
    command = [sys.executable, "-m", "scalerl_jax.environments.score_worker"]
    first = json.dumps({"config": config_io.to_json(Config()), "parent": os.getpid() + 1}) + "\n"
    for given in (first, ""):
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300, check=True)
        assert (done.stdout, done.stderr) == ("", "")
