"""The volumes of a launch, and the Job that brings a model to them."""

import shlex
from typing import Any

from launch.kubernetes import pods
from launch.kubernetes.cluster import Launch
from launch.rendered import RenderedFile, manifest

MODEL_FILE = "model.yaml"
DOWNLOAD_HOURS = 6  # until a model must be there


def claims(launch: Launch) -> list[tuple[str, dict[str, Any]]]:
    cluster, made = launch.cluster, []
    several = launch.settings.trainer is not None and launch.settings.trainer.hosts * cluster.slices > 1
    if launch.settings.trainer is not None and not cluster.runs_claim:
        mode = "ReadWriteMany" if several else "ReadWriteOnce"
        above = "Of the run: config, metrics, checkpoints. " + (
            "Every host of the trainer writes its part of a checkpoint here." if several else ""
        )
        made.append((above, claim(launch, launch.runs_claim, mode, cluster.storage_size)))
    if not cluster.models_claim:
        above = "Of models and data sets, which trainer and generators read. Its class must allow ReadWriteMany."
        made.append((above, claim(launch, launch.models_claim, "ReadWriteMany", cluster.models_size)))
    return made


def claim(launch: Launch, name: str, mode: str, size: str) -> dict[str, Any]:
    spec: dict[str, Any] = {"accessModes": [mode], "resources": {"requests": {"storage": size}}}
    if launch.cluster.storage_class:
        spec["storageClassName"] = launch.cluster.storage_class
    return launch.document("PersistentVolumeClaim", name, spec=spec)


def storage(launch: Launch) -> RenderedFile:
    return manifest("storage.yaml", f"Volumes of {launch.name}. They outlive the run, and are deleted by hand.",
                    *claims(launch))  # fmt: skip


def model_job(launch: Launch) -> RenderedFile:
    cluster = launch.cluster
    lines = [f"hf download {shlex.quote(cluster.hub_model)} --local-dir={shlex.quote(launch.model)}"]
    if cluster.hub_dataset:
        lines.append(f"hf download {shlex.quote(cluster.hub_dataset)} --repo-type=dataset")
    container = {
        "name": "download",
        "image": cluster.trainer_image or cluster.generator_image,
        "command": ["bash", "-euc", "\n".join(lines) + "\n"],
        "env": [
            {"name": "HF_HOME", "value": f"{pods.MODELS}/huggingface"},
            {
                "name": "HF_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": "huggingface", "key": "token", "optional": True}},
            },
        ],
    }
    volume, mount = pods.claimed("models", launch.models_claim, pods.MODELS)
    spec = {
        "automountServiceAccountToken": False,
        "restartPolicy": "OnFailure",
        "containers": [{**container, "volumeMounts": [mount]}],
        "volumes": [volume],
    }
    job = launch.document(
        "Job", f"{launch.name}-model", api="batch/v1", spec={"backoffLimit": 6, "template": {"spec": spec}}
    )
    says = f"""Brings {cluster.hub_model} to {launch.model} on the volume of models.

    A model that asks for a login needs a Secret "huggingface" with the key "token"."""
    return manifest(MODEL_FILE, says, ("", job))
