"""Launch target kubernetes: a config becomes YAML files, and apply.sh, which applies them in order.

    storage.yaml       PersistentVolumeClaims: /runs (the workdir), /models
    model.yaml         --hub_model: a Job that brings model and data set to /models
    tls.yaml           an authority and a certificate for the generators, by cert-manager
    generators.yaml    a Deployment, its headless Service, a NetworkPolicy, a PodDisruptionBudget
    autoscaling.yaml   --autoscale: a HorizontalPodAutoscaler, or a ScaledObject of KEDA
    config.yaml        the config, whole, as a ConfigMap
    trainer.yaml       a JobSet (or a LeaderWorkerSet), its PodDisruptionBudget, a NetworkPolicy
    apply.sh           makes the namespace and the token's Secret, then applies these

The files are templates/kubernetes/ with the values from here. The trainer finds the generators by the name of their
Service (--servers=dns:///...), which lists exactly those that answer health checks. No secret is ever in a file here,
nor in a command line.

--autoscale: as many generators as are kept busy.

    wanted = completions being sampled / (slots of one * --busy_target)

If the generators are the slower side, every slot is busy, and the rule asks for 1 / busy_target times as many
generators. If the trainer is the slower side, some slots are idle, and the rule asks for as many generators as would
be busy to busy_target. Queue length is no signal: the trainer keeps the queues short (servers/offences.py), however
many generators there are.
"""

import dataclasses
import posixpath
import re
from typing import Any

from launch.rendered import RenderedFile, from_template
from launch.settings import (
    EXIT_CODES,
    READS_JSON,
    TRAINER_METRICS_PORT,
    Settings,
    generator_command,
    train_command,
)
from scalerl_jax import config_io
from scalerl_jax.config import Config
from scalerl_jax.contract.limits import STOP_SECONDS
from scalerl_jax.environments import parts, sandbox_command

TLS, TOKEN, CONFIG, RUNS, MODELS = "/etc/scalerl/tls", "/etc/scalerl/token", "/etc/scalerl/config", "/runs", "/models"
GENERATOR_PORT, GENERATOR_METRICS_PORT = 8500, 9400
HEALTH_SERVICE = "scalerl.v1.Rollout"  # the service of rollout.proto, as grpc.health.v1 names it
BUSY_METRIC = "scalerl_generator_busy_slots"
TOLERANCE = 0.1  # a HorizontalPodAutoscaler does not act on a relative deviation below this
BUSY_SHARE = 0.8  # of the generators' slots; 1 / BUSY_SHARE must be beyond the tolerance
_START_PROBES = 180  # health checks, 10 s apart, before a server must serve: loading and compiling take minutes
_STOP_MARGIN_SECONDS = 10  # added to the time that a server needs to stop


def most_in_flight(config: Config) -> int:
    """The most training completions in flight at once, by the rule of rollouts/pacing.py."""
    batches = config.pacing.max_off_policy_steps + (config.pacing.kind == "pipeline")
    return batches * config.rollout.prompts_per_step * config.rollout.group_size


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Settings that only Kubernetes needs; see launch_flags.py."""

    trainer_image: str = ""
    generator_image: str = ""
    namespace: str = "default"
    trainer_kind: str = "jobset"
    slices: int = 1
    storage_class: str = ""
    storage_size: str = "1Ti"
    models_size: str = "200Gi"
    runs_claim: str = ""
    models_claim: str = ""
    hub_model: str = ""
    hub_dataset: str = ""
    issuer: str = ""
    token_file: str = ""
    tls_authority: str = ""
    trainer_nodes: dict[str, str] = dataclasses.field(default_factory=dict)
    generator_nodes: dict[str, str] = dataclasses.field(default_factory=dict)
    trainer_resources: dict[str, str] = dataclasses.field(default_factory=dict)
    generator_resources: dict[str, str] = dataclasses.field(default_factory=dict)
    autoscale: str = "none"
    maximum_generators: int = 0
    busy_target: float | None = None
    prometheus: str = ""

    def check(self, settings: Settings) -> None:
        """Raises ValueError, one line that names the flag, where a setting is wrong."""
        for part, machine, image in (
            ("trainer", settings.trainer, self.trainer_image), ("generator", settings.generator, self.generator_image),
        ):  # fmt: skip
            if machine is not None and not image:
                raise ValueError(f"--{part}_image: no image given; launch/docker has the Dockerfiles to build one from")
        if not re.fullmatch("[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", self.namespace):
            raise ValueError(
                f"--namespace={self.namespace}: is no name of a namespace: lower-case letters, digits and -"
            )
        for flag in ("storage_size", "models_size"):
            _check_quantity(flag, getattr(self, flag))
        for flag in ("trainer_resources", "generator_resources"):
            for quantity in getattr(self, flag).values():
                _check_quantity(flag, quantity)
        if self.slices > 1 and (settings.trainer is None or settings.trainer.kind != "tpu"):
            raise ValueError(f"--slices={self.slices}: requires a --trainer that is a TPU slice")
        if self.slices > 1 and self.trainer_kind == "lws":
            raise ValueError(f"--slices={self.slices}: requires --trainer_kind=jobset")
        self._check_autoscaling(settings)
        if self.hub_dataset and not self.hub_model:
            raise ValueError(f"--hub_dataset={self.hub_dataset}: requires --hub_model")
        if settings.insecure:
            for flag in ("token_file", "tls_authority", "issuer"):
                if getattr(self, flag):
                    raise ValueError(f"--{flag}={getattr(self, flag)}: does not go with --insecure")
        elif settings.part != "all" and not self.token_file:
            raise ValueError(f"--part={settings.part}: --token_file must name the token that the other part has too")
        elif settings.part == "trainer" and not self.tls_authority:
            raise ValueError("--part=trainer: --tls_authority must name who signs the generators' certificates")
        if self.tls_authority and settings.part != "trainer":
            raise ValueError(f"--tls_authority={self.tls_authority}: requires --part=trainer; cert-manager makes it")
        if self.issuer and self.issuer.partition("/")[0] not in ("Issuer", "ClusterIssuer"):
            raise ValueError(f"--issuer={self.issuer}: is not Issuer/NAME or ClusterIssuer/NAME")

    @property
    def busy_share(self) -> float:
        return self.busy_target or BUSY_SHARE

    def _check_autoscaling(self, settings: Settings) -> None:
        if self.autoscale == "none":
            for flag in ("maximum_generators", "busy_target"):
                if getattr(self, flag):
                    raise ValueError(f"--{flag}: requires --autoscale=hpa or --autoscale=keda")
            return
        generators, slots = settings.generators, settings.config.fleet.slots
        if self.maximum_generators <= generators:
            raise ValueError(
                f"--maximum_generators={self.maximum_generators}: with --autoscale={self.autoscale} it must be above "
                f"--generators={generators}"
            )
        most = most_in_flight(settings.config)
        if most <= generators * slots * self.busy_share * (1 + TOLERANCE):
            raise ValueError(
                f"--generators={generators}: the run has at most {most:,} completions under way "
                "(config.pacing.max_off_policy_steps), which never keep so many busy (config.fleet.slots="
                f"{slots} each): no more would ever be started"
            )


def _check_quantity(flag: str, text: str) -> None:
    """Raises ValueError where this is no quantity of Kubernetes."""
    if not re.fullmatch(r"(\d+\.?\d*|\.\d+)(m|[kMGTPE]|[KMGTPE]i)?", text):
        raise ValueError(f"--{flag}: {text!r} is no quantity, such as 8 or 200Gi")


def render(settings: Settings, cluster: Cluster) -> list[RenderedFile]:
    """The files of a launch. Raises ValueError that names the flag where a setting is wrong."""
    cluster.check(settings)
    values = _values(settings, cluster)
    generates, trains = settings.generator is not None, settings.trainer is not None
    wanted = {
        "storage": (trains and not cluster.runs_claim) or not cluster.models_claim,
        "model": bool(cluster.hub_model),
        "tls": generates and not settings.insecure,
        "generators": generates,
        "autoscaling": generates and cluster.autoscale != "none",
        "config": trains,
        "trainer": trains,
    }
    files = [from_template(f"kubernetes/{name}.yaml", **values) for name, is_so in wanted.items() if is_so]
    needs = {
        "JobSet": trains and cluster.trainer_kind == "jobset",
        "LeaderWorkerSet": trains and cluster.trainer_kind == "lws",
        "cert-manager": wanted["tls"],
        "KEDA": cluster.autoscale == "keda",
    }
    names, needed = [file.name for file in files], [name for name, is_so in needs.items() if is_so]
    return [*files, from_template("kubernetes/apply.sh", files=names, wants=needed, **values)]


def labels(run: str, component: str = "") -> dict[str, str]:
    """Labels by which a Service, a policy or a budget selects the pods.

    component: "trainer" | "generator"; "" selects both.
    """
    found = {"app.kubernetes.io/name": "scalerl", "app.kubernetes.io/instance": run}
    return found | ({"app.kubernetes.io/component": component} if component else {})


def _values(settings: Settings, cluster: Cluster) -> dict[str, Any]:
    """The values that the templates use; `settings` and `cluster` are among them."""
    run, model = settings.name, settings.config.model.path.removeprefix("models/")
    values: dict[str, Any] = {
        "settings": settings, "cluster": cluster, "run": run, "namespace": cluster.namespace,
        "fleet": f"{run}-generators", "token": f"{run}-token", "tls": f"{run}-generators-tls",
        "host": f"{run}-generators.{cluster.namespace}.svc",  # the name under which the trainer finds the generators
        "model": posixpath.join(MODELS, model),
        "runs_claim": cluster.runs_claim or f"{run}-runs", "models_claim": cluster.models_claim or f"{run}-models",
        "labels": {"run": labels(run), **{part: labels(run, part) for part in ("trainer", "generator")}},
        "TLS": TLS, "TOKEN": TOKEN, "CONFIG": CONFIG, "RUNS": RUNS, "MODELS": MODELS,
        "GENERATOR_PORT": GENERATOR_PORT, "GENERATOR_METRICS_PORT": GENERATOR_METRICS_PORT,
        "TRAINER_METRICS_PORT": TRAINER_METRICS_PORT, "HEALTH_SERVICE": HEALTH_SERVICE, "BUSY_METRIC": BUSY_METRIC,
        **EXIT_CODES, "START_PROBES": _START_PROBES, "trainer_hosts": 0,
    }  # fmt: skip
    return values | _of_trainer(values) | _of_generators(values)


def _of_trainer(values: dict[str, Any]) -> dict[str, Any]:
    settings, cluster = values["settings"], values["cluster"]
    if settings.trainer is None:
        return {}
    hosts = settings.trainer.hosts * cluster.slices
    servers = settings.servers or f"dns:///{values['host']}:{GENERATOR_PORT}"
    name, is_name, address = servers.partition("dns:///")
    fleet = {} if settings.insecure else {"tls_authority": f"{TLS}/ca.crt", "token_file": f"{TOKEN}/token"}
    return {
        "trainer_hosts": hosts,
        "trainer_nodes": cluster.trainer_nodes or settings.trainer.labels,
        "trainer_env": {"HF_HOME": f"{MODELS}/huggingface", "HF_HUB_OFFLINE": "1", **settings.trainer_env},
        "train_command": train_command(
            settings,
            config=f"{CONFIG}/config.py",
            model=values["model"],
            servers=servers,
            hosts=cluster.trainer_kind if hosts > 1 else "",
            metrics_host="0.0.0.0",
            fleet=fleet,
        ),
        "wait_for": address.rpartition(":")[0] if is_name and not name else "",  # a DNS name that may not resolve yet
        "judges": any(
            part.environment.name in ("code", "programs") for part in parts.configs(settings.config).values()
        ),
        "pod_security": sandbox_command.POD_SECURITY,
        "pod_needs": sandbox_command.POD_NEEDS,
        "config_py": READS_JSON,
        "config_json": config_io.to_json(settings.config),
    }


def _of_generators(values: dict[str, Any]) -> dict[str, Any]:
    settings, cluster = values["settings"], values["cluster"]
    if settings.generator is None:
        return {}
    access = ["--insecure"]
    if not settings.insecure:
        access = [f"--tls_certificate={TLS}/tls.crt", f"--tls_key={TLS}/tls.key", f"--token_file={TOKEN}/token"]
    access += ["--metrics_host=0.0.0.0", f"--metrics_port={GENERATOR_METRICS_PORT}"]
    return {
        "generator_nodes": cluster.generator_nodes or settings.generator.labels,
        "generator_command": generator_command(settings, model=values["model"], port=GENERATOR_PORT, access=access),
        "stop_seconds": int(STOP_SECONDS[settings.engine]) + _STOP_MARGIN_SECONDS,
        "busy_share": cluster.busy_share,
        "busy_slots": f"{settings.config.fleet.slots * cluster.busy_share:.1f}",
        "most_in_flight": most_in_flight(settings.config),
    }
