"""The generators of a launch: a Deployment behind a headless Service, probed on the standard health service."""

from typing import Any

from launch.kubernetes import pods
from launch.kubernetes.cluster import Launch
from launch.rendered import RenderedFile, manifest
from launch.settings import GENERATOR_METRICS_PORT, GENERATOR_PORT, generator_command
from scalerl_jax.contract.limits import STOP_SECONDS

_STOP_MARGIN_SECONDS = 10  # beyond what a server gives itself to stop
_PROBE_SECONDS = 10  # that an answer to a health check may take
_START_PROBES = 180  # health checks, 10 s apart, until a server must serve: loading and compiling take minutes


def generators(launch: Launch) -> RenderedFile:
    settings, cluster = launch.settings, launch.cluster
    assert settings.generator is not None
    labels = pods.labels(launch.name, "generator")
    volumes = [pods.claimed("models", launch.models_claim, pods.MODELS, read_only=True)]
    access = ["--insecure"]
    if not settings.insecure:
        volumes += [pods.secret("tls", launch.tls, pods.TLS), pods.secret("token", launch.token, pods.TOKEN)]
        access = [
            f"--tls_certificate={pods.TLS}/tls.crt",
            f"--tls_key={pods.TLS}/tls.key",
            f"--token_file={pods.TOKEN}/token",
        ]
    # New weights are staged there for the processes of a tensor-parallel engine: a copy of the model.
    memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    volumes.append((memory, {"name": "shared-memory", "mountPath": "/dev/shm"}))
    access += ["--metrics_host=0.0.0.0", f"--metrics_port={GENERATOR_METRICS_PORT}"]
    template = pods.pod(
        "generator",
        labels=labels,
        image=cluster.generator_image,
        command=generator_command(settings, model=launch.model, port=GENERATOR_PORT, access=access),
        environment=pods.variables(settings.generator_env),
        volumes=volumes,
        machine=settings.generator,
        nodes=cluster.generator_nodes or settings.generator.labels,
        asked=cluster.generator_resources,
        ports={"grpc": GENERATOR_PORT, "metrics": GENERATOR_METRICS_PORT},
        grace_seconds=int(STOP_SECONDS[settings.engine]) + _STOP_MARGIN_SECONDS,
        restart="Always",
        probes=probes(launch),
    )
    spec: dict[str, Any] = {
        "selector": {"matchLabels": labels},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "progressDeadlineSeconds": 10 * _START_PROBES,
        "template": template,
    }
    if cluster.autoscale == "none":  # else how many there are is the autoscaler's
        spec = {"replicas": settings.generators, **spec}
    ports = [{"name": "grpc", "port": GENERATOR_PORT}, {"name": "metrics", "port": GENERATOR_METRICS_PORT}]
    service = {"clusterIP": "None", "selector": labels, "ports": ports}
    documents = [
        (
            "Headless: its name has the address of every generator that serves, and of no other.",
            launch.document("Service", launch.fleet, spec=service),
        ),
        ("", launch.document("Deployment", launch.fleet, api="apps/v1", spec=spec)),
        (
            "A node that is emptied takes one at a time; what it was sampling is asked of the others.",
            launch.document("PodDisruptionBudget", launch.fleet, api="policy/v1",
                          spec={"maxUnavailable": 1, "selector": {"matchLabels": labels}}),
        ),
    ]  # fmt: skip
    if settings.part == "all":
        rules = [
            {"from": launch.from_trainer, "ports": [{"port": GENERATOR_PORT}]},
            {"ports": [{"port": GENERATOR_METRICS_PORT}]},
        ]
        documents.append(("Only the trainer reaches their port; their metrics are open.",
                          launch.ingress(launch.fleet, "generator", rules)))  # fmt: skip
    says = f"Generators of {launch.name}: {settings.engine} on {settings.generator.text}."
    return manifest("generators.yaml", says, *documents)


def probes(launch: Launch) -> dict[str, Any]:
    """On grpc.health.v1: the kubelet's own where a call needs nothing, else a client that has token and TLS."""
    if launch.settings.insecure:
        probe: dict[str, Any] = {"grpc": {"port": GENERATOR_PORT, "service": pods.HEALTH_SERVICE}}
    else:
        command = [
            *("python", "-m", "rollout_server.health", f"--address=127.0.0.1:{GENERATOR_PORT}"),
            *(f"--tls_authority={pods.TLS}/ca.crt", f"--tls_name={launch.host}", f"--token_file={pods.TOKEN}/token"),
            f"--seconds={_PROBE_SECONDS}",
        ]
        probe = {"exec": {"command": command}}
    probe["timeoutSeconds"] = 2 * _PROBE_SECONDS
    return {
        "startupProbe": {**probe, "periodSeconds": 10, "failureThreshold": _START_PROBES},
        "readinessProbe": {**probe, "periodSeconds": 15, "failureThreshold": 2},
        "livenessProbe": {**probe, "periodSeconds": 60, "failureThreshold": 5},
    }
