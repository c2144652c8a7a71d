"""scalerl-launch --target=kubernetes: what it writes is what a cluster takes, and its parts fit each other."""

import copy
import itertools
import math
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from typing import Any

import pytest
import yaml

from launch import kubernetes, machines
from launch.settings import Settings
from scalerl_jax.config_io import load_file, parse_argv, read_argv
from scalerl_jax.environments import sandbox_command
from scalerl_jax.hosts import rank
from scalerl_jax.rollouts.servers.offences import free_capacity
from tests.launch.launched import LAUNCHES, by_kind, documents, flags_of, launch
from tests.launch.manifests import faults
from tests.support.paths import ROOT
from tests.support.processes import run_python

# ablations.py is a study of others.
CONFIGS = [path for path in sorted((pathlib.Path(ROOT) / "configs").rglob("*.py")) if path.stem != "ablations"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """Of each launch the folder that was made."""
    made = {}
    for name in LAUNCHES:
        where = tmp_path_factory.mktemp(name)
        result = launch(*flags_of(name, where), "--dry_run", "--out=made", where=where)
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        made[name] = where / "made"
    return made


# What a GPU's container does first.
DRIVERS = """\
if [[ -d /usr/local/nvidia/lib64 ]]; then
    export PATH="$PATH:/usr/local/nvidia/bin"
    export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/nvidia/lib64"
fi
exec "$0" "$@"
"""


def every(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [document for found in by_kind(folder).values() for document in found]


def template(document: dict[str, Any]) -> dict[str, Any]:
    """The pod template of a workload."""
    spec = document["spec"]
    if document["kind"] == "JobSet":
        return spec["replicatedJobs"][0]["template"]["spec"]["template"]
    return spec["leaderWorkerTemplate"]["workerTemplate"] if document["kind"] == "LeaderWorkerSet" else spec["template"]


def workloads(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [d for d in every(folder) if d["kind"] in ("JobSet", "LeaderWorkerSet", "Deployment")]


def arguments(document: dict[str, Any]) -> list[str]:
    (container,) = template(document)["spec"]["containers"]
    return container["args"]


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_object_is_what_the_schemas_want(folders: dict[str, pathlib.Path], name: str) -> None:
    found = every(folders[name])
    assert found
    assert [fault for document in found for fault in faults(document)] == []


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("JobSet", ["spec", "replicatedJobs", 0, "template", "spec", "paralelism"], 2),
        ("JobSet", ["spec", "failurePolicy", "rules", 0, "action"], "Restart"),
        ("JobSet", ["spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0, "image"], 1),
        ("Deployment", ["spec", "template", "spec", "containers", 0, "livenessProbe", "period"], 1),
        ("Certificate", ["spec", "issuerRef"], {"kind": "Issuer"}),
        ("Issuer", ["spec", "ca"], {}),
        ("ScaledObject", ["spec", "triggers", 0, "metadata", "threshold"], 5),
        ("Service", ["spec", "ports", 0, "port"], "http"),
    ],
)
def test_a_slip_is_found(folders: dict[str, pathlib.Path], kind: str, path: list[Any], value: object) -> None:
    document = copy.deepcopy(by_kind(folders["8b_tpu"])[kind][0])
    node = document
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    assert faults(document)


@pytest.mark.parametrize("name", LAUNCHES)
def test_scripts_are_sound_and_apply_every_file(folders: dict[str, pathlib.Path], name: str) -> None:
    script = folders[name] / "apply.sh"
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", script], check=True)
    text = script.read_text()
    applied = [line.partition("=")[2] for line in text.splitlines() if line.startswith("kubectl apply")]
    assert sorted(applied) == sorted(documents(folders[name]))


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_file_says_what_it_is(folders: dict[str, pathlib.Path], name: str) -> None:
    for path in folders[name].glob("*.yaml"):
        lines = path.read_text().splitlines()
        assert lines[0].startswith("# ") and len(lines[0]) > 20, path
        assert not [line for line in lines if line != line.rstrip()], path


@pytest.mark.parametrize("name", LAUNCHES)
def test_whatever_is_referred_to_is_there(folders: dict[str, pathlib.Path], name: str) -> None:
    made = by_kind(folders[name])
    names = {kind: {document["metadata"]["name"] for document in found} for kind, found in made.items()}
    certificates = {document["spec"]["secretName"] for document in made.get("Certificate", [])}
    script = (folders[name] / "apply.sh").read_text()
    for workload in workloads(folders[name]):
        spec = template(workload)["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        for volume in volumes.values():
            if "configMap" in volume:
                assert volume["configMap"]["name"] in names["ConfigMap"]
            if "secret" in volume:
                secret = volume["secret"]["secretName"]
                assert secret in certificates or f"create secret generic {secret}" in script
            if claim := volume.get("persistentVolumeClaim"):
                assert claim["claimName"] in names.get("PersistentVolumeClaim", {"filestore"}) | {"filestore"}
    for document in every(folders[name]):
        if target := document["spec"].get("scaleTargetRef") if "spec" in document else None:
            assert target["name"] in names[target["kind"]]
        assert document["metadata"]["namespace"] == ("research" if name == "tiny_hosts" else "default")


@pytest.mark.parametrize(("name", "most"), [("tiny", ""), ("8b_tpu", "--max-log-requests=16 ")])
def test_the_log_command_follows_every_host(folders: dict[str, pathlib.Path], name: str, most: str) -> None:
    assert f"logs --follow {most}--selector=" in (folders[name] / "apply.sh").read_text()


@pytest.mark.parametrize("name", LAUNCHES)
def test_selectors_select_the_pods(folders: dict[str, pathlib.Path], name: str) -> None:
    labels = [template(workload)["metadata"]["labels"] for workload in workloads(folders[name])]
    for document in every(folders[name]):
        spec = document.get("spec", {})
        if document["kind"] == "Service":
            wanted = spec["selector"]
        else:
            wanted = spec.get("podSelector", spec.get("selector", {})).get("matchLabels")
        if wanted:
            assert len([found for found in labels if wanted.items() <= found.items()]) == 1, document["kind"]


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_config_is_there_whole(folders: dict[str, pathlib.Path], name: str, tmp_path: pathlib.Path) -> None:
    (data,) = [document["data"] for document in by_kind(folders[name]).get("ConfigMap", [{"data": {}}])]
    if name == "generators":
        assert not data
        return
    for file, text in data.items():
        (tmp_path / file).write_text(text)
    given, _ = read_argv(flags_of(name, tmp_path))
    assert load_file(str(tmp_path / "config.py")) == given.config()


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_trainer_takes_its_command(folders: dict[str, pathlib.Path], name: str, tmp_path: pathlib.Path) -> None:
    if name == "generators":
        assert [workload["kind"] for workload in workloads(folders[name])] == ["Deployment"]
        return
    (trainer,) = [workload for workload in workloads(folders[name]) if workload["kind"] != "Deployment"]
    for file, text in by_kind(folders[name])["ConfigMap"][0]["data"].items():
        (tmp_path / file).write_text(text)
    told = [argument.replace(kubernetes.CONFIG, str(tmp_path)) for argument in arguments(trainer)]
    config, rest = parse_argv(told)  # fields of the config that are given as flags
    insecure = name == "tiny_insecure"
    assert (config.fleet.token_file, config.fleet.tls_authority) == (
        ("", "") if insecure else (f"{kubernetes.TOKEN}/token", f"{kubernetes.TLS}/ca.crt")
    )
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in rest)
    assert flags["servers"].startswith("dns:///")
    assert flags["workdir"].startswith("/runs/")
    assert parsed("scalerl_jax.cli.command_flags", "train", rest)


@pytest.mark.parametrize("name", [name for name in LAUNCHES if name != "trainer"])
def test_a_generator_takes_its_command(folders: dict[str, pathlib.Path], name: str) -> None:
    (generator,) = by_kind(folders[name])["Deployment"]
    assert parsed("rollout_server.serve_flags", "", arguments(generator))
    (container,) = template(generator)["spec"]["containers"]
    probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    if name == "tiny_insecure":
        assert all(probe["grpc"] == {"port": 8500, "service": "scalerl.v1.Rollout"} for probe in probes)
    else:
        assert all("rollout_server.health" in probe["exec"]["command"] for probe in probes)


def parsed(module: str, define: str, flags: list[str]) -> bool:
    """Whether a command with the flags of that module takes these, in a process of its own."""
    program = f"import sys, {module} as m; from absl import flags; {f'm.{define}();' if define else ''}"
    program += "flags.FLAGS(['command', *sys.argv[1:]])"
    result = run_python("-c", program, *flags)
    assert result.returncode == 0, result.stderr
    return True


def test_a_pod_of_hosts_knows_who_it_is(folders: dict[str, pathlib.Path]) -> None:
    (jobset,) = by_kind(folders["8b_slices"])["JobSet"]
    job = jobset["spec"]["replicatedJobs"][0]
    assert (job["name"], job["replicas"], job["template"]["spec"]["completions"]) == ("trainer", 4, 4)
    assert job["template"]["spec"]["parallelism"] == 4
    (container,) = template(jobset)["spec"]["containers"]
    variables = {variable["name"]: variable for variable in container["env"]}
    assert variables["JOBSET_COMPLETIONS"]["value"] == "4"
    paths = {n: v["valueFrom"]["fieldRef"]["fieldPath"] for n, v in variables.items() if "valueFrom" in v}
    assert paths == {
        "JOBSET_NAME": "metadata.labels['jobset.sigs.k8s.io/jobset-name']",
        "JOBSET_REPLICATED_JOB_NAME": "metadata.labels['jobset.sigs.k8s.io/replicatedjob-name']",
        "JOBSET_REPLICAS": "metadata.labels['jobset.sigs.k8s.io/replicatedjob-replicas']",
        "JOBSET_JOB_INDEX": "metadata.labels['jobset.sigs.k8s.io/job-index']",
        "JOB_COMPLETION_INDEX": "metadata.labels['batch.kubernetes.io/job-completion-index']",
        "NAMESPACE": "metadata.namespace",
    }
    assert "--hosts=jobset" in arguments(jobset)
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert template(jobset)["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    (budget,) = [b for b in by_kind(folders["8b_slices"])["PodDisruptionBudget"] if "trainer" in b["metadata"]["name"]]
    assert budget["spec"]["minAvailable"] == 16


def after(jobset: dict[str, Any], code: int, disrupted: bool) -> str:
    """What a JobSet does when a pod of it ends so, as the controllers of Job and JobSet find it."""
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert (job["backoffLimit"], job["template"]["spec"]["restartPolicy"]) == (0, "Never")
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        assert rule["action"] == "FailJob"
        if "onPodConditions" in rule:
            assert rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
            fits, said = disrupted, "has condition DisruptionTarget"
        else:
            wanted = rule["onExitCodes"]
            assert (wanted["operator"], wanted["containerName"]) == ("In", container["name"])
            fits, said = code in wanted["values"], f"failed with exit code {code}"
        if fits:
            reason, message = "PodFailurePolicy", f"Pod default/it-0 {said} matching FailJob rule at index {index}"
            break
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize("name", ["tiny", "8b_slices", "trainer"])
def test_a_jobset_starts_again_where_that_helps(folders: dict[str, pathlib.Path], name: str) -> None:
    (jobset,) = by_kind(folders[name])["JobSet"]
    assert after(jobset, 2, False) == after(jobset, 3, False) == "FailJobSet"
    assert after(jobset, 1, False) == after(jobset, 137, False) == "RestartJobSet"
    uncounted = "RestartJobSetAndIgnoreMaxRestarts"
    assert [after(jobset, code, True) for code in (1, 2, 137, 143)] == [uncounted] * 4
    assert after(jobset, 143, False) == uncounted  # another host of it was preempted


def test_every_pod_finds_its_place_among_the_hosts(folders: dict[str, pathlib.Path]) -> None:
    """What the controllers put into labels and variables, by --hosts."""
    (jobset,) = by_kind(folders["8b_slices"])["JobSet"]
    (container,) = template(jobset)["spec"]["containers"]
    found = []
    for job, completion in itertools.product(range(4), range(4)):
        labels = {
            "jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"],
            "jobset.sigs.k8s.io/replicatedjob-name": jobset["spec"]["replicatedJobs"][0]["name"],
            "jobset.sigs.k8s.io/replicatedjob-replicas": str(jobset["spec"]["replicatedJobs"][0]["replicas"]),
            "jobset.sigs.k8s.io/job-index": str(job),
            "batch.kubernetes.io/job-completion-index": str(completion),
        }
        fields = {f"metadata.labels['{name}']": value for name, value in labels.items()}
        fields["metadata.namespace"] = jobset["metadata"]["namespace"]
        environment = {
            variable["name"]: variable.get("value") or fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            for variable in container["env"]
        }
        found.append(rank.find("jobset", environment=environment))
        assert rank.find("auto", environment=environment) == found[-1]
    assert [host.index for host in found if host is not None] == list(range(16))
    assert {(host.count, host.coordinator.partition(":")[0]) for host in found if host is not None} == {
        (16, "scalerl-8b-trainer-0-0.scalerl-8b")
    }


@pytest.mark.parametrize("name", LAUNCHES)
def test_only_what_must_come_in_comes_in(folders: dict[str, pathlib.Path], name: str) -> None:
    found = {
        policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: policy["spec"]
        for policy in by_kind(folders[name]).get("NetworkPolicy", [])
    }
    # Where the generators are launched alone nobody knows from where the trainer calls.
    wanted = {"generators": set(), "trainer": {"trainer"}}.get(name, {"trainer", "generator"})
    assert found.keys() == wanted
    run = "four-hosts" if name == "tiny_hosts" else by_kind(folders[name])["PodDisruptionBudget"][0]["metadata"][
        "labels"]["app.kubernetes.io/instance"]  # fmt: skip
    trainer = [{"podSelector": {"matchLabels": kubernetes.labels(run, "trainer")}}]
    for component, spec in found.items():
        assert spec["policyTypes"] == ["Ingress"]
        open_to_all = [rule for rule in spec["ingress"] if "from" not in rule]
        assert open_to_all == [{"ports": [{"port": {"trainer": 9401, "generator": 9400}[component]}]}]
        others = [rule for rule in spec["ingress"] if "from" in rule]
        several = name not in ("tiny", "tiny_insecure", "trainer", "moe", "judging")
        if component == "generator":
            assert others == [{"from": trainer, "ports": [{"port": 8500}]}]
        else:
            assert others == ([{"from": trainer}] if several else [])


@pytest.mark.parametrize("name", LAUNCHES)
def test_profiles_are_lifted_where_programs_are_judged_alone(folders: dict[str, pathlib.Path], name: str) -> None:
    """And nothing else of a pod's rights."""
    for workload in workloads(folders[name]):
        spec = template(workload)["spec"]
        (container,) = spec["containers"]
        judges = name == "judging" and workload["kind"] == "JobSet"
        assert container.get("securityContext", {}) == (sandbox_command.POD_SECURITY if judges else {})
        assert not [key for key in spec if key.startswith("host") or key == "securityContext"]
    if name != "generators":
        text = (folders[name] / "trainer.yaml").read_text()
        said = " ".join(line.removeprefix("#").strip() for line in text.splitlines())
        assert (sandbox_command.POD_NEEDS in said) == (name == "judging")


def test_the_driver_is_added_to_what_the_image_has(folders: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    for name in LAUNCHES:
        for workload in workloads(folders[name]):
            (container,) = template(workload)["spec"]["containers"]
            gpus = "nvidia.com/gpu" in container.get("resources", {}).get("limits", {})
            assert (container["command"][:-1] == ["bash", "-euc", DRIVERS]) == gpus
            assert container["command"][-1] in ("scalerl-train", "scalerl-serve")
            assert not {variable["name"] for variable in container.get("env", [])} & {"LD_LIBRARY_PATH", "PATH"}
    driver = tmp_path / "nvidia"
    script = DRIVERS.replace("/usr/local/nvidia", str(driver))
    shown = "import os, sys; print(os.environ.get('LD_LIBRARY_PATH'), os.environ['PATH'], sys.argv[1:])"
    program = [sys.executable, "-c", shown]

    def found(**variables: str) -> str:
        command = ["bash", "-euc", script, *program, "--a=b c"]
        result = subprocess.run(
            command, env={"PATH": "/usr/bin:/bin", **variables}, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    assert found() == "None /usr/bin:/bin ['--a=b c']"
    (driver / "lib64").mkdir(parents=True)
    assert found() == f"{driver}/lib64 /usr/bin:/bin:{driver}/bin ['--a=b c']"
    assert found(LD_LIBRARY_PATH="/opt/cuda") == f"/opt/cuda:{driver}/lib64 /usr/bin:/bin:{driver}/bin ['--a=b c']"


def test_one_host_needs_no_others(folders: dict[str, pathlib.Path]) -> None:
    (jobset,) = by_kind(folders["tiny"])["JobSet"]
    assert not [argument for argument in arguments(jobset) if argument.startswith("--hosts")]
    (claim,) = [c for c in by_kind(folders["tiny"])["PersistentVolumeClaim"] if c["metadata"]["name"] == "tiny-runs"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_a_worker_set_has_all_hosts_in_one_group(folders: dict[str, pathlib.Path]) -> None:
    (group,) = by_kind(folders["8b_gpu_lws"])["LeaderWorkerSet"]
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 2
    assert "--hosts=lws" in arguments(group)
    assert template(group)["spec"]["restartPolicy"] == "Always"


def test_the_user_has_the_last_word_on_nodes(folders: dict[str, pathlib.Path]) -> None:
    selected = {w["kind"]: template(w)["spec"].get("nodeSelector") for w in workloads(folders["8b_gpu"])}
    assert selected == {"JobSet": {"pool": "big", "zone": "a"}, "Deployment": {"pool": "small"}}
    (deployment,) = by_kind(folders["8b_gpu"])["Deployment"]
    assert "replicas" not in deployment["spec"]  # the autoscaler's
    (scaler,) = by_kind(folders["8b_gpu"])["HorizontalPodAutoscaler"]
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (16, 32)
    assert scaler["spec"]["metrics"][0]["pods"]["target"]["averageValue"] == "192.0"


def asked_for(rule: dict[str, Any], *, generators: int, sampling: float) -> int:
    """Generators that a HorizontalPodAutoscaler asks for where so many completions are sampled on all together."""
    spec = rule["spec"]
    if rule["kind"] == "ScaledObject":
        (trigger,) = spec["triggers"]
        assert "sum(scalerl_generator_busy_slots{" in trigger["metadata"]["query"]
        target, least, most = trigger["metadata"]["threshold"], spec["minReplicaCount"], spec["maxReplicaCount"]
    else:
        (metric,) = spec["metrics"]
        assert metric["pods"]["metric"]["name"] == "scalerl_generator_busy_slots"
        target, least, most = metric["pods"]["target"]["averageValue"], spec["minReplicas"], spec["maxReplicas"]
    ratio = sampling / (float(target) * generators)
    wanted = generators if abs(ratio - 1) <= 0.1 else math.ceil(sampling / float(target))
    return min(max(wanted, least), most)


@pytest.mark.parametrize("kind", ["hpa", "keda"])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_generators_come_where_they_are_the_slower_side_and_go_where_they_wait(path: pathlib.Path, kind: str) -> None:
    config = load_file(str(path))
    config.distill.teachers = dict.fromkeys(config.distill.teachers, "teacher:8500")  # a launch takes no folders
    fleet, group = config.fleet, config.rollout.group_size
    # What the trainer asks of one server at most: all slots are taken, whatever waits behind them.
    held, _ = free_capacity(
        slots=fleet.slots, queue=fleet.queue, in_flight=0, finishes=[], typical_seconds=0, now=0, allowance=None,
        group_size=group,
    )  # fmt: skip
    assert held >= fleet.slots
    machine = machines.parse("cpu")
    settings = Settings(
        name="it", config=config, part="all", workdir="/runs/it", trainer=machine, generator=machine, generators=1,
        engine="jax", servers="", grace_seconds=300, max_restarts=20, insecure=True,
    )  # fmt: skip
    cluster = kubernetes.Cluster(trainer_image="t", generator_image="g", autoscale=kind, maximum_generators=6)
    files = {file.name: file.text for file in kubernetes.render(settings, cluster)}
    rule = yaml.safe_load(files["autoscaling.yaml"])
    most = kubernetes.most_in_flight(config)
    for now in range(1, 6):
        full = min(now * fleet.slots, most)
        if full == now * fleet.slots:  # all slots are busy: the trainer waits for them
            assert asked_for(rule, generators=now, sampling=full) > now
        assert asked_for(rule, generators=now + 1, sampling=0.35 * (now + 1) * fleet.slots) < now + 1
    # A trainer that keeps two and a half busy gets three or four, from either side, and they stay.
    enough = 2.5 * fleet.slots
    for now in (1, 2, 3, 5, 6):
        for _ in range(5):
            now = asked_for(rule, generators=now, sampling=min(enough, now * fleet.slots))
        assert now in (3, 4)


def test_no_secret_is_in_a_file(folders: dict[str, pathlib.Path]) -> None:
    for name, folder in folders.items():
        for path in folder.iterdir():
            assert "0123456789abcdef" not in path.read_text(), f"{name}: {path}"
        assert "Secret" not in by_kind(folder)


def test_applying_makes_the_token_once(folders: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    """apply.sh against a kubectl that keeps Secrets in files."""
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(
        f"""#!/usr/bin/env bash
printf '%s\\n' "$*" >>{tmp_path}/calls
case "$*" in
    *"get secret"*) test -e {tmp_path}/token ;;
    *"create secret"*) cat >{tmp_path}/token ;;
esac
"""
    )
    kubectl.chmod(0o755)
    for _ in range(2):
        subprocess.run(
            ["bash", folders["tiny"] / "apply.sh"], check=True, capture_output=True,
            env={"PATH": f"{kubectl.parent}:{shlex.quote('/usr/bin')}:/bin"},
        )  # fmt: skip
        token = (tmp_path / "token").read_text()
        assert len(token.strip()) == 64
    calls = (tmp_path / "calls").read_text()
    assert calls.count("create secret") == 1
    assert token.strip() not in calls
    assert calls.count("apply --filename=trainer.yaml") == 2
