"""What a Kubernetes cluster is told beside the settings, and what the parts of a launch are called there."""

import dataclasses
import posixpath
from typing import Any

from launch.kubernetes import pods
from launch.settings import Settings
from scalerl_jax.config import Config

TOLERANCE = 0.1  # of a HorizontalPodAutoscaler: so near to its target it leaves things as they are
BUSY_SHARE = 0.8  # of the generators' slots; 1 / BUSY_SHARE must be beyond the tolerance


def most_in_flight(config: Config) -> int:
    """Completions of training that are asked for at once at most, by rollouts/pacing.py."""
    batches = config.pacing.max_off_policy_steps + (config.pacing.kind == "pipeline")
    return batches * config.rollout.prompts_per_step * config.rollout.group_size


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What only a Kubernetes cluster needs to be told; see launch_flags.py."""

    namespace: str = "default"
    trainer_image: str = ""
    generator_image: str = ""
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
        """Raises ValueError, one line that names the flag."""
        for part, machine, image in (
            ("trainer", settings.trainer, self.trainer_image), ("generator", settings.generator, self.generator_image),
        ):  # fmt: skip
            if machine is not None and not image:
                raise ValueError(f"--{part}_image: no image given; launch/docker has the Dockerfiles to build one from")
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


class Launch:
    """A launch and what its parts are called."""

    def __init__(self, settings: Settings, cluster: Cluster):
        self.settings, self.cluster, self.name = settings, cluster, settings.name
        self.fleet = f"{self.name}-generators"
        self.host = f"{self.fleet}.{cluster.namespace}.svc"  # by which the trainer knows them
        self.model = posixpath.join(pods.MODELS, settings.config.model.path.removeprefix("models/"))
        self.runs_claim = cluster.runs_claim or f"{self.name}-runs"
        self.models_claim = cluster.models_claim or f"{self.name}-models"
        self.token, self.tls = f"{self.name}-token", f"{self.fleet}-tls"

    def document(self, kind: str, name: str, *, api: str = "v1", **parts: Any) -> dict[str, Any]:
        labels = {"app.kubernetes.io/name": "scalerl", "app.kubernetes.io/instance": self.name}
        metadata = {"name": name, "namespace": self.cluster.namespace, "labels": labels}
        return {"apiVersion": api, "kind": kind, "metadata": metadata, **parts}

    def ingress(self, name: str, component: str, rules: list[dict[str, Any]]) -> dict[str, Any]:
        """A NetworkPolicy: what may come in at the pods of a component, and nothing else."""
        spec = {
            "podSelector": {"matchLabels": pods.labels(self.name, component)},
            "policyTypes": ["Ingress"],
            "ingress": rules,
        }
        return self.document("NetworkPolicy", name, api="networking.k8s.io/v1", spec=spec)

    @property
    def from_trainer(self) -> list[dict[str, Any]]:
        return [{"podSelector": {"matchLabels": pods.labels(self.name, "trainer")}}]
