"""Parts of pods that the trainer and the generators have in common, as plain values of the Kubernetes API."""

from collections.abc import Mapping, Sequence
from typing import Any

from launch.machines import Machine

TLS, TOKEN, CONFIG, RUNS, MODELS = "/etc/scalerl/tls", "/etc/scalerl/token", "/etc/scalerl/config", "/runs", "/models"
HEALTH_SERVICE = "scalerl.v1.Rollout"  # of rollout.proto, as grpc.health.v1 knows it

# Nodes of GKE have NVIDIA's driver there, and a process finds it by these two alone. As variables of the pod they would
# take the place of the image's own.
DRIVERS = """\
if [[ -d /usr/local/nvidia/lib64 ]]; then
    export PATH="$PATH:/usr/local/nvidia/bin"
    export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/nvidia/lib64"
fi
exec "$0" "$@"
"""

# The label of JobSet and Job -> the variable that scalerl-train --hosts=jobset reads.
_OF_JOBSET = {
    "JOBSET_NAME": "jobset.sigs.k8s.io/jobset-name",
    "JOBSET_REPLICATED_JOB_NAME": "jobset.sigs.k8s.io/replicatedjob-name",
    "JOBSET_REPLICAS": "jobset.sigs.k8s.io/replicatedjob-replicas",
    "JOBSET_JOB_INDEX": "jobset.sigs.k8s.io/job-index",
    "JOB_COMPLETION_INDEX": "batch.kubernetes.io/job-completion-index",
}


def labels(name: str, component: str) -> dict[str, str]:
    """By which a Service, a policy or a budget finds the pods. component: "trainer" | "generator"."""
    return {
        "app.kubernetes.io/name": "scalerl",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": component,
    }


def variables(values: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in values.items()]


def jobset_variables(completions: int) -> list[dict[str, Any]]:
    """What tells a host of a JobSet who it is. completions: hosts of one of its Jobs."""
    return [
        *(_field(name, f"metadata.labels['{label}']") for name, label in _OF_JOBSET.items()),
        {"name": "JOBSET_COMPLETIONS", "value": str(completions)},
        _field("NAMESPACE", "metadata.namespace"),
    ]


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def resources(machine: Machine, asked: Mapping[str, str]) -> dict[str, Any]:
    """What a container takes of its node: all of its accelerators, and what the user asks for beside them."""
    found: dict[str, Any] = {"requests": dict(asked)} if asked else {}
    if machine.devices_of_host:
        found["limits"] = {machine.resource: machine.devices_of_host}
    return {"resources": found} if found else {}


def claimed(name: str, claim: str, path: str, *, read_only: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """(volume, mount) of a PersistentVolumeClaim."""
    source: dict[str, Any] = {"claimName": claim}
    mount: dict[str, Any] = {"name": name, "mountPath": path}
    if read_only:
        source["readOnly"] = mount["readOnly"] = True
    return {"name": name, "persistentVolumeClaim": source}, mount


def secret(name: str, of: str, path: str, *, items: Sequence[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """(volume, mount) of a Secret, which only the container's user can read. items: only these keys of it."""
    source: dict[str, Any] = {"secretName": of, "defaultMode": 0o400}
    if items:
        source["items"] = [{"key": item, "path": item} for item in items]
    return {"name": name, "secret": source}, {"name": name, "mountPath": path, "readOnly": True}


def pod(
    name: str,
    *,
    labels: Mapping[str, str],
    image: str,
    command: Sequence[str],
    environment: Sequence[Mapping[str, Any]],
    volumes: Sequence[tuple[dict[str, Any], dict[str, Any]]],
    machine: Machine,
    nodes: Mapping[str, str],
    asked: Mapping[str, str],
    ports: Mapping[str, int],
    grace_seconds: int,
    restart: str,
    probes: Mapping[str, Any] = {},
    before: str = "",
    security: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """A pod template of one container. ports: "metrics" is where Prometheus finds it. before: a shell command
    that must have ended well before it starts; "": none. security: the container's context."""
    container: dict[str, Any] = {
        "name": name,
        "image": image,
        "workingDir": "/",
        "command": [*(("bash", "-euc", DRIVERS) if machine.kind == "gpu" else ()), command[0]],
        "args": list(command[1:]),
        "env": [dict(variable) for variable in environment],
        "ports": [{"name": port, "containerPort": number} for port, number in ports.items()],
        **resources(machine, asked),
        **probes,
        **({"securityContext": dict(security)} if security else {}),
        "volumeMounts": [mount for _, mount in volumes],
    }
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": grace_seconds,
    }
    if nodes:
        spec["nodeSelector"] = dict(nodes)
    if machine.devices_of_host:
        # Nodes with accelerators keep everything else away.
        spec["tolerations"] = [{"key": machine.resource, "operator": "Exists", "effect": "NoSchedule"}]
    if before:
        spec["initContainers"] = [{"name": "wait", "image": image, "command": ["bash", "-euc", before]}]
    spec |= {"containers": [container], "volumes": [volume for volume, _ in volumes]}
    scraped = {"prometheus.io/scrape": "true", "prometheus.io/port": str(ports["metrics"])}
    return {"metadata": {"labels": dict(labels), "annotations": scraped}, "spec": spec}
