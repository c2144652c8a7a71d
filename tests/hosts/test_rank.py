"""Which host a process is, from flags and from what launchers put into its environment."""

import contextlib
import http.server
import threading
from collections.abc import Iterator

import pytest

from scalerl_jax.hosts.rank import PORT, Rank, find, first_node
from tests.support.ports import nowhere

JOBSET = {
    "JOBSET_NAME": "run", "JOBSET_REPLICATED_JOB_NAME": "trainer", "JOBSET_JOB_INDEX": "1", "JOBSET_REPLICAS": "2",
    "JOBSET_COMPLETIONS": "4", "JOB_COMPLETION_INDEX": "3",
}  # fmt: skip
LWS = {"LWS_LEADER_ADDRESS": "run-0.run.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "2"}
SLURM = {
    "SLURM_JOB_ID": "123456", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "3", "SLURM_PROCID": "0",
    "SLURM_STEP_NODELIST": "n[07-09]",
}  # fmt: skip
TPU = {"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2", "TPU_WORKER_ID": "1"}
SLICES = {
    **TPU, "MEGASCALE_NUM_SLICES": "3", "MEGASCALE_SLICE_ID": "2", "MEGASCALE_COORDINATOR_ADDRESS": "10.9.9.9:8080"
}  # fmt: skip


def no_tpu() -> bool:
    return False


@pytest.mark.parametrize("how", ["auto", ""])
@pytest.mark.parametrize(
    ("name", "environment", "index", "count", "coordinator"),
    [
        ("jobset", JOBSET, 7, 8, f"run-trainer-0-0.run:{PORT}"),
        ("lws", LWS, 2, 4, f"run-0.run.default:{PORT}"),
        ("slurm", SLURM, 0, 3, "n07:23456"),
        ("tpu", TPU, 1, 2, f"10.0.0.1:{PORT}"),
        ("tpu", SLICES, 5, 6, f"10.9.9.9:{PORT}"),
    ],
)
def test_the_environment_tells(how: str, name: str, environment, index: int, count: int, coordinator: str) -> None:
    found = find(how or name, environment=environment, has_tpu=no_tpu)
    assert found is not None
    assert (found.index, found.count, found.coordinator) == (index, count, coordinator)
    elsewhere = find(how or name, coordinator="other:9", environment=environment, has_tpu=no_tpu)
    assert elsewhere is not None and elsewhere.coordinator == "other:9"


def test_flags_tell() -> None:
    for how in ("auto", "given"):
        found = find(how, coordinator="a:1", count=2, index=1, environment=SLURM, has_tpu=no_tpu)
        assert found == Rank(1, 2, "a:1", "flags")


@pytest.mark.parametrize(
    ("how", "environment"),
    [
        ("auto", {}),
        ("one", SLURM),
        ("auto", {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}),
        ("auto", {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}),  # in a batch script, outside of any step
        ("auto", {**LWS, "LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}),
    ],
)
def test_one_host(how: str, environment) -> None:
    assert find(how, environment=environment, has_tpu=no_tpu) is None


@pytest.mark.parametrize(
    ("how", "flags", "environment", "told"),
    [
        ("auto", {"count": 2, "index": 0}, {}, "--coordinator: needed with --host_count, --host_index"),
        ("given", {}, {}, "--coordinator, --host_count, --host_index: needed with given"),
        ("auto", {"coordinator": "a:1"}, {}, "--coordinator: requires --host_count and --host_index"),
        ("one", {"count": 2}, {}, "--host_count: does not go with --hosts=one"),
        ("slurm", {"index": 1}, SLURM, "--host_index: does not go with --hosts=slurm"),
        ("given", {"coordinator": "a:1", "count": 2, "index": 2}, {}, "host 2 of 2"),
        ("given", {"coordinator": "a:1", "count": 257, "index": 0}, {}, r"257 hosts \(by flags\): at most 256"),
        ("given", {"coordinator": "a", "count": 2, "index": 1}, {}, "--coordinator=a: not host:port"),
        ("given", {"coordinator": "a:99999", "count": 2, "index": 1}, {}, "not host:port"),
        ("jobset", {}, {"JOBSET_NAME": "run"}, "--hosts=jobset: the environment has no JOBSET_REPLICATED_JOB_NAME"),
        ("lws", {}, {**LWS, "LWS_WORKER_INDEX": "two"}, "LWS_WORKER_INDEX=two: not a number"),
        ("auto", {}, {**SLURM, "SLURM_STEP_NUM_TASKS": "24"}, "Slurm started 24 tasks on 3 nodes"),
        ("slurm", {}, {**SLURM, "SLURM_STEP_NODELIST": "[1-2]"}, r"SLURM_STEP_NODELIST=\[1-2\]: not a list of nodes"),
    ],
)
def test_what_cannot_be_is_one_line(how: str, flags, environment, told: str) -> None:
    with pytest.raises(ValueError, match=told) as raised:
        find(how, environment=environment, has_tpu=no_tpu, **flags)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"), ("a,b", "a"), ("n[003-007,12]", "n003"), ("rack1-n[9,11],x2", "rack1-n9"),
        ("gpu-[12-14].cluster", "gpu-12.cluster"),
    ],
)  # fmt: skip
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_metadata_that_nobody_tells() -> None:
    with nowhere() as host, pytest.raises(ValueError, match="--hosts=tpu: the metadata of this instance") as raised:
        find("tpu", environment={"GCE_METADATA_HOST": host}, has_tpu=no_tpu)
    assert "\n" not in str(raised.value)


@contextlib.contextmanager
def metadata(values: dict[str, str]) -> Iterator[str]:
    """A server of instance attributes; its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            value = values.get(self.path.removeprefix("/computeMetadata/v1/instance/"))
            good = value is not None and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if good else 404)
            self.end_headers()
            self.wfile.write((value or "").encode())

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_the_metadata_of_a_tpu() -> None:
    told = {
        "attributes/worker-network-endpoints": "unknown:unknown:10.0.0.5,unknown:unknown:10.0.0.6",
        "attributes/agent-worker-number": "1",
    }
    with metadata(told) as host:
        found = find("auto", environment={"GCE_METADATA_HOST": host}, has_tpu=lambda: True)
        assert found == Rank(1, 2, f"10.0.0.5:{PORT}", "TPU")
    with metadata({}) as host:  # libtpu is there, and no TPU
        assert find("auto", environment={"GCE_METADATA_HOST": host}, has_tpu=lambda: True) is None
        with pytest.raises(ValueError, match="worker-network-endpoints"):
            find("tpu", environment={"GCE_METADATA_HOST": host}, has_tpu=no_tpu)
