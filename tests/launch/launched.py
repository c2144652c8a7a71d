"""scalerl-launch as a user runs it, and what it has made."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import yaml

from tests.support.paths import ROOT
from tests.support.processes import SECONDS

TINY = os.path.join(ROOT, "tests", "train", "tiny.py")
SCALERL_8B = os.path.join(ROOT, "configs", "scalerl_8b.py")

# Of each target the smallest launch there is.
KUBERNETES = (
    "--target=kubernetes", f"--config={TINY}", "--trainer=cpu", "--generator=cpu", "--trainer_image=trainer:1",
    "--generator_image=generator:1", "--config.model.path=models/tiny",
)  # fmt: skip
SLURM = (
    "--target=slurm", f"--config={TINY}", "--trainer=cpu", "--generator=cpu", "--insecure",
    "--config.model.path=models/tiny",
)  # fmt: skip

# By name, flags that are added to KUBERNETES; a later flag counts.
LAUNCHES = {
    "tiny": (),
    "tiny_insecure": ("--insecure",),
    "tiny_hosts": ("--trainer=cpu:4", "--generators=3", "--name=four-hosts", "--namespace=research"),
    "8b_tpu": (
        f"--config={SCALERL_8B}", "--trainer=v5p:4x4x4", "--generator=h100:2", "--generators=16",
        "--trainer_resources=cpu=64,memory=300Gi", "--hub_model=Qwen/Qwen3-8B",
        "--hub_dataset=POLARIS-Project/Polaris-Dataset-53K", "--autoscale=keda", "--maximum_generators=32",
        "--generator_env=NCCL_DEBUG=WARN,A=b=c",
    ),
    "8b_slices": (
        f"--config={SCALERL_8B}", "--trainer=v6e:4x4", "--slices=4", "--generator=h100", "--storage_class=fast",
    ),
    "8b_gpu": (
        f"--config={SCALERL_8B}", "--trainer=h200:2x8", "--generator=h200", "--generators=16", "--autoscale=hpa",
        "--maximum_generators=32", "--busy_target=0.75", "--issuer=ClusterIssuer/company",
        "--trainer_nodes=pool=big,zone=a", "--generator_nodes=pool=small", "--runs_claim=filestore",
        "--models_claim=filestore",
    ),
    "8b_gpu_lws": (f"--config={SCALERL_8B}", "--trainer=b200:2x8", "--trainer_kind=lws", "--generator=gpu:4"),
    "moe": (
        f"--config={ROOT}/configs/quickstart_moe.py", "--engine=jax", "--generator=l4",
        "--config.rollout.router_replay=true",
    ),
    "judging": (
        "--trainer=cpu", "--config.environment.name=programs", "--config.environment.minimum_terms=1",
        "--config.environment.maximum_terms=2",
    ),
    "generators": ("--part=generators", "--token_file=TOKEN", "--trainer=", "--trainer_image="),
    "trainer": (
        "--part=trainer", "--token_file=TOKEN", "--tls_authority=AUTHORITY", "--generator=",
        "--generator_image=",
        "--servers=dns:///generators.example:8500",
    ),
}  # fmt: skip


def flags_of(name: str, folder: pathlib.Path) -> list[str]:
    """Of LAUNCHES; a file it names is made in `folder`."""
    for file in ("TOKEN", "AUTHORITY"):
        (folder / file).write_text("0123456789abcdef\n")
    flags = [flag.replace("=TOKEN", f"={folder}/TOKEN") for flag in (*KUBERNETES, *LAUNCHES[name])]
    return [flag.replace("=AUTHORITY", f"={folder}/AUTHORITY") for flag in flags]


def launch(
    *flags: str, where: pathlib.Path, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command in `where`, with these variables in the place of the environment's own."""
    program = "import sys; sys.argv[0] = 'scalerl-launch'; from launch.commands import launch; launch()"
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        **(variables or {}),
    }
    command = [sys.executable, "-c", program, *flags]
    return subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
    )


def documents(folder: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """File -> its YAML documents."""
    return {path.name: list(yaml.safe_load_all(path.read_text())) for path in sorted(folder.glob("*.yaml"))}


def by_kind(folder: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """Kind -> objects of all files."""
    found: dict[str, list[dict[str, Any]]] = {}
    for document in [document for file in documents(folder).values() for document in file]:
        found.setdefault(document["kind"], []).append(document)
    return found
