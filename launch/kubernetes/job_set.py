"""The trainer of a launch: a JobSet or a LeaderWorkerSet whose hosts all run the same scalerl-train."""

import shlex
from typing import Any

from launch.kubernetes import pods
from launch.kubernetes.cluster import Launch
from launch.rendered import RenderedFile, manifest
from launch.settings import (
    COLLAPSED,
    GENERATOR_PORT,
    LEFT_ON_SIGTERM,
    READS_JSON,
    TRAINER_METRICS_PORT,
    USERS_MISTAKE,
    train_command,
)
from scalerl_jax import config_io
from scalerl_jax.environments import parts, sandbox_command

_WAIT_SECONDS = 7200  # for the first generator


def config(launch: Launch) -> RenderedFile:
    data = {"config.py": READS_JSON, "config.json": config_io.to_json(launch.settings.config)}
    says = f"""The config of {launch.name}, whole. A run goes on with a changed one where that changes nothing that is
    learned."""
    return manifest("config.yaml", says, ("", launch.document("ConfigMap", f"{launch.name}-config", data=data)))


def trainer(launch: Launch) -> RenderedFile:
    settings, cluster = launch.settings, launch.cluster
    assert settings.trainer is not None
    hosts, lws = settings.trainer.hosts, cluster.trainer_kind == "lws"
    volumes = [
        pods.claimed("runs", launch.runs_claim, pods.RUNS),
        pods.claimed("models", launch.models_claim, pods.MODELS),
        ({"name": "config", "configMap": {"name": f"{launch.name}-config"}},
         {"name": "config", "mountPath": pods.CONFIG, "readOnly": True}),
    ]  # fmt: skip
    fleet: dict[str, str] = {}
    if not settings.insecure:
        volumes += [
            pods.secret("tls", launch.tls, pods.TLS, items=["ca.crt"]), pods.secret("token", launch.token, pods.TOKEN)
        ]  # fmt: skip
        fleet = {"tls_authority": f"{pods.TLS}/ca.crt", "token_file": f"{pods.TOKEN}/token"}
    several = hosts * cluster.slices > 1
    servers = settings.servers or f"dns:///{launch.host}:{GENERATOR_PORT}"
    command = train_command(
        settings,
        config=f"{pods.CONFIG}/config.py",
        model=launch.model,
        servers=servers,
        hosts=cluster.trainer_kind if several else "",
        metrics_host="0.0.0.0",
        fleet=fleet,
    )
    environment = {"HF_HOME": f"{pods.MODELS}/huggingface", "HF_HUB_OFFLINE": "1", **settings.trainer_env}
    judges = any(part.environment.name in ("code", "programs") for part in parts.configs(settings.config).values())
    template = pods.pod(
        "trainer",
        labels=pods.labels(launch.name, "trainer"),
        image=cluster.trainer_image,
        command=command,
        environment=[*pods.variables(environment), *([] if lws or not several else pods.jobset_variables(hosts))],
        volumes=volumes,
        machine=settings.trainer,
        nodes=cluster.trainer_nodes or settings.trainer.labels,
        asked=cluster.trainer_resources,
        ports={"metrics": TRAINER_METRICS_PORT},
        grace_seconds=settings.grace_seconds,
        restart="Always" if lws else "Never",
        before=_until_there_is_a_server(servers),
        security=sandbox_command.POD_SECURITY if judges else {},
    )
    says = f"""Trainer of {launch.name} on {settings.trainer.text}{f" x {cluster.slices}" * (cluster.slices > 1)}:
    {hosts * cluster.slices} {"hosts" if several else "host"}, each with the same command.

    SIGTERM (preemption, kubectl delete) makes it save and leave within terminationGracePeriodSeconds; started again,
    it goes on from there."""
    if judges:
        says += f"""\n\nPrograms are judged in it: {sandbox_command.POD_NEEDS}."""
    budget = {"minAvailable": hosts * cluster.slices, "selector": {"matchLabels": pods.labels(launch.name, "trainer")}}
    rules: list[dict[str, Any]] = [{"ports": [{"port": TRAINER_METRICS_PORT}]}]
    reached = "Only its metrics can be reached."
    if several:  # on ports that JAX, the accelerators' libraries and the link between hosts choose
        rules.append({"from": launch.from_trainer})
        reached = "Only its own hosts reach a host of it, on any port; the metrics are open."
    documents = [
        worker_set(launch, template) if lws else job_set(launch, template),
        (
            "A node of the trainer is not emptied while it runs: one host less stops them all.",
            launch.document("PodDisruptionBudget", f"{launch.name}-trainer", api="policy/v1", spec=budget),
        ),
        (reached, launch.ingress(f"{launch.name}-trainer", "trainer", rules)),
    ]
    return manifest("trainer.yaml", says, *documents)


def _until_there_is_a_server(servers: str) -> str:
    """Generators take minutes to load, and scalerl-train wants one to begin with. "": there is nothing to wait for."""
    name, is_name, address = servers.partition("dns:///")
    if name or not is_name:
        return ""
    host = shlex.quote(address.rpartition(":")[0])
    return f"timeout {_WAIT_SECONDS} bash -c 'until getent hosts \"$0\"; do sleep 5; done' {host}\n"


def job_set(launch: Launch, template: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    assert launch.settings.trainer is not None
    hosts, slices = launch.settings.trainer.hosts, launch.cluster.slices
    ended = {"containerName": "trainer", "operator": "In"}
    # The first that fits counts. What a Job says of itself ends with the rule's place, all that JobSet can tell by.
    rules = [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {**ended, "values": [LEFT_ON_SIGTERM]}},
        {"action": "FailJob", "onExitCodes": {**ended, "values": [USERS_MISTAKE, COLLAPSED]}},
    ]
    job = {
        "parallelism": hosts,
        "completions": hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "template": template,
    }
    over = {
        "name": "over",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [f"matching FailJob rule at index {len(rules) - 1}$"],
    }
    preempted = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": launch.settings.max_restarts, "rules": [over, preempted]},
        "replicatedJobs": [{"name": "trainer", "replicas": slices, "template": {"spec": job}}],
    }
    document = launch.document("JobSet", launch.name, api="jobset.x-k8s.io/v1alpha2", spec=spec)
    above = f"""One host that fails ends its Job, and the JobSet starts all hosts again: {launch.settings.max_restarts}
    times, and as often as they are preempted or leave at a SIGTERM ({LEFT_ON_SIGTERM}). A mistake of the user's
    ({USERS_MISTAKE}) and a policy that has collapsed ({COLLAPSED}) end it: the same again would end the same."""
    if hosts * slices > 1:
        above += f"""

        --hosts=jobset reads JOBSET_NAME, JOBSET_REPLICATED_JOB_NAME, JOBSET_REPLICAS, JOBSET_COMPLETIONS,
        JOBSET_JOB_INDEX and JOB_COMPLETION_INDEX, and NAMESPACE: this is process
        JOBSET_JOB_INDEX * JOBSET_COMPLETIONS + JOB_COMPLETION_INDEX of {hosts * slices}. Process 0, the coordinator, is
        {launch.name}-trainer-0-0.{launch.name}."""
    if launch.settings.trainer.kind == "tpu":
        # Each slice is a node pool of its own.
        document["metadata"]["annotations"] = {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        }
    return above, document


def worker_set(launch: Launch, template: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    assert launch.settings.trainer is not None
    group = {
        "size": launch.settings.trainer.hosts,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "workerTemplate": template,
    }
    spec = {"replicas": 1, "leaderWorkerTemplate": group}
    above = """One host that fails makes all start again, also after the end of the run: it then shows what came of it,
    until this is deleted. It knows no exit codes: a mistake of the user's and a policy that has collapsed start again
    too, where a JobSet ends. --hosts=lws reads LWS_LEADER_ADDRESS, LWS_GROUP_SIZE and LWS_WORKER_INDEX, which every
    container of a LeaderWorkerSet has."""
    return above, launch.document("LeaderWorkerSet", launch.name, api="leaderworkerset.x-k8s.io/v1", spec=spec)
