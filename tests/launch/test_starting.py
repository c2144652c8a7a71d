"""Who gets which GPU, and how much of it. No GPU is needed: what is set is the processes' environment."""

import pathlib
import subprocess
import sys

import pytest

from launch import starting
from launch.local import LocalServers
from scalerl_jax.config import Config
from scalerl_jax.config_check import ConfigError, check
from scalerl_jax.system import platforms
from tests.launch.test_local import STAND_IN, ask

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.fixture
def cuda(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's plugin for CUDA can be found."""
    (tmp_path / "plugins" / "jax_plugins" / "xla_cuda13").mkdir(parents=True)
    (tmp_path / "plugins" / "jax_plugins" / "xla_cuda13" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "plugins"))


def share_out(visible: str, servers: int, **environment: str) -> starting.Sharing | None:
    return starting.share_out(servers=servers, share=0.4, environment={"CUDA_VISIBLE_DEVICES": visible, **environment})


def test_one_gpu_is_shared_by_all(cuda: None) -> None:
    sharing = share_out("0", 2)
    assert sharing is not None
    assert sharing.trainer == {FRACTION: "0.500"}
    assert sharing.servers == [{"CUDA_VISIBLE_DEVICES": "0", FRACTION: "0.200"}] * 2
    assert sharing.sentence == (
        "one GPU for the trainer and 2 local servers: of its memory the trainer takes 50%, each server 20% "
        "(config.fleet.gpu_share)"
    )


@pytest.mark.parametrize("gpus", range(1, 6))
@pytest.mark.parametrize("servers", range(1, 6))
def test_no_gpu_is_promised_twice(cuda: None, gpus: int, servers: int) -> None:
    names = [f"GPU-{i}" for i in range(gpus)]
    sharing = share_out(",".join(names), servers)
    assert sharing is not None and len(sharing.servers) == servers
    taken = dict.fromkeys(names, 0.0)
    processes = [sharing.trainer, *sharing.servers]
    for environment in processes:
        for name in environment.get("CUDA_VISIBLE_DEVICES", ",".join(names)).split(","):
            # What JAX takes by itself where nobody says otherwise is three quarters.
            taken[name] += float(environment.get(FRACTION, 0.75))
    assert all(0 < share <= 1 - starting.SPARE + 0.005 for share in taken.values()), taken
    if gpus > servers:
        assert all(FRACTION not in environment for environment in processes)


def test_a_user_who_has_chosen_is_left_alone(cuda: None) -> None:
    assert share_out("0", 1) is not None
    assert share_out("0", 1, XLA_PYTHON_CLIENT_PREALLOCATE="false") is None
    assert share_out("0", 1, XLA_CLIENT_MEM_FRACTION=".3") is None


def test_there_is_nothing_to_share_without_gpus(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert share_out("", 1) is None
    assert share_out("-1", 1) is None
    assert share_out("0", 1, JAX_PLATFORMS="cpu") is None
    assert share_out("0", 1, JAX_PLATFORMS="cuda,cpu") is not None
    monkeypatch.setattr(platforms, "_PLUGINS", ("jax_plugins.of_nobody", "no_such_package.at_all"))
    assert share_out("0", 1) is None


def test_looking_imports_no_jax() -> None:
    program = "import sys; from launch import starting; starting.share_out(servers=1, share=.4)"
    program += "; print([name for name in ('jax', 'jaxlib') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_each_server_gets_its_own_share(tmp_path: pathlib.Path, cuda: None) -> None:
    sharing = share_out("3,5", 2)
    assert sharing is not None
    with LocalServers(STAND_IN, count=2, workdir=str(tmp_path), environments=sharing.servers) as servers:
        assert [ask(address, "env CUDA_VISIBLE_DEVICES") for address in servers.addresses] == ["3", "5"]
        assert [ask(address, f"env {FRACTION}") for address in servers.addresses] == ["0.400"] * 2


def test_vllm_is_told_by_its_flag(tmp_path: pathlib.Path) -> None:
    config = Config()
    config.fleet.engine, config.fleet.vllm_python = "vllm", sys.executable
    command = starting.serve_command(config, model="model", maximum_tokens=256, gpu_memory=0.2)
    assert "--device_memory=0.200" in command
    assert not any(
        part.startswith("--device_memory") for part in starting.serve_command(config, model="m", maximum_tokens=8)
    )
    config.fleet.engine = "jax"
    command = starting.serve_command(config, model="model", maximum_tokens=256, gpu_memory=0.2)
    assert not any(part.startswith("--device_memory") for part in command)


@pytest.mark.parametrize("share", [0.0, 0.9, 1.5])
def test_a_share_that_leaves_nothing_is_refused(share: float) -> None:
    config = Config()
    config.fleet.gpu_share = share
    with pytest.raises(ConfigError, match=r"config.fleet.gpu_share=.*: must be above 0 and below 0.9"):
        check(config)


def test_too_many_vllm_servers_for_one_gpu_are_refused(cuda: None) -> None:
    with pytest.raises(ValueError, match=r"config.fleet.gpu_share=0.4: 9 of config.fleet.servers=9 are on one GPU"):
        starting.share_out(servers=9, share=0.4, engine="vllm", environment={"CUDA_VISIBLE_DEVICES": "0"})


def test_a_driver_that_hangs_is_no_gpu(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As nvidia-smi does where the driver is wedged."""

    def hang(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 60)

    monkeypatch.setattr("glob.glob", lambda pattern: [])
    monkeypatch.setattr("shutil.which", lambda name: str(tmp_path / name))
    monkeypatch.setattr("subprocess.run", hang)
    assert platforms.visible_gpus({}) == []
