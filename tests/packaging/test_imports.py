"""What each install has to bring: every import has its requirement, and no process loads what it must not need."""

import importlib.metadata
import re
import subprocess
import sys

import pytest

from tests.packaging.sources import modules, others, reached_from

# Import name -> what provides it, where the two differ.
PROVIDERS = {
    "absl": "absl-py",
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "jinja2": "transformers",  # by its extra [chat-template]; without the trainer the extra [launch] brings it
    "huggingface_hub": "datasets",  # which cannot be without it
    "orbax": "orbax-checkpoint",
    "yaml": "transformers",  # likewise, and [launch]
}
OPTIONAL = {"wandb", "prometheus_client", "verifiers"}  # used where they are installed and asked for
CONTRACT = "scalerl_jax.contract"
GATEWAY = "scalerl_jax.gateway"
TRAINER = ["scalerl_jax.train", "scalerl_jax.sft", "scalerl_jax.export"]


def declared(*extras: str) -> set[str]:
    """The names that an install with these extras asks for."""
    names = set()
    for requirement in importlib.metadata.requires("scalerl-jax") or []:
        name, marker = re.match(r"[\w-]+", requirement)[0], re.search(r'extra == "(\w+)"', requirement)  # type: ignore[index]
        if marker is None or marker[1] in extras:
            names.add(name.lower())
    return names


def needed(*names: str) -> set[str]:
    return {PROVIDERS.get(name, name).replace("_", "-") for name in others(reached_from(*names)) - OPTIONAL}


def test_an_install_has_every_module() -> None:
    """setuptools takes a folder for a package where it has an __init__.py."""
    folders = {path.parent for path in modules().values()}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_every_import_of_the_trainer_is_declared() -> None:
    # launch.commands starts the server too, whose engines have extras of their own.
    ours = [m for m in modules() if m.startswith(("scalerl_jax", "launch")) and m != "launch.commands"]
    found = needed(*(m for m in ours if not m.startswith(GATEWAY)))
    # Agents alone need the gateway's HTTP, and look whether it is there.
    assert found - {"starlette", "uvicorn"} <= declared("train", "environments", "mcp")


def test_every_import_of_the_gateway_is_declared() -> None:
    of_a_run = f"{GATEWAY}.agents"
    gateway = needed(*(m for m in modules() if m.startswith(GATEWAY) and m != of_a_run))
    # Local servers sample with jax, and share its devices.
    assert {"starlette", "uvicorn"} <= gateway - {"jax"} <= declared("gateway")


def test_every_import_of_the_tinker_server_is_declared() -> None:
    found = needed(*(m for m in modules() if m.startswith("scalerl_jax.tinker")))
    assert {"starlette", "uvicorn", "jax"} <= found <= declared("tinker")


def test_every_import_of_the_fitter_is_declared() -> None:
    assert needed(
        "scalerl_jax.scaling.commands.scalerl_fit", "scalerl_jax.scaling.commands.scalerl_compare"
    ) <= declared("fit")


def test_the_base_install_serves() -> None:
    assert needed("rollout_server.service") <= declared()
    assert declared().isdisjoint({"jax", "flax", "scipy", "torch"})


def test_the_vllm_engine_stands_without_the_trainer() -> None:
    """torch comes with vLLM, of the release that it wants."""
    reached = reached_from(*[module for module in modules() if module.startswith("rollout_server.engines.vllm")])
    assert others(reached) == {"absl", "google.protobuf", "numpy", "torch", "vllm"}
    # Beyond the contract only what the model's tensors are, in which nothing is computed, and how its files are read.
    described = {f"scalerl_jax.model{part}" for part in ("", ".decoder_config", ".hf_fields", ".tensor_layout")}
    described |= {"scalerl_jax.system", "scalerl_jax.system.files", "scalerl_jax.system.memory"}
    described |= {module for module in modules() if module.startswith("scalerl_jax.model.families")}
    ours = {name for name in reached if name.startswith("scalerl_jax.") and not name.startswith(CONTRACT)}
    assert ours == described
    assert "vllm" in declared("vllm") and declared("vllm").isdisjoint({"jax", "flax"})


def test_every_declared_package_of_the_trainer_is_imported() -> None:
    used = needed(*[module for module in modules() if not module.startswith("rollout_server.engines.vllm")])
    indirectly = {"sympy"}  # math-verify's own, and the verifier's answers are its objects
    assert declared("train") - used - indirectly == set()


def test_nothing_is_decided_by_this_process_default_device() -> None:
    """What is compiled may be for another device: it is asked of the mesh, or of the device itself."""
    assert [name for name, path in modules().items() if "default_backend(" in path.read_text(encoding="utf-8")] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        *[(module, "torch transformers vllm ray tensorflow") for module in TRAINER],
        ("scalerl_jax.scaling.commands.scalerl_fit", "flax optax orbax tokenizers transformers torch grpc"),
        ("scalerl_jax.scaling.commands.scalerl_compare", "flax optax orbax tokenizers transformers torch grpc"),
        ("scalerl_jax.report.command", "flax optax orbax tokenizers transformers torch grpc playwright"),
        ("scalerl_jax.gateway.app", "jax flax optax orbax scipy torch"),
        ("scalerl_jax.gateway.command", "jax flax optax orbax scipy torch starlette"),
        ("rollout_server.serve", "jax flax scipy torch vllm scalerl_jax"),
        ("rollout_server.service", "jax flax scipy torch vllm scalerl_jax"),
        ("scalerl_jax.contract.codec", "jax flax torch vllm scalerl_jax absl"),
        ("scalerl_jax.model.tensor_layout", "jax flax torch vllm safetensors ml_dtypes"),
        ("rollout_server.engines.jax.engine", "torch vllm transformers orbax"),
        ("launch.local", "jax flax torch grpc"),
    ],
)
def test_a_process_loads_nothing_it_must_not_need(module: str, forbidden: str) -> None:
    """In a process of its own: what is really loaded, through others' imports too. scalerl_jax: beyond the contract,
    and what has to do with processes alone."""
    program = f"import sys, {module}; contract = {(CONTRACT, 'scalerl_jax.system')!r}\n"
    program += "ours = [m for m in sys.modules if m.startswith('scalerl_jax.') and not m.startswith(contract)]\n"
    program += f"loaded = [m for m in {forbidden.split()!r} if (ours if m == 'scalerl_jax' else m in sys.modules)]\n"
    program += "print(*loaded)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []
