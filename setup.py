"""What the package is and needs. Ranges stand here; the exact versions that `make` installs, in requirements/*.lock.

The base install is thin: the contract between a trainer and its generators, and the server around an engine. A trainer
adds [train], a vLLM generator [vllm]; the two never share an environment, so neither pins the other.
"""

import pathlib

from setuptools import find_packages, setup

BASE = [
    "absl-py>=2.1",
    "grpcio>=1.76",
    # Every generator answers health checks and reflection, whatever its engine. Their releases up to 1.82 go with
    # protobuf 6 and those from 1.82 with protobuf 7, and say so themselves, so the resolver picks the matching ones.
    "grpcio-health-checking>=1.76",
    "grpcio-reflection>=1.76",
    "ml-dtypes>=0.4",  # numpy's bfloat16, in which weights travel
    "numpy>=2.0",
    "protobuf>=6.31,<8",  # the generated classes come from a 6.31 compiler: older runtimes refuse them
    "zlib-ng>=1.0",  # the checksum of every chunk of weights, ten times as fast as zlib's
]
JAX = "0.10.2"
FIT = [f"jax>={JAX}", "matplotlib>=3.9", "rich>=13.7", "scipy>=1.13"]
TRAIN = [
    *FIT,
    "flax>=0.12.8",
    "math-verify>=0.9",
    "latex2sympy2-extended>=1.10",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.8",
    "safetensors>=0.5",
    "sympy>=1.13",
    "tensorboard>=2.19",
    "tokenizers>=0.21",
]
EXTRAS = {
    "fit": FIT,
    "train": TRAIN,
    "cuda": [*TRAIN, f"jax[cuda13]>={JAX}"],
    "tpu": [*TRAIN, f"jax[tpu]>={JAX}"],
    # No jax, no flax. The first release with a float32 head, and the last whose interface has been read
    # (rollout_server/engines/vllm/adapter.py checks it at start); what the tests run on stands in the lock.
    "vllm": ["tokenizers>=0.21", "vllm>=0.26,<0.34"],
    "test": [
        *TRAIN,
        "hypothesis>=6.130",
        "mypy>=2.0",
        "playwright>=1.60",  # drives the Chromium that the machine has; it brings none
        "psutil>=6",
        "pytest>=9.0",
        "pytest-timeout>=2.4",
        "pytest-xdist>=3.7",
        "ruff>=0.14",
        "torch>=2.8",  # the independent reference of the model tests; nothing outside tests/ imports it
        "transformers>=5.0",
        "uv>=0.8",
    ],
}

setup(
    name="scalerl-jax",
    version="0.1.0",
    description="The ScaleRL recipe in JAX: train a reasoning model by RL, and predict where the run will end",
    long_description=(pathlib.Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["scalerl_jax*", "rollout_server*", "launch*"]),
    package_data={
        "scalerl_jax.contract": ["rollout.proto", "*.pyi"],
        "scalerl_jax.report": ["assets/*", "uplot/*"],
    },
    install_requires=BASE,
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": [
            "scalerl-train = launch.commands:train",
            "scalerl-sft = launch.commands:sft",
            "scalerl-serve = launch.commands:serve",
            "scalerl-fit = launch.commands:fit",
            "scalerl-compare = launch.commands:compare",
            "scalerl-export = launch.commands:export",
            "scalerl-report = launch.commands:report",
        ]
    },
)
