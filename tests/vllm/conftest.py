"""Tests of the vLLM engine, for the environment that has it (`make test-vllm`); elsewhere none is even collected."""

import importlib.util

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
