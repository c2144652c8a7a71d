# A generator with vLLM, for NVIDIA GPUs; the driver is the node's. There is no JAX in it. From the project's folder:
#
#   docker build --file=launch/docker/generator.Dockerfile --tag=REGISTRY/scalerl-generator:vllm .
FROM python:3.12-slim-bookworm
ARG VLLM=0.32.0

# A C compiler: Triton compiles kernels as they are first used.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/scalerl
COPY setup.py pyproject.toml README.md LICENSE ./
COPY launch launch
COPY rollout_server rollout_server
COPY scalerl_jax scalerl_jax
# vLLM pins what it needs by itself, and the project its range of it.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[vllm,metrics]" "vllm==${VLLM}"
ENV VLLM_NO_USAGE_STATS=1
