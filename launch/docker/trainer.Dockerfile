# The trainer: scalerl-train and the other commands, with JAX for one accelerator. From the project's folder:
#
#   docker build --file=launch/docker/trainer.Dockerfile --build-arg=ACCELERATOR=tpu --tag=REGISTRY/scalerl-trainer:tpu .
#   docker build --file=launch/docker/trainer.Dockerfile --build-arg=ACCELERATOR=cuda --tag=REGISTRY/scalerl-trainer:cuda .
#
# ACCELERATOR=train makes one for CPUs. The versions of what it needs there are those that the tests ran on.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm
ARG PYTHON
ARG ACCELERATOR=tpu

# bubblewrap: the sandbox in which programs are judged.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/scalerl
COPY requirements/train-py${PYTHON}.lock constraints.txt
COPY setup.py pyproject.toml README.md LICENSE ./
COPY launch launch
COPY rollout_server rollout_server
COPY scalerl_jax scalerl_jax
RUN pip install --no-cache-dir --constraint=constraints.txt ".[${ACCELERATOR},environments,launch,metrics]"
COPY configs configs
