"""Which host of a trainer this process is, of how many, and where the first one listens.

    given     --coordinator, --host_count, --host_index
    jobset    Kubernetes JobSet: JOBSET_NAME, JOBSET_REPLICATED_JOB_NAME, JOBSET_JOB_INDEX, JOBSET_REPLICAS,
              JOBSET_COMPLETIONS, JOB_COMPLETION_INDEX; the first host is NAME-JOB-0-0.NAME
    lws       Kubernetes LeaderWorkerSet: LWS_LEADER_ADDRESS, LWS_GROUP_SIZE, LWS_WORKER_INDEX
    slurm     SLURM_STEP_NUM_TASKS and _NODES, SLURM_PROCID, SLURM_STEP_NODELIST, as srun sets them in each task
    tpu       TPU_WORKER_HOSTNAMES, TPU_WORKER_ID, else the instance's metadata; with several slices
              MEGASCALE_NUM_SLICES, MEGASCALE_SLICE_ID, MEGASCALE_COORDINATOR_ADDRESS

One process a host. If the environment names no port it is PORT, or with Slurm, whose jobs may share a node, one derived
from the job's number.
"""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Callable, Mapping

from scalerl_jax.contract.limits import MAXIMUM_PARTS
from scalerl_jax.system import maintenance

PORT = 8471
_SLURM_PORTS = (20000, 10000)  # the first, and how many
_HOST_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?):([0-9]{1,5})", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Rank:
    """coordinator: host:port at which the first host listens for the others."""

    index: int
    count: int
    coordinator: str
    found_by: str

    @property
    def first(self) -> bool:
        return self.index == 0

    def __str__(self) -> str:
        return f"host {self.index} of {self.count}, the first at {self.coordinator} (by {self.found_by})"


def find(
    how: str,
    *,
    coordinator: str = "",
    count: int = 0,
    index: int = -1,
    environment: Mapping[str, str] | None = None,
    has_tpu: Callable[[], bool] | None = None,
) -> Rank | None:
    """This process's rank; None if there is one host.

    how: one of MODES. "auto": "given" with --host_count or --host_index, else the first of FINDERS whose variables are
    set, else "one". coordinator: replaces the one found. Raises ValueError, one line, if these are incomplete or wrong.
    """
    environment = os.environ if environment is None else environment
    given = {"--coordinator": bool(coordinator), "--host_count": count > 0, "--host_index": index >= 0}
    if how == "one":
        _none_of(given, "--hosts=one")
        return None
    if how == "auto":
        how = _guess(given, environment, has_tpu or _has_tpu)
        if how == "one":
            return None
    if how == "given":
        if missing := [name for name, is_there in given.items() if not is_there]:
            raise ValueError(f"{', '.join(missing)}: needed with {', '.join(sorted(set(given) - set(missing))) or how}")
        found = Rank(index, count, coordinator, "flags")
    else:
        _none_of({name: given[name] for name in ("--host_count", "--host_index")}, f"--hosts={how}")
        found = FINDERS[how](environment)
        if coordinator:
            found = dataclasses.replace(found, coordinator=coordinator)
    if not 0 <= found.index < found.count:
        raise ValueError(f"host {found.index} of {found.count} (by {found.found_by}): the first is 0")
    if found.count > MAXIMUM_PARTS:
        raise ValueError(f"{found.count} hosts (by {found.found_by}): at most {MAXIMUM_PARTS}")
    address = _HOST_PORT.fullmatch(found.coordinator)
    if address is None or not 0 < int(address[1]) < 65536:
        raise ValueError(f"--coordinator={found.coordinator}: not host:port")
    return found if found.count > 1 else None


def _none_of(given: Mapping[str, bool], other: str) -> None:
    if there := [name for name, is_there in given.items() if is_there]:
        raise ValueError(f"{', '.join(there)}: does not go with {other}")


def _guess(given: Mapping[str, bool], environment: Mapping[str, str], has_tpu: Callable[[], bool]) -> str:
    if given["--host_count"] or given["--host_index"]:
        return "given"
    for how, variable in (("jobset", "JOBSET_NAME"), ("lws", "LWS_GROUP_SIZE"), ("slurm", "SLURM_STEP_NUM_TASKS")):
        if variable in environment:
            return how
    if "TPU_WORKER_HOSTNAMES" in environment or (has_tpu() and _answers(environment)):
        return "tpu"
    if given["--coordinator"]:
        raise ValueError("--coordinator: requires --host_count and --host_index, or --hosts")
    return "one"


def _has_tpu() -> bool:
    """Whether JAX will search for a TPU: its metadata is read only then."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return importlib.util.find_spec("libtpu") is not None and (not platforms or "tpu" in platforms)


def _jobset(environment: Mapping[str, str]) -> Rank:
    read = _reader(environment, "jobset")
    name, job = read("JOBSET_NAME"), read("JOBSET_REPLICATED_JOB_NAME")
    completions = _number(read, "JOBSET_COMPLETIONS")
    index = _number(read, "JOBSET_JOB_INDEX") * completions + _number(read, "JOB_COMPLETION_INDEX")
    count = _number(read, "JOBSET_REPLICAS") * completions
    return Rank(index, count, f"{name}-{job}-0-0.{name}:{PORT}", "JobSet")


def _lws(environment: Mapping[str, str]) -> Rank:
    read = _reader(environment, "lws")
    index, count = _number(read, "LWS_WORKER_INDEX"), _number(read, "LWS_GROUP_SIZE")
    return Rank(index, count, f"{read('LWS_LEADER_ADDRESS')}:{PORT}", "LeaderWorkerSet")


def _slurm(environment: Mapping[str, str]) -> Rank:
    read = _reader(environment, "slurm")
    first, ports = _SLURM_PORTS
    port = first + _number(read, "SLURM_JOB_ID") % ports
    index, count = _number(read, "SLURM_PROCID"), _number(read, "SLURM_STEP_NUM_TASKS")
    nodes = _number(read, "SLURM_STEP_NUM_NODES")
    if count != nodes:
        raise ValueError(f"Slurm started {count} tasks on {nodes} nodes: a host is a whole node, --ntasks-per-node=1")
    return Rank(index, count, f"{first_node(read('SLURM_STEP_NODELIST'))}:{port}", "Slurm")


def first_node(nodes: str) -> str:
    """The first node of a list as Slurm writes it: a, a,b or rack1-node[003-007,12],b. Raises ValueError."""
    found = re.match(r"([\w.-]+)(?:\[(\d+)[^\]]*\]([\w.-]*))?", nodes)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes}: not a list of nodes")
    return "".join(part or "" for part in found.groups())


def _tpu(environment: Mapping[str, str]) -> Rank:
    if "TPU_WORKER_HOSTNAMES" in environment:
        read = _reader(environment, "tpu")
        names, index = read("TPU_WORKER_HOSTNAMES").split(","), _number(read, "TPU_WORKER_ID")
    else:
        host = maintenance.host_of(environment)
        # unknown:unknown:IP of each host of the slice
        names = [entry.split(":")[-1] for entry in _metadata(host, "worker-network-endpoints").split(",")]
        try:
            index = int(_metadata(host, "agent-worker-number"))
        except ValueError as error:
            raise ValueError(f"--hosts=tpu: the metadata's agent-worker-number: {error}") from None
    slices = environment.get("MEGASCALE_NUM_SLICES", "1")
    if slices in ("", "1"):
        return Rank(index, len(names), f"{names[0]}:{PORT}", "TPU")
    read = _reader(environment, "tpu with several slices")
    index += _number(read, "MEGASCALE_SLICE_ID") * len(names)
    first = read("MEGASCALE_COORDINATOR_ADDRESS").partition(":")[0]
    return Rank(index, _number(read, "MEGASCALE_NUM_SLICES") * len(names), f"{first}:{PORT}", "TPU slices")


def _answers(environment: Mapping[str, str]) -> bool:
    """Whether this is an instance with that information: libtpu may be installed anywhere."""
    try:
        _tpu(environment)
    except ValueError:
        return False
    return True


def _metadata(host: str, name: str) -> str:
    try:
        return maintenance.read(f"attributes/{name}", host=host)
    except maintenance.FAULTS as error:
        why = getattr(error, "reason", error)
        raise ValueError(f"--hosts=tpu: the metadata of this instance ({host}, {name}): {why}") from None


def _reader(environment: Mapping[str, str], how: str) -> Callable[[str], str]:
    def read(name: str) -> str:
        if not environment.get(name):
            raise ValueError(f"--hosts={how}: the environment has no {name}")
        return environment[name]

    return read


def _number(read: Callable[[str], str], name: str) -> int:
    value = read(name)
    if not value.isdigit():
        raise ValueError(f"{name}={value}: not a number")
    return int(value)


FINDERS: dict[str, Callable[[Mapping[str, str]], Rank]] = {
    "jobset": _jobset,
    "lws": _lws,
    "slurm": _slurm,
    "tpu": _tpu,
}
MODES = ("auto", "one", "given", *FINDERS)
