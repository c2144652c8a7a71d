"""`make bench-accelerator` in its small form: no part of it fails, and it writes what it says."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.slow
@pytest.mark.long
def test_every_part_of_the_small_form_runs(tmp_path) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.bench_accelerator", "--tiny", f"--out={tmp_path}"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "failed" not in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
    assert json.loads((tmp_path / "bench.json").read_text())
