"""Launch target slurm: a config becomes two batch scripts, and submit.sh, which submits them.

    config.py, config.json   the config, whole
    generators.sbatch        a job array, each element one generator: it picks a free port, writes its address into
                             addresses/, and is requeued when it is preempted or its time is up
    trainer.sbatch           the same scalerl-train on every host under srun; it watches the file `servers`, which is
                             rebuilt from addresses/ whenever a generator starts or ends
    submit.sh                submits both

addresses/, servers and logs/ are in WORKDIR-launch. This folder, the workdir and all files named must be on a file
system that all nodes see. SIGTERM before the time limit (--signal) or at a preemption makes the trainer save and exit
with code 143; the script then requeues the job, and the same command continues from the checkpoint. After failures it
does the same, --max_restarts times; a user's mistake (code 2) ends the job, and so does a policy that has collapsed
(code 3, checkpoint.on_collapse).
"""

import dataclasses
import os
import re
from typing import Any

from launch.rendered import RenderedFile, from_template
from launch.settings import EXIT_CODES, READS_JSON, Settings, generator_command, train_command
from scalerl_jax import config_io

_OPTION = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(=[^\n]+)?")
# Options that the scripts set: the flag that sets each (PART: trainer or generator); "": no flag.
_OURS = {
    "job-name": "name", "partition": "partition", "account": "account", "time": "time", "nodes": "PART",
    "gpus-per-node": "PART", "array": "generators", "mem": "PART_memory", "cpus-per-task": "PART_cpus",
    **dict.fromkeys(("output", "open-mode", "ntasks-per-node", "ntasks", "exclusive", "requeue", "signal"), ""),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Queue:
    """Settings that only Slurm needs; see launch_flags.py."""

    partition: str = ""
    generator_partition: str = ""
    account: str = ""
    time: str = "24:00:00"
    trainer_cpus: int = 0
    trainer_memory: str = "0"
    generator_cpus: int = 0
    generator_memory: str = ""
    trainer_sbatch: tuple[str, ...] = ()
    generator_sbatch: tuple[str, ...] = ()
    setup: str = ""
    generator_setup: str = ""
    token_file: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_authority: str = ""
    tls_name: str = ""

    def check(self, settings: Settings) -> None:
        """Raises ValueError, one line that names the flag, where a setting is wrong."""
        for part, machine in (("trainer", settings.trainer), ("generator", settings.generator)):
            if machine is not None and machine.kind == "tpu":
                raise ValueError(f"--{part}={machine.text}: TPUs are in Kubernetes clusters; with slurm GPUs or cpu")
        if re.search(r"[\s\"'\\%]", settings.workdir):
            raise ValueError(f"--workdir={settings.workdir}: sbatch writes no log where there are blanks, quotes or %")
        files = {"token_file": self.token_file}
        if settings.trainer is not None:
            files["tls_authority"] = self.tls_authority
        if settings.generator is not None:
            files |= {"tls_certificate": self.tls_certificate, "tls_key": self.tls_key}
        for flag, path in files.items():
            if settings.insecure and path:
                raise ValueError(f"--{flag}={path}: does not go with --insecure")
            if not settings.insecure and not path:
                raise ValueError(
                    f"--{flag}: not given; without TLS and a token, where every client on the network may replace "
                    "the weights: --insecure"
                )
        for flag in ("trainer_memory", "generator_memory"):
            if (value := getattr(self, flag)) and not re.fullmatch(r"\d+[KMGT]?", value):
                raise ValueError(f"--{flag}={value}: is not written like 512G")
        if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}|infinite|unlimited", self.time, re.IGNORECASE):
            raise ValueError(f"--time={self.time}: is not written like 24:00:00 or 2-12:00 (days-hours:minutes)")
        for flag in ("partition", "generator_partition", "account"):
            if not re.fullmatch(r"[^\s\"'\\]*", value := getattr(self, flag)):
                raise ValueError(f"--{flag}={value}: no such name: it has blanks or quotes")
        for flag in ("trainer_sbatch", "generator_sbatch"):
            for option in getattr(self, flag):
                _check_option(flag, option)


def _check_option(flag: str, option: str) -> None:
    """Raises ValueError where this is no option of sbatch, or one that the scripts set."""
    found = _OPTION.fullmatch(option)
    if found is None:
        raise ValueError(f"--{flag}={option}: is no option of sbatch, written like --{flag}=--qos=long")
    if (name := found["name"]) in _OURS:
        by = _OURS[name].replace("PART", flag.removesuffix("_sbatch"))
        why = f"goes by --{by}" if by else "is the script's own"
        raise ValueError(f"--{flag}={option}: --{name} {why}")


def render(settings: Settings, queue: Queue, *, folder: str) -> list[RenderedFile]:
    """The files of a launch. folder: absolute, where they will be.

    Raises ValueError that names the flag where a setting is wrong.
    """
    queue.check(settings)
    # Folder of the jobs' addresses and logs; it outlives the files here.
    state = f"{settings.workdir}-launch"
    values: dict[str, Any] = {"settings": settings, "queue": queue, "folder": folder, "state": state, **EXIT_CODES}
    values["start"] = os.getcwd()  # where relative paths of the config begin
    model = os.path.abspath(settings.config.model.path)
    made = []
    if settings.generator is not None:
        access = ["--insecure"]
        if not settings.insecure:
            access = [
                f"--tls_certificate={queue.tls_certificate}",
                f"--tls_key={queue.tls_key}",
                f"--token_file={queue.token_file}",
            ]
        command = generator_command(settings, model=model, port=0, access=access)
        made.append(from_template("slurm/generators.sbatch", generator_command=command, **values))
    if settings.trainer is not None:
        fleet = {}
        if not settings.insecure:
            fleet = {"tls_authority": queue.tls_authority, "token_file": queue.token_file}
            fleet |= {"tls_name": queue.tls_name} if queue.tls_name else {}
        command = train_command(
            settings,
            config=f"{folder}/config.py",
            model=model,
            servers=settings.servers or f"file:{state}/servers",
            hosts="slurm" if settings.trainer.hosts > 1 else "",
            metrics_host="127.0.0.1",
            fleet=fleet,
        )
        made += [
            RenderedFile("config.py", "The config of the run: reads config.json.", READS_JSON),
            RenderedFile("config.json", "The config, whole.", config_io.to_json(settings.config)),
            from_template("slurm/trainer.sbatch", train_command=command, **values),
        ]
    scripts = [file.name for file in made if file.name.endswith(".sbatch")]
    return [*made, from_template("slurm/submit.sh", scripts=scripts, **values)]
