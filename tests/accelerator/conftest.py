"""The tests of an accelerator: `make test-accelerator`. On a CPU, or with --tiny, the same tests take small sizes."""

import dataclasses
import os

import jax
import pytest

# The tests' own process shares the device with the runs that it starts. Read when JAX first computes.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the tests are run with."""

    tiny: bool
    platform: str  # of the device that is tested: "gpu", "cpu", ...

    def pick(self, small: int, large: int) -> int:
        return small if self.tiny else large


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tiny", action="store_true", help="small sizes, as on a CPU")


def pytest_report_header() -> str:
    return f"device: {jax.devices()[0].device_kind} ({jax.default_backend()}), jax {jax.__version__}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def sizes(pytestconfig: pytest.Config) -> Sizes:
    platform = jax.default_backend()
    return Sizes(tiny=platform == "cpu" or pytestconfig.getoption("--tiny", default=False), platform=platform)


@pytest.fixture
def device(record_property) -> jax.Device:
    """The device under test; what it is goes into the report, and is printed where the test fails."""
    device = jax.devices()[0]
    record_property("device", device.device_kind)
    print(f"on {device.device_kind} ({device.platform})")
    return device
